//! Invalid and suspicious policies: errors and warnings with file, line and field.

use super::*;

/// Compiles documents and expects a diagnostic that starts with `expected`.
fn expect_diagnostic(documents: &[String], expected: &str) -> Outcome {
    let got = compiled(documents);
    let messages = messages(&got);
    assert!(messages.iter().any(|it| it.starts_with(expected)), "expected {expected}\ngot {messages:#?}");
    got
}

fn selecting(name: &str, addresses: &str) -> String {
    policy(name, "", &format!("{{selectors: [{{podSelector: {{}}}}], addresses: [{addresses}]}}"))
}

/// Compiles documents and expects errors that start with the given texts.
fn expect_errors(cases: &[(Vec<String>, &str)]) {
    for (documents, expected) in cases {
        let got = expect_diagnostic(documents, expected);
        assert!(got.accept().is_err(), "{expected}: must be an error");
    }
}

#[test]
fn an_invalid_service_or_vip_is_an_error_with_line_field_and_reason() {
    let s = || service("s", EGRESS, 80, &["203.0.113.10"]);
    expect_errors(&[
        (
            vec![s().replace("type: LoadBalancer", "type: LoadBalancer, loadBalancerClass: other")],
            "m.yaml:3: metadata.annotations[vipgate.io/egress]: Service a/s has no egress VIP: its loadBalancerClass \
             is other",
        ),
        (
            vec![s().replace("\"true\"", "\"True\"")],
            "m.yaml:3: metadata.annotations[vipgate.io/egress]: must be \"true\" or \"false\", is \"True\"",
        ),
        (
            vec![service("s", ", annotations: {vipgate.io/announce: bgp}", 80, &["203.0.113.10"])],
            "m.yaml:3: metadata.annotations[vipgate.io/announce]: must be \"L2\" or \"BGP\", is \"bgp\"",
        ),
        (
            vec![service("s", "", 80, &["203.0.113.256"])],
            "m.yaml:5: status.loadBalancer.ingress[0].ip: `203.0.113.256` is not an IP address",
        ),
        (
            vec![service("s", "", 80, &["203.0.113.1", "224.0.0.1"])],
            "m.yaml:5: status.loadBalancer.ingress[1].ip: 224.0.0.1 can't be a VIP: it is a multicast address",
        ),
        (
            vec![service("s", "", 80, &["10.0.0.1"]), pod("a", "x", "", "10.0.0.1")],
            "m.yaml:5: status.loadBalancer.ingress[0].ip: 10.0.0.1 can't be a VIP: it is the address of Pod a/x",
        ),
        (
            vec![service("s", "", 80, &["192.0.2.97"]), gateway("gw-a", "")],
            "m.yaml:5: status.loadBalancer.ingress[0].ip: 192.0.2.97 can't be a VIP: it is the peer address of VipGateway gw-a",
        ),
        (vec![service("s", "", 0, &["203.0.113.1"])], "m.yaml:4: spec.ports[0].port: must be from 1 to 65535, is 0"),
        (
            vec![service("s", "", 80, &["203.0.113.1"]), service("t", "", 80, &["203.0.113.1"])],
            "m.yaml:10: spec.ports[0].port: TCP port 80 of 203.0.113.1 is already used by Service a/s (m.yaml:1)",
        ),
        (
            vec![
                service("s", ", annotations: {vipgate.io/announce: L2}", 80, &["203.0.113.1"]),
                service("t", ", annotations: {vipgate.io/announce: BGP}", 81, &["203.0.113.1"]),
            ],
            "m.yaml:9: metadata.annotations[vipgate.io/announce]: Service a/s (m.yaml:1) shares 203.0.113.1 and has L2",
        ),
    ]);
}

#[test]
fn an_invalid_endpoint_is_an_error_with_line_field_and_reason() {
    expect_errors(&[
        (
            vec![slice("s", &["10.0.0.1", "10.0.0.300"])],
            "m.yaml:5: endpoints[1].addresses[0]: `10.0.0.300` is not an IP address",
        ),
        (
            vec![slice("s", &["10.0.0.1", "fd00::1"])],
            "m.yaml:5: endpoints[1].addresses[0]: fd00::1 is not IPv4, the slice's addressType",
        ),
        (vec![slice("s", &["127.0.0.1"])], "m.yaml:5: endpoints[0].addresses[0]: 127.0.0.1 is a loopback address"),
        (vec![slice("s", &["10.0.0.1"]).replace("IPv4", "ipv4")], "m.yaml:4: addressType: `ipv4` is unknown"),
        (vec![pod("a", "x", "", "10.0.0")], "m.yaml:5: status.podIPs[0].ip: `10.0.0` is not an IP address"),
        (vec![pod("a", "x", "", "169.254.0.1")], "m.yaml:5: status.podIPs[0].ip: 169.254.0.1 is a link-local address"),
    ]);
}

#[test]
fn an_invalid_policy_or_pool_is_an_error_with_line_field_and_reason() {
    let s = || service("s", EGRESS, 80, &["203.0.113.10"]);
    let x = || pod("a", "x", "", "10.0.0.1");
    let by_service = || policy("p", "", "{serviceRef: {name: s}}");
    let by_pool = |pool: &str| policy("p", "", &format!("{{selectors: [{{podSelector: {{}}}}], pools: [{pool}]}}"));
    expect_errors(&[
        (vec![s(), s()], "m.yaml:9: metadata.name: Service a/s is already defined in m.yaml:1"),
        (vec![by_service()], "m.yaml:4: spec.serviceRef.name: there is no Service a/s"),
        (
            vec![by_service(), s().replace("type: LoadBalancer", "type: NodePort").replace("true", "false")],
            "m.yaml:4: spec.serviceRef.name: Service a/s (m.yaml:6) has no egress VIP: its type is NodePort",
        ),
        (
            vec![selecting("p", "203.0.113.9"), selecting("q", "203.0.113.8, 203.0.113.9"), x()],
            "m.yaml:9: spec.addresses[1]: 203.0.113.9 is already a VIP of EgressPolicy a/p (m.yaml:1)",
        ),
        (
            vec![selecting("p", "203.0.113.10"), x(), s().replace("namespace: a", "namespace: b")],
            "m.yaml:4: spec.addresses[0]: 203.0.113.10 is the VIP of Service b/s, in another namespace",
        ),
        (
            vec![selecting("p", "10.0.0.1"), x()],
            "m.yaml:4: spec.addresses[0]: 10.0.0.1 can't be a VIP: it is the address of Pod a/x",
        ),
        (
            vec![selecting("p", "\"fe80::1\""), x()],
            "m.yaml:4: spec.addresses[0]: fe80::1 can't be a VIP: it is a link-local address",
        ),
        (vec![by_pool("{name: public}"), x()], "m.yaml:4: spec.pools[0].name: there is no AddressPool public"),
        (
            vec![by_pool("{name: public, count: 3}"), x(), pool("public", "{ranges: [203.0.113.0/31]}")],
            "m.yaml:4: spec.pools[0]: AddressPool public has fewer than 3 free IPv4 addresses",
        ),
        (
            vec![pool("one", "{ranges: [203.0.113.0/24]}"), pool("two", "{ranges: [198.51.100.0/24, 203.0.113.7/32]}")],
            "m.yaml:9: spec.ranges[1]: 203.0.113.7-203.0.113.7 overlaps 203.0.113.0-203.0.113.255 of AddressPool one \
             (m.yaml:1)",
        ),
    ]);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn suspicious_policies_are_accepted_with_a_warning() {
    let s = || service("s", EGRESS, 80, &["203.0.113.10"]);
    let host = pod("a", "h", "", "10.0.0.9").replace("containers", "hostNetwork: true, containers");
    for (documents, expected) in [
        (
            vec![policy("p", "", "{serviceRef: {name: s}}"), service("s", "", 80, &[])],
            "m.yaml:4: spec.serviceRef.name: warning: Service a/s (m.yaml:6) has no egress VIP: \
             its status.loadBalancer.ingress has no address",
        ),
        (
            vec![service("s", EGRESS, 80, &[])],
            "m.yaml:3: metadata.annotations[vipgate.io/egress]: warning: Service a/s has no egress VIP: its status",
        ),
        (
            vec![s(), slice("s", &["fd00::1", "fd00::2"]), slice("s", &["10.0.0.1"])],
            "m.yaml:5: status.loadBalancer.ingress: warning: Service a/s has no IPv6 VIP: the traffic of 2 endpoints \
             (the first is fd00::1) is dropped",
        ),
        (
            vec![selecting("p", "203.0.113.9"), pod("a", "x", "", "fd00::1")],
            "m.yaml:4: spec.addresses: warning: EgressPolicy a/p has no IPv6 VIP: the traffic of endpoint fd00::1 is \
             dropped",
        ),
        (
            vec![selecting("p", "203.0.113.9")],
            "m.yaml:4: spec.selectors[0]: warning: selects no pod that has an address",
        ),
        (
            vec![s(), slice("s", &["10.0.0.9"]), host],
            "m.yaml:11: endpoints[0].addresses[0]: warning: 10.0.0.9 is a host address, not a pod address: \
             ignored",
        ),
        (
            vec![pod("a", "x", "", "10.0.0.1"), pod("a", "y", "", "10.0.0.1")],
            "m.yaml:11: status.podIPs[0].ip: warning: 10.0.0.1 is also the address of Pod a/x",
        ),
        (
            vec![service("s", "", 80, &["10.0.0.1"]), slice("s", &["10.0.0.1"]).replace("name: s-1", "name: t-1")],
            "m.yaml:11: endpoints[0].addresses[0]: warning: 10.0.0.1 is a VIP, not a pod address: ignored",
        ),
        (
            vec![
                service("s", "", 80, &["192.168.0.1"]),
                "apiVersion: v1\nkind: Node\nmetadata: {name: n}\n\
                 status: {addresses: [{type: InternalIP, address: 192.168.0.1}]}\n"
                    .into(),
            ],
            "m.yaml:10: status.addresses[0].address: warning: 192.168.0.1 is a VIP: the address is ignored",
        ),
        (
            vec![
                service("s", "", 80, &["10.0.0.1"]),
                pod("a", "x", "", "10.0.0.1"),
                pool("p", "{ranges: [10.0.0.0/30]}"),
            ],
            "m.yaml:11: status.podIPs[0].ip: warning: 10.0.0.1 is a VIP: the address is ignored",
        ),
        (
            vec![slice("s", &["10.0.0.1"]).replace("kubernetes.io/service-name: s", "")],
            "m.yaml:3: metadata.labels: warning: has no label",
        ),
        (
            vec![service("s", ", annotations: {vipgate.io/egres: \"true\"}", 80, &["203.0.113.10"])],
            "m.yaml:3: metadata.annotations[vipgate.io/egres]: warning: unknown annotation, did you mean \
             vipgate.io/egress?",
        ),
        (vec![slice("s", &["10.0.0.1"]).replace("IPv4", "FQDN")], "m.yaml:4: addressType: warning: "),
        (
            vec![s(), policy("p", "", "{serviceRef: {name: s}, gateways: {names: [gw-a, gw-z]}}"), gateway("gw-a", "")],
            "m.yaml:10: spec.gateways.names[1]: warning: there is no VipGateway gw-z",
        ),
    ] {
        let got = expect_diagnostic(&documents, expected);
        let (_, warnings) = got.accept().expect(expected);
        assert_eq!(warnings.len(), 1, "{warnings:#?}");
    }
}

#[test]
fn endpoints_of_an_invalid_policy_stay_covered_without_a_vip() {
    for documents in [
        vec![policy("p", "", "{serviceRef: {name: s}}"), slice("s", &["10.0.0.1", "10.0.0.2"])],
        vec![service("s", EGRESS, 80, &[]), slice("s", &["10.0.0.1", "10.0.0.2"])],
        vec![
            policy("p", "", "{selectors: [{podSelector: {}}], pools: [{name: none}]}"),
            pod("a", "x", "", "10.0.0.1"),
            pod("a", "y", "", "10.0.0.2"),
        ],
    ] {
        let got = compiled(&documents);
        assert_eq!(got.diagnostics.len(), 1, "{:#?}", messages(&got));
        assert_eq!(got.set.endpoints.len(), 2);
        assert!(got.set.endpoints.iter().all(|endpoint| endpoint.vips.is_empty()));
    }
}

#[test]
fn a_diagnostic_about_an_item_of_a_list_names_the_item() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: s}\n  \
                spec:\n    type: LoadBalancer\n    ports:\n    - port: 80\n    - port: 70000\n";
    let got = compiled_manifests(&manifests(text), None);
    assert_eq!(messages(&got), ["m.yaml:11: items[0].spec.ports[1].port: must be from 1 to 65535, is 70000"]);
}
