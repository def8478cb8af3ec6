//! The gateways, and rendezvous hashing over them.
//!
//! Every pair of key and gateway has a score, and the gateway with the highest score owns the key. The result is the
//! same on every server. A gateway that is removed releases only its own keys; an added one takes only the keys that it
//! has the highest score for, each from the gateway with the second highest: so that one has the key as long as the
//! added one is inactive, and its sessions move when that one is ready.

mod vip_owners;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;

pub(super) use self::vip_owners::{Assignment, VipRequest};
use super::inventory::{Inventory, ObjectRef};
use super::pods::ZONE_LABEL;
use crate::compiler::placement::Peer;
use crate::diagnostic::{Code, Diagnostic};
use crate::fingerprint::{Fingerprint, mix};
use crate::manifest::{Gateway, GatewayRef, UncoveredAction};

/// Index of a gateway among all gateways, sorted by name.
pub(super) type GatewayId = usize;

/// All gateways with a manifest. If there are none, each gateway is standalone and owns everything.
#[derive(Debug)]
pub(super) struct Gateways<'a> {
    all: Vec<GatewayEntry<'a>>,
    /// Those of the policies without `spec.gateways`.
    all_candidates: Candidates,
}

#[derive(Debug)]
struct GatewayEntry<'a> {
    name: Arc<str>,
    seed: u64,
    labels: BTreeMap<String, String>,
    node: &'a str,
    zone: Option<&'a str>,
    peer_address: Option<IpAddr>,
    pods: Arc<[IpNet]>,
    uncovered: Option<UncoveredAction>,
    capacity: Capacity,
}

/// VIPs that a gateway may own: in total (`spec.maxAddresses`), and of each family (its NIC at a cloud provider).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Capacity {
    total: usize,
    ipv4: usize,
    ipv6: usize,
}

impl Capacity {
    const UNLIMITED: Self = Self { total: usize::MAX, ipv4: usize::MAX, ipv6: usize::MAX };

    fn fits(self, vip: IpAddr) -> bool {
        self.total.min(if vip.is_ipv4() { self.ipv4 } else { self.ipv6 }) > 0
    }

    /// Counts a VIP that fits.
    fn take(&mut self, vip: IpAddr) {
        self.total -= 1;
        *if vip.is_ipv4() { &mut self.ipv4 } else { &mut self.ipv6 } -= 1;
    }
}

/// Rendezvous score; between equal hashes the first gateway by name wins.
type Score = (u64, Reverse<GatewayId>);

/// Locality of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Locality<'a> {
    pub(super) node: Option<&'a str>,
    pub(super) zone: Option<&'a str>,
}

/// Backups of a shard, at most. A shard is without an owner only if its home and all backups have failed.
pub const MAX_BACKUPS: usize = 3;

/// The gateways that a policy may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidates {
    /// Identifies how they were selected; the same when a gateway is added or removed.
    pub(super) name: Arc<str>,
    /// Their ids, ascending.
    pub(super) ids: Arc<[GatewayId]>,
}

impl Candidates {
    /// Whether a gateway is one.
    pub(super) fn contains(&self, id: GatewayId) -> bool {
        self.ids.binary_search(&id).is_ok()
    }
}

impl<'a> Gateways<'a> {
    pub(super) fn new(inventory: &Inventory<'a>, diagnostics: &mut Vec<Diagnostic>) -> Self {
        check_peer_addresses(inventory, diagnostics);
        let label =
            |node: &ObjectRef<'a, Node>| node.body.metadata.labels.as_ref()?.get(ZONE_LABEL).map(String::as_str);
        let zones = inventory.nodes.iter().filter_map(|node| Some((node.id.name.as_str(), label(node)?)));
        let zones: BTreeMap<&str, &str> = zones.collect();
        let all = inventory.gateways.iter().map(|(name, manifest)| {
            let spec = &manifest.body.spec;
            let node = spec.node.as_deref().unwrap_or(name);
            GatewayEntry {
                name: (*name).into(),
                seed: Fingerprint::of(name.as_bytes()),
                labels: manifest.body.metadata.labels.clone().unwrap_or_default(),
                node,
                zone: spec.zone.as_deref().or_else(|| zones.get(node).copied()),
                peer_address: spec.peer_address,
                pods: spec.pod_cidrs.iter().map(|cidr| cidr.0).collect(),
                uncovered: spec.uncovered,
                capacity: capacity_of(name, spec.max_addresses, inventory),
            }
        });
        Self::from_entries(all.collect())
    }

    fn from_entries(all: Vec<GatewayEntry<'a>>) -> Self {
        Self { all_candidates: Candidates { name: "all".into(), ids: (0..all.len()).collect() }, all }
    }

    /// Whether there are no `VipGateway` manifests.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn name(&self, id: GatewayId) -> &Arc<str> {
        &self.all[id].name
    }

    /// Whether there is a gateway with this name.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.all.binary_search_by(|gateway| (*gateway.name).cmp(name)).is_ok()
    }

    /// The gateway with this address for others.
    pub(super) fn with_peer_address(&self, address: IpAddr) -> Option<&Arc<str>> {
        self.all.iter().find(|gateway| gateway.peer_address == Some(address)).map(|gateway| &gateway.name)
    }

    /// The gateways on nodes of which something is known, ascending, with that.
    pub(super) fn on_nodes<T: Copy>(&self, nodes: &BTreeMap<&str, T>) -> Vec<(GatewayId, T)> {
        let gateways = self.all.iter().enumerate();
        gateways.filter_map(|(id, gateway)| Some((id, *nodes.get(gateway.node)?))).collect()
    }

    /// The gateways that `spec.gateways` of a policy names or selects, sorted; `None`: all.
    pub(super) fn candidates(&self, reference: Option<&GatewayRef>) -> Candidates {
        let Some(reference) = reference else {
            return self.all_candidates.clone();
        };
        let is_candidate = |gateway: &GatewayEntry<'_>| match reference {
            GatewayRef::Names(names) => names.iter().any(|name| **name == *gateway.name),
            GatewayRef::Selector(selector) => selector.selects(&gateway.labels),
        };
        Candidates {
            name: format!("{:016x}", Fingerprint::of(format!("{reference:?}").as_bytes())).into(),
            ids: (0..self.all.len()).filter(|&id| is_candidate(&self.all[id])).collect(),
        }
    }

    /// The gateways as distributed to each other.
    pub(super) fn peers(&self) -> Vec<Peer> {
        let peer = |gateway: &GatewayEntry<'_>| Peer {
            name: gateway.name.clone(),
            node: gateway.node.into(),
            zone: gateway.zone.unwrap_or_default().into(),
            address: gateway.peer_address,
            pods: gateway.pods.clone(),
            uncovered: gateway.uncovered,
        };
        self.all.iter().map(peer).collect()
    }

    /// The candidate with the highest score for a key.
    pub(super) fn winner(&self, candidates: &[GatewayId], key: u64) -> Option<GatewayId> {
        candidates.iter().copied().max_by_key(|&id| self.score(id, key))
    }

    fn score(&self, id: GatewayId, key: u64) -> Score {
        (mix(self.all[id].seed ^ key), Reverse(id))
    }

    /// How near a gateway is to an endpoint: 0 on its node, 1 in its zone, 2 elsewhere.
    pub(super) fn distance(&self, id: GatewayId, locality: Locality<'_>) -> u8 {
        // A gateway on the endpoint's node is in its zone, even if its manifest has no zone.
        let gateway = &self.all[id];
        match locality {
            Locality { node: Some(node), .. } if node == gateway.node => 0,
            Locality { zone: Some(zone), .. } if gateway.zone == Some(zone) => 1,
            _ => 2,
        }
    }

    /// The candidates nearest to an endpoint: those on its node, else those in its zone, else all, or none if the zone
    /// is `required`.
    pub(super) fn nearest(&self, candidates: &[GatewayId], locality: Locality<'_>, required: bool) -> Vec<GatewayId> {
        let distance = |id: GatewayId| self.distance(id, locality);
        let least = candidates.iter().map(|&id| distance(id)).min().unwrap_or(2);
        if least == 2 && required {
            return Vec::new();
        }
        candidates.iter().copied().filter(|&id| distance(id) == least).collect()
    }

    /// The first `count` candidates by their ranks, lowest first, and among equal ranks by score for a key: a home and
    /// its backups.
    pub(super) fn order<R: Ord>(
        &self,
        candidates: impl Iterator<Item = (R, GatewayId)>,
        key: u64,
        count: usize,
    ) -> Vec<GatewayId> {
        let mut order: Vec<_> = candidates.map(|(rank, id)| (rank, Reverse(self.score(id, key)), id)).collect();
        // A hundred gateways are a hundred candidates for each of many keys: only the part that is used is sorted.
        if order.len() > count {
            order.select_nth_unstable(count);
            order.truncate(count);
        }
        order.sort_unstable();
        order.into_iter().map(|(.., id)| id).collect()
    }
}

/// What a gateway may own by its manifest, and what its NIC can have at the providers of pools.
fn capacity_of(name: &str, max: Option<NonZeroU32>, inventory: &Inventory<'_>) -> Capacity {
    let mut capacity = Capacity::UNLIMITED;
    capacity.total = max.map_or(usize::MAX, |max| max.get() as usize);
    let clouds = inventory.pools.iter().filter_map(|pool| pool.body.cloud.as_ref());
    for nic in clouds.filter_map(|cloud| cloud.nics.get(name)) {
        capacity.ipv4 = capacity.ipv4.min(nic.capacity);
        capacity.ipv6 = capacity.ipv6.min(nic.ipv6_capacity);
    }
    capacity
}

/// Gateways of a group exchange packets and session state, so each needs a peer address of its own.
fn check_peer_addresses(inventory: &Inventory<'_>, diagnostics: &mut Vec<Diagnostic>) {
    if inventory.gateways.len() < 2 {
        return;
    }
    let mut used: HashMap<IpAddr, &ObjectRef<'_, Gateway>> = HashMap::new();
    for gateway in inventory.gateways.values() {
        let (code, reason) = match gateway.body.spec.peer_address {
            None => (
                Code::NoPeerAddress,
                "is missing: other gateways reach this one only if its configuration sets peer.address".into(),
            ),
            Some(address) => match used.entry(address) {
                Entry::Occupied(other) => (
                    Code::DuplicatePeerAddress,
                    format!("{address} is also the address of {} ({})", other.get().id, other.get().origin),
                ),
                Entry::Vacant(free) => {
                    free.insert(gateway);
                    continue;
                }
            },
        };
        diagnostics.push(gateway.warning(code, "spec.peerAddress", reason));
    }
}

/// Rendezvous key of an address.
pub(super) fn address_key(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(v4) => mix(u64::from(v4.to_bits())),
        IpAddr::V6(v6) => {
            let bits = v6.to_bits();
            mix(mix((bits >> 64) as u64) ^ bits as u64)
        }
    }
}

#[cfg(test)]
mod tests;
