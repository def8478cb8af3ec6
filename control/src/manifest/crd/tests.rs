//! The definitions keep Kubernetes' rules of structural schemas, and the file in `conf/` is what the types give.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

use super::*;

#[test]
fn the_committed_file_is_what_the_types_give() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../conf/crds.yaml");
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(committed == yaml().unwrap(), "make it anew: vipgate check --print-crds > conf/crds.yaml");
}

#[test]
fn the_yaml_says_what_the_definitions_say() {
    let (nodes, faults) = crate::yaml::read(&yaml().unwrap());
    assert_eq!(faults, []);
    let read: Vec<Value> = nodes.iter().map(|node| crate::yaml::decode(node).unwrap()).collect();
    assert_eq!(read, definitions());
}

#[test]
fn kubernetes_knows_every_word_of_them() {
    for definition in definitions() {
        let typed: CustomResourceDefinition = serde_json::from_value(definition.clone()).unwrap();
        let (typed, given) = (floats(serde_json::to_value(typed).unwrap()), floats(definition));
        assert!(typed == given, "a word got lost:\n{typed:#}\n{given:#}");
    }
}

/// All figures as Kubernetes' types hold them.
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
        place("", schema);
        assert_eq!(schema["properties"]["spec"]["type"], "object");
    }
}

const TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];

/// What holds where a value stands: one type, and properties or values of any name, but not both.
fn place(path: &str, schema: &Value) {
    let words = schema.as_object().unwrap_or_else(|| panic!("{path} is {schema}"));
    assert!(words["type"].as_str().is_some_and(|name| TYPES.contains(&name)), "{path} has no type: {schema}");
    for word in ["$ref", "$defs", "definitions", "$schema", "const", "if", "patternProperties", "uniqueItems"] {
        assert!(!words.contains_key(word), "{path} has {word}");
    }
    if let Some(values) = words.get("additionalProperties") {
        assert!(!words.contains_key("properties"), "{path} has properties and additionalProperties");
        place(&format!("{path}.*"), values);
    }
    for (name, property) in words.get("properties").and_then(Value::as_object).into_iter().flatten() {
        place(&format!("{path}.{name}"), property);
    }
    match words["type"].as_str() {
        Some("array") => place(&format!("{path}[]"), &words["items"]),
        Some("object") => {
            let known = ["properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"];
            let whole = path.is_empty() || path == ".metadata";
            assert!(whole || known.iter().any(|word| words.contains_key(*word)), "{path} would be pruned empty");
        }
        _ => {}
    }
    for word in ["oneOf", "anyOf", "allOf", "not"] {
        for alternative in words.get(word).and_then(Value::as_array).into_iter().flatten() {
            rule(path, alternative, schema);
        }
    }
    if let Some(default) = words.get("default") {
        assert!(!default.is_null(), "{path} has the default null, but takes none");
    }
}

/// What holds in `oneOf` and the like: it names no types, and only fields that the place has.
fn rule(path: &str, rule: &Value, schema: &Value) {
    for word in ["type", "description", "default", "nullable", "additionalProperties", "title"] {
        assert!(rule.get(word).is_none(), "{path} has a rule with {word}: {rule}");
    }
    for (name, below) in rule.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let field =
            schema["properties"].get(name).unwrap_or_else(|| panic!("{path} has a rule about no field: {name}"));
        self::rule(&format!("{path}.{name}"), below, field);
    }
}

#[test]
fn rules_between_fields_say_in_words_what_they_want() {
    let [policy, gateway, pool, _] = definitions();
    let messages = |schema: &Value| -> Vec<String> {
        let rules = schema["x-kubernetes-validations"].as_array().unwrap();
        rules.iter().map(|rule| rule["message"].as_str().unwrap().to_owned()).collect()
    };
    let spec = &schema(&policy)["properties"]["spec"];
    assert_eq!(messages(spec)[0], "exactly one of serviceRef and selectors is needed");
    let gateways = &spec["properties"]["gateways"];
    assert_eq!(messages(gateways), ["exactly one of names and selector is needed"]);
    assert_eq!(
        gateways["x-kubernetes-validations"][0]["rule"],
        "(has(self.names) ? 1 : 0) + (has(self.selector) ? 1 : 0) == 1"
    );
    assert_eq!(gateways["description"], "The gateways that serve it. Default: every gateway.");
    assert_eq!(messages(&spec["properties"]["limits"]).len(), 1);
    let scopes = [&policy, &gateway, &pool].map(|definition| definition["spec"]["scope"].as_str().unwrap());
    assert_eq!(scopes, ["Namespaced", "Cluster", "Cluster"]);
    let provider = &schema(&pool)["properties"]["spec"]["properties"]["provider"];
    assert_eq!(provider["x-kubernetes-preserve-unknown-fields"], true);
}
