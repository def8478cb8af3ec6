//! A table as nftables prints it: counters, sets, maps and chains by name.

use std::collections::{BTreeMap, BTreeSet};

/// Family and name of the table.
pub const TABLE: &str = "inet vipgate";

/// The objects of a table. Their names share one space here, unlike in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Named counters.
    pub counters: BTreeSet<String>,
    pub sets: BTreeMap<String, Set>,
    pub maps: BTreeMap<String, Map>,
    pub chains: BTreeMap<String, Chain>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Type of its elements; never changes.
    pub element: &'static str,
    /// Whether they are ranges.
    pub is_interval: bool,
    pub elements: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// Types of its keys and values; never change.
    pub types: &'static str,
    pub elements: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Type, hook and priority of a base chain; never change.
    pub hook: Option<&'static str>,
    pub comment: String,
    pub rules: Vec<String>,
}

impl Chain {
    /// A chain with rules.
    pub fn new(rules: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { rules: rules.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// The chain with a comment, without the characters that end one.
    #[must_use]
    pub fn with_comment(mut self, comment: &str) -> Self {
        let printable = |c: &char| c.is_ascii_graphic() && !matches!(c, '"' | '\\') || *c == ' ';
        self.comment = comment.chars().filter(printable).take(MAX_COMMENT).collect();
        self
    }
}

/// Maximum length of a comment in the kernel, with its terminator 128 bytes.
const MAX_COMMENT: usize = 127;
