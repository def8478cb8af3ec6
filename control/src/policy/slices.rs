//! Endpoint slices: the pods behind each Service.

use std::net::IpAddr;

use foldhash::HashSet;

use super::gateways::Place;
use super::inventory::{Inventory, Key, Located};
use super::pods::{Cover, Pods};
use crate::complaint::Complaint;
use crate::manifest::{EndpointSlice, SliceEndpoint};

/// The endpoints of every Service, known or not.
#[derive(Debug)]
pub(super) struct Slices<'a> {
    inventory: &'a Inventory<'a>,
    pods: &'a Pods<'a>,
}

impl<'a> Slices<'a> {
    pub(super) fn new(inventory: &'a Inventory<'a>, pods: &'a Pods<'a>, log: &mut Vec<Complaint>) -> Self {
        for slice in inventory.slices() {
            complain_about_hosts(*slice, pods, log);
        }
        Self { inventory, pods }
    }

    /// Those of some addresses that are endpoints of any Service.
    pub(super) fn among(&self, addresses: &HashSet<IpAddr>) -> HashSet<IpAddr> {
        let all = self.inventory.slices().flat_map(|slice| &slice.body.endpoints);
        all.map(|endpoint| endpoint.address)
            .filter(|address| addresses.contains(address) && self.pods.host_of(*address).is_none())
            .collect()
    }

    /// The endpoints of a Service.
    pub(super) fn of(&self, service: Key<'a>) -> Vec<Cover<'a>> {
        let slices = self.inventory.slices_of(service);
        let mut covers = Vec::with_capacity(slices.iter().map(|slice| slice.body.endpoints.len()).sum());
        let endpoints = slices.iter().flat_map(|slice| &slice.body.endpoints);
        let own = endpoints.filter(|endpoint| self.pods.host_of(endpoint.address).is_none());
        covers.extend(own.map(|it| Cover { address: it.address, name: &it.pod, place: self.place_of(it) }));
        covers
    }

    fn place_of(&self, endpoint: &'a SliceEndpoint) -> Place<'a> {
        let (node, zone) = (endpoint.node.as_deref(), endpoint.zone.as_deref());
        if node.or(zone).is_some() { self.pods.place(node, zone) } else { self.pods.place_of(endpoint.address) }
    }
}

fn complain_about_hosts(slice: Located<'_, EndpointSlice>, pods: &Pods<'_>, log: &mut Vec<Complaint>) {
    for endpoint in &slice.body.endpoints {
        if let Some(host) = pods.host_of(endpoint.address) {
            let reason = format!("{} is an address of {host}, not a pod's own: left out", endpoint.address);
            log.push(slice.warning(&endpoint.field(), reason));
        }
    }
}
