//! Assignment of VIPs, port blocks and endpoints to gateways by rendezvous hashing.
//!
//! Every pair of key and gateway has a score, and the gateway with the highest score owns the key. The result is the
//! same on every server. A gateway that is removed releases only its own keys; an added one takes only the keys that it
//! has the highest score for.

mod backups;

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use vipgate_dataplane::ports::{BLOCKS, BlockId, BlockSet};

pub use self::backups::MAX_BACKUPS;
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
    /// The ids of all gateways, shared by the policies without `spec.gateways`.
    all_ids: Arc<[GatewayId]>,
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
    /// VIPs that it may own (`spec.maxAddresses`).
    capacity: usize,
}

/// Rendezvous score; between equal hashes the first gateway by name wins.
type Score = (u64, Reverse<GatewayId>);

/// Locality of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Locality<'a> {
    pub(super) node: Option<&'a str>,
    pub(super) zone: Option<&'a str>,
}

/// A VIP to assign.
#[derive(Debug)]
pub(super) struct VipRequest<'a> {
    pub(super) vip: IpAddr,
    /// Anti-affinity group: its VIPs are spread over as many gateways as possible.
    pub(super) group: &'a str,
    /// Eligible gateways.
    pub(super) candidates: Arc<[GatewayId]>,
    /// Whether all candidates own it, or one.
    pub(super) shared: bool,
}

/// Owners of all VIPs.
#[derive(Debug)]
pub(super) struct Assignment {
    /// Owners of each VIP, in the order of the requests.
    pub(super) owners: Vec<Vec<GatewayId>>,
    /// Additional VIPs that each gateway may own.
    pub(super) remaining_capacity: Vec<usize>,
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
                capacity: spec.max_addresses.map_or(usize::MAX, |max| max.get() as usize),
            }
        });
        Self::from_entries(all.collect())
    }

    fn from_entries(all: Vec<GatewayEntry<'a>>) -> Self {
        Self { all_ids: (0..all.len()).collect(), all }
    }

    /// Whether there are no `Gateway` manifests.
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

    /// The gateways that `spec.gateways` of a policy names or selects, sorted; `None`: all.
    pub(super) fn candidates(&self, reference: Option<&GatewayRef>) -> Arc<[GatewayId]> {
        let Some(reference) = reference else { return self.all_ids.clone() };
        let is_candidate = |gateway: &GatewayEntry<'_>| match reference {
            GatewayRef::Names(names) => names.iter().any(|name| **name == *gateway.name),
            GatewayRef::Selector(selector) => selector.selects(&gateway.labels),
        };
        (0..self.all.len()).filter(|&id| is_candidate(&self.all[id])).collect()
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

    /// The candidates nearest to an endpoint: those on its node, else those in its zone, else all, or none if the zone
    /// is `required`.
    pub(super) fn nearest(&self, candidates: &[GatewayId], locality: Locality<'_>, required: bool) -> Vec<GatewayId> {
        // A gateway on the endpoint's node is in its zone, even if its manifest has no zone.
        let on_node = |id: &GatewayId| locality.node == Some(self.all[*id].node);
        let node: Vec<_> = candidates.iter().copied().filter(on_node).collect();
        if !node.is_empty() {
            return node;
        }
        let in_zone = |id: &GatewayId| locality.zone.is_some() && self.all[*id].zone == locality.zone;
        let zone: Vec<_> = candidates.iter().copied().filter(in_zone).collect();
        if zone.is_empty() && !required { candidates.to_vec() } else { zone }
    }

    /// Assigns VIPs to gateways: a stable matching. Pairs of VIP and gateway are taken by descending score, as long as
    /// the gateway has capacity and the VIP's group is below its limit there. So the result doesn't depend on the order
    /// of requests, and a request displaces another one only with a higher score. A group is spread evenly first; if
    /// its gateways are at capacity, the rest goes to any candidate.
    pub(super) fn assign(&self, requests: &[VipRequest<'_>]) -> Assignment {
        if self.is_empty() {
            return Assignment { owners: vec![Vec::new(); requests.len()], remaining_capacity: Vec::new() };
        }
        let mut matching = Matching::new(self, requests);
        for limit in [GroupLimit::Floor, GroupLimit::Ceiling, GroupLimit::None] {
            matching.run(limit);
        }
        let Matching { mut owners, capacity, .. } = matching;
        for owners in &mut owners {
            owners.sort_unstable();
        }
        Assignment { owners, remaining_capacity: capacity }
    }

    /// The port blocks of each owner of a VIP with several owners.
    pub(super) fn port_blocks(&self, vip: IpAddr, owners: &[GatewayId]) -> Vec<BlockSet> {
        let mut blocks = vec![BlockSet::default(); owners.len()];
        let key = address_key(vip);
        for block in (0..).take(BLOCKS).map(BlockId) {
            let key = mix(key ^ u64::from(block.0));
            let winner = (0..owners.len()).max_by_key(|&at| self.score(owners[at], key));
            if let Some(at) = winner {
                blocks[at].insert(block);
            }
        }
        blocks
    }
}

/// VIPs of one group that a gateway may own.
#[derive(Clone, Copy, Debug)]
enum GroupLimit {
    /// Size of the group / number of candidates, rounded down, at least 1.
    Floor,
    /// The same, rounded up.
    Ceiling,
    /// Unlimited.
    None,
}

/// A group's VIPs of one address family.
type Group<'a> = (&'a str, bool);

/// State of the assignment: the capacity left and the owners so far.
struct Matching<'a> {
    gateways: &'a Gateways<'a>,
    requests: &'a [VipRequest<'a>],
    group_sizes: HashMap<Group<'a>, usize>,
    owned_in_group: HashMap<(Group<'a>, GatewayId), usize>,
    capacity: Vec<usize>,
    owners: Vec<Vec<GatewayId>>,
}

impl<'a> Matching<'a> {
    fn new(gateways: &'a Gateways<'a>, requests: &'a [VipRequest<'a>]) -> Self {
        let mut group_sizes: HashMap<Group<'_>, usize> = HashMap::new();
        for request in requests.iter().filter(|request| !request.shared) {
            *group_sizes.entry(request.group()).or_default() += 1;
        }
        let capacity = gateways.all.iter().map(|gateway| gateway.capacity).collect();
        let owners = vec![Vec::new(); requests.len()];
        Self { gateways, requests, group_sizes, owned_in_group: HashMap::new(), capacity, owners }
    }

    /// Assigns VIPs without an owner.
    fn run(&mut self, limit: GroupLimit) {
        let unowned: Vec<usize> = (0..self.requests.len()).filter(|&at| self.owners[at].is_empty()).collect();
        // The heap has one pair per VIP: the best one not yet tried.
        let mut heap: BinaryHeap<_> =
            unowned.into_iter().filter_map(|at| Some((self.best_below(at, None)?, Reverse(at)))).collect();
        while let Some((score, Reverse(at))) = heap.pop() {
            let (request, id) = (&self.requests[at], score.1.0);
            let size = if request.shared { None } else { self.group_sizes.get(&request.group()) };
            let max = match (limit, size) {
                (GroupLimit::Floor, Some(size)) => (size / request.candidates.len()).max(1),
                (GroupLimit::Ceiling, Some(size)) => size.div_ceil(request.candidates.len()),
                (GroupLimit::None, _) | (_, None) => usize::MAX,
            };
            let owned = self.owned_in_group.entry((request.group(), id)).or_default();
            if self.capacity[id] > 0 && *owned < max {
                self.capacity[id] -= 1;
                *owned += usize::from(!request.shared);
                self.owners[at].push(id);
            }
            if request.shared || self.owners[at].is_empty() {
                heap.extend(self.best_below(at, Some(score)).map(|score| (score, Reverse(at))));
            }
        }
    }

    /// The highest score of a VIP's candidates below `limit`.
    fn best_below(&self, at: usize, limit: Option<Score>) -> Option<Score> {
        let key = address_key(self.requests[at].vip);
        let scores = self.requests[at].candidates.iter().map(|&id| self.gateways.score(id, key));
        scores.filter(|score| limit.is_none_or(|limit| *score < limit)).max()
    }
}

impl VipRequest<'_> {
    fn group(&self) -> Group<'_> {
        (self.group, self.vip.is_ipv4())
    }
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
