//! Claims to endpoints: where several policies cover an address one wins, and nobody is left without an answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use vipgate_dataplane::snapshot::spec::EndpointSpec;

use super::address::Family;
use super::claim::Claim;
use super::pods::{Cover, Pods};
use crate::complaint::{Complaint, Severity};

/// How many endpoints something is about, and the first of them.
#[derive(Debug)]
struct Tally {
    count: usize,
    first: IpAddr,
}

/// Every covered address with the policy that wins it. `claims` come with the winner of all first; the policies of the
/// result are numbered by name.
pub(super) fn settle(claims: &[Claim<'_>], pods: &Pods<'_>, log: &mut Vec<Complaint>) -> Vec<EndpointSpec> {
    let numbers = numbers(claims);
    let vips: Vec<[Vec<IpAddr>; 2]> = claims.iter().map(vips_by_family).collect();
    let covers = claims.iter().enumerate();
    let mut covers: Vec<(usize, Cover<'_>)> =
        covers.flat_map(|(claim, Claim { covers, .. })| covers.iter().map(move |cover| (claim, *cover))).collect();
    // The winner first, and of its entries one with a name.
    covers.sort_unstable_by_key(|(claim, cover)| (cover.address, *claim, cover.name.is_empty(), cover.name));
    let mut endpoints = Vec::with_capacity(covers.len());
    let mut lost: BTreeMap<(usize, usize), Tally> = BTreeMap::new();
    let mut closed: BTreeMap<(usize, Family), Tally> = BTreeMap::new();
    for same in covers.chunk_by(|(_, a), (_, b)| a.address == b.address) {
        let (winner, Cover { address, name }) = same[0];
        let losers: BTreeSet<usize> = same.iter().map(|(claim, _)| *claim).filter(|claim| *claim != winner).collect();
        for loser in losers {
            count(lost.entry((loser, winner)).or_insert(Tally { count: 0, first: address }));
        }
        let family = Family::of(address);
        let vips = vips[winner][usize::from(family == Family::V6)].clone();
        if vips.is_empty() && claims[winner].served && !claims[winner].broken {
            count(closed.entry((winner, family)).or_insert(Tally { count: 0, first: address }));
        }
        let name = if name.is_empty() { pods.name_of(address).unwrap_or_default() } else { name };
        endpoints.push(EndpointSpec { address, name: name.to_owned(), policy: numbers[winner], vips });
    }
    complain(claims, &lost, &closed, log);
    endpoints
}

fn count(tally: &mut Tally) {
    tally.count += 1;
}

/// The place of each claim's policy among all policies sorted by name.
fn numbers(claims: &[Claim<'_>]) -> Vec<u32> {
    let mut order: Vec<usize> = (0..claims.len()).collect();
    order.sort_by(|a, b| claims[*a].spec.name.cmp(&claims[*b].spec.name));
    let mut numbers = vec![0; claims.len()];
    for (number, claim) in (0..).zip(order) {
        numbers[claim] = number;
    }
    numbers
}

/// A claim's VIPs, sorted: IPv4, IPv6. None on a gateway that doesn't serve it.
fn vips_by_family(claim: &Claim<'_>) -> [Vec<IpAddr>; 2] {
    let vips: BTreeSet<IpAddr> = claim.vips.iter().filter(|_| claim.served).map(|(_, vip)| *vip).collect();
    let (v4, v6) = vips.into_iter().partition(IpAddr::is_ipv4);
    [v4, v6]
}

fn complain(
    claims: &[Claim<'_>],
    lost: &BTreeMap<(usize, usize), Tally>,
    closed: &BTreeMap<(usize, Family), Tally>,
    log: &mut Vec<Complaint>,
) {
    for ((loser, winner), tally) in lost {
        let (loser, winner) = (&claims[*loser], &claims[*winner]);
        let reason = format!(
            "{} covers {} that {} ({}) covers too and wins",
            loser.spec.name,
            endpoints(tally),
            winner.spec.name,
            winner.origin
        );
        log.push(loser.complaint(Severity::Warning, &loser.field, reason));
    }
    for ((claim, family), tally) in closed {
        let claim = &claims[*claim];
        let reason = format!("{} has no {family} VIP: the traffic of {} is dropped", claim.spec.name, endpoints(tally));
        log.push(claim.complaint(Severity::Warning, claim.vips_field, reason));
    }
}

fn endpoints(Tally { count, first }: &Tally) -> String {
    match count {
        1 => format!("endpoint {first}"),
        _ => format!("{count} endpoints (the first is {first})"),
    }
}
