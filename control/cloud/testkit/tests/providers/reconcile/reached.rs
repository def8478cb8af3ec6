//! Classes that the worlds reached.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use vipgate_coverage::Coverage;

/// Counters of classes, shared by all parts of the worlds of one provider.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reached(Arc<Mutex<BTreeMap<String, u64>>>);

impl Reached {
    pub(crate) fn count(&self, class: impl Into<String>) {
        self.add(class, 1);
    }

    pub(crate) fn add(&self, class: impl Into<String>, count: u64) {
        if count > 0 {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(class.into()).or_default() += count;
        }
    }

    /// Asserts that each of these classes was reached.
    pub(crate) fn assert_reached(&self, classes: &[&str]) {
        let coverage = Coverage::default();
        for (class, count) in &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            coverage.add(class, *count);
        }
        coverage.assert_reached(classes);
    }
}

impl std::fmt::Display for Reached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
