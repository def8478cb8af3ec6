//! Updates that the gateway has accepted, but that wait for the kernel: neither acknowledged nor in the cache.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::oneshot;

use super::Effect;
use crate::xds::resource::{Key, Kind};
use crate::xds::store::StoredResource;

/// Accepted updates since the last one that was in force.
#[derive(Debug, Default)]
pub(super) struct HeldUpdates {
    /// Of the latest one; `None`: all accepted updates are in force.
    in_force: Option<oneshot::Receiver<()>>,
    changed: BTreeMap<Key, Option<StoredResource>>,
}

impl HeldUpdates {
    /// An update was accepted.
    pub(super) fn push(&mut self, changed: Vec<(Key, Option<StoredResource>)>, effect: Effect) {
        self.changed.extend(changed);
        self.in_force = match effect {
            Effect::InForce => None,
            Effect::Held(receiver) => Some(receiver),
        };
    }

    /// Whether an accepted update isn't in force.
    pub(super) fn is_holding(&self) -> bool {
        self.in_force.is_some()
    }

    /// Waits until all accepted updates are in force; forever if they are. False: they never will be, as the gateway
    /// stops. Cancel-safe.
    pub(super) async fn in_force(&mut self) -> bool {
        let Some(receiver) = &mut self.in_force else { return std::future::pending().await };
        let is_in_force = receiver.await.is_ok();
        self.in_force = None;
        is_in_force
    }

    /// Takes what they have changed, once they are in force.
    pub(super) fn take(&mut self) -> Vec<(Key, Option<StoredResource>)> {
        std::mem::take(&mut self.changed).into_iter().collect()
    }

    /// Names of a kind that aren't in force as the store has them.
    pub(super) fn names(&self, kind: Kind) -> BTreeSet<&str> {
        self.changed.keys().filter(|key| key.kind == kind).map(|key| &*key.name).collect()
    }
}
