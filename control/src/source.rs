//! Policy sources: manifests in files or etcd. A source reports its entries (files or keys) as named texts, their
//! changes, and whether it is reachable; the store parses and compiles them.

pub mod etcd;
pub mod files;
pub mod ingest;
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
    /// New and changed entries by name, or why one can't be read. The name is the path of a file or an etcd key, as in
    /// diagnostics.
    pub changed: Vec<(Arc<str>, Result<String, String>)>,
    /// Names of removed entries.
    pub removed: Vec<Arc<str>>,
    /// All paths that are unavailable now: entries below them count as neither changed nor removed.
    pub unavailable: Vec<UnavailablePath>,
}

/// An unavailable path of the source: a directory or a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnavailablePath {
    /// Its path.
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
