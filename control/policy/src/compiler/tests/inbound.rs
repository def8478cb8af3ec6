//! Inbound Services: ports, backends and localities, and their diagnostics.

use vipgate_dataplane::policy::spec::{BackendState, Scope};

use super::*;

/// A dual-stack Service `a/s` with two ports, one of them with a named target port; `spec` has additional fields.
pub(super) fn web(annotations: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: s, namespace: a, annotations: {{{annotations}}}}}\n\
         spec: {{type: LoadBalancer, ports: [{{name: http, port: 80, targetPort: web}}, \
         {{name: dns, port: 53, targetPort: 5353, protocol: UDP}}]{spec}}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: \"2001:db8::1\"}}, {{ip: 203.0.113.1}}]}}}}\n"
    )
}

/// An endpoint slice of `a/s` in 5 lines; `ports` includes the key.
pub(super) fn endpoint_slice(name: &str, family: &str, ports: &str, endpoints: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}, namespace: a, labels: {{kubernetes.io/service-name: s}}}}\n\
         addressType: {family}\n{{{ports}endpoints: [{endpoints}]}}\n"
    )
    .replace("addressType: IPv4\n{", "addressType: IPv4\n")
    .replace("addressType: IPv6\n{", "addressType: IPv6\n")
    .replace("]}\n", "]\n")
}

pub(super) const PORTS: &str = "ports: [{name: http, port: 8080}, {name: dns, port: 5353, protocol: UDP}]\n";

/// `address name ports weight state node zone` of every backend.
fn backends(service: &PlacedService) -> Vec<String> {
    let each = service.backends.iter().map(|it| {
        let (node, zone) = (it.node.as_deref().unwrap_or("-"), it.zone.as_deref().unwrap_or("-"));
        format!("{} {} {:?} {} {:?} {node} {zone}", it.address, it.name, it.ports, it.weight, it.state)
    });
    each.collect()
}

#[test]
fn a_service_has_the_settings_and_backends_of_its_manifests() {
    let got = compiled(&[
        web(
            "vipgate.io/maglev-table-size: \"4093\"",
            ", sessionAffinity: ClientIP, externalTrafficPolicy: Local, healthCheckNodePort: 30000, \
             loadBalancerSourceRanges: [\" 198.51.100.7/24\", \"2001:db8:1::/48\", 198.51.100.0/24]",
        ),
        endpoint_slice(
            "s-4",
            "IPv4",
            PORTS,
            "{addresses: [10.0.0.2], nodeName: n2, zone: z2, targetRef: {kind: Pod, name: p2}}, \
             {addresses: [10.0.0.1], conditions: {ready: false, serving: true, terminating: true}, \
              targetRef: {kind: Pod, name: p1}}, \
             {addresses: [10.0.0.3], conditions: {ready: false}, nodeName: n1}",
        ),
        endpoint_slice("s-6", "IPv6", PORTS, "{addresses: [\"fd00::2\"], targetRef: {kind: Pod, name: p2}}"),
        pod("a", "p1", "", "10.0.0.1").replace("containers", "nodeName: n1, containers"),
        pod("a", "p2", "", "10.0.0.2").replace("labels", "annotations: {vipgate.io/weight: \"5\"}, labels"),
        "apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: z1}}\n".to_owned(),
    ]);
    assert_eq!(messages(&got), [""; 0]);
    let services = got.placement.services.to_vec();
    let [service] = &services[..] else { panic!("one Service") };
    assert_eq!((&*service.name, &service.vips), ("Service a/s", &vec![ip("203.0.113.1"), ip("2001:db8::1")]));
    let ports: Vec<_> = service.ports.iter().map(|port| (&*port.name, port.protocol, port.port)).collect();
    assert_eq!(ports, [("http", 6, 80), ("dns", 17, 53)]);
    assert_eq!(
        backends(service),
        [
            "10.0.0.1 a/p1 [8080, 5353] 1 Terminating n1 z1",
            "10.0.0.2 a/p2 [8080, 5353] 5 Ready n2 z2",
            "10.0.0.3  [8080, 5353] 1 NotReady n1 z1",
            "fd00::2 a/p2 [8080, 5353] 5 Ready - -",
        ]
    );
    let ranges: Vec<_> = service.source_ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["198.51.100.0/24", "2001:db8:1::/48"]);
    assert_eq!((service.affinity, service.table_size, service.health_port), (Some(10_800), 4093, Some(30_000)));
    assert_eq!((service.external, service.internal), (Scope::Local, Scope::Cluster));
    // Health check ports are never SNAT ports.
    assert_eq!(got.set.vips[0].reserved_ports, [53, 80, 30_000]);
    assert_eq!(got.set.services.len(), 1);
}

#[test]
fn an_address_in_several_slices_is_merged() {
    let got = compiled(&[
        web("", ""),
        endpoint_slice(
            "s-a",
            "IPv4",
            "ports: [{name: dns, port: 5353, protocol: UDP}, {name: http, port: 53, protocol: UDP}]\n",
            "{addresses: [10.0.0.1], conditions: {ready: false}, hints: {forZones: [{name: z2}]}}",
        ),
        endpoint_slice(
            "s-b",
            "IPv4",
            "ports: [{name: http, port: 8080}]\n",
            "{addresses: [10.0.0.1], nodeName: n1, \
             hints: {forZones: [{name: z1}, {name: z2}], forNodes: [{name: n1}]}}",
        ),
        endpoint_slice("s-c", "IPv6", "ports: null\n", "{addresses: [\"fd00::1\"]}"),
    ]);
    assert_eq!(messages(&got), [""; 0]);
    let service = &got.placement.services[0];
    // A slice with all ports has no number for a named target port.
    assert_eq!(backends(service), ["10.0.0.1  [8080, 5353] 1 Ready n1 -", "fd00::1  [0, 5353] 1 Ready - -"]);
    let hints = service.backends[0].hints.as_ref().unwrap();
    assert_eq!((&hints.nodes, &hints.zones), (&vec!["n1".into()], &vec!["z1".into(), "z2".into()]));
}

#[test]
fn host_network_pods_are_backends_but_not_covered_endpoints() {
    let host = pod("a", "h", "", "192.168.0.1").replace("containers", "hostNetwork: true, containers");
    let got = compiled(&[service("s", "", 80, &["203.0.113.1"]), slice("s", &["192.168.0.1"]), host]);
    assert_eq!(messages(&got), [""; 0]);
    assert_eq!(backends(&got.placement.services[0]), ["192.168.0.1 a/s-192-168-0-1 [80] 1 Ready - -"]);
    assert!(got.set.endpoints.is_empty());
}

#[test]
fn a_service_without_an_assigned_vip_is_left_out() {
    let full = gateway_with("gw-a", "maxAddresses: 1");
    let got = compiled(&[
        full,
        service("s", "", 80, &["203.0.113.1", "203.0.113.2"]),
        service("t", "", 80, &[]),
        service("u", "", 80, &["203.0.113.3"]).replace("LoadBalancer,", "LoadBalancer, loadBalancerClass: other,"),
        service("v", "", 80, &["203.0.113.4"]).replace("LoadBalancer", "ClusterIP"),
    ]);
    let assigned = got.placement.vips[0].address;
    let vips: Vec<_> = got.placement.services.iter().map(|it| (&*it.name, it.vips.clone())).collect();
    assert_eq!(vips, [("Service a/s", vec![assigned])]);
    assert_eq!(got.placement.vips.len(), 1);
    let is_said = messages(&got).into_iter().any(|it| it.contains("no eligible gateway has capacity for this VIP:"));
    assert!(is_said, "{:?}", messages(&got));
}

#[test]
fn services_are_sorted_by_name() {
    let in_namespace = |namespace: &str, vip: &str| {
        service("s", "", 80, &[vip]).replace("namespace: a", &format!("namespace: {namespace}"))
    };
    let got = compiled(&[in_namespace("a", "203.0.113.1"), in_namespace("a-b", "203.0.113.2")]);
    assert!(got.placement.services.iter().is_sorted_by(|a, b| a.name < b.name), "{:?}", got.placement.services);
}

#[test]
fn a_port_or_vip_without_backends_is_a_warning() {
    let v4 = |ports: &str| endpoint_slice("s-4", "IPv4", ports, "{addresses: [10.0.0.1]}");
    let v6 = || endpoint_slice("s-6", "IPv6", PORTS, "{addresses: [\"fd00::1\"]}");
    let many: Vec<String> = (0..102).map(|i| format!("{{addresses: [10.0.1.{i}]}}")).collect();
    for (documents, expected) in [
        (
            vec![web("", ""), v4(&PORTS.replace("http", "htp")), v6().replace("http", "htp")],
            "m.yaml:4: spec.ports[0].name: warning: port `http` has no backend: no EndpointSlice has this port",
        ),
        (
            vec![service("s", "", 80, &["203.0.113.1"]), v4(PORTS)],
            "m.yaml:4: spec.ports[0].port: warning: TCP port 80 has no backend: no EndpointSlice has this port",
        ),
        (
            vec![web("", ""), v4(PORTS)],
            "m.yaml:5: status.loadBalancer.ingress[0].ip: warning: 2001:db8::1 has no backend: Service a/s has no IPv6 \
             endpoint",
        ),
        (
            vec![web("", ""), v6(), endpoint_slice("s-4", "IPv4", PORTS, &many.join(", "))],
            "m.yaml:3: metadata.annotations[vipgate.io/maglev-table-size]: warning: 102 IPv4 endpoints in a Maglev \
             table of 2039 slots spread sessions unevenly: set vipgate.io/maglev-table-size to a prime of at least \
             2040",
        ),
        (
            vec![web("", ", healthCheckNodePort: 30000")],
            "m.yaml:4: spec.healthCheckNodePort: warning: is used only with externalTrafficPolicy Local",
        ),
    ] {
        let got = compiled(&documents);
        assert!(
            messages(&got).iter().any(|message| message.starts_with(expected)),
            "expected {expected}\ngot {:#?}",
            messages(&got)
        );
        let (_, warnings) = got.accept().expect(expected);
        assert_eq!(warnings.len(), 1, "{warnings:#?}");
    }
    // No warnings while there are no endpoints at all.
    let empty = [
        web("", ""),
        endpoint_slice("s-4", "IPv4", "ports: null\n", ""),
        endpoint_slice("s-6", "IPv6", "ports: []\n", ""),
    ];
    assert_eq!(messages(&compiled(&empty)), [""; 0]);
}

/// Two Services with external traffic policy `Local`; the younger one sorts first by name.
fn two_services(younger: &str, older: &str) -> Vec<String> {
    let aged = |name: &str, year: u32, vip: &str, spec: &str| {
        service(name, &format!(", creationTimestamp: \"{year}-01-01T00:00:00Z\""), 80, &[vip])
            .replace("LoadBalancer", &format!("LoadBalancer, externalTrafficPolicy: Local{spec}"))
    };
    let vip = |spec: &str| if spec.contains("30000") { ["203.0.113.1", "203.0.113.2"] } else { ["203.0.113.1"; 2] };
    vec![aged("s", 2021, vip(younger)[1], younger), aged("t", 2020, "203.0.113.1", older)]
}

#[test]
fn in_a_conflict_of_two_services_the_older_one_takes_precedence() {
    for (documents, expected) in [
        (
            two_services("", ""),
            "m.yaml:4: spec.ports[0].port: TCP port 80 of 203.0.113.1 is already used by Service a/t (m.yaml:7)",
        ),
        (
            two_services(", healthCheckNodePort: 30000", ", healthCheckNodePort: 30000"),
            "m.yaml:4: spec.healthCheckNodePort: port 30000 is already the health check port of Service a/t (m.yaml:7)",
        ),
    ] {
        let got = compiled(&documents);
        assert_eq!(messages(&got), [expected]);
        assert!(got.accept().is_err());
    }
    // Health checks are reachable at the VIPs, too.
    let conflicting = service("s", "", 80, &["203.0.113.1"])
        .replace("LoadBalancer", "LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 80");
    assert_eq!(
        messages(&compiled(&[conflicting])),
        ["m.yaml:4: spec.healthCheckNodePort: TCP port 80 of 203.0.113.1 is already used by Service a/s (m.yaml:1)"]
    );
}

/// Annotations and fields of the spec, and the beginning of the error.
const INVALID_SERVICES: &[(&str, &str, &str)] = &[
    (
        "vipgate.io/maglev-table-size: \"2040\"",
        "",
        "m.yaml:3: metadata.annotations[vipgate.io/maglev-table-size]: must be a prime from 7 to 131071, e.g. \
         \"4093\", is \"2040\"",
    ),
    (
        "vipgate.io/maglev-table-size: \"5\"",
        "",
        "m.yaml:3: metadata.annotations[vipgate.io/maglev-table-size]: must be",
    ),
    (
        "vipgate.io/maglev-table-size: \"131101\"",
        "",
        "m.yaml:3: metadata.annotations[vipgate.io/maglev-table-size]: must be",
    ),
    (
        "vipgate.io/maglev-table-size: \"x\"",
        "",
        "m.yaml:3: metadata.annotations[vipgate.io/maglev-table-size]: must be",
    ),
    ("", ", sessionAffinity: Cookie", "m.yaml:4: spec.sessionAffinity: `Cookie` is unknown, expected None or ClientIP"),
    (
        "",
        ", sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}",
        "m.yaml:4: spec.sessionAffinityConfig.clientIP.timeoutSeconds: must be from 1 to 86400 seconds, is 86401",
    ),
    (
        "",
        ", externalTrafficPolicy: local",
        "m.yaml:4: spec.externalTrafficPolicy: `local` is unknown, expected Cluster or Local",
    ),
    ("", ", internalTrafficPolicy: Node", "m.yaml:4: spec.internalTrafficPolicy: `Node` is unknown"),
    (
        "",
        ", loadBalancerSourceRanges: [10.0.0.0/8, 10.0.0.1]",
        "m.yaml:4: spec.loadBalancerSourceRanges[1]: `10.0.0.1` is not a prefix",
    ),
    ("", ", healthCheckNodePort: 70000", "m.yaml:4: spec.healthCheckNodePort: must be from 1 to 65535, is 70000"),
];

#[test]
fn an_invalid_field_of_a_service_is_an_error() {
    for (annotations, spec, expected) in INVALID_SERVICES {
        let got = compiled(&[web(annotations, spec)]);
        assert!(
            messages(&got).iter().any(|message| message.starts_with(expected)),
            "expected {expected}\ngot {:#?}",
            messages(&got)
        );
        assert!(got.accept().is_err(), "{expected}");
    }
}

#[test]
fn an_invalid_port_is_an_error() {
    for (from, to, expected) in [
        (
            "protocol: UDP",
            "protocol: DCCP",
            "m.yaml:4: spec.ports[1].protocol: `DCCP` is unknown, expected TCP, UDP or SCTP",
        ),
        (
            "targetPort: 5353",
            "targetPort: 65536",
            "m.yaml:4: spec.ports[1].targetPort: must be from 1 to 65535, is 65536",
        ),
    ] {
        assert_eq!(messages(&compiled(&[web("", "").replace(from, to)])), [expected]);
    }
    assert_eq!(
        messages(&compiled(&[endpoint_slice("s-4", "IPv4", "ports: [{port: 0}, {protocol: x}]\n", "")])),
        [
            "m.yaml:5: ports[0].port: must be from 1 to 65535, is 0",
            "m.yaml:5: ports[1].protocol: `x` is unknown, expected TCP, UDP or SCTP"
        ]
    );
}

#[test]
fn an_invalid_weight_is_an_error() {
    let weight = |text: &str| {
        compiled(&[pod("a", "x", "", "10.0.0.1").replace("labels", &format!("annotations: {{{text}}}, labels"))])
    };
    assert_eq!(
        messages(&weight("vipgate.io/weight: \"257\"")),
        ["m.yaml:3: metadata.annotations[vipgate.io/weight]: must be a number from 0 to 256, is \"257\""]
    );
    assert_eq!(
        messages(&weight("vipgate.io/wieght: \"2\"")),
        ["m.yaml:3: metadata.annotations[vipgate.io/wieght]: warning: unknown annotation, did you mean \
             vipgate.io/weight?"]
    );
}

/// Gateways reject an update with an unprintable name as a whole, so the compiler must reject the name.
#[test]
fn an_invalid_name_is_an_error() {
    let with_endpoint = |endpoint: &str| {
        let slice = endpoint_slice(
            "s-4",
            "IPv4",
            "ports: [{name: \"\\a\"}]\n",
            &format!("{{addresses: [10.0.0.1], {endpoint}}}"),
        );
        messages(&compiled(&[slice]))
    };
    let why = "is not a valid name: longer than 253 bytes, or not printable";
    assert_eq!(
        with_endpoint(
            "nodeName: \"\\n\", zone: \"\\t\", \
             hints: {forNodes: [{name: \"\\e\"}], forZones: [{name: a}, {name: \"\\0\"}]}"
        ),
        [
            format!("m.yaml:5: ports[0].name: {why}"),
            format!("m.yaml:6: endpoints[0].nodeName: {why}"),
            format!("m.yaml:6: endpoints[0].zone: {why}"),
            format!("m.yaml:6: endpoints[0].hints.forNodes[0].name: {why}"),
            format!("m.yaml:6: endpoints[0].hints.forZones[1].name: {why}"),
        ]
    );
    assert_eq!(
        messages(&compiled(&[web("", "").replace("name: http", &format!("name: {}", "x".repeat(254)))])),
        [format!("m.yaml:4: spec.ports[0].name: {why}")]
    );
}

#[test]
fn a_backend_that_is_a_vip_is_ignored_with_a_warning() {
    let got = compiled(&[
        service("s", "", 80, &["203.0.113.1"]),
        service("t", "", 80, &["203.0.113.2"]),
        slice("t", &["203.0.113.1", "10.0.0.1"]),
    ]);
    let expected = "m.yaml:17: endpoints[0].addresses[0]: warning: 203.0.113.1 is a VIP, not a pod address: ignored";
    assert!(messages(&got).contains(&expected.to_owned()), "{:#?}", messages(&got));
    assert_eq!(got.placement.services[1].backends.len(), 1);
    assert!(got.accept().is_ok(), "the Service with this VIP has it");
}

#[test]
fn a_gateway_without_a_configured_zone_has_that_of_its_manifest() {
    let hinted = |zone: &str| format!("{{addresses: [10.0.0.{zone}], hints: {{forZones: [{{name: z{zone}}}]}}}}");
    let got = compiled(&[
        gateway_with("gw-a", "zone: z1"),
        service("s", "", 80, &["203.0.113.1"]),
        endpoint_slice("s-4", "IPv4", "ports: null\n", &format!("{}, {}", hinted("1"), hinted("2"))),
    ]);
    let eligible = |gateway: &GatewayLocality| -> Vec<bool> {
        let set = policy_for(&got.placement, Some(gateway), "");
        set.services[0].backends.iter().map(|backend| backend.external).collect()
    };
    let gateway = GatewayLocality::named("gw-a");
    assert_eq!(eligible(&gateway), [true, false]);
    assert_eq!(eligible(&GatewayLocality { zone: "z2".into(), ..gateway.clone() }), [false, true]);
    assert_eq!(eligible(&GatewayLocality::named("gw-b")), [true, true]);
    assert_eq!(got.set.services[0].backends[0].state, BackendState::Ready);
}

#[test]
fn a_vip_of_two_namespaces_is_a_warning_that_names_both() {
    let service = |namespace: &str, name: &str, port: u16| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             spec: {{type: LoadBalancer, ports: [{{port: {port}}}]}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.1}}]}}}}\n"
        )
    };
    let got = compiled(&[service("t", "api", 80), service("t", "web", 81)]);
    assert_eq!(messages(&got), Vec::<String>::new(), "both in one namespace");
    let got = compiled(&[service("t", "api", 80), service("t", "web", 81), service("u", "api", 82)]);
    assert_eq!(
        messages(&got),
        ["m.yaml:17: status.loadBalancer.ingress[0].ip: warning: 203.0.113.1 is also the VIP of Service t/api \
             (m.yaml:1): two namespaces share it"]
    );
    assert_eq!(got.placement.services.len(), 3, "a warning only");
}
