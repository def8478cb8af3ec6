//! JSON schemas of everything that people write for vipgate: its own kinds and its two configuration files.
//!
//! They are made of the types that read those documents, so that editors and pipelines know what the reader knows. What
//! only parsing tells (host bits of a prefix, names that stand twice) is beyond them: `vipgate check` stays the judge.

use std::borrow::Cow;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::vipgate::Document;
use super::{AddressPoolSpec, EgressPolicySpec, GatewaySpec, Kind, OverlayNodeSpec};
use crate::config::{Config, PolicydConfig};

/// Documents that have a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// The kind `EgressPolicy`.
    EgressPolicy,
    /// The kind `Gateway`.
    Gateway,
    /// The kind `AddressPool`.
    AddressPool,
    /// The kind `OverlayNode`.
    OverlayNode,
    /// A gateway's configuration.
    GatewayYaml,
    /// The policy server's configuration.
    PolicydYaml,
}

impl Published {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::EgressPolicy, Self::Gateway, Self::AddressPool, Self::OverlayNode, Self::GatewayYaml, Self::PolicydYaml];

    /// The kind, or the usual name of the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::EgressPolicy => Kind::EgressPolicy.as_str(),
            Self::Gateway => Kind::Gateway.as_str(),
            Self::AddressPool => Kind::AddressPool.as_str(),
            Self::OverlayNode => Kind::OverlayNode.as_str(),
            Self::GatewayYaml => "gateway.yaml",
            Self::PolicydYaml => "policyd.yaml",
        }
    }

    fn about(self) -> &'static str {
        match self {
            Self::EgressPolicy => "Which pods leave with which VIPs.",
            Self::Gateway => "A gateway and what it may hold.",
            Self::AddressPool => "Addresses to take VIPs from.",
            Self::OverlayNode => "A node whose pods' packets come and go in VXLAN.",
            Self::GatewayYaml => "Configuration of a gateway.",
            Self::PolicydYaml => "Configuration of the policy server.",
        }
    }
}

impl ValueEnum for Published {
    fn value_variants<'a>() -> &'a [Self] {
        &Self::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}

/// The schema of one.
pub fn document(of: Published) -> Value {
    let mut schema = match of {
        Published::EgressPolicy => object::<EgressPolicySpec>(Kind::EgressPolicy),
        Published::Gateway => object::<GatewaySpec>(Kind::Gateway),
        Published::AddressPool => object::<AddressPoolSpec>(Kind::AddressPool),
        Published::OverlayNode => object::<OverlayNodeSpec>(Kind::OverlayNode),
        Published::GatewayYaml => root::<Config>(),
        Published::PolicydYaml => root::<PolicydConfig>(),
    };
    schema["title"] = of.name().into();
    schema["description"] = of.about().into();
    schema
}

/// The schemas of all, by name.
pub fn all() -> Value {
    Value::Object(Published::ALL.map(|of| (of.name().to_owned(), document(of))).into_iter().collect())
}

fn root<T: JsonSchema>() -> Value {
    // The oldest draft that can say it all: editors know it best. Without references each schema can stand in another
    // document as it is.
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    settings.with_transform(RecursiveTransform(tidy)).into_generator().into_root_schema_for::<T>().to_value()
}

fn object<S: JsonSchema>(kind: Kind) -> Value {
    let mut schema = root::<Document<S>>();
    let properties = &mut schema["properties"];
    properties["apiVersion"] = json!({"type": "string", "enum": [kind.api_version()]});
    properties["kind"] = json!({"type": "string", "enum": [kind.as_str()]});
    if !kind.is_namespaced() {
        properties["metadata"]["properties"]["namespace"] =
            json!({"type": "null", "description": format!("{} objects are in no namespace.", kind.as_str())});
    }
    schema
}

/// From Rust's words to those of JSON: enums as lists of words, text without the line breaks of source files, integers
/// without the names of Rust's types.
fn tidy(schema: &mut Schema) {
    let Some(schema) = schema.as_object_mut() else { return };
    if let Some(Value::String(text)) = schema.get_mut("description") {
        *text = text.replace('\n', " ");
    }
    if let Some((words, meanings)) = words(schema) {
        schema.remove("oneOf");
        schema.insert("type".into(), "string".into());
        schema.insert("enum".into(), words);
        let about = schema.get("description").and_then(Value::as_str).unwrap_or_default();
        schema.insert("description".into(), format!("{about}{meanings}").trim_start().into());
    }
    let format = if schema.get("type").is_some_and(is_integer) { schema.remove("format") } else { None };
    if format.is_some_and(|format| format == "uint32") {
        schema.insert("maximum".into(), u32::MAX.into());
    }
}

/// `integer`, or a list of types with it.
fn is_integer(kind: &Value) -> bool {
    kind == "integer" || kind.as_array().is_some_and(|kinds| kinds.iter().any(is_integer))
}

/// The words of an enum that is written as one schema a word, and lines that say what each means.
fn words(schema: &Map<String, Value>) -> Option<(Value, String)> {
    let (mut words, mut meanings) = (Vec::new(), Vec::new());
    for word in schema.get("oneOf")?.as_array()? {
        let text = word.get("const")?.as_str()?;
        if let Some(meaning) = word.get("description").and_then(Value::as_str) {
            meanings.push(format!("\n- {text}: {}", meaning.replace('\n', " ")));
        }
        words.push(text.into());
    }
    Some((Value::Array(words), meanings.concat()))
}

// Texts with a form. The patterns catch what people mistype; whether a text that matches is an address is told by the
// parser.

/// A name: not empty, without blanks.
pub(crate) const WORD: &str = r"^\S+$";
/// Where a server is.
pub(crate) const URL: &str = r"^https?://[^/\s]+";

const OCTET: &str = "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])";
const V6: &str = r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,8}(\.[0-9]{1,3}){0,3}";
const V4_BITS: &str = "/(3[0-2]|[12]?[0-9])";
const V6_BITS: &str = "/(12[0-8]|1[01][0-9]|[1-9]?[0-9])";

fn v4() -> String {
    format!(r"{OCTET}(\.{OCTET}){{3}}")
}

fn text(about: &str, pattern: &str, examples: &[&str]) -> Schema {
    json_schema!({"type": "string", "description": about, "pattern": format!("^({pattern})$"), "examples": examples})
}

/// The form of a field that holds an IP address.
pub(crate) enum Address {}

impl JsonSchema for Address {
    fn schema_name() -> Cow<'static, str> {
        "Address".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        text("An IPv4 or IPv6 address.", &format!("{}|{V6}", v4()), &["203.0.113.10", "2001:db8::10"])
    }
}

/// The form of a field that holds an IP address and a port.
pub(crate) enum SocketAddress {}

impl JsonSchema for SocketAddress {
    fn schema_name() -> Cow<'static, str> {
        "SocketAddress".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let pattern = format!(r"({}|\[{V6}\]):[0-9]{{1,5}}", v4());
        text("An IP address and a port.", &pattern, &["127.0.0.1:9469", "[::1]:9469"])
    }
}

/// The form of a [`super::Cidr`].
pub(super) fn cidr() -> Schema {
    let pattern = format!("{}{V4_BITS}|{V6}{V6_BITS}", v4());
    text("A prefix, with no bit set beyond its length.", &pattern, &["10.0.0.0/8", "2001:db8::/32"])
}

/// The form of a [`super::AddressRange`].
pub(super) fn range() -> Schema {
    let v4 = v4();
    let pattern = format!("{v4}({V4_BITS}| *- *{v4})|{V6}({V6_BITS}| *- *{V6})");
    text("A prefix, or the first and the last address.", &pattern, &["203.0.113.0/28", "203.0.113.32-203.0.113.40"])
}

/// The form of `metadata`: what vipgate reads of it, beside which Kubernetes' other fields may stand.
pub(super) enum Metadata {}

impl JsonSchema for Metadata {
    fn schema_name() -> Cow<'static, str> {
        "Metadata".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let labels = |about: &str| json!({"type": ["object", "null"], "description": about, "additionalProperties": {"type": "string"}});
        json_schema!({
            "type": "object",
            "description": "Names the object. Other fields of Kubernetes' metadata may stand here, too.",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "description": "Its name.", "minLength": 1},
                "namespace": {"type": ["string", "null"], "description": "Its namespace. Default: `default`."},
                "labels": labels("By which it can be selected."),
                "annotations": labels("Notes of people and programs."),
            },
        })
    }
}

/// A policy says by a Service, or by labels and addresses, whom it covers: the rules of its `verify`.
pub(super) fn policy_forms() -> Value {
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

/// A pool has a range or a provider.
pub(super) fn pool_forms() -> Value {
    json!([
        {"required": ["ranges"], "properties": {"ranges": {"minItems": 1}}},
        {"required": ["provider"], "properties": {"provider": {"minProperties": 1}}},
    ])
}

/// Which operators take values.
pub(super) fn requirement_forms() -> Value {
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
