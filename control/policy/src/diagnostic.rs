//! Diagnostics of configuration files and manifests: file, line, field, severity and reason.
//!
//! Configuration, manifest reader and policy compiler use this one type, so `vipgate check`, the gateway's log and a
//! rejected update have the same message.

mod code;

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

pub use self::code::{AREAS, Code, Example};

/// Receives diagnostics of one object: severity, code, field (relative to the object) and reason.
pub(crate) type Report<'a> = dyn FnMut(Severity, Code, &str, String) + 'a;

/// Severity of a diagnostic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The input is rejected as a whole.
    Error,
    /// The input is accepted, but is probably not as intended.
    Warning,
}

/// A diagnostic. Displays as `file:line: field: reason [code]`, without line and field if there are none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Diagnostic {
    /// The file, as given by the user.
    #[serde(serialize_with = "as_text")]
    pub file: Arc<str>,
    /// Line, from 1; 0: the whole file.
    pub line: u32,
    /// Column, from 1; 0: the whole file.
    pub column: u32,
    /// Path of the field in the document: `spec.selectors[0].podSelector`. Empty: the document or the file.
    pub field: String,
    pub severity: Severity,
    /// What is wrong, and what to do if it isn't obvious.
    pub reason: String,
    /// The kind of mistake; `vipgate check --explain` explains it.
    pub code: Code,
    /// The object that it is about, if any.
    #[serde(skip)]
    pub object: Option<ObjectLocation>,
}

/// Location of an object, unique in the process: a reloaded file has other locations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectLocation {
    /// Id of the text, see `Source::id`.
    pub source: u64,
    /// Index of the document in the text.
    pub document: usize,
    /// Index of the item, if the document is a List.
    pub item: Option<usize>,
}

impl Diagnostic {
    /// An error about a whole file, e.g. if it can't be read.
    pub fn for_file(file: &str, code: Code, reason: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            line: 0,
            column: 0,
            field: String::new(),
            severity: Severity::Error,
            reason: reason.into(),
            code,
            object: None,
        }
    }

    /// Whether the input is rejected because of it.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        f.write_str(": ")?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        } else if self.line > 0 {
            f.write_str("document: ")?;
        }
        if self.severity == Severity::Warning {
            f.write_str("warning: ")?;
        }
        write!(f, "{} [{}]", self.reason, self.code)
    }
}

fn as_text<S: serde::Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

/// The diagnostics of a rejected input, one line each. Never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Diagnostics(pub Vec<Diagnostic>);

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, diagnostic) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            diagnostic.fmt(f)?;
        }
        Ok(())
    }
}

impl From<Diagnostic> for Diagnostics {
    fn from(diagnostic: Diagnostic) -> Self {
        Self(vec![diagnostic])
    }
}

/// Sorts diagnostics by file and line, and removes duplicates.
pub fn sort_and_dedup(diagnostics: &mut Vec<Diagnostic>) {
    diagnostics.sort();
    diagnostics.dedup();
}
