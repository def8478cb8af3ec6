//! Claims to endpoints: where several policies cover an address one wins, nobody is left without an answer, and each
//! endpoint has its gateway.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use vipgate_dataplane::snapshot::spec::EndpointSpec;

use super::claim::Claim;
use super::gateways::{GatewayId, Gateways, address_key};
use super::pods::{Cover, Pods};
use super::vips::Held;
use crate::complaint::{Complaint, Severity};
use crate::manifest::{Distribution, Family, ZoneAffinity};

/// Policies that an endpoint's policy wins over, and that are named.
const MOST_REMARKS: usize = 8;

/// How many endpoints something is about, and the first of them.
#[derive(Debug)]
struct Tally {
    count: usize,
    first: IpAddr,
}

/// What an endpoint lacks that wins a policy and has no VIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Closed {
    /// A VIP of its family.
    Vip(Family),
    /// A gateway that holds one: none may, or those that may are full.
    Gateway(Family),
    /// A gateway in its zone, which policy requires.
    Zone,
}

/// The VIPs of a claim that gateways hold.
struct Vips<'a> {
    /// With their holders, sorted, by family.
    held: [Vec<&'a Held>; 2],
    /// All holders, sorted, by family.
    holders: [Vec<GatewayId>; 2],
}

/// Every covered address with the policy that wins it. `claims` come with the winner of all first.
pub(super) fn settle(
    claims: &[Claim<'_>],
    vips: &[Held],
    gateways: &Gateways<'_>,
    pods: &Pods<'_>,
    log: &mut Vec<Complaint>,
) -> Vec<EndpointSpec> {
    let of_claim: Vec<Vips<'_>> = claims.iter().map(|claim| Vips::of(claim, vips)).collect();
    let mut spread = Spread { gateways, round: HashMap::new(), lists: HashMap::new() };
    let covers = claims.iter().enumerate();
    let covers = covers.flat_map(|(claim, it)| it.covers.iter().map(move |cover| (cover.address, claim, cover)));
    let mut covers: Vec<(IpAddr, usize, &Cover<'_>)> = covers.collect();
    covers.sort_unstable_by_key(|(address, claim, _)| (*address, *claim));
    let mut endpoints = Vec::with_capacity(covers.len());
    let mut lost: BTreeMap<(usize, usize), Tally> = BTreeMap::new();
    let mut sentences: HashMap<(usize, usize), Arc<str>> = HashMap::new();
    let mut closed: BTreeMap<(usize, Closed), Tally> = BTreeMap::new();
    for same in covers.chunk_by_mut(|(a, ..), (b, ..)| a == b) {
        if same.len() > 1 {
            // The winner first, and of its entries one with a name.
            same.sort_unstable_by_key(|(_, claim, cover)| {
                (*claim, cover.name.is_empty(), &**cover.name, cover.place.node, cover.place.zone)
            });
        }
        let (address, winner, cover) = same[0];
        let mut remarks = Vec::new();
        // Its own entries come before the others', and those of each loser are neighbours.
        for of_one in same.chunk_by(|(_, a, _), (_, b, _)| a == b).skip(1) {
            let loser = of_one[0].1;
            count(lost.entry((loser, winner)).or_insert(Tally { count: 0, first: address }));
            let sentence = || overruled(&claims[winner], &claims[loser]).into();
            if remarks.len() < MOST_REMARKS {
                remarks.push(sentences.entry((loser, winner)).or_insert_with(sentence).clone());
            }
        }
        let (claim, vips) = (&claims[winner], &of_claim[winner]);
        let (vips, gateway) = match spread.place(winner, claim, vips, cover) {
            Ok(placed) => placed,
            Err(_) if claim.broken => {
                remarks.push(format!("{} has no VIP: `vipgate check` says why", claim.spec.name).into());
                (Vec::new(), None)
            }
            Err(why) => {
                remarks.push(format!("{} {}", claim.spec.name, lack(claim, why).1).into());
                count(closed.entry((winner, why)).or_insert(Tally { count: 0, first: address }));
                (Vec::new(), None)
            }
        };
        let name = if cover.name.is_empty() { pods.name_of(address).unwrap_or(cover.name) } else { cover.name };
        let policy = claim.spec.name.clone();
        endpoints.push(EndpointSpec { address, name: name.clone(), policy, vips, gateway, remarks });
    }
    complain(claims, &lost, &closed, log);
    endpoints
}

impl<'a> Vips<'a> {
    fn of(claim: &Claim<'_>, vips: &'a [Held]) -> Self {
        let mut addresses: Vec<IpAddr> = claim.vips.iter().map(|(_, vip)| *vip).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let found = |vip: &IpAddr| vips.binary_search_by_key(vip, |held| held.spec.address).ok();
        let (v4, v6): (Vec<_>, Vec<_>) =
            addresses.iter().filter_map(found).map(|at| &vips[at]).partition(|held| held.spec.address.is_ipv4());
        let holders = |held: &[&Held]| {
            let mut all: Vec<GatewayId> = held.iter().flat_map(|held| held.holders.iter().copied()).collect();
            all.sort_unstable();
            all.dedup();
            // Whoever else holds a VIP, for another policy's sake, doesn't serve this one.
            all.retain(|id| claim.gateways.binary_search(id).is_ok());
            all
        };
        Self { holders: [holders(&v4), holders(&v6)], held: [v4, v6] }
    }
}

/// Spreads endpoints over gateways.
struct Spread<'a> {
    gateways: &'a Gateways<'a>,
    /// How many endpoints of a claim and family came before, for those that take turns: by whose turn it can be.
    round: HashMap<(usize, Family, Vec<GatewayId>), usize>,
    /// VIPs by claim, family and gateway: most endpoints share one of few lists.
    lists: HashMap<(usize, Family, Option<GatewayId>), Vec<IpAddr>>,
}

impl Spread<'_> {
    /// The VIPs of an endpoint and its gateway.
    fn place(
        &mut self,
        number: usize,
        claim: &Claim<'_>,
        vips: &Vips<'_>,
        cover: &Cover<'_>,
    ) -> Result<(Vec<IpAddr>, Option<Arc<str>>), Closed> {
        let family = Family::of(cover.address);
        let at = usize::from(family == Family::V6);
        let (held, holders) = (&vips.held[at], &vips.holders[at]);
        if !claim.vips.iter().any(|(_, vip)| Family::of(*vip) == family) {
            return Err(Closed::Vip(family));
        }
        let gateway = if self.gateways.are_unknown() {
            None
        } else {
            if holders.is_empty() {
                return Err(Closed::Gateway(family));
            }
            let near = match claim.zone_affinity {
                ZoneAffinity::None => None,
                affinity => Some(self.gateways.near(holders, cover.place, affinity == ZoneAffinity::Require)),
            };
            let among = near.as_ref().unwrap_or(holders);
            let chosen = match claim.distribution {
                Distribution::Rendezvous => self.gateways.winner(among, address_key(cover.address)),
                Distribution::RoundRobin => {
                    let turn = self.round.entry((number, family, among.clone())).or_default();
                    *turn += 1;
                    among.get((*turn - 1) % among.len().max(1)).copied()
                }
            };
            Some(chosen.ok_or(Closed::Zone)?)
        };
        let list = self.lists.entry((number, family, gateway)).or_insert_with(|| {
            let own = held.iter().filter(|held| gateway.is_none_or(|id| held.holders.contains(&id)));
            own.map(|held| held.spec.address).collect()
        });
        Ok((list.clone(), gateway.map(|id| self.gateways.name(id).clone())))
    }
}

fn count(tally: &mut Tally) {
    tally.count += 1;
}

fn complain(
    claims: &[Claim<'_>],
    lost: &BTreeMap<(usize, usize), Tally>,
    closed: &BTreeMap<(usize, Closed), Tally>,
    log: &mut Vec<Complaint>,
) {
    for ((loser, winner), tally) in lost {
        let (loser, winner) = (&claims[*loser], &claims[*winner]);
        let reason = format!(
            "{} covers {} that {} ({}) covers too: {} wins, since {}",
            loser.spec.name,
            endpoints(tally),
            winner.spec.name,
            winner.origin,
            winner.spec.name,
            precedence(winner, loser)
        );
        log.push(loser.complaint(Severity::Warning, loser.field, reason));
    }
    for ((claim, why), tally) in closed {
        let claim = &claims[*claim];
        let (field, what) = lack(claim, *why);
        let reason = format!("{} {what}: the traffic of {} is dropped", claim.spec.name, endpoints(tally));
        log.push(claim.complaint(Severity::Warning, field, reason));
    }
}

/// What a claim lacks, and the field that it is about.
fn lack(claim: &Claim<'_>, why: Closed) -> (&'static str, String) {
    match why {
        Closed::Vip(family) => (claim.vips_field, format!("has no {family} VIP")),
        Closed::Gateway(family) => (claim.field, format!("has no gateway with room that may hold its {family} VIPs")),
        Closed::Zone => ("spec.zoneAffinity", "requires a gateway in the zone of each endpoint".to_owned()),
    }
}

/// Which policy lost against the one that covers an endpoint, and why.
fn overruled(winner: &Claim<'_>, loser: &Claim<'_>) -> String {
    format!("wins over {}, which covers it too: {}", loser.spec.name, precedence(winner, loser))
}

/// Why one policy wins over another that covers the same endpoint.
fn precedence(winner: &Claim<'_>, loser: &Claim<'_>) -> &'static str {
    match () {
        () if winner.rank != loser.rank => winner.rank.over(loser.rank),
        () if winner.created.is_some() && loser.created.is_none() => "the other one says nothing of its age",
        () if winner.created != loser.created => "it is older",
        () => "it is as old, and first by name",
    }
}

fn endpoints(Tally { count, first }: &Tally) -> String {
    match count {
        1 => format!("endpoint {first}"),
        _ => format!("{count} endpoints (the first is {first})"),
    }
}
