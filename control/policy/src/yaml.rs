//! YAML and JSON with source positions: text to trees (`read`), trees to types (`decode`), and field paths (`path`).
//!
//! The tree keeps the position of every value, so that errors found long after parsing have line, column and field,
//! too.

mod decode;
mod error;
mod path;
mod read;
mod suggest;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

pub use self::decode::decode;
pub use self::path::{join, key_step};
pub use self::read::{MAX_ALIAS_BYTES, MAX_ALIAS_VALUES, first, read};
pub use self::suggest::closest_match;
use crate::diagnostic::{Code, Diagnostic, Severity};

/// A position in a text; both count from 1, columns in characters; 0 for an object without a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub line: u32,
    pub column: u32,
}

/// A value and its position.
#[derive(Clone, Debug)]
pub struct Node {
    /// Start of the value.
    pub position: Position,
    pub value: Value,
}

/// A YAML value.
#[derive(Clone, Debug)]
pub enum Value {
    /// `null`, or an omitted value.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A negative integer.
    Negative(i64),
    /// A non-negative integer.
    Number(u64),
    /// A number with a fraction or an exponent.
    Float(f64),
    /// A string, quoted or not.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in source order.
    Map(Vec<Entry>),
}

/// An entry of a mapping.
#[derive(Clone, Debug)]
pub struct Entry {
    pub key: String,
    /// Start of the key.
    pub key_position: Position,
    /// The value.
    pub node: Node,
}

/// An error in a text, with position and field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct YamlError {
    /// 0 while it isn't known.
    pub position: Position,
    /// Path of the field, see [`join`]; empty: the document.
    pub field: String,
    pub reason: String,
    /// The kind of mistake.
    pub code: Code,
}

/// Without positions.
impl From<serde_json::Value> for Node {
    fn from(value: serde_json::Value) -> Self {
        use serde_json::Value as Json;

        let position = Position::default();
        let value = match value {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(value),
            Json::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => Value::Number(number),
                (None, Some(number)) => Value::Negative(number),
                (None, None) => Value::Float(number.as_f64().unwrap_or_default()),
            },
            Json::String(text) => Value::Text(text),
            Json::Array(items) => Value::List(items.into_iter().map(Self::from).collect()),
            Json::Object(entries) => {
                let entry = |(key, value): (String, Json)| Entry { key, key_position: position, node: value.into() };
                Value::Map(entries.into_iter().map(entry).collect())
            }
        };
        Self { position, value }
    }
}

impl Node {
    /// The value of a key, if this is a map with the key.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node),
            _ => None,
        }
    }

    /// The value of a key, if this is a map with the key and the value is a string.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key).map(|node| &node.value) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The position of a field below this node, or of its nearest ancestor that exists.
    pub fn locate(&self, field: &str) -> Position {
        path::locate(self, field)
    }
}

/// A named text, e.g. of a file. Keeps the text to locate fields on demand.
#[derive(Debug)]
pub struct Source {
    id: u64,
    name: Arc<str>,
    text: String,
    tree: OnceLock<Vec<Node>>,
}

impl Source {
    /// A text; diagnostics have `name` as file.
    pub fn new(name: &str, text: String) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT_ID.fetch_add(1, Relaxed), name: name.into(), text, tree: OnceLock::new() }
    }

    /// Its id, unique in the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its name in diagnostics.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its documents and syntax errors. Documents before and after an error are included.
    pub fn documents(&self) -> (Vec<Node>, Vec<Diagnostic>) {
        let (nodes, faults) = read(&self.text);
        (nodes, faults.into_iter().map(|fault| self.diagnostic(fault)).collect())
    }

    /// Its first readable document.
    pub fn first_document(&self) -> Option<Node> {
        first(&self.text)
    }

    /// The position of a field of the document with this index, or of its nearest ancestor that exists.
    pub fn locate(&self, document: usize, field: &str) -> Position {
        // Parsed again only for input with errors.
        let tree = self.tree.get_or_init(|| read(&self.text).0);
        tree.get(document).map_or_else(Position::default, |node| node.locate(field))
    }

    /// The diagnostic (an error) for a fault in this text.
    pub fn diagnostic(&self, fault: YamlError) -> Diagnostic {
        Diagnostic {
            file: self.name.clone(),
            line: fault.position.line,
            column: fault.position.column,
            field: fault.field,
            severity: Severity::Error,
            reason: fault.reason,
            code: fault.code,
            object: None,
        }
    }
}
