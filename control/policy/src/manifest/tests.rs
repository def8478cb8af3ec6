//! Reading of manifests: accepted documents, and errors with line, field and reason.

use serde_json::json;

use super::*;
use crate::manifest::schema::tests::{assert_accepted, is_rejected};

fn manifests(text: &str, unsupported: UnsupportedKinds) -> Manifests {
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new("m.yaml", text.to_owned())), unsupported, &mut manifests);
    manifests
}

fn policy(spec: &str) -> String {
    format!("apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: p, namespace: a}}\nspec:\n{spec}")
}

#[test]
fn every_field_of_a_policy_is_read() {
    let text = policy(
        r#"  selectors:
  - {namespaceSelector: {matchLabels: {team: a}}, podSelector: {matchLabels: {app: x}, matchExpressions: [
      {key: k, operator: In, values: [v]}, {key: k, operator: NotIn, values: [w]},
      {key: k, operator: Exists}, {key: l, operator: DoesNotExist}]}}
  - {podSelector: {}}
  addresses: [203.0.113.10]
  pools: [{name: public, count: 2}, {name: other}]
  destinationCIDRs: [0.0.0.0/0, "::/0"]
  excludedCIDRs: [10.0.0.0/8]
  gateways: {names: [gw-a, gw-b]}
  distribution: RoundRobin
  addressSelection: PerConnection
  zoneAffinity: Require
  limits: {sessionsPerEndpoint: 20000, newSessionsPerSecond: 2000}
  onExhaustion: Drop
status: {whatever: 1}
"#,
    );
    let got = manifests(&text, UnsupportedKinds::Reject);
    assert_eq!(got.diagnostics, []);
    assert_eq!(assert_accepted(&text), 1);
    let Body::EgressPolicy(policy) = &got.objects[0].body else { panic!("a policy") };
    let spec = &policy.spec;
    let selectors = spec.selectors.as_ref().unwrap();
    assert_eq!(selectors[0].pod_selector.match_expressions[3], Requirement::DoesNotExist("l".into()));
    assert_eq!(selectors[1], PodSelector { namespace_selector: None, pod_selector: LabelSelector::default() });
    assert_eq!(spec.pools.as_ref().unwrap()[1].count.get(), 1);
    assert_eq!(spec.destination_cidrs.as_ref().unwrap().len(), 2);
    assert_eq!(spec.gateways, Some(GatewayRef::Names(vec!["gw-a".into(), "gw-b".into()])));
    assert_eq!(
        (spec.distribution, spec.address_selection, spec.zone_affinity, spec.on_exhaustion),
        (Distribution::RoundRobin, AddressSelection::PerConnection, ZoneAffinity::Require, OnExhaustion::Drop)
    );
    assert_eq!(spec.limits.sessions_per_endpoint.unwrap().get(), 20000);
}

#[test]
fn lists_documents_and_json_are_read_as_kubectl_prints_them() {
    let text = r#"
apiVersion: v1
kind: List
metadata: {resourceVersion: ""}
items:
- apiVersion: v1
  kind: Namespace
  metadata: {name: a, labels: {team: a}, managedFields: [{manager: x, operation: Update}]}
- apiVersion: v1
  kind: Pod
  metadata: {name: p, namespace: a, creationTimestamp: "2025-01-02T03:04:05Z"}
  spec: {containers: [{name: c, image: i, resources: {limits: {cpu: 100m}}}], somethingNew: {x: 1}}
  status: {podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}]}
---
{"apiVersion": "v1", "kind": "ServiceList", "items": [
  {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80, "targetPort": "http"}]}}
]}
---
apiVersion: v1
kind: Node
metadata: {name: n}
---
# nothing here
---
apiVersion: vipgate.io/v1alpha1
kind: VipGateway
metadata: {name: gw-a, labels: {a: b}}
spec: {zone: z, node: n, peerAddress: 198.51.100.1, maxAddresses: 100}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: public}
spec: {ranges: [203.0.113.0/28, 203.0.113.32-203.0.113.40], announce: BGP, provider: {}}
"#;
    let got = manifests(text, UnsupportedKinds::Reject);
    assert_eq!(got.diagnostics, []);
    assert_eq!(assert_accepted(text), 2);
    let ids: Vec<_> = got.objects.iter().map(|object| format!("{} {}", object.id, object.origin.line)).collect();
    assert_eq!(
        ids,
        [
            "Namespace a 6",
            "Pod a/p 9",
            "Service default/s 16",
            "Node n 19",
            "VipGateway gw-a 25",
            "AddressPool public 30"
        ]
    );
    let diagnostic =
        got.objects[1].origin.diagnostic(Severity::Error, Code::MalformedValue, "status.podIPs[0].ip", "r");
    assert_eq!(diagnostic.to_string(), "m.yaml:13: items[1].status.podIPs[0].ip: r [VG0113]");
}

/// Specs, `SELECTORS` being valid selectors with VIPs, and the beginning of the error.
const INVALID_POLICIES: &[(&str, &str)] = &[
    ("  serviceRef: {nme: x}", "m.yaml:5: spec.serviceRef.nme: unknown field, did you mean `name`?"),
    ("  serviceRef: {}", "m.yaml:5: spec.serviceRef.name: is missing"),
    ("  serviceRef: {name: \"\"}", "m.yaml:5: spec.serviceRef.name: is empty"),
    (
        "  serviceRef: {name: x, namespace: a}",
        "m.yaml:5: spec.serviceRef.namespace: is only for a ClusterEgressPolicy: an EgressPolicy refers to a Service in \
         its own namespace; remove the field, or write a ClusterEgressPolicy",
    ),
    ("  limits: {}", "m.yaml:4: spec: needs `serviceRef` or `selectors`"),
    ("  selectors: []\n  addresses: [192.0.2.1]", "m.yaml:5: spec.selectors: is empty and selects nothing"),
    ("  selectors: [{}]\n  addresses: [192.0.2.1]", "m.yaml:5: spec.selectors[0].podSelector: is missing"),
    ("  selectors: [{podSelector: }]", "m.yaml:5: spec.selectors[0].podSelector: expected a map, found nothing"),
    ("  selectors: [{podSelector: {matchLabels: }}]", "podSelector.matchLabels: expected a map, found nothing"),
    ("  selectors: [{podSelector: {}}]", "m.yaml:5: spec.selectors: needs `addresses` or `pools`"),
    ("  serviceRef: {name: x}\n  selectors: [{podSelector: {}}]", "m.yaml:6: spec.selectors: can't be combined with"),
    ("  serviceRef: {name: x}\n  addresses: [192.0.2.1]", "m.yaml:6: spec.addresses: can't be combined with"),
    ("  serviceRef: {name: x}\n  pools: [{name: a}]", "m.yaml:6: spec.pools: can't be combined with"),
    ("SELECTORS  pools: [{name: a, count: 0}]", "m.yaml:7: spec.pools[0].count: expected a whole number from 1"),
    ("SELECTORS  pools: [{name: a}, {name: a}]", "m.yaml:7: spec.pools[1]: a is a duplicate"),
    (
        "  selectors: [{podSelector: {}}]\n  addresses: [192.0.2.1, 192.0.2.1]",
        "m.yaml:6: spec.addresses[1]: 192.0.2.1 is a duplicate",
    ),
    ("  selectors: [{podSelector: {}}]\n  addresses: [192.0.2.256]", "m.yaml:6: spec.addresses[0]: "),
    (
        "SELECTORS  excludedCIDRs:\n  - 10.0.0.0/8\n  - 10.1.0.0/8",
        "m.yaml:9: spec.excludedCIDRs[1]: 10.1.0.0/8 has host bits",
    ),
    ("SELECTORS  destinationCIDRs: []", "m.yaml:7: spec.destinationCIDRs: is empty"),
    ("SELECTORS  distribution: Random", "m.yaml:7: spec.distribution: unknown value `Random`"),
    (
        "SELECTORS  onExhaustion: reject",
        "m.yaml:7: spec.onExhaustion: unknown value `reject`, expected `Reject` or `Drop`, did you mean",
    ),
    ("SELECTORS  zoneAffinity: none", "m.yaml:7: spec.zoneAffinity: unknown value `none`"),
    ("SELECTORS  gateways: {}", "m.yaml:7: spec.gateways: expected exactly one of `names` or `selector`"),
    ("SELECTORS  gateways: {names: []}", "m.yaml:7: spec.gateways.names: is empty"),
    (
        "SELECTORS  limits: {sessionsPerEndpoint: 0}",
        "m.yaml:7: spec.limits.sessionsPerEndpoint: expected a whole number from 1",
    ),
    (
        "SELECTORS  limits: {sessionsPerEndpoint: 5, guaranteedPortsPerEndpoint: 6}",
        "m.yaml:7: spec.limits.guaranteedPortsPerEndpoint: 6 is more than sessionsPerEndpoint (5)",
    ),
    (
        "  selectors: [{podSelector: {matchExpressions: [{key: a, operator: In}]}}]",
        "m.yaml:5: spec.selectors[0].podSelector.matchExpressions[0]: operator In or NotIn needs",
    ),
    (
        "  selectors: [{podSelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}}]",
        "matchExpressions[0]: operator Exists or DoesNotExist takes no `values`",
    ),
    ("  selectors: [{podSelector: {matchExpressions: [{key: a, operator: Gt}]}}]", "operator: unknown value `Gt`"),
];

#[test]
fn invalid_policies_are_errors_with_line_field_and_reason() {
    let selectors = "  selectors: [{podSelector: {}}]\n  addresses: [192.0.2.1]\n";
    for (spec, expected) in INVALID_POLICIES {
        let spec = &spec.replace("SELECTORS", selectors);
        let got = manifests(&policy(spec), UnsupportedKinds::Reject);
        let messages: Vec<_> = got.diagnostics.iter().map(ToString::to_string).collect();
        assert!(messages.iter().any(|message| message.contains(expected)), "{spec}\ngot: {messages:#?}");
        let beyond_schemas = ["spec.pools[1]: a is a duplicate", "10.1.0.0/8 has host bits", "6 is more than"];
        let rejected_by_schema = !beyond_schemas.iter().any(|beyond| expected.contains(beyond));
        assert_eq!(is_rejected(&policy(spec)), Some(rejected_by_schema), "{spec}");
    }
}

#[test]
fn a_policy_of_the_cluster_has_no_namespace_but_its_service_has() {
    let text = |metadata: &str, spec: &str| {
        format!("apiVersion: vipgate.io/v1alpha1\nkind: ClusterEgressPolicy\nmetadata: {{{metadata}}}\nspec: {spec}\n")
    };
    let valid = text("name: p", "{serviceRef: {name: s, namespace: a}, limits: {sessionsPerEndpoint: 5}}");
    let got = manifests(&valid, UnsupportedKinds::Reject);
    assert_eq!((got.diagnostics, assert_accepted(&valid)), (vec![], 1));
    assert_eq!(got.objects[0].id.to_string(), "ClusterEgressPolicy p");
    let Body::ClusterEgressPolicy(policy) = &got.objects[0].body else { panic!("a policy of the cluster") };
    let namespace = Some("a".to_owned());
    assert_eq!(policy.spec.service_ref, Some(ServiceRef { name: "s".to_owned(), namespace }));
    let selecting = text("name: p", "{selectors: [{podSelector: {}}], pools: [{name: public}]}");
    assert_eq!((manifests(&selecting, UnsupportedKinds::Reject).diagnostics, assert_accepted(&selecting)), (vec![], 1));
    for (metadata, spec, expected) in [
        (
            "name: p",
            "{serviceRef: {name: s}}",
            "4: spec.serviceRef.namespace: is missing: a ClusterEgressPolicy has no",
        ),
        ("name: p", "{serviceRef: {name: s, namespace: \"\"}}", "4: spec.serviceRef.namespace: is empty"),
        ("name: p", "{serviceRef: {nme: s, namespace: a}}", "4: spec.serviceRef.nme: unknown field"),
        ("name: p", "{selectors: [{podSelector: {}}]}", "4: spec.selectors: needs `addresses` or `pools`"),
        (
            "name: p, namespace: a",
            "{serviceRef: {name: s, namespace: a}}",
            "3: metadata.namespace: ClusterEgressPolicy objects are cluster-scoped",
        ),
    ] {
        let text = text(metadata, spec);
        let got = manifests(&text, UnsupportedKinds::Reject);
        let messages: Vec<_> = got.diagnostics.iter().map(ToString::to_string).collect();
        assert!(messages.iter().any(|it| it.starts_with(&format!("m.yaml:{expected}"))), "{text}\ngot: {messages:#?}");
        assert_eq!(is_rejected(&text), Some(true), "{text}");
    }
}

/// Documents and the beginning of the error.
const INVALID_DOCUMENTS: &[(&str, &str)] = &[
    ("kind: Service\nmetadata: {name: x}", "m.yaml:1: apiVersion: is missing"),
    ("apiVersion: v1\nmetadata: {name: x}", "m.yaml:1: kind: is missing"),
    ("apiVersion: v1\nkind: Service\nmetadata: {}", "m.yaml:3: metadata.name: is missing"),
    ("apiVersion: v1\nkind: Service\nmetadata: {name: 7}", "m.yaml:3: metadata.name: expected text, found `7`"),
    (
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: x\n  annotations: {vipgate.io/egress: true}",
        "m.yaml:5: metadata.annotations[vipgate.io/egress]: expected text, found `true`: put it in quotes",
    ),
    (
        "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: x}",
        "m.yaml:1: apiVersion: `discovery.k8s.io/v1beta1` of EndpointSlice",
    ),
    ("apiVersion: v1\nkind: Secret\nmetadata: {name: x}", "m.yaml:2: kind: `Secret` is not a supported kind"),
    (
        "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: x}",
        "m.yaml:2: kind: `Gateway` is not a supported kind",
    ),
    ("- 1", "m.yaml:1: document: is not an object"),
    ("a: [", "m.yaml:"),
    ("apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Pod\n- 7", "m.yaml:6: items[1]: is not an object"),
    (
        "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Pod\n- 7",
        "m.yaml:4: items[0].metadata.name: is missing",
    ),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p, namespace: x}\n\
         spec: {ranges: [10.0.0.0/8]}",
        "m.yaml:3: metadata.namespace: AddressPool objects are cluster-scoped",
    ),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\nspec: {ranges: []}",
        "m.yaml:4: spec.ranges: has no address",
    ),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\n\
         spec: {ranges: [10.0.0.9-10.0.0.1]}",
        "m.yaml:4: spec.ranges[0]: range `10.0.0.9-10.0.0.1` ends before",
    ),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\n\
         spec: {ranges: [10.0.0.0/30, 10.0.0.2-10.0.0.9]}",
        "m.yaml:4: spec.ranges[1]: 10.0.0.2-10.0.0.9 overlaps spec.ranges[0]",
    ),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\n\
         spec: {ranges: [10.0.0.0/30], announce: bgp}",
        "m.yaml:4: spec.announce: unknown value `bgp`, expected `L2` or `BGP`",
    ),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {name: p}\nspec: {maxAddress: 1}",
        "m.yaml:4: spec.maxAddress: unknown field, did you mean `maxAddresses`?",
    ),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {name: p}\nspec: {peerAddress: \"::1\"}",
        "m.yaml:4: spec.peerAddress: ::1 is not reachable",
    ),
    ("apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {name: p}", "m.yaml:1: spec: is missing"),
    (
        "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {name: p}\nspec: {}\nspc: {}",
        "m.yaml:5: spc: unknown field, did you mean `spec`?",
    ),
];

#[test]
fn invalid_documents_are_errors_with_line_field_and_reason() {
    for (text, expected) in INVALID_DOCUMENTS {
        let got = manifests(text, UnsupportedKinds::Reject);
        let messages: Vec<_> = got.diagnostics.iter().map(ToString::to_string).collect();
        assert!(messages.iter().any(|message| message.starts_with(expected)), "{text}\ngot: {messages:#?}");
        assert!(got.diagnostics.iter().all(Diagnostic::is_error), "{text}");
        let beyond_schemas = ["ends before", "overlaps", "is not reachable"];
        if let Some(is_rejected) = is_rejected(text) {
            assert_eq!(is_rejected, !beyond_schemas.iter().any(|beyond| expected.contains(beyond)), "{text}");
        }
    }
}

#[test]
fn crds_of_vipgate_next_to_manifests_are_ignored() {
    let own = crd::yaml().unwrap();
    let got = manifests(&own, UnsupportedKinds::Reject);
    assert_eq!((got.diagnostics, got.objects.len()), (vec![], 0));
    let others = manifests(&own.replace("group: vipgate.io", "group: example.org"), UnsupportedKinds::Reject);
    assert_eq!(others.diagnostics.len(), 5);
}

#[test]
fn unsupported_kinds_are_ignored_with_a_warning() {
    let got = manifests("apiVersion: v1\nkind: Secret\nmetadata: {name: x}", UnsupportedKinds::Ignore);
    assert_eq!(got.diagnostics[0].severity, Severity::Warning);
    assert!(
        got.diagnostics[0]
            .to_string()
            .starts_with("m.yaml:2: kind: warning: `Secret` is not a supported kind and is ignored")
    );
}

#[test]
fn the_former_kind_of_a_gateway_is_read_with_a_warning() {
    let read = |text: &str| {
        let got = manifests(text, UnsupportedKinds::Reject);
        let ids: Vec<_> = got.objects.iter().map(|object| object.id.to_string()).collect();
        (ids, got.diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let (ids, warnings) =
        read("apiVersion: vipgate.io/v1alpha1\nkind: Gateway\nmetadata: {name: gw-a}\nspec: {zone: z}\n");
    assert_eq!(ids, ["VipGateway gw-a"]);
    let reason = "`Gateway` is now `VipGateway`: write VipGateway; the former kind is still read [VG0317]";
    assert_eq!(warnings, [format!("m.yaml:2: kind: warning: {reason}")]);
    let (ids, warnings) = read(
        "apiVersion: vipgate.io/v1alpha1\nkind: GatewayList\nitems:\n- metadata: {name: gw-a}\n  spec: {}\n\
         - kind: VipGateway\n  metadata: {name: gw-b}\n  spec: {}\n",
    );
    assert_eq!(ids, ["VipGateway gw-a", "VipGateway gw-b"]);
    assert_eq!(warnings, [format!("m.yaml:4: items[0].kind: warning: {reason}")]);
    // A Gateway of Gateway API remains another kind; and an unreadable one has its identity.
    let other = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: x}";
    let got = manifests(other, UnsupportedKinds::IgnoreOtherGroups);
    assert_eq!((got.objects.len(), got.diagnostics[0].code), (0, Code::UnsupportedKind));
    let text = "apiVersion: vipgate.io/v1alpha1\nkind: Gateway\nmetadata: {name: gw-a}\nspec: 1\n";
    let got = manifests(text, UnsupportedKinds::Reject);
    assert_eq!(got.unreadable[0].1.to_string(), "VipGateway gw-a");
}

#[test]
fn kinds_are_found_by_their_names() {
    for kind in Kind::ALL {
        assert_eq!(Kind::named(kind.as_str()), Some(kind));
        let plural = kind.plural();
        assert!(plural.ends_with('s') && plural.chars().all(|it| it.is_ascii_lowercase()), "{plural}");
    }
    assert_eq!(Kind::named("Gateway"), Some(Kind::Gateway));
    assert_eq!((Kind::named("gateway"), Kind::named("Secret")), (None, None));
}

#[test]
fn unclassed_services_are_read_as_requested() {
    let read_with = |unclassed, annotations: &str, spec: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s, annotations: {{{annotations}}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{port: 80}}]{spec}}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.10}}]}}}}\n"
        );
        let mut manifests = Manifests::default();
        let options = ReadOptions { unsupported: UnsupportedKinds::Reject, unclassed };
        read(&Arc::new(Source::new("m.yaml", text)), options, &mut manifests);
        let Some(Body::Service(service)) = manifests.objects.pop().map(|object| object.body) else {
            panic!("a Service")
        };
        (service.vips.len(), service.pending, service.no_vip_reason.unwrap_or_default())
    };
    let class = ", loadBalancerClass: vipgate.io/vipgate";
    let served = (1, false, String::new());
    let annotated = ["vipgate.io/egress: \"false\"", "vipgate.io/announce: BGP", "vipgate.io/unknown: x"];
    for annotations in annotated {
        assert_eq!(read_with(UnclassedServices::Ignore, annotations, ""), served, "{annotations}");
    }
    assert_eq!(read_with(UnclassedServices::Ignore, "", class), served);
    for (unclassed, annotations, spec) in [
        (UnclassedServices::Serve, "example.org/a: b", ", loadBalancerClass: example.org/other"),
        (UnclassedServices::Ignore, annotated[0], ", loadBalancerClass: example.org/other"),
    ] {
        let (vips, _, reason) = read_with(unclassed, annotations, spec);
        assert_eq!((vips, reason.as_str()), (0, "its loadBalancerClass is example.org/other, not vipgate.io/vipgate"));
    }
    let unclassed = "example.org/vipgate.io/a: b";
    assert_eq!(read_with(UnclassedServices::Serve, unclassed, ""), served);
    let (vips, pending, reason) = read_with(UnclassedServices::Ignore, unclassed, "");
    assert_eq!((vips, pending), (0, false));
    assert_eq!(
        reason,
        "it has no loadBalancerClass vipgate.io/vipgate and no annotation of vipgate: create it with this class, or \
         annotate it, e.g. with vipgate.io/announce: L2"
    );
}

#[test]
fn an_invalid_document_does_not_affect_the_others() {
    let text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Pod\nmetadata: {}\n\
                ---\napiVersion: v1\nkind: Namespace\nmetadata: {name: b}";
    let got = manifests(text, UnsupportedKinds::Reject);
    assert_eq!((got.objects.len(), got.diagnostics.len()), (2, 1));
}

#[test]
fn the_name_of_an_object_is_one_word() {
    for metadata in [
        r#"{name: "a b", namespace: t}"#,
        r#"{name: "p\n198.51.100.9 EgressPolicy t/q", namespace: t}"#,
        "{name: a/b, namespace: t}",
        r#"{name: p, namespace: ""}"#,
        r#"{name: p, namespace: "a b"}"#,
    ] {
        let text = format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {metadata}\nspec: {{serviceRef: {{name: s}}}}\n"
        );
        let mut manifests = Manifests::default();
        read(&Arc::new(Source::new("m.yaml", text)), UnsupportedKinds::Reject, &mut manifests);
        let codes: Vec<Code> = manifests.diagnostics.iter().map(|it| it.code).collect();
        assert_eq!(
            (codes, manifests.objects.len(), manifests.unreadable.len()),
            (vec![Code::InvalidName], 0, 0),
            "{metadata}"
        );
    }
}

#[test]
fn an_object_without_a_text_is_read_as_its_text_is_but_has_no_lines() {
    let specs = [
        json!({"ranges": ["203.0.113.0/28", "2001:db8::/120"], "maxPerNamespace": 4}),
        json!({"ranges": [7]}),
        json!({"ranges": ["x"], "maxPerNamespace": -1}),
        json!({"ranges": [], "more": [null, true, 1.5]}),
    ];
    for spec in specs {
        let (version, metadata) = ("vipgate.io/v1alpha1", json!({"name": "p", "labels": {"a": "no"}}));
        let object = json!({"apiVersion": version, "kind": "AddressPool", "metadata": metadata, "spec": spec});
        let of_text = manifests(&object.to_string(), UnsupportedKinds::Reject);
        let mut of_object = Manifests::default();
        read_object("m.yaml", object, UnsupportedKinds::Reject, &mut of_object);
        let objects = |all: &Manifests| {
            let each = all.objects.iter().map(|it| (it.id.clone(), format!("{:?}", it.body)));
            (each.collect::<Vec<_>>(), all.unreadable.len())
        };
        assert_eq!(objects(&of_object), objects(&of_text));
        let diagnostics = |all: &Manifests| {
            let each = all.diagnostics.iter().map(|it| (it.severity, it.code, it.field.clone(), it.reason.clone()));
            each.collect::<Vec<_>>()
        };
        assert_eq!(diagnostics(&of_object), diagnostics(&of_text));
        assert!(of_object.diagnostics.iter().all(|it| it.to_string().starts_with("m.yaml: ")), "{of_object:?}");
        assert!(of_object.objects.iter().all(|it| it.origin.to_string() == "m.yaml"));
    }
}
