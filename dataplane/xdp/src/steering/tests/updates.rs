//! Updates of the maps, and updates that fail: what was captured, and what is to be captured, is captured at any time.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

#[test]
fn an_update_after_a_failed_one_leaves_no_stale_entries() {
    let at = |n: u32| IpAddr::from((0xcb00_0000 + n).to_be_bytes());
    let vips = |numbers: std::ops::Range<u32>| SteeringTables { vips: numbers.map(at).collect(), ..Default::default() };
    let mut steering = loaded(&vips(0..10));
    // One address more than the capacity of the map.
    let error = steering.apply(&vips(5..1_048_582)).expect_err("the map is full");
    assert!(error.to_string().contains("map hosts"), "{error}");
    // Removes entries that only the failed update has written, too.
    steering.apply(&vips(8..12)).expect("tables");
    for (n, expected) in [(0, Kernel), (7, Kernel), (8, Socket), (11, Socket), (12, Kernel), (200_000, Kernel)] {
        assert_eq!(verdict(&mut steering, &packet(ip("192.0.2.1"), at(n))), expected, "{}", at(n));
    }
}

#[test]
fn a_backend_keeps_its_role_until_its_last_listener_is_removed() {
    let mut steering = loaded(&SteeringTables::default());
    let http = from_port("10.0.0.1", "198.51.100.9", 6, 8080);
    let dns = from_port("10.0.0.1", "198.51.100.9", 17, 53);
    let only = |listener| SteeringTables { listeners: [listener].into(), ..Default::default() };
    let (tcp, udp) = ((ip("10.0.0.1"), 8080, 6), (ip("10.0.0.1"), 53, 17));
    let both = |steering: &mut Steering| [&http, &dns].map(|frame| verdict(steering, frame));
    steering.extend(&only_added(only(tcp))).expect("additions");
    assert_eq!(both(&mut steering), [Socket, Kernel]);
    steering.extend(&only_added(only(udp))).expect("additions");
    assert_eq!(both(&mut steering), [Socket, Socket]);
    steering.reduce(&only_removed(only(tcp))).expect("removals");
    assert_eq!(both(&mut steering), [Kernel, Socket]);
    steering.reduce(&only_removed(only(udp))).expect("removals");
    assert_eq!(both(&mut steering), [Kernel, Kernel]);
    let mut later = dns.clone();
    later[21] = 50;
    assert_eq!(verdict(&mut steering, &later), Kernel, "not a backend any more");
    steering.apply(&backends()).expect("tables");
    steering.apply(&only(udp)).expect("tables");
    assert_eq!(both(&mut steering), [Kernel, Socket]);
}

#[test]
fn incremental_updates_lead_to_the_target_tables() {
    let (source, destination) = (ip("192.0.2.1"), ip("198.51.100.9"));
    let wide = ((7, "0.0.0.0/0".parse().expect("a net")), true);
    let tables = |roles: u32| {
        let mut tables = SteeringTables { policy_cidrs: [wide].into(), ..Default::default() };
        add_address(&mut tables, source, roles & 7);
        add_address(&mut tables, destination, roles >> 3);
        tables
    };
    let mut steering = loaded(&tables(0));
    for (old, new) in (0..64).flat_map(|old| (0..64).map(move |new| (old, new))) {
        steering.apply(&tables(old)).expect("tables");
        let change = SteeringChange {
            added: SteeringTables { policy_cidrs: BTreeMap::new(), ..tables(new & !old) },
            removed: SteeringTables { policy_cidrs: BTreeMap::new(), ..tables(old & !new) },
        };
        steering.extend(&change).expect("additions");
        // In between, the traffic of both is captured; a new endpoint has no policy yet.
        let between = verdict(&mut steering, &packet(source, destination));
        let is_local = (LOCAL | LOCAL << 3) & old & new;
        let mut both = tables((old | new) & !(LOCAL | LOCAL << 3) | is_local);
        if new & !old & ENDPOINT << 3 != 0 {
            both.endpoints.insert(destination, NO_POLICY);
        }
        assert_eq!(between, expected(&both, source, destination));
        steering.reduce(&change).expect("removals");
        assert_eq!(verdict(&mut steering, &packet(source, destination)), expected(&tables(new), source, destination));
        assert!(!steering.needs_full_write());
    }
    steering.apply(&tables(ENDPOINT << 3)).expect("tables");
    assert_eq!(verdict(&mut steering, &packet(source, destination)), Kernel);
    let removals = SteeringTables { policy_cidrs: [wide].into(), ..Default::default() };
    steering.reduce(&only_removed(removals)).expect("removals");
    assert_eq!(verdict(&mut steering, &packet(source, destination)), Socket);
}

/// Addresses and prefixes of one family.
struct World {
    pods: [IpAddr; 3],
    local: IpAddr,
    vips: [IpAddr; 2],
    service: IpAddr,
    remotes: [IpAddr; 2],
    /// Destinations of policies: nested.
    destinations: [IpNet; 5],
    /// Cluster prefixes: nested.
    cluster: [IpNet; 5],
}

impl World {
    fn v4() -> Self {
        let nets = |texts: [&str; 5]| texts.map(|text| text.parse().expect("a net"));
        Self {
            pods: ["10.0.0.1", "10.0.0.2", "10.0.1.3"].map(ip),
            local: ip("10.0.0.254"),
            vips: ["203.0.113.1", "203.0.113.2"].map(ip),
            service: ip("10.96.0.1"),
            remotes: ["198.51.100.1", "198.51.100.2"].map(ip),
            destinations: nets(["0.0.0.0/0", "198.51.100.0/24", "198.51.100.1/32", "10.96.0.0/16", "10.96.0.1/32"]),
            cluster: nets(["10.0.0.0/8", "10.0.0.0/16", "10.0.1.0/24", "10.96.0.0/12", "198.51.100.0/25"]),
        }
    }

    fn v6() -> Self {
        let nets = |texts: [&str; 5]| texts.map(|text| text.parse().expect("a net"));
        Self {
            pods: ["fd00::1", "fd00::2", "fd00:1::3"].map(ip),
            local: ip("fd00::fe"),
            vips: ["2001:db8::1", "2001:db8::2"].map(ip),
            service: ip("fd00:96::1"),
            remotes: ["2001:db8:51::1", "2001:db8:51::2"].map(ip),
            destinations: nets(["::/0", "2001:db8:51::/64", "2001:db8:51::1/128", "fd00:96::/64", "fd00:96::1/128"]),
            cluster: nets(["fd00::/16", "fd00::/32", "fd00:1::/64", "fd00:96::/32", "2001:db8:51::/96"]),
        }
    }

    /// Random tables.
    fn tables(&self, random: &mut Random) -> SteeringTables {
        let mut tables = SteeringTables::default();
        for policy in 1..=2 {
            for net in self.destinations {
                if let value @ 0..2 = random.below(3) {
                    tables.policy_cidrs.insert((policy, net), value == 0);
                }
            }
            // No policy is without prefixes.
            if tables.policy_cidrs.keys().all(|(id, _)| *id != policy) {
                tables.policy_cidrs.insert((policy, self.destinations[0]), true);
            }
        }
        for pod in self.pods {
            if let policy @ 1.. = random.below(3) {
                tables.endpoints.insert(pod, policy);
            }
        }
        tables.vips.extend(self.vips.into_iter().filter(|_| random.below(2) == 0));
        tables.local_addresses.extend([self.local].into_iter().filter(|_| random.below(4) > 0));
        for net in self.cluster {
            let kind = random.below(3);
            tables.cluster_cidrs.extend((kind > 0).then_some(net));
            tables.pod_cidrs.extend((kind == 1).then_some(net));
        }
        tables
    }

    fn addresses(&self) -> Vec<IpAddr> {
        [&self.pods[..], &[self.local, self.service], &self.vips, &self.remotes].concat()
    }
}

/// Whether packets are captured: model of `steer.bpf.c` with cluster prefixes.
fn captures(tables: &SteeringTables, source: IpAddr, destination: IpAddr) -> bool {
    let cluster = tables.cluster_cidrs.iter().filter(|net| net.contains(&destination));
    let is_uncovered = tables.pod_cidrs.iter().any(|net| net.contains(&source)) && cluster.count() == 0;
    let to_local = tables.local_addresses.contains(&destination);
    if tables.vips.contains(&destination) {
        return true;
    }
    if tables.endpoints.contains_key(&source) {
        return !to_local;
    }
    if let Some(policy) = tables.endpoints.get(&destination) {
        let prefixes = tables.policy_cidrs.iter().filter(|((id, net), _)| id == policy && net.contains(&source));
        let longest = prefixes.map(|((_, net), translated)| (net.prefix_len(), *translated)).max();
        let of_cluster = tables.cluster_cidrs.iter().filter(|net| net.contains(&source));
        let of_cluster = of_cluster.map(IpNet::prefix_len).max().unwrap_or(0);
        if !longest.is_some_and(|(length, is_translated)| is_translated && length >= of_cluster) {
            return !tables.local_addresses.contains(&source);
        }
    }
    !to_local && is_uncovered
}

/// A sequence of numbers that is the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32 % limit
    }
}

/// The change between tables; `extend` knows no prefixes of new policies, which aren't built yet.
fn changes(old: &SteeringTables, new: &SteeringTables) -> [SteeringChange; 2] {
    let policies = |tables: &SteeringTables| tables.policy_cidrs.keys().map(|(id, _)| *id).collect::<BTreeSet<_>>();
    let of = |tables: &SteeringTables, policy| -> Vec<_> {
        tables.policy_cidrs.iter().filter(|((id, _), _)| *id == policy).map(|(key, value)| (*key, *value)).collect()
    };
    let is_changed = |policy: u32| of(old, policy) != of(new, policy);
    let prefixes = |policy: u32| if is_changed(policy) { of(new, policy) } else { vec![] };
    let gone = |address: &IpAddr| !new.endpoints.contains_key(address);
    let added = SteeringTables {
        endpoints: new
            .endpoints
            .iter()
            .filter(|(pod, id)| old.endpoints.get(pod) != Some(id))
            .map(|(pod, id)| (*pod, *id))
            .collect(),
        vips: &new.vips - &old.vips,
        local_addresses: &new.local_addresses - &old.local_addresses,
        policy_cidrs: policies(new).into_iter().flat_map(prefixes).collect(),
        pod_cidrs: new.pod_cidrs.clone(),
        cluster_cidrs: new.cluster_cidrs.clone(),
        ..Default::default()
    };
    let removed = SteeringTables {
        endpoints: old.endpoints.keys().filter(|pod| gone(pod)).map(|pod| (*pod, 0)).collect(),
        vips: &old.vips - &new.vips,
        local_addresses: &old.local_addresses - &new.local_addresses,
        policy_cidrs: old
            .policy_cidrs
            .iter()
            .filter(|(key, _)| !new.policy_cidrs.contains_key(key))
            .map(|(key, value)| (*key, *value))
            .collect(),
        pod_cidrs: &old.pod_cidrs - &new.pod_cidrs,
        cluster_cidrs: &old.cluster_cidrs - &new.cluster_cidrs,
        ..Default::default()
    };
    let mut first = added.clone();
    let known = policies(old);
    first.policy_cidrs.retain(|(id, _), _| known.contains(id));
    first.endpoints.values_mut().for_each(|id| *id = NO_POLICY);
    [SteeringChange { added: first, removed: removed.clone() }, SteeringChange { added, removed }]
}

/// How far a change has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// The first phase has failed.
    Extending,
    /// The first phase has completed.
    Extended,
    /// The second phase has begun.
    Reducing,
}

struct Transition<'a> {
    world: &'a World,
    old: &'a SteeringTables,
    new: &'a SteeringTables,
}

impl Transition<'_> {
    /// Asserts that everything is captured that must be.
    fn check(&self, steering: &mut Steering, progress: Progress) {
        let Self { old, new, .. } = self;
        // The order of the writes alone leaves nothing open that was captured before, and after it nothing new.
        if progress == Progress::Extending {
            let applied = steering.maps.flags();
            steering.maps.set_flags(applied & !4).expect("flags");
            self.check_pairs(steering, |source, destination| captures(old, source, destination));
            steering.maps.set_flags(applied).expect("flags");
        }
        self.check_pairs(steering, |source, destination| {
            let is_endpoint_moved = old
                .endpoints
                .get(&destination)
                .is_some_and(|id| new.endpoints.get(&destination).is_some_and(|other| id != other))
                && !new.endpoints.contains_key(&source);
            let was = captures(old, source, destination);
            let is = captures(new, source, destination) && !is_endpoint_moved;
            let stays_inside = (&old.cluster_cidrs | &new.cluster_cidrs).iter().any(|net| net.contains(&destination));
            match progress {
                Progress::Extending => was || new.endpoints.contains_key(&source) && is && !stays_inside,
                Progress::Extended => was || is,
                Progress::Reducing => is,
            }
        });
    }

    fn check_pairs(&self, steering: &mut Steering, must_capture: impl Fn(IpAddr, IpAddr) -> bool) {
        for source in self.world.addresses() {
            for destination in self.world.addresses() {
                if must_capture(source, destination) {
                    let frame = packet(source, destination);
                    let is_captured = steering.captures(&frame, LOOPBACK).expect("a run");
                    let (old, new) = (self.old, self.new);
                    assert!(is_captured, "{source} -> {destination} from {old:?} to {new:?}: {steering:?}");
                }
            }
        }
    }
}

/// Both phases, of which a write fails after `count` others; returns whether one has failed.
fn fail_once(steering: &mut Steering, transition: &Transition<'_>, count: u32) -> bool {
    let [first, second] = changes(transition.old, transition.new);
    steering.maps.faults.fail_after(count);
    let extended = steering.extend(&first);
    if extended.is_err() {
        transition.check(steering, Progress::Extending);
        assert!(steering.needs_full_write());
        return steering.maps.faults.end();
    }
    let reduced = steering.reduce(&second);
    let has_failed = steering.maps.faults.end();
    assert_eq!((reduced.is_err(), steering.needs_full_write()), (has_failed, has_failed));
    transition.check(steering, Progress::Reducing);
    has_failed
}

#[test]
fn whichever_write_fails_nothing_to_be_captured_passes_and_a_retry_heals_the_maps() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for world in [World::v4(), World::v6()] {
        let (mut steering, mut fresh) = (loaded(&SteeringTables::default()), loaded(&SteeringTables::default()));
        for _ in 0..30 {
            let (old, new) = (world.tables(&mut random), world.tables(&mut random));
            let transition = Transition { world: &world, old: &old, new: &new };
            let start = |steering: &mut Steering| steering.apply(&old).expect("tables");
            fresh.apply(&new).expect("tables");
            start(&mut steering);
            steering.extend(&changes(&old, &new)[0]).expect("additions");
            transition.check(&mut steering, Progress::Extended);
            for count in 0.. {
                start(&mut steering);
                if !fail_once(&mut steering, &transition, count) {
                    break;
                }
                // What follows doesn't hide the failure, successful or not.
                steering.extend(&SteeringChange::default()).expect("nothing to add");
                steering.reduce(&SteeringChange::default()).expect("nothing to remove");
                assert!(steering.needs_full_write());
                // Some retries fail, too.
                for again in [0, count, 3 * count + 1] {
                    steering.maps.faults.fail_after(again);
                    let result = steering.apply(&new);
                    assert_eq!(
                        (result.is_err(), steering.needs_full_write()),
                        (steering.maps.faults.end(), result.is_err())
                    );
                }
                steering.apply(&new).expect("a retry");
                assert!(!steering.needs_full_write());
                assert_eq!(steering.maps.contents(), fresh.maps.contents(), "{old:?} to {new:?}, write {count}");
            }
            assert_eq!(steering.maps.contents(), fresh.maps.contents(), "{old:?} to {new:?}");
        }
    }
}

#[test]
fn a_first_policy_whose_prefixes_fail_is_captured_in_both_directions() {
    let world = World::v4();
    let [pod, other, _] = world.pods;
    let wide = world.destinations[0];
    let tables =
        SteeringTables { endpoints: [(pod, 1)].into(), policy_cidrs: [((1, wide), true)].into(), ..Default::default() };
    let mut steering = loaded(&SteeringTables::default());
    // The address is the first write.
    steering.maps.faults.fail_after(0);
    steering.apply(&tables).expect_err("no memory");
    for (source, destination, expected) in
        [(pod, world.remotes[0], Socket), (other, world.remotes[0], Socket), (world.remotes[0], pod, Socket)]
    {
        assert_eq!(verdict(&mut steering, &packet(source, destination)), expected, "{source} -> {destination}");
    }
    // Then flags, and the prefix.
    steering.apply(&SteeringTables::default()).expect("a full write");
    steering.maps.faults.fail_after(2);
    steering.apply(&tables).expect_err("no memory");
    for (source, destination, expected) in [
        (pod, world.remotes[0], Socket),
        (other, world.remotes[0], Kernel),
        (world.remotes[0], pod, Socket),
        (world.remotes[0], other, Kernel),
    ] {
        assert_eq!(verdict(&mut steering, &packet(source, destination)), expected, "{source} -> {destination}");
    }
    steering.apply(&tables).expect("a retry");
    assert_eq!(verdict(&mut steering, &packet(world.remotes[0], pod)), Kernel);
}
