//! What the types read, their schemas admit; what the types refuse, the schemas refuse where a schema can tell.

use std::path::Path;
use std::sync::LazyLock;

use jsonschema::Validator;
use proptest::prelude::*;

use super::*;
use crate::manifest::files::walk;
use crate::yaml::{Node, Source, decode};

static VALIDATORS: LazyLock<[Validator; 6]> =
    LazyLock::new(|| Published::ALL.map(|of| jsonschema::validator_for(&document(of)).unwrap()));

/// Whether the schema of one admits a document.
pub(crate) fn admits(of: Published, node: &Node) -> bool {
    VALIDATORS[Published::ALL.iter().position(|one| *one == of).unwrap()].is_valid(&decode(node).unwrap())
}

/// The documents of a text that are of our kinds, and of which.
fn ours(text: &str) -> Vec<(Published, Node)> {
    let (nodes, complaints) = Source::new("m.yaml", text.to_owned()).documents();
    assert_eq!(complaints, []);
    let published = |node: Node| {
        let ours = node.text("apiVersion").is_some_and(|version| version.starts_with("vipgate.io/"));
        let of = Published::ALL.into_iter().find(|of| ours && node.text("kind") == Some(of.name()))?;
        Some((of, node))
    };
    nodes.into_iter().filter_map(published).collect()
}

/// Asserts that the schemas admit the documents of a text that are of our kinds, and tells how many there are.
pub(crate) fn admitted(text: &str) -> usize {
    let ours = ours(text);
    for (of, node) in &ours {
        assert!(admits(*of, node), "{} in\n{text}", of.name());
    }
    ours.len()
}

/// Whether the schema refuses a text of one document; none if it is of none of our kinds.
pub(crate) fn refused(text: &str) -> Option<bool> {
    let (nodes, complaints) = Source::new("m.yaml", text.to_owned()).documents();
    if !complaints.is_empty() || nodes.len() != 1 {
        return None;
    }
    ours(text).first().map(|(of, node)| !admits(*of, node))
}

#[test]
fn everything_in_conf_is_admitted() {
    let conf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf");
    let mut manifests = 0;
    for path in walk(&[conf]).files {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        match Published::ALL.into_iter().find(|of| of.name() == name) {
            Some(of) => assert!(admits(of, &Source::new(name, text).first_document().unwrap()), "{name}"),
            None => manifests += admitted(&text),
        }
    }
    assert!(manifests > 0);
}

fn manifest(kind: &str, spec: &str) -> String {
    format!("apiVersion: vipgate.io/v1alpha1\nkind: {kind}\nmetadata: {{name: x}}\nspec: {spec}\n")
}

#[test]
fn every_form_of_our_kinds_is_admitted() {
    let selecting = |rest: &str| format!("{{selectors: [{{podSelector: {{}}}}], {rest}}}");
    for (kind, spec) in [
        ("EgressPolicy", "{serviceRef: {name: s}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, selectors: null, addresses: ~, gateways: ~, limits: {}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, gateways: {selector: {matchLabels: {tier: gold}}}}"),
        (
            "EgressPolicy",
            "{serviceRef: {name: s}, gateways: {selector: {}}, excludedCIDRs: [10.0.0.0/8, \"fd00::/8\"]}",
        ),
        ("EgressPolicy", "{serviceRef: {name: s}, limits: {sessionsPerEndpoint: 4294967295}}"),
        ("EgressPolicy", &selecting("addresses: [203.0.113.10, \"2001:db8::10\"]")),
        ("EgressPolicy", &selecting("pools: [{name: public}]")),
        ("EgressPolicy", &selecting("pools: [{name: public, count: 3}], addresses: null")),
        ("Gateway", "{}"),
        ("Gateway", "{zone: z, node: n, peerAddress: \"2001:db8::1\", maxAddresses: 1}"),
        ("AddressPool", "{ranges: [203.0.113.0/30, \"2001:db8::-2001:db8::2\", 203.0.113.4 - 203.0.113.9]}"),
        ("AddressPool", "{provider: {cloud: {tags: [a, 7]}}}"),
    ] {
        let text = manifest(kind, spec);
        let mut read = super::super::Manifests::default();
        super::super::read(&Source::new("m.yaml", text.clone()).into(), super::super::Foreign::Refuse, &mut read);
        assert_eq!(read.complaints, [], "{text}");
        assert_eq!(admitted(&text), 1);
    }
}

#[test]
fn unknown_fields_wrong_words_and_wrong_types_are_refused() {
    for (kind, spec) in [
        ("EgressPolicy", "{serviceRef: {name: s}, unknown: 1}"),
        ("EgressPolicy", "{serviceRef: {name: s, namespace: n}}"),
        ("EgressPolicy", "{serviceRef: s}"),
        ("EgressPolicy", "{serviceRef: {name: s}, distribution: rendezvous}"),
        ("EgressPolicy", "{serviceRef: {name: s}, excludedCIDRs: null}"),
        ("EgressPolicy", "{serviceRef: {name: s}, excludedCIDRs: [10.0.0.0/33]}"),
        ("EgressPolicy", "{serviceRef: {name: s}, excludedCIDRs: [10.0.0/8]}"),
        ("EgressPolicy", "{serviceRef: {name: s}, excludedCIDRs: [10.0.0.1]}"),
        ("EgressPolicy", "{serviceRef: {name: s}, excludedCIDRs: [\"fd00::/129\"]}"),
        ("EgressPolicy", "{serviceRef: {name: s}, gateways: {names: [a], selector: {}}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, gateways: {selector: {matchLabels: {a: 1}}}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, limits: {sessionsPerEndpoint: 1.5}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, limits: {sessionsPerEndpoint: 4294967296}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, limits: null}"),
        ("Gateway", "null"),
        ("Gateway", "{node: 7}"),
        ("Gateway", "{peerAddress: gw-a}"),
        ("Gateway", "{peerAddress: 198.51.100.256}"),
        ("Gateway", "{maxAddresses: 0}"),
        ("Gateway", "{maxAddresses: \"1\"}"),
        ("AddressPool", "{}"),
        ("AddressPool", "{ranges: []}"),
        ("AddressPool", "{ranges: [203.0.113.9]}"),
        ("AddressPool", "{ranges: [203.0.113.9-]}"),
        ("AddressPool", "{ranges: [\"203.0.113.9-2001:db8::1\"]}"),
        ("AddressPool", "{ranges: [203.0.113.0/28], announce: bgp}"),
    ] {
        assert_eq!(refused(&manifest(kind, spec)), Some(true), "{kind} {spec}");
    }
    let good = manifest("Gateway", "{}");
    assert_eq!(refused(&good), Some(false));
    for (from, to) in [
        ("v1alpha1", "v1"),
        ("{name: x}", "{}"),
        ("{name: x}", "{name: \"\"}"),
        ("{name: x}", "{name: x, namespace: n}"),
        ("{name: x}", "{name: x, labels: {a: 1}}"),
        ("spec: {}", ""),
        ("spec: {}", "spec: {}\nspc: {}"),
    ] {
        assert_eq!(refused(&good.replace(from, to)), Some(true), "{to}");
    }
}

#[test]
fn all_schemas_are_one_object_by_name() {
    let all = all();
    let names: Vec<_> = all.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["AddressPool", "EgressPolicy", "Gateway", "OverlayNode", "gateway.yaml", "policyd.yaml"]);
    for of in Published::ALL {
        assert_eq!(all[of.name()]["title"], of.name());
        assert!(!document(of).to_string().contains("\"$ref\""), "{}", of.name());
    }
}

#[test]
fn defaults_and_meanings_are_shown() {
    let gateway = document(Published::GatewayYaml);
    let sessions = &gateway["properties"]["sessions"]["properties"];
    assert_eq!(sessions["timeouts"]["properties"]["tcp_established"]["default"], "7440s");
    assert_eq!(sessions["state"]["default"], "/dev/shm/vipgate");
    assert_eq!(gateway["properties"]["ports"]["default"], json!({"range": "1024-65535", "quarantine": "2s"}));
    let policy = document(Published::EgressPolicy);
    assert_eq!(
        policy["properties"]["spec"]["properties"]["onExhaustion"],
        json!({
            "type": "string",
            "enum": ["Reject", "Drop"],
            "default": "Reject",
            "description": "What an endpoint hears when it gets no session. Default: `Reject`.\n\
                - Reject: ICMP \"administratively prohibited\"; TCP gets a reset.\n- Drop: Nothing.",
        })
    );
}

proptest! {
    #[test]
    fn every_address_prefix_and_range_as_it_is_written_is_admitted(first: std::net::IpAddr, bits in 0..=32_u8) {
        let net = ipnet::IpNet::new(first, bits).unwrap().trunc();
        let spec = format!("{{serviceRef: {{name: s}}, excludedCIDRs: [\"{net}\"]}}");
        prop_assert_eq!(admitted(&manifest("EgressPolicy", &spec)), 1);
        prop_assert_eq!(admitted(&manifest("AddressPool", &format!("{{ranges: [\"{net}\", \"{first}-{first}\"]}}"))), 1);
        prop_assert_eq!(admitted(&manifest("Gateway", &format!("{{peerAddress: \"{first}\"}}"))), 1);
    }
}
