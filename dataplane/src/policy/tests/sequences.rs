//! Property tests of policy changes: random sequences of valid and invalid changes, compared with a model.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{as_set, bucket, is_fresh, permits};
use crate::flow::ids::WorkerId;
use crate::flow::time::Tick;
use crate::policy::Snapshot;
use crate::policy::build::Builder;
use crate::policy::change::PolicyChange;
use crate::policy::compiled::{Policy, Vip};
use crate::policy::quota::EndpointUsage;
use crate::policy::spec::*;
use crate::policy::tests::model::*;
use crate::policy_set::{Between, PolicySet, WithPolicy};
use crate::ports::BlockId;
use crate::ports::pool::PortPool;

const BLOCK: BlockId = BlockId(3);
const WORKER: WorkerId = WorkerId(0);

/// A builder and the model of its state.
struct Run {
    builder: Builder,
    state: ModelState,
    set: PolicySet,
    /// Number of open sessions per endpoint, and the counter that has them.
    sessions: BTreeMap<IpAddr, (u32, Arc<EndpointUsage>)>,
    /// VIPs with a block claimed by a worker.
    blocks: BTreeMap<IpAddr, Arc<PortPool>>,
    validated: Vec<ValidatedSession>,
}

/// A session and the result of its last validation.
struct ValidatedSession {
    addresses: [IpAddr; 3],
    generation: u32,
    found: (bool, bool),
    /// Whether an affecting change has happened since.
    stale: bool,
}

/// Every combination of endpoint, remote and VIP of one family.
fn all_triples() -> Vec<[IpAddr; 3]> {
    let all = |texts: &[&str]| texts.iter().map(|text| ip(text)).collect::<Vec<_>>();
    let (vips, endpoints, remotes) = (all(&VIPS), all(&ENDPOINTS), all(&[&REMOTES[..], &VIPS[..]].concat()));
    let mut triples = Vec::new();
    for (&endpoint, &remote) in
        endpoints.iter().flat_map(|endpoint| remotes.iter().map(move |remote| (endpoint, remote)))
    {
        triples.extend(vips.iter().map(|&vip| [endpoint, remote, vip]));
    }
    triples
        .retain(|[endpoint, remote, vip]| endpoint.is_ipv4() == remote.is_ipv4() && remote.is_ipv4() == vip.is_ipv4());
    triples
}

fn found(policy: &Policy, addresses: [IpAddr; 3]) -> (bool, bool) {
    (permits(policy, addresses), policy.vip_at(addresses[1]).is_some())
}

impl Run {
    fn new() -> Self {
        let builder = Builder::new(NetworkSpec::default());
        let Snapshot { policy, generation, .. } = builder.snapshot();
        let validated = all_triples().into_iter().map(|addresses| ValidatedSession {
            addresses,
            generation,
            found: found(&policy, addresses),
            stale: false,
        });
        Self {
            validated: validated.collect(),
            builder,
            state: ModelState::default(),
            set: PolicySet::default(),
            sessions: BTreeMap::new(),
            blocks: BTreeMap::new(),
        }
    }

    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Change { edits, whole } => self.change(edits, *whole),
            Step::Invalid { edits, flaw, at, whole } => {
                let Some(flawed) = invalid_policy(self.state.edited(edits).policy_set(), *flaw, *at) else {
                    return Ok(());
                };
                let change = PolicyChange::between(&self.set, &flawed);
                self.is_rejected(|builder| {
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
            Some(pool) if !taken => pool.release_block(BLOCK, WORKER),
            Some(pool) => drop(self.blocks.insert(address, pool)),
            None => {
                let vip = policy.vip_at(address).filter(|vip| taken && !vip.ports.retired);
                if let Some(vip) = vip {
                    prop_assert!(vip.ports.pool.claim(BLOCK, WORKER), "{} is closed while policy wants it", address);
                    self.blocks.insert(address, vip.ports.pool.clone());
                }
            }
        }
        Ok(())
    }

    /// An invalid change is rejected, and has no effect.
    fn is_rejected(&mut self, apply: impl FnOnce(&mut Builder) -> bool) -> Result<(), TestCaseError> {
        let (before, uses) = (self.builder.snapshot(), format!("{:?}", self.builder.references()));
        prop_assert!(apply(&mut self.builder));
        let after = self.builder.snapshot();
        prop_assert_eq!(before.generation, after.generation);
        prop_assert!(Arc::ptr_eq(&before.policy, &after.policy) && Arc::ptr_eq(&before.freshness, &after.freshness));
        prop_assert_eq!(uses, format!("{:?}", self.builder.references()));
        prop_assert_eq!(as_set(&after.policy), self.set.clone());
        Ok(())
    }

    fn change(&mut self, edits: &[Edit], whole: bool) -> Result<(), TestCaseError> {
        let state = self.state.edited(edits);
        let set = state.policy_set();
        let before = self.builder.snapshot();
        let after = if whole {
            self.builder.with_policy(&set)
        } else {
            self.builder.with_change(&PolicyChange::between(&self.set, &set))
        };
        let after = after.map_err(|error| TestCaseError::fail(error.to_string()))?;
        let old = std::mem::replace(&mut self.set, set);
        self.state = state;
        self.equals_a_fresh_build(&after.policy)?;
        self.numbers_keep_their_meaning(&before.policy, &after.policy)?;
        self.sessions_and_blocks_are_still_known(&after.policy)?;
        self.only_affected_sessions_are_revalidated(&old, &before, &after)
    }

    fn equals_a_fresh_build(&self, policy: &Policy) -> Result<(), TestCaseError> {
        let mut other = Builder::new(NetworkSpec::default());
        let fresh = other.with_policy(&self.set).unwrap().policy;
        prop_assert_eq!(as_set(policy), self.set.clone());
        prop_assert_eq!(as_set(&fresh), self.set.clone());
        prop_assert_eq!(policy.endpoint_count(), fresh.endpoint_count());
        for text in ENDPOINTS.iter().chain(&VIPS).chain(&REMOTES) {
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
                let vip = policy.vip_at(address).filter(|vip| !vip.ports.retired)?;
                Some((vip.address, vip.name.clone(), vip.announce, vip.ports.reserved.clone(), vip.ports.guaranteed))
            };
            prop_assert_eq!(live(policy), live(&fresh));
            // The reference counts that protect VIPs from removal.
            let uses = |builder: &Builder, vip: &Vip| builder.references().endpoints_of_vip(vip.ports.id);
            if let Some((vip, anew)) = policy.vip_at(address).zip(fresh.vip_at(address)) {
                prop_assert_eq!(uses(&self.builder, vip), uses(&other, anew));
            }
        }
        for name in POLICIES {
            let egress = |builder: &Builder| {
                builder
                    .egress(name)
                    .map(|egress| (egress.spec.clone(), builder.references().endpoints_of_egress(egress.id)))
            };
            prop_assert_eq!(egress(&self.builder), egress(&other));
        }
        for ValidatedSession { addresses, .. } in &self.validated {
            prop_assert_eq!(permits(policy, *addresses), permits(&fresh, *addresses), "{:?}", addresses);
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
            let other = after.vips().find(|other| other.ports.id == vip.ports.id);
            let is_free = vip.ports.retired && !self.blocks.contains_key(&vip.address);
            let is_unchanged =
                now.is_none_or(|now| now.ports.id == vip.ports.id && Arc::ptr_eq(&now.ports.pool, &vip.ports.pool));
            prop_assert!(is_free || is_unchanged);
            prop_assert!(is_free || other.is_none_or(|other| other.address == vip.address));
        }
        // Every number ever assigned is either in use or free.
        let uses = self.builder.references();
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
                prop_assert_eq!(usage.map_or(0, EndpointUsage::sessions), 0);
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
            let (address, is_in_policy) = (ip(text), self.set.vips.iter().any(|vip| vip.address == ip(text)));
            let known = after.vip_at(address);
            prop_assert_eq!(known.is_some(), is_in_policy || self.blocks.contains_key(&address), "{}", address);
            if let Some(known) = known {
                prop_assert_eq!(known.ports.retired, !is_in_policy);
                prop_assert!(self.blocks.get(&address).is_none_or(|pool| Arc::ptr_eq(pool, &known.ports.pool)));
            }
        }
        Ok(())
    }

    /// Sessions are revalidated exactly when their endpoint, remote or VIP, or any destination list, has changed,
    /// except for bucket collisions; a session that isn't revalidated has an unchanged result.
    fn only_affected_sessions_are_revalidated(
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
        let known = |policy: &Policy, address: IpAddr| {
            policy.vip_at(address).map(|vip| (vip.ports.retired, vip.ports.reserved.clone()))
        };
        let is_changed = |address: &IpAddr| known(&before.policy, *address) != known(&after.policy, *address);
        let vips: HashSet<usize> = VIPS.map(ip).iter().filter(|vip| is_changed(vip)).map(|&vip| bucket(vip)).collect();
        for (at, session) in self.validated.iter_mut().enumerate() {
            let ValidatedSession { addresses, generation, .. } = *session;
            let [endpoint, others @ ..] = addresses;
            session.stale |=
                all || endpoints.contains(&endpoint) || others.iter().any(|it| vips.contains(&bucket(*it)));
            prop_assert_eq!(is_fresh(after, generation, addresses), !session.stale, "{:?}", addresses);
            let found = found(&after.policy, addresses);
            prop_assert!(session.stale || session.found == found, "{:?}: {:?}", addresses, found);
            // Not every session has a packet between two changes.
            if (at + after.generation as usize).is_multiple_of(3) {
                *session = ValidatedSession { addresses, generation: after.generation, found, stale: false };
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_policies_equal_a_fresh_build(steps in prop::collection::vec(step(), 1..40)) {
        let mut run = Run::new();
        for step in &steps {
            run.take(step)?;
        }
    }
}
