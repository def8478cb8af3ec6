//! Allocation of pools' addresses to policies.
//!
//! With a record, a policy keeps what it has there, and what it is to have beside that is in force once it is recorded. It
//! gets back what it had, else an address that nobody had, else the one that is free for longest; none that is quarantined.
//! Without one, what it gets follows from the manifests alone. The first address that a policy tries is a hash of its name,
//! and older policies allocate first.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};

use foldhash::{HashMap, HashSet};
use k8s_openapi::jiff::Timestamp;

use super::{Pools, provided};
use crate::address_record::{NamespaceUse, Recorded};
use crate::compiler::claim::Inputs;
use crate::compiler::inventory::{ObjectRef, age_key};
use crate::diagnostic::{Code, Severity};
use crate::fingerprint::Fingerprint;
use crate::manifest::{
    AddressPool, AddressRange, CloudPool, EgressPolicy, EgressPolicySpec, Family, Kind, ObjectId, PoolRef, ReuseAfter,
    Service,
};

/// Addresses that policies have by the record, with their owners.
pub(in crate::compiler) type Reserved<'a> = HashMap<IpAddr, &'a ObjectId>;

/// What a policy gets of a pool.
#[derive(Debug, Default)]
pub(in crate::compiler) struct Allocation {
    /// The addresses that it has.
    pub(in crate::compiler) addresses: Vec<IpAddr>,
    /// Those that it is to have once they are recorded.
    pub(in crate::compiler) pending: Vec<IpAddr>,
    /// The family of which it gets too few, how many are missing, and why.
    pub(in crate::compiler) lack: Option<(Family, usize, Lack)>,
}

/// An address that a policy gets.
#[derive(Clone, Copy, Debug)]
struct Granted {
    address: IpAddr,
    /// Whether it has it by the record, or by a claim at the provider.
    is_kept: bool,
}

/// Why a policy gets too few addresses.
#[derive(Debug)]
pub(in crate::compiler) enum Lack {
    /// None is free.
    Exhausted,
    /// Those that are free are quarantined: the first one until then.
    Quarantined(Timestamp),
    /// Its namespace may have no more.
    Limited(String),
}

/// Why a policy doesn't get an address that it names.
#[derive(Debug)]
pub(in crate::compiler) enum Refusal<'a> {
    /// It is another policy's by the record.
    Owned(&'a ObjectId),
    /// It is quarantined until then.
    Quarantined(Timestamp),
    /// The namespace may have no more of the pool.
    Limited(String),
}

impl Refusal<'_> {
    /// What it is to whoever wrote the policy: a quarantine ends by itself.
    pub(in crate::compiler) fn severity(&self) -> Severity {
        if matches!(self, Self::Quarantined(_)) { Severity::Warning } else { Severity::Error }
    }

    /// The kind of mistake.
    pub(in crate::compiler) fn code(&self) -> Code {
        match self {
            Self::Owned(_) => Code::VipOfTwoPolicies,
            Self::Quarantined(_) => Code::AddressQuarantined,
            Self::Limited(_) => Code::NamespaceLimit,
        }
    }

    /// The reason as text.
    pub(in crate::compiler) fn reason(&self, address: IpAddr) -> String {
        match self {
            Self::Owned(owner) => format!("{address} is already a VIP of {owner}"),
            Self::Quarantined(end) => {
                format!("{address} was another namespace's VIP, and is quarantined until {end:.0}")
            }
            Self::Limited(why) => why.clone(),
        }
    }
}

/// Gives out addresses, to one policy after the other.
#[derive(Debug)]
pub(in crate::compiler) struct Allocator<'a> {
    pools: &'a Pools<'a>,
    recorded: Option<&'a Recorded>,
    /// Addresses that are in use.
    taken: HashSet<IpAddr>,
    reserved: Reserved<'a>,
    /// What a policy has by the record and no entry of its `pools` has yet, sorted.
    kept: HashMap<&'a ObjectId, Vec<IpAddr>>,
    /// What a policy had before, sorted.
    former: HashMap<&'a ObjectId, Vec<IpAddr>>,
    namespaces: NamespaceUse<'a>,
    policies: HashMap<&'a ObjectId, &'a EgressPolicySpec>,
    /// Families of pools in which nothing is found any more, by the name of the pool, with why.
    spent: HashMap<(&'a str, Family), Option<Timestamp>>,
}

impl<'a> Allocator<'a> {
    /// An allocator that leaves out the VIPs of Services, and what policies have by the record.
    pub(in crate::compiler) fn new(sources: &Inputs<'a>) -> Self {
        let (pools, recorded, policies) = (sources.pools, sources.recorded, &sources.inventory.policies);
        let is_needed = policies.iter().any(|policy| policy.body.spec.service_ref.is_none());
        let mut allocator = Self {
            pools,
            recorded,
            taken: HashSet::default(),
            reserved: Reserved::default(),
            kept: HashMap::default(),
            former: HashMap::default(),
            namespaces: if is_needed { pools.recorded_use(recorded) } else { NamespaceUse::default() },
            policies: policies.iter().map(|policy| (policy.id, &policy.body.spec)).collect(),
            spent: HashMap::default(),
        };
        if is_needed {
            allocator.take_from_services(sources);
        }
        allocator.reserve(sources);
        allocator
    }

    /// Takes the VIPs of Services, in the order of their admission: what is beyond the limit of a namespace takes nothing.
    fn take_from_services(&mut self, sources: &Inputs<'a>) {
        let pools = self.pools;
        let mut services: Vec<&ObjectRef<'a, Service>> = sources.inventory.services.iter().collect();
        if pools.limit_namespaces() {
            services.sort_by_cached_key(|service| age_key(service.body.created.as_ref(), service.id));
        }
        for service in services {
            let own = (service.id.namespace.as_str(), service.body.vips.as_slice());
            if self.namespaces.grant_all(own, |vip| pools.spec_of(vip)).is_ok() {
                self.taken.extend(sources.vips_of(service).map(|(_, vip)| *vip));
            }
        }
    }

    /// Reserves what policies have by the record, of the pools that they may use.
    fn reserve(&mut self, sources: &Inputs<'a>) {
        let Some(recorded) = self.recorded else { return };
        for (address, holding) in recorded.record.iter() {
            let Some((owner, policy)) = self.policies.get_key_value(&holding.owner) else {
                let is_policy = holding.owner.kind != Kind::Service;
                if is_policy && holding.freed.is_none() && recorded.keeps(&holding.owner) {
                    self.taken.insert(address);
                    self.reserved.insert(address, &holding.owner);
                }
                continue;
            };
            let Some((name, _)) = self.pools.spec_of(address) else { continue };
            let mut pools = policy.pools.iter().flatten();
            let is_its = pools.any(|pool| pool.name == name) && sources.check_pool(owner, name).is_ok();
            if !is_its || self.pools.cloud(address).is_some() {
                continue;
            }
            let list = if holding.freed.is_none() { &mut self.kept } else { &mut self.former };
            list.entry(owner).or_default().push(address);
        }
        for policy in &sources.inventory.policies {
            self.reserve_for(policy);
        }
    }

    /// Reserves as many as the policy asks for.
    fn reserve_for(&mut self, policy: &ObjectRef<'a, EgressPolicy>) {
        let Some(kept) = self.kept.get_mut(policy.id) else { return };
        let pools = policy.body.spec.pools.iter().flatten();
        let mut left: HashMap<(&str, Family), u32> = HashMap::default();
        for (pool, family) in pools.flat_map(|pool| Family::ALL.map(|family| (pool, family))) {
            *left.entry((&pool.name, family)).or_default() += pool.count.get();
        }
        kept.retain(|address| {
            let pool = self.pools.of(*address).map_or("", |pool| pool.id.name.as_str());
            let left = left.entry((pool, Family::of(*address))).or_default();
            let is_wanted = *left > 0;
            *left = left.saturating_sub(1);
            is_wanted
        });
        self.taken.extend(kept.iter().copied());
        self.reserved.extend(kept.iter().map(|address| (*address, policy.id)));
    }

    /// Why a policy doesn't get an address that it names.
    pub(in crate::compiler) fn name(&mut self, policy: &'a ObjectId, address: IpAddr) -> Result<(), Refusal<'a>> {
        if let Some(owner) = self.reserved.get(&address).filter(|owner| **owner != policy) {
            return Err(Refusal::Owned(owner));
        }
        let Some(pool) = self.pools.spec_of(address) else { return Ok(()) };
        if let Some(end) = self.quarantine_of_others(policy, address, pool.1.reuse_after) {
            return Err(Refusal::Quarantined(end));
        }
        let is_its = |recorded: &Recorded| recorded.record.is_given_to(address, policy);
        if self.recorded.is_some_and(is_its) {
            return Ok(());
        }
        let granted = self.namespaces.grant(pool, &policy.namespace, address);
        granted.map(drop).map_err(Refusal::Limited)
    }

    /// Until when an address is quarantined that another namespace gave up, or just now gives up.
    fn quarantine_of_others(&self, policy: &ObjectId, address: IpAddr, reuse_after: ReuseAfter) -> Option<Timestamp> {
        let recorded = self.recorded?;
        let holding = recorded.record.get(address).filter(|holding| holding.owner.namespace != policy.namespace)?;
        let owner = self.policies.get(&holding.owner);
        let names_it = owner.is_some_and(|policy| policy.addresses.iter().flatten().any(|named| *named == address));
        let is_gone = !self.taken.contains(&address) && !names_it;
        let given_up = recorded.quarantine_from_now(reuse_after);
        let quarantine = recorded.quarantine_of(holding, reuse_after);
        quarantine.or((holding.freed.is_none() && is_gone).then_some(given_up))
    }

    /// Takes addresses that a policy names.
    pub(in crate::compiler) fn take(&mut self, addresses: impl Iterator<Item = IpAddr>) {
        self.taken.extend(addresses);
    }

    /// Gives back addresses that a policy was to have.
    pub(in crate::compiler) fn give_back(&mut self, policy: &'a ObjectId, addresses: &[IpAddr]) {
        for address in addresses {
            self.taken.remove(address);
            self.reserved.remove(address);
            if let Some((pool, _)) = self.pools.spec_of(*address) {
                self.namespaces.remove(pool, &policy.namespace, *address);
                self.spent.remove(&(pool, Family::of(*address)));
            }
        }
    }

    /// What policies have by the record.
    pub(in crate::compiler) fn into_reserved(self) -> Reserved<'a> {
        self.reserved
    }

    /// Allocates as many addresses of each family of the pool as the policy asks for. If there are too few, it keeps what it
    /// has, and takes no other one unless the provider can allocate the rest.
    pub(in crate::compiler) fn allocate(
        &mut self,
        policy: ObjectRef<'a, EgressPolicy>,
        PoolRef { name, count }: &PoolRef,
    ) -> Allocation {
        let (Some(pool), count) = (self.pools.named(name), count.get() as usize) else { return Allocation::default() };
        let mut by_family: [Vec<Granted>; 2] = Default::default();
        let mut lack = None;
        for family in Family::ALL {
            let filled = &mut by_family[family as usize];
            let outcome = match &pool.body.cloud {
                Some(cloud) => self.fill_provided(policy, (pool, cloud, family), count, filled),
                None => self.fill(policy, (pool, family), count, filled),
            };
            if let Err(why) = outcome {
                let missing = count - filled.len();
                lack.get_or_insert((family, missing, why));
                if !self.pools.may_grow(name, family) {
                    let given: Vec<IpAddr> = filled.extract_if(.., |it| !it.is_kept).map(|it| it.address).collect();
                    self.give_back(policy.id, &given);
                }
            }
        }
        let is_unrecorded = self.recorded.is_none_or(|recorded| recorded.unrecorded_pools.contains(name));
        let is_in_force = |granted: &Granted| granted.is_kept || is_unrecorded || pool.body.cloud.is_some();
        let mut allocation = Allocation { lack, ..Allocation::default() };
        // By slot, then by family: what a greater count adds is last.
        for slot in 0..count {
            for granted in by_family.iter().filter_map(|family| family.get(slot)) {
                let is_in_force = is_in_force(granted);
                let list = if is_in_force { &mut allocation.addresses } else { &mut allocation.pending };
                list.push(granted.address);
            }
        }
        allocation
    }

    /// Adds addresses of a family of a pool until there are `count`.
    fn fill(
        &mut self,
        policy: ObjectRef<'a, EgressPolicy>,
        (pool, family): (ObjectRef<'a, AddressPool>, Family),
        count: usize,
        filled: &mut Vec<Granted>,
    ) -> Result<(), Lack> {
        if !pool.body.spec.ranges.iter().any(|range| Family::of(range.first) == family) {
            return Ok(());
        }
        let pools = self.pools;
        let is_here = |address: &mut IpAddr| is_in(pools, (pool, family), *address);
        if let Some(kept) = self.kept.get_mut(policy.id) {
            filled.extend(kept.extract_if(.., is_here).take(count).map(|address| Granted { address, is_kept: true }));
        }
        while filled.len() < count {
            let slot = u32::try_from(filled.len()).unwrap_or(u32::MAX);
            let Some(address) = self.find(policy.id, (pool, family), slot) else {
                return Err(self.lack((pool, family)));
            };
            let spec = (pool.id.name.as_str(), &pool.body.spec);
            self.namespaces.grant(spec, &policy.id.namespace, address).map_err(Lack::Limited)?;
            self.taken.insert(address);
            if self.recorded.is_some() {
                self.reserved.insert(address, policy.id);
            }
            filled.push(Granted { address, is_kept: false });
        }
        Ok(())
    }

    /// An address that a policy may have.
    fn find(
        &self,
        policy: &ObjectId,
        (pool, family): (ObjectRef<'a, AddressPool>, Family),
        slot: u32,
    ) -> Option<IpAddr> {
        let is_free = |address: &IpAddr| !self.taken.contains(address) && is_in(self.pools, (pool, family), *address);
        let former = self.former.get(policy).and_then(|former| former.iter().copied().find(is_free));
        if former.is_some() || self.spent.contains_key(&(pool.id.name.as_str(), family)) {
            return former;
        }
        self.find_unused(policy, (pool, family), slot).or_else(|| {
            let recorded = self.recorded?;
            let reuse_after = pool.body.spec.reuse_after;
            let reusable = recorded.record.iter().filter(|(address, holding)| {
                is_free(address) && recorded.quarantine_of(holding, reuse_after).is_none()
            });
            reusable.filter_map(|(address, holding)| Some((holding.freed?, address))).min().map(|(_, address)| address)
        })
    }

    /// An address that nobody had, as far as recorded.
    fn find_unused(
        &self,
        policy: &ObjectId,
        (pool, family): (ObjectRef<'a, AddressPool>, Family),
        slot: u32,
    ) -> Option<IpAddr> {
        let ranges = pool.body.spec.ranges.iter();
        let ranges: Vec<&AddressRange> = ranges.filter(|range| Family::of(range.first) == family).collect();
        let size = ranges.iter().fold(0_u128, |sum, range| sum.saturating_add(range.size()));
        let start = u128::from(start(&policy.path(), &pool.id.name, family, slot)) % size;
        let is_unused = |address: &IpAddr| {
            let is_recorded = self.recorded.is_some_and(|recorded| recorded.record.get(*address).is_some());
            !is_recorded && !self.taken.contains(address)
        };
        (0..size).map(|step| nth(&ranges, (start + step) % size)).find(is_unused)
    }

    /// Why no address is found.
    fn lack(&mut self, (pool, family): (ObjectRef<'a, AddressPool>, Family)) -> Lack {
        let key = (pool.id.name.as_str(), family);
        let end = self.spent.get(&key).copied().unwrap_or_else(|| self.first_end((pool, family)));
        self.spent.insert(key, end);
        end.map_or(Lack::Exhausted, Lack::Quarantined)
    }

    /// When the first quarantine of a family of a pool ends.
    fn first_end(&self, (pool, family): (ObjectRef<'a, AddressPool>, Family)) -> Option<Timestamp> {
        let reuse_after = pool.body.spec.reuse_after;
        self.recorded?.first_end(|address| is_in(self.pools, (pool, family), address).then_some(reuse_after))
    }

    /// Adds addresses of a family that a provider has. Its claims are a record of their own.
    fn fill_provided(
        &mut self,
        policy: ObjectRef<'a, EgressPolicy>,
        (pool, cloud, family): (ObjectRef<'a, AddressPool>, &CloudPool, Family),
        count: usize,
        filled: &mut Vec<Granted>,
    ) -> Result<(), Lack> {
        let spec = (pool.id.name.as_str(), &pool.body.spec);
        let is_quarantined = |address: IpAddr| {
            let quarantine = self.recorded.and_then(|recorded| recorded.quarantine(address, spec.1.reuse_after));
            quarantine.is_some_and(|(_, owner)| owner != policy.id)
        };
        let is_free = |address: IpAddr| !self.taken.contains(&address) && !is_quarantined(address);
        let Some(found) = provided::find(cloud, (policy.name, family), count, is_free) else { return Ok(()) };
        for (address, is_kept) in found {
            self.namespaces.grant(spec, &policy.id.namespace, address).map_err(Lack::Limited)?;
            self.taken.insert(address);
            filled.push(Granted { address, is_kept });
        }
        if filled.len() < count { Err(self.lack((pool, family))) } else { Ok(()) }
    }
}

/// Whether an address is of a pool and a family.
fn is_in(pools: &Pools<'_>, (pool, family): (ObjectRef<'_, AddressPool>, Family), address: IpAddr) -> bool {
    Family::of(address) == family && pools.of(address).is_some_and(|of| of.id == pool.id)
}

fn start(owner: &str, pool: &str, family: Family, slot: u32) -> u64 {
    let mut fingerprint = Fingerprint::default();
    // Writing into a fingerprint can't fail.
    let _ = write!(fingerprint, "{owner}\n{pool}\n{family}\n{slot}");
    fingerprint.finish()
}

/// The `n`th address of ranges with more than `n` addresses in total.
fn nth(ranges: &[&AddressRange], mut n: u128) -> IpAddr {
    let mut last = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    for range in ranges {
        last = range.last;
        if n < range.size() {
            return range.nth(n);
        }
        n -= range.size();
    }
    last
}
