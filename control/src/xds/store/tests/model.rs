//! Property tests against a model: for any sequence of placements and any order of responses, the incrementally updated
//! policy equals one built from scratch.

use vipgate_coverage::{Coverage, property};

use super::*;
use crate::xds::store::tests::generators::{GATEWAYS, any_placement};

/// A sequence of placements, the seed for the order of responses, and the gateway.
fn scenario() -> impl Strategy<Value = (Vec<Placement>, u64, &'static str)> {
    (prop::collection::vec(any_placement(), 1..6), any::<u64>(), prop::sample::select(GATEWAYS.to_vec()))
}

/// The view of the gateway's policy, built from scratch.
fn expected(placement: &Placement, gateway: &str, server: &ServerPolicy) -> PolicyView {
    build_policy_view(&whole_policy(placement, &GatewayLocality::named(gateway), &server.version))
}

/// Counts the parts of a change for the coverage counters.
fn count(coverage: &Coverage, change: &PolicyChange) {
    for (class, count) in [
        ("vips", change.vips.changed().count()),
        ("vips removed", change.vips.removed().count()),
        ("endpoints", change.endpoints.changed().count()),
        ("endpoints removed", change.endpoints.removed().count()),
        ("services", change.services.changed().count()),
        ("services removed", change.services.removed().count()),
        ("nodes", change.nodes.changed().count()),
        ("nodes removed", change.nodes.removed().count()),
        ("empty", usize::from(change.is_empty())),
    ] {
        coverage.add(class, count as u64);
    }
}

/// What updates have to change at least.
const CHANGES: [&str; 8] = [
    "vips",
    "vips removed",
    "endpoints",
    "endpoints removed",
    "services",
    "services removed",
    "nodes",
    "nodes removed",
];

#[test]
fn updates_equal_a_build_from_scratch() {
    let classes = [&CHANGES[..], &["discarded", "g1", "g9"]].concat();
    property(ProptestConfig::default(), &scenario(), &classes, |(placements, seed, gateway), coverage| {
        coverage.count(gateway);
        let (mut rng, mut store, mut builder) = (SeededRng(seed), ResourceStore::default(), builder());
        let mut sum = Accumulated::default();
        let mut history = vec![ServerPolicy::default()];
        for placement in &placements {
            let (before, server) = (history.last().unwrap(), ServerPolicy::of(placement));
            if rng.one_in(3) {
                // The connection breaks in the middle of an update.
                let responses = server.shuffled_responses(before, &history, &mut rng);
                for response in responses.iter().take(rng.below(responses.len() + 1)) {
                    store.stage(response.clone()).unwrap();
                }
                coverage.add("discarded", u64::from(store.has_staged()));
                store.discard();
                prop_assert!(!store.has_staged());
            }
            for response in server.shuffled_responses(before, &history, &mut rng) {
                store.stage(response).unwrap();
                prop_assert!(!store.is_complete());
            }
            store.stage(server.settings_response()).unwrap();
            prop_assert!(store.is_complete() && store.has_staged());
            prop_assert_eq!(store.resources(), &before.resources);

            let update = store.update_for(&GatewayLocality::named(gateway));
            count(coverage, &update.change);
            let snapshot = builder.with_change(&update.change).unwrap();
            prop_assert_eq!(policy_view(&snapshot.policy), expected(placement, gateway, &server));
            prop_assert_eq!(&update.peers, &placement.peers);
            let whole = whole_policy(placement, &GatewayLocality::named(gateway), "");
            let expected = (whole.vips, whole.endpoints, whole.services, whole.nodes);
            prop_assert_eq!(sum.apply(&update.change), expected);
            prop_assert_eq!(store.commit(), server.diff(before));
            prop_assert!(!store.has_staged() && !store.is_complete());
            prop_assert_eq!(store.resources(), &server.resources);
            prop_assert_eq!(store.version(), &server.version);
            history.push(server);
        }
        // The same Settings again change nothing.
        let server = history.last().unwrap();
        store.stage(server.settings_response()).unwrap();
        prop_assert!(store.is_complete());
        let update = store.update_for(&GatewayLocality::named(gateway));
        prop_assert!(update.change.is_empty());
        prop_assert_eq!(&update.change.version, &server.version);
        prop_assert_eq!(store.commit(), vec![]);
        Ok(())
    });
}

#[test]
fn updates_continue_from_a_cached_policy() {
    property(ProptestConfig::default(), &scenario(), &CHANGES, |(placements, seed, gateway), coverage| {
        let mut rng = SeededRng(seed);
        let servers: Vec<_> = placements.iter().map(ServerPolicy::of).collect();
        for (pair, placements) in servers.windows(2).zip(placements.windows(2)) {
            let [before, after] = pair else { unreachable!() };
            // A cached policy is one full update.
            let (mut store, mut builder) = (ResourceStore::default(), builder());
            store.stage_cached(before.resources.clone()).unwrap();
            prop_assert!(store.is_complete());
            let snapshot = builder.with_change(&store.update_for(&GatewayLocality::named(gateway)).change).unwrap();
            prop_assert_eq!(policy_view(&snapshot.policy), expected(&placements[0], gateway, before));
            store.commit();
            for kind in Kind::ALL {
                let of_kind = before.resources.iter().filter(|(key, _)| key.kind == kind);
                let versions = of_kind.map(|(key, stored)| (key.name.to_string(), stored.version.clone()));
                prop_assert_eq!(store.versions(kind).collect::<Vec<_>>(), versions.collect::<Vec<_>>());
            }
            // Deltas from there on.
            for response in
                after.shuffled_responses(before, &[], &mut rng).into_iter().chain([after.settings_response()])
            {
                store.stage(response).unwrap();
            }
            let change = store.update_for(&GatewayLocality::named(gateway)).change;
            count(coverage, &change);
            let snapshot = builder.with_change(&change).unwrap();
            prop_assert_eq!(policy_view(&snapshot.policy), expected(&placements[1], gateway, after));
        }
        Ok(())
    });
}

/// A server with one VIP, whose only shard is `gateway`'s; `None`: without shards.
fn vip(address: &str, gateway: Option<&str>) -> ServerPolicy {
    let shard = |name: &str| ShardSpec { gateway: name.into(), blocks: None, backups: vec![] };
    let vip = VipSpec {
        address: ip(address),
        name: "".into(),
        announce: Announce::L2,
        reserved_ports: vec![],
        shards: gateway.map(shard).into_iter().collect(),
        shard_map: None,
        private: vec![],
    };
    ServerPolicy::of(&Placement { vips: vec![vip].into(), ..Placement::default() })
}

/// The old owner, the new one, and all others, which forward packets to the owner.
#[test]
fn every_gateway_receives_a_moved_shard() {
    let (before, after) = (vip("203.0.113.1", Some("g1")), vip("203.0.113.1", Some("g2")));
    for gateway in GATEWAYS {
        let mut store = store_with(&before);
        for response in responses(&after.diff(&before)) {
            store.stage(response).unwrap();
        }
        let change = store.update_for(&GatewayLocality::named(gateway)).change;
        let owners: Vec<_> = change.vips.changed().flat_map(|vip| &vip.shards).map(|shard| &*shard.gateway).collect();
        assert_eq!((owners, change.vips.removed().count()), (vec!["g2"], 0), "{gateway}");
    }
}

/// Also by a name that is a non-canonical form of an address in the store.
#[test]
fn removing_an_unknown_resource_changes_nothing() {
    let server = vip("2001:db8::1", None);
    let mut store = store_with(&server);
    for name in ["2001:DB8::1", "2001:db8:0::1", "203.0.113.1", "x", ""] {
        for kind in Kind::ALL {
            store.stage(response(kind, &[(key(kind, name), None)])).unwrap();
        }
    }
    assert!(store.update_for(&GatewayLocality::named("g1")).change.is_empty());
    assert_eq!(store.commit(), []);
    assert_eq!(store.resources(), &server.resources);
    store.stage(response(Kind::Vip, &[(key(Kind::Vip, "2001:db8::1"), None)])).unwrap();
    let change = store.update_for(&GatewayLocality::named("g1")).change;
    assert_eq!(change.vips, Entries::default().without([ip("2001:db8::1")]));
}
