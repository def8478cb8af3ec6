//! Policies that are as meant.

use vipgate_dataplane::snapshot::spec;

use super::*;

#[test]
fn an_annotated_service_leaves_with_its_vips() {
    let got = compiled(&[
        service("s", EGRESS, 80, &["203.0.113.10", "2001:db8::10"]),
        slice("s", &["10.0.0.2", "10.0.0.1"]),
        slice("s", &["fd00::1"]),
    ]);
    assert_eq!(said(&got), [""; 0]);
    assert_eq!(vips(&got), ["203.0.113.10 L2 Service a/s [80]", "2001:db8::10 L2 Service a/s [80]"]);
    assert_eq!(
        endpoints(&got),
        [
            "10.0.0.1 a/s-10-0-0-1 | Service a/s | 203.0.113.10",
            "10.0.0.2 a/s-10-0-0-2 | Service a/s | 203.0.113.10",
            "fd00::1 a/s-fd00--1 | Service a/s | 2001:db8::10",
        ]
    );
    let everything: Vec<_> = got.set.policies[0].destinations.iter().map(ToString::to_string).collect();
    assert_eq!(everything, ["0.0.0.0/0", "::/0"]);
}

#[test]
fn a_service_without_the_annotation_has_vips_and_no_egress() {
    for extra in ["", ", annotations: {vipgate.io/egress: \"false\"}"] {
        let got = compiled(&[service("s", extra, 80, &["203.0.113.10"]), slice("s", &["10.0.0.1"])]);
        assert_eq!((got.set.vips.len(), got.set.policies.len(), got.set.endpoints.len()), (1, 0, 0));
    }
}

#[test]
fn services_that_are_not_ours_have_no_vips() {
    for (from, to) in [
        ("type: LoadBalancer", "type: LoadBalancer, loadBalancerClass: example.org/other"),
        ("type: LoadBalancer", "type: ClusterIP"),
        ("type: LoadBalancer, ", ""),
    ] {
        let got = compiled(&[service("s", "", 80, &["203.0.113.10"]).replace(from, to)]);
        assert_eq!((said(&got), vips(&got)), (vec![], vec![]), "{to}");
    }
    let ours = "type: LoadBalancer, loadBalancerClass: vipgate.io/vipgate";
    let got = compiled(&[service("s", "", 80, &["203.0.113.10"]).replace("type: LoadBalancer", ours)]);
    assert_eq!(got.set.vips.len(), 1);
}

#[test]
fn endpoints_that_are_not_ready_are_covered_too() {
    let slice = slice("s", &["10.0.0.1"])
        .replace("targetRef", "conditions: {ready: false, serving: false, terminating: true}, targetRef");
    let got = compiled(&[service("s", EGRESS, 80, &["203.0.113.10"]), slice]);
    assert_eq!(got.set.endpoints.len(), 1);
}

#[test]
fn frontend_and_health_ports_are_reserved_and_shared_vips_unite_them() {
    let local = service("t", "", 53, &["203.0.113.10"]).replace(
        "ports: [{port: 53}]",
        "externalTrafficPolicy: Local, healthCheckNodePort: 30000, ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]",
    );
    let got = compiled(&[service("s", "", 80, &["203.0.113.10"]), local]);
    assert_eq!(said(&got), [""; 0]);
    assert_eq!(vips(&got), ["203.0.113.10 L2 Service a/s, Service a/t [53, 80, 30000]"]);
}

#[test]
fn a_policy_says_more_than_the_annotation_and_wins_over_it() {
    let spec = "{serviceRef: {name: s}, destinationCIDRs: [\"::/0\", 0.0.0.0/0], excludedCIDRs: [10.0.0.0/8, 10.0.0.0/8], \
                addressSelection: PerConnection, limits: {sessionsPerEndpoint: 5, newSessionsPerSecond: 6, \
                guaranteedPortsPerEndpoint: 4}, onExhaustion: Drop}";
    let got =
        compiled(&[service("s", EGRESS, 80, &["203.0.113.10"]), slice("s", &["10.0.0.1"]), policy("p", "", spec)]);
    assert_eq!(endpoints(&got), ["10.0.0.1 a/s-10-0-0-1 | EgressPolicy a/p | 203.0.113.10"]);
    assert_eq!(
        got.set.policies[0],
        spec::EgressSpec {
            name: "EgressPolicy a/p".into(),
            destinations: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
            excluded: vec!["10.0.0.0/8".parse().unwrap()],
            address_selection: spec::AddressSelection::PerConnection,
            limits: spec::Limits { sessions: Some(5), new_sessions_per_second: Some(6), guaranteed_ports: Some(4) },
            on_exhaustion: spec::OnExhaustion::Drop,
        }
    );
    assert_eq!(
        said(&got),
        ["m.yaml:3: metadata.annotations[vipgate.io/egress]: warning: Service a/s covers endpoint 10.0.0.1 that \
          EgressPolicy a/p (m.yaml:13) covers too: EgressPolicy a/p wins, since an EgressPolicy comes before an annotation"]
    );
}

#[test]
fn of_two_policies_the_more_precise_then_the_older_then_the_first_by_name_wins() {
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
        assert_eq!(got.complaints.len(), 1, "{:?}", said(&got));
        assert!(said(&got)[0].contains(&format!("that {winner} (m.yaml:")), "{:?}", said(&got));
    }
}

#[test]
fn selectors_select_pods_by_their_labels_and_their_namespaces() {
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
        assert_eq!(said(&got), [""; 0], "{selectors}");
        let covered: Vec<_> = got.set.endpoints.iter().map(|endpoint| &*endpoint.name).collect();
        assert_eq!(covered, names, "{selectors}");
        assert!(got.set.endpoints.iter().all(|endpoint| endpoint.vips == [ip("203.0.113.9")]));
        assert_eq!(vips(&got), ["203.0.113.9 L2 EgressPolicy a/p []", "2001:db8::9 L2 EgressPolicy a/p []"]);
    }
}

#[test]
fn vips_from_a_pool_are_free_ones_and_announced_as_it_says() {
    let spec = "{selectors: [{podSelector: {}}], pools: [{name: public, count: 2}]}";
    let got = compiled(&[
        pool("public", "{ranges: [203.0.113.0/30, 2001:db8::-2001:db8::2], announce: BGP}"),
        service("s", ", annotations: {vipgate.io/announce: L2}", 80, &["203.0.113.1"]),
        service("t", ", annotations: {vipgate.io/announce: BGP}", 80, &["198.51.100.1"]),
        pod("a", "x", "", "10.0.0.1"),
        policy("p", "", spec),
    ]);
    assert_eq!(
        said(&got),
        ["m.yaml:8: metadata.annotations[vipgate.io/announce]: warning: 203.0.113.1 is in AddressPool public, which \
          announces it by BGP: that counts"]
    );
    assert!(got.set.vips.iter().all(|vip| vip.announce == spec::Announce::Bgp));
    let taken: Vec<_> =
        got.set.vips.iter().filter(|vip| &*vip.name == "EgressPolicy a/p").map(|vip| vip.address).collect();
    assert_eq!(taken.len(), 4);
    assert_eq!(taken.iter().filter(|vip| vip.is_ipv4()).count(), 2);
    assert!(!taken.contains(&ip("203.0.113.1")));
    let v4: Vec<_> = taken.iter().copied().filter(IpAddr::is_ipv4).collect();
    assert_eq!(got.set.endpoints[0].vips, v4);
}

#[test]
fn a_policy_is_dealt_to_whom_it_names_or_selects() {
    let documents = |gateways: &str| {
        vec![
            gateway("gw-a", "tier: gold"),
            gateway("gw-b", "tier: lead"),
            service("s", "", 80, &["203.0.113.10"]),
            slice("s", &["10.0.0.1"]),
            policy("p", "", &format!("{{serviceRef: {{name: s}}{gateways}}}")),
        ]
    };
    for (gateways, allowed) in [
        ("", &["gw-a", "gw-b"][..]),
        (", gateways: {names: [gw-a]}", &["gw-a"]),
        (", gateways: {names: [gw-b]}", &["gw-b"]),
        (", gateways: {selector: {matchLabels: {tier: gold}}}", &["gw-a"]),
        (", gateways: {selector: {matchLabels: {tier: lead}}}", &["gw-b"]),
        (", gateways: {selector: {}}", &["gw-a", "gw-b"]),
    ] {
        let vip = ip("203.0.113.10");
        // All of them know it; also one without a manifest, to which nothing is dealt.
        for gateway in ["gw-a", "gw-b", "gw-c"] {
            let got = compiled_for(gateway, &documents(gateways));
            assert_eq!(said(&got), [""; 0], "{gateways}");
            let ([endpoint], [only]) = (&got.set.endpoints[..], &got.set.vips[..]) else {
                panic!("{gateways}: one each")
            };
            let [share] = &only.shares[..] else { panic!("{gateways}: {:?}", only.shares) };
            assert_eq!(
                (&endpoint.vips[..], &endpoint.gateway),
                (&[vip][..], &Some(share.gateway.clone())),
                "{gateways}"
            );
            let mut serving = [vec![share.gateway.clone()], share.backups.clone()].concat();
            serving.sort_unstable();
            assert_eq!(serving.iter().map(|name| &**name).collect::<Vec<_>>(), allowed, "{gateways}");
        }
        // Alone it owns everything.
        let alone = compiled_for("gw-a", &documents(gateways)[2..]).set;
        assert_eq!((&alone.endpoints[0].vips[..], &alone.endpoints[0].gateway), (&[vip][..], &None), "{gateways}");
        assert_eq!(alone.vips[0].shares, [], "{gateways}");
    }
}

#[test]
fn a_policy_with_selectors_may_use_the_vip_of_its_own_namespace() {
    let spec = "{selectors: [{podSelector: {}}], addresses: [203.0.113.10]}";
    let got =
        compiled(&[service("s", "", 80, &["203.0.113.10"]), pod("a", "job", "", "10.0.0.7"), policy("p", "", spec)]);
    assert_eq!(said(&got), [""; 0]);
    assert_eq!(vips(&got), ["203.0.113.10 L2 Service a/s, EgressPolicy a/p [80]"]);
    assert_eq!(endpoints(&got), ["10.0.0.7 a/job | EgressPolicy a/p | 203.0.113.10"]);
}

#[test]
fn a_pod_gives_its_name_to_an_endpoint_that_has_none() {
    let slice = slice("s", &["10.0.0.1"]).replace("kind: Pod", "kind: Other");
    let got = compiled(&[service("s", EGRESS, 80, &["203.0.113.10"]), slice, pod("a", "x", "", "10.0.0.1")]);
    assert_eq!(&*got.set.endpoints[0].name, "a/x");
}
