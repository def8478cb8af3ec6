//! Pods: who has which address, and whom a selector selects.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::gateways::Place;
use super::inventory::{Inventory, Located};
use crate::complaint::Complaint;
use crate::manifest::{DEFAULT_WEIGHT, Pod, PodSelector};

/// Label of a node with its zone.
pub(super) const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// A pod's address on its way to a policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cover<'a> {
    pub(super) address: IpAddr,
    /// `namespace/pod`; empty where nothing names it.
    pub(super) name: &'a Arc<str>,
    pub(super) place: Place<'a>,
}

/// The pods that have addresses of their own, and the addresses of hosts.
#[derive(Debug)]
pub(super) struct Pods<'a> {
    namespaces: BTreeMap<&'a str, Namespace<'a>>,
    by_address: HashMap<IpAddr, (Arc<str>, Place<'a>)>,
    hosts: HashMap<IpAddr, &'a Arc<str>>,
    /// Zones of nodes.
    zones: HashMap<&'a str, &'a str>,
    /// Weights of pods that don't have the usual one, by `namespace/pod`.
    weights: HashMap<Arc<str>, u16>,
}

#[derive(Debug)]
struct Namespace<'a> {
    labels: BTreeMap<String, String>,
    pods: Vec<Live<'a>>,
}

#[derive(Debug)]
struct Live<'a> {
    name: Arc<str>,
    pod: &'a Pod,
    place: Place<'a>,
}

impl<'a> Pods<'a> {
    pub(super) fn new(inventory: &Inventory<'a>, log: &mut Vec<Complaint>) -> Self {
        let mut pods = Self {
            namespaces: BTreeMap::new(),
            by_address: HashMap::new(),
            hosts: HashMap::new(),
            zones: HashMap::new(),
            weights: HashMap::new(),
        };
        for node in &inventory.nodes {
            let zone = node.body.metadata.labels.as_ref().and_then(|labels| labels.get(ZONE_LABEL));
            pods.zones.extend(zone.map(|zone| (node.id.name.as_str(), zone.as_str())));
            let addresses = node.body.status.iter().flat_map(|status| status.addresses.iter().flatten());
            for address in addresses.filter_map(|address| address.address.parse().ok()) {
                pods.hosts.insert(address, node.name);
            }
        }
        for pod in &inventory.pods {
            pods.add(*pod, inventory, log);
        }
        pods
    }

    fn add(&mut self, pod: Located<'a, Pod>, inventory: &Inventory<'a>, log: &mut Vec<Complaint>) {
        if pod.body.weight != DEFAULT_WEIGHT {
            self.weights.insert(pod.id.path().into(), pod.body.weight);
        }
        let addresses = &pod.body.addresses;
        if addresses.is_empty() {
            return;
        }
        if pod.body.is_on_host_network {
            self.hosts.extend(addresses.iter().map(|(_, address)| (*address, pod.name)));
            return;
        }
        let name: Arc<str> = pod.id.path().into();
        let place = self.place(pod.body.node.as_deref(), None);
        for (field, address) in addresses {
            if let Some((other, _)) = self.by_address.get(address) {
                log.push(pod.warning(field, format!("{address} is the address of Pod {other} too")));
            } else {
                self.by_address.insert(*address, (name.clone(), place));
            }
        }
        let namespace = self
            .namespaces
            .entry(&pod.id.namespace)
            .or_insert_with(|| Namespace { labels: inventory.namespace_labels(&pod.id.namespace), pods: Vec::new() });
        namespace.pods.push(Live { name, pod: pod.body, place });
    }

    /// `namespace/pod` of the pod with this address.
    pub(super) fn name_of(&self, address: IpAddr) -> Option<&Arc<str>> {
        self.by_address.get(&address).map(|(name, _)| name)
    }

    /// The weight of the pod that is called `namespace/pod`.
    pub(super) fn weight_of(&self, name: &str) -> u16 {
        self.weights.get(name).copied().unwrap_or(DEFAULT_WEIGHT)
    }

    /// Where the pod with this address is.
    pub(super) fn place_of(&self, address: IpAddr) -> Place<'a> {
        self.by_address.get(&address).map(|(_, place)| *place).unwrap_or_default()
    }

    /// A place from what is known of it: a node says its zone.
    pub(super) fn place(&self, node: Option<&'a str>, zone: Option<&'a str>) -> Place<'a> {
        Place { node, zone: zone.or_else(|| self.zones.get(node?).copied()) }
    }

    /// Which node's or host pod's address this is.
    pub(super) fn host_of(&self, address: IpAddr) -> Option<&str> {
        self.hosts.get(&address).map(|host| &***host)
    }

    /// The addresses of the pods that a selector of a policy in `namespace` selects.
    pub(super) fn select(&'a self, selector: &PodSelector, namespace: &str) -> impl Iterator<Item = Cover<'a>> {
        let namespaces = self.namespaces.iter().filter(move |(name, candidate)| match &selector.namespace_selector {
            None => **name == namespace,
            Some(wanted) => wanted.selects(&candidate.labels),
        });
        namespaces
            .flat_map(|(_, candidate)| &candidate.pods)
            .filter(|live| selector.pod_selector.selects(&live.pod.labels))
            .flat_map(|live| {
                let cover = |address| Cover { address, name: &live.name, place: live.place };
                live.pod.addresses.iter().map(move |(_, address)| cover(*address))
            })
    }
}
