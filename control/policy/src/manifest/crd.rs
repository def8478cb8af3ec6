//! CustomResourceDefinitions of vipgate's kinds, generated from the JSON schemas.
//!
//! Kubernetes requires structural schemas: one type per value, no references, unknown fields pruned instead of
//! rejected. Rules between fields become CEL rules with readable messages.

mod status;

use serde_json::{Map, Value, json};

use super::Kind;
use super::schema::schema_of;

/// Comment at the top of the file.
const HEADER: &str = "\
# CustomResourceDefinitions of vipgate: kubectl apply -f crds.yaml
# Generated from the types in control/src/manifest. Regenerate:
#   vipgate check --print-crds > conf/crds.yaml
";

/// A custom resource: names and printer columns.
struct Resource {
    kind: Kind,
    singular: &'static str,
    short: &'static str,
    /// Columns of `kubectl get` besides name and age: heading, type, path, and priority (1: only with `-o wide`).
    columns: &'static [(&'static str, &'static str, &'static str, u8)],
}

/// JSON paths of the status of conditions.
const ACCEPTED: &str = ".status.conditions[?(@.type==\"Accepted\")].status";
const PROGRAMMED: &str = ".status.conditions[?(@.type==\"Programmed\")].status";
const READY: &str = ".status.conditions[?(@.type==\"Ready\")].status";
const DRAINING: &str = ".status.conditions[?(@.type==\"Draining\")].status";
const EXHAUSTED: &str = ".status.conditions[?(@.type==\"Exhausted\")].status";

const RESOURCES: [Resource; 5] = [
    Resource {
        kind: Kind::EgressPolicy,
        singular: "egresspolicy",
        short: "egp",
        columns: &[
            ("Addresses", "string", ".status.addresses", 0),
            ("Endpoints", "integer", ".status.endpoints", 0),
            ("Accepted", "string", ACCEPTED, 0),
            ("Programmed", "string", PROGRAMMED, 0),
            ("Service", "string", ".spec.serviceRef.name", 1),
            ("Gateways", "string", ".status.gateways", 1),
            ("Excluded", "string", ".spec.excludedCIDRs", 1),
            ("Distribution", "string", ".spec.distribution", 1),
        ],
    },
    Resource {
        kind: Kind::ClusterEgressPolicy,
        singular: "clusteregresspolicy",
        short: "cegp",
        columns: &[
            ("Addresses", "string", ".status.addresses", 0),
            ("Endpoints", "integer", ".status.endpoints", 0),
            ("Accepted", "string", ACCEPTED, 0),
            ("Programmed", "string", PROGRAMMED, 0),
            ("Service-Namespace", "string", ".spec.serviceRef.namespace", 1),
            ("Service", "string", ".spec.serviceRef.name", 1),
            ("Gateways", "string", ".status.gateways", 1),
            ("Excluded", "string", ".spec.excludedCIDRs", 1),
            ("Distribution", "string", ".spec.distribution", 1),
        ],
    },
    Resource {
        kind: Kind::Gateway,
        singular: "vipgateway",
        short: "vgw",
        columns: &[
            ("Node", "string", ".spec.node", 0),
            ("Ready", "string", READY, 0),
            ("Draining", "string", DRAINING, 0),
            ("VIPs", "integer", ".status.vips", 0),
            ("Sessions", "integer", ".status.sessions", 0),
            ("Version", "string", ".status.version", 0),
            ("Accepted", "string", ACCEPTED, 1),
            ("Zone", "string", ".spec.zone", 1),
            ("Peer", "string", ".spec.peerAddress", 1),
            ("Max", "integer", ".spec.maxAddresses", 1),
        ],
    },
    Resource {
        kind: Kind::AddressPool,
        singular: "addresspool",
        short: "vpool",
        columns: &[
            ("Ranges", "string", ".spec.ranges", 0),
            ("Capacity", "integer", ".status.capacity", 0),
            ("Used", "integer", ".status.used", 0),
            ("Accepted", "string", ACCEPTED, 0),
            ("Exhausted", "string", EXHAUSTED, 1),
            ("Announce", "string", ".spec.announce", 1),
        ],
    },
    Resource {
        kind: Kind::OverlayNode,
        singular: "overlaynode",
        short: "von",
        columns: &[
            ("Address", "string", ".spec.address", 0),
            ("VNI", "integer", ".spec.vni", 0),
            ("Pods", "string", ".spec.podCIDRs", 0),
            ("Accepted", "string", ACCEPTED, 0),
            ("MAC", "string", ".spec.mac", 1),
        ],
    },
];

/// CEL rules of the `spec` of both kinds of policies, with messages.
const POLICY_RULES: [(&str, &str); 3] = [
    ("has(self.serviceRef) != has(self.selectors)", "exactly one of serviceRef and selectors is required"),
    (
        "!has(self.serviceRef) || !has(self.addresses) && !has(self.pools)",
        "addresses and pools can't be combined with serviceRef, which defines the VIPs",
    ),
    (
        "!has(self.selectors) || has(self.addresses) || has(self.pools)",
        "selectors needs addresses or pools for the VIPs",
    ),
];

/// CEL rule of an EgressPolicy's `spec.serviceRef`.
const NAMESPACED_RULE: (&str, &str) = (
    "!has(self.namespace)",
    "serviceRef.namespace is only for a ClusterEgressPolicy: an EgressPolicy refers to a Service in its own namespace",
);

/// CEL rule of a ClusterEgressPolicy's `spec.serviceRef`.
const CLUSTER_RULE: (&str, &str) = (
    "has(self.namespace)",
    "serviceRef.namespace is required in a ClusterEgressPolicy, which has no namespace of its own",
);

/// CEL rules of `spec.limits` of a policy.
const LIMITS_RULES: [(&str, &str); 1] = [(
    "!has(self.sessionsPerEndpoint) || !has(self.guaranteedPortsPerEndpoint) || \
     self.guaranteedPortsPerEndpoint <= self.sessionsPerEndpoint",
    "guaranteedPortsPerEndpoint is more than sessionsPerEndpoint",
)];

/// The definitions as YAML documents.
///
/// # Errors
/// If the definitions can't be serialized as YAML, which would be a bug.
pub fn yaml() -> Result<String, serde_saphyr::ser::Error> {
    let options = serde_saphyr::ser_options! { folded_wrap_chars: 110 };
    let documents = serde_saphyr::to_string_multiple_with_options(&definitions(), options)?;
    Ok(format!("{HEADER}{documents}"))
}

pub fn definitions() -> [Value; 5] {
    RESOURCES.map(|resource| definition(&resource))
}

fn definition(resource: &Resource) -> Value {
    let Resource { kind, singular, short, columns } = resource;
    let plural = kind.plural();
    let (group, version) = kind.api_version().split_once('/').unwrap_or_default();
    let mut columns: Vec<_> = columns
        .iter()
        .map(|(name, what, path, priority)| json!({"name": name, "type": what, "jsonPath": path, "priority": priority}))
        .collect();
    columns.push(json!({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}));
    let schema = schema_of(*kind).unwrap_or_default();
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {
            "group": group,
            "scope": if kind.is_namespaced() { "Namespaced" } else { "Cluster" },
            "names": {
                "kind": kind.as_str(),
                "listKind": format!("{}List", kind.as_str()),
                "plural": plural,
                "singular": singular,
                "shortNames": [short],
                "categories": ["vipgate"],
            },
            "versions": [{
                "name": version,
                "served": true,
                "storage": true,
                "subresources": {"status": {}},
                "additionalPrinterColumns": columns,
                "schema": {"openAPIV3Schema": {
                    "type": "object",
                    "description": schema["description"],
                    "required": ["metadata", "spec"],
                    "properties": {
                        "apiVersion": {"type": "string"},
                        "kind": {"type": "string"},
                        "metadata": {"type": "object"},
                        "spec": spec(*kind, &schema["properties"]["spec"]),
                        "status": status::schema(*kind),
                    },
                }},
            }],
        },
    })
}

fn spec(kind: Kind, schema: &Value) -> Value {
    let mut spec = schema.clone();
    structural(&mut spec);
    if matches!(kind, Kind::EgressPolicy | Kind::ClusterEgressPolicy) {
        // The CEL rules replace the schema's alternatives: their messages are readable.
        if let Some(spec) = spec.as_object_mut() {
            spec.remove("oneOf");
        }
        spec["x-kubernetes-validations"] = rules(&POLICY_RULES);
        let properties = &mut spec["properties"];
        properties["limits"]["x-kubernetes-validations"] = rules(&LIMITS_RULES);
        properties["pools"]["x-kubernetes-list-type"] = "map".into();
        properties["pools"]["x-kubernetes-list-map-keys"] = json!(["name"]);
        // Both kinds have the field, since the API server would prune an unknown one without a word.
        let rule = if kind.is_namespaced() { NAMESPACED_RULE } else { CLUSTER_RULE };
        let service = &mut properties["serviceRef"];
        service["required"] = json!(["name"]);
        if kind.is_namespaced() {
            service["properties"]["namespace"] =
                json!({"type": "string", "description": "Only in a `ClusterEgressPolicy`."});
        }
        service["x-kubernetes-validations"] = rules(&[rule]);
    }
    spec
}

fn rules(rules: &[(&str, &str)]) -> Value {
    rules.iter().map(|(rule, message)| json!({"rule": rule, "message": message})).collect()
}

/// Makes a schema and its subschemas structural. `oneOf` and `anyOf` without types are structural.
fn structural(schema: &mut Value) {
    let Some(schema) = schema.as_object_mut() else { return };
    for keyword in ["$schema", "examples", "title"] {
        schema.remove(keyword);
    }
    remove_null(schema);
    merge_variants(schema);
    match schema.remove("additionalProperties") {
        None | Some(Value::Bool(false)) => {}
        Some(Value::Bool(true)) => {
            schema.insert("x-kubernetes-preserve-unknown-fields".into(), true.into());
        }
        Some(mut values) => {
            structural(&mut values);
            schema.insert("additionalProperties".into(), values);
        }
    }
    // The API server stores defaults in the objects: only scalar ones are useful there.
    if schema.get("default").is_some_and(|default| default.is_object() || default.is_array()) {
        schema.remove("default");
    }
    if schema.remove("uniqueItems").is_some() {
        schema.insert("x-kubernetes-list-type".into(), "set".into());
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.values_mut().for_each(structural);
    }
    if let Some(items) = schema.get_mut("items") {
        structural(items);
    }
}

/// Removes `null` from the types: the API server prunes null values before validation.
fn remove_null(schema: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|kind| kind != "null");
        if let [kind] = types.as_mut_slice() {
            let kind = kind.take();
            schema.insert("type".into(), kind);
        }
    }
    let null = json!({"type": "null"});
    if let Some(Value::Array(alternatives)) = schema.get_mut("anyOf")
        && alternatives.contains(&null)
    {
        alternatives.retain(|alternative| *alternative != null);
        if let [Value::Object(only)] = alternatives.as_mut_slice() {
            let only = std::mem::take(only);
            schema.remove("anyOf");
            // The field's own keywords (description) take precedence over those of its type.
            for (keyword, value) in only {
                schema.entry(keyword).or_insert(value);
            }
        }
    }
}

/// Merges the variants of an enum with data (one object each) into one object with exactly one field.
fn merge_variants(schema: &mut Map<String, Value>) {
    let is_enum = |alternatives: &Vec<Value>| alternatives.iter().all(|alternative| alternative["type"] == "object");
    if !schema.get("oneOf").and_then(Value::as_array).is_some_and(is_enum) {
        return;
    }
    let Some(Value::Array(alternatives)) = schema.remove("oneOf") else { return };
    let mut properties = Map::new();
    for mut alternative in alternatives {
        let description = alternative["description"].take();
        let Some(Value::Object(fields)) = alternative.get_mut("properties").map(Value::take) else { continue };
        for (name, mut field) in fields {
            field["description"] = description.clone();
            properties.insert(name, field);
        }
    }
    let names: Vec<_> = properties.keys().map(String::as_str).collect();
    let terms: Vec<_> = names.iter().map(|name| format!("(has(self.{name}) ? 1 : 0)")).collect();
    let rule = format!("{} == 1", terms.join(" + "));
    let message = format!("exactly one of {} is required", names.join(" and "));
    schema.insert("x-kubernetes-validations".into(), rules(&[(&rule, &message)]));
    schema.insert("type".into(), "object".into());
    schema.insert("properties".into(), properties.into());
}

#[cfg(test)]
mod tests;
