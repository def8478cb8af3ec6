//! What users read when something fails on this node.

use std::io;

/// What failed, and why.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct NodeError {
    what: String,
    source: io::Error,
}

impl NodeError {
    /// Says before an error what failed.
    pub(crate) fn of(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self { what, source }
    }
}

/// Whether a request failed with this error number.
pub(crate) fn is_errno(error: &io::Error, number: i32) -> bool {
    error.raw_os_error() == Some(number)
}
