//! Objects beside those of others: who gives way, whose an address is, and what a set-aside object leaves untouched.

use vipgate_dataplane::policy::spec;

use super::*;
use crate::diagnostic::Code;

fn strict(documents: &[String]) -> Outcome {
    let objects = objects(&documents.join("---\n"));
    let Compiled { placement, diagnostics, .. } = compile_for(Tenancy::Strict, &objects);
    Outcome { set: policy_for(&placement, None, "1"), placement, diagnostics }
}

fn codes(outcome: &Outcome) -> Vec<Code> {
    outcome.diagnostics.iter().map(|it| it.code).collect()
}

fn created(year: u16) -> String {
    format!(", creationTimestamp: \"{year}-01-01T00:00:00Z\"")
}

/// The same document in another namespace.
pub(super) fn of(namespace: &str, document: &str) -> String {
    document.replace("namespace: a", &format!("namespace: {namespace}"))
}

/// A slice of Service `{namespace}/{service}` with endpoints as written.
fn endpoints_of(namespace: &str, service: &str, name: &str, endpoints: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}, namespace: {namespace}, labels: {{kubernetes.io/service-name: {service}}}}}\n\
         addressType: IPv4\nports: [{{port: 80}}]\nendpoints: [{endpoints}]\n"
    )
}

fn node(name: &str, address: &str, cidr: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nspec: {{podCIDR: {cidr}}}\n\
         status: {{addresses: [{{type: InternalIP, address: {address}}}]}}\n"
    )
}

/// The backends of a Service.
fn backends(outcome: &Outcome, service: &str) -> Vec<String> {
    let service = outcome.placement.services.get(&service.into());
    let backends = service.iter().flat_map(|service| &service.backends);
    backends.map(|it| format!("{} {:?} {:?} {:?}", it.address, it.ports, it.state, it.node.as_deref())).collect()
}

/// Tenant a: a Service with VIP .10 and two pods.
fn tenant_a() -> Vec<String> {
    vec![
        service("api", &format!("{EGRESS}{}", created(2020)), 80, &["203.0.113.10"]),
        endpoints_of(
            "a",
            "api",
            "api-1",
            "{addresses: [10.1.0.1], targetRef: {kind: Pod, name: p1}}, \
             {addresses: [10.1.0.2], targetRef: {kind: Pod, name: p2}}",
        ),
        pod("a", "p1", "app: api", "10.1.0.1"),
        pod("a", "p2", "app: api", "10.1.0.2"),
    ]
}

/// What tenant a has in force.
fn of_a(outcome: &Outcome) -> (Vec<String>, Vec<String>, Vec<String>) {
    let is_of_a = |text: &String| text.contains(" a/");
    let endpoints = endpoints(outcome).into_iter().filter(is_of_a).collect();
    let vips = vips(outcome).into_iter().filter(is_of_a).collect();
    (endpoints, vips, backends(outcome, "Service a/api"))
}

#[test]
fn objects_of_another_tenant_change_nothing_of_what_a_tenant_has() {
    let alone = of_a(&strict(&tenant_a()));
    assert_eq!((alone.0.len(), alone.1.len(), alone.2.len()), (2, 1, 2));
    let m = |document: String| of("m", &document);
    let trap = |endpoints: &str| {
        let service = m(service("trap", EGRESS, 90, &["203.0.113.66"]));
        vec![service, endpoints_of("m", "trap", "trap-1", endpoints)]
    };
    for (hostile, expected) in [
        // The VIP as an endpoint, as its own Service's and as another one's.
        (trap("{addresses: [203.0.113.10]}"), vec![Code::BackendIsVip]),
        // Pods of a, with and without a reference to a pod of its own.
        (trap("{addresses: [10.1.0.1]}"), vec![Code::SliceAddressOfOther]),
        (trap("{addresses: [10.1.0.1], targetRef: {kind: Pod, name: p1}}"), vec![Code::SliceAddressOfOther]),
        (
            trap("{addresses: [10.1.0.1], targetRef: {kind: Pod, name: p1, namespace: a}}"),
            vec![Code::SliceAddressOfOther],
        ),
        // The VIP and port of an older Service.
        (vec![m(service("x", "", 80, &["203.0.113.10"]))], vec![Code::PortConflict, Code::VipOfTwoNamespaces]),
        (vec![m(service("x", "", 80, &["10.1.0.1"]))], vec![Code::VipInUse]),
        (
            vec![m(policy("x", "", "{selectors: [{podSelector: {}}], addresses: [203.0.113.10]}"))],
            vec![Code::NoPodSelected, Code::VipOfOtherNamespace],
        ),
        // The labels of a's pods.
        (
            vec![m(policy(
                "x",
                "",
                "{selectors: [{namespaceSelector: {}, podSelector: {matchLabels: {app: api}}}], \
                 addresses: [203.0.113.66]}",
            ))],
            vec![Code::AddressOutsidePools, Code::NoPodSelected, Code::PodsOfOtherNamespace],
        ),
    ] {
        let mut documents = tenant_a();
        documents.extend(hostile);
        let outcome = strict(&documents);
        assert_eq!(of_a(&outcome), alone, "{documents:#?}");
        let mut codes = codes(&outcome);
        codes.sort_unstable();
        let mut expected = expected;
        expected.sort_unstable();
        assert_eq!(codes, expected, "{:#?}", messages(&outcome));
    }
}

#[test]
fn a_node_that_names_a_vip_or_a_pod_takes_nothing() {
    let alone = of_a(&strict(&tenant_a()));
    for address in ["203.0.113.10", "10.1.0.1"] {
        let mut documents = tenant_a();
        documents.push(node("rogue", address, "10.9.0.0/24"));
        let outcome = strict(&documents);
        assert_eq!(of_a(&outcome), alone, "{address}: {:#?}", messages(&outcome));
    }
}

#[test]
fn a_slice_names_no_host_no_api_server_no_gateway_and_nothing_of_the_cluster() {
    let api_server = endpoints_of("default", "kubernetes", "kubernetes", "{addresses: [10.1.0.50]}");
    let platform = || vec![node("n1", "192.168.0.1", "10.9.0.0/24"), gateway("gw-a", ""), api_server.clone()];
    for (address, is_used) in [
        ("192.168.0.1", false),
        ("10.1.0.50", false),
        ("192.0.2.97", false),
        ("10.9.0.7", false),
        ("198.51.100.7", true),
    ] {
        let mut documents = [tenant_a(), platform()].concat();
        documents.push(of("m", &service("trap", EGRESS, 90, &["203.0.113.66"])));
        documents.push(endpoints_of("m", "trap", "trap-1", &format!("{{addresses: [{address}]}}")));
        let outcome = strict(&documents);
        assert_eq!(backends(&outcome, "Service m/trap").len(), usize::from(is_used), "{address}");
        assert_eq!(endpoints(&outcome).iter().any(|it| it.contains("m/trap")), is_used, "{address}");
    }
    // A host-network pod of the namespace is a backend.
    let host = pod("m", "h", "", "192.168.0.1").replace("containers", "hostNetwork: true, containers");
    let mut documents = [tenant_a(), platform()].concat();
    documents.push(of("m", &service("web", "", 90, &["203.0.113.66"])));
    documents.push(endpoints_of("m", "web", "web-1", "{addresses: [192.168.0.1], targetRef: {kind: Pod, name: h}}"));
    documents.push(host);
    assert_eq!(backends(&strict(&documents), "Service m/web").len(), 1);
}

#[test]
fn without_pods_slices_are_taken_as_they_are_and_the_compiler_says_so() {
    let documents = [service("s", EGRESS, 80, &["203.0.113.10"]), slice("s", &["10.1.0.1"])];
    let compile =
        |extra: &[String]| compile_for(Tenancy::Strict, &objects(&[&documents, extra].concat().join("---\n")));
    let without = compile(&[]);
    assert!(without.slices_unverified);
    assert_eq!(without.placement.endpoints.len(), 1);
    // With any pod, an address is nobody's that is known, or its pod's.
    let with = compile(&[pod("b", "x", "", "10.1.0.9")]);
    assert!(!with.slices_unverified);
    assert_eq!(with.placement.endpoints.len(), 1);
    let with = compile(&[pod("b", "x", "", "10.1.0.1")]);
    assert_eq!(with.placement.endpoints.len(), 0);
    let with = compile(&[pod("a", "s-10-1-0-1", "", "10.1.0.1")]);
    assert_eq!((with.placement.endpoints.len(), with.diagnostics.len()), (1, 0));
}

/// A pod with more metadata and conditions.
fn pod_in_life(namespace: &str, name: &str, address: &str, metadata: &str, ready: bool) -> String {
    let ready = if ready { "True" } else { "False" };
    pod(namespace, name, "app: x", address)
        .replace(&format!("namespace: {namespace}"), &format!("namespace: {namespace}{metadata}"))
        .replace("phase: Running", &format!("phase: Running, conditions: [{{type: Ready, status: \"{ready}\"}}]"))
}

#[test]
fn an_address_is_that_of_the_pod_that_has_it_now() {
    let deleted = ", deletionTimestamp: \"2026-01-01T00:00:00Z\"";
    let (old, new) = (created(2020), created(2021));
    let policies = || {
        vec![
            policy("p", "", "{selectors: [{podSelector: {}}], addresses: [203.0.113.1]}"),
            of("b", &policy("p", "", "{selectors: [{podSelector: {}}], addresses: [203.0.113.2]}")),
        ]
    };
    let a = |metadata: &str, ready| pod_in_life("a", "x", "10.0.0.1", metadata, ready);
    let b = |metadata: &str, ready| pod_in_life("b", "y", "10.0.0.1", metadata, ready);
    for (a, b, expected) in [
        (a(deleted, true), b("", true), "b/y | EgressPolicy b/p | 203.0.113.2"),
        (a("", true), b(deleted, true), "a/x | EgressPolicy a/p | 203.0.113.1"),
        (a(&format!("{new}{deleted}"), true), b(&old, false), "b/y | EgressPolicy b/p | 203.0.113.2"),
        (a(&old, true), b(&new, true), "b/y | EgressPolicy b/p | 203.0.113.2"),
        (a(&new, true), b(&old, true), "a/x | EgressPolicy a/p | 203.0.113.1"),
        (a("", false), b("", true), "b/y | EgressPolicy b/p | 203.0.113.2"),
        // Nothing says it, or the manifests contradict themselves: closed.
        (a("", true), b("", true), "a/x | EgressPolicy a/p | "),
        (a(&old, true), b(&new, false), "a/x | EgressPolicy a/p | "),
    ] {
        for pods in [[a.clone(), b.clone()], [b.clone(), a.clone()]] {
            let outcome = compiled(&[policies(), pods.to_vec()].concat());
            assert_eq!(endpoints(&outcome), [format!("10.0.0.1 {expected}")], "{a}{b}");
        }
    }
    let failed = b("", true).replace("Running", "Failed");
    let outcome = compiled(&[policies(), vec![a("", false), failed]].concat());
    assert_eq!(endpoints(&outcome), ["10.0.0.1 a/x | EgressPolicy a/p | 203.0.113.1"]);
}

#[test]
fn of_pods_that_only_slices_name_the_ready_one_has_the_address() {
    let tenant = |namespace: &str, vip: &str, endpoint: &str| {
        let service = of(namespace, &service("s", EGRESS, 80, &[vip]));
        [service, endpoints_of(namespace, "s", "s-1", &format!("{{addresses: [10.0.0.1], {endpoint}}}"))]
    };
    let pod = "targetRef: {kind: Pod, name: p}";
    let gone = format!("{pod}, conditions: {{ready: false, serving: true, terminating: true}}");
    for (a, b, expected) in [
        (gone.as_str(), pod, "b/p | Service b/s | 203.0.113.2"),
        (pod, gone.as_str(), "a/p | Service a/s | 203.0.113.1"),
        (pod, pod, "a/p | Service a/s | "),
        (gone.as_str(), gone.as_str(), "a/p | Service a/s | "),
    ] {
        let outcome = strict(&[tenant("a", "203.0.113.1", a), tenant("b", "203.0.113.2", b)].concat());
        assert_eq!(endpoints(&outcome), [format!("10.0.0.1 {expected}")], "{a} {b}");
    }
}

#[test]
fn an_endpoint_is_an_address_a_port_and_a_node_and_the_serving_one_counts() {
    let s = service("s", "", 80, &["203.0.113.1"]);
    let gone = "conditions: {ready: false, serving: false, terminating: true}";
    for names in [["s-1", "s-2"], ["s-2", "s-1"]] {
        // A gone endpoint of another node.
        let documents = [
            s.clone(),
            endpoints_of("a", "s", names[0], &format!("{{addresses: [10.0.0.1], nodeName: n1, {gone}}}")),
            endpoints_of("a", "s", names[1], "{addresses: [10.0.0.1], nodeName: n2}"),
        ];
        assert_eq!(backends(&compiled(&documents), "Service a/s"), ["10.0.0.1 [80] Ready Some(\"n2\")"]);
        // Two host-network pods of one node with different ports.
        let one =
            endpoints_of("a", "s", names[0], "{addresses: [10.0.0.1], nodeName: n1, targetRef: {kind: Pod, name: x}}");
        let other =
            endpoints_of("a", "s", names[1], "{addresses: [10.0.0.1], nodeName: n1, targetRef: {kind: Pod, name: y}}");
        let documents = [s.clone(), one, other.replace("port: 80", "port: 81")];
        let expected = ["10.0.0.1 [80] Ready Some(\"n1\")", "10.0.0.1 [81] Ready Some(\"n1\")"];
        assert_eq!(backends(&compiled(&documents), "Service a/s"), expected);
    }
    // One pod in two slices with a port each is one backend.
    let s = s.replace("[{port: 80}]", "[{name: a, port: 80}, {name: b, port: 81}]");
    let slice = |name: &str, port: &str| {
        let slice = endpoints_of("a", "s", name, "{addresses: [10.0.0.1], targetRef: {kind: Pod, name: x}}");
        slice.replace("port: 80", port)
    };
    let documents = [s, slice("s-1", "name: a, port: 8080"), slice("s-2", "name: b, port: 8081")];
    assert_eq!(backends(&compiled(&documents), "Service a/s"), ["10.0.0.1 [8080, 8081] Ready None"]);
}

#[test]
fn a_service_that_is_set_aside_takes_nothing_from_others() {
    // t conflicts with s at one VIP, so u has the port at the other VIP.
    let outcome = compiled(&[
        service("s", &created(2020), 80, &["203.0.113.1"]),
        service("t", &format!("{EGRESS}{}", created(2021)), 80, &["203.0.113.1", "203.0.113.2"]),
        service("u", &created(2022), 80, &["203.0.113.2"]),
        slice("t", &["10.0.0.1"]),
    ]);
    assert_eq!(vips(&outcome), ["203.0.113.1 L2 Service a/s [80]", "203.0.113.2 L2 Service a/u [80]"]);
    assert_eq!(codes(&outcome), [Code::PortConflict]);
    // What it covers stays covered.
    assert_eq!(endpoints(&outcome), ["10.0.0.1 a/t-10-0-0-1 | Service a/t | "]);
}

#[test]
fn a_service_of_another_type_gives_its_vip_to_the_next_one() {
    let former = service("s", &format!("{EGRESS}{}", created(2020)), 80, &["203.0.113.1"]);
    let next = service("t", &format!("{EGRESS}{}", created(2021)), 80, &["203.0.113.1"]);
    for change in ["type: ClusterIP", "type: LoadBalancer, loadBalancerClass: other"] {
        let outcome = compiled(&[
            former.replace("type: LoadBalancer", change),
            next.clone(),
            slice("s", &["10.0.0.1"]),
            slice("t", &["10.0.0.2"]),
        ]);
        assert_eq!(vips(&outcome), ["203.0.113.1 L2 Service a/t [80]"]);
        assert_eq!(
            endpoints(&outcome),
            ["10.0.0.1 a/s-10-0-0-1 | Service a/s | ", "10.0.0.2 a/t-10-0-0-2 | Service a/t | 203.0.113.1"]
        );
    }
}

#[test]
fn the_older_pool_keeps_a_range() {
    let pool = |name: &str, year, range: &str| {
        pool(name, &format!("{{ranges: [{range}]}}")).replace("}\nspec", &format!("{}}}\nspec", created(year)))
    };
    // The younger one begins before the older one, and its name sorts first.
    let outcome = compiled(&[
        pool("a", 2021, "203.0.113.0/24"),
        pool("b", 2020, "203.0.113.64/28"),
        policy("p", "", "{selectors: [{podSelector: {}}], pools: [{name: b}]}"),
        pod("a", "x", "", "10.0.0.1"),
    ]);
    assert_eq!(codes(&outcome), [Code::OverlappingRanges]);
    assert_eq!(outcome.set.vips.len(), 1);
}

#[test]
fn naming_an_address_that_an_older_policy_has_of_a_pool_moves_it_not() {
    let drawing = policy("old", &created(2020), "{selectors: [{podSelector: {}}], pools: [{name: p}]}");
    let base = || vec![pool("p", "{ranges: [203.0.113.0/28]}"), pod("a", "x", "", "10.0.0.1"), drawing.clone()];
    let before = compiled(&base()).set.vips[0].address;
    let spec = format!("{{selectors: [{{podSelector: {{}}}}], addresses: [{before}]}}");
    let naming = |year| of("b", &(pod("a", "y", "", "10.0.0.2") + "---\n" + &policy("new", &created(year), &spec)));
    let after = compiled(&[base(), vec![naming(2021)]].concat());
    assert_eq!(codes(&after), [Code::VipOfTwoPolicies]);
    assert_eq!(after.set.vips.iter().map(|vip| vip.address).collect::<Vec<_>>(), [before]);
    // One that is older has it.
    let outcome = compiled(&[base(), vec![naming(2019)]].concat());
    assert_eq!(outcome.set.vips.len(), 2, "{:?}", outcome.set.vips);
}

#[test]
fn an_address_that_no_pod_has_is_of_the_namespace_with_the_oldest_claim_to_it() {
    let tenant = |namespace: &str, year, vip: &str, annotations: &str| {
        let service = service("s", &format!("{annotations}{}", created(year)), 80, &[vip]);
        of(namespace, &service) + "---\n" + &endpoints_of(namespace, "s", "s-x", "{addresses: [198.18.0.1]}")
    };
    let older = tenant("a", 2020, "203.0.113.1", EGRESS);
    // An EgressPolicy precedes an annotation, but in one namespace only.
    let younger = tenant("b", 2021, "203.0.113.2", "")
        + "---\n"
        + &of("b", &policy("p", &created(2021), "{serviceRef: {name: s}}"));
    let outcome = compiled(&[older, younger]);
    let endpoint = &outcome.set.endpoints[0];
    assert_eq!((&*endpoint.policy, &endpoint.vips[..]), ("Service a/s", &[ip("203.0.113.1")][..]));
    assert!(endpoint.remarks.is_empty(), "{:?}", endpoint.remarks);
    assert!(codes(&outcome).contains(&Code::PoliciesOverlap), "{:?}", messages(&outcome));
}

#[test]
fn who_shares_a_vip_does_not_choose_how_it_is_announced() {
    let service = |year: u16, port, mode: &str| {
        let annotations =
            if mode.is_empty() { String::new() } else { format!(", annotations: {{vipgate.io/announce: {mode}}}") };
        service(&format!("s{year}"), &format!("{}{annotations}", created(year)), port, &["203.0.113.1"])
    };
    let announced = |documents: &[String]| {
        let outcome = compiled(documents);
        let is_refused = codes(&outcome).contains(&Code::AnnounceConflict);
        (outcome.set.vips[0].announce, is_refused)
    };
    let oldest = service(2020, 80, "");
    assert_eq!(announced(&[oldest.clone(), of("b", &service(2021, 81, "BGP"))]), (spec::Announce::L2, true));
    assert_eq!(announced(&[oldest.clone(), of("b", &service(2021, 81, "L2"))]), (spec::Announce::L2, false));
    assert_eq!(announced(&[oldest.clone(), of("b", &service(2021, 81, ""))]), (spec::Announce::L2, false));
    // In one namespace, whichever says so.
    assert_eq!(announced(&[oldest, service(2021, 81, "BGP")]), (spec::Announce::Bgp, false));
}

#[test]
fn a_vip_lists_the_names_of_a_few_services() {
    let services = (1..=540).map(|n| service(&format!("s{n:03}-{}", "x".repeat(200)), "", n, &["203.0.113.1"]));
    let outcome = compiled(&services.collect::<Vec<_>>());
    let name = &outcome.set.vips[0].name;
    assert!(name.starts_with("Service a/s001-") && name.ends_with(" and 532 more") && name.len() < 4096, "{name}");
}

#[test]
fn a_vip_that_two_pods_name_is_no_endpoint() {
    let pods = ["x", "y"].map(|name| pod("b", name, "", "203.0.113.1"));
    let trap = of("b", &service("trap", EGRESS, 81, &["203.0.113.2"]));
    let slice = endpoints_of("b", "trap", "trap-x", "{addresses: [203.0.113.1], targetRef: {kind: Pod, name: x}}");
    let pool = pool("p", "{ranges: [203.0.113.0/28]}");
    let outcome = compiled(&[vec![service("s", "", 80, &["203.0.113.1"]), pool, trap, slice], pods.to_vec()].concat());
    assert_eq!(outcome.set.endpoints, []);
    assert_eq!(outcome.set.vips.len(), 2, "{:?}", messages(&outcome));
}

#[test]
fn a_vip_of_a_service_that_a_policy_names_gives_way_to_no_slice() {
    let own = || {
        vec![
            service("s", &created(2021), 80, &["192.0.2.1"]),
            policy("p", &created(2021), "{selectors: [{podSelector: {}}], addresses: [192.0.2.1]}"),
            pod("a", "x", "", "10.0.0.1"),
        ]
    };
    let listed = of("b", &service("t", "", 80, &["192.0.2.2"]))
        + "---\n"
        + &endpoints_of("b", "t", "t-x", "{addresses: [192.0.2.1]}");
    let vips = |documents: &[String]| {
        let compiled = compile_for(Tenancy::Strict, &objects(&documents.join("---\n")));
        compiled.placement.endpoints.iter().map(|it| (it.address, it.vips.clone())).collect::<Vec<_>>()
    };
    assert_eq!(vips(&own()), [(ip("10.0.0.1"), vec![ip("192.0.2.1")])]);
    assert_eq!(vips(&[own(), vec![listed]].concat()), vips(&own()));
}
