//! The definitions are structural schemas, and the file in `conf/` is up to date.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

use super::*;

#[test]
fn the_committed_file_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../conf/crds.yaml");
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(committed == yaml().unwrap(), "regenerate it: vipgate check --print-crds > conf/crds.yaml");
}

#[test]
fn the_yaml_parses_as_the_definitions() {
    let (nodes, faults) = crate::yaml::read(&yaml().unwrap());
    assert_eq!(faults, []);
    let parsed: Vec<Value> = nodes.iter().map(|node| crate::yaml::decode(node).unwrap()).collect();
    assert_eq!(parsed, definitions());
}

#[test]
fn kubernetes_types_support_every_keyword() {
    for definition in definitions() {
        let typed: CustomResourceDefinition = serde_json::from_value(definition.clone()).unwrap();
        let (typed, original) = (floats(serde_json::to_value(typed).unwrap()), floats(definition));
        assert!(typed == original, "a keyword was lost:\n{typed:#}\n{original:#}");
    }
}

/// All numbers as floats, as in Kubernetes' types.
fn floats(value: Value) -> Value {
    match value {
        Value::Number(number) => number.as_f64().into(),
        Value::Array(items) => items.into_iter().map(floats).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, field)| (name, floats(field))).collect(),
        other => other,
    }
}

fn schema(definition: &Value) -> &Value {
    &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
}

#[test]
fn the_schemas_are_structural() {
    for definition in definitions() {
        let schema = schema(&definition);
        assert_structural("", schema);
        assert_eq!(schema["properties"]["spec"]["type"], "object");
    }
}

const TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];

/// A structural schema has one type, and properties or additional properties, but not both.
fn assert_structural(path: &str, schema: &Value) {
    let keywords = schema.as_object().unwrap_or_else(|| panic!("{path} is {schema}"));
    if keywords.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true))
        && !keywords.contains_key("type")
    {
        // It may be anything.
        return;
    }
    assert!(keywords["type"].as_str().is_some_and(|name| TYPES.contains(&name)), "{path} has no type: {schema}");
    for keyword in ["$ref", "$defs", "definitions", "$schema", "const", "if", "patternProperties", "uniqueItems"] {
        assert!(!keywords.contains_key(keyword), "{path} has {keyword}");
    }
    if let Some(values) = keywords.get("additionalProperties") {
        assert!(!keywords.contains_key("properties"), "{path} has properties and additionalProperties");
        assert_structural(&format!("{path}.*"), values);
    }
    for (name, property) in keywords.get("properties").and_then(Value::as_object).into_iter().flatten() {
        assert_structural(&format!("{path}.{name}"), property);
    }
    match keywords["type"].as_str() {
        Some("array") => assert_structural(&format!("{path}[]"), &keywords["items"]),
        Some("object") => {
            let expected = ["properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"];
            let is_root = path.is_empty() || path == ".metadata";
            let has_fields = expected.iter().any(|keyword| keywords.contains_key(*keyword));
            assert!(is_root || has_fields, "{path} would be pruned empty");
        }
        _ => {}
    }
    for keyword in ["oneOf", "anyOf", "allOf", "not"] {
        for alternative in keywords.get(keyword).and_then(Value::as_array).into_iter().flatten() {
            assert_rule(path, alternative, schema);
        }
    }
    if let Some(default) = keywords.get("default") {
        assert!(!default.is_null(), "{path} has the default null, but is not nullable");
    }
}

/// A rule in `oneOf` and the like has no types, and only fields of the schema.
fn assert_rule(path: &str, rule: &Value, schema: &Value) {
    for keyword in ["type", "description", "default", "nullable", "additionalProperties", "title"] {
        assert!(rule.get(keyword).is_none(), "{path} has a rule with {keyword}: {rule}");
    }
    for (name, nested) in rule.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let field =
            schema["properties"].get(name).unwrap_or_else(|| panic!("{path} has a rule about no field: {name}"));
        assert_rule(&format!("{path}.{name}"), nested, field);
    }
}

#[test]
fn rules_between_fields_have_readable_messages() {
    let [policy, of_cluster, gateway, pool, _] = definitions();
    let messages = |schema: &Value| -> Vec<String> {
        let rules = schema["x-kubernetes-validations"].as_array().unwrap();
        rules.iter().map(|rule| rule["message"].as_str().unwrap().to_owned()).collect()
    };
    let spec = &schema(&policy)["properties"]["spec"];
    assert_eq!(messages(spec)[0], "exactly one of serviceRef and selectors is required");
    let gateways = &spec["properties"]["gateways"];
    assert_eq!(messages(gateways), ["exactly one of names and selector is required"]);
    assert_eq!(
        gateways["x-kubernetes-validations"][0]["rule"],
        "(has(self.names) ? 1 : 0) + (has(self.selector) ? 1 : 0) == 1"
    );
    assert_eq!(gateways["description"], "Eligible gateways. Default: every gateway.");
    assert_eq!(messages(&spec["properties"]["limits"]).len(), 1);
    let service = &spec["properties"]["serviceRef"];
    assert_eq!(service["x-kubernetes-validations"][0]["rule"], "!has(self.namespace)");
    assert!(messages(service)[0].starts_with("serviceRef.namespace is only for a ClusterEgressPolicy"));
    let cluster_spec = &schema(&of_cluster)["properties"]["spec"];
    assert_eq!(messages(cluster_spec), messages(spec));
    let service = &cluster_spec["properties"]["serviceRef"];
    assert_eq!(service["x-kubernetes-validations"][0]["rule"], "has(self.namespace)");
    assert_eq!(service["properties"]["namespace"]["type"], "string");
    assert!(messages(service)[0].starts_with("serviceRef.namespace is required in a ClusterEgressPolicy"));
    let scopes =
        [&policy, &of_cluster, &gateway, &pool].map(|definition| definition["spec"]["scope"].as_str().unwrap());
    assert_eq!(scopes, ["Namespaced", "Cluster", "Cluster", "Cluster"]);
    let provider = &schema(&pool)["properties"]["spec"]["properties"]["provider"]["properties"]["private"];
    assert_eq!(provider["x-kubernetes-preserve-unknown-fields"], true);
}
