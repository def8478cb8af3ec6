//! Projected placements are valid and closed; refusals are bounded, and end.

use std::collections::BTreeSet;
use std::net::IpAddr;

use proptest::prelude::*;
use vipgate_coverage::property;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::spec::NetworkSpec;
use vipgate_policy::compiler::{GatewayLocality, Placement};

use super::*;
use crate::xds::fixtures::{large_service, sample_placement, whole_policy};
use crate::xds::publication::selection::set_aside;
use crate::xds::resource::{Content, decode, encode_all};
use crate::xds::store::tests::generators::any_placement;

fn builds(placement: &Placement) -> bool {
    let policy = whole_policy(placement, &GatewayLocality::named("g1"), "v");
    Builder::new(NetworkSpec::default()).with_change(&policy).is_ok()
}

fn key(kind: Kind, name: &str) -> Key {
    Key { kind, name: name.into() }
}

/// The resources of a publication that can be set aside.
fn settable_keys(publication: &Publication) -> Vec<Key> {
    let all = Kind::ALL.into_iter().flat_map(|kind| publication.of_kind(kind)).map(|it| it.key.clone());
    all.filter_map(|key| settable(publication, key)).collect()
}

#[test]
fn whatever_is_set_aside_the_rest_is_valid_and_every_endpoint_stays_covered_without_what_it_lost() {
    let picks = prop::collection::vec((any::<prop::sample::Index>(), prop::bool::weighted(0.2)), 1..6);
    let classes = ["EgressPolicy", "Vip", "Endpoint", "Service", "OverlayNode", "dropped", "a Service lost its VIP"];
    let inputs = (any_placement(), any_placement(), picks);
    property(ProptestConfig::with_cases(256), &inputs, &classes, |(before, placement, picks), coverage| {
        let before = Publication::default().next(Arc::new(before)).unwrap();
        let Some(published) = before.next(Arc::new(placement.clone())) else { return Ok(()) };
        let keys = settable_keys(&published);
        prop_assume!(!keys.is_empty() && builds(&placement));
        let mut selection = Selection::new();
        for (pick, drops) in picks {
            let key = pick.get(&keys).clone();
            coverage.count(key.kind.name());
            let form = if drops && key.kind == Kind::Endpoint { Form::Dropped } else { Form::Closed };
            selection.insert(key, form);
        }
        let without = set_aside(&selection);
        let after = placement.without(&without);
        for (key, content) in encode_all(&after) {
            prop_assert!(decode(key.kind, &key.name, &content.body).is_ok(), "{key}");
        }
        prop_assert!(builds(&after), "{selection:?}");
        for endpoint in &placement.endpoints {
            let Some(left) = after.endpoints.get(&endpoint.address) else {
                coverage.count("dropped");
                prop_assert!(without.dropped.contains(&endpoint.address));
                continue;
            };
            let is_closed = without.policies.contains(&endpoint.policy) || without.closed.contains(&endpoint.address);
            let is_left = |vip: &&IpAddr| !is_closed && !without.vips.contains(*vip) && !without.closed.contains(*vip);
            let vips: Vec<IpAddr> = endpoint.vips.iter().filter(is_left).copied().collect();
            prop_assert_eq!((&left.policy, &left.vips), (&endpoint.policy, &vips));
            if !without.closed.contains(&endpoint.address) {
                prop_assert_eq!(after.gateway_of(left), placement.gateway_of(endpoint));
            }
        }
        let names: BTreeSet<_> = after.services.iter().map(|service| &service.name).collect();
        let is_lost = |it: &&vipgate_policy::compiler::PlacedService| !names.contains(&it.name);
        if placement.services.iter().filter(is_lost).any(|it| !without.services.contains(&it.name)) {
            coverage.count("a Service lost its VIP");
        }
        // The variant has the resources of the projected placement, and its delta leads there from whatever was before.
        let selection = Arc::new(selection);
        let (earlier, variant) = (before.variant(selection.clone(), 1), published.variant(selection, 2));
        let expected: BTreeMap<Key, Content> = encode_all(&after).into_iter().collect();
        let kinds = Kind::ALL.into_iter().filter(|kind| *kind != Kind::Settings);
        let all = kinds.flat_map(|kind| variant.of_kind(kind)).map(|it| (it.key.clone(), it.content.clone()));
        prop_assert_eq!(all.collect::<BTreeMap<_, _>>(), expected);
        for earlier in [&published, &before, &earlier] {
            let changed: BTreeSet<Key> = variant.changed_since(earlier).into_iter().collect();
            let differs = |key: &Key| earlier.version_of(key) != variant.version_of(key);
            let all_keys = published_keys(earlier).chain(published_keys(&variant)).filter(differs);
            prop_assert_eq!(changed, all_keys.collect::<BTreeSet<_>>());
        }
        prop_assert!(variant.version.starts_with(&published.version) && variant.number == published.number);
        Ok(())
    });
}

fn published_keys(publication: &Publication) -> impl Iterator<Item = Key> {
    Kind::OF_GATEWAYS.into_iter().flat_map(|kind| publication.of_kind(kind)).map(|it| it.key.clone())
}

fn sample() -> Publication {
    Publication::default().next(Arc::new(sample_placement(4))).unwrap()
}

fn refused(kind: Kind, name: &str) -> Refused {
    Refused { key: key(kind, name), number: 1, is_closed: false }
}

#[test]
fn a_nack_names_a_resource_of_the_publication_in_any_of_its_wordings() {
    let services = vec![large_service(300)].into();
    let published = Publication::default().next(Arc::new(Placement { services, ..sample_placement(2) })).unwrap();
    let named = |nack: &str| named_resource(&published, nack).map(|key| key.to_string());
    for (nack, expected) in [
        ("resource Vip 203.0.113.1: is a local address", Some("Vip 203.0.113.1")),
        ("part of a rejected update: resource Endpoint 10.0.0.1: vips[0]: no", Some("Endpoint 10.0.0.1")),
        ("resource EgressPolicy a/p: destinations[0]: `x: y` is not a prefix", Some("EgressPolicy a/p")),
        ("resource Service a/s: the table size is not a prime", Some("Service a/s")),
        ("resource BackendSlice Service a/s#3: backends[0].ports: no", Some("Service a/s")),
        ("resource OverlayNode node-1: duplicate address", Some("OverlayNode node-1")),
        // An unknown shard map of a VIP.
        ("resource Endpoint 203.0.113.1: unknown shard map x", Some("Vip 203.0.113.1")),
        // What all tenants depend on.
        ("resource ShardMap all/0: has an order without a gateway", None),
        ("resource Settings settings: expects 3 EgressPolicy resources, got 0", None),
        ("resource Cluster cluster: no", None),
        ("resource Vip 203.0.113.2: is unknown here", None),
        ("65537 VIPs, retired ones included; the maximum is 65536", None),
        ("resource Vip 203.0.113.1", None),
        ("", None),
    ] {
        assert_eq!(named(nack).as_deref(), expected, "{nack}");
    }
}

#[test]
fn a_resource_is_set_aside_until_it_changes_or_is_gone() {
    let (first, now) = (sample(), Instant::now());
    let mut refusals = Refusals::default();
    assert!(refusals.refuse(&refused(Kind::Vip, "203.0.113.1"), "no", &first, now));
    assert!(!refusals.refuse(&refused(Kind::Vip, "203.0.113.1"), "no", &first, now), "it is known");
    assert!(!refusals.refuse(&refused(Kind::Vip, "203.0.113.7"), "no", &first, now), "there is none");
    assert!(refusals.refuse(&refused(Kind::EgressPolicy, "EgressPolicy a/p"), "no", &first, now));
    assert_eq!(refusals.retain_current(&first), []);
    let mut changed = sample_placement(4);
    let mut vips = changed.vips.to_vec();
    vips[0].reserved_ports.push(81);
    changed.vips = vips.into();
    let second = first.next(Arc::new(changed)).unwrap();
    let outdated = Refused { number: 1, ..refused(Kind::Vip, "203.0.113.1") };
    assert_eq!(refusals.retain_current(&second), std::slice::from_ref(&outdated.key));
    assert!(!refusals.refuse(&outdated, "no", &second, now), "it was about the version before");
    let third = second.next(Arc::default()).unwrap();
    assert_eq!(refusals.retain_current(&third), [key(Kind::EgressPolicy, "EgressPolicy a/p")]);
    assert!(refusals.is_empty());
}

#[test]
fn a_resource_returns_after_longer_and_longer_times_while_it_is_refused() {
    let (published, began) = (sample(), Instant::now());
    let mut refusals = Refusals::default();
    let (mut now, mut times) = (began, Vec::new());
    for _ in 0..7 {
        assert!(refusals.refuse(&refused(Kind::Vip, "203.0.113.1"), "no", &published, now));
        let at = refusals.next_return().unwrap();
        assert_eq!(refusals.return_due(at.checked_sub(Duration::from_nanos(1)).unwrap()), None);
        assert_eq!(refusals.return_due(at), Some(key(Kind::Vip, "203.0.113.1")));
        assert!(refusals.selection().is_empty() && refusals.next_return().is_none());
        times.push((at - now).as_secs() / 60);
        now = at;
    }
    assert_eq!(times, [5, 10, 20, 40, 80, 80, 80]);
    refusals.accept_returned();
    assert!(refusals.is_empty());
    // Several return one after the other.
    for endpoint in ["10.0.0.1", "10.0.0.2"] {
        assert!(refusals.refuse(&refused(Kind::Endpoint, endpoint), "no", &published, now));
    }
    let at = refusals.next_return().unwrap();
    assert!(refusals.return_due(at).is_some());
    assert_eq!(refusals.next_return(), Some(at + RETURN_INTERVAL));
}

#[test]
fn an_endpoint_that_is_refused_even_closed_is_left_out_and_nothing_else_is() {
    let (published, now) = (sample(), Instant::now());
    let mut refusals = Refusals::default();
    for (kind, name) in [(Kind::Endpoint, "10.0.0.1"), (Kind::EgressPolicy, "EgressPolicy a/p")] {
        assert!(refusals.refuse(&refused(kind, name), "no", &published, now));
        let again = Refused { is_closed: true, ..refused(kind, name) };
        assert_eq!(refusals.refuse(&again, "no", &published, now), kind == Kind::Endpoint);
        assert!(!refusals.refuse(&again, "no", &published, now));
    }
    let without = set_aside(&refusals.selection());
    assert!(without.dropped.len() == 1 && without.policies.len() == 1, "{without:?}");
}

#[test]
fn the_number_of_resources_and_the_length_of_reasons_are_limited() {
    let published = Publication::default().next(Arc::new(sample_placement(200))).unwrap();
    let mut refusals = Refusals::default();
    for n in 1..=200 {
        let is_set_aside = refusals.refuse(
            &refused(Kind::Endpoint, &format!("10.0.0.{n}")),
            &"ä".repeat(999),
            &published,
            Instant::now(),
        );
        assert_eq!(is_set_aside, n <= MAX_SET_ASIDE);
    }
    assert!(refusals.active().all(|(_, refusal)| refusal.reason.len() == MAX_REASON_BYTES));
}
