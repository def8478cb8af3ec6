//! Resharding: gateways are added, removed, drained or get other slots, and VIPs are added to a policy. Established
//! sessions keep their VIP and port, whichever gateway receives their packets.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::policy::members::PolicyRelease;
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, NeighborSpec, SLOTS, ShardMapRef, ShardMapSpec, ShardSpec, SlotRef,
};
use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

const GATEWAYS: usize = 4;
/// Gateways in the order of preference of a slot, before those that aren't placed are left out.
type Preference = [usize; GATEWAYS];

/// A placement: which gateways have slots, and the preferences of the slots in turn.
#[derive(Clone, Debug)]
struct Placement {
    gateways: BTreeSet<usize>,
    preferences: Vec<Preference>,
}

impl Placement {
    fn order(&self, slot: usize) -> Vec<Arc<str>> {
        let order = self.preferences[slot % self.preferences.len()].iter();
        order.filter(|number| self.gateways.contains(number)).map(|number| name(*number)).collect()
    }

    fn policy(&self, version: u32) -> PolicySet {
        let mut set = policy();
        set.version = version.to_string();
        let orders: Vec<_> = (0..self.preferences.len()).map(|slot| self.order(slot)).collect();
        let slots = (0..SLOTS).map(|slot| (slot % orders.len()) as u16).collect();
        set.shard_maps = vec![ShardMapSpec { name: "all".into(), orders, slots }];
        for (vip, rotation) in set.vips.iter_mut().zip([5, 700, 64]) {
            vip.announce = Announce::Bgp;
            vip.shard_map = Some(ShardMapRef { map: "all".into(), rotation });
        }
        for (endpoint, slot) in set.endpoints.iter_mut().zip([1, 2, 3, 1022, 77]) {
            endpoint.slot = Some(SlotRef { map: None, slot });
        }
        set
    }
}

/// A session: its first packet, and how the remote saw that.
type Session = (Vec<u8>, Vec<u8>);

/// A cluster that follows placements, and its sessions.
struct World {
    cluster: Cluster,
    version: u32,
    sessions: Vec<Session>,
}

impl World {
    fn new(set: impl FnOnce(u32) -> PolicySet, active: &BTreeSet<usize>) -> Self {
        let mut cluster = Cluster::new(GATEWAYS, &Setup { workers: 2, ..Setup::default() });
        cluster.skip_counter_check();
        for number in 0..GATEWAYS {
            cluster.members[number].active = active.contains(&number);
        }
        let mut world = Self { cluster, version: 0, sessions: Vec::new() };
        world.set_policy(set);
        world.release();
        world
    }

    /// MAC addresses of pods 10.244.1.100 to .159.
    fn add_neighbors(&mut self) {
        let mut network = Cluster::network(GATEWAYS, false);
        let neighbor = |pod| NeighborSpec { interface: INSIDE, address: ip(&format!("10.244.1.{pod}")), mac: POD_MAC };
        network.neighbors.extend((100..160).map(neighbor));
        self.cluster.gateways.iter_mut().for_each(|gateway| gateway.set_network(network.clone()));
    }

    /// A new policy, at every gateway; nothing is released yet.
    fn set_policy(&mut self, set: impl FnOnce(u32) -> PolicySet) {
        self.version += 1;
        let set = set(self.version);
        self.cluster.gateways.iter_mut().for_each(|gateway| gateway.set_policy(&set));
    }

    /// Every gateway sends its sessions and releases what the policy takes from it.
    fn release(&mut self) {
        self.sync();
        self.cluster.policy_releases = vec![PolicyRelease::Version(self.version.to_string().into()); GATEWAYS];
        self.cluster.publish_views();
        self.sync();
    }

    fn sync(&mut self) {
        for (from, to) in (0..GATEWAYS * GATEWAYS).map(|at| (at / GATEWAYS, at % GATEWAYS)) {
            if from != to {
                self.cluster.full_sync(from, to);
            }
        }
    }

    fn activate(&mut self, number: usize, active: bool) {
        self.cluster.members[number].active = active;
        self.cluster.publish_views();
        self.sync();
    }

    fn active(&self) -> Vec<usize> {
        (0..GATEWAYS).filter(|number| self.cluster.members[*number].active).collect()
    }

    /// A pod opens a session at some gateway.
    fn open(&mut self, pod: &str, port: u16, at_gateway: usize) {
        let remote = if pod.contains(':') { "[2001:db8:51::10]:443" } else { REMOTE };
        let request = packet(Protocol::Udp, (ip(pod), port).into(), at(remote));
        let sent = self.cluster.receive(at_gateway, INSIDE, &request);
        let [(_, OUTSIDE, seen)] = &sent[..] else { panic!("{pod} {port}: {sent:?} {:?}", self.cluster.drops()) };
        assert!(
            self.sessions.iter().all(|(_, other)| ends(other).0 != ends(seen).0),
            "{} is given out twice",
            ends(seen).0
        );
        self.sessions.push((request, seen.clone()));
    }

    /// All sessions continue in both directions, through each of these gateways.
    fn check(&mut self, through: &[usize]) -> TestCaseResult {
        for (request, seen) in self.sessions.clone() {
            for &number in through {
                let sent = self.cluster.receive(number, INSIDE, &request);
                let seen_now: Vec<_> = sent.iter().map(|(_, out, bytes)| (*out, ends(bytes))).collect();
                prop_assert_eq!(seen_now, vec![(OUTSIDE, ends(&seen))], "{:?}", self.cluster.drops());
                let received = self.cluster.receive(number, OUTSIDE, &reply_to(&seen, Protocol::Udp));
                let pods: Vec<_> = received.iter().map(|(_, out, bytes)| (*out, ends(bytes).1)).collect();
                prop_assert_eq!(pods, vec![(INSIDE, ends(&request).0)], "{:?}", self.cluster.drops());
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Open {
        pod: usize,
        gateway: prop::sample::Index,
    },
    Add(usize),
    Remove(usize),
    Drain(usize),
    Undrain(usize),
    /// Other preferences, as after a change of weights or zones.
    Prefer(Vec<Preference>),
}

fn preferences() -> impl Strategy<Value = Vec<Preference>> {
    prop::collection::vec(Just([0, 1, 2, 3]).prop_shuffle(), 1..12)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..PODS.len(), any::<prop::sample::Index>()).prop_map(|(pod, gateway)| Step::Open { pod, gateway }),
        2 => (0..GATEWAYS).prop_map(Step::Add),
        2 => (0..GATEWAYS).prop_map(Step::Remove),
        1 => (0..GATEWAYS).prop_map(Step::Drain),
        1 => (0..GATEWAYS).prop_map(Step::Undrain),
        1 => preferences().prop_map(Step::Prefer),
    ]
}

const PODS: [&str; 5] = ["10.244.1.5", "10.244.1.6", "10.244.1.21", "fd00:244:1::5", "fd00:244:1::6"];

/// Runs a step; a transition is complete when it returns.
fn run(world: &mut World, placement: &mut Placement, step: Step, coverage: &Coverage) -> TestCaseResult {
    match step {
        Step::Open { pod, gateway } => {
            let port = 4000 + world.sessions.len() as u16;
            let active = world.active();
            world.open(PODS[pod], port, *gateway.get(&active));
            world.cluster.advance(100);
            coverage.count("opened");
        }
        Step::Add(number) if placement.gateways.insert(number) => {
            world.set_policy(|version| placement.policy(version));
            // Nothing has moved yet, so nothing waits.
            let active = world.active();
            world.check(&active)?;
            world.release();
            world.activate(number, true);
            coverage.count("added");
        }
        Step::Remove(number) if placement.gateways.contains(&number) && world.active().len() > 1 => {
            let others = world.active().into_iter().any(|other| other != number && placement.gateways.contains(&other));
            if !others {
                return Ok(());
            }
            placement.gateways.remove(&number);
            world.set_policy(|version| placement.policy(version));
            world.release();
            let active = world.active();
            world.check(&active)?;
            world.activate(number, false);
            coverage.count("removed");
        }
        Step::Drain(number) if world.active().len() > 1 && world.active().contains(&number) => {
            world.activate(number, false);
            coverage.count("drained");
        }
        Step::Undrain(number) if placement.gateways.contains(&number) && !world.active().contains(&number) => {
            world.sync();
            world.activate(number, true);
            coverage.count("undrained");
        }
        Step::Prefer(preferences) => {
            placement.preferences = preferences;
            world.set_policy(|version| placement.policy(version));
            world.release();
            coverage.count("preferred");
        }
        _ => {}
    }
    Ok(())
}

#[test]
fn sessions_survive_any_resharding() {
    let strategy =
        (prop::collection::btree_set(0..GATEWAYS, 2..=GATEWAYS), preferences(), prop::collection::vec(step(), 1..40));
    let classes = ["opened", "added", "removed", "drained", "undrained", "preferred", "tunneled", "failed over"];
    property(
        ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) },
        &strategy,
        &classes,
        |(gateways, preferences, steps), coverage| {
            let mut placement = Placement { gateways: gateways.clone(), preferences };
            let mut world = World::new(|version| placement.policy(version), &gateways);
            for step in steps {
                run(&mut world, &mut placement, step, coverage)?;
                let active = world.active();
                world.check(&active)?;
            }
            coverage.add("tunneled", world.cluster.tunneled);
            let workers = world.cluster.gateways.iter().flat_map(|it| &it.workers);
            coverage.add("failed over", workers.map(|it| it.counters().sessions_failed_over.get()).sum());
            Ok(())
        },
    );
}

/// VIPs that one gateway owns each: the first ones of 192.0.2.10 to .12, at gateways 0 to 2.
fn with_vips(count: u8, selection: AddressSelection, version: u32) -> PolicySet {
    let mut set = policy();
    set.version = version.to_string();
    set.policies[0].address_selection = selection;
    let template = set.vips[0].clone();
    set.vips.retain(|vip| vip.address.is_ipv6());
    for number in 0..count {
        let mut vip = template.clone();
        vip.address = ip(&format!("192.0.2.{}", 10 + number));
        let backups = (1..GATEWAYS).map(|step| name((usize::from(number) + step) % GATEWAYS)).collect();
        vip.shards = vec![ShardSpec { gateway: name(number.into()), blocks: None, backups }];
        set.vips.push(vip);
    }
    set.endpoints.retain(|endpoint| endpoint.address.is_ipv4());
    for pod in 0..60 {
        let mut endpoint = set.endpoints[0].clone();
        endpoint.address = ip(&format!("10.244.1.{}", 100 + pod));
        set.endpoints.push(endpoint);
    }
    for endpoint in &mut set.endpoints {
        endpoint.policy = "a".into();
        endpoint.vips = (0..count).map(|number| ip(&format!("192.0.2.{}", 10 + number))).collect();
    }
    set
}

#[test]
fn sessions_keep_their_vip_when_another_one_is_added_or_removed() {
    for selection in [AddressSelection::PerEndpoint, AddressSelection::PerConnection] {
        let mut world = World::new(|version| with_vips(2, selection, version), &[0, 1, 2, 3].into());
        for pod in 100..160 {
            world.open(&format!("10.244.1.{pod}"), 4000, usize::from(pod % 4_u8));
        }
        world.add_neighbors();
        let vips =
            |sessions: &[Session]| -> BTreeSet<_> { sessions.iter().map(|(_, seen)| ends(seen).0.ip()).collect() };
        assert_eq!(vips(&world.sessions).len(), 2);
        world.set_policy(|version| with_vips(3, selection, version));
        world.release();
        world.check(&[0, 1, 2, 3]).unwrap();
        let before = world.sessions.len();
        for pod in 100..160 {
            world.open(&format!("10.244.1.{pod}"), 5000, usize::from(pod % 4_u8));
        }
        assert_eq!(vips(&world.sessions[before..]).len(), 3, "new sessions use the new one, too");
        world.check(&[0, 1, 2, 3]).unwrap();
        // Back again: those of the removed VIP end, all others continue.
        world.set_policy(|version| with_vips(2, selection, version));
        world.release();
        world.sessions.retain(|(_, seen)| ends(seen).0.ip() != ip("192.0.2.12"));
        world.check(&[0, 1, 2, 3]).unwrap();
    }
}

#[test]
fn a_release_starts_no_replication_epoch() {
    let all: BTreeSet<usize> = [0, 1, 2, 3].into();
    let preferences = vec![[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]];
    let before = Placement { gateways: all.clone(), preferences };
    let after = Placement { gateways: [1, 2, 3].into(), ..before.clone() };
    let mut world = World::new(|version| before.policy(version), &all);
    let epochs = |world: &World| -> Vec<u64> {
        let epoch = |gateway: &Gateway| gateway.builder.snapshot().policy.members().replication_epoch();
        world.cluster.gateways.iter().map(epoch).collect()
    };
    let first = epochs(&world);
    world.set_policy(|version| after.policy(version));
    let moved = epochs(&world);
    // The removed one has to send what it has never sent, and the others have other replicas.
    assert!(moved.iter().zip(&first).all(|(moved, first)| moved > first), "{first:?}, {moved:?}");
    for number in 0..GATEWAYS {
        world.cluster.policy_releases[number] = PolicyRelease::Version("2".into());
        world.cluster.publish_views();
        assert_eq!(epochs(&world), moved, "after the release of {number}");
    }
}

#[test]
fn packets_wait_until_the_former_owner_has_released_what_policy_has_moved() {
    let all: BTreeSet<usize> = [0, 1, 2, 3].into();
    let before = Placement { gateways: all.clone(), preferences: vec![[0, 1, 2, 3]] };
    let after = Placement { preferences: vec![[2, 0, 1, 3]], ..before.clone() };
    let mut world = World::new(|version| before.policy(version), &all);
    for port in 4000..4020 {
        world.open("10.244.1.5", port, 1);
    }
    world.set_policy(|version| after.policy(version));
    let (request, seen) = world.sessions[3].clone();
    assert_eq!(world.cluster.receive(1, INSIDE, &request), vec![]);
    assert_eq!(world.cluster.receive(3, OUTSIDE, &reply_to(&seen, Protocol::Udp)), vec![]);
    let new = packet(Protocol::Udp, at("10.244.1.5:6000"), at(REMOTE));
    assert_eq!(world.cluster.receive(0, INSIDE, &new), vec![]);
    world.sync();
    world.cluster.policy_releases = vec![PolicyRelease::Version("2".into()); GATEWAYS];
    world.cluster.publish_views();
    let sent = world.cluster.gateways[2].run();
    let mut outside: Vec<_> = sent.iter().filter(|(out, _)| *out == OUTSIDE).map(|(_, bytes)| ends(bytes)).collect();
    outside.sort();
    assert_eq!(sent.len(), 3, "{:?}", world.cluster.drops());
    assert!(outside.contains(&ends(&seen)), "the session goes on with its port");
    assert!(outside.iter().any(|(vip, _)| *vip != ends(&seen).0), "and the new one is open");
    world.check(&[0, 1, 2, 3]).unwrap();
}
