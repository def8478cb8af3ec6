//! Resources: what is encoded comes back, what means nothing is refused with its field, and versions name content.

mod arbitrary;
mod bad;
mod round;
mod services;
mod versions;

use std::net::IpAddr;

use proptest::prelude::*;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, BackendState, EgressSpec, EndpointSpec, Limits, OnExhaustion, Scope, ServicePortSpec,
    VipSpec,
};

use super::*;
use crate::manifest::Hints;
use crate::policy::{Blocks, Deal, DealtBackend, DealtEndpoint, DealtService, DealtVip, Peer, Share};
use crate::xds::fixtures::ip;
