//! Tenancy: which pods, pools and addresses policies and Services of a namespace get; and policies of the cluster.

use super::*;
use crate::diagnostic::Code;

fn strict(documents: &[String]) -> Outcome {
    compiled_with(Tenancy::Strict, documents)
}

fn compiled_with(tenancy: Tenancy, documents: &[String]) -> Outcome {
    let objects = objects(&documents.join("---\n"));
    let Compiled { placement, diagnostics, .. } = compile_for(tenancy, &objects);
    Outcome { set: policy_for(&placement, None, "1"), placement, diagnostics }
}

fn codes(outcome: &Outcome) -> Vec<Code> {
    outcome.diagnostics.iter().map(|it| it.code).collect()
}

/// A `ClusterEgressPolicy`, with `{extra}` in its metadata.
pub(super) fn cluster_policy(name: &str, extra: &str, spec: &str) -> String {
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: ClusterEgressPolicy\nmetadata: {{name: {name}{extra}}}\nspec: {spec}\n"
    )
}

fn created(year: u16) -> String {
    format!(", creationTimestamp: \"{year}-01-01T00:00:00Z\"")
}

/// A pool for namespaces with the label `tier: gold`.
fn gold_pool() -> String {
    pool("gold", "{ranges: [203.0.113.0/28], namespaces: {matchLabels: {tier: gold}}}")
}

const ALL_PODS: &str = "selectors: [{podSelector: {}}]";

/// A policy of namespace `a` with this selector, and pods of three namespaces.
fn of(selector: &str) -> Vec<String> {
    vec![
        policy("p", "", &format!("{{selectors: [{selector}], pools: [{{name: public}}]}}")),
        pool("public", "{ranges: [203.0.113.0/28]}"),
        namespace("a", "team: x"),
        namespace("b", "team: x"),
        pod("a", "x", "app: web", "10.0.0.1"),
        pod("b", "y", "app: web", "10.0.0.2"),
        pod("c", "z", "app: db", "10.0.0.3"),
    ]
}

#[test]
fn a_policy_covers_only_pods_of_its_own_namespace() {
    let covered = |outcome: &Outcome| -> Vec<String> {
        outcome.set.endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
    };
    for (selector, open, own, expected) in [
        ("{podSelector: {}}", vec!["10.0.0.1"], vec!["10.0.0.1"], vec![]),
        (
            "{namespaceSelector: {}, podSelector: {}}",
            vec!["10.0.0.1", "10.0.0.2", "10.0.0.3"],
            vec!["10.0.0.1"],
            vec![Code::PodsOfOtherNamespace],
        ),
        (
            "{namespaceSelector: {matchLabels: {team: x}}, podSelector: {}}",
            vec!["10.0.0.1", "10.0.0.2"],
            vec!["10.0.0.1"],
            vec![Code::PodsOfOtherNamespace],
        ),
        (
            "{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: c}}, podSelector: {}}",
            vec!["10.0.0.3"],
            vec![],
            vec![Code::NoPodSelected, Code::PodsOfOtherNamespace],
        ),
        // That no pod of another namespace matches is not for the policy to know.
        (
            "{namespaceSelector: {matchExpressions: [{key: team, operator: In, values: [x]}]}, \
             podSelector: {matchLabels: {app: db}}}",
            vec![],
            vec![],
            vec![Code::NoPodSelected, Code::PodsOfOtherNamespace],
        ),
        (
            "{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: a}}, podSelector: {}}",
            vec!["10.0.0.1"],
            vec!["10.0.0.1"],
            vec![],
        ),
    ] {
        assert_eq!(covered(&compiled_with(Tenancy::Open, &of(selector))), open, "{selector}");
        let got = strict(&of(selector));
        assert_eq!(covered(&got), own, "{selector}");
        assert_eq!(codes(&got), expected, "{selector}");
        assert!(got.accept().is_ok(), "{selector}: warnings");
    }
    let got = strict(&of("{namespaceSelector: {}, podSelector: {}}"));
    assert_eq!(
        messages(&got),
        [
            "m.yaml:4: spec.selectors[0].namespaceSelector: warning: an EgressPolicy covers pods of its own namespace only, \
             whatever `namespaceSelector` selects: write a ClusterEgressPolicy for others"
        ]
    );
}

#[test]
fn a_policy_of_the_cluster_covers_pods_of_any_namespace_and_endpoints_of_any_service() {
    for tenancy in [Tenancy::Strict, Tenancy::Open] {
        let got = compiled_with(
            tenancy,
            &[
                cluster_policy("all", "", &format!("{{{ALL_PODS}, pools: [{{name: gold}}]}}")),
                cluster_policy("api", "", "{serviceRef: {name: s, namespace: a}}"),
                gold_pool(),
                service("s", "", 80, &["198.51.100.1"]),
                slice("s", &["10.0.0.1"]),
                pod("a", "x", "", "10.0.0.1"),
                pod("b", "y", "", "10.0.0.2"),
                pod("c", "z", "", "10.0.0.3"),
            ],
        );
        assert_eq!(codes(&got), [Code::PoliciesOverlap]);
        let policies: Vec<_> = got.set.endpoints.iter().map(|it| (it.address.to_string(), &*it.policy)).collect();
        let expected = [("10.0.0.1", "api"), ("10.0.0.2", "all"), ("10.0.0.3", "all")];
        let expected = expected.map(|(address, name)| (address.to_owned(), format!("ClusterEgressPolicy {name}")));
        assert!(policies.iter().zip(&expected).all(|(a, b)| (&a.0, a.1) == (&b.0, &b.1)), "{policies:?}");
        assert_eq!(got.set.endpoints[0].vips, [ip("198.51.100.1")]);
        assert!(got.set.endpoints.iter().all(|endpoint| endpoint.vips.len() == 1));
    }
    let got = strict(&[cluster_policy("p", "", "{serviceRef: {name: s, namespace: b}}"), service("s", "", 80, &[])]);
    assert_eq!(messages(&got), ["m.yaml:4: spec.serviceRef.name: there is no Service b/s"]);
}

#[test]
fn between_both_kinds_of_policies_the_rank_and_then_the_age_decide() {
    let vips = ["203.0.113.1", "203.0.113.2"];
    let own = |year, vip: usize| policy("p", &created(year), &format!("{{{ALL_PODS}, addresses: [{}]}}", vips[vip]));
    let all =
        |year, vip: usize| cluster_policy("p", &created(year), &format!("{{{ALL_PODS}, addresses: [{}]}}", vips[vip]));
    let by_service = |year| policy("s", &created(year), "{serviceRef: {name: s}}");
    let rest = [
        pool("public", "{ranges: [203.0.113.0/28]}"),
        service("s", EGRESS, 80, &["203.0.113.9"]),
        slice("s", &["10.0.0.1"]),
        pod("a", "x", "", "10.0.0.1"),
    ];
    for (policies, winner) in [
        (vec![own(2020, 0), all(2021, 1)], "EgressPolicy a/p"),
        (vec![own(2021, 0), all(2020, 1)], "ClusterEgressPolicy p"),
        (vec![own(2020, 0), all(2020, 1)], "ClusterEgressPolicy p"),
        (vec![by_service(2022), all(2020, 1)], "EgressPolicy a/s"),
        (vec![all(2020, 1)], "ClusterEgressPolicy p"),
    ] {
        let got = strict(&[policies.as_slice(), &rest].concat());
        assert_eq!(&*got.set.endpoints[0].policy, winner, "{:?}", messages(&got));
        let mut found = codes(&got);
        found.dedup();
        assert_eq!(found, [Code::PoliciesOverlap]);
    }
    let got = strict(&[[all(2020, 1)].as_slice(), &rest].concat());
    let reason = "(a ClusterEgressPolicy precedes an annotation)";
    assert!(messages(&got)[0].ends_with(reason), "{:?}", messages(&got));
}

/// Whoever is older has a VIP, in any namespace and of any kind.
#[test]
fn the_older_policy_keeps_a_vip_that_two_claim() {
    let claim = |name: &str, year| policy(name, &created(year), &format!("{{{ALL_PODS}, addresses: [203.0.113.1]}}"));
    let in_b = |name: &str, year| claim(name, year).replace("namespace: a", "namespace: b");
    let of_cluster =
        |name: &str, year| cluster_policy(name, &created(year), &format!("{{{ALL_PODS}, addresses: [203.0.113.1]}}"));
    let rest =
        [pool("public", "{ranges: [203.0.113.0/28]}"), pod("a", "x", "", "10.0.0.1"), pod("b", "y", "", "10.0.0.2")];
    for (older, younger) in [
        (in_b("z", 2020), claim("a", 2021)),
        (claim("z", 2020), in_b("a", 2021)),
        (of_cluster("z", 2020), claim("a", 2021)),
        (claim("z", 2020), of_cluster("a", 2021)),
    ] {
        for documents in [[younger.clone(), older.clone()], [older.clone(), younger.clone()]] {
            let got = strict(&[documents.as_slice(), &rest].concat());
            let errors: Vec<_> = got.diagnostics.iter().filter(|it| it.is_error()).collect();
            let at = if documents[0] == older { 9 } else { 4 };
            assert_eq!((errors.len(), errors[0].code, errors[0].line), (1, Code::VipOfTwoPolicies, at), "{errors:?}");
            let name = if older.contains("Cluster") { "ClusterEgressPolicy z" } else { "/z" };
            assert!(errors[0].reason.contains(name), "{errors:?}");
        }
    }
}

#[test]
fn vips_of_policies_are_from_pools_for_their_namespace_or_of_own_services() {
    let own = |vips: &str| policy("p", "", &format!("{{{ALL_PODS}, {vips}}}"));
    let gold = namespace("a", "tier: gold");
    let api = || service("s", "", 80, &["198.51.100.1"]);
    let web = || service("s", "", 80, &["198.51.100.1"]).replace("namespace: a", "namespace: b");
    let any = |vips: &str| cluster_policy("p", "", &format!("{{{ALL_PODS}, {vips}}}"));
    let pod = || pod("a", "x", "", "10.0.0.1");
    let ok: [Vec<String>; 8] = [
        vec![own("addresses: [203.0.113.1]"), pool("public", "{ranges: [203.0.113.0/28]}")],
        vec![own("addresses: [203.0.113.1]"), gold_pool(), gold.clone()],
        vec![own("pools: [{name: gold}]"), gold_pool(), gold.clone()],
        vec![
            own("pools: [{name: own}]"),
            pool("own", "{ranges: [203.0.113.0/28], namespaces: {matchLabels: {kubernetes.io/metadata.name: a}}}"),
        ],
        vec![own("addresses: [198.51.100.1]"), api()],
        vec![own("addresses: [198.51.100.1]"), api(), web().replace("port: 80", "port: 81")],
        vec![any("addresses: [203.0.113.1]"), gold_pool()],
        vec![any("pools: [{name: gold}]"), gold_pool()],
    ];
    for documents in ok {
        let got = strict(&[documents.as_slice(), &[pod()]].concat());
        let errors: Vec<_> = got.diagnostics.iter().filter(|it| it.is_error()).collect();
        assert_eq!(errors, [] as [&Diagnostic; 0], "{documents:?}");
        assert_eq!(got.set.endpoints[0].vips.len(), 1, "{documents:?}");
    }
    let not_for_a = "is not for namespace a: `spec.namespaces` of the pool (m.yaml:6) doesn't select it";
    let in_gold = format!("spec.addresses[0]: 203.0.113.1 is in AddressPool gold, which {not_for_a}");
    let from_gold = format!("spec.pools[0].name: AddressPool gold {not_for_a}");
    let outside =
        "spec.addresses[0]: 198.51.100.7 is in no AddressPool and no address of an own Service: gateways would";
    let of_cluster = "spec.addresses[0]: 198.51.100.7 is in no AddressPool: gateways would answer for the address of";
    for (documents, code, expected) in [
        (vec![own("addresses: [203.0.113.1]"), gold_pool()], Code::PoolOfOtherNamespaces, in_gold.as_str()),
        (vec![own("pools: [{name: gold}]"), gold_pool()], Code::PoolOfOtherNamespaces, &from_gold),
        (vec![own("addresses: [198.51.100.7]"), gold_pool()], Code::AddressOutsidePools, outside),
        (vec![any("addresses: [198.51.100.7]"), gold_pool()], Code::AddressOutsidePools, of_cluster),
        (
            vec![own("addresses: [198.51.100.1]"), web()],
            Code::VipOfOtherNamespace,
            "spec.addresses[0]: 198.51.100.1 is the VIP of Service b/s, in another namespace",
        ),
        (
            vec![any("addresses: [198.51.100.1]"), api()],
            Code::VipOfOtherNamespace,
            "spec.addresses[0]: 198.51.100.1 is the VIP of Service a/s, which a ClusterEgressPolicy can't share",
        ),
    ] {
        let got = strict(&[documents.as_slice(), &[pod()]].concat());
        assert_eq!(codes(&got), [code], "{documents:?}");
        assert!(messages(&got)[0].starts_with(&format!("m.yaml:4: {expected}")), "{:?}", messages(&got));
        assert!(got.accept().is_err());
    }
    // Open tenancy has none of these limits.
    for vips in ["addresses: [203.0.113.1]", "pools: [{name: gold}]", "addresses: [198.51.100.7]"] {
        let got = compiled_with(Tenancy::Open, &[own(vips), gold_pool(), pod()]);
        assert_eq!((codes(&got), got.set.endpoints[0].vips.len()), (vec![], 1), "{vips}");
    }
}

#[test]
fn a_service_has_no_address_of_a_pool_for_other_namespaces() {
    let documents = |vip: &str| [service("s", "", 80, &[vip]), gold_pool()];
    let got = strict(&documents("203.0.113.1"));
    assert_eq!(
        messages(&got),
        [
            "m.yaml:5: status.loadBalancer.ingress[0].ip: 203.0.113.1 is in AddressPool gold, which is not for namespace a: \
          `spec.namespaces` of the pool (m.yaml:7) doesn't select it"
        ]
    );
    assert_eq!((got.set.vips.len(), got.accept().is_err()), (0, true));
    for (documents, tenancy) in [
        // Services may have addresses from elsewhere.
        (documents("198.51.100.1").to_vec(), Tenancy::Strict),
        ([&documents("203.0.113.1")[..], &[namespace("a", "tier: gold")]].concat(), Tenancy::Strict),
        (documents("203.0.113.1").to_vec(), Tenancy::Open),
    ] {
        let got = compiled_with(tenancy, &documents);
        assert_eq!((codes(&got), got.set.vips.len()), (vec![], 1));
    }
}

/// Policies and Services without the right to an address keep nobody else from it.
#[test]
fn what_is_refused_takes_nothing_from_others() {
    let gold = namespace("b", "tier: gold");
    let in_b = |document: String| document.replace("namespace: a", "namespace: b");
    let refused: Vec<String> = (1..15).map(|n| format!("203.0.113.{n}")).collect();
    let squatter = policy("old", &created(2020), &format!("{{{ALL_PODS}, addresses: [{}]}}", refused.join(", ")));
    let squatting_service = service("old", &created(2020), 80, &refused.iter().map(String::as_str).collect::<Vec<_>>());
    for squatter in [squatter, squatting_service] {
        for vips in ["addresses: [203.0.113.1]", "pools: [{name: gold, count: 16}]"] {
            let owner = in_b(policy("new", &created(2021), &format!("{{{ALL_PODS}, {vips}}}")));
            let got = strict(&[
                squatter.clone(),
                owner,
                gold_pool(),
                gold.clone(),
                in_b(pod("a", "y", "", "10.0.0.2")),
                pod("a", "x", "", "10.0.0.1"),
            ]);
            let errors = got.diagnostics.iter().filter(|it| it.is_error());
            assert!(errors.clone().count() == 14 && errors.clone().all(|it| it.code == Code::PoolOfOtherNamespaces));
            assert!(errors.clone().all(|it| it.line < 6), "{:?}", messages(&got));
            let owned = got.set.vips.iter().filter(|vip| &*vip.name == "EgressPolicy b/new").count();
            assert_eq!(owned, if vips.starts_with("pools") { 16 } else { 1 }, "{vips}: {:?}", messages(&got));
        }
    }
}
