//! Resources: what is encoded comes back, what means nothing is refused with its field, and versions name content.

mod arbitrary;
mod bad;
mod round;
mod services;
mod versions;

use std::net::IpAddr;

use proptest::prelude::*;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, BackendState, BlockSet, EgressSpec, EndpointSpec, Limits, OnExhaustion, Scope,
    ServicePortSpec, ShareSpec, VipSpec,
};

use super::*;
use crate::manifest::{Hints, Uncovered};
use crate::policy::{Cluster, Deal, DealtBackend, DealtService, MOST_BACKUPS, Peer};
use crate::xds::fixtures::ip;
