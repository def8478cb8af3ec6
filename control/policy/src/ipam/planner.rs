//! The decisions of one plan: first what is kept, then what is given, oldest Service first.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use foldhash::HashMap;

use super::history::History;
use super::pools::Pools;
use super::{AllocationPlan, Decision, PoolUsage, Reason, Refusal};
use crate::address_record::{AddressRecord, NamespaceUse, Recorded};
use crate::manifest::{Family, FamilyPolicy, ObjectId, ServiceRequest};
use crate::shortage::Shortage;

pub(super) struct Planner<'a> {
    services: &'a [ServiceRequest],
    pools: Pools<'a>,
    policy_addresses: &'a [(IpAddr, ObjectId)],
    history: History<'a>,
    namespaces: NamespaceUse<'a>,
    /// Services by address: those that have it now, and those that get it.
    users: HashMap<IpAddr, Vec<usize>>,
    /// Addresses by namespace and sharing key.
    shared: HashMap<(&'a str, &'a str), BTreeSet<IpAddr>>,
    shortages: Vec<Shortage>,
}

impl<'a> Planner<'a> {
    pub(super) fn new(
        services: &'a [ServiceRequest],
        pools: Pools<'a>,
        policy_addresses: &'a [(IpAddr, ObjectId)],
        recorded: &'a Recorded,
    ) -> Self {
        let namespaces = NamespaceUse::recorded(recorded, |address| pools.spec_of(address));
        Self {
            services,
            history: History::new(recorded, &pools),
            namespaces,
            pools,
            policy_addresses,
            users: HashMap::default(),
            shared: HashMap::default(),
            shortages: Vec::new(),
        }
    }

    pub(super) fn plan(mut self) -> AllocationPlan {
        let mut order: Vec<usize> = (0..self.services.len()).collect();
        order.sort_by_key(|index| {
            let ServiceRequest { created, namespace, name, .. } = &self.services[*index];
            (created.is_none(), created, namespace, name)
        });
        for index in &order {
            let ServiceRequest { current, assumed, .. } = &self.services[*index];
            for address in current.iter().chain(assumed) {
                self.add_user(*address, *index);
            }
        }
        let kept = self.keep(&order);
        let mut decisions = Vec::new();
        for index in order {
            decisions.extend(self.decide(index, &kept[index]));
        }
        let (usage, records) = (self.usage(), self.records(&decisions));
        AllocationPlan { decisions, usage, shortages: self.shortages, records, waits_until: self.history.waits_until() }
    }

    /// The records of all pools, with what Services have, and are to have, and what policies are to have.
    fn records(&self, decisions: &[Decision]) -> BTreeMap<String, AddressRecord> {
        let recorded = self.history.recorded;
        let ids: Vec<ObjectId> = self.services.iter().map(ServiceRequest::id).collect();
        let current = self.services.iter().zip(&ids).flat_map(|(service, id)| {
            service.current.iter().chain(&service.assumed).map(move |address| (*address, id))
        });
        let decided = decisions
            .iter()
            .flat_map(|decision| decision.addresses.iter().map(|address| (*address, &ids[decision.service])));
        // Policies were compiled with an earlier record, perhaps.
        let may_have = |(address, owner): &(IpAddr, &ObjectId)| !self.history.is_withheld(*address, owner, &self.pools);
        let of_policies = self.policy_addresses.iter().map(|(address, owner)| (*address, owner)).filter(may_have);
        let reuse_after = |address| self.pools.spec_of(address).map(|(_, spec)| spec.reuse_after);
        let given = current.chain(decided).chain(of_policies).filter(|(address, _)| reuse_after(*address).is_some());
        let next = recorded.next(given, reuse_after);
        let mut records: BTreeMap<String, AddressRecord> =
            self.pools.all.iter().map(|pool| (pool.name.to_owned(), AddressRecord::default())).collect();
        for (address, holding) in next.iter() {
            let pool = self.pools.of(address).map(|pool| self.pools.all[pool].name);
            if let Some(record) = pool.and_then(|pool| records.get_mut(pool)) {
                record.insert(address, holding.clone());
            }
        }
        records
    }

    /// Whether a policy has an address, or is to have it.
    fn is_policys(&self, address: IpAddr) -> bool {
        self.policy_addresses.binary_search_by_key(&address, |(address, _)| *address).is_ok()
    }

    fn add_user(&mut self, address: IpAddr, index: usize) {
        if let Some((pool, _)) = self.pools.spec_of(address) {
            self.namespaces.add(pool, &self.services[index].namespace, address);
        }
        let users = self.users.entry(address).or_default();
        if !users.contains(&index) {
            users.push(index);
        }
        let service = &self.services[index];
        if let Some(key) = &service.sharing_key {
            self.shared.entry((&service.namespace, key)).or_default().insert(address);
        }
    }

    /// What each Service keeps: at most one address of each family, unless an older one has it and doesn't share it.
    fn keep(&self, order: &[usize]) -> Vec<Vec<IpAddr>> {
        let mut keepers: HashMap<IpAddr, Vec<usize>> = HashMap::default();
        let mut kept: Vec<Vec<IpAddr>> = vec![Vec::new(); self.services.len()];
        for index in order {
            let service = &self.services[*index];
            let is_released = service.is_writable() && !service.is_handled;
            for address in service.held().iter().filter(|_| !is_released) {
                let others = keepers.entry(*address).or_default();
                let has_family = kept[*index].iter().any(|it| Family::of(*it) == Family::of(*address));
                let can_share = others.iter().all(|other| service.can_share_with(&self.services[*other]));
                if service.is_writable() && (has_family || !can_share) {
                    continue;
                }
                others.push(*index);
                kept[*index].push(*address);
            }
        }
        kept
    }

    fn decide(&mut self, index: usize, kept: &[IpAddr]) -> Option<Decision> {
        let services = self.services;
        let service = &services[index];
        if !service.is_writable() || service.is_deleted {
            return None;
        }
        if !service.is_handled {
            return Some(Decision { service: index, is_change: service.has_ingress, ..Decision::default() });
        }
        let (mut addresses, refusal) = self.choose(index, kept);
        if service.policy == FamilyPolicy::RequireDualStack && addresses.len() < 2 {
            // Both or none; but what it has stays until it has both.
            let given: Vec<IpAddr> = addresses.extract_if(.., |address| !kept.contains(address)).collect();
            self.give_back(index, &given);
        }
        let is_outside =
            |address: &&IpAddr| self.pools.of(**address).is_none_or(|pool| !self.pools.allows(pool, service));
        let outside = addresses.iter().filter(is_outside).copied().collect();
        let is_same =
            addresses.len() == service.current.len() && addresses.iter().all(|it| service.current.contains(it));
        Some(Decision { service: index, is_change: !is_same, addresses, refusal, outside })
    }

    /// The addresses of a handled Service, by family, and why one is missing. A request that can't be read, or that
    /// contradicts itself, changes nothing.
    fn choose(&mut self, index: usize, kept: &[IpAddr]) -> (Vec<IpAddr>, Option<Refusal>) {
        let services = self.services;
        let service = &services[index];
        let named = match &service.addresses {
            Ok(named) => named.as_slice(),
            Err(text) => {
                return (kept.to_vec(), Some(Refusal { reason: Reason::Invalid, text: text.clone() }));
            }
        };
        let families = self.families(index, named, kept);
        if let Some(address) = named.iter().find(|address| !families.contains(&Family::of(**address))) {
            let text = format!("{address} is not of its families: check `spec.ipFamilies` and `spec.ipFamilyPolicy`");
            return (kept.to_vec(), Some(Refusal { reason: Reason::Family, text }));
        }
        let (mut addresses, mut refusal, mut exhausted) = (Vec::new(), None, Vec::new());
        for family in families {
            let of_family = |all: &[IpAddr]| all.iter().find(|address| Family::of(**address) == family).copied();
            let kept = of_family(kept);
            let found = match (of_family(named), kept) {
                (Some(named), Some(kept)) if named == kept => Ok(named),
                (Some(named), _) => self.check_named(index, named).map(|()| named),
                (None, Some(kept)) if !self.is_in_other_pool(kept, service) => Ok(kept),
                (None, _) => self.allocate(index, family),
            };
            match found {
                Ok(address) => {
                    self.add_user(address, index);
                    addresses.push(address);
                }
                Err(why) => {
                    addresses.extend(kept);
                    exhausted.extend(matches!(why.reason, Reason::Exhausted | Reason::Quarantined).then_some(family));
                    refusal.get_or_insert(why);
                }
            }
        }
        let is_optional =
            |refusal: &Refusal| matches!(refusal.reason, Reason::NoPool | Reason::Exhausted | Reason::Quarantined);
        if service.policy == FamilyPolicy::PreferDualStack && !addresses.is_empty() {
            refusal = refusal.filter(|refusal| !is_optional(refusal));
        }
        if refusal.is_some() {
            if service.policy != FamilyPolicy::RequireDualStack {
                exhausted.truncate(1);
            }
            self.add_shortages(service, &exhausted);
        }
        (addresses, refusal)
    }

    /// Notes families of which a Service lacks an address that the provider of a pool can allocate.
    fn add_shortages(&mut self, service: &ServiceRequest, families: &[Family]) {
        for family in families {
            let candidates = self.pools.candidates(service);
            if let Some(pool) = candidates.into_iter().find(|pool| self.pools.may_grow(*pool, *family)) {
                let (pool, owner) = (self.pools.all[pool].name.to_owned(), service.owner());
                self.shortages.push(Shortage { pool, owner, family: *family, wanted: 1 });
            }
        }
    }

    /// The families of a Service, in order.
    fn families(&mut self, index: usize, named: &[IpAddr], kept: &[IpAddr]) -> Vec<Family> {
        let services = self.services;
        let service = &services[index];
        if service.policy != FamilyPolicy::SingleStack {
            let mut families = service.families.clone();
            if families.is_empty() || service.policy == FamilyPolicy::RequireDualStack {
                let missing = Family::ALL.into_iter().filter(|family| !service.families.contains(family));
                families.extend(missing);
            }
            return families;
        }
        if let Some(first) = service.families.first() {
            return vec![*first];
        }
        if let Some(address) = named.first().or(kept.first()) {
            return vec![Family::of(*address)];
        }
        // The first one that has an address for it, else the first one of a pool.
        let candidates = self.pools.candidates(service);
        let has = |family: &Family| candidates.iter().any(|pool| self.pools.has(*pool, *family));
        let of_pools: Vec<Family> = Family::ALL.into_iter().filter(has).collect();
        let family = of_pools.iter().find(|family| self.find(index, **family).is_some()).or(of_pools.first());
        vec![family.copied().unwrap_or(Family::V4)]
    }

    /// Whether a Service may get an address that it names.
    fn check_named(&mut self, index: usize, address: IpAddr) -> Result<(), Refusal> {
        let service = &self.services[index];
        let Some(pool) = self.pools.of(address) else {
            let text = format!("{address} is in no AddressPool");
            return Err(Refusal { reason: Reason::NotInPool, text });
        };
        if !self.pools.allows(pool, service) {
            let text = format!(
                "{address} is in AddressPool {}, which is not for this Service: check its `namespaces` and \
                 `serviceSelector`, and `vipgate.io/pool`",
                self.pools.all[pool].name
            );
            return Err(Refusal { reason: Reason::NotInPool, text });
        }
        if self.is_policys(address) {
            let text = format!("{address} is a VIP of an EgressPolicy");
            return Err(Refusal { reason: Reason::InUse, text });
        }
        match self.other_user(index, address) {
            None => self.check_history(index, address, pool),
            Some(other) => {
                let text = format!(
                    "{address} is in use by Service {}: Services of one namespace share it with the same \
                     `vipgate.io/sharing-key` and other ports",
                    self.services[other].path()
                );
                Err(Refusal { reason: Reason::InUse, text })
            }
        }
    }

    /// Whether a Service may get an address of a pool that it names and no other one has.
    fn check_history(&mut self, index: usize, address: IpAddr, pool: usize) -> Result<(), Refusal> {
        let service = &self.services[index];
        let (name, spec) = self.pools.spec(pool);
        let recorded = self.history.recorded;
        let owner = recorded.record.get(address).map(|holding| (&holding.owner, holding.freed));
        let other = owner.filter(|(owner, _)| owner.namespace != service.namespace);
        if let Some((owner, None)) = other {
            let text = format!("{address} is recorded as that of {owner}");
            return Err(Refusal { reason: Reason::InUse, text });
        }
        if let Some((end, _)) = recorded.quarantine(address, spec.reuse_after).filter(|_| other.is_some()) {
            self.history.is_awaited = true;
            let text = format!("{address} was another namespace's, and is quarantined until {end:.0}");
            return Err(Refusal { reason: Reason::Quarantined, text });
        }
        match self.namespaces.grant((name, spec), &service.namespace, address) {
            Ok(_) => Ok(()),
            Err(text) => {
                self.history.is_awaited = true;
                Err(Refusal { reason: Reason::NamespaceLimit, text })
            }
        }
    }

    /// A Service that has the address and doesn't share it with this one.
    fn other_user(&self, index: usize, address: IpAddr) -> Option<usize> {
        let service = &self.services[index];
        let mut users = self.users.get(&address).into_iter().flatten().copied();
        users.find(|user| *user != index && !service.can_share_with(&self.services[*user]))
    }

    /// Whether an address is in another pool than that which the Service names.
    fn is_in_other_pool(&self, address: IpAddr, service: &ServiceRequest) -> bool {
        let pool = self.pools.of(address).map(|pool| self.pools.all[pool].name);
        service.pool.as_deref().zip(pool).is_some_and(|(named, pool)| named != pool)
    }

    /// Whether nobody has an address.
    fn is_unused(&self, address: IpAddr) -> bool {
        self.users.get(&address).is_none_or(Vec::is_empty) && !self.is_policys(address)
    }

    /// Whether an address is of a pool and a family, and may be given.
    fn is_free(&self, pool: usize, family: Family, address: IpAddr) -> bool {
        let is_here = self.pools.of(address) == Some(pool) && Family::of(address) == family;
        is_here && self.is_unused(address) && self.pools.is_unclaimed(address)
    }

    /// An address of a pool that the Service had before.
    fn former(&self, index: usize, pool: usize, family: Family) -> Option<IpAddr> {
        let former = self.history.former(&self.services[index].id()).iter().copied();
        let (spec, namespace) = (self.pools.spec(pool), self.services[index].namespace.as_str());
        // One that still counts for the namespace is no new one.
        let may_have = |address: &IpAddr| self.namespaces.may_have(spec, namespace, *address);
        former.filter(|address| self.is_free(pool, family, *address)).find(may_have)
    }

    /// A free address of a pool: one that nobody had, else the one that is free for longest.
    fn free(&mut self, pool: usize, family: Family) -> Option<IpAddr> {
        let (users, of_policies, recorded) = (&self.users, self.policy_addresses, self.history.recorded);
        let is_known = |address: &IpAddr| {
            users.get(address).is_some_and(|users| !users.is_empty())
                || of_policies.binary_search_by_key(address, |(address, _)| *address).is_ok()
                || recorded.record.get(*address).is_some()
        };
        let unused = self.pools.free(pool, family, is_known);
        unused.or_else(|| self.history.reusable(pool, family).find(|address| self.is_free(pool, family, *address)))
    }

    /// The pools that are for a Service and have addresses of a family.
    fn candidates(&self, service: &ServiceRequest, family: Family) -> Vec<usize> {
        let mut candidates = self.pools.candidates(service);
        candidates.retain(|pool| self.pools.has(*pool, family));
        candidates
    }

    /// An address of a family that a Service may get: one that it shares, else a free one.
    fn find(&mut self, index: usize, family: Family) -> Option<IpAddr> {
        let services = self.services;
        let service = &services[index];
        let candidates = self.candidates(service, family);
        if let Some(key) = &service.sharing_key {
            let shared = self.shared.get(&(service.namespace.as_str(), key.as_str()));
            let is_possible = |address: &&IpAddr| {
                Family::of(**address) == family
                    && self.pools.of(**address).is_some_and(|pool| candidates.contains(&pool))
                    && !self.is_policys(**address)
                    && self.other_user(index, **address).is_none()
            };
            if let Some(address) = shared.into_iter().flatten().find(is_possible) {
                return Some(*address);
            }
        }
        if let Some(former) = candidates.iter().find_map(|pool| self.former(index, *pool, family)) {
            return Some(former);
        }
        let is_open = |pool: &usize| self.namespaces.why_full(self.pools.spec(*pool), &service.namespace).is_none();
        let open: Vec<usize> = candidates.into_iter().filter(is_open).collect();
        open.into_iter().find_map(|pool| self.claimed(index, pool, family).or_else(|| self.free(pool, family)))
    }

    /// An address of a pool that is claimed for a Service at the pool's provider, such as one that was allocated for it.
    fn claimed(&self, index: usize, pool: usize, family: Family) -> Option<IpAddr> {
        let claimed = self.pools.claimed_for(pool, &self.services[index], family);
        let is_free = |address: &IpAddr| !self.is_policys(*address) && self.other_user(index, *address).is_none();
        claimed.into_iter().find(is_free)
    }

    /// An address of a family.
    fn allocate(&mut self, index: usize, family: Family) -> Result<IpAddr, Refusal> {
        if let Some(address) = self.find(index, family) {
            return Ok(address);
        }
        let services = self.services;
        let service = &services[index];
        let candidates = self.candidates(service, family);
        Err(match (candidates.is_empty(), &service.pool) {
            (true, None) => {
                let text = format!("no AddressPool with {family} addresses is for this Service");
                Refusal { reason: Reason::NoPool, text }
            }
            (true, Some(name)) => {
                let text = format!("there is no AddressPool {name} with {family} addresses for this Service");
                Refusal { reason: Reason::NoPool, text }
            }
            (false, _) => self.why_none(index, &candidates, family),
        })
    }

    /// Why no address of these pools is free.
    fn why_none(&mut self, index: usize, candidates: &[usize], family: Family) -> Refusal {
        self.history.is_awaited = true;
        let service = &self.services[index];
        let full = |pool: &usize| self.namespaces.why_full(self.pools.spec(*pool), &service.namespace);
        let full: Vec<String> = candidates.iter().filter_map(full).collect();
        if full.len() == candidates.len() {
            return Refusal { reason: Reason::NamespaceLimit, text: full.join("; ") };
        }
        let names: Vec<&str> = candidates.iter().map(|pool| self.pools.all[*pool].name).collect();
        let text = format!("no {family} address is free in AddressPool {}", names.join(", "));
        let is_here = |address: IpAddr| {
            Family::of(address) == family && self.pools.of(address).is_some_and(|pool| candidates.contains(&pool))
        };
        let Some(end) = self.history.first_end(is_here) else { return Refusal { reason: Reason::Exhausted, text } };
        let text = format!("{text}: others are quarantined, the first one until {end:.0}");
        Refusal { reason: Reason::Quarantined, text }
    }

    /// Takes back addresses that a Service was given in this plan.
    fn give_back(&mut self, index: usize, addresses: &[IpAddr]) {
        let service = &self.services[index];
        for address in addresses.iter().filter(|it| !service.current.contains(it) && !service.assumed.contains(it)) {
            if let Some(users) = self.users.get_mut(address) {
                users.retain(|user| *user != index);
                if let Some((pool, _)) = self.pools.spec_of(*address).filter(|_| users.is_empty()) {
                    self.namespaces.remove(pool, &service.namespace, *address);
                }
                // Nobody else may find it by the key.
                let key = service.sharing_key.as_deref().map(|key| (service.namespace.as_str(), key));
                if let Some(shared) = key.filter(|_| users.is_empty()).and_then(|key| self.shared.get_mut(&key)) {
                    shared.remove(address);
                }
            }
            self.pools.rewind();
        }
    }

    fn usage(&self) -> Vec<PoolUsage> {
        let mut counts = vec![PoolCounts::default(); self.pools.all.len()];
        for (address, users) in self.users.iter().filter(|(_, users)| !users.is_empty()) {
            let Some(counts) = self.pools.of(*address).map(|pool| &mut counts[pool]) else { continue };
            counts.services += 1;
            counts.used[Family::of(*address) as usize] += 1;
            // Services that share an address are of one namespace.
            *counts.namespaces.entry(&self.services[users[0]].namespace).or_default() += 1;
        }
        let of_policies: BTreeSet<IpAddr> = self.policy_addresses.iter().map(|(address, _)| *address).collect();
        for address in of_policies.iter().filter(|address| !self.users.contains_key(*address)) {
            let Some(counts) = self.pools.of(*address).map(|pool| &mut counts[pool]) else { continue };
            counts.policies += 1;
            counts.used[Family::of(*address) as usize] += 1;
        }
        for address in self.history.quarantined() {
            let is_used =
                self.users.get(&address).is_some_and(|users| !users.is_empty()) || of_policies.contains(&address);
            let Some(counts) = self.pools.of(address).filter(|_| !is_used).map(|pool| &mut counts[pool]) else {
                continue;
            };
            counts.quarantined += 1;
            counts.used[Family::of(address) as usize] += 1;
        }
        let usage = counts.into_iter().enumerate().map(|(pool, counts)| {
            let free =
                |family: Family| self.pools.size(pool, family).saturating_sub(u128::from(counts.used[family as usize]));
            let total = Family::ALL.into_iter().fold(0, |sum: u128, family| sum.saturating_add(free(family)));
            let is_exhausted = |family: &Family| self.pools.has(pool, *family) && free(*family) == 0;
            PoolUsage {
                name: self.pools.all[pool].name.to_owned(),
                services: counts.services,
                policies: counts.policies,
                quarantined: counts.quarantined,
                free: u64::try_from(total).unwrap_or(u64::MAX),
                exhausted: Family::ALL.into_iter().filter(is_exhausted).collect(),
                namespaces: counts.namespaces.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
            }
        });
        usage.collect()
    }
}

/// The addresses of a pool that are in use.
#[derive(Clone, Debug, Default)]
struct PoolCounts<'a> {
    services: u64,
    policies: u64,
    quarantined: u64,
    /// By family, with quarantined ones.
    used: [u64; 2],
    namespaces: BTreeMap<&'a str, u64>,
}
