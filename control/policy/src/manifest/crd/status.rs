//! Schemas of `status`, which the leader of the policy servers writes.

use serde_json::{Map, Value, json};

use crate::manifest::Kind;

/// The schema of the status of a kind.
pub(super) fn schema(kind: Kind) -> Value {
    let (text, count) = (json!({"type": "string"}), || json!({"type": "integer", "format": "int64"}));
    let counted = |description: &str| {
        let mut schema = count();
        schema["description"] = description.into();
        schema
    };
    let list = |description: &str| {
        json!({
            "type": "array", "description": description, "items": text, "x-kubernetes-list-type": "atomic",
        })
    };
    let fields: Vec<(&str, Value)> = match kind {
        Kind::EgressPolicy | Kind::ClusterEgressPolicy => vec![
            ("addresses", list("VIPs of the endpoints, at most 64.")),
            ("addressCount", counted("Number of VIPs.")),
            ("endpoints", counted("Number of pod addresses that it covers.")),
            ("gateways", list("VipGateways that may have a part of its VIPs, at most 16.")),
            ("gatewayCount", counted("Number of these gateways.")),
        ],
        Kind::Gateway => vec![
            ("vips", counted("VIPs that it has, or a part of; 0: it is not active.")),
            ("sessions", counted("Active sessions, at most 30 s old.")),
            ("version", json!({"type": "string", "description": "Version of the program at its last connection."})),
        ],
        Kind::AddressPool => vec![
            ("capacity", counted("Number of addresses, at most 9223372036854775807.")),
            ("used", counted("Addresses of Services and policies.")),
            ("services", counted("Addresses of Services.")),
            ("policies", counted("Addresses of policies alone.")),
            ("quarantined", counted("Addresses that became free, and that nobody else gets yet.")),
            ("namespaces", namespaces()),
            (
                "addresses",
                list("Who has which address, or had it last and since when it is free. Nothing else may write here."),
            ),
        ],
        _ => Vec::new(),
    };
    let mut properties: Map<String, Value> = fields.into_iter().map(|(name, it)| (name.to_owned(), it)).collect();
    properties.insert("conditions".to_owned(), conditions());
    json!({"type": "object", "description": "Written by the policy server.", "properties": properties})
}

fn namespaces() -> Value {
    json!({
        "type": "array",
        "description": "Addresses of Services by namespace; at most 32, those with the most.",
        "x-kubernetes-list-type": "atomic",
        "items": {
            "type": "object",
            "required": ["name", "used"],
            "properties": {"name": {"type": "string"}, "used": {"type": "integer", "format": "int64"}},
        },
    })
}

/// As `metav1.Condition`.
fn conditions() -> Value {
    json!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"type": "string", "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
                "message": {"type": "string", "maxLength": 32768},
            },
        },
    })
}
