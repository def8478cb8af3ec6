//! Where manifests come from: named texts that change. What they mean is the store's business; a source only says what
//! stands where, and whether it can still be asked.

pub mod etcd;
pub mod files;
pub mod intake;
pub mod store;

use std::path::Path;
use std::sync::Arc;

/// What a source tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Texts have changed.
    Update(Update),
    /// The source can't be asked any more, and why; what it said last still counts. Told once for each reason.
    Lost(String),
}

/// Texts that have changed, all at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Whether this is all there is: what isn't named is gone.
    pub whole: bool,
    /// New and changed texts by name, or why one can't be read. The name is what complaints call it: the path of a file, a
    /// key of etcd.
    pub changed: Vec<(Arc<str>, Result<String, String>)>,
    /// Names of texts that are gone.
    pub gone: Vec<Arc<str>>,
    /// Places that can't be looked into now, all of them: texts that were there are neither changed nor gone.
    pub hidden: Vec<Hidden>,
}

/// A place of the source that can't be looked into: a folder with texts, or one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Its path.
    pub place: Arc<str>,
    /// Why.
    pub reason: String,
    /// Whether it isn't there; else it can't be read.
    pub missing: bool,
    /// Whether the configuration names it.
    pub named: bool,
}

impl Hidden {
    /// Whether the text of this name is in it.
    pub fn hides(&self, name: &str) -> bool {
        Path::new(name).starts_with(&*self.place)
    }
}

#[cfg(test)]
mod tests;
