//! Schemas accept what the types accept, and reject what the types reject as far as a schema can describe it.

use std::sync::LazyLock;

use jsonschema::Validator;
use proptest::prelude::*;

use super::*;
use crate::yaml::{Node, Source, decode};

static VALIDATORS: LazyLock<[Validator; 5]> =
    LazyLock::new(|| KINDS.map(|kind| jsonschema::validator_for(&schema_of(kind).unwrap()).unwrap()));

/// Whether the schema accepts a document.
pub(crate) fn accepts(kind: Kind, node: &Node) -> bool {
    VALIDATORS[KINDS.iter().position(|it| *it == kind).unwrap()].is_valid(&decode(node).unwrap())
}

/// The custom resources of a text, with their schemas.
fn custom_resources(text: &str) -> Vec<(Kind, Node)> {
    let (nodes, diagnostics) = Source::new("m.yaml", text.to_owned()).documents();
    assert_eq!(diagnostics, []);
    let with_schema = |node: Node| {
        let is_custom = node.text("apiVersion").is_some_and(|version| version.starts_with("vipgate.io/"));
        let schema = KINDS.into_iter().find(|it| is_custom && node.text("kind") == Some(it.as_str()))?;
        Some((schema, node))
    };
    nodes.into_iter().filter_map(with_schema).collect()
}

/// Asserts that the schemas accept the custom resources of a text, and returns their number.
pub(crate) fn assert_accepted(text: &str) -> usize {
    let documents = custom_resources(text);
    for (schema, node) in &documents {
        assert!(accepts(*schema, node), "{} in\n{text}", schema.as_str());
    }
    documents.len()
}

/// Whether the schema rejects a text with one document; `None` if it is not a custom resource.
pub(crate) fn is_rejected(text: &str) -> Option<bool> {
    let (nodes, diagnostics) = Source::new("m.yaml", text.to_owned()).documents();
    if !diagnostics.is_empty() || nodes.len() != 1 {
        return None;
    }
    custom_resources(text).first().map(|(schema, node)| !accepts(*schema, node))
}

fn manifest(kind: &str, spec: &str) -> String {
    format!("apiVersion: vipgate.io/v1alpha1\nkind: {kind}\nmetadata: {{name: x}}\nspec: {spec}\n")
}

#[test]
fn all_variants_of_custom_resources_are_accepted() {
    let selecting = |rest: &str| format!("{{selectors: [{{podSelector: {{}}}}], {rest}}}");
    for (kind, spec) in [
        ("EgressPolicy", "{serviceRef: {name: s}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, selectors: null, addresses: ~, gateways: ~, limits: {}}"),
        ("EgressPolicy", "{serviceRef: {name: s}, gateways: {selector: {matchLabels: {tier: gold}}}}"),
        (
            "EgressPolicy",
            "{serviceRef: {name: s}, gateways: {selector: {}}, excludedCIDRs: [10.0.0.0/8, \"fd00::/8\"]}",
        ),
        ("EgressPolicy", "{serviceRef: {name: s}, limits: {sessionsPerEndpoint: 268435456}}"),
        ("EgressPolicy", &selecting("addresses: [203.0.113.10, \"2001:db8::10\"]")),
        ("EgressPolicy", &selecting("pools: [{name: public}]")),
        ("EgressPolicy", &selecting("pools: [{name: public, count: 3}], addresses: null")),
        ("VipGateway", "{}"),
        ("VipGateway", "{zone: z, node: n, peerAddress: \"2001:db8::1\", maxAddresses: 1}"),
        ("AddressPool", "{ranges: [203.0.113.0/30, \"2001:db8::-2001:db8::2\", 203.0.113.4 - 203.0.113.9]}"),
        ("AddressPool", "{provider: {aws: {region: eu-west-1, tags: {a: b}}}}"),
    ] {
        let text = manifest(kind, spec);
        let mut manifests = super::super::Manifests::default();
        super::super::read(
            &Source::new("m.yaml", text.clone()).into(),
            super::super::UnsupportedKinds::Reject,
            &mut manifests,
        );
        assert_eq!(manifests.diagnostics, [], "{text}");
        assert_eq!(assert_accepted(&text), 1);
    }
}

#[test]
fn unknown_fields_values_and_types_are_rejected() {
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
        ("VipGateway", "null"),
        ("VipGateway", "{node: 7}"),
        ("VipGateway", "{peerAddress: gw-a}"),
        ("VipGateway", "{peerAddress: 198.51.100.256}"),
        ("VipGateway", "{maxAddresses: 0}"),
        ("VipGateway", "{maxAddresses: \"1\"}"),
        ("AddressPool", "{}"),
        ("AddressPool", "{ranges: []}"),
        ("AddressPool", "{ranges: [203.0.113.9]}"),
        ("AddressPool", "{ranges: [203.0.113.9-]}"),
        ("AddressPool", "{ranges: [\"203.0.113.9-2001:db8::1\"]}"),
        ("AddressPool", "{ranges: [203.0.113.0/28], announce: bgp}"),
    ] {
        assert_eq!(is_rejected(&manifest(kind, spec)), Some(true), "{kind} {spec}");
    }
    let valid = manifest("VipGateway", "{}");
    assert_eq!(is_rejected(&valid), Some(false));
    for (from, to) in [
        ("v1alpha1", "v1"),
        ("{name: x}", "{}"),
        ("{name: x}", "{name: \"\"}"),
        ("{name: x}", "{name: x, namespace: n}"),
        ("{name: x}", "{name: x, labels: {a: 1}}"),
        ("spec: {}", ""),
        ("spec: {}", "spec: {}\nspc: {}"),
    ] {
        assert_eq!(is_rejected(&valid.replace(from, to)), Some(true), "{to}");
    }
}

proptest! {
    #[test]
    fn every_formatted_address_prefix_and_range_is_accepted(first: std::net::IpAddr, bits in 0..=32_u8) {
        let net = ipnet::IpNet::new(first, bits).unwrap().trunc();
        let spec = format!("{{serviceRef: {{name: s}}, excludedCIDRs: [\"{net}\"]}}");
        prop_assert_eq!(assert_accepted(&manifest("EgressPolicy", &spec)), 1);
        let ranges = format!("{{ranges: [\"{net}\", \"{first}-{first}\"]}}");
        prop_assert_eq!(assert_accepted(&manifest("AddressPool", &ranges)), 1);
        prop_assert_eq!(assert_accepted(&manifest("VipGateway", &format!("{{peerAddress: \"{first}\"}}"))), 1);
    }
}
