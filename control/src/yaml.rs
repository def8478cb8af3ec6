//! YAML and JSON as a tree in which every value knows where it stands, and typed values out of that tree.
//!
//! Reading in two steps is what lets every complaint, also one that is found long after reading, name line, column and
//! field in the same words. `read` makes the tree, `decode` makes types of it, `path` names places in it.

mod decode;
mod error;
mod path;
mod read;
mod suggest;

pub use self::decode::decode;
pub use self::path::{join, key_step};
#[cfg(any(test, fuzzing))]
pub(crate) use self::read::{MOST_REPEATED, REPEATED_BYTES};
pub use self::read::{first, read};
pub(crate) use self::suggest::nearest;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use crate::complaint::{Complaint, Severity};

/// A place in a text; both count from 1, columns in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line.
    pub line: u32,
    /// Column.
    pub column: u32,
}

/// A value and where it begins.
#[derive(Clone, Debug)]
pub struct Node {
    /// Where it begins.
    pub at: Position,
    /// What it is.
    pub value: Value,
}

/// What a node is.
#[derive(Clone, Debug)]
pub enum Value {
    /// `null`, or nothing where a value could be.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number below zero.
    Negative(i64),
    /// A whole number.
    Number(u64),
    /// A number with a fraction or an exponent.
    Float(f64),
    /// Text, quoted or not.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order of the text.
    Map(Vec<Entry>),
}

/// One entry of a mapping.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key begins.
    pub key_at: Position,
    /// The value.
    pub node: Node,
}

/// What is wrong in one text, and where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub at: Position,
    /// Path of the field, see [`join`]; empty for a document.
    pub field: String,
    /// What is wrong.
    pub reason: String,
}

impl Node {
    /// The value of a key, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node),
            _ => None,
        }
    }

    /// The text of a key's value, if this is a map that has it and it is text.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key).map(|node| &node.value) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Where a field below this node is, or the nearest thing around it that exists.
    pub fn locate(&self, field: &str) -> Position {
        path::locate(self, field)
    }
}

/// A named text: a file, or what stands for one. Keeps the text so that places in it can be found when needed.
#[derive(Debug)]
pub struct Source {
    id: u64,
    name: Arc<str>,
    text: String,
    tree: OnceLock<Vec<Node>>,
}

impl Source {
    /// A text under the name that complaints give it.
    pub fn new(name: &str, text: String) -> Self {
        static TEXTS: AtomicU64 = AtomicU64::new(0);
        Self { id: TEXTS.fetch_add(1, Relaxed), name: name.into(), text, tree: OnceLock::new() }
    }

    /// Its number: no other text of this process has it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The name that complaints give it.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its documents and what is wrong with it as YAML. What could be read before and after a fault is returned.
    pub fn documents(&self) -> (Vec<Node>, Vec<Complaint>) {
        let (nodes, faults) = read(&self.text);
        (nodes, faults.into_iter().map(|fault| self.complaint(fault)).collect())
    }

    /// Its first document that can be read.
    pub fn first_document(&self) -> Option<Node> {
        first(&self.text)
    }

    /// Where a field of the `document`th document (from 0) is, or the nearest thing around it that exists.
    pub fn locate(&self, document: usize, field: &str) -> Position {
        // Only faulty input gets here: the second reading costs nothing while all is well.
        let tree = self.tree.get_or_init(|| read(&self.text).0);
        tree.get(document).map_or_else(Position::default, |node| node.locate(field))
    }

    /// A fault in this text as an error for people.
    pub fn complaint(&self, fault: Fault) -> Complaint {
        Complaint {
            file: self.name.clone(),
            line: fault.at.line,
            column: fault.at.column,
            field: fault.field,
            severity: Severity::Error,
            reason: fault.reason,
            object: None,
        }
    }
}
