//! Random sequences of changes, good and flawed, beside a model that remembers what there was.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::world::*;
use super::{as_set, bucket, is_fresh, permits};
use crate::ports::BlockId;
use crate::ports::pool::{PortPool, WorkerId};
use crate::snapshot::Snapshot;
use crate::snapshot::build::Builder;
use crate::snapshot::change::PolicyChange;
use crate::snapshot::policy::{Policy, Vip};
use crate::snapshot::quota::EndpointUse;
use crate::snapshot::spec::*;
use crate::time::Tick;

const BLOCK: BlockId = BlockId(3);
const WORKER: WorkerId = WorkerId(0);

/// A builder that goes from one policy to the next, and what must be true of it.
struct Run {
    builder: Builder,
    world: World,
    set: PolicySet,
    /// Open sessions by endpoint, with what they are counted in.
    sessions: BTreeMap<IpAddr, (u32, Arc<EndpointUse>)>,
    /// VIPs of which a worker has a block.
    blocks: BTreeMap<IpAddr, Arc<PortPool>>,
    checked: Vec<Checked>,
}

/// What was found when a session between these was last checked, if there was one.
struct Checked {
    parties: [IpAddr; 3],
    generation: u32,
    found: (bool, bool),
    /// Something has happened since that concerns it.
    stale: bool,
}

/// An endpoint, a far side and a VIP, in every combination of one family.
fn everybody() -> Vec<[IpAddr; 3]> {
    let all = |texts: &[&str]| texts.iter().map(|text| ip(text)).collect::<Vec<_>>();
    let (vips, endpoints, fars) = (all(&VIPS), all(&ENDPOINTS), all(&[&FARS[..], &VIPS[..]].concat()));
    let mut triples = Vec::new();
    for (&endpoint, &far) in endpoints.iter().flat_map(|endpoint| fars.iter().map(move |far| (endpoint, far))) {
        triples.extend(vips.iter().map(|&vip| [endpoint, far, vip]));
    }
    triples.retain(|[endpoint, far, vip]| endpoint.is_ipv4() == far.is_ipv4() && far.is_ipv4() == vip.is_ipv4());
    triples
}

fn found(policy: &Policy, parties: [IpAddr; 3]) -> (bool, bool) {
    (permits(policy, parties), policy.vip_at(parties[1]).is_some())
}

impl Run {
    fn new() -> Self {
        let builder = Builder::new(NetworkSpec::default());
        let Snapshot { policy, generation, .. } = builder.snapshot();
        let checked = everybody().into_iter().map(|parties| Checked {
            parties,
            generation,
            found: found(&policy, parties),
            stale: false,
        });
        Self {
            checked: checked.collect(),
            builder,
            world: World::default(),
            set: PolicySet::default(),
            sessions: BTreeMap::new(),
            blocks: BTreeMap::new(),
        }
    }

    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Change { edits, whole } => self.change(edits, *whole),
            Step::Flawed { edits, flaw, at, whole } => {
                let Some(flawed) = flawed(self.world.edited(edits).set(), *flaw, *at) else { return Ok(()) };
                let change = flawed_change(&self.set, &flawed, *flaw);
                self.refuses(|builder| {
                    if *whole { builder.with_policy(&flawed) } else { builder.with_change(&change) }.is_err()
                })
            }
            Step::Session { endpoint, opens } => {
                self.session(ip(ENDPOINTS[*endpoint]), *opens);
                Ok(())
            }
            Step::Block { vip, taken } => self.block(ip(VIPS[*vip]), *taken),
        }
    }

    fn session(&mut self, address: IpAddr, opens: bool) {
        let policy = self.builder.snapshot().policy;
        if let Some(endpoint) = policy.endpoint_at(address).filter(|_| opens) {
            endpoint.usage.open(Limits::default(), Tick(0)).unwrap();
            self.sessions.entry(address).or_insert_with(|| (0, endpoint.usage.clone())).0 += 1;
        } else if let Some((count, _)) = self.sessions.get_mut(&address).filter(|_| !opens) {
            policy.usage_of(address).expect("its sessions are counted somewhere").close();
            *count -= 1;
            if *count == 0 {
                self.sessions.remove(&address);
            }
        }
    }

    fn block(&mut self, address: IpAddr, taken: bool) -> Result<(), TestCaseError> {
        let policy = self.builder.snapshot().policy;
        match self.blocks.remove(&address) {
            Some(pool) if !taken => pool.give_back(BLOCK, WORKER),
            Some(pool) => drop(self.blocks.insert(address, pool)),
            None => {
                let vip = policy.vip_at(address).filter(|vip| taken && !vip.retired);
                if let Some(vip) = vip {
                    prop_assert!(vip.pool.claim(BLOCK, WORKER), "{} is closed while policy wants it", address);
                    self.blocks.insert(address, vip.pool.clone());
                }
            }
        }
        Ok(())
    }

    /// A flawed change is refused, and nothing at all has changed.
    fn refuses(&mut self, is_refused: impl FnOnce(&mut Builder) -> bool) -> Result<(), TestCaseError> {
        let (before, uses) = (self.builder.snapshot(), format!("{:?}", self.builder.uses()));
        prop_assert!(is_refused(&mut self.builder));
        let after = self.builder.snapshot();
        prop_assert_eq!(before.generation, after.generation);
        prop_assert!(Arc::ptr_eq(&before.policy, &after.policy) && Arc::ptr_eq(&before.freshness, &after.freshness));
        prop_assert_eq!(uses, format!("{:?}", self.builder.uses()));
        prop_assert_eq!(as_set(&after.policy), self.set.clone());
        Ok(())
    }

    fn change(&mut self, edits: &[Edit], whole: bool) -> Result<(), TestCaseError> {
        let world = self.world.edited(edits);
        let set = world.set();
        let before = self.builder.snapshot();
        let after = if whole {
            self.builder.with_policy(&set)
        } else {
            self.builder.with_change(&PolicyChange::between(&self.set, &set))
        };
        let after = after.map_err(|error| TestCaseError::fail(error.to_string()))?;
        let old = std::mem::replace(&mut self.set, set);
        self.world = world;
        self.is_as_if_built_anew(&after.policy)?;
        self.numbers_keep_their_meaning(&before.policy, &after.policy)?;
        self.sessions_and_blocks_are_still_known(&after.policy)?;
        self.concerns_whom_it_concerns(&old, &before, &after)
    }

    fn is_as_if_built_anew(&self, policy: &Policy) -> Result<(), TestCaseError> {
        let mut other = Builder::new(NetworkSpec::default());
        let fresh = other.with_policy(&self.set).unwrap().policy;
        prop_assert_eq!(as_set(policy), self.set.clone());
        prop_assert_eq!(as_set(&fresh), self.set.clone());
        prop_assert_eq!(policy.endpoint_count(), fresh.endpoint_count());
        for text in ENDPOINTS.iter().chain(&VIPS).chain(&FARS) {
            let address = ip(text);
            let seen = |policy: &Policy| {
                let endpoint = policy.endpoint_at(address)?;
                Some((
                    policy.egress_of(endpoint).spec.clone(),
                    policy.vips_of(endpoint).map(|vip| vip.address).collect::<Vec<_>>(),
                ))
            };
            prop_assert_eq!(seen(policy), seen(&fresh));
            let live = |policy: &Policy| {
                let vip = policy.vip_at(address).filter(|vip| !vip.retired)?;
                Some((vip.address, vip.name.clone(), vip.announce, vip.reserved.clone(), vip.guaranteed))
            };
            prop_assert_eq!(live(policy), live(&fresh));
            // What guards them against being taken away: as many endpoints as anew.
            let uses = |builder: &Builder, vip: &Vip| builder.uses().of_vip(vip.id);
            if let Some((vip, anew)) = policy.vip_at(address).zip(fresh.vip_at(address)) {
                prop_assert_eq!(uses(&self.builder, vip), uses(&other, anew));
            }
        }
        for name in POLICIES {
            let egress = |builder: &Builder| {
                builder.egress(name).map(|egress| (egress.spec.clone(), builder.uses().of_egress(egress.id)))
            };
            prop_assert_eq!(egress(&self.builder), egress(&other));
        }
        for Checked { parties, .. } in &self.checked {
            prop_assert_eq!(permits(policy, *parties), permits(&fresh, *parties), "{:?}", parties);
        }
        Ok(())
    }

    fn numbers_keep_their_meaning(&self, before: &Policy, after: &Policy) -> Result<(), TestCaseError> {
        let names: HashMap<_, _> = after.egress().map(|egress| (&egress.spec.name, egress.id)).collect();
        let numbers: HashMap<_, _> = after.egress().map(|egress| (egress.id, &egress.spec.name)).collect();
        for egress in before.egress() {
            let name = &egress.spec.name;
            prop_assert!(names.get(name).is_none_or(|id| *id == egress.id), "{} has another number", name);
            prop_assert!(numbers.get(&egress.id).is_none_or(|other| *other == name), "{}'s number was reused", name);
        }
        for vip in before.vips() {
            let now = after.vip_at(vip.address);
            let other = after.vips().find(|other| other.id == vip.id);
            let is_free = vip.retired && !self.blocks.contains_key(&vip.address);
            prop_assert!(is_free || now.is_none_or(|now| now.id == vip.id && Arc::ptr_eq(&now.pool, &vip.pool)));
            prop_assert!(is_free || other.is_none_or(|other| other.address == vip.address));
        }
        // Each number that was ever given out is in use or free, once.
        let uses = self.builder.uses();
        let free: HashSet<_> = uses.free_egress.iter().collect();
        prop_assert_eq!(free.len(), uses.free_egress.len());
        prop_assert_eq!(after.egress().count() + free.len(), after.egress.len());
        let free: HashSet<_> = uses.free_vips.iter().collect();
        prop_assert_eq!(free.len(), uses.free_vips.len());
        prop_assert_eq!(after.vips().count() + free.len(), after.vips.len());
        Ok(())
    }

    fn sessions_and_blocks_are_still_known(&self, after: &Policy) -> Result<(), TestCaseError> {
        for text in ENDPOINTS {
            let address = ip(text);
            let usage = after.usage_of(address);
            let Some((count, counted_in)) = self.sessions.get(&address) else {
                prop_assert_eq!(usage.map_or(0, EndpointUse::sessions), 0);
                continue;
            };
            prop_assert!(
                usage.is_some_and(|usage| std::ptr::eq(usage, &raw const **counted_in)),
                "{} is lost",
                address
            );
            prop_assert_eq!(counted_in.sessions(), *count);
        }
        for text in VIPS {
            let (address, is_wanted) = (ip(text), self.set.vips.iter().any(|vip| vip.address == ip(text)));
            let known = after.vip_at(address);
            prop_assert_eq!(known.is_some(), is_wanted || self.blocks.contains_key(&address), "{}", address);
            if let Some(known) = known {
                prop_assert_eq!(known.retired, !is_wanted);
                prop_assert!(self.blocks.get(&address).is_none_or(|pool| Arc::ptr_eq(pool, &known.pool)));
            }
        }
        Ok(())
    }

    /// Sessions are looked at again when their endpoint, far side or VIP, or all that is excluded, has changed, and, buckets
    /// aside, only then; and until they are looked at, nothing has changed for them.
    fn concerns_whom_it_concerns(
        &mut self,
        old: &PolicySet,
        before: &Snapshot,
        after: &Snapshot,
    ) -> Result<(), TestCaseError> {
        let nets = |set: &PolicySet| -> HashMap<_, _> {
            set.policies.iter().map(|it| (it.name.clone(), (it.destinations.clone(), it.excluded.clone()))).collect()
        };
        let (old_nets, new_nets) = (nets(old), nets(&self.set));
        let all = old_nets.iter().any(|(name, nets)| new_nets.get(name).is_some_and(|new| new != nets));
        let bound = |set: &PolicySet, address: IpAddr| {
            let endpoint = set.endpoints.iter().find(|endpoint| endpoint.address == address)?;
            Some((endpoint.policy.clone(), endpoint.vips.clone()))
        };
        let endpoints: HashSet<IpAddr> =
            ENDPOINTS.map(ip).into_iter().filter(|&it| bound(old, it) != bound(&self.set, it)).collect();
        let known =
            |policy: &Policy, address: IpAddr| policy.vip_at(address).map(|vip| (vip.retired, vip.reserved.clone()));
        let is_changed = |address: &IpAddr| known(&before.policy, *address) != known(&after.policy, *address);
        let vips: HashSet<usize> = VIPS.map(ip).iter().filter(|vip| is_changed(vip)).map(|&vip| bucket(vip)).collect();
        for (at, checked) in self.checked.iter_mut().enumerate() {
            let Checked { parties, generation, .. } = *checked;
            let [endpoint, others @ ..] = parties;
            checked.stale |=
                all || endpoints.contains(&endpoint) || others.iter().any(|it| vips.contains(&bucket(*it)));
            prop_assert_eq!(is_fresh(after, generation, parties), !checked.stale, "{:?}", parties);
            let found = found(&after.policy, parties);
            prop_assert!(checked.stale || checked.found == found, "{:?}: {:?}", parties, found);
            // Not every session has a packet between two changes.
            if (at + after.generation as usize).is_multiple_of(3) {
                *checked = Checked { parties, generation: after.generation, found, stale: false };
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_policy_that_has_changed_often_is_as_one_built_anew(steps in prop::collection::vec(step(), 1..40)) {
        let mut run = Run::new();
        for step in &steps {
            run.take(step)?;
        }
    }
}
