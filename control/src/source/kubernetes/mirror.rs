//! What the cluster's collections hold, and the updates that bring the store there. Pure: without I/O and time.
//!
//! - Nothing is reported until each collection was listed once: half a cluster is another policy than the whole.
//! - A list replaces what its collection had, as one update: what has not come again yet isn't gone.
//! - A collection that can't be read keeps its objects. So do objects whose kind's definition was removed or replaced,
//!   until they are created again or their absence is accepted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use vipgate_policy::manifest::Kind;

use super::collection::{Collection, CollectionEvent};
use super::manifest::Manifest;
use super::observed::ObservedObjects;
use crate::source::{EntryContent, SourceUpdate, UnavailablePath};

/// The cluster as it was reported, and what isn't reported yet.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    collections: BTreeMap<Collection, Objects>,
    /// Policies that select pods by labels.
    selecting: BTreeSet<Arc<str>>,
    /// Unreported changes: the new version of each object; `None`: it was removed.
    changes: BTreeMap<Arc<str>, Option<Value>>,
    /// Whether the unavailable paths differ from those that were reported, or an update is due without any change.
    is_due: bool,
    /// Whether there was an update.
    is_initialized: bool,
    /// Number of updates.
    revision: u64,
    observed: Arc<ObservedObjects>,
}

/// The objects of a collection.
#[derive(Debug, Default)]
struct Objects {
    /// A hash of each object, by name.
    hashes: BTreeMap<Arc<str>, u64>,
    /// Whether they were listed since the last [`Mirror::list_again`].
    is_listed: bool,
    /// Uid of the kind's definition at the last list.
    definition: Option<Arc<str>>,
    /// Why it can't be read.
    unavailable: Option<UnavailablePath>,
    /// Objects of an earlier definition that haven't been created again. They are in `hashes`, too.
    orphaned: BTreeSet<Arc<str>>,
}

impl Mirror {
    /// A mirror without collections.
    pub(super) fn new(observed: Arc<ObservedObjects>) -> Self {
        Self { observed, ..Self::default() }
    }

    /// Adds a collection, which is to be listed.
    pub(super) fn add(&mut self, collection: Collection) {
        self.collections.entry(collection).or_default();
    }

    /// Removes collections of a kind with all their objects.
    pub(super) fn remove(&mut self, kind: Kind) {
        for (_, objects) in self.collections.extract_if(.., |collection, _| collection.kind == kind) {
            self.is_due |= objects.unavailable.is_some();
            self.changes.extend(objects.hashes.into_keys().map(|name| (name, None)));
        }
    }

    /// All collections will be listed again; nothing is reported until they are.
    pub(super) fn list_again(&mut self) {
        for objects in self.collections.values_mut() {
            objects.is_listed = false;
        }
        self.is_due = true;
    }

    /// Whether each collection was listed, or can't be read while its objects are known.
    pub(super) fn is_complete(&self) -> bool {
        let is_known = |objects: &Objects| objects.is_listed || self.is_initialized && objects.unavailable.is_some();
        self.collections.values().all(is_known)
    }

    /// Whether a policy selects pods by labels.
    pub(super) fn selects_pods(&self) -> bool {
        !self.selecting.is_empty()
    }

    /// Applies an event of a collection.
    pub(super) fn apply(&mut self, collection: &Collection, event: CollectionEvent) {
        let Some(objects) = self.collections.get_mut(collection) else { return };
        self.observed.apply(collection, &event, self.revision + 1);
        match event {
            CollectionEvent::Failed(_) => {}
            CollectionEvent::Listed(manifests, definition) => self.apply_list(collection, manifests, definition),
            CollectionEvent::Applied(manifest) => {
                let Manifest { name, document, hash, selects_pods, .. } = manifest;
                let was_orphaned = objects.orphaned.remove(&name);
                note_selectors(&mut self.selecting, &name, selects_pods);
                if objects.hashes.insert(name.clone(), hash) != Some(hash) || was_orphaned {
                    self.changes.insert(name, Some(document));
                }
            }
            CollectionEvent::Deleted(name) => {
                self.is_due |= objects.orphaned.remove(&name);
                self.selecting.remove(&name);
                if objects.hashes.remove(&name).is_some() {
                    self.changes.insert(name, None);
                }
            }
            // Not every cluster has it.
            CollectionEvent::Unavailable { is_missing: true, .. }
                if is_optional(collection.kind) && objects.hashes.is_empty() =>
            {
                objects.is_listed = true;
            }
            CollectionEvent::Unavailable { is_missing, reason } => {
                let path = collection.to_string().into();
                let path = UnavailablePath { path, reason, is_missing, is_configured: true };
                self.is_due |= objects.unavailable.as_ref() != Some(&path);
                objects.unavailable = Some(path);
            }
        }
    }

    /// Replaces the objects of a collection by those of a list.
    fn apply_list(&mut self, collection: &Collection, manifests: Vec<Manifest>, definition: Option<Arc<str>>) {
        let Some(objects) = self.collections.get_mut(collection) else { return };
        // The store has retained all objects of a collection that couldn't be read: it needs them again.
        let was_unavailable = objects.unavailable.take().is_some();
        self.is_due |= was_unavailable || !objects.is_listed;
        let is_replaced = match (&objects.definition, &definition) {
            (Some(before), Some(now)) => before != now,
            _ => false,
        };
        let mut absent = std::mem::take(&mut objects.hashes);
        let mut changed = Vec::new();
        for manifest in manifests {
            let Manifest { name, document, hash, selects_pods, .. } = manifest;
            let was_orphaned = objects.orphaned.remove(&name);
            if absent.remove(&name) != Some(hash) || was_unavailable || was_orphaned {
                changed.push((name.clone(), Some(document)));
            }
            note_selectors(&mut self.selecting, &name, selects_pods);
            objects.hashes.insert(name, hash);
        }
        self.changes.extend(changed);
        for (name, hash) in absent {
            if is_replaced || objects.orphaned.contains(&name) {
                objects.hashes.insert(name.clone(), hash);
                objects.orphaned.insert(name);
            } else {
                self.selecting.remove(&name);
                self.changes.insert(name, None);
            }
        }
        objects.is_listed = true;
        objects.definition = definition.or(objects.definition.take());
    }

    /// Why the cluster can't be reported yet: the first collection that can't be read.
    pub(super) fn blocked_by(&self) -> Option<&UnavailablePath> {
        let mut blocking = self.collections.values().filter(|objects| !objects.is_listed);
        blocking.find_map(|objects| objects.unavailable.as_ref())
    }

    /// The next update, if one is due and the mirror is complete.
    pub(super) fn take_update(&mut self) -> Option<SourceUpdate> {
        if !self.is_complete() || self.changes.is_empty() && !self.is_due {
            return None;
        }
        let full = !self.is_initialized;
        (self.is_initialized, self.is_due) = (true, false);
        self.revision += 1;
        let unavailable = self.unavailable();
        let mut update = SourceUpdate { full, unavailable, revision: self.revision, ..SourceUpdate::default() };
        for (name, document) in std::mem::take(&mut self.changes) {
            match document {
                Some(document) => update.changed.push((name, Ok(EntryContent::Object(document)))),
                None => update.removed.push(name),
            }
        }
        Some(update)
    }

    /// An update is due, even if nothing has changed: the source is reachable again.
    pub(super) fn request_update(&mut self) {
        self.is_due = true;
    }

    fn unavailable(&self) -> Vec<UnavailablePath> {
        let mut all = Vec::new();
        for (collection, objects) in &self.collections {
            all.extend(objects.unavailable.clone());
            let kind = collection.kind.as_str();
            all.extend(objects.orphaned.iter().map(|name| UnavailablePath {
                path: name.clone(),
                reason: format!(
                    "was deleted with the CustomResourceDefinition of {kind}: create it again, or accept it"
                ),
                is_missing: true,
                is_configured: false,
            }));
        }
        all
    }
}

/// Whether a cluster may lack this kind: `ServiceCIDR` is new in Kubernetes 1.33.
fn is_optional(kind: Kind) -> bool {
    kind == Kind::ServiceCidr
}

fn note_selectors(selecting: &mut BTreeSet<Arc<str>>, name: &Arc<str>, selects_pods: bool) {
    if selects_pods {
        selecting.insert(name.clone());
    } else {
        selecting.remove(name);
    }
}

#[cfg(test)]
mod tests;
