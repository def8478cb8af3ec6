//! Limits: of one object, and of all objects together, given out by age and by namespace.

use vipgate_dataplane::policy::limits::{
    self, MAX_ADDRESSES_OF_POLICY, MAX_PREFIXES_OF_POLICY, MAX_SELECTOR_TERMS, MAX_VIPS_OF_SERVICE,
};

use super::*;
use crate::diagnostic::Code;

/// Compiles with a share of the limits for each namespace.
fn with_share(share: f64, documents: &[String]) -> Outcome {
    let objects = objects(&documents.join("---\n"));
    let options = Options { tenancy: Tenancy::Open, namespace_share: Share::new(share).unwrap(), ..Options::default() };
    let Compiled { placement, diagnostics, .. } = compile_for(options, &objects);
    Outcome { set: policy_for(&placement, None, "1"), placement, diagnostics }
}

fn created(year: usize) -> String {
    format!(", creationTimestamp: \"{year}-01-01T00:00:00Z\"")
}

/// The share of a limit that is this many.
fn share_of(limit: &limits::Limit, count: usize) -> f64 {
    let [count, max] = [count, limit.max].map(|it| f64::from(u32::try_from(it).unwrap()));
    (count + 0.5) / max
}

/// The objects that exceed a limit, with the limit.
fn exceeding(outcome: &Outcome) -> Vec<String> {
    let exceeding = outcome.diagnostics.iter().filter(|it| it.code == Code::LimitExceeded);
    exceeding.map(|it| format!("{}: {}", it.line, it.reason)).collect()
}

#[test]
fn the_oldest_services_of_a_namespace_have_its_share_of_vips() {
    let service = |namespace: &str, n: usize, year| {
        let service =
            service(&format!("s{n}"), &format!("{EGRESS}{}", created(year)), 80, &[&format!("203.0.113.{n}")]);
        service.replace("namespace: a", &format!("namespace: {namespace}"))
    };
    // Names sort against the age.
    let documents: Vec<String> = (1..=6).map(|n| service("a", n, 2030 - n)).chain([service("b", 9, 2031)]).collect();
    let outcome = with_share(share_of(&limits::VIPS, 4), &documents);
    let vips: Vec<String> = outcome.set.vips.iter().map(|vip| vip.name.to_string()).collect();
    assert_eq!(vips, ["Service a/s3", "Service a/s4", "Service a/s5", "Service a/s6", "Service b/s9"]);
    let exceeding = exceeding(&outcome);
    assert_eq!(exceeding.len(), 2, "{exceeding:#?}");
    assert!(exceeding[0].contains("needs 1 VIPs, and older objects of namespace a have 4"), "{exceeding:#?}");
}

#[test]
fn a_vip_that_is_refused_to_one_service_is_not_free_for_another() {
    let at = |name: &str, year, port, vip: &str| service(name, &created(year), port, &[vip]);
    let documents = [
        at("s1", 2021, 80, "203.0.113.1"),
        at("s2", 2022, 80, "203.0.113.2"),
        // Shares the VIP of the one before.
        at("s3", 2023, 81, "203.0.113.2"),
        // Shares that of an older one that has it.
        at("s4", 2024, 81, "203.0.113.1"),
    ];
    let outcome = with_share(share_of(&limits::VIPS, 1), &documents);
    let vips: Vec<String> = outcome.set.vips.iter().map(|vip| vip.name.to_string()).collect();
    assert_eq!(vips, ["Service a/s1, Service a/s4"]);
    assert_eq!(exceeding(&outcome).len(), 2, "{:#?}", messages(&outcome));
}

#[test]
fn a_vip_that_another_namespace_names_in_vain_counts_for_its_service() {
    let named = policy("p", &created(2020), "{selectors: [{podSelector: {}}], addresses: [203.0.113.1]}");
    let documents = [
        named.replace("namespace: a", "namespace: b"),
        service("s1", &created(2021), 80, &["203.0.113.1"]),
        service("s2", &created(2022), 80, &["203.0.113.2"]),
    ];
    let outcome = with_share(share_of(&limits::VIPS, 1), &documents);
    let vips: Vec<String> = outcome.set.vips.iter().map(|vip| vip.name.to_string()).collect();
    assert_eq!(vips, ["Service a/s1"], "{:#?}", messages(&outcome));
}

#[test]
fn endpoints_beyond_the_share_of_a_namespace_are_those_of_its_youngest_policy() {
    let pods = |namespace: &'static str, name: &'static str, first: usize, count: usize| {
        let pod = move |n: usize| pod(namespace, &format!("p{n}"), &format!("name: {name}"), &format!("10.0.0.{n}"));
        (first..first + count).map(pod)
    };
    let policy = |name: &str, year, vip: &str| {
        let spec = format!("{{selectors: [{{podSelector: {{matchLabels: {{name: {name}}}}}}}], addresses: [{vip}]}}");
        policy(name, &created(year), &spec)
    };
    let mut documents = vec![policy("young", 2022, "203.0.113.1"), policy("old", 2021, "203.0.113.2")];
    documents.push(policy("p", 2023, "203.0.113.3").replace("namespace: a", "namespace: b"));
    documents.extend(pods("a", "young", 1, 10).chain(pods("a", "old", 20, 30)).chain(pods("b", "p", 100, 30)));
    let outcome = with_share(share_of(&limits::ENDPOINTS, 33), &documents);
    let count = |policy: &str| outcome.set.endpoints.iter().filter(|it| &*it.policy == policy).count();
    assert_eq!(["a/young", "a/old", "b/p"].map(|name| count(&format!("EgressPolicy {name}"))), [0, 30, 30]);
    assert!(exceeding(&outcome)[0].contains("its endpoints are not covered"), "{:#?}", messages(&outcome));
}

#[test]
fn lookup_tables_are_limited_by_namespace_and_a_newcomer_changes_no_older_one() {
    let large = ", annotations: {vipgate.io/maglev-table-size: \"131071\"}";
    let slice = |name: &str| slice(name, &["10.0.0.1", "10.0.0.2"]);
    let service = |name: &str, year: usize, annotations: &str| {
        service(name, &format!("{annotations}{}", created(year)), 80, &[&format!("203.0.113.{}", year - 2000)])
    };
    let documents = [
        service("new", 2023, large),
        service("old", 2021, large),
        service("small", 2024, ""),
        slice("new"),
        slice("old"),
        slice("small"),
    ];
    let share = share_of(&limits::LOOKUP_TABLES, 2 * 131_071 + 2 * 2039);
    let outcome = with_share(share, &documents);
    let services: Vec<&str> = outcome.set.services.iter().map(|it| &*it.name).collect();
    assert_eq!(services, ["Service a/old", "Service a/small"], "{:#?}", messages(&outcome));
    assert!(exceeding(&outcome)[0].contains("needs 262142 bytes of Maglev tables"), "{:#?}", messages(&outcome));
    // It keeps its VIP, which answers nobody: it may fit again.
    assert_eq!(outcome.set.vips.len(), 3);
}

#[test]
fn equal_sets_of_backends_share_a_table() {
    let ports: Vec<String> = (0..100).map(|n| format!("{{name: p{n}, port: {}}}", 1000 + n)).collect();
    let service = service("s", "", 80, &["203.0.113.1"]).replace("[{port: 80}]", &format!("[{}]", ports.join(", ")));
    let slice = slice("s", &["10.0.0.1", "10.0.0.2"])
        .replace("endpoints:", &format!("ports: [{}]\nendpoints:", ports.join(", ")));
    let outcome = compiled(&[service, slice]);
    assert_eq!(lookup_table_bytes(outcome.placement.services.get(&"Service a/s".into()).unwrap()), 2 * 2039);
}

#[test]
fn work_of_selectors_is_limited_by_namespace() {
    let values: Vec<String> = (0..MAX_SELECTOR_TERMS).map(|n| format!("v{n}")).collect();
    let selector = format!("matchExpressions: [{{key: k, operator: NotIn, values: [{}]}}]", values.join(", "));
    let spec = format!("{{selectors: [{{podSelector: {{{selector}}}}}], addresses: [203.0.113.1]}}");
    let documents = [policy("p", "", &spec), pod("a", "x", "", "10.0.0.1"), pod("a", "y", "", "10.0.0.2")];
    let steps = 2 * (1 + MAX_SELECTOR_TERMS);
    assert_eq!(exceeding(&with_share(share_of(&limits::SELECTOR_STEPS, steps), &documents)), [""; 0]);
    let outcome = with_share(share_of(&limits::SELECTOR_STEPS, steps - 2), &documents);
    assert!(exceeding(&outcome)[0].contains("labels to compare"), "{:#?}", messages(&outcome));
    assert!(outcome.set.policies.is_empty() && outcome.set.endpoints.is_empty());
}

#[test]
fn an_object_above_a_limit_of_one_object_is_invalid() {
    let prefixes = |count: usize| {
        let prefixes: Vec<String> = (0..count).map(|n| format!("10.{}.{}.0/24", n >> 8, n & 255)).collect();
        prefixes.join(", ")
    };
    let selecting = |spec: &str| policy("p", "", &format!("{{selectors: [{{podSelector: {{}}}}], {spec}}}"));
    let vips = |count: usize| (0..count).map(|n| format!("203.0.{}.{}", n >> 8, n & 255)).collect::<Vec<_>>();
    let with_vips = |count| {
        let vips = vips(count);
        service("s", "", 80, &vips.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let addresses = |count: usize| selecting(&format!("addresses: [{}]", vips(count).join(", ")));
    for (at, above) in [
        (
            selecting(&format!("addresses: [203.0.113.1], destinationCIDRs: [{}]", prefixes(MAX_PREFIXES_OF_POLICY))),
            selecting(&format!(
                "addresses: [203.0.113.1], destinationCIDRs: [{}]",
                prefixes(MAX_PREFIXES_OF_POLICY + 1)
            )),
        ),
        (
            selecting(&format!("addresses: [203.0.113.1], excludedCIDRs: [{}]", prefixes(MAX_PREFIXES_OF_POLICY))),
            selecting(&format!("addresses: [203.0.113.1], excludedCIDRs: [{}]", prefixes(MAX_PREFIXES_OF_POLICY + 1))),
        ),
        (addresses(MAX_ADDRESSES_OF_POLICY), addresses(MAX_ADDRESSES_OF_POLICY + 1)),
        (
            selecting(&format!("pools: [{{name: x, count: {MAX_ADDRESSES_OF_POLICY}}}]")),
            selecting(&format!("pools: [{{name: x, count: {}}}]", MAX_ADDRESSES_OF_POLICY + 1)),
        ),
        (selecting("pools: [{name: x, count: 1}]"), selecting("pools: [{name: x, count: 4294967295}]")),
        (with_vips(MAX_VIPS_OF_SERVICE), with_vips(MAX_VIPS_OF_SERVICE + 1)),
    ] {
        let errors = |text: &str| manifests(text).diagnostics.iter().filter(|it| it.is_error()).count();
        assert_eq!((errors(&at), errors(&above)), (0, 1));
    }
    let slice = slice("s", &["10.0.0.1"]).replace("name: s-10-0-0-1}", "name: \"a\\u0007b\"}");
    assert_eq!(manifests(&slice).diagnostics.iter().map(|it| it.code).collect::<Vec<_>>(), [Code::InvalidName]);
}
