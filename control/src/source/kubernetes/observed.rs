//! What the API says of objects besides their manifests: uid, generation and status. A change of these alone is no
//! update: a status that the server has written must not make it compile anything, but for the record of a pool's
//! addresses, which is a part of its manifest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use vipgate_policy::manifest::Kind;

use super::collection::{Collection, CollectionEvent};
use super::manifest::{Manifest, Observation};

/// An object as it was observed last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedObject {
    /// Another one for an object that was deleted and created again.
    pub(crate) uid: Arc<str>,
    /// Increases with each change of its `spec`.
    pub(crate) generation: i64,
    /// Its status, without a record of addresses; the same allocation as before if it is the same status.
    pub(crate) status: Option<Arc<Value>>,
    /// The first update that has this generation, see [`crate::source::SourceUpdate::revision`].
    pub(crate) revision: u64,
    /// Hash of its manifest.
    manifest: u64,
}

#[cfg(test)]
impl ObservedObject {
    /// An object that is in the first update.
    pub(crate) fn sample(uid: &str, generation: i64, status: Option<Arc<Value>>) -> Self {
        Self { uid: uid.into(), generation, status, revision: 1, manifest: 0 }
    }
}

/// Observed objects by the names of their manifests.
pub(crate) type ObservedMap = BTreeMap<Arc<str>, ObservedObject>;

/// The observed objects, shared by the source, which updates them, and their readers.
#[derive(Debug, Default)]
pub(crate) struct ObservedObjects(Mutex<Arc<ObservedMap>>);

impl ObservedObjects {
    /// All objects now; the same allocation while nothing changes.
    pub(crate) fn snapshot(&self) -> Arc<ObservedMap> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Applies an event of a collection. What it changes in manifests will be in the update with this revision.
    pub(super) fn apply(&self, collection: &Collection, event: &CollectionEvent, revision: u64) {
        if !has_observations(collection.kind) {
            return;
        }
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            CollectionEvent::Listed(manifests, _) => {
                let objects = Arc::make_mut(&mut shared);
                let before = take(objects, collection);
                for manifest in manifests {
                    insert(objects, before.get(&manifest.name), manifest, revision);
                }
            }
            CollectionEvent::Applied(manifest) => {
                let before = shared.get(&manifest.name).cloned();
                insert(Arc::make_mut(&mut shared), before.as_ref(), manifest, revision);
            }
            CollectionEvent::Deleted(name) => {
                Arc::make_mut(&mut shared).remove(name);
            }
            // They were deleted with their definition.
            CollectionEvent::Unavailable { is_missing: true, .. } => {
                take(Arc::make_mut(&mut shared), collection);
            }
            CollectionEvent::Unavailable { .. } | CollectionEvent::Failed(_) => {}
        }
    }
}

/// Whether objects of this kind are observed: those that have a status or events of the server's.
pub(super) fn has_observations(kind: Kind) -> bool {
    kind.is_custom() || kind == Kind::Service
}

/// Removes and returns all objects of a collection.
fn take(objects: &mut ObservedMap, collection: &Collection) -> ObservedMap {
    let prefix = format!("{collection}/");
    let mut taken = objects.split_off(prefix.as_str());
    // `0` is the character after `/`.
    let mut rest = taken.split_off(format!("{collection}0").as_str());
    objects.append(&mut rest);
    taken
}

fn insert(objects: &mut ObservedMap, before: Option<&ObservedObject>, manifest: &Manifest, revision: u64) {
    let Some(Observation { uid, generation, status }) = &manifest.observation else { return };
    let hash = manifest.hash;
    let old_status = before.and_then(|before| before.status.as_ref());
    let status = match (old_status, status) {
        (Some(old), Some(new)) if **old == *new => Some(old.clone()),
        (_, new) => new.clone().map(Arc::new),
    };
    // A manifest that is as before is in no update.
    let revision = before.filter(|before| before.manifest == hash).map_or(revision, |before| before.revision);
    let object = ObservedObject { uid: uid.clone(), generation: *generation, status, revision, manifest: hash };
    objects.insert(manifest.name.clone(), object);
}

#[cfg(test)]
mod tests;
