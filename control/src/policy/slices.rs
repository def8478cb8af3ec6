//! Endpoint slices: the pods behind each Service. Those that aren't ready count too: a pod that starts or ends calls out
//! like any other, and must never leave with its own address.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashSet;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};

use super::address::{Family, unusable};
use super::gateways::Place;
use super::inventory::{Inventory, Key, Located};
use super::pods::{Cover, Pods};
use crate::complaint::Complaint;

/// The endpoints of every Service, known or not.
#[derive(Debug)]
pub(super) struct Slices<'a> {
    by_service: BTreeMap<Key<'a>, Vec<Listed<'a>>>,
}

#[derive(Debug)]
struct Listed<'a> {
    address: IpAddr,
    name: Arc<str>,
    place: Place<'a>,
}

impl<'a> Slices<'a> {
    pub(super) fn new(inventory: &Inventory<'a>, pods: &Pods<'a>, log: &mut Vec<Complaint>) -> Self {
        let mut slices = Self { by_service: BTreeMap::new() };
        for (service, of) in &inventory.slices {
            let endpoints = slices.by_service.entry(*service).or_default();
            for slice in of {
                read(*slice, pods, endpoints, log);
            }
        }
        slices
    }

    /// Those of some addresses that are endpoints of any Service.
    pub(super) fn among(&self, addresses: &HashSet<IpAddr>) -> HashSet<IpAddr> {
        let all = self.by_service.values().flatten().map(|listed| listed.address);
        all.filter(|address| addresses.contains(address)).collect()
    }

    /// The endpoints of a Service.
    pub(super) fn of(&'a self, service: Key<'a>) -> Vec<Cover<'a>> {
        let endpoints = self.by_service.get(&service).map(Vec::as_slice).unwrap_or_default();
        endpoints.iter().map(|it| Cover { address: it.address, name: &it.name, place: it.place }).collect()
    }
}

fn read<'a>(
    slice: Located<'a, EndpointSlice>,
    pods: &Pods<'a>,
    endpoints: &mut Vec<Listed<'a>>,
    log: &mut Vec<Complaint>,
) {
    let family = match slice.body.address_type.as_str() {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => {
            return log.push(slice.warning("addressType", "endpoints with names instead of addresses are not covered"));
        }
        other => {
            return log.push(slice.error("addressType", format!("`{other}` is unknown, expected IPv4, IPv6 or FQDN")));
        }
    };
    for (i, endpoint) in slice.body.endpoints.iter().enumerate() {
        for (j, text) in endpoint.addresses.iter().enumerate() {
            let field = || format!("endpoints[{i}].addresses[{j}]");
            let Ok(address) = text.parse::<IpAddr>() else {
                log.push(slice.error(&field(), format!("`{text}` is no address")));
                continue;
            };
            if Family::of(address) != family {
                log.push(slice.error(&field(), format!("{address} is not {family}, the slice's addressType")));
            } else if let Some(what) = unusable(address) {
                log.push(slice.error(&field(), format!("{address} is {what}")));
            } else if let Some(host) = pods.host_of(address) {
                log.push(
                    slice.warning(&field(), format!("{address} is an address of {host}, not a pod's own: left out")),
                );
            } else {
                let (node, zone) = (endpoint.node_name.as_deref(), endpoint.zone.as_deref());
                let place = if node.or(zone).is_some() { pods.place(node, zone) } else { pods.place_of(address) };
                endpoints.push(Listed { address, name: name(endpoint, &slice.id.namespace), place });
            }
        }
    }
}

fn name(endpoint: &Endpoint, namespace: &str) -> Arc<str> {
    let target = endpoint.target_ref.as_ref().filter(|target| target.kind.as_deref() == Some("Pod"));
    let pod =
        target.and_then(|target| Some((target.namespace.as_deref().unwrap_or(namespace), target.name.as_deref()?)));
    pod.map(|(namespace, name)| format!("{namespace}/{name}")).unwrap_or_default().into()
}
