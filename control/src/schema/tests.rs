//! Schemas accept what the types accept, and reject what the types reject as far as a schema can describe it.

use std::path::Path;
use std::sync::LazyLock;

use jsonschema::Validator;
use serde_json::json;
use vipgate_policy::yaml::{Node, Source, decode};

use super::*;
use crate::source::manifest_files::walk;

static VALIDATORS: LazyLock<[Validator; 8]> =
    LazyLock::new(|| Published::ALL.map(|kind| jsonschema::validator_for(&document(kind)).unwrap()));

/// Whether the schema accepts a document.
pub(crate) fn accepts(schema: Published, node: &Node) -> bool {
    VALIDATORS[Published::ALL.iter().position(|it| *it == schema).unwrap()].is_valid(&decode(node).unwrap())
}

/// Asserts that the schemas accept the custom resources of a text, and returns their number.
fn accepted_custom_resources(text: &str) -> usize {
    let (nodes, diagnostics) = Source::new("m.yaml", text.to_owned()).documents();
    assert_eq!(diagnostics, []);
    let of = |node: &Node| Published::ALL.into_iter().find(|it| node.text("kind") == Some(it.name()));
    let with_schema: Vec<_> = nodes.iter().filter_map(|node| Some((node, of(node)?))).collect();
    for (node, schema) in &with_schema {
        assert!(accepts(*schema, node), "{} in\n{text}", schema.name());
    }
    with_schema.len()
}

#[test]
fn all_files_in_conf_are_accepted() {
    let conf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf");
    let mut manifests = 0;
    for path in walk(&[conf]).files {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        match Published::ALL.into_iter().find(|it| it.name() == name) {
            Some(schema) => assert!(accepts(schema, &Source::new(name, text).first_document().unwrap()), "{name}"),
            None => manifests += accepted_custom_resources(&text),
        }
    }
    assert!(manifests > 0);
}

#[test]
fn all_schemas_are_in_one_object_by_name() {
    let all = all();
    let names: Vec<_> = all.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "AddressPool",
            "ClusterEgressPolicy",
            "EgressPolicy",
            "OverlayNode",
            "VipGateway",
            "gateway.yaml",
            "node.yaml",
            "policyd.yaml"
        ]
    );
    for kind in Published::ALL {
        assert_eq!(all[kind.name()]["title"], kind.name());
        assert!(!document(kind).to_string().contains("\"$ref\""), "{}", kind.name());
    }
}

#[test]
fn defaults_and_enum_descriptions_are_in_the_schema() {
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
            "description": "Action when no session can be opened because of limits or port exhaustion. \
                Default: `Reject`.\n\
                - Reject: ICMP \"administratively prohibited\"; a reset for TCP.\n- Drop: Drop silently.",
        })
    );
}
