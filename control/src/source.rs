//! Policy sources: manifests in files, etcd or the Kubernetes API. A source reports its entries (files, keys or
//! objects) by name, their changes, and whether it is reachable; the store reads and compiles them.

pub(crate) mod address_record;
pub mod etcd;
pub mod files;
pub mod ingest;
pub mod kubernetes;
pub mod store;

use std::path::Path;
use std::sync::Arc;

/// An event of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// Entries have changed.
    Update(SourceUpdate),
    /// The source is unreachable, and why; its last state remains valid. Sent once per reason.
    Unreachable(String),
}

/// Changed entries, as one atomic update.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceUpdate {
    /// Whether this is a full state: entries that aren't in it were removed.
    pub full: bool,
    /// New and changed entries by name, or why one can't be read. The name is the path of a file, an etcd key, or
    /// `Kind/namespace/name` of a Kubernetes object, as in diagnostics.
    pub changed: Vec<(Arc<str>, Result<EntryContent, String>)>,
    /// Names of removed entries.
    pub removed: Vec<Arc<str>>,
    /// All paths that are unavailable now: entries below them count as neither changed nor removed.
    pub unavailable: Vec<UnavailablePath>,
    /// Number of the update, of a source that counts them; else 0.
    pub revision: u64,
    /// Whether something can't be read now for a reason that may pass, such as too few file descriptors. It will be read
    /// again soon.
    pub has_failed_reads: bool,
}

impl SourceUpdate {
    /// Whether no entry has changed.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.removed.is_empty()
    }
}

/// Content of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryContent {
    /// YAML or JSON.
    Text(String),
    /// An object of the Kubernetes API.
    Object(serde_json::Value),
}

impl From<String> for EntryContent {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for EntryContent {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// An unavailable path of the source: a directory or a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnavailablePath {
    pub path: Arc<str>,
    /// Why.
    pub reason: String,
    /// Whether it doesn't exist; otherwise it can't be read.
    pub is_missing: bool,
    /// Whether it is listed in the configuration.
    pub is_configured: bool,
}

impl UnavailablePath {
    /// Whether the entry of this name is at or below the path.
    pub fn covers(&self, name: &str) -> bool {
        Path::new(name).starts_with(&*self.path)
    }
}

pub mod file_watcher;
pub mod manifest_files;
#[cfg(test)]
mod tests;
