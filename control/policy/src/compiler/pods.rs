//! Pod index: pods by address and by label selector, host addresses, node zones and weights.
//!
//! An address is that of one pod. Of several pods that name it, their manifests decide which one has it now; where they
//! don't, nobody has it: it is disputed, and its traffic is dropped if a policy covers one of the pods.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use vipgate_dataplane::policy::spec::BackendState;

use super::gateways::Locality;
use super::inventory::{Inventory, NamespacedName, ObjectRef};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{DEFAULT_WEIGHT, Life, Pod, PodSelector};

/// Node label with the zone.
pub(super) const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// The Service whose endpoints are the API server's hosts.
pub(super) const API_SERVER: NamespacedName<'static> = ("default", "kubernetes");

/// A pod address that a policy covers.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoveredAddress<'a> {
    pub(super) address: IpAddr,
    /// `namespace/pod`; empty if unknown.
    pub(super) name: &'a Arc<str>,
    pub(super) locality: Locality<'a>,
    /// Its readiness, as a slice says.
    pub(super) state: BackendState,
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
    by_address: HashMap<IpAddr, Holder<'a>>,
    hosts: HashMap<IpAddr, &'a Arc<str>>,
    /// Addresses of host-network pods, with the namespaces of these.
    on_hosts: HashSet<(IpAddr, &'a str)>,
    /// Whether there is any pod manifest.
    are_known: bool,
    /// Zones by node.
    zones: HashMap<&'a str, &'a str>,
    /// Weights other than the default, by `namespace/pod`.
    weights: HashMap<Arc<str>, u16>,
}

/// The pod that has an address.
#[derive(Debug)]
pub(super) struct Holder<'a> {
    pub(super) namespace: &'a str,
    /// `namespace/pod`.
    pub(super) name: Arc<str>,
    pub(super) uid: Option<&'a str>,
    locality: Locality<'a>,
    life: &'a Life,
    /// Another pod claims the address as well, and their manifests don't say which one has it.
    is_disputed: bool,
}

/// A pod that names an address that another one named before it.
struct Claimant<'a> {
    pod: ObjectRef<'a, Pod>,
    field: &'a str,
    holder: Holder<'a>,
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
            on_hosts: HashSet::default(),
            are_known: !inventory.pods.is_empty(),
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
        let mut contested = BTreeMap::new();
        for pod in &inventory.pods {
            pods.add(*pod, inventory, &mut contested);
        }
        for (address, others) in contested {
            pods.decide(address, others, diagnostics);
        }
        pods.hold_addresses(inventory);
        pods
    }

    /// What has a pod's address is that pod, whatever a Node lists; and the API server's hosts are no tenant's.
    fn hold_addresses(&mut self, inventory: &Inventory<'a>) {
        self.hosts.retain(|address, _| !self.by_address.contains_key(address));
        for slice in inventory.slices_of(API_SERVER) {
            for endpoint in slice.body.endpoints.iter().filter(|it| !self.by_address.contains_key(&it.address)) {
                self.hosts.entry(endpoint.address).or_insert(slice.name);
            }
        }
    }

    fn add(
        &mut self,
        pod: ObjectRef<'a, Pod>,
        inventory: &Inventory<'a>,
        contested: &mut BTreeMap<IpAddr, Vec<Claimant<'a>>>,
    ) {
        if pod.body.weight != DEFAULT_WEIGHT {
            self.weights.insert(pod.id.path().into(), pod.body.weight);
        }
        let addresses = &pod.body.addresses;
        if addresses.is_empty() {
            return;
        }
        if pod.body.is_on_host_network {
            self.hosts.extend(addresses.iter().map(|(_, address)| (*address, pod.name)));
            self.on_hosts.extend(addresses.iter().map(|(_, address)| (*address, pod.id.namespace.as_str())));
            return;
        }
        let name: Arc<str> = pod.id.path().into();
        let locality = self.locality(pod.body.node.as_deref(), None);
        for (field, address) in addresses {
            self.hold(pod, &name, locality, field, *address, contested);
        }
        let namespace = self.namespaces.entry(&pod.id.namespace).or_insert_with(|| Namespace {
            labels: inventory.namespace_labels(&pod.id.namespace).into_owned(),
            pods: Vec::new(),
        });
        namespace.pods.push(PodEntry { name, pod: pod.body, locality });
    }

    /// Gives a pod an address; one that another pod names as well is decided on when all pods are known.
    fn hold(
        &mut self,
        pod: ObjectRef<'a, Pod>,
        name: &Arc<str>,
        locality: Locality<'a>,
        field: &'a str,
        address: IpAddr,
        contested: &mut BTreeMap<IpAddr, Vec<Claimant<'a>>>,
    ) {
        let Pod { uid, life, .. } = pod.body;
        let (uid, namespace) = (uid.as_deref(), &*pod.id.namespace);
        let holder = Holder { namespace, name: name.clone(), uid, locality, life, is_disputed: false };
        match self.by_address.entry(address) {
            Entry::Vacant(free) => drop(free.insert(holder)),
            Entry::Occupied(other) if Arc::ptr_eq(&other.get().name, name) => {}
            Entry::Occupied(_) => contested.entry(address).or_default().push(Claimant { pod, field, holder }),
        }
    }

    /// Decides on an address that several pods name. The first one by namespace and name stands for all if it is disputed.
    fn decide(&mut self, address: IpAddr, others: Vec<Claimant<'a>>, diagnostics: &mut Vec<Diagnostic>) {
        let Some(first) = self.by_address.remove(&address) else { return };
        let is_older = |one: &Holder<'_>, other: &Holder<'_>| one.life.compare(other.life) == Some(Ordering::Less);
        let precedes_all = |at: usize| {
            let one = if at == 0 { &first } else { &others[at - 1].holder };
            let all = std::iter::once(&first).chain(others.iter().map(|other| &other.holder)).enumerate();
            all.filter(|(other, _)| *other != at).all(|(_, other)| is_older(other, one))
        };
        let winner = (0..=others.len()).find(|at| precedes_all(*at));
        for Claimant { pod, field, holder } in &others {
            // Who has it now is named, and nobody else.
            let winner = winner.map(|at| at.checked_sub(1).map_or(&first, |at| &others[at].holder));
            let (other, effect) = match winner {
                None => {
                    (&first, "their manifests don't say which one has it now, so its traffic is dropped".to_owned())
                }
                Some(winner) if Arc::ptr_eq(&winner.name, &holder.name) => {
                    (&first, format!("this one has it now, since {}", winner.life.reason(first.life)))
                }
                Some(winner) => (winner, format!("that one has it now, since {}", winner.life.reason(holder.life))),
            };
            let reason = format!("{address} is also the address of Pod {}: {effect}", other.name);
            diagnostics.push(pod.warning(Code::DuplicatePodAddress, field, reason));
        }
        let holder = match winner.map(|at| at.checked_sub(1)) {
            None => Holder { is_disputed: true, ..first },
            Some(None) => first,
            Some(Some(at)) => match others.into_iter().nth(at) {
                Some(Claimant { holder, .. }) => holder,
                None => first,
            },
        };
        self.by_address.insert(address, holder);
    }

    /// The pod that has an address; `None`: nobody, or it is disputed.
    pub(super) fn holder(&self, address: IpAddr) -> Option<&Holder<'a>> {
        self.by_address.get(&address).filter(|holder| !holder.is_disputed)
    }

    /// Whether several pods claim an address, and none is known to have it.
    pub(super) fn is_disputed(&self, address: IpAddr) -> bool {
        self.by_address.get(&address).is_some_and(|holder| holder.is_disputed)
    }

    /// Whether there is any pod manifest: without, nobody knows whose address is whose.
    pub(super) fn are_known(&self) -> bool {
        self.are_known
    }

    /// Whether a host-network pod of a namespace has the address.
    pub(super) fn is_of_host_pod(&self, address: IpAddr, namespace: &'a str) -> bool {
        self.on_hosts.contains(&(address, namespace))
    }

    /// `namespace/pod` of the pod with this address.
    pub(super) fn name_of(&self, address: IpAddr) -> Option<&Arc<str>> {
        self.by_address.get(&address).map(|holder| &holder.name)
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
        self.by_address.get(&address).map(|holder| holder.locality).unwrap_or_default()
    }

    /// A locality; a missing zone is that of the node.
    pub(super) fn locality(&self, node: Option<&'a str>, zone: Option<&'a str>) -> Locality<'a> {
        Locality { node, zone: zone.or_else(|| self.zones.get(node?).copied()) }
    }

    /// The node or host-network pod with this address.
    pub(super) fn host_of(&self, address: IpAddr) -> Option<&str> {
        self.hosts.get(&address).map(|host| &***host)
    }

    /// Number of pods that a selector is evaluated for.
    pub(super) fn count(&self, reach: Reach<'_>) -> usize {
        match reach {
            Reach::Own(own) => self.namespaces.get(own).map_or(0, |namespace| namespace.pods.len()),
            Reach::Cluster | Reach::Named(_) => self.namespaces.values().map(|namespace| namespace.pods.len()).sum(),
        }
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
                let (name, locality, state) = (&entry.name, entry.locality, BackendState::Ready);
                let cover = move |address| CoveredAddress { address, name, locality, state };
                let addresses = entry.pod.addresses.iter().map(|(_, address)| *address);
                let is_own = |address: &IpAddr| {
                    self.by_address.get(address).is_some_and(|it| it.is_disputed || Arc::ptr_eq(&it.name, &entry.name))
                };
                addresses.filter(is_own).map(cover)
            })
    }
}
