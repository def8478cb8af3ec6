//! JSON schemas: how they are generated, and those of fields that many documents have.
//!
//! Generated from the types that documents are deserialized into, for editors and CI pipelines. Errors that a schema
//! can't describe (host bits of a prefix, duplicate names) are found by `vipgate check` only.

use std::borrow::Cow;
use std::time::Duration;

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value};

/// Reads a duration: a whole number and a unit, `ms`, `s`, `m` or `h`.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (count, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let millis_per_unit = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(millis_per_unit).map(Duration::from_millis)
}

/// The schema of a type.
pub fn root<T: JsonSchema>() -> Value {
    // Draft 7 has all needed keywords and is the best supported one in editors. Without references a schema can be
    // embedded in another document.
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    settings.with_transform(RecursiveTransform(simplify)).into_generator().into_root_schema_for::<T>().to_value()
}

/// Simplifies a generated schema: enums as lists of values, descriptions without line breaks, integers without Rust's
/// type names.
fn simplify(schema: &mut Schema) {
    let Some(schema) = schema.as_object_mut() else { return };
    if let Some(Value::String(text)) = schema.get_mut("description") {
        *text = text.replace('\n', " ");
    }
    if let Some((values, descriptions)) = enum_values(schema) {
        schema.remove("oneOf");
        schema.insert("type".into(), "string".into());
        schema.insert("enum".into(), values);
        let description = schema.get("description").and_then(Value::as_str).unwrap_or_default();
        schema.insert("description".into(), format!("{description}{descriptions}").trim_start().into());
    }
    let format = if schema.get("type").is_some_and(is_integer) { schema.remove("format") } else { None };
    if format.is_some_and(|format| format == "uint32") {
        schema.entry("maximum").or_insert_with(|| u32::MAX.into());
    }
}

/// Whether a type is `integer`, or a list of types with it.
fn is_integer(kind: &Value) -> bool {
    kind == "integer" || kind.as_array().is_some_and(|kinds| kinds.iter().any(is_integer))
}

/// The values of an enum with one subschema per value, and a line with the description of each.
fn enum_values(schema: &Map<String, Value>) -> Option<(Value, String)> {
    let (mut values, mut descriptions) = (Vec::new(), Vec::new());
    for variant in schema.get("oneOf")?.as_array()? {
        let value = variant.get("const")?.as_str()?;
        if let Some(description) = variant.get("description").and_then(Value::as_str) {
            descriptions.push(format!("\n- {value}: {}", description.replace('\n', " ")));
        }
        values.push(value.into());
    }
    Some((Value::Array(values), descriptions.concat()))
}

// Patterns of formatted strings. They catch typing errors; the parser decides whether a matching string is valid.

/// Pattern of a name: not empty, without whitespace.
pub const NAME_PATTERN: &str = r"^\S+$";
/// Pattern of a duration: a whole number and a unit.
pub const DURATION_PATTERN: &str = "^[0-9]+(ms|s|m|h)$";
/// Pattern of a server's URL.
pub const URL_PATTERN: &str = r"^https?://[^/\s]+";

const OCTET: &str = "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])";
const V6: &str = r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,8}(\.[0-9]{1,3}){0,3}";
const V4_BITS: &str = "/(3[0-2]|[12]?[0-9])";
const V6_BITS: &str = "/(12[0-8]|1[01][0-9]|[1-9]?[0-9])";

fn v4() -> String {
    format!(r"{OCTET}(\.{OCTET}){{3}}")
}

fn text(description: &str, pattern: &str, examples: &[&str]) -> Schema {
    json_schema!({
        "type": "string",
        "description": description,
        "pattern": format!("^({pattern})$"),
        "examples": examples,
    })
}

/// Schema of an IP address field.
pub enum Address {}

impl JsonSchema for Address {
    fn schema_name() -> Cow<'static, str> {
        "Address".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        text("An IPv4 or IPv6 address.", &format!("{}|{V6}", v4()), &["203.0.113.10", "2001:db8::10"])
    }
}

/// Schema of a field with an IP address and a port.
pub enum SocketAddress {}

impl JsonSchema for SocketAddress {
    fn schema_name() -> Cow<'static, str> {
        "SocketAddress".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let pattern = format!(r"({}|\[{V6}\]):[0-9]{{1,5}}", v4());
        text("An IP address and a port.", &pattern, &["127.0.0.1:9469", "[::1]:9469"])
    }
}

/// Schema of a field with the path of a file or directory.
pub enum FilePath {}

impl JsonSchema for FilePath {
    fn schema_name() -> Cow<'static, str> {
        "FilePath".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": "path"})
    }
}

/// Schema of a [`crate::manifest::Cidr`].
pub(crate) fn cidr() -> Schema {
    let pattern = format!("{}{V4_BITS}|{V6}{V6_BITS}", v4());
    text("A prefix without host bits.", &pattern, &["10.0.0.0/8", "2001:db8::/32"])
}

/// Schema of an [`crate::manifest::AddressRange`].
pub(crate) fn range() -> Schema {
    let v4 = v4();
    let pattern = format!("{v4}({V4_BITS}| *- *{v4})|{V6}({V6_BITS}| *- *{V6})");
    text("A prefix, or first-last addresses.", &pattern, &["203.0.113.0/28", "203.0.113.32-203.0.113.40"])
}
