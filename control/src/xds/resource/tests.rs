//! Resource tests: round trips, errors of invalid resources, versions.

mod arbitrary;
mod invalid;
mod invalid_private_addresses;
mod invalid_services;
mod round_trip;
mod versions;

use std::net::IpAddr;

use proptest::prelude::*;
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, BackendState, BlockSet, EgressSpec, EndpointSpec, Keyed, Limits, OnExhaustion, Scope,
    ServicePortSpec, ShardSpec, VipSpec,
};
use vipgate_policy::compiler::{Cluster, MAX_BACKUPS, Peer, PlacedBackend, PlacedService, Placement, Table};
use vipgate_policy::manifest::{Hints, UncoveredAction};

use super::*;
use crate::xds::fixtures::ip;
