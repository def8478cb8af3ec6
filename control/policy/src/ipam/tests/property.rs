//! Random Services, pools and changes against the rules, each checked by trying every address.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use proptest::test_runner::Config;
use vipgate_coverage::{Coverage, property};

use super::snapshot;
use crate::address_record::AddressRecord;
use crate::ipam::{AllocationPlan, Decision, Reason, Snapshot};
use crate::manifest::{Family, FamilyPolicy, Kind, ObjectId, Protocol, ServiceRequest};

/// Number of addresses of a family, over all pools.
const ADDRESSES: u8 = 8;

fn address(family: Family, n: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(203, 0, 113, n).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, n.into()).into(),
    }
}

/// A pool: its ranges, its labels of namespaces and Services, whether it is for all, and its limit for a namespace.
type PoolShape = (u8, u8, bool, bool, bool, Option<u8>);

/// How long an address is quarantined.
const REUSE_AFTER: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
enum Step {
    Create(u8, ServiceShape),
    Delete(u8),
    /// Another spec, with the status as it is.
    Change(u8, ServiceShape),
    Pools(Vec<PoolShape>),
    Policies(Vec<u8>),
    /// Somebody else writes the status.
    Foreign(u8, u8),
    /// The first writes of a plan reach the API.
    Write(usize),
    /// These seconds pass.
    Wait(u8),
}

#[derive(Clone, Debug)]
struct ServiceShape {
    namespace: bool,
    gold: bool,
    families: u8,
    policy: FamilyPolicy,
    named: Option<(bool, u8)>,
    pool: Option<u8>,
    key: Option<u8>,
    port: u16,
    is_handled: bool,
}

fn shape() -> impl Strategy<Value = ServiceShape> {
    let policy = prop_oneof![
        4 => Just(FamilyPolicy::SingleStack),
        1 => Just(FamilyPolicy::PreferDualStack),
        1 => Just(FamilyPolicy::RequireDualStack),
    ];
    let named = prop::option::weighted(0.2, (any::<bool>(), 0..=ADDRESSES));
    let (pool, key) = (prop::option::weighted(0.2, 0..3_u8), prop::option::weighted(0.5, 0..2_u8));
    let rest = (named, pool, key, 80..83_u16, prop::bool::weighted(0.9));
    (any::<bool>(), any::<bool>(), 0..5_u8, policy, rest).prop_map(
        |(namespace, gold, families, policy, (named, pool, key, port, is_handled))| ServiceShape {
            namespace,
            gold,
            families,
            policy,
            named,
            pool,
            key,
            port,
            is_handled,
        },
    )
}

fn pools() -> impl Strategy<Value = Vec<PoolShape>> {
    let weighted = prop::bool::weighted;
    let pool = (0..4_u8, 0..4_u8, weighted(0.8), weighted(0.2), weighted(0.2), prop::option::weighted(0.3, 1..3_u8));
    prop::collection::vec(pool, 0..3)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..6_u8, shape()).prop_map(|(name, shape)| Step::Create(name, shape)),
        3 => (0..6_u8).prop_map(Step::Delete),
        3 => (0..6_u8, shape()).prop_map(|(name, shape)| Step::Change(name, shape)),
        2 => pools().prop_map(Step::Pools),
        1 => prop::collection::vec(0..ADDRESSES, 0..3).prop_map(Step::Policies),
        1 => (0..6_u8, 0..ADDRESSES).prop_map(|(name, n)| Step::Foreign(name, n)),
        6 => (1..4_usize).prop_map(Step::Write),
        2 => (0..20_u8).prop_map(Step::Wait),
    ]
}

#[derive(Debug, Default)]
struct World {
    services: BTreeMap<u8, ServiceRequest>,
    created: u32,
    snapshot: Snapshot,
    pools: Vec<PoolShape>,
    record: AddressRecord,
    now: Timestamp,
    /// Who gave up a recorded address of a pool, and when.
    freed: BTreeMap<IpAddr, (ObjectId, Timestamp)>,
}

impl World {
    /// A Service of this shape, without addresses.
    fn service(&self, name: u8, shape: &ServiceShape) -> ServiceRequest {
        let families = match shape.families {
            0 => vec![],
            1 | 2 => vec![Family::V4],
            3 => vec![Family::V6],
            _ => vec![Family::V6, Family::V4],
        };
        let family = |v6| if v6 { Family::V6 } else { Family::V4 };
        ServiceRequest {
            namespace: if shape.namespace { "x" } else { "y" }.to_owned(),
            name: format!("s{name}-{}", self.created),
            created: None,
            labels: if shape.gold { BTreeMap::from([("tier".into(), "gold".into())]) } else { BTreeMap::new() },
            is_handled: shape.is_handled,
            is_deleted: false,
            current: Vec::new(),
            has_ingress: false,
            is_managed: false,
            assumed: Vec::new(),
            families,
            policy: shape.policy,
            addresses: Ok(shape.named.map(|(v6, n)| address(family(v6), n)).into_iter().collect()),
            pool: shape.pool.map(|pool| format!("p{pool}")),
            sharing_key: shape.key.map(|key| key.to_string()),
            ports: BTreeSet::from([(shape.port, Protocol::Tcp)]),
            announce: None,
        }
    }

    fn set_pools(&mut self, pools: &[PoolShape]) {
        let mut text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: x, labels: {team: x}}\n".to_owned();
        let mut used = [0_u8; 2];
        for (n, (v4, v6, auto, namespaced, gold, max)) in pools.iter().enumerate() {
            let mut ranges = Vec::new();
            for (family, size) in [(Family::V4, *v4), (Family::V6, *v6)] {
                let next = &mut used[family as usize];
                if size > 0 {
                    ranges.push(format!("\"{}-{}\"", address(family, *next), address(family, *next + size - 1)));
                    *next += size;
                }
            }
            let namespaces = if *namespaced { ", namespaces: {matchLabels: {team: x}}" } else { "" };
            let selector = if *gold { ", serviceSelector: {matchLabels: {tier: gold}}" } else { "" };
            let max = max.map(|max| format!(", maxPerNamespace: {max}")).unwrap_or_default();
            // Without ranges it needs a provider, which has nothing here.
            let provider = if ranges.is_empty() { "provider: {aws: {region: r, tags: {x: y}}}, " } else { "" };
            let _ = writeln!(
                text,
                "---\napiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: p{n}}}\n\
                 spec: {{ranges: [{}], {provider}autoAssign: {auto}{namespaces}{selector}{max}, reuseAfter: 10s}}",
                ranges.join(", ")
            );
        }
        self.pools = pools.to_vec();
        self.snapshot = Snapshot { policy_addresses: self.snapshot.policy_addresses.clone(), ..snapshot(&text) };
        let freed = std::mem::take(&mut self.freed);
        self.freed = freed.into_iter().filter(|(address, _)| self.pool_of(*address).is_some()).collect();
    }

    /// The pool with an address.
    fn pool_of(&self, address: IpAddr) -> Option<usize> {
        let mut next = [0_u8; 2];
        for (n, pool) in self.pools.iter().enumerate() {
            for (family, size) in [(Family::V4, pool.0), (Family::V6, pool.1)] {
                let first = next[family as usize];
                next[family as usize] += size;
                if (first..first + size).any(|n| super::property::address(family, n) == address) {
                    return Some(n);
                }
            }
        }
        None
    }

    /// Notes what a Service doesn't have any more.
    fn note_freed(&mut self, before: &ServiceRequest, after: &[IpAddr]) {
        for address in before.current.iter().filter(|address| !after.contains(address)) {
            let is_shared = self.services.values().any(|it| it.id() != before.id() && it.current.contains(address));
            let is_recorded = self.record.is_given_to(*address, &before.id()) && self.pool_of(*address).is_some();
            if is_recorded && !is_shared {
                self.freed.insert(*address, (before.id(), self.now));
            }
        }
    }

    /// Whether a namespace may have another address of the pool with this one.
    fn is_within_limit(
        &self,
        plan: &AllocationPlan,
        services: &[ServiceRequest],
        namespace: &str,
        address: IpAddr,
    ) -> bool {
        let Some(pool) = self.pool_of(address) else { return true };
        let Some(max) = self.pools[pool].5 else { return true };
        let decided = plan.decisions.iter().map(|it| (&services[it.service], &it.addresses));
        let all = decided.chain(services.iter().map(|service| (service, &service.current)));
        let of_namespace = all.filter(|(service, _)| service.namespace == namespace);
        let mut used: BTreeSet<IpAddr> = of_namespace.flat_map(|(_, addresses)| addresses).copied().collect();
        for (address, holding) in self.record.iter().filter(|(_, holding)| holding.owner.namespace == namespace) {
            if holding.freed.is_none_or(|freed| freed + REUSE_AFTER > self.now) {
                used.insert(address);
            }
        }
        used.retain(|address| self.pool_of(*address) == Some(pool));
        used.len() < usize::from(max)
    }

    /// Whether an address is another object's by the record, or was a short while ago.
    fn is_withheld(&self, address: IpAddr, service: &ServiceRequest) -> bool {
        self.record.get(address).is_some_and(|holding| {
            let is_free = holding.freed.is_some_and(|freed| freed + REUSE_AFTER <= self.now);
            holding.owner != service.id() && !is_free
        })
    }

    fn plan(&self) -> (Vec<u8>, Vec<ServiceRequest>, AllocationPlan) {
        let names = self.services.keys().copied().collect();
        let services: Vec<ServiceRequest> = self.services.values().cloned().collect();
        let plan = self.snapshot.plan(&services, self.record.clone(), self.now);
        (names, services, plan)
    }

    /// The record is written before anything else.
    fn record(&mut self, plan: &AllocationPlan) {
        self.record = AddressRecord::default();
        plan.records.values().for_each(|record| self.record.extend(record));
    }

    fn write(&mut self, names: &[u8], decision: &Decision) {
        let before = self.services[&names[decision.service]].clone();
        self.note_freed(&before, &decision.addresses);
        decision.addresses.iter().for_each(|address| drop(self.freed.remove(address)));
        let service = self.services.get_mut(&names[decision.service]).unwrap();
        service.current = decision.addresses.clone();
        (service.has_ingress, service.is_managed) = (!service.current.is_empty(), !service.current.is_empty());
    }

    /// Whether a pool gives an address to a Service that names it, or by itself.
    fn is_allowed(&self, service: &ServiceRequest, address: IpAddr, is_named: bool) -> bool {
        let Some(pool) = self.pool_of(address) else { return false };
        let (_, _, auto, namespaced, gold, _) = &self.pools[pool];
        let name = format!("p{pool}");
        service.pool.as_ref().is_none_or(|pool| *pool == name)
            && (*auto || is_named || service.pool.is_some())
            && (!namespaced || service.namespace == "x")
            && (!gold || service.labels.contains_key("tier"))
    }

    /// Whether a Service could get an address now, by trying: nobody has it but Services that share it.
    fn is_available(&self, services: &[ServiceRequest], plan: &AllocationPlan, index: usize, address: IpAddr) -> bool {
        let mut has: Vec<bool> = services.iter().map(|service| service.current.contains(&address)).collect();
        for decision in &plan.decisions {
            has[decision.service] |= decision.addresses.contains(&address);
        }
        let shares = |other: usize| {
            let (a, b) = (&services[index], &services[other]);
            let is_same_key = a.sharing_key.is_some() && a.sharing_key == b.sharing_key;
            is_same_key && a.namespace == b.namespace && a.ports.is_disjoint(&b.ports)
        };
        !self.snapshot.policy_addresses.iter().any(|(of_policy, _)| *of_policy == address)
            && (0..services.len()).all(|other| other == index || !has[other] || shares(other))
    }

    fn check(&self, services: &[ServiceRequest], plan: &AllocationPlan, coverage: &Coverage) {
        for decision in &plan.decisions {
            let service = &services[decision.service];
            let is_named = |address: &IpAddr| service.addresses.as_ref().unwrap().contains(address);
            for address in &decision.addresses {
                if !service.current.contains(address) {
                    assert!(self.is_allowed(service, *address, is_named(address)), "{service:?} {decision:?}");
                    assert!(self.is_available(services, plan, decision.service, *address), "{service:?} {decision:?}");
                    if let Some((owner, freed)) = self.freed.get(address).filter(|(owner, _)| *owner != service.id()) {
                        let is_own = is_named(address) && owner.namespace == service.namespace;
                        assert!(is_own || *freed + REUSE_AFTER <= self.now, "{service:?} {decision:?} {owner}");
                        coverage.count(if is_own { "named again" } else { "given again" });
                    }
                    let users = services.iter().filter(|it| it.current.contains(address)).count();
                    let gets = plan.decisions.iter().filter(|it| it.addresses.contains(address)).count();
                    coverage.count(if users.max(gets) > 1 { "shared" } else { "given" });
                    if is_named(address) {
                        coverage.count("named");
                    }
                }
            }
            let families: BTreeSet<Family> = decision.addresses.iter().map(|it| Family::of(*it)).collect();
            assert_eq!(families.len(), decision.addresses.len(), "{decision:?}");
            // A request that contradicts itself changes nothing.
            let is_contradictory = decision.refusal.as_ref().is_some_and(|it| it.reason == Reason::Family);
            let has_all = decision.addresses.iter().all(|it| service.current.contains(it));
            if service.policy == FamilyPolicy::SingleStack && !(is_contradictory && has_all) {
                assert!(families.len() <= 1, "{decision:?}");
            }
            if service.policy == FamilyPolicy::RequireDualStack {
                let is_whole = families.len() == 2 || decision.addresses.iter().all(|it| service.current.contains(it));
                assert!(is_whole, "{service:?} {decision:?}");
                if families.len() == 2 {
                    coverage.count("both families");
                }
            }
            if decision.is_change && !service.current.is_empty() && decision.addresses.is_empty() {
                coverage.count("released");
            }
            self.check_refusal(services, plan, decision, coverage);
        }
    }

    /// An address that nobody has is refused to no one.
    fn check_refusal(
        &self,
        services: &[ServiceRequest],
        plan: &AllocationPlan,
        decision: &Decision,
        coverage: &Coverage,
    ) {
        let service = &services[decision.service];
        let Some(refusal) = &decision.refusal else {
            assert!(!service.is_handled || !decision.addresses.is_empty(), "{service:?}: nothing, and no reason");
            return;
        };
        coverage.count(refusal.reason.as_str());
        let is_single = service.policy == FamilyPolicy::SingleStack;
        if matches!(refusal.reason, Reason::Exhausted | Reason::NoPool) && decision.addresses.is_empty() && is_single {
            let family = service.families.first().copied();
            for address in Family::ALL.into_iter().flat_map(|it| (0..ADDRESSES).map(move |n| address(it, n))) {
                let is_possible = family.is_none_or(|family| family == Family::of(address))
                    && self.is_allowed(service, address, false)
                    && self.is_available(services, plan, decision.service, address)
                    && !self.is_withheld(address, service)
                    && self.is_within_limit(plan, services, &service.namespace, address);
                assert!(!is_possible, "{service:?} could have {address}, {refusal:?}");
            }
        }
    }

    fn step(&mut self, step: &Step, coverage: &Coverage) {
        match step {
            Step::Create(name, shape) => {
                self.created += 1;
                let service = self.service(*name, shape);
                if let Some(before) = self.services.insert(*name, service) {
                    self.note_freed(&before, &[]);
                }
            }
            Step::Wait(seconds) => self.now += Duration::from_secs((*seconds).into()),
            Step::Delete(name) => {
                if let Some(service) = self.services.remove(name) {
                    self.note_freed(&service, &[]);
                }
            }
            Step::Change(name, shape) => {
                let Some(old) = self.services.get(name).cloned() else { return };
                let new = self.service(*name, shape);
                let ServiceRequest { name: old_name, current, has_ingress, is_managed, namespace, .. } = old;
                let new = ServiceRequest { name: old_name, current, has_ingress, is_managed, namespace, ..new };
                self.services.insert(*name, new);
            }
            Step::Pools(pools) => {
                let (_, _, before) = self.plan();
                self.set_pools(pools);
                let (_, services, plan) = self.plan();
                // What a Service had and kept before the edit, it keeps, unless it names a pool.
                for (old, new) in before.decisions.iter().zip(&plan.decisions) {
                    let service = &services[new.service];
                    let had = old.addresses.iter().filter(|address| service.current.contains(address));
                    for address in had.filter(|_| service.pool.is_none() && service.addresses == Ok(vec![])) {
                        assert!(new.addresses.contains(address), "{service:?} {old:?} {new:?}");
                        coverage.count(if new.outside.contains(address) { "kept outside" } else { "kept" });
                    }
                }
            }
            Step::Policies(addresses) => {
                let policy = ObjectId { kind: Kind::EgressPolicy, namespace: "x".to_owned(), name: "p".to_owned() };
                let all: BTreeSet<IpAddr> = addresses.iter().map(|n| address(Family::V4, *n)).collect();
                self.snapshot.policy_addresses = all.into_iter().map(|it| (it, policy.clone())).collect();
            }
            Step::Foreign(name, n) => {
                let Some(before) = self.services.get(name).cloned() else { return };
                let taken = address(Family::V4, *n);
                self.note_freed(&before, &[taken]);
                // Who writes the status decides.
                self.freed.remove(&taken);
                let service = self.services.get_mut(name).unwrap();
                service.current = vec![taken];
                (service.has_ingress, service.is_managed) = (true, false);
                coverage.count("foreign");
            }
            Step::Write(count) => {
                let (names, services, plan) = self.plan();
                self.check(&services, &plan, coverage);
                self.record(&plan);
                for decision in plan.changes().into_iter().take(*count) {
                    self.write(&names, decision);
                }
            }
        }
    }

    /// Writes until nothing changes; then nothing is given twice, and a restarted server changes nothing.
    fn converge(&mut self, coverage: &Coverage) {
        for round in 0..10 {
            let (names, services, plan) = self.plan();
            self.check(&services, &plan, coverage);
            let changes = plan.changes();
            self.record(&plan);
            if changes.is_empty() && plan.waits_until.is_none() {
                break;
            }
            // Nobody waits for longer than for the quarantine.
            self.now += Duration::from_secs(if changes.is_empty() { 10 } else { 1 });
            assert!(round < 9, "no end: {changes:?}");
            for decision in changes {
                self.write(&names, decision);
            }
        }
        let (_, services, _) = self.plan();
        for (a, first) in services.iter().enumerate() {
            for second in services.iter().skip(a + 1).filter(|second| first.is_managed || second.is_managed) {
                let common = first.current.iter().find(|address| second.current.contains(address));
                let is_shared = first.can_share_with(second);
                // Nobody can prevent that somebody else writes an address in use; the older one keeps it.
                let is_older = |own: &ServiceRequest, other: &ServiceRequest| {
                    own.is_managed && !other.is_managed && (&own.namespace, &own.name) < (&other.namespace, &other.name)
                };
                let is_foreign = is_older(first, second) || is_older(second, first);
                assert!(common.is_none() || is_shared || is_foreign, "{common:?}: {first:?} {second:?}");
            }
        }
        coverage.count("converged");
    }
}

#[test]
fn no_address_is_given_twice_and_every_one_that_is_free_is_given() {
    let classes = [
        "given",
        "shared",
        "named",
        "both families",
        "released",
        "no_pool",
        "exhausted",
        "in_use",
        "not_in_pool",
        "family",
        "kept",
        "kept outside",
        "foreign",
        "converged",
        "quarantined",
        "namespace_limit",
        "given again",
        "named again",
    ];
    let strategy = (pools(), prop::collection::vec(step(), 1..40));
    property(Config { cases: 1500, ..Config::default() }, &strategy, &classes, |(pools, steps), coverage| {
        let mut world = World::default();
        world.set_pools(&pools);
        for step in &steps {
            world.step(step, coverage);
        }
        world.converge(coverage);
        Ok(())
    });
}
