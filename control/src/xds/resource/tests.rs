//! Resources: what is encoded comes back, what means nothing is refused with its field, and versions name content.

mod arbitrary;
mod bad;
mod round;
mod versions;

use std::net::IpAddr;

use proptest::prelude::*;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, EgressSpec, EndpointSpec, Limits, OnExhaustion, VipSpec,
};

use super::*;
use crate::policy::{Blocks, Deal, DealtEndpoint, DealtVip, Peer, Share};
use crate::xds::fixtures::ip;
