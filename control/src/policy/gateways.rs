//! The gateways that there are, and who of them does what: deterministic, the same on every server, and with as little
//! moving as possible when one comes or goes.
//!
//! Rendezvous hashing: every pair of a key and a gateway has a score, and the highest wins. A gateway that goes leaves only its
//! own keys to others; one that comes takes only those which it wins.

mod backups;

pub use self::backups::MOST_BACKUPS;

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use vipgate_dataplane::ports::{BLOCKS, BlockId, BlockSet};

use super::deal::Peer;
use super::fingerprint::{Fingerprint, mix};
use super::inventory::{Inventory, Located};
use super::pods::ZONE_LABEL;
use crate::complaint::Complaint;
use crate::manifest::{Gateway, GatewayRef, Uncovered};

/// A gateway's place among all of them, sorted by name.
pub(super) type GatewayId = usize;

/// All gateways that have a manifest. Without any, each gateway is alone and owns everything.
#[derive(Debug)]
pub(super) struct Gateways<'a> {
    all: Vec<Known<'a>>,
    /// The numbers of all of them: most policies may be served by any.
    any: Arc<[GatewayId]>,
}

#[derive(Debug)]
struct Known<'a> {
    name: Arc<str>,
    seed: u64,
    labels: BTreeMap<String, String>,
    node: &'a str,
    zone: Option<&'a str>,
    peer_address: Option<IpAddr>,
    pods: Arc<[IpNet]>,
    uncovered: Option<Uncovered>,
    /// VIPs that it may hold.
    room: usize,
}

/// How high a gateway bids; among equals the first by name wins.
type Score = (u64, Reverse<GatewayId>);

/// Where an endpoint is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place<'a> {
    pub(super) node: Option<&'a str>,
    pub(super) zone: Option<&'a str>,
}

/// A VIP that is to be held.
#[derive(Debug)]
pub(super) struct Bid<'a> {
    pub(super) vip: IpAddr,
    /// VIPs of one group keep apart as far as there are gateways.
    pub(super) group: &'a str,
    /// Who may hold it.
    pub(super) candidates: Arc<[GatewayId]>,
    /// Whether all of them do, or one.
    pub(super) shared: bool,
}

/// What bids come to.
#[derive(Debug)]
pub(super) struct Holders {
    /// Who holds each VIP, by number.
    pub(super) of: Vec<Vec<GatewayId>>,
    /// VIPs that each gateway may hold beside those.
    pub(super) room: Vec<usize>,
}

impl<'a> Gateways<'a> {
    pub(super) fn new(inventory: &Inventory<'a>, log: &mut Vec<Complaint>) -> Self {
        complain_about_addresses(inventory, log);
        let label = |node: &Located<'a, Node>| node.body.metadata.labels.as_ref()?.get(ZONE_LABEL).map(String::as_str);
        let zones = inventory.nodes.iter().filter_map(|node| Some((node.id.name.as_str(), label(node)?)));
        let zones: BTreeMap<&str, &str> = zones.collect();
        let all = inventory.gateways.iter().map(|(name, manifest)| {
            let spec = &manifest.body.spec;
            let node = spec.node.as_deref().unwrap_or(name);
            Known {
                name: (*name).into(),
                seed: Fingerprint::of(name.as_bytes()),
                labels: manifest.body.metadata.labels.clone().unwrap_or_default(),
                node,
                zone: spec.zone.as_deref().or_else(|| zones.get(node).copied()),
                peer_address: spec.peer_address,
                pods: spec.pod_cidrs.iter().map(|cidr| cidr.0).collect(),
                uncovered: spec.uncovered,
                room: spec.max_addresses.map_or(usize::MAX, |most| most.get() as usize),
            }
        });
        Self::of(all.collect())
    }

    fn of(all: Vec<Known<'a>>) -> Self {
        Self { any: (0..all.len()).collect(), all }
    }

    /// Whether no gateway has a manifest.
    pub(super) fn are_unknown(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn name(&self, id: GatewayId) -> &Arc<str> {
        &self.all[id].name
    }

    /// Whether there is one of this name.
    pub(super) fn exists(&self, name: &str) -> bool {
        self.all.binary_search_by(|known| (*known.name).cmp(name)).is_ok()
    }

    /// Those that a policy names or selects, sorted: without either, all.
    pub(super) fn candidates(&self, wanted: Option<&GatewayRef>) -> Arc<[GatewayId]> {
        let Some(wanted) = wanted else { return self.any.clone() };
        let is_wanted = |known: &Known<'_>| match wanted {
            GatewayRef::Names(names) => names.iter().any(|name| **name == *known.name),
            GatewayRef::Selector(selector) => selector.selects(&known.labels),
        };
        (0..self.all.len()).filter(|&id| is_wanted(&self.all[id])).collect()
    }

    /// As the gateways themselves need to know each other.
    pub(super) fn peers(&self) -> Vec<Peer> {
        let peer = |known: &Known<'_>| Peer {
            name: known.name.clone(),
            node: known.node.into(),
            zone: known.zone.unwrap_or_default().into(),
            address: known.peer_address,
            pods: known.pods.clone(),
            uncovered: known.uncovered,
        };
        self.all.iter().map(peer).collect()
    }

    /// The one of `among` that wins a key.
    pub(super) fn winner(&self, among: &[GatewayId], key: u64) -> Option<GatewayId> {
        among.iter().copied().max_by_key(|&id| self.score(id, key))
    }

    fn score(&self, id: GatewayId, key: u64) -> Score {
        (mix(self.all[id].seed ^ key), Reverse(id))
    }

    /// Those of `among` that are as near to a place as any: on its node, else in its zone, else, if that will do, all.
    pub(super) fn near(&self, among: &[GatewayId], place: Place<'_>, must: bool) -> Vec<GatewayId> {
        // Who is on the node is in its zone, whether a manifest says so or not.
        let on_node = |id: &GatewayId| place.node == Some(self.all[*id].node);
        let node: Vec<_> = among.iter().copied().filter(on_node).collect();
        if !node.is_empty() {
            return node;
        }
        let in_zone = |id: &GatewayId| place.zone.is_some() && self.all[*id].zone == place.zone;
        let zone: Vec<_> = among.iter().copied().filter(in_zone).collect();
        if zone.is_empty() && !must { among.to_vec() } else { zone }
    }

    /// Who holds each VIP: of all pairs, the one with the highest score is settled first, as long as the gateway has room and
    /// the VIP's group leaves it one more. So the result doesn't depend on any order, and what one bid takes from another is
    /// only what it wins. Each gateway has its part of a group before one has more; a group whose gateways are full otherwise
    /// comes together on those that aren't.
    pub(super) fn hold(&self, bids: &[Bid<'_>]) -> Holders {
        if self.are_unknown() {
            return Holders { of: vec![Vec::new(); bids.len()], room: Vec::new() };
        }
        let mut auction = Auction::new(self, bids);
        for apart in [Apart::Evenly, Apart::Nearly, Apart::No] {
            auction.run(apart);
        }
        let Auction { mut holders, room, .. } = auction;
        for holders in &mut holders {
            holders.sort_unstable();
        }
        Holders { of: holders, room }
    }

    /// The port blocks of a VIP that several gateways hold, by holder.
    pub(super) fn blocks(&self, vip: IpAddr, holders: &[GatewayId]) -> Vec<BlockSet> {
        let mut blocks = vec![BlockSet::default(); holders.len()];
        let key = address_key(vip);
        for block in (0..).take(BLOCKS).map(BlockId) {
            let key = mix(key ^ u64::from(block.0));
            let winner = (0..holders.len()).max_by_key(|&at| self.score(holders[at], key));
            if let Some(at) = winner {
                blocks[at].insert(block);
            }
        }
        blocks
    }
}

/// How many VIPs of a group a gateway may hold.
#[derive(Clone, Copy, Debug)]
enum Apart {
    /// As many as every candidate can, but one in any case.
    Evenly,
    /// One more, where that doesn't come out even.
    Nearly,
    /// Any number.
    No,
}

/// A group's VIPs of one address family.
type Group<'a> = (&'a str, bool);

struct Auction<'a> {
    gateways: &'a Gateways<'a>,
    bids: &'a [Bid<'a>],
    groups: HashMap<Group<'a>, usize>,
    in_group: HashMap<(Group<'a>, GatewayId), usize>,
    room: Vec<usize>,
    holders: Vec<Vec<GatewayId>>,
}

impl<'a> Auction<'a> {
    fn new(gateways: &'a Gateways<'a>, bids: &'a [Bid<'a>]) -> Self {
        let mut groups: HashMap<Group<'_>, usize> = HashMap::new();
        for bid in bids.iter().filter(|bid| !bid.shared) {
            *groups.entry(bid.group()).or_default() += 1;
        }
        let room = gateways.all.iter().map(|known| known.room).collect();
        Self { gateways, bids, groups, in_group: HashMap::new(), room, holders: vec![Vec::new(); bids.len()] }
    }

    /// Settles what nobody holds yet.
    fn run(&mut self, apart: Apart) {
        let open: Vec<usize> = (0..self.bids.len()).filter(|&at| self.holders[at].is_empty()).collect();
        // One pair of each VIP waits in the heap: the best that hasn't been tried.
        let mut next: BinaryHeap<_> =
            open.into_iter().filter_map(|at| Some((self.best_below(at, None)?, Reverse(at)))).collect();
        while let Some((score, Reverse(at))) = next.pop() {
            let (bid, id) = (&self.bids[at], score.1.0);
            let count = if bid.shared { None } else { self.groups.get(&bid.group()) };
            let most = match (apart, count) {
                (Apart::Evenly, Some(count)) => (count / bid.candidates.len()).max(1),
                (Apart::Nearly, Some(count)) => count.div_ceil(bid.candidates.len()),
                (Apart::No, _) | (_, None) => usize::MAX,
            };
            let has = self.in_group.entry((bid.group(), id)).or_default();
            if self.room[id] > 0 && *has < most {
                self.room[id] -= 1;
                *has += usize::from(!bid.shared);
                self.holders[at].push(id);
            }
            if bid.shared || self.holders[at].is_empty() {
                next.extend(self.best_below(at, Some(score)).map(|score| (score, Reverse(at))));
            }
        }
    }

    fn best_below(&self, at: usize, limit: Option<Score>) -> Option<Score> {
        let key = address_key(self.bids[at].vip);
        let scores = self.bids[at].candidates.iter().map(|&id| self.gateways.score(id, key));
        scores.filter(|score| limit.is_none_or(|limit| *score < limit)).max()
    }
}

impl Bid<'_> {
    fn group(&self) -> Group<'_> {
        (self.group, self.vip.is_ipv4())
    }
}

/// Several gateways send each other packets and state, for which each must be found.
fn complain_about_addresses(inventory: &Inventory<'_>, log: &mut Vec<Complaint>) {
    if inventory.gateways.len() < 2 {
        return;
    }
    let mut taken: HashMap<IpAddr, &Located<'_, Gateway>> = HashMap::new();
    for gateway in inventory.gateways.values() {
        let reason = match gateway.body.spec.peer_address {
            None => "is missing: other gateways find this one only if its own configuration says where (peer.address)"
                .into(),
            Some(address) => match taken.entry(address) {
                Entry::Occupied(other) => {
                    format!("{address} is that of {} ({}) too", other.get().id, other.get().origin)
                }
                Entry::Vacant(free) => {
                    free.insert(gateway);
                    continue;
                }
            },
        };
        log.push(gateway.warning("spec.peerAddress", reason));
    }
}

/// What an address is to rendezvous hashing.
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
