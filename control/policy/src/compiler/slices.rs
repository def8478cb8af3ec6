//! Endpoint slices: addresses and localities of the endpoints of each Service.

use std::net::IpAddr;

use foldhash::HashSet;

use super::gateways::Locality;
use super::inventory::{Inventory, NamespacedName};
use super::pods::{CoveredAddress, Pods};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::SliceEndpoint;

/// The endpoints of every Service, including Services without a manifest.
#[derive(Debug)]
pub(super) struct Slices<'a> {
    inventory: &'a Inventory<'a>,
    pods: &'a Pods<'a>,
}

impl<'a> Slices<'a> {
    pub(super) fn new(inventory: &'a Inventory<'a>, pods: &'a Pods<'a>) -> Self {
        Self { inventory, pods }
    }

    /// The subset of `addresses` that are endpoints of any Service.
    pub(super) fn endpoints_among(&self, addresses: &HashSet<IpAddr>) -> HashSet<IpAddr> {
        let all = self.inventory.slices().flat_map(|slice| &slice.body.endpoints);
        all.map(|endpoint| endpoint.address).filter(|address| addresses.contains(address)).collect()
    }

    /// Warns of endpoints of a Service with a host address: the egress policy doesn't cover their traffic.
    pub(super) fn warn_about_hosts(&self, service: NamespacedName<'a>, diagnostics: &mut Vec<Diagnostic>) {
        for slice in self.inventory.slices_of(service) {
            for endpoint in &slice.body.endpoints {
                if let Some(host) = self.pods.host_of(endpoint.address) {
                    let reason = format!(
                        "{} is a host address ({host}), not a pod address: ignored for egress",
                        endpoint.address
                    );
                    diagnostics.push(slice.warning(Code::HostAddress, &endpoint.field(), reason));
                }
            }
        }
    }

    /// The endpoints of a Service, without host addresses.
    pub(super) fn covered_endpoints(&self, service: NamespacedName<'a>) -> Vec<CoveredAddress<'a>> {
        let slices = self.inventory.slices_of(service);
        let mut covers = Vec::with_capacity(slices.clone().map(|slice| slice.body.endpoints.len()).sum());
        let endpoints = slices.flat_map(|slice| &slice.body.endpoints);
        let own = endpoints.filter(|endpoint| self.pods.host_of(endpoint.address).is_none());
        covers.extend(own.map(|it| CoveredAddress {
            address: it.address,
            name: &it.pod,
            locality: self.locality_of(it),
        }));
        covers
    }

    /// Locality of an endpoint: from its slice, else from its pod.
    pub(super) fn locality_of(&self, endpoint: &'a SliceEndpoint) -> Locality<'a> {
        let (node, zone) = (endpoint.node.as_deref(), endpoint.zone.as_deref());
        if node.or(zone).is_some() { self.pods.locality(node, zone) } else { self.pods.locality_of(endpoint.address) }
    }
}
