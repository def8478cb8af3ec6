//! What is wrong with a file that people write: where, which field, why, and how bad it is.
//!
//! Configuration, manifests and the policy compiler all complain in this one form, so that `vipgate check`, the
//! gateway's log and a rejected update say the same sentence.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The input is refused as a whole.
    Error,
    /// The input is used; this part of it hardly does what was meant.
    Warning,
}

/// One thing that is wrong. Displays as `file:line: field: reason`, without line and field where there are none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Complaint {
    /// The file, as it was named to us.
    #[serde(serialize_with = "as_text")]
    pub file: Arc<str>,
    /// Line in the file, from 1; 0 when it is about the file as a whole.
    pub line: u32,
    /// Column in the line, from 1; 0 when it is about the file as a whole.
    pub column: u32,
    /// Path of the field inside its document: `spec.selectors[0].podSelector`. Empty: the document or the file.
    pub field: String,
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong and, where it isn't plain, what to do.
    pub reason: String,
    /// The object that it is about, if it is one's.
    #[serde(skip)]
    pub object: Option<Place>,
}

/// Where an object stands: no other object has the same place, not even an earlier one of the same file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The text's number, see `Source::id`.
    pub source: u64,
    /// Which of the text's documents, from 0.
    pub document: usize,
    /// Which item, from 0, when the document is a list.
    pub item: Option<usize>,
}

impl Complaint {
    /// An error about a file as a whole: it can't be read, it is no YAML.
    pub fn about_file(file: &str, reason: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            line: 0,
            column: 0,
            field: String::new(),
            severity: Severity::Error,
            reason: reason.into(),
            object: None,
        }
    }

    /// Whether the input is refused because of it.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

impl fmt::Display for Complaint {
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
        f.write_str(&self.reason)
    }
}

fn as_text<S: serde::Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

/// Why an input was refused: everything that is wrong with it, one line each. Never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Complaints(pub Vec<Complaint>);

impl fmt::Display for Complaints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, complaint) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            complaint.fmt(f)?;
        }
        Ok(())
    }
}

impl From<Complaint> for Complaints {
    fn from(complaint: Complaint) -> Self {
        Self(vec![complaint])
    }
}

/// Brings complaints into the order of files and lines, each once.
pub fn settle(complaints: &mut Vec<Complaint>) {
    complaints.sort();
    complaints.dedup();
}
