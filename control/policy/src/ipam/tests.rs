mod clouds;
mod property;

use std::sync::Arc;

use super::*;
use crate::manifest::{Kind, Manifests, UnclassedServices, UnsupportedKinds, read};
use crate::yaml::Source;

/// The objects of a text, without diagnostics of their own.
pub(super) fn snapshot(text: &str) -> Snapshot {
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new("test.yaml", text.to_owned())), UnsupportedKinds::Reject, &mut manifests);
    assert!(!manifests.diagnostics.iter().any(crate::diagnostic::Diagnostic::is_error), "{:?}", manifests.diagnostics);
    let objects = manifests.objects.into_iter().map(Arc::new).collect();
    Snapshot { objects, is_complete: true, ..Snapshot::default() }
}

/// The plan with what the pools have recorded, at the beginning of time.
fn plan_of(snapshot: &Snapshot) -> AllocationPlan {
    snapshot.plan(&snapshot.services(), snapshot.record(), Timestamp::UNIX_EPOCH)
}

const POOLS: &str = "
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: a}
spec: {ranges: [203.0.113.0/31, \"2001:db8::/127\"]}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: b}
spec: {ranges: [203.0.113.8/31], autoAssign: false}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: gold}
spec: {ranges: [203.0.113.16/32], serviceSelector: {matchLabels: {tier: gold}}, namespaces: {matchLabels: {team: x}}}
---
apiVersion: v1
kind: Namespace
metadata: {name: x, labels: {team: x}}
";

/// A Service of namespace `x`: the rest of its metadata, and of its spec.
fn service(name: &str, metadata: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: x{metadata}}}\n\
         spec: {{type: LoadBalancer, ports: [{{port: 80}}]{spec}}}\n"
    )
}

/// What each Service gets, by name: addresses, or the reason.
fn outcome(text: &str) -> BTreeMap<String, String> {
    let snapshot = snapshot(&format!("{POOLS}{text}"));
    let services = snapshot.services();
    let describe = |decision: &Decision| {
        let addresses: Vec<String> = decision.addresses.iter().map(ToString::to_string).collect();
        let reason = decision.refusal.as_ref().map(|refusal| refusal.reason.as_str().to_owned());
        (services[decision.service].name.clone(), addresses.into_iter().chain(reason).collect::<Vec<_>>().join(" "))
    };
    plan_of(&snapshot).decisions.iter().map(describe).collect()
}

#[track_caller]
fn check(text: &str, expected: &[(&str, &str)]) {
    let expected: BTreeMap<String, String> =
        expected.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
    assert_eq!(outcome(text), expected);
}

#[test]
fn the_oldest_gets_the_lowest_address_until_none_is_left() {
    let old = ", creationTimestamp: \"2020-01-01T00:00:00Z\"";
    let text = service("c", "", "") + &service("b", "", "") + &service("z", old, "");
    check(&text, &[("z", "203.0.113.0"), ("b", "203.0.113.1"), ("c", "2001:db8::")]);
    let text = ["a", "b", "c"].map(|name| service(name, "", ", ipFamilies: [IPv4]")).concat();
    check(&text, &[("a", "203.0.113.0"), ("b", "203.0.113.1"), ("c", "exhausted")]);
}

#[test]
fn families_are_those_of_the_service() {
    let both = |policy: &str| format!(", ipFamilies: [IPv6, IPv4], ipFamilyPolicy: {policy}");
    check(&service("s", "", &both("RequireDualStack")), &[("s", "2001:db8:: 203.0.113.0")]);
    check(&service("s", "", &both("PreferDualStack")), &[("s", "2001:db8:: 203.0.113.0")]);
    check(&service("s", "", &both("SingleStack")), &[("s", "2001:db8::")]);
    // Pool b has one family.
    let named = ", annotations: {vipgate.io/pool: b}";
    check(&service("s", named, &both("RequireDualStack")), &[("s", "no_pool")]);
    check(&service("s", named, &both("PreferDualStack")), &[("s", "203.0.113.8")]);
    // The address that it was given for a moment is the next one's.
    let text = service("r", named, &both("RequireDualStack")) + &service("s", named, "");
    check(&text, &[("r", "no_pool"), ("s", "203.0.113.8")]);
}

#[test]
fn named_addresses_and_pools_are_given_or_refused() {
    for (annotations, spec, expected) in [
        ("vipgate.io/addresses: \"203.0.113.1\"", "", "203.0.113.1"),
        ("vipgate.io/egress: \"true\"", ", loadBalancerIP: 203.0.113.9", "203.0.113.9"),
        (
            "vipgate.io/addresses: \"2001:db8::1, 203.0.113.1\"",
            ", ipFamilyPolicy: RequireDualStack",
            "203.0.113.1 2001:db8::1",
        ),
        ("vipgate.io/pool: b", "", "203.0.113.8"),
        ("vipgate.io/pool: none", "", "no_pool"),
        ("vipgate.io/addresses: 203.0.113.77", "", "not_in_pool"),
        ("vipgate.io/addresses: 203.0.113.16", "", "not_in_pool"),
        ("vipgate.io/addresses: \"203.0.113.1\", vipgate.io/pool: b", "", "not_in_pool"),
        ("vipgate.io/addresses: \"203.0.113.0, 203.0.113.1\"", "", "invalid"),
        ("vipgate.io/addresses: mine", "", "invalid"),
        ("vipgate.io/addresses: \"2001:db8::1\"", ", ipFamilies: [IPv4]", "family"),
    ] {
        check(&service("s", &format!(", annotations: {{{annotations}}}"), spec), &[("s", expected)]);
    }
    let named = ", annotations: {vipgate.io/addresses: 203.0.113.16}, labels: {tier: gold}";
    check(&service("s", named, ""), &[("s", "203.0.113.16")]);
    check(&(service("r", named, "") + &service("s", named, "")), &[("r", "203.0.113.16"), ("s", "in_use")]);
}

#[test]
fn an_address_is_shared_by_key_unless_ports_collide() {
    let keyed = ", annotations: {vipgate.io/sharing-key: k, vipgate.io/pool: b}";
    let text = service("r", keyed, "")
        + &service("s", keyed, "").replace("port: 80", "port: 81")
        + &service("t", keyed, "").replace("port: 80", "port: 80, protocol: UDP")
        + &service("u", keyed, "");
    check(&text, &[("r", "203.0.113.8"), ("s", "203.0.113.8"), ("t", "203.0.113.8"), ("u", "203.0.113.9")]);
    let other = service("s", keyed, "").replace("port: 80", "port: 81").replace("namespace: x", "namespace: y");
    let of = |text: String| outcome(&text)["s"].clone();
    assert_eq!(of(service("r", keyed, "") + &other), "203.0.113.9", "another namespace");
}

/// The status with these addresses, written by a field manager.
fn status(manager: &str, address: &str) -> (String, String) {
    let fields = "fieldsV1: {\"f:status\": {}}";
    (
        format!(", managedFields: [{{manager: {manager}, {fields}}}]"),
        format!("status: {{loadBalancer: {{ingress: [{{ip: {address}}}]}}}}\n"),
    )
}

#[test]
fn what_others_have_written_stays_and_is_not_given_away() {
    let (metadata, status) = status("metallb", "203.0.113.0");
    let text = service("z", &metadata, "") + &status + &service("zz", "", "");
    check(&text, &[("zz", "203.0.113.1")]);
}

#[test]
fn a_service_keeps_its_address_outside_of_pools_but_not_with_another_type() {
    let (metadata, status) = status(crate::manifest::FIELD_MANAGER, "203.0.113.99");
    let own = service("s", &metadata, "") + &status;
    let snapshot = snapshot(&format!("{POOLS}{own}"));
    let plan = plan_of(&snapshot);
    let address: IpAddr = "203.0.113.99".parse().unwrap();
    assert_eq!((&plan.decisions[0].outside, plan.decisions[0].is_change), (&vec![address], false));
    // Another type: given up.
    check(&own.replace("type: LoadBalancer", "type: ClusterIP"), &[("s", "")]);
}

#[test]
fn an_address_that_is_given_up_is_free_in_the_next_plan() {
    let (metadata, status) = status(crate::manifest::FIELD_MANAGER, "203.0.113.8");
    let pool = ", annotations: {vipgate.io/pool: b}";
    let moved = metadata.clone() + ", annotations: {vipgate.io/addresses: 203.0.113.9}";
    let text = service("a", &moved, "") + &status + &service("b", pool, "");
    check(&text, &[("a", "203.0.113.9"), ("b", "exhausted")]);
}

#[test]
fn addresses_of_policies_are_not_given_to_services() {
    let mut snapshot = snapshot(&format!("{POOLS}{}", service("s", "", "")));
    let policy = ObjectId { kind: Kind::EgressPolicy, namespace: "y".to_owned(), name: "p".to_owned() };
    snapshot.policy_addresses = vec![("203.0.113.0".parse().unwrap(), policy.clone())];
    let plan = plan_of(&snapshot);
    assert!(plan.records["a"].is_given_to("203.0.113.0".parse().unwrap(), &policy));
    assert_eq!(plan.decisions[0].addresses, ["203.0.113.1".parse::<IpAddr>().unwrap()]);
    let a = &plan.usage[0];
    assert_eq!((a.name.as_str(), a.services, a.policies, a.free), ("a", 1, 1, 2));
    // Both IPv4 addresses are used, and none of IPv6; pool `b` has no range of IPv6, which is not the same.
    assert_eq!((&*a.exhausted, &*a.namespaces), (&[Family::V4][..], &[("x".to_owned(), 1)][..]));
    let b = &plan.usage[1];
    assert_eq!((b.name.as_str(), b.free, &*b.exhausted, &*b.namespaces), ("b", 2, &[][..], &[][..]));
}

#[test]
fn with_open_tenancy_every_namespace_may_use_a_pool() {
    let text = format!("{POOLS}{}", service("s", ", labels: {tier: gold}, annotations: {vipgate.io/pool: gold}", ""));
    let mut snapshot = snapshot(&text.replace("team: x}}\n", "team: y}}\n"));
    assert!(plan_of(&snapshot).decisions[0].addresses.is_empty());
    snapshot.tenancy = Tenancy::Open;
    assert_eq!(plan_of(&snapshot).decisions[0].addresses.len(), 1);
}

#[test]
fn a_service_of_another_class_is_none_of_ours() {
    let text = service("s", "", ", loadBalancerClass: example.com/other");
    let snapshot = snapshot(&text);
    assert_eq!(snapshot.services(), []);
    let document =
        serde_json::from_value(serde_json::json!({"metadata": {"name": "s"}, "spec": {"type": "LoadBalancer"}}));
    assert_eq!(ServiceRequest::read(&document.unwrap(), UnclassedServices::Ignore), None);
}

/// A pool of two addresses with this rest of its spec, and what it has recorded; and the plan for Services, in minute 10.
fn plan_with_record(spec: &str, recorded: &[&str], services: &str) -> AllocationPlan {
    let pool = format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: p}}\n\
         spec: {{ranges: [203.0.113.0/31]{spec}}}\nstatus: {{used: 1, addresses: {recorded:?}}}\n"
    );
    let snapshot = snapshot(&format!("{pool}{services}"));
    snapshot.plan(&snapshot.services(), snapshot.record(), "2026-01-01T00:10:00Z".parse().unwrap())
}

/// What each Service gets, oldest first, and the record that follows.
fn given(plan: &AllocationPlan) -> (Vec<String>, Vec<String>) {
    let describe = |decision: &Decision| match &decision.refusal {
        None => decision.addresses.iter().map(ToString::to_string).collect(),
        Some(refusal) => refusal.reason.as_str().to_owned(),
    };
    (plan.decisions.iter().map(describe).collect(), plan.records["p"].lines().collect())
}

#[test]
fn an_address_that_is_given_up_is_given_to_nobody_else_for_a_while() {
    let freed = ["203.0.113.0 Service x/old 2026-01-01T00:06:00Z", "203.0.113.1 Service x/older 2026-01-01T00:05:30Z"];
    let plan = plan_with_record("", &freed, &service("new", "", ""));
    let quarantined = vec!["quarantined".to_owned()];
    assert_eq!(given(&plan), (quarantined.clone(), freed.map(str::to_owned).to_vec()));
    assert_eq!(plan.waits_until, Some("2026-01-01T00:10:30Z".parse().unwrap()));
    assert_eq!((plan.usage[0].free, plan.usage[0].quarantined), (0, 2));
    let text = &plan.decisions[0].refusal.as_ref().unwrap().text;
    assert!(text.ends_with("others are quarantined, the first one until 2026-01-01T00:10:30Z"), "{text}");
    // With a shorter time it gets the one that is free for longest, and its former owner its own.
    let shorter = plan_with_record(", reuseAfter: 4m", &freed, &service("new", "", ""));
    assert_eq!(given(&shorter).0, ["203.0.113.1"]);
    assert_eq!(given(&shorter).1[1], "203.0.113.1 Service x/new");
    let back = plan_with_record("", &freed, &service("old", "", ""));
    assert_eq!((given(&back).0, &*given(&back).1[0]), (vec!["203.0.113.0".to_owned()], "203.0.113.0 Service x/old"));
    // One that nobody had is taken first.
    let one = plan_with_record(", reuseAfter: 0s", &freed[..1], &service("new", "", ""));
    assert_eq!(given(&one).0, ["203.0.113.1"]);
    // Its own namespace may name it at once, another one not.
    let named = ", annotations: {vipgate.io/addresses: 203.0.113.0}";
    let text = service("new", named, "");
    assert_eq!(given(&plan_with_record("", &freed, &text)).0, ["203.0.113.0"]);
    assert_eq!(given(&plan_with_record("", &freed, &text.replace("namespace: x", "namespace: y"))).0, quarantined);
}

#[test]
fn what_a_service_gives_up_is_recorded_as_free() {
    let recorded = ["203.0.113.0 Service x/gone", "203.0.113.1 EgressPolicy y/gone"];
    let plan = plan_with_record("", &recorded, &service("new", "", ""));
    let freed = recorded.map(|line| format!("{line} 2026-01-01T00:10:00Z")).to_vec();
    // Its address is given up with this plan: so it is quarantined, and waited for with the next one.
    assert_eq!(given(&plan), (vec!["exhausted".to_owned()], freed));
}

#[test]
fn a_namespace_gets_no_more_than_its_part_of_a_pool() {
    let recorded = ["203.0.113.0 Service x/old 2026-01-01T00:06:00Z"];
    let new = service("new", "", "");
    assert_eq!(given(&plan_with_record(", maxPerNamespace: 1", &recorded, &new)).0, ["namespace_limit"]);
    let other = new.replace("namespace: x", "namespace: y");
    assert_eq!(given(&plan_with_record(", maxPerNamespace: 1", &recorded, &other)).0, ["203.0.113.1"]);
    assert_eq!(given(&plan_with_record(", maxPerNamespace: 2", &recorded, &new)).0, ["203.0.113.1"]);
    let two = service("a", "", "") + &service("b", "", "");
    let plan = plan_with_record(", maxPerNamespace: 1", &[], &two);
    assert_eq!(given(&plan).0, ["203.0.113.0", "namespace_limit"]);
    let text = &plan.decisions[1].refusal.as_ref().unwrap().text;
    assert!(text.starts_with("namespace x has 1 addresses of AddressPool p"), "{text}");
    // What it has, it keeps.
    let (metadata, status) = status(crate::manifest::FIELD_MANAGER, "203.0.113.1");
    let both = service("a", "", "") + &service("b", &metadata, "") + &status;
    assert_eq!(given(&plan_with_record(", maxPerNamespace: 1", &[], &both)).0, ["namespace_limit", "203.0.113.1"]);
}
