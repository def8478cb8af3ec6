//! Valid policies: egress, selectors, precedence, pools and gateways.

use vipgate_dataplane::policy::spec::{self, BackendState};

use super::*;

#[test]
fn endpoints_of_an_annotated_service_have_its_vips() {
    let got = compiled(&[
        service("s", EGRESS, 80, &["203.0.113.10", "2001:db8::10"]),
        slice("s", &["10.0.0.2", "10.0.0.1"]),
        slice("s", &["fd00::1"]),
    ]);
    assert_eq!(messages(&got), [""; 0]);
    assert_eq!(vips(&got), ["203.0.113.10 L2 Service a/s [80]", "2001:db8::10 L2 Service a/s [80]"]);
    assert_eq!(
        endpoints(&got),
        [
            "10.0.0.1 a/s-10-0-0-1 | Service a/s | 203.0.113.10",
            "10.0.0.2 a/s-10-0-0-2 | Service a/s | 203.0.113.10",
            "fd00::1 a/s-fd00--1 | Service a/s | 2001:db8::10",
        ]
    );
    let destinations: Vec<_> = got.set.policies[0].destinations.iter().map(ToString::to_string).collect();
    assert_eq!(destinations, ["0.0.0.0/0", "::/0"]);
}

#[test]
fn a_service_without_the_annotation_has_vips_and_no_egress() {
    for extra in ["", ", annotations: {vipgate.io/egress: \"false\"}"] {
        let got = compiled(&[service("s", extra, 80, &["203.0.113.10"]), slice("s", &["10.0.0.1"])]);
        assert_eq!((got.set.vips.len(), got.set.policies.len(), got.set.endpoints.len()), (1, 0, 0));
    }
}

#[test]
fn services_of_other_types_and_classes_have_no_vips() {
    for (from, to) in [
        ("type: LoadBalancer", "type: LoadBalancer, loadBalancerClass: example.org/other"),
        ("type: LoadBalancer", "type: ClusterIP"),
        ("type: LoadBalancer, ", ""),
    ] {
        let got = compiled(&[service("s", "", 80, &["203.0.113.10"]).replace(from, to)]);
        assert_eq!((messages(&got), vips(&got)), (vec![], vec![]), "{to}");
    }
    let vipgate_class = "type: LoadBalancer, loadBalancerClass: vipgate.io/vipgate";
    let got = compiled(&[service("s", "", 80, &["203.0.113.10"]).replace("type: LoadBalancer", vipgate_class)]);
    assert_eq!(got.set.vips.len(), 1);
}

#[test]
fn endpoints_that_are_not_ready_are_covered() {
    let slice = slice("s", &["10.0.0.1"])
        .replace("targetRef", "conditions: {ready: false, serving: false, terminating: true}, targetRef");
    let got = compiled(&[service("s", EGRESS, 80, &["203.0.113.10"]), slice]);
    assert_eq!(got.set.endpoints.len(), 1);
}

/// Egress covers each address of a slice, whatever its conditions; only inbound balancing uses readiness.
#[test]
fn egress_covers_every_endpoint_and_inbound_sessions_open_to_ready_ones() {
    let conditions = [
        ("", true),
        ("conditions: {ready: true}, ", true),
        ("conditions: {ready: false}, ", false),
        ("conditions: {ready: false, serving: true, terminating: true}, ", false),
        ("conditions: {ready: false, serving: false, terminating: true}, ", false),
    ];
    let addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"];
    let mut all = slice("s", &addresses);
    for (address, (conditions, _)) in addresses.iter().zip(&conditions) {
        let start = format!("[\"{address}\"], ");
        all = all.replace(&start, &format!("{start}{conditions}"));
    }
    let got = compiled(&[service("s", EGRESS, 80, &["203.0.113.10"]), all]);
    assert_eq!(messages(&got), [""; 0]);
    let covered: Vec<_> = got.set.endpoints.iter().map(|it| (it.address.to_string(), it.vips.len())).collect();
    assert_eq!(covered, addresses.map(|address| (address.to_owned(), 1)));
    let placed: Vec<&PlacedService> = got.placement.services.iter().collect();
    let ready: Vec<bool> = placed[0].backends.iter().map(|backend| backend.state == BackendState::Ready).collect();
    assert_eq!(ready, conditions.map(|(_, is_ready)| is_ready));
}

#[test]
fn frontend_and_health_check_ports_of_all_services_of_a_vip_are_reserved() {
    let local = service("t", "", 53, &["203.0.113.10"]).replace(
        "ports: [{port: 53}]",
        "externalTrafficPolicy: Local, healthCheckNodePort: 30000, \
         ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]",
    );
    let got = compiled(&[service("s", "", 80, &["203.0.113.10"]), local]);
    assert_eq!(messages(&got), [""; 0]);
    assert_eq!(vips(&got), ["203.0.113.10 L2 Service a/s, Service a/t [53, 80, 30000]"]);
}

#[test]
fn a_policy_takes_precedence_over_the_annotation() {
    let spec = "{serviceRef: {name: s}, destinationCIDRs: [\"::/0\", 0.0.0.0/0], \
                excludedCIDRs: [10.0.0.0/8, 10.0.0.0/8], addressSelection: PerConnection, \
                limits: {sessionsPerEndpoint: 5, newSessionsPerSecond: 6, guaranteedPortsPerEndpoint: 4}, \
                onExhaustion: Drop}";
    let got =
        compiled(&[service("s", EGRESS, 80, &["203.0.113.10"]), slice("s", &["10.0.0.1"]), policy("p", "", spec)]);
    assert_eq!(endpoints(&got), ["10.0.0.1 a/s-10-0-0-1 | EgressPolicy a/p | 203.0.113.10"]);
    assert_eq!(
        got.set.policies[0],
        EgressSpec {
            name: "EgressPolicy a/p".into(),
            destinations: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
            excluded: vec!["10.0.0.0/8".parse().unwrap()],
            address_selection: spec::AddressSelection::PerConnection,
            limits: spec::Limits { sessions: Some(5), new_sessions_per_second: Some(6), guaranteed_ports: Some(4) },
            on_exhaustion: spec::OnExhaustion::Drop,
        }
    );
    assert_eq!(
        messages(&got),
        ["m.yaml:3: metadata.annotations[vipgate.io/egress]: warning: Service a/s covers endpoint 10.0.0.1, which \
          EgressPolicy a/p (m.yaml:13) also covers: EgressPolicy a/p takes precedence (an EgressPolicy precedes an \
          annotation)"]
    );
}

#[test]
fn precedence_is_by_kind_then_age_then_name() {
    let by_service = |name: &str, created: &str| policy(name, created, "{serviceRef: {name: s}}");
    let by_label = |name: &str| {
        policy(
            name,
            ", creationTimestamp: \"2001-01-01T00:00:00Z\"",
            "{selectors: [{podSelector: {}}], addresses: [203.0.113.9]}",
        )
    };
    let (old, new) = (", creationTimestamp: \"2020-01-01T00:00:00Z\"", ", creationTimestamp: \"2021-01-01T00:00:00Z\"");
    for (policies, winner) in [
        ([by_label("a"), by_service("z", new)], "EgressPolicy a/z"),
        ([by_service("a", new), by_service("z", old)], "EgressPolicy a/z"),
        ([by_service("a", ""), by_service("z", old)], "EgressPolicy a/z"),
        ([by_service("a", old), by_service("z", old)], "EgressPolicy a/a"),
    ] {
        let mut documents = vec![
            service("s", "", 80, &["203.0.113.10"]),
            slice("s", &["10.0.0.1", "10.0.0.2"]),
            pod("a", "x", "", "10.0.0.1"),
        ];
        documents.extend(policies.clone());
        let got = compiled(&documents);
        assert!(endpoints(&got)[0].contains(winner), "{policies:#?}\n{:?}", endpoints(&got));
        assert_eq!(got.diagnostics.len(), 1, "{:?}", messages(&got));
        assert!(messages(&got)[0].contains(&format!("which {winner} (m.yaml:")), "{:?}", messages(&got));
    }
}

/// Names decide within a namespace only.
#[test]
fn of_one_age_the_namespace_decides_then_the_name() {
    let selecting = |name: &str, vip: &str| {
        let spec = format!("{{selectors: [{{namespaceSelector: {{}}, podSelector: {{}}}}], addresses: [{vip}]}}");
        policy(name, ", creationTimestamp: \"2020-01-01T00:00:00Z\"", &spec)
    };
    let x = || pod("a", "x", "", "10.0.0.1");
    let of_b = selecting("a", "203.0.113.8").replace("namespace: a", "namespace: b");
    let got = compiled(&[of_b, selecting("z", "203.0.113.9"), x()]);
    assert_eq!(endpoints(&got), ["10.0.0.1 a/x | EgressPolicy a/z | 203.0.113.9"], "{:?}", messages(&got));
    let got = compiled(&[selecting("y", "203.0.113.8"), selecting("z", "203.0.113.9"), x()]);
    assert_eq!(endpoints(&got), ["10.0.0.1 a/x | EgressPolicy a/y | 203.0.113.8"]);
    let reason = "EgressPolicy a/y takes precedence (same age, and it sorts first by namespace, then name)";
    assert!(messages(&got)[0].ends_with(reason), "{:?}", messages(&got));
}

#[test]
fn selectors_match_labels_of_pods_and_namespaces() {
    let pods = || {
        [
            namespace("a", "team: x"),
            namespace("b", "team: x"),
            pod("a", "one", "app: web", "10.0.0.1"),
            pod("a", "two", "app: db", "10.0.0.2"),
            pod("b", "three", "app: web", "10.0.0.3"),
            pod("c", "four", "app: web", "10.0.0.4"),
            pod("a", "host", "app: web", "192.168.0.1").replace("containers", "hostNetwork: true, containers"),
            pod("a", "done", "app: web", "10.0.0.9").replace("Running", "Succeeded"),
            pod("a", "broken", "app: web", "10.0.0.9").replace("Running", "Failed"),
            pod("a", "waiting", "app: web", "").replace("[{ip: \"\"}]", "[]"),
            pod("a", "old", "app: old", "").replace("podIPs: [{ip: \"\"}]", "podIP: 10.0.0.5"),
        ]
    };
    for (selectors, names) in [
        ("[{podSelector: {}}]", vec!["a/one", "a/two", "a/old"]),
        ("[{podSelector: {matchLabels: {app: web}}}]", vec!["a/one"]),
        ("[{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [web, old]}]}}]", vec!["a/two"]),
        ("[{namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}]", vec!["a/one", "b/three", "c/four"]),
        (
            "[{namespaceSelector: {matchLabels: {team: x}}, podSelector: {}}]",
            vec!["a/one", "a/two", "b/three", "a/old"],
        ),
        (
            "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: c}}, podSelector: {}}, \
              {podSelector: {matchLabels: {app: db}}}]",
            vec!["a/two", "c/four"],
        ),
    ] {
        let mut documents = pods().to_vec();
        documents.push(policy(
            "p",
            "",
            &format!("{{selectors: {selectors}, addresses: [203.0.113.9, \"2001:db8::9\"]}}"),
        ));
        let got = compiled(&documents);
        assert_eq!(messages(&got), [""; 0], "{selectors}");
        let covered: Vec<_> = got.set.endpoints.iter().map(|endpoint| &*endpoint.name).collect();
        assert_eq!(covered, names, "{selectors}");
        assert!(got.set.endpoints.iter().all(|endpoint| endpoint.vips == [ip("203.0.113.9")]));
        assert_eq!(vips(&got), ["203.0.113.9 L2 EgressPolicy a/p []", "2001:db8::9 L2 EgressPolicy a/p []"]);
    }
}

#[test]
fn vips_from_a_pool_are_unused_and_have_its_announce_mode() {
    let spec = "{selectors: [{podSelector: {}}], pools: [{name: public, count: 2}]}";
    let got = compiled(&[
        pool("public", "{ranges: [203.0.113.0/30, 2001:db8::-2001:db8::2], announce: BGP}"),
        service("s", ", annotations: {vipgate.io/announce: L2}", 80, &["203.0.113.1"]),
        service("t", ", annotations: {vipgate.io/announce: BGP}", 80, &["198.51.100.1"]),
        pod("a", "x", "", "10.0.0.1"),
        policy("p", "", spec),
    ]);
    assert_eq!(
        messages(&got),
        ["m.yaml:8: metadata.annotations[vipgate.io/announce]: warning: 203.0.113.1 is in AddressPool public, whose \
          announce mode BGP takes precedence"]
    );
    assert!(got.set.vips.iter().all(|vip| vip.announce == spec::Announce::Bgp));
    let allocated: Vec<_> =
        got.set.vips.iter().filter(|vip| &*vip.name == "EgressPolicy a/p").map(|vip| vip.address).collect();
    assert_eq!(allocated.len(), 4);
    assert_eq!(allocated.iter().filter(|vip| vip.is_ipv4()).count(), 2);
    assert!(!allocated.contains(&ip("203.0.113.1")));
    let v4: Vec<_> = allocated.iter().copied().filter(IpAddr::is_ipv4).collect();
    assert_eq!(got.set.endpoints[0].vips, v4);
}

#[test]
fn a_policy_is_assigned_to_the_gateways_that_it_names_or_selects() {
    let documents = |gateways: &str| {
        vec![
            gateway("gw-a", "tier: gold"),
            gateway("gw-b", "tier: lead"),
            service("s", "", 80, &["203.0.113.10"]),
            slice("s", &["10.0.0.1"]),
            policy("p", "", &format!("{{serviceRef: {{name: s}}{gateways}}}")),
        ]
    };
    for (gateways, eligible) in [
        ("", &["gw-a", "gw-b"][..]),
        (", gateways: {names: [gw-a]}", &["gw-a"]),
        (", gateways: {names: [gw-b]}", &["gw-b"]),
        (", gateways: {selector: {matchLabels: {tier: gold}}}", &["gw-a"]),
        (", gateways: {selector: {matchLabels: {tier: lead}}}", &["gw-b"]),
        (", gateways: {selector: {}}", &["gw-a", "gw-b"]),
    ] {
        let vip = ip("203.0.113.10");
        // Every gateway gets the policy, including gw-c, which has no manifest and no shards.
        for gateway in ["gw-a", "gw-b", "gw-c"] {
            let got = compiled_for(gateway, &documents(gateways));
            assert_eq!(messages(&got), [""; 0], "{gateways}");
            let ([endpoint], [only]) = (&got.set.endpoints[..], &got.set.vips[..]) else {
                panic!("{gateways}: one each")
            };
            let [shard] = &only.shards[..] else { panic!("{gateways}: {:?}", only.shards) };
            assert_eq!(
                (&endpoint.vips[..], &endpoint.gateway),
                (&[vip][..], &Some(shard.gateway.clone())),
                "{gateways}"
            );
            let mut names = [vec![shard.gateway.clone()], shard.backups.clone()].concat();
            names.sort_unstable();
            assert_eq!(names.iter().map(|name| &**name).collect::<Vec<_>>(), eligible, "{gateways}");
        }
        // A standalone gateway owns everything.
        let standalone = compiled_for("gw-a", &documents(gateways)[2..]).set;
        let endpoint = &standalone.endpoints[0];
        assert_eq!((&endpoint.vips[..], &endpoint.gateway), (&[vip][..], &None), "{gateways}");
        assert_eq!(standalone.vips[0].shards, [], "{gateways}");
    }
}

#[test]
fn a_policy_with_selectors_may_use_a_vip_of_its_own_namespace() {
    let spec = "{selectors: [{podSelector: {}}], addresses: [203.0.113.10]}";
    let got =
        compiled(&[service("s", "", 80, &["203.0.113.10"]), pod("a", "job", "", "10.0.0.7"), policy("p", "", spec)]);
    assert_eq!(messages(&got), [""; 0]);
    assert_eq!(vips(&got), ["203.0.113.10 L2 Service a/s, EgressPolicy a/p [80]"]);
    assert_eq!(endpoints(&got), ["10.0.0.7 a/job | EgressPolicy a/p | 203.0.113.10"]);
}

#[test]
fn an_endpoint_without_a_name_has_that_of_its_pod() {
    let slice = slice("s", &["10.0.0.1"]).replace("kind: Pod", "kind: Other");
    let got = compiled(&[service("s", EGRESS, 80, &["203.0.113.10"]), slice, pod("a", "x", "", "10.0.0.1")]);
    assert_eq!(&*got.set.endpoints[0].name, "a/x");
}
