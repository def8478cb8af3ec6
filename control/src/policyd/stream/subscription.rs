//! Subscriptions of a client, by kind.

use std::collections::BTreeSet;

use super::pending::NAME_OVERHEAD;
use crate::xds::resource::Key;

/// A client's subscription to resources of one kind.
#[derive(Debug, Default)]
pub(super) struct Subscription {
    /// Wildcard: all resources.
    pub(super) all: bool,
    /// Or these, by name.
    pub(super) names: BTreeSet<String>,
    /// Memory of the names.
    pub(super) bytes: usize,
}

impl Subscription {
    pub(super) fn change(&mut self, unsubscribe: &BTreeSet<String>, subscribe: &BTreeSet<String>) {
        for name in unsubscribe {
            if self.names.remove(name) {
                self.bytes -= name.len() + NAME_OVERHEAD;
            }
        }
        for name in subscribe {
            if self.names.insert(name.clone()) {
                self.bytes += name.len() + NAME_OVERHEAD;
            }
        }
    }

    pub(super) fn includes(&self, key: &Key) -> bool {
        self.all || self.names.contains(&*key.name)
    }
}
