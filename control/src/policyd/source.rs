//! Where manifests come from: named texts that change. What they mean is the store's business; a source only says what
//! stands where, and whether it can still be asked.

pub mod etcd;
pub mod files;

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
}
