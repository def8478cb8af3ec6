//! Pod index: pods by address and by label selector, host addresses, node zones and weights.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::gateways::Locality;
use super::inventory::{Inventory, ObjectRef};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{DEFAULT_WEIGHT, Pod, PodSelector};

/// Node label with the zone.
pub(super) const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// A pod address that a policy covers.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoveredAddress<'a> {
    pub(super) address: IpAddr,
    /// `namespace/pod`; empty if unknown.
    pub(super) name: &'a Arc<str>,
    pub(super) locality: Locality<'a>,
}

/// The namespaces that a policy's selectors may select pods of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach<'a> {
    /// Those of `namespaceSelector`, else all.
    Cluster,
    /// Those of `namespaceSelector`, else the policy's own.
    Named(&'a str),
    /// The policy's own, if `namespaceSelector` selects it.
    Own(&'a str),
}

/// Pods with addresses of their own, and host addresses (nodes and host-network pods).
#[derive(Debug)]
pub(super) struct Pods<'a> {
    namespaces: BTreeMap<&'a str, Namespace<'a>>,
    by_address: HashMap<IpAddr, (Arc<str>, Locality<'a>)>,
    hosts: HashMap<IpAddr, &'a Arc<str>>,
    /// Zones by node.
    zones: HashMap<&'a str, &'a str>,
    /// Weights other than the default, by `namespace/pod`.
    weights: HashMap<Arc<str>, u16>,
}

#[derive(Debug)]
struct Namespace<'a> {
    labels: BTreeMap<String, String>,
    pods: Vec<PodEntry<'a>>,
}

#[derive(Debug)]
struct PodEntry<'a> {
    name: Arc<str>,
    pod: &'a Pod,
    locality: Locality<'a>,
}

impl<'a> Pods<'a> {
    pub(super) fn new(inventory: &Inventory<'a>, diagnostics: &mut Vec<Diagnostic>) -> Self {
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
            pods.add(*pod, inventory, diagnostics);
        }
        pods
    }

    fn add(&mut self, pod: ObjectRef<'a, Pod>, inventory: &Inventory<'a>, diagnostics: &mut Vec<Diagnostic>) {
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
        let locality = self.locality(pod.body.node.as_deref(), None);
        for (field, address) in addresses {
            if let Some((other, _)) = self.by_address.get(address) {
                let reason = format!("{address} is also the address of Pod {other}");
                diagnostics.push(pod.warning(Code::DuplicatePodAddress, field, reason));
            } else {
                self.by_address.insert(*address, (name.clone(), locality));
            }
        }
        let namespace = self.namespaces.entry(&pod.id.namespace).or_insert_with(|| Namespace {
            labels: inventory.namespace_labels(&pod.id.namespace).into_owned(),
            pods: Vec::new(),
        });
        namespace.pods.push(PodEntry { name, pod: pod.body, locality });
    }

    /// `namespace/pod` of the pod with this address.
    pub(super) fn name_of(&self, address: IpAddr) -> Option<&Arc<str>> {
        self.by_address.get(&address).map(|(name, _)| name)
    }

    /// The addresses of pods that are on nodes: node, address and `namespace/pod`. Of pods with the same address, the
    /// first one has it.
    pub(super) fn placed<'p>(
        &self,
        pods: &'p [ObjectRef<'p, Pod>],
    ) -> impl Iterator<Item = (&'p str, IpAddr, &Arc<str>)> {
        let own = pods.iter().filter(|pod| !pod.body.is_on_host_network);
        let on_nodes = own.filter_map(|pod| Some((pod, pod.body.node.as_deref()?)));
        on_nodes.flat_map(move |(pod, node)| {
            let is_of = move |name: &str| name.rsplit_once('/') == Some((&pod.id.namespace, &pod.id.name));
            let addresses = pod.body.addresses.iter().map(|(_, address)| *address);
            addresses.filter_map(move |address| {
                let name = self.name_of(address).filter(|name| is_of(name))?;
                Some((node, address, name))
            })
        })
    }

    /// Weight of the pod `namespace/pod`.
    pub(super) fn weight_of(&self, name: &str) -> u16 {
        self.weights.get(name).copied().unwrap_or(DEFAULT_WEIGHT)
    }

    /// Node and zone of the pod with this address.
    pub(super) fn locality_of(&self, address: IpAddr) -> Locality<'a> {
        self.by_address.get(&address).map(|(_, locality)| *locality).unwrap_or_default()
    }

    /// A locality; a missing zone is that of the node.
    pub(super) fn locality(&self, node: Option<&'a str>, zone: Option<&'a str>) -> Locality<'a> {
        Locality { node, zone: zone.or_else(|| self.zones.get(node?).copied()) }
    }

    /// The node or host-network pod with this address.
    pub(super) fn host_of(&self, address: IpAddr) -> Option<&str> {
        self.hosts.get(&address).map(|host| &***host)
    }

    /// The first pod of another namespace than `own` with an address that a selector matches by its `namespaceSelector`.
    pub(super) fn first_of_others(&self, selector: &PodSelector, own: &str) -> Option<&Arc<str>> {
        let labels = selector.namespace_selector.as_ref()?;
        let others = self.namespaces.iter().filter(|(name, other)| **name != own && labels.selects(&other.labels));
        let mut pods = others.flat_map(|(_, other)| &other.pods);
        pods.find(|entry| selector.pod_selector.selects(&entry.pod.labels)).map(|entry| &entry.name)
    }

    /// Addresses of the pods that match a selector of a policy.
    pub(super) fn select(
        &'a self,
        selector: &PodSelector,
        reach: Reach<'_>,
    ) -> impl Iterator<Item = CoveredAddress<'a>> {
        let namespaces = self.namespaces.iter().filter(move |(name, candidate)| {
            let is_selected = selector.namespace_selector.as_ref().map(|labels| labels.selects(&candidate.labels));
            match reach {
                Reach::Cluster => is_selected.unwrap_or(true),
                Reach::Named(own) => is_selected.unwrap_or(**name == own),
                Reach::Own(own) => **name == own && is_selected.unwrap_or(true),
            }
        });
        namespaces
            .flat_map(|(_, candidate)| &candidate.pods)
            .filter(|entry| selector.pod_selector.selects(&entry.pod.labels))
            .flat_map(|entry| {
                let cover = |address| CoveredAddress { address, name: &entry.name, locality: entry.locality };
                entry.pod.addresses.iter().map(move |(_, address)| cover(*address))
            })
    }
}
