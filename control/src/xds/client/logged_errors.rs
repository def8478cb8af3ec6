//! Errors that were logged, so that each is logged once: each of several servers may have another one.

use std::collections::BTreeSet;

/// Maximum number of errors that are remembered.
const MAX_ERRORS: usize = 32;

/// The errors since a server was last reached.
#[derive(Debug, Default)]
pub(crate) struct LoggedErrors(BTreeSet<String>);

impl LoggedErrors {
    /// Whether an error is to be logged: it wasn't yet.
    pub(crate) fn is_new(&mut self, error: &str) -> bool {
        if self.0.len() > MAX_ERRORS {
            self.clear();
        }
        self.0.insert(error.to_owned())
    }

    /// Forgets all: a server was reached.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
