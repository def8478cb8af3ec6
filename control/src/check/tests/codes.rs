//! Every code is reported for the mistake that it is about, and not for the correction of its example.

use std::collections::BTreeSet;

use vipgate_policy::compiler::Tenancy;
use vipgate_policy::diagnostic::Example;
use vipgate_policy::yaml::decode;

use super::*;
use crate::schema::Published;

/// Codes that a check doesn't report in tests, and why.
const UNREACHED: [(Code, &str); 5] = [
    (Code::LimitExceeded, "takes thousands of objects: see the tests of the compiler"),
    (Code::AddressQuarantined, "of a process with a record: see the tests of the compiler"),
    (Code::AddressPending, "of a process with a record: see the tests of the compiler"),
    (Code::NoSystemAuthorities, "depends on the system"),
    (Code::SourceUnavailable, "of a running process: see source/store/tests"),
];

/// Codes of the diagnostics of one file; manifests are found in their directory, as configuration isn't.
fn codes(name: &str, text: &str) -> BTreeSet<Code> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(name);
    write(&file, text).unwrap();
    let path = if name == "m.yaml" { dir.path().to_owned() } else { file };
    // What one tenancy refuses is another mistake with the other one.
    let of = |tenancy| run(std::slice::from_ref(&path), Some(tenancy)).diagnostics;
    [Tenancy::Open, Tenancy::Strict].into_iter().flat_map(of).map(|it| it.code).collect()
}

/// The document around the text of an example.
fn document(kind: &str, text: &str) -> (&'static str, String) {
    let with = |defaults: &[(&str, &str)]| {
        let missing = defaults.iter().filter(|(key, _)| !text.lines().any(|line| line.starts_with(&format!("{key}:"))));
        let lines: Vec<String> = missing.map(|(key, value)| format!("{key}: {value}\n")).collect();
        lines.concat() + text + "\n"
    };
    let api = Published::ALL.iter().any(|it| it.name() == kind);
    match kind {
        "gateway.yaml" => {
            let interfaces = ("interfaces", "[{name: eth0, role: both}]");
            ("gateway.yaml", with(&[("name", "gw-a"), interfaces, ("policy", "{files: [.]}")]))
        }
        "policyd.yaml" => {
            let source = ("source", "{etcd: {endpoints: [\"http://127.0.0.1:2379\"]}}");
            ("policyd.yaml", with(&[("listen", "\"127.0.0.1:18000\""), source]))
        }
        _ => {
            let version = match kind {
                "EndpointSlice" => "discovery.k8s.io/v1",
                _ if api => "vipgate.io/v1alpha1",
                _ => "v1",
            };
            ("m.yaml", with(&[("apiVersion", version), ("kind", kind), ("metadata", "{name: x}")]))
        }
    }
}

#[test]
fn examples_of_codes_show_the_mistake_and_its_correction() {
    for code in Code::ALL {
        let Some(Example { document: kind, wrong, right }) = code.example() else { continue };
        let (name, text) = document(kind, wrong);
        assert!(codes(name, &text).contains(code), "{code} is not reported for\n{text}got {:?}", codes(name, &text));
        let (name, text) = document(kind, right);
        // Other mistakes are those of an example without its surroundings, e.g. a missing Service.
        assert!(!codes(name, &text).contains(code), "{code} is reported for\n{text}");
    }
}

/// Manifests of the codes without an example, as documents `kind name: fields`.
const CONFLICTS: [(Code, &[&str]); 35] = [
    (Code::NotAnObject, &["- 1"]),
    (Code::TruncatedList, &["apiVersion: v1\nitems: [{apiVersion: v1, kind: Node, metadata: {name: n}}]"]),
    (Code::DuplicateObject, &["Namespace n", "Namespace n"]),
    (Code::NoSuchService, &["EgressPolicy p: {spec: {serviceRef: {name: s}}}"]),
    (Code::ServiceWithoutVip, &[r#"Service s: {metadata: {annotations: {vipgate.io/egress: "true"}}}"#]),
    (Code::NoPodSelected, &["EgressPolicy p: {spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.1]}}"]),
    (Code::NoSuchPool, &["EgressPolicy p: {spec: {selectors: [{podSelector: {}}], pools: [{name: q}]}}"]),
    (
        Code::PoolExhausted,
        &[
            "EgressPolicy p: {spec: {selectors: [{podSelector: {}}], pools: [{name: q, count: 2}]}}",
            "AddressPool q: {spec: {ranges: [203.0.113.0/32]}}",
        ],
    ),
    (
        Code::NamespaceLimit,
        &[
            "EgressPolicy p: {spec: {selectors: [{podSelector: {}}], pools: [{name: q, count: 2}]}}",
            "AddressPool q: {spec: {ranges: [203.0.113.0/28], maxPerNamespace: 1}}",
        ],
    ),
    (Code::PoliciesOverlap, &[POLICY_P, POLICY_Q, POD]),
    (Code::NoVipOfFamily, &[POLICY_P, r#"Pod x: {spec: {}, status: {podIPs: [{ip: "fd00::1"}]}}"#]),
    (Code::VipInUse, &["Pod x: {spec: {}, status: {podIPs: [{ip: 203.0.113.1}]}}", POLICY_P]),
    (
        Code::VipOfTwoPolicies,
        &[POLICY_P, "EgressPolicy q: {spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.1]}}"],
    ),
    (Code::VipOfOtherNamespace, &[POLICY_P, SERVICE_B]),
    (
        Code::HostAddress,
        &[
            "EgressPolicy p: {spec: {serviceRef: {name: s}}}",
            SERVICE,
            SLICE,
            "Node n: {status: {addresses: [{type: InternalIP, address: 10.0.0.1}]}}",
        ],
    ),
    (Code::DuplicatePodAddress, &[POD, "Pod y: {spec: {}, status: {podIPs: [{ip: 10.0.0.1}]}}"]),
    (
        Code::PodsOfOtherNamespace,
        &[
            "EgressPolicy p: {spec: {selectors: [{namespaceSelector: {}, podSelector: {}}], addresses: [203.0.113.1]}}",
            "Pod x: {metadata: {namespace: b}, spec: {}, status: {podIPs: [{ip: 10.0.0.1}]}}",
        ],
    ),
    (
        Code::PoolOfOtherNamespaces,
        &[POLICY_P, "AddressPool q: {spec: {ranges: [203.0.113.0/28], namespaces: {matchLabels: {tier: gold}}}}"],
    ),
    (Code::AddressOutsidePools, &[POLICY_P]),
    (
        Code::SliceAddressOfOther,
        &[SERVICE, SLICE, "Pod x: {metadata: {namespace: b}, spec: {}, status: {podIPs: [{ip: 10.0.0.1}]}}"],
    ),
    (Code::AddressIsVip, &[SERVICE, "Node n: {status: {addresses: [{type: InternalIP, address: 203.0.113.1}]}}"]),
    (Code::PortConflict, &[SERVICE, SERVICE_B]),
    (
        Code::AnnounceConflict,
        &[
            "Service s: {metadata: {annotations: {vipgate.io/announce: L2}}, spec: {type: LoadBalancer}, status: \
             {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}}",
            BGP_SERVICE,
        ],
    ),
    (Code::AnnounceOverridden, &[BGP_SERVICE, "AddressPool q: {spec: {ranges: [203.0.113.0/28]}}"]),
    (Code::VipOfTwoNamespaces, &[SERVICE, SERVICE_B]),
    (Code::PortWithoutBackend, &[SERVICE, SLICE]),
    (
        Code::VipWithoutBackend,
        &["Service s: {spec: {type: LoadBalancer}, status: {loadBalancer: {ingress: [{ip: \"2001:db8::1\"}]}}}", SLICE],
    ),
    (
        Code::BackendIsVip,
        &[
            SERVICE,
            "EndpointSlice s: {metadata: {labels: {kubernetes.io/service-name: s}}, \
                                     addressType: IPv4, endpoints: [{addresses: [203.0.113.1]}]}",
        ],
    ),
    (Code::HealthCheckPortConflict, &[LOCAL_SERVICE, LOCAL_SERVICE_T]),
    (
        Code::NoSuchGateway,
        &["EgressPolicy p: {spec: {serviceRef: {name: s}, gateways: {names: [gw-z]}}}", "VipGateway gw-a: {spec: {}}"],
    ),
    (
        Code::NoGatewaySelected,
        &[
            "EgressPolicy p: {spec: {serviceRef: {name: s}, gateways: {selector: {matchLabels: {a: b}}}}}",
            "VipGateway gw-a: {spec: {}}",
        ],
    ),
    (Code::NoPeerAddress, &["VipGateway gw-a: {spec: {}}", "VipGateway gw-b: {spec: {}}"]),
    (
        Code::DuplicatePeerAddress,
        &["VipGateway gw-a: {spec: {peerAddress: 192.0.2.1}}", "VipGateway gw-b: {spec: {peerAddress: 192.0.2.1}}"],
    ),
    (
        Code::NoEligibleGateway,
        &[
            "EgressPolicy p: {spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.1], gateways: {names: \
             [gw-z]}}}",
            POD,
            "VipGateway gw-a: {spec: {}}",
        ],
    ),
    (
        Code::NoGatewayInZone,
        &[
            "EgressPolicy p: {spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.1], zoneAffinity: Require}}",
            POD,
            "VipGateway gw-a: {spec: {zone: a}}",
        ],
    ),
];

const POLICY_P: &str = "EgressPolicy p: {spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.1]}}";
const POLICY_Q: &str = "EgressPolicy q: {spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.2]}}";
const POD: &str = "Pod x: {spec: {}, status: {podIPs: [{ip: 10.0.0.1}]}}";
const SERVICE: &str = "Service s: {spec: {type: LoadBalancer, ports: [{port: 80}]}, status: {loadBalancer: {ingress: \
                       [{ip: 203.0.113.1}]}}}";
const SERVICE_B: &str = "Service s: {metadata: {namespace: b}, spec: {type: LoadBalancer, ports: [{port: 80}]}, \
                         status: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}}";
const BGP_SERVICE: &str = "Service t: {metadata: {annotations: {vipgate.io/announce: BGP}}, spec: {type: \
                           LoadBalancer}, status: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}}";
const LOCAL_SERVICE: &str = "Service s: {spec: {type: LoadBalancer, externalTrafficPolicy: Local, \
                             healthCheckNodePort: 30000}, status: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}}";
const LOCAL_SERVICE_T: &str = "Service t: {spec: {type: LoadBalancer, externalTrafficPolicy: Local, \
                               healthCheckNodePort: 30000}, status: {loadBalancer: {ingress: [{ip: 203.0.113.2}]}}}";
const SLICE: &str = "EndpointSlice s: {metadata: {labels: {kubernetes.io/service-name: s}}, addressType: IPv4, ports: \
                     [], endpoints: [{addresses: [10.0.0.1]}]}";

/// A document from its short form `kind name: fields`; other texts are documents already.
fn expanded(text: &str) -> String {
    let (head, fields) = text.split_once(": ").unwrap_or((text, "{}"));
    let Some((kind, name)) = head.split_once(' ') else { return text.to_owned() };
    if kind == "-" {
        return text.to_owned();
    }
    let mut object: serde_json::Value = decode(&Source::new("x", fields.to_owned()).first_document().unwrap()).unwrap();
    let (_, base) = document(kind, "");
    let base: serde_json::Value = decode(&Source::new("x", base).first_document().unwrap()).unwrap();
    for (key, value) in base.as_object().unwrap() {
        if object.get(key).is_none() {
            object[key] = value.clone();
        }
    }
    object["metadata"]["name"] = name.into();
    object.to_string()
}

/// Codes of texts that are no manifests in short form: repetitions, and files that can't be read.
fn codes_of_large_and_missing_files() -> BTreeSet<Code> {
    let many_slices = (0..102).map(|i| format!("{{addresses: [10.0.1.{i}]}}")).collect::<Vec<_>>().join(", ");
    let slice = SLICE.replace("{addresses: [10.0.0.1]}", &many_slices).replace("ports: [], ", "");
    let ports = (1..=4097).map(|port| format!("{{name: p{port}, port: {port}}}")).collect::<Vec<_>>().join(", ");
    let large = SERVICE.replace("{port: 80}", &ports);
    let node = "mac: 0a:58:0a:f4:01:00, vni: 1, address: 192.0.2.1, podCIDRs: [10.0.0.0/24]";
    let nodes = [format!("OverlayNode a: {{spec: {{{node}}}}}"), format!("OverlayNode b: {{spec: {{{node}}}}}")];
    let texts = [
        ("m.yaml", "a: 1\na: 2\n---\n".repeat(101)),
        ("m.yaml", format!("a: &a {}\nb: [{}]\n---\n", "x".repeat(10_000), ["*a"; 20].join(",")).repeat(50)),
        ("m.yaml", [expanded(SERVICE), expanded(&slice)].join("\n---\n")),
        ("m.yaml", expanded(&large)),
        ("m.yaml", nodes.map(|node| expanded(&node)).join("\n---\n")),
        ("gateway.yaml", document("gateway.yaml", "policy: {files: [/nonexistent]}").1),
    ];
    texts.iter().flat_map(|(name, text)| codes(name, text)).collect()
}

/// Codes of manifests for a policy server whose nodes run the agent.
fn codes_of_node_agents() -> BTreeSet<Code> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path().join("policyd.yaml"), document("policyd.yaml", "node_agents: {}").1).unwrap();
    write(dir.path().join("m.yaml"), "apiVersion: v1\nkind: Node\nmetadata: {name: n}\n").unwrap();
    let report = run(&[dir.path().to_owned()], None);
    report.diagnostics.iter().map(|it| it.code).collect()
}

/// Codes of certificates: expired, of another name, not PEM, and with the key of another one.
fn codes_of_certificates() -> BTreeSet<Code> {
    let ca = Authority::new("ca");
    let (good, other, expired) = (ca.issue(&["gw-a"]), ca.issue(&["gw-b"]), ca.issue_expired(&["gw-a"]));
    let mixed = Identity { cert: good.cert.clone(), key: other.key.clone() };
    let files = [(ca.ca(), &other), (ca.ca(), &expired), (ca.ca(), &mixed), (ca.file("x.pem", "x"), &good)];
    files.iter().flat_map(|(ca, own)| codes("gateway.yaml", &gateway_with_tls(ca, own))).collect()
}

#[test]
fn every_code_is_reported_for_its_mistake() {
    let mut reached: BTreeSet<Code> = Code::ALL.iter().copied().filter(|code| code.example().is_some()).collect();
    for (code, documents) in CONFLICTS {
        let text = documents.iter().map(|document| expanded(document)).collect::<Vec<_>>().join("\n---\n");
        let got = codes("m.yaml", &text);
        assert!(got.contains(&code), "{code} ({}) is not reported for\n{text}\ngot {got:?}", code.title());
        reached.insert(code);
    }
    reached.extend(codes_of_large_and_missing_files());
    reached.extend(codes_of_certificates());
    reached.extend(codes_of_node_agents());
    // An empty file among others is no configuration; as the configuration of a process it is an error.
    reached.extend(Config::parse("gateway.yaml", "").unwrap_err().0.iter().map(|it| it.code));
    let missing: Vec<_> = Code::ALL.iter().filter(|code| !reached.contains(code)).map(ToString::to_string).collect();
    assert_eq!(missing, UNREACHED.map(|(code, _)| code.to_string()), "codes that no test reports");
}

#[test]
fn the_code_is_at_the_end_of_the_line_and_a_field_of_the_json() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gateway.yaml");
    write(&file, document("gateway.yaml", "workers: {core: [0]}").1).unwrap();
    let report = run(std::slice::from_ref(&file), None);
    let text = report.diagnostics[0].to_string();
    let start = format!("{}:4: workers.core: unknown field, did you mean `cores`?", file.display());
    assert!(text.starts_with(&start) && text.ends_with(" [VG0106]"), "{text}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["diagnostics"][0]["code"], "VG0106");
    assert_eq!(json["diagnostics"][0]["field"], "workers.core");
}
