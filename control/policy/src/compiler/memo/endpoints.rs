//! Endpoints and policies of the claims that a change concerns.
//!
//! The endpoints of an address depend on all claims that cover it, and diagnostics on all endpoints of a claim. So claims
//! that have addresses in common are compiled together.

use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use vipgate_dataplane::policy::spec::{EgressSpec, EndpointSpec};

use super::{Differences, Placement, Table, VipTable};
use crate::compiler::budget::{Grants, Totals, Usage};
use crate::compiler::changes::Changes;
use crate::compiler::claim::{Claim, Inputs};
use crate::compiler::endpoints;
use crate::compiler::gateways::Candidates;
use crate::compiler::inventory::{Inventory, age_key};
use crate::compiler::options::Share;
use crate::compiler::shard_maps::ShardMaps;
use crate::diagnostic::{Code, Diagnostic, ObjectLocation, Severity};

/// The claims of the previous compilation.
#[derive(Clone, Debug, Default)]
pub(super) struct EndpointMemo {
    claims: HashMap<Arc<str>, ClaimMemo>,
    /// What their endpoints take of limits.
    totals: Totals,
    /// The claims by covered address.
    coverage: HashMap<IpAddr, Covering>,
    /// The number of claims with endpoints that have slots of a shard map, by its name.
    maps: HashMap<Arc<str>, usize>,
    /// Counts compilations in which more than endpoint slices differ: claims of an earlier one are gone.
    round: u64,
    /// Diagnostics about endpoints that aren't about a claim: with any, all claims are compiled each time.
    unattributed: Vec<Diagnostic>,
}

/// A claim of the previous compilation.
#[derive(Clone, Debug)]
struct ClaimMemo {
    vips: Vec<IpAddr>,
    gateways: Candidates,
    group: Arc<str>,
    is_invalid: bool,
    is_default: bool,
    /// The addresses that it covers, each once.
    addresses: Vec<IpAddr>,
    /// About them.
    diagnostics: Vec<Diagnostic>,
    /// The names of the shard maps that its endpoints have slots of.
    maps: Vec<Arc<str>>,
    /// What its endpoints take of limits, and its namespace.
    usage: Usage,
    namespace: Box<str>,
    /// The last compilation that had it, and its position there.
    round: u64,
    at: usize,
}

/// The names of the claims that cover an address: mostly one.
#[derive(Clone, Debug)]
enum Covering {
    One(Arc<str>),
    Several(Vec<Arc<str>>),
}

impl Covering {
    fn add(&mut self, name: &Arc<str>) {
        match self {
            Self::One(first) => *self = Self::Several(vec![first.clone(), name.clone()]),
            Self::Several(names) => names.push(name.clone()),
        }
    }

    /// Removes a name; returns whether it was the last one.
    fn remove(&mut self, name: &str) -> bool {
        match self {
            Self::One(only) => **only == *name,
            Self::Several(names) => {
                names.retain(|other| **other != *name);
                names.is_empty()
            }
        }
    }

    fn names(&self) -> &[Arc<str>] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Several(names) => names,
        }
    }
}

impl EndpointMemo {
    /// The policies of all claims, and the endpoints that they cover. `claims` are sorted by precedence.
    pub(super) fn compile<'a>(
        &mut self,
        previous: &Placement,
        shard_maps: &mut ShardMaps,
        claims: Vec<Claim<'a>>,
        sources: &Inputs<'a>,
        vips: &VipTable,
        differences: &Differences<'_>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> (Table<EgressSpec>, Table<EndpointSpec>) {
        let (concerned, gone) = self.differing(&claims, differences);
        let (claims, places, warnings) = self.with_overlapping(claims, concerned, &gone, sources);
        let removed = self.forget(claims.iter().map(|claim| claim.name).chain(&gone));
        let mut found = Vec::new();
        let endpoints = endpoints::assign(sources, &claims, &vips.assigned, shard_maps, &mut found);
        let parts = places.into_iter().zip(warnings).zip(endpoints.maps);
        self.remember(&claims, parts.map(|((at, warnings), maps)| (at, warnings, maps)), found);
        self.account(&endpoints.specs);
        diagnostics.extend(self.claims.values().flat_map(|memo| memo.diagnostics.iter().cloned()));
        diagnostics.extend(self.unattributed.iter().cloned());
        let mut gone: Vec<&Arc<str>> = gone.iter().collect();
        gone.sort_unstable();
        let mut policies: Vec<EgressSpec> = claims.iter().map(Claim::spec).collect();
        policies.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let removed: Vec<&IpAddr> = removed.iter().collect();
        (previous.policies.edit(&gone, policies), previous.endpoints.edit(&removed, endpoints.specs))
    }

    /// Counts what endpoints take of limits: all of the claims that were remembered last.
    fn account(&mut self, endpoints: &[EndpointSpec]) {
        for endpoint in endpoints {
            let Some(memo) = self.claims.get_mut(&endpoint.policy) else { continue };
            let mut usage = Usage { endpoint_vips: endpoint.vips.len(), ..Usage::default() };
            usage.endpoints[usize::from(endpoint.address.is_ipv6())] = 1;
            memo.usage += &usage;
            self.totals.add(&memo.namespace, &usage);
        }
    }

    /// The names of the policies whose endpoints don't fit beside those of older ones.
    pub(super) fn beyond_budget(
        &self,
        inventory: &Inventory<'_>,
        share: Share,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> HashSet<Arc<str>> {
        if self.totals.fits(share) {
            return HashSet::default();
        }
        let policies = inventory.policies.iter();
        let policies = policies.map(|it| (it.body.metadata.creation_timestamp.as_ref(), it.id, it.name, it.origin));
        let services = inventory.services.iter().map(|it| (it.body.created.as_ref(), it.id, it.name, it.origin));
        let mut all: Vec<_> = policies.chain(services).collect();
        all.sort_by(|(a, id, ..), (b, other, ..)| age_key(*a, id).cmp(&age_key(*b, other)).then_with(|| id.cmp(other)));
        let (mut grants, mut beyond) = (Grants::new(share), HashSet::default());
        for (_, id, name, origin) in all {
            let Some(memo) = self.claims.get(name) else { continue };
            if let Err(reason) = grants.grant(&id.namespace, &memo.usage) {
                let reason = format!("{reason}; its endpoints are not covered");
                diagnostics.push(origin.diagnostic(Severity::Error, Code::LimitExceeded, "metadata.name", reason));
                beyond.insert(name.clone());
            }
        }
        beyond
    }

    /// Whether endpoints have slots of this shard map.
    pub(super) fn has_map(&self, name: &str) -> bool {
        self.maps.contains_key(name)
    }

    /// The positions of the claims that differ, and the names of those that are no more.
    fn differing(&mut self, claims: &[Claim<'_>], differences: &Differences<'_>) -> (Vec<usize>, Vec<Arc<str>>) {
        let Changes { has_pods, has_gateways, ref services, .. } = *differences.changes;
        let is_all = has_pods || has_gateways || differences.vips.in_use || !self.unattributed.is_empty();
        if !is_all && !differences.vips.is_new {
            // Only endpoint slices differ: the claims are the same, in the same positions.
            let is_sliced = |claim: &Claim<'_>| claim.service.is_some_and(|service| services.contains(&service));
            return ((0..claims.len()).filter(|at| is_sliced(&claims[*at])).collect(), Vec::new());
        }
        self.round += 1;
        let mut differing = Vec::new();
        for (at, claim) in claims.iter().enumerate() {
            if is_all || self.differs(claim, differences) {
                differing.push(at);
            }
            if let Some(memo) = self.claims.get_mut(claim.name) {
                (memo.round, memo.at) = (self.round, at);
            }
        }
        let is_gone = |(_, memo): &(&Arc<str>, &ClaimMemo)| memo.round != self.round;
        let gone = self.claims.iter().filter(is_gone).map(|(name, _)| name.clone()).collect();
        (differing, gone)
    }

    /// Whether a claim isn't what it was, or its VIPs aren't.
    fn differs(&self, claim: &Claim<'_>, differences: &Differences<'_>) -> bool {
        let Some(memo) = self.claims.get(claim.name) else { return true };
        claim.service.is_some_and(|service| differences.changes.services.contains(&service))
            || differences.changes.policies.contains(&**claim.name)
            || (memo.is_invalid, memo.is_default) != (claim.is_invalid, claim.is_default())
            || memo.gateways != claim.gateways
            || memo.group != *claim.group
            || !memo.vips.iter().eq(claim.vips.iter().map(|(_, vip)| vip))
            || memo.vips.iter().any(|vip| differences.vips.vips.contains(vip))
    }

    /// The claims at these positions with the addresses that they cover, and those that cover one of the addresses, now
    /// or before, in order, with their positions and the diagnostics about the addresses of each. `gone`: claims that
    /// are no more.
    fn with_overlapping<'a>(
        &self,
        mut claims: Vec<Claim<'a>>,
        mut queue: Vec<usize>,
        gone: &[Arc<str>],
        sources: &Inputs<'a>,
    ) -> (Vec<Claim<'a>>, Vec<usize>, Vec<Vec<Diagnostic>>) {
        let mut is_concerned = vec![false; claims.len()];
        for at in &queue {
            is_concerned[*at] = true;
        }
        let mut warnings: HashMap<usize, Vec<Diagnostic>> = HashMap::default();
        let mut add = |address: &IpAddr, queue: &mut Vec<usize>| {
            for name in self.coverage.get(address).map(Covering::names).unwrap_or_default() {
                let at = self.claims.get(name).filter(|memo| memo.round == self.round).map(|memo| memo.at);
                queue.extend(at.filter(|at| !std::mem::replace(&mut is_concerned[*at], true)));
            }
        };
        let addresses = |name: &Arc<str>| self.claims.get(name).map(|memo| &*memo.addresses).unwrap_or_default();
        for address in gone.iter().flat_map(addresses) {
            add(address, &mut queue);
        }
        while let Some(at) = queue.pop() {
            let claim = &mut claims[at];
            sources.cover(claim, warnings.entry(at).or_default());
            for address in addresses(claim.name) {
                add(address, &mut queue);
            }
            for cover in &claim.covers {
                add(&cover.address, &mut queue);
            }
        }
        let places: Vec<usize> = (0..claims.len()).filter(|at| is_concerned[*at]).collect();
        let warnings = places.iter().map(|at| warnings.remove(at).unwrap_or_default()).collect();
        let concerned = claims.into_iter().zip(is_concerned).filter(|(_, is_concerned)| *is_concerned);
        (concerned.map(|(claim, _)| claim).collect(), places, warnings)
    }

    /// Forgets claims; returns the addresses that they have covered, sorted, each once.
    fn forget<'n>(&mut self, names: impl Iterator<Item = &'n Arc<str>>) -> Vec<IpAddr> {
        let mut all = Vec::new();
        for name in names {
            let Some(memo) = self.claims.remove(name) else { continue };
            self.totals.remove(&memo.namespace, &memo.usage);
            for address in &memo.addresses {
                if let Entry::Occupied(mut covering) = self.coverage.entry(*address)
                    && covering.get_mut().remove(name)
                {
                    covering.remove();
                }
            }
            all.extend(memo.addresses);
            for map in memo.maps {
                if let Entry::Occupied(mut users) = self.maps.entry(map) {
                    *users.get_mut() -= 1;
                    if *users.get() == 0 {
                        users.remove();
                    }
                }
            }
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Remembers claims with the position of each, the diagnostics about its addresses and its shard maps, and the
    /// diagnostics about endpoints.
    fn remember(
        &mut self,
        claims: &[Claim<'_>],
        parts: impl Iterator<Item = (usize, Vec<Diagnostic>, Vec<Arc<str>>)>,
        diagnostics: Vec<Diagnostic>,
    ) {
        let mut names: HashMap<ObjectLocation, &Arc<str>> = HashMap::default();
        for (claim, (at, diagnostics, maps)) in claims.iter().zip(parts) {
            let name = claim.name;
            names.insert(claim.origin.location(), name);
            let mut addresses: Vec<IpAddr> = claim.covers.iter().map(|cover| cover.address).collect();
            addresses.sort_unstable();
            addresses.dedup();
            for address in &addresses {
                match self.coverage.entry(*address) {
                    Entry::Occupied(mut covering) => covering.get_mut().add(name),
                    Entry::Vacant(free) => drop(free.insert(Covering::One(name.clone()))),
                }
            }
            for map in &maps {
                *self.maps.entry(map.clone()).or_default() += 1;
            }
            let memo = ClaimMemo {
                vips: claim.vips.iter().map(|(_, vip)| *vip).collect(),
                gateways: claim.gateways.clone(),
                group: claim.group.clone(),
                is_invalid: claim.is_invalid,
                is_default: claim.is_default(),
                addresses,
                diagnostics,
                maps,
                usage: Usage::default(),
                namespace: claim.namespace.into(),
                round: self.round,
                at,
            };
            self.claims.insert(name.clone(), memo);
        }
        self.unattributed.clear();
        for diagnostic in diagnostics {
            let name = diagnostic.object.and_then(|object| names.get(&object));
            match name.and_then(|name| self.claims.get_mut(*name)) {
                Some(memo) => memo.diagnostics.push(diagnostic),
                None => self.unattributed.push(diagnostic),
            }
        }
    }
}
