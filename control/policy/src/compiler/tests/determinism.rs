//! Determinism and stability: the order of objects doesn't matter, and later objects move few addresses.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vipgate_coverage::property;

use super::tenancy::cluster_policy;
use super::*;
use crate::manifest::UnsupportedKinds;

/// Fields of a selector that name namespaces, by their labels in [`super::incremental`].
const NAMESPACE_SELECTORS: [&str; 3] = ["", "namespaceSelector: {}, ", "namespaceSelector: {matchLabels: {team: x}}, "];

/// A random document; several have overlapping policies, conflicting VIPs, exhausted pools and missing Services.
pub(super) fn random_document() -> impl Strategy<Value = String> {
    let name = || prop::sample::select(vec!["s", "t", "u"]);
    let created = || {
        prop::sample::select(vec![
            "",
            ", creationTimestamp: \"2020-01-01T00:00:00Z\"",
            ", creationTimestamp: \"2021-01-01T00:00:00Z\"",
        ])
    };
    let services = (
        name(),
        prop::bool::ANY,
        80_u16..82,
        prop::sample::subsequence(vec!["203.0.113.1", "203.0.113.2", "2001:db8::1"], 0..3),
    )
        .prop_map(|(name, egress, port, ingress)| service(name, if egress { EGRESS } else { "" }, port, &ingress));
    let slices = (name(), prop::sample::subsequence(vec!["10.0.0.1", "10.0.0.2", "10.0.0.3"], 1..3))
        .prop_map(|(name, of)| slice(name, &of));
    let by_service = ("[pq]", created(), name())
        .prop_map(|(p, created, s)| policy(&p, created, &format!("{{serviceRef: {{name: {s}}}}}")));
    let by_label = (
        "[r-t]",
        created(),
        prop::bool::ANY,
        prop::sample::subsequence(vec!["203.0.113.2", "203.0.113.3"], 0..2),
    )
        .prop_map(|(p, created, all, addresses)| {
            let selector = if all { "{}" } else { "{matchLabels: {app: web}}" };
            let addresses = addresses.join(", ");
            policy(
                &p,
                created,
                &format!(
                    "{{selectors: [{{podSelector: {selector}}}], addresses: [{addresses}], pools: [{{name: public}}]}}"
                ),
            )
        });
    let namespaces = || prop::sample::select(vec!["a", "a", "b"]);
    let pods = (namespaces(), "[x-z]", prop::sample::select(vec!["app: web", "app: db"]), 1_u8..5)
        .prop_map(|(namespace, name, labels, last)| pod(namespace, &name, labels, &format!("10.0.0.{last}")));
    let service_of_any =
        (name(), namespaces()).prop_map(|(s, of)| format!("{{serviceRef: {{name: {s}, namespace: {of}}}}}"));
    let vips =
        prop::sample::select(vec!["addresses: [203.0.113.3]", "addresses: [198.51.100.1]", "pools: [{name: public}]"]);
    let pods_of_any = (prop::sample::select(NAMESPACE_SELECTORS.to_vec()), vips.clone())
        .prop_map(|(selector, vips)| format!("{{selectors: [{{{selector}podSelector: {{}}}}], {vips}}}"));
    let of_cluster = ("[pr]", created(), prop_oneof![service_of_any, pods_of_any.clone()])
        .prop_map(|(name, created, spec)| cluster_policy(&name, created, &spec));
    // A namespace's policy whose selector may reach others, or whose VIP may be another namespace's.
    let reaching = ("[q-s]", created(), namespaces(), pods_of_any).prop_map(|(name, created, namespace, spec)| {
        policy(&name, created, &spec).replace("namespace: a", &format!("namespace: {namespace}"))
    });
    prop_oneof![services, slices, by_service, by_label, pods, of_cluster, reaching]
}

/// Random documents and a pool.
pub(super) fn random_documents() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(random_document(), 0..12).prop_map(|mut documents| {
        documents.push(pool("public", "{ranges: [203.0.113.2-203.0.113.4]}"));
        documents
    })
}

#[test]
fn the_order_of_objects_does_not_matter() {
    let classes = [
        "another order",
        "diagnostics",
        "endpoints",
        "VIPs",
        "an endpoint of several VIPs",
        "an endpoint of a policy of the cluster",
        "strict",
        "open",
    ];
    let tenancies = prop::sample::select(vec![Tenancy::Strict, Tenancy::Open]);
    property(
        ProptestConfig::default(),
        &(random_documents(), any::<u64>(), tenancies),
        &classes,
        |(documents, seed, tenancy), coverage| {
            coverage.count(if tenancy == Tenancy::Strict { "strict" } else { "open" });
            let objects = objects(&documents.join("---\n"));
            let mut shuffled = objects.clone();
            let mut random = seed;
            for i in (1..shuffled.len()).rev() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let other = usize::try_from(random >> 33).unwrap() % (i + 1);
                coverage.add("another order", u64::from(i != other));
                shuffled.swap(i, other);
            }
            let (one, other) = (compile_for(tenancy, &objects), compile_for(tenancy, &shuffled));
            coverage.add("diagnostics", one.diagnostics.len() as u64);
            coverage.add("endpoints", one.placement.endpoints.len() as u64);
            coverage.add("VIPs", one.placement.vips.len() as u64);
            let several = one.placement.endpoints.iter().filter(|endpoint| endpoint.vips.len() > 1);
            coverage.add("an endpoint of several VIPs", several.count() as u64);
            let of_cluster = one.placement.endpoints.iter().filter(|it| it.policy.starts_with("ClusterEgressPolicy "));
            coverage.add("an endpoint of a policy of the cluster", of_cluster.count() as u64);
            prop_assert_eq!(one.placement, other.placement);
            prop_assert_eq!(one.diagnostics, other.diagnostics);
            Ok(())
        },
    );
}

#[test]
fn compiled_policies_meet_the_invariants_of_the_specification() {
    let classes = ["vip", "endpoint", "endpoint without a VIP", "reserved ports", "warning", "error"];
    property(ProptestConfig::default(), &random_documents(), &classes, |documents, coverage| {
        let Outcome { set, diagnostics, .. } = compiled(&documents);
        let vips: Vec<_> = set.vips.iter().map(|vip| vip.address).collect();
        prop_assert!(vips.is_sorted_by(|a, b| a < b));
        prop_assert!(set.endpoints.is_sorted_by(|a, b| a.address < b.address));
        prop_assert!(set.policies.is_sorted_by(|a, b| a.name < b.name));
        for endpoint in &set.endpoints {
            prop_assert!(set.policies.iter().any(|policy| policy.name == endpoint.policy));
            for vip in &endpoint.vips {
                prop_assert!(vips.binary_search(vip).is_ok());
                prop_assert_eq!(vip.is_ipv4(), endpoint.address.is_ipv4());
            }
            coverage.count(if endpoint.vips.is_empty() { "endpoint without a VIP" } else { "endpoint" });
            // An endpoint without a VIP has a diagnostic.
            prop_assert!(!endpoint.vips.is_empty() || !diagnostics.is_empty());
        }
        for vip in &set.vips {
            prop_assert!(vip.reserved_ports.is_sorted_by(|a, b| a < b));
            coverage.count("vip");
            coverage.add("reserved ports", vip.reserved_ports.len() as u64);
        }
        for diagnostic in &diagnostics {
            prop_assert!(diagnostic.line > 0 && !diagnostic.field.is_empty(), "{}", diagnostic);
            coverage.count(if diagnostic.is_error() { "error" } else { "warning" });
        }
        Ok(())
    });
}

/// Invalid input gets a diagnostic, never a panic.
#[test]
fn mutated_manifests_have_diagnostics_or_compile() {
    let mutation = (any::<prop::sample::Index>(), 0..20_usize, "\\PC{0,8}");
    let classes = ["can't be read", "can't be compiled"];
    let inputs = (random_documents(), mutation);
    property(ProptestConfig::default(), &inputs, &classes, |(documents, (at, length, replacement)), coverage| {
        let text: Vec<char> = documents.join("---\n").chars().collect();
        let from = at.index(text.len());
        let to = (from + length).min(text.len());
        let (before, after) = (text[..from].iter().copied(), text[to..].iter().copied());
        let mutated: String = before.chain(replacement.chars()).chain(after).collect();
        let mut manifests = Manifests::default();
        read(&Arc::new(Source::new("m.yaml", mutated)), UnsupportedKinds::Reject, &mut manifests);
        let compiled = compile(&manifests.objects);
        coverage.count(match (manifests.diagnostics.is_empty(), compiled.diagnostics.is_empty()) {
            (false, _) => "can't be read",
            (true, false) => "can't be compiled",
            (true, true) => "no diagnostic",
        });
        for diagnostic in manifests.diagnostics.iter().chain(&compiled.diagnostics) {
            prop_assert!(diagnostic.line > 0, "{}", diagnostic);
        }
        Ok(())
    });
}

#[test]
fn the_version_changes_only_with_the_content() {
    let documents = [service("s", EGRESS, 80, &["203.0.113.10"]), slice("s", &["10.0.0.1"])];
    let one = compiled(&documents).set.version;
    assert_eq!(one.len(), 16);
    let spaced = documents.join("---\n# a comment\n\n");
    assert_eq!(compiled_objects(&objects(&spaced), None).set.version, one);
    for (from, to) in [("10.0.0.1", "10.0.0.2"), ("203.0.113.10", "203.0.113.11"), ("port: 80", "port: 81")] {
        let changed: Vec<_> = documents.iter().map(|document| document.replace(from, to)).collect();
        assert_ne!(compiled(&changed).set.version, one, "{from} -> {to}");
    }
}

#[test]
fn a_younger_policy_takes_no_address_from_an_older_one() {
    let policies: Vec<_> = (0..40)
        .map(|i| {
            let created = format!(", creationTimestamp: \"2020-01-01T00:00:{i:02}Z\"");
            // Names in the opposite order of age.
            policy(&format!("p{:02}", 99 - i), &created, "{selectors: [{podSelector: {}}], pools: [{name: public}]}")
        })
        .collect();
    let mut documents = vec![pool("public", "{ranges: [203.0.113.0/26]}"), pod("a", "x", "", "10.0.0.1")];
    let mut before: BTreeMap<Arc<str>, IpAddr> = BTreeMap::new();
    for policy in policies {
        documents.push(policy);
        let after: BTreeMap<_, _> =
            compiled(&documents).set.vips.into_iter().map(|vip| (vip.name, vip.address)).collect();
        assert_eq!(after.len(), before.len() + 1);
        assert!(before.iter().all(|(name, address)| after.get(name) == Some(address)), "{before:#?}\n{after:#?}");
        before = after;
    }
}

#[test]
fn in_a_pool_with_free_addresses_removing_a_policy_moves_no_other_address() {
    let policy_of = |i: u32| {
        let created = format!(", creationTimestamp: \"2020-01-01T00:00:{i:02}Z\"");
        policy(&format!("p{i:02}"), &created, "{selectors: [{podSelector: {}}], pools: [{name: public}]}")
    };
    let vips_of = |policies: Range<u32>| {
        let mut documents =
            vec![pool("public", "{ranges: [198.18.0.0/15, \"2001:db8::/64\"]}"), pod("a", "x", "", "10.0.0.1")];
        documents.extend(policies.map(policy_of));
        compiled(&documents).set.vips.into_iter().map(|vip| (vip.name, vip.address)).collect::<BTreeSet<_>>()
    };
    let (all, without_oldest) = (vips_of(0..20), vips_of(1..20));
    assert_eq!((all.len(), without_oldest.len()), (40, 38));
    assert!(without_oldest.is_subset(&all), "moved: {:?}", without_oldest.difference(&all));
}
