//! Text to trees with positions, by `serde-saphyr`; bounds nesting and expanded aliases.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Localizer, Location, Spanned, UserMessageFormatter};

use super::{Entry, Node, Position, Value, YamlError};
use crate::diagnostic::Code;

/// Maximum nesting of values: Kubernetes objects need about 20.
const MAX_DEPTH: usize = 100;
/// Maximum number of values from aliases in one text: manual manifests have few, `kubectl`'s output none.
pub const MAX_ALIAS_VALUES: usize = 20_000;
/// Maximum bytes of strings beyond twice the length of the text: escapes at most double the length, the rest is from
/// aliases.
pub const MAX_ALIAS_BYTES: usize = 1 << 20;
/// Faulty documents of one text after which reading stops: values from aliases before an error are not counted.
const MAX_FAULTS: usize = 100;

/// The documents and errors of a text. After an error within a document, reading continues with the next one; after a
/// syntax error, or when a limit is exceeded, it stops. Empty documents are left out.
pub fn read(text: &str) -> (Vec<Node>, Vec<YamlError>) {
    let (mut nodes, mut faults) = (Vec::new(), Vec::new());
    for document in documents(text.len(), &mut text.as_bytes()) {
        match document {
            Ok(node) => nodes.push(node),
            Err(fault) => faults.push(fault),
        }
    }
    (nodes, faults)
}

/// The first readable document of a text; the others are not parsed.
pub fn first(text: &str) -> Option<Node> {
    documents(text.len(), &mut text.as_bytes()).find_map(Result::ok)
}

fn documents<'a>(length: usize, bytes: &'a mut &'a [u8]) -> impl Iterator<Item = Result<Node, YamlError>> + 'a {
    let options = serde_saphyr::options! {
        with_snippet: false,
        emit_comments: false,
        // YAML 1.2: a node named `n` or a zone named `no` is a string.
        strict_booleans: true,
        // A List may have all objects of a cluster; only depth and expanded aliases are limited.
        budget: serde_saphyr::budget! {
            max_reader_input_bytes: None,
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_total_scalar_bytes: max_scalar_bytes(length),
            max_depth: MAX_DEPTH,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_ALIAS_VALUES,
        },
    };
    let documents = serde_saphyr::read_with_options::<_, Spanned<Value>>(bytes, options);
    let mut budget = Budget::of(length);
    documents.map_while(move |document| budget.admit(document.map(node).map_err(|error| fault(&error))))
}

/// Maximum bytes of keys and strings of a text with this length.
fn max_scalar_bytes(length: usize) -> usize {
    length.saturating_mul(2).saturating_add(MAX_ALIAS_BYTES)
}

/// Remaining budget over all documents of a text: the library's limits are per document.
struct Budget {
    values: usize,
    bytes: usize,
    faults: usize,
    is_exceeded: bool,
}

impl Budget {
    fn of(length: usize) -> Self {
        Self {
            values: length.saturating_add(MAX_ALIAS_VALUES),
            bytes: max_scalar_bytes(length),
            faults: MAX_FAULTS,
            is_exceeded: false,
        }
    }

    /// The next document; a fault for the first one that exceeds the budget, then `None`.
    fn admit(&mut self, document: Result<Node, YamlError>) -> Option<Result<Node, YamlError>> {
        if self.is_exceeded {
            return None;
        }
        let (code, at, reason) = match document {
            Ok(node) if self.spend(&node) => return Some(Ok(node)),
            Ok(node) => (
                Code::AliasLimit,
                node.position,
                format!(
                    "aliases expand to more than {MAX_ALIAS_VALUES} values or {} MiB of text in the documents so far: \
                     this and the following documents are not read",
                    MAX_ALIAS_BYTES >> 20
                ),
            ),
            Err(fault) if self.faults > 0 => {
                self.faults -= 1;
                return Some(Err(fault));
            }
            Err(fault) => (
                Code::TooManyInvalidDocuments,
                fault.position,
                format!("more than {MAX_FAULTS} documents are not valid YAML: the rest is not read"),
            ),
        };
        self.is_exceeded = true;
        Some(Err(YamlError { position: at, field: String::new(), reason, code }))
    }

    /// Deducts the values and bytes of a tree; returns whether the budget was sufficient.
    fn spend(&mut self, node: &Node) -> bool {
        let Some(values) = self.values.checked_sub(1) else { return false };
        self.values = values;
        match &node.value {
            Value::Text(text) => self.spend_bytes(text.len()),
            Value::List(items) => items.iter().all(|item| self.spend(item)),
            Value::Map(entries) => {
                entries.iter().all(|entry| self.spend_bytes(entry.key.len()) && self.spend(&entry.node))
            }
            Value::Null | Value::Bool(_) | Value::Negative(_) | Value::Number(_) | Value::Float(_) => true,
        }
    }

    fn spend_bytes(&mut self, count: usize) -> bool {
        let left = self.bytes.checked_sub(count);
        self.bytes = left.unwrap_or_default();
        left.is_some()
    }
}

fn fault(error: &serde_saphyr::Error) -> YamlError {
    let messages = UserMessageFormatter.with_localizer(&WithoutLocations);
    let at = error.location().map(position).unwrap_or_default();
    YamlError {
        position: Position { line: at.line.max(1), column: at.column.max(1) },
        field: String::new(),
        reason: format!("not valid YAML: {}", error.without_snippet().render_with_formatter(&messages)),
        code: Code::InvalidYaml,
    }
}

/// Removes locations from messages: a diagnostic has its own.
struct WithoutLocations;

impl Localizer for WithoutLocations {
    fn attach_location<'a>(&self, base: Cow<'a, str>, _: Location) -> Cow<'a, str> {
        base
    }

    fn alias_used_at(&self, _: Location) -> String {
        String::new()
    }
}

fn position(location: Location) -> Position {
    let cap = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Position { line: cap(location.line()), column: cap(location.column()) }
}

fn node(spanned: Spanned<Value>) -> Node {
    Node { position: position(spanned.referenced), value: spanned.value }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(u64::try_from(v).map_or(Value::Negative(v), Value::Number))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Value::Float(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::Text(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::Text(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<Value>>()? {
            items.push(node(item));
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let key_at = position(key.referenced);
            entries.push(Entry { key: key.value, key_position: key_at, node: node(map.next_value()?) });
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_and_values_have_positions() {
        let (nodes, faults) = read("# first\nname: a\nlist:\n- 1\n- {x: true, y: ~, z: no}\n---\n---\nb: \"1\"\n");
        assert_eq!(faults, []);
        assert_eq!(nodes.len(), 2);
        assert_eq!(nodes[0].position.line, 2);
        let Value::List(items) = &nodes[0].get("list").unwrap().value else { panic!("a list") };
        assert_eq!((items[1].position.line, items[1].position.column), (5, 3));
        assert!(matches!(items[1].get("x").unwrap().value, Value::Bool(true)));
        assert_eq!(items[1].text("z"), Some("no"));
        assert!(matches!(items[1].get("y").unwrap().value, Value::Null));
        assert_eq!(nodes[1].position.line, 8);
        assert_eq!(nodes[1].text("b"), Some("1"));
    }

    #[test]
    fn an_error_in_one_document_does_not_affect_the_next_one() {
        let (nodes, faults) = read("a: 1\na: 2\n---\nb: 1\n");
        assert_eq!(nodes.len(), 1);
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].position.line, 2);
        assert!(faults[0].reason.contains("duplicate"), "{}", faults[0].reason);
        assert!(!faults[0].reason.contains("line"), "{}", faults[0].reason);
    }

    #[test]
    fn a_syntax_error_has_its_line() {
        let (_, faults) = read("a: 1\nb: [1, 2\nc: }\n");
        assert_eq!(faults.len(), 1);
        assert!((2..=3).contains(&faults[0].position.line), "{faults:?}");
    }

    #[test]
    fn aliases_are_limited_in_values_and_bytes() {
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(100_000), "*a,".repeat(99));
        assert_eq!(read(&long).1.len(), 1, "10 MB of 100 kB");
        let mut bomb = format!("a: &a [{}]\n", "x,".repeat(10));
        for pair in ["a", "b", "c", "d", "e"].windows(2) {
            bomb += &[pair[1], ": &", pair[1], " [", &format!("*{},", pair[0]).repeat(10), "]\n"].concat();
        }
        assert_eq!(read(&bomb).1.len(), 1, "a hundred thousand values of 200 bytes");
        let (nodes, faults) = read("a: &a {x: 1}\nb: [*a, *a]\n");
        assert_eq!((nodes.len(), faults.len()), (1, 0), "a typical manual manifest");
    }

    #[test]
    fn aliases_are_limited_over_all_documents_of_a_text() {
        let nine = |item: &str| [item; 9].join(",");
        // 27 aliases, 8303 values, 4 lines.
        let document =
            format!("a: &a [{}]\nb: &b [{}]\nc: &c [{}]\nd: [{}]\n", nine("x"), nine("*a"), nine("*b"), nine("*c"));
        let (nodes, faults) = read(&document);
        assert_eq!((nodes.len(), faults.len()), (1, 0), "a single document is within the limits");
        let (nodes, faults) = read(&vec![document; 50].join("---\n"));
        assert_eq!((nodes.len(), faults.len()), (3, 1));
        assert_eq!(faults[0].position.line, 3 * 5 + 1, "{faults:?}");
        assert!(faults[0].reason.contains("aliases expand to more than 20000 values"), "{faults:?}");
        // 10 kB that expand to 210 kB.
        let document = format!("a: &a {}\nb: [{}]\n", "x".repeat(10_000), ["*a"; 20].join(","));
        let (nodes, faults) = read(&vec![document; 50].join("---\n"));
        assert_eq!((nodes.len(), faults.len()), (9, 1));
        let (nodes, faults) = read(&"a: &a {x: 1}\nb: [*a, *a]\n---\n".repeat(1000));
        assert_eq!((nodes.len(), faults.len()), (1000, 0), "a typical manual manifest, a thousand times");
    }

    #[test]
    fn reading_stops_after_too_many_faulty_documents() {
        let (nodes, faults) = read(&["a: 1\na: 2\n---\n".repeat(1000), "b: 1\n".to_owned()].concat());
        assert_eq!((nodes.len(), faults.len()), (0, MAX_FAULTS + 1));
        assert!(faults[MAX_FAULTS].reason.contains("more than 100 documents"), "{:?}", faults[MAX_FAULTS]);
        let (nodes, faults) = read(&["a: 1\na: 2\n---\n".repeat(MAX_FAULTS), "b: 1\n".to_owned()].concat());
        assert_eq!((nodes.len(), faults.len()), (1, MAX_FAULTS));
    }

    #[test]
    fn depth_is_limited() {
        let (_, faults) = read(&"[".repeat(5000));
        assert_eq!(faults.len(), 1);
    }
}
