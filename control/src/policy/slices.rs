//! Endpoint slices: the pods behind each Service.

use std::net::IpAddr;

use foldhash::HashSet;

use super::gateways::Place;
use super::inventory::{Inventory, Key};
use super::pods::{Cover, Pods};
use crate::complaint::Complaint;
use crate::manifest::SliceEndpoint;

/// The endpoints of every Service, known or not.
#[derive(Debug)]
pub(super) struct Slices<'a> {
    inventory: &'a Inventory<'a>,
    pods: &'a Pods<'a>,
}

impl<'a> Slices<'a> {
    pub(super) fn new(inventory: &'a Inventory<'a>, pods: &'a Pods<'a>) -> Self {
        Self { inventory, pods }
    }

    /// Those of some addresses that are endpoints of any Service.
    pub(super) fn among(&self, addresses: &HashSet<IpAddr>) -> HashSet<IpAddr> {
        let all = self.inventory.slices().flat_map(|slice| &slice.body.endpoints);
        all.map(|endpoint| endpoint.address).filter(|address| addresses.contains(address)).collect()
    }

    /// Complains about the addresses behind a Service that are hosts': what they send is not covered by its policy.
    pub(super) fn complain_about_hosts(&self, service: Key<'a>, log: &mut Vec<Complaint>) {
        for slice in self.inventory.slices_of(service) {
            for endpoint in &slice.body.endpoints {
                if let Some(host) = self.pods.host_of(endpoint.address) {
                    let reason =
                        format!("{} is an address of {host}, not a pod's own: left out of egress", endpoint.address);
                    log.push(slice.warning(&endpoint.field(), reason));
                }
            }
        }
    }

    /// The endpoints of a Service that have addresses of their own.
    pub(super) fn of(&self, service: Key<'a>) -> Vec<Cover<'a>> {
        let slices = self.inventory.slices_of(service);
        let mut covers = Vec::with_capacity(slices.iter().map(|slice| slice.body.endpoints.len()).sum());
        let endpoints = slices.iter().flat_map(|slice| &slice.body.endpoints);
        let own = endpoints.filter(|endpoint| self.pods.host_of(endpoint.address).is_none());
        covers.extend(own.map(|it| Cover { address: it.address, name: &it.pod, place: self.place_of(it) }));
        covers
    }

    /// Where an endpoint is, as its slice says, or its pod.
    pub(super) fn place_of(&self, endpoint: &'a SliceEndpoint) -> Place<'a> {
        let (node, zone) = (endpoint.node.as_deref(), endpoint.zone.as_deref());
        if node.or(zone).is_some() { self.pods.place(node, zone) } else { self.pods.place_of(endpoint.address) }
    }
}
