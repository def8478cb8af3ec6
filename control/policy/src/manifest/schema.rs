//! JSON schemas of vipgate's custom resources.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::custom_resources::Document;
use super::{AddressPoolSpec, EgressPolicySpec, GatewaySpec, Kind, OverlayNodeSpec};
use crate::schema::root;

/// The kinds of custom resources.
pub const KINDS: [Kind; 5] =
    [Kind::EgressPolicy, Kind::ClusterEgressPolicy, Kind::Gateway, Kind::AddressPool, Kind::OverlayNode];

/// The schema of a custom resource; `None` for Kubernetes' own kinds.
pub fn schema_of(kind: Kind) -> Option<Value> {
    let (mut schema, description) = match kind {
        Kind::EgressPolicy => {
            (namespaced_policy(object::<EgressPolicySpec>(kind)), "SNAT policy: the VIPs of selected pods.")
        }
        Kind::ClusterEgressPolicy => {
            let description = "SNAT policy of the platform: the VIPs of selected pods in any namespace.";
            (cluster_policy(object::<EgressPolicySpec>(kind)), description)
        }
        Kind::Gateway => (object::<GatewaySpec>(kind), "A gateway: locality, peer address and capacity for VIPs."),
        Kind::AddressPool => (object::<AddressPoolSpec>(kind), "Address ranges that VIPs are allocated from."),
        Kind::OverlayNode => {
            (object::<OverlayNodeSpec>(kind), "A Kubernetes node whose pod traffic is encapsulated in VXLAN.")
        }
        Kind::EndpointSlice | Kind::Namespace | Kind::Node | Kind::Pod | Kind::Service | Kind::ServiceCidr => {
            return None;
        }
    };
    schema["title"] = kind.as_str().into();
    schema["description"] = description.into();
    Some(schema)
}

/// An EgressPolicy refers to a Service in its own namespace.
fn namespaced_policy(mut schema: Value) -> Value {
    let service = object_of(&mut schema["properties"]["spec"]["properties"]["serviceRef"]);
    if let Some(fields) = service["properties"].as_object_mut() {
        fields.remove("namespace");
    }
    schema
}

/// A ClusterEgressPolicy has no namespace of its own.
fn cluster_policy(mut schema: Value) -> Value {
    let spec = &mut schema["properties"]["spec"];
    spec["description"] =
        "Spec of a `ClusterEgressPolicy`. Exactly one of `serviceRef` and `selectors` is required.".into();
    let service = object_of(&mut spec["properties"]["serviceRef"]);
    service["required"] = json!(["name", "namespace"]);
    service["properties"]["namespace"] = json!({"type": "string", "description": "Its namespace.", "minLength": 1});
    let selector = &mut spec["properties"]["selectors"]["items"]["properties"]["namespaceSelector"];
    selector["description"] = "Namespaces. Default: all namespaces.".into();
    schema
}

/// The object of an optional field, whose alternative is `null`.
fn object_of(schema: &mut Value) -> &mut Value {
    if schema.get("anyOf").is_some() { &mut schema["anyOf"][0] } else { schema }
}

fn object<S: JsonSchema>(kind: Kind) -> Value {
    let mut schema = root::<Document<S>>();
    let properties = &mut schema["properties"];
    properties["apiVersion"] = json!({"type": "string", "enum": [kind.api_version()]});
    properties["kind"] = json!({"type": "string", "enum": [kind.as_str()]});
    if !kind.is_namespaced() {
        properties["metadata"]["properties"]["namespace"] =
            json!({"type": "null", "description": format!("{} objects are cluster-scoped.", kind.as_str())});
    }
    schema
}

/// Schema of `metadata`: the fields that vipgate reads; Kubernetes' other fields are allowed.
pub(super) enum Metadata {}

impl JsonSchema for Metadata {
    fn schema_name() -> Cow<'static, str> {
        "Metadata".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let string_map = |description: &str| {
            json!({
                "type": ["object", "null"],
                "description": description,
                "additionalProperties": {"type": "string"},
            })
        };
        json_schema!({
            "type": "object",
            "description": "Metadata of the object. Kubernetes' other metadata fields are allowed.",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "description": "Its name.", "minLength": 1},
                "namespace": {"type": ["string", "null"], "description": "Its namespace. Default: `default`."},
                "labels": string_map("Labels for selectors."),
                "annotations": string_map("Annotations."),
            },
        })
    }
}

/// An EgressPolicy has `serviceRef`, or `selectors` with `addresses` or `pools`.
pub(super) fn policy_alternatives() -> Value {
    json!([
        {
            "required": ["serviceRef"],
            "properties": {
                "serviceRef": {"type": "object"},
                "selectors": {"type": "null"},
                "addresses": {"type": "null"},
                "pools": {"type": "null"},
            },
        },
        {
            "required": ["selectors"],
            "properties": {"selectors": {"type": "array"}, "serviceRef": {"type": "null"}},
            "anyOf": [
                {"required": ["addresses"], "properties": {"addresses": {"type": "array"}}},
                {"required": ["pools"], "properties": {"pools": {"type": "array"}}},
            ],
        },
    ])
}

/// An AddressPool has a range or a provider.
pub(super) fn pool_alternatives() -> Value {
    json!([
        {"required": ["ranges"], "properties": {"ranges": {"minItems": 1}}},
        {"required": ["provider"], "properties": {"provider": {"minProperties": 1}}},
    ])
}

/// Operators `In` and `NotIn` need values, `Exists` and `DoesNotExist` have none.
pub(super) fn requirement_alternatives() -> Value {
    json!([
        {
            "required": ["values"],
            "properties": {"operator": {"enum": ["In", "NotIn"]}, "values": {"minItems": 1}},
        },
        {"properties": {"operator": {"enum": ["Exists", "DoesNotExist"]}, "values": {"maxItems": 0}}},
    ])
}

#[cfg(test)]
pub(crate) mod tests;
