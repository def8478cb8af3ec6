//! Tables of fields in Markdown, from a JSON schema: name, type, default, description.

use std::fmt::Write;

use serde_json::{Map, Value};
use vipgate_policy::manifest::{AddressRange, Cidr, MacAddress};
use vipgate_policy::schema::{Address, SocketAddress, URL_PATTERN, root};

use crate::config::units::DurationText;
use crate::config::{MaxUnavailable, PortRange};

/// Whether a table has the fields of nested objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nested {
    Included,
    LeftOut,
}

/// A row of a table.
struct Row {
    path: String,
    kind: String,
    default: String,
    description: String,
}

/// The table of the fields of an object or of the items of a list, with `prefix` before their names; empty if there are
/// none.
pub(super) fn table(schema: &Value, prefix: &str, nested: Nested) -> String {
    let mut rows = Vec::new();
    let (object, prefix) = object_below(schema, prefix);
    add_rows(object, &prefix, nested, &TextTypes::new(), &mut rows);
    if rows.is_empty() {
        return String::new();
    }
    let mut out = "| field | type | default | description |\n|---|---|---|---|\n".to_owned();
    for Row { path, kind, default, description } in rows {
        let cells = [kind, default, description].map(|cell| cell.replace('|', "\\|"));
        let _ = writeln!(out, "| `{path}` | {} | {} | {} |", cells[0], cells[1], cells[2]);
    }
    out
}

fn add_rows(object: &Value, prefix: &str, nested: Nested, types: &TextTypes, rows: &mut Vec<Row>) {
    let (fields, required) = fields(object);
    // A schema has its fields by name: those that must be set come first.
    let is_required = |name: &str| required.iter().any(|it| **it == *name);
    let (first, rest): (Vec<_>, Vec<_>) = fields.into_iter().partition(|it| is_required(&it.name));
    for Field { name, schema: property, summary } in first.into_iter().chain(rest) {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let (description, documented) = described(property, summary);
        let default = match documented {
            _ if is_required(&name) => "required".to_owned(),
            Some(text) => text,
            None => default_value(property),
        };
        rows.push(Row { path: path.clone(), kind: types.kind(property), default, description });
        let (below, path) = object_below(property, &path);
        if nested == Nested::Included && !is_selector(below) {
            add_rows(below, &path, nested, types, rows);
        }
    }
}

/// A field of an object.
struct Field<'a> {
    name: String,
    schema: &'a Value,
    /// Description of the alternative that the field is, for a field without one.
    summary: &'a str,
}

/// The fields of an object, and the names of the required ones. A choice has the fields of all its alternatives.
fn fields(schema: &Value) -> (Vec<Field<'_>>, Vec<&Value>) {
    let has_own = schema.get("properties").is_some();
    let objects: Vec<&Value> = if has_own { vec![schema] } else { alternatives(schema).collect() };
    let is_choice = objects.len() > 1;
    let mut all = Vec::new();
    for object in &objects {
        let summary = object.get("description").and_then(Value::as_str).unwrap_or_default();
        let own = object.get("properties").and_then(Value::as_object).into_iter().flatten();
        all.extend(own.map(|(name, schema)| Field { name: name.clone(), schema, summary }));
    }
    let required = objects.iter().filter(|_| !is_choice).filter_map(|it| it.get("required")?.as_array());
    if !is_choice {
        for field in &mut all {
            field.summary = "";
        }
    }
    (all, required.flatten().collect())
}

/// The alternatives of a schema other than `null`.
fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    let lists = ["anyOf", "oneOf"].into_iter().filter_map(|key| schema.get(key)?.as_array());
    lists.flatten().filter(|it| it.get("type").is_none_or(|kind| kind != "null"))
}

/// The schema without the alternative `null`.
fn present(schema: &Value) -> &Value {
    let mut all = alternatives(schema);
    match (all.next(), all.next()) {
        (Some(only), None) if schema.get("properties").is_none() => only,
        _ => schema,
    }
}

/// The object that a field is or has as items, and its path.
fn object_below<'a>(schema: &'a Value, path: &str) -> (&'a Value, String) {
    let schema = present(schema);
    match schema.get("items") {
        Some(items) => (present(items), format!("{path}[]")),
        None => (schema, path.to_owned()),
    }
}

/// Label selectors are explained once, in words.
fn is_selector(schema: &Value) -> bool {
    schema.get("properties").is_some_and(|fields| fields.get("matchExpressions").is_some())
}

/// Description and documented default of a field. A sentence `Default: ..` is the default; a line per value of an enum
/// becomes a sentence.
fn described(schema: &Value, summary: &str) -> (String, Option<String>) {
    let text = schema.get("description").and_then(Value::as_str).unwrap_or(summary);
    let mut lines = text.lines();
    let (mut description, mut default) = (lines.next().unwrap_or_default().to_owned(), None);
    if let Some(start) = description.find("Default: ") {
        let end = description[start..].find(". ").map_or(description.len(), |end| start + end + 2);
        let sentence = description[start..end].trim_end().trim_start_matches("Default: ").trim_end_matches('.');
        default = Some(sentence.to_owned());
        description.replace_range(start..end, "");
        description.truncate(description.trim_end().len());
    }
    for line in lines {
        let (value, meaning) = line.trim_start_matches("- ").split_once(": ").unwrap_or((line, ""));
        let _ = write!(description, " `{value}`: {}", lower_first(meaning));
    }
    (description.trim().to_owned(), default)
}

/// A sentence after a colon; abbreviations stay as they are.
fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), chars.clone().next()) {
        (Some(first), Some(second)) if !second.is_uppercase() => first.to_lowercase().chain(chars).collect(),
        _ => text.to_owned(),
    }
}

/// The default in the schema; objects have none, since those of their fields are listed.
fn default_value(schema: &Value) -> String {
    match schema.get("default") {
        None | Some(Value::Object(_)) => String::new(),
        Some(Value::Null) => "none".to_owned(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(other) => format!("`{other}`"),
    }
}

/// Names of texts of a certain form, by their patterns.
struct TextTypes([(Value, &'static str, &'static str); 9]);

impl TextTypes {
    fn new() -> Self {
        let pattern = |schema: Value| schema["pattern"].clone();
        Self([
            (pattern(root::<Cidr>()), "prefix", "prefixes"),
            (pattern(root::<AddressRange>()), "prefix or `first-last`", "prefixes or `first-last`"),
            (pattern(root::<Address>()), "address", "addresses"),
            (pattern(root::<SocketAddress>()), "address:port", "address:port"),
            (pattern(root::<DurationText>()), "duration", "durations"),
            (pattern(root::<PortRange>()), "port range", "port ranges"),
            (pattern(root::<MaxUnavailable>()), "integer or percentage", "integers or percentages"),
            (pattern(root::<MacAddress>()), "MAC address", "MAC addresses"),
            (URL_PATTERN.into(), "URL", "URLs"),
        ])
    }

    /// The type of a field in words.
    fn kind(&self, schema: &Value) -> String {
        let schema = present(schema);
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            let shown = values.iter().filter(|value| !value.is_null());
            let shown = shown.map(|value| value.as_str().map_or_else(|| value.to_string(), |text| format!("`{text}`")));
            return shown.collect::<Vec<_>>().join(", ");
        }
        match type_name(schema) {
            "string" => self.text(schema).map_or("string", |(one, _)| one).to_owned(),
            "integer" => integer(schema),
            "boolean" => "bool".to_owned(),
            "array" => format!("list of {}", self.plural(&schema["items"])),
            _ if is_selector(schema) => "selector".to_owned(),
            _ if is_map(schema) => "map".to_owned(),
            _ => "object".to_owned(),
        }
    }

    fn text(&self, schema: &Value) -> Option<(&'static str, &'static str)> {
        if schema.get("format").is_some_and(|format| format == "path") {
            return Some(("path", "paths"));
        }
        let pattern = schema.get("pattern")?;
        self.0.iter().find(|(known, ..)| known == pattern).map(|(_, one, many)| (*one, *many))
    }

    fn plural(&self, items: &Value) -> &'static str {
        match type_name(present(items)) {
            "string" => self.text(present(items)).map_or("strings", |(_, many)| many),
            "integer" => "integers",
            _ => "objects",
        }
    }
}

/// The type, without `null`.
fn type_name(schema: &Value) -> &str {
    let all = match schema.get("type") {
        Some(Value::Array(all)) => all.as_slice(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    all.iter().filter_map(Value::as_str).find(|kind| *kind != "null").unwrap_or("object")
}

fn is_map(schema: &Value) -> bool {
    let fields = schema.get("properties").and_then(Value::as_object).is_none_or(Map::is_empty);
    fields && schema.get("additionalProperties").is_some_and(|it| it != &Value::Bool(false))
}

/// `integer`, with the limits that aren't those of 16 or 32 bits.
fn integer(schema: &Value) -> String {
    let limit = |key: &str| schema.get(key).and_then(Value::as_u64);
    let max = limit("maximum").filter(|max| ![u64::from(u16::MAX), u64::from(u32::MAX)].contains(max));
    match (limit("minimum").filter(|min| *min > 0), max) {
        (Some(min), Some(max)) => format!("integer, {min} to {max}"),
        (Some(min), None) => format!("integer, at least {min}"),
        (None, Some(max)) => format!("integer, at most {max}"),
        (None, None) => "integer".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_has_types_limits_defaults_and_nested_fields() {
        let schema = json!({"required": ["name"], "properties": {
            "cores": {"type": ["array", "null"], "items": {"type": "integer"}, "description": "Cores. Default: all."},
            "mode": {"type": "string", "enum": ["a", "b"], "default": "a",
                     "description": "Mode.\n- a: First.\n- b: TCP."},
            "name": {"type": "string", "description": "Its name, `x|y`."},
            "peer": {"anyOf": [{"type": "object", "required": ["port"], "properties": {
                "port": {"type": "integer", "minimum": 1, "maximum": 65535}}}, {"type": "null"}]},
            "targets": {"type": "array", "default": [], "items": {"type": "object", "properties": {
                "limit": {"type": "integer", "minimum": 0, "maximum": 9, "default": 3}}}},
            "source": {"oneOf": [
                {"type": "object", "required": ["files"], "description": "Files.",
                 "properties": {"files": {"type": "boolean"}}},
                {"type": "object", "required": ["map"],
                 "properties": {"map": {"type": "object", "additionalProperties": true}}}]},
        }});
        let expected = "\
| field | type | default | description |
|---|---|---|---|
| `name` | string | required | Its name, `x\\|y`. |
| `cores` | list of integers | all | Cores. |
| `mode` | `a`, `b` | `a` | Mode. `a`: first. `b`: TCP. |
| `peer` | object |  |  |
| `peer.port` | integer, at least 1 | required |  |
| `source` | object |  |  |
| `source.files` | bool |  | Files. |
| `source.map` | map |  |  |
| `targets` | list of objects | `[]` |  |
| `targets[].limit` | integer, at most 9 | `3` |  |
";
        assert_eq!(table(&schema, "", Nested::Included), expected);
        assert_eq!(table(&schema, "", Nested::LeftOut).lines().count(), 8);
        assert!(table(&schema["properties"]["targets"], "targets", Nested::Included).contains("`targets[].limit`"));
        assert_eq!(table(&json!({"type": "boolean"}), "x", Nested::Included), "");
    }
}
