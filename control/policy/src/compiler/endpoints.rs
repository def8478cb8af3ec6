//! Endpoint assignment: for each covered pod address the policy with the highest precedence, its VIPs and its gateway.

mod spreader;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use vipgate_dataplane::policy::spec::{BackendState, EndpointSpec};

use self::spreader::{Assigned, Missing, PolicyVips, Spreader};
use super::claim::{Claim, Inputs};
use super::inventory::age_key;
use super::pods::CoveredAddress;
use super::shard_maps::ShardMaps;
use super::vips::AssignedVip;
use crate::diagnostic::{Code, Diagnostic, Severity};

/// Overridden policies that are named per endpoint, at most.
const MAX_REMARKS: usize = 8;

/// Endpoints that one diagnostic is about: their number and the first address.
#[derive(Debug)]
struct Affected {
    count: usize,
    first: IpAddr,
}

/// The endpoints of claims.
pub(super) struct Endpoints {
    /// Every covered address with its policy, VIPs and gateway.
    pub(super) specs: Vec<EndpointSpec>,
    /// The names of the shard maps that endpoints of each claim have slots of.
    pub(super) maps: Vec<Vec<Arc<str>>>,
}

/// Assigns the addresses that `claims` cover; these are sorted by precedence, highest first. What a claim gets depends on
/// no claim that has no address in common with it.
pub(super) fn assign(
    sources: &Inputs<'_>,
    claims: &[Claim<'_>],
    vips: &[AssignedVip],
    shard_maps: &mut ShardMaps,
    diagnostics: &mut Vec<Diagnostic>,
) -> Endpoints {
    let policy_vips: Vec<PolicyVips<'_>> = claims.iter().map(|claim| PolicyVips::of(claim, vips)).collect();
    let mut spreader = Spreader::new(sources.gateways, shard_maps);
    let covers = claims.iter().enumerate();
    let covers = covers.flat_map(|(claim, it)| it.covers.iter().map(move |cover| (cover.address, claim, cover)));
    let mut covers: Vec<Cover<'_, '_>> = covers.collect();
    covers.sort_unstable_by_key(|(address, claim, _)| (*address, *claim));
    let mut endpoints = Vec::with_capacity(covers.len());
    let mut overridden: BTreeMap<(usize, usize), Affected> = BTreeMap::new();
    let mut override_remarks: HashMap<(usize, usize), Arc<str>> = HashMap::new();
    let mut unassigned: BTreeMap<(usize, Missing), Affected> = BTreeMap::new();
    for same_address in covers.chunk_by_mut(|(a, ..), (b, ..)| a == b) {
        if same_address.len() > 1 {
            // The claim with the highest precedence first, and among its entries one with a name.
            same_address.sort_unstable_by_key(|(_, claim, cover)| {
                (*claim, cover.name.is_empty(), &**cover.name, cover.locality.node, cover.locality.zone)
            });
        }
        let (same_address, is_disputed) = of_one_pod(same_address, sources);
        if same_address.len() > 1 && sources.pods.holder(same_address[0].0).is_none() {
            put_older_namespace_first(same_address, claims);
        }
        let (address, winner, cover) = same_address[0];
        let mut remarks = Vec::new();
        // The winner's entries come first; the entries of each other claim are adjacent.
        for same_claim in same_address.chunk_by(|(_, a, _), (_, b, _)| a == b).skip(1) {
            let loser = same_claim[0].1;
            count(overridden.entry((loser, winner)).or_insert(Affected { count: 0, first: address }));
            let remark = || override_remark(&claims[winner], &claims[loser]).into();
            // Which policies of other namespaces cover the pod in vain isn't said.
            let namespaces = [claims[winner].namespace, claims[loser].namespace];
            let is_own = namespaces[0] == namespaces[1] || namespaces.contains(&"");
            if is_own && remarks.len() < MAX_REMARKS {
                remarks.push(override_remarks.entry((loser, winner)).or_insert_with(remark).clone());
            }
        }
        let (claim, vips) = (&claims[winner], &policy_vips[winner]);
        let assigned = if is_disputed { Ok(Assigned::default()) } else { spreader.assign(winner, claim, vips, cover) };
        if is_disputed {
            remarks.push("several pods have this address, so its traffic is dropped".into());
        }
        let Assigned { vips, gateway, slot } = match assigned {
            Ok(assignment) => assignment,
            Err(_) if claim.is_invalid => {
                remarks.push(format!("{} has no VIP: see `vipgate check`", claim.name).into());
                Assigned::default()
            }
            Err(missing) => {
                remarks.push(format!("{} {}", claim.name, describe(claim, missing).2).into());
                count(unassigned.entry((winner, missing)).or_insert(Affected { count: 0, first: address }));
                Assigned::default()
            }
        };
        let name = if cover.name.is_empty() { sources.pods.name_of(address).unwrap_or(cover.name) } else { cover.name };
        let policy = claim.name.clone();
        endpoints.push(EndpointSpec { address, name: name.clone(), policy, vips, gateway, slot, remarks });
    }
    report(claims, &overridden, &unassigned, diagnostics);
    Endpoints { specs: endpoints, maps: spreader.maps_of(claims.len()) }
}

/// An address that claims cover, with the index of the claim.
type Cover<'c, 'a> = (IpAddr, usize, &'c CoveredAddress<'a>);

/// The entries of the pod that has an address, and whether that is disputed. Where pods are known this is decided already;
/// where only slices name them, the pod that is ready has it.
fn of_one_pod<'s, 'c, 'a>(entries: &'s mut [Cover<'c, 'a>], sources: &Inputs<'_>) -> (&'s mut [Cover<'c, 'a>], bool) {
    let has_several = |entries: &[Cover<'_, '_>]| {
        let mut names = entries.iter().map(|(_, _, cover)| &**cover.name).filter(|name| !name.is_empty());
        let first = names.next();
        names.any(|name| Some(name) != first)
    };
    if sources.pods.are_known() || !has_several(entries) {
        let is_disputed = sources.pods.is_disputed(entries[0].0);
        return (entries, is_disputed);
    }
    let is_ready = |(_, _, cover): &Cover<'_, '_>| cover.state == BackendState::Ready;
    if !entries.iter().any(is_ready) {
        return (entries, true);
    }
    // Stable: the order of precedence stays.
    entries.sort_by_key(|entry| !is_ready(entry));
    let count = entries.partition_point(is_ready);
    let ready = &mut entries[..count];
    let is_disputed = has_several(ready);
    (ready, is_disputed)
}

/// Puts the entries of one namespace before those of others: an address that no pod has is of the namespace with the oldest
/// claim to it. Claims without a namespace keep their precedence.
fn put_older_namespace_first(entries: &mut [Cover<'_, '_>], claims: &[Claim<'_>]) {
    let of_tenants = entries.iter().map(|(_, claim, _)| &claims[*claim]).filter(|claim| !claim.namespace.is_empty());
    let oldest = of_tenants.min_by_key(|claim| age_key(claim.created, claim.id)).map(|claim| claim.namespace);
    let is_of_other = |namespace: &str| !namespace.is_empty() && oldest.is_some_and(|oldest| oldest != namespace);
    entries.sort_by_key(|(_, claim, _)| is_of_other(claims[*claim].namespace));
}

fn count(affected: &mut Affected) {
    affected.count += 1;
}

fn report(
    claims: &[Claim<'_>],
    overridden: &BTreeMap<(usize, usize), Affected>,
    unassigned: &BTreeMap<(usize, Missing), Affected>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    for ((loser, winner), affected) in overridden {
        let (loser, winner) = (&claims[*loser], &claims[*winner]);
        let reason = format!(
            "{} covers {}, which {} ({}) also covers: {} takes precedence ({})",
            loser.name,
            endpoints(affected),
            winner.name,
            winner.origin,
            winner.name,
            precedence(winner, loser)
        );
        diagnostics.push(loser.diagnostic(Severity::Warning, Code::PoliciesOverlap, loser.field, reason));
    }
    for ((claim, missing), affected) in unassigned {
        let claim = &claims[*claim];
        let (code, field, what) = describe(claim, *missing);
        let reason = format!("{} {what}: the traffic of {} is dropped", claim.name, endpoints(affected));
        diagnostics.push(claim.diagnostic(Severity::Warning, code, field, reason));
    }
}

/// Code, field and text of the diagnostic for what a claim is missing.
fn describe(claim: &Claim<'_>, missing: Missing) -> (Code, &'static str, String) {
    match missing {
        Missing::Vip(family) => (Code::NoVipOfFamily, claim.vips_field, format!("has no {family} VIP")),
        Missing::Gateway(family) => {
            let what = format!("has no eligible gateway with capacity for its {family} VIPs");
            (Code::NoEligibleGateway, claim.field, what)
        }
        Missing::Zone => {
            let what = "requires a gateway in the zone of each endpoint".to_owned();
            (Code::NoGatewayInZone, "spec.zoneAffinity", what)
        }
    }
}

/// Remark of an endpoint: the policy that its policy takes precedence over, and why.
fn override_remark(winner: &Claim<'_>, loser: &Claim<'_>) -> String {
    format!("takes precedence over {}, which also covers it: {}", loser.name, precedence(winner, loser))
}

/// Why one policy takes precedence over another that covers the same endpoint.
fn precedence(winner: &Claim<'_>, loser: &Claim<'_>) -> &'static str {
    let has_lower_precedence =
        (winner.rank, age_key(winner.created, winner.id)) > (loser.rank, age_key(loser.created, loser.id));
    match () {
        () if has_lower_precedence => "no pod has the address, and its namespace has the oldest policy for it",
        () if winner.rank != loser.rank => winner.rank.precedence_reason(loser.rank, !winner.namespace.is_empty()),
        () if winner.created.is_some() && loser.created.is_none() => "the other policy has no creationTimestamp",
        () if winner.created != loser.created => "it is older",
        () => "same age, and it sorts first by namespace, then name",
    }
}

fn endpoints(Affected { count, first }: &Affected) -> String {
    match count {
        1 => format!("endpoint {first}"),
        _ => format!("{count} endpoints (the first is {first})"),
    }
}
