//! The entries of a source: how objects are named and written, and what of them was readable last.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use vipgate_policy::diagnostic::Diagnostic;
use vipgate_policy::manifest::{
    Manifests, ObjectId, ReadOptions, UnclassedServices, UnsupportedKinds, read, read_object,
};
use vipgate_policy::yaml::Source;

use super::world::{Change, Shape};
use crate::source::{EntryContent, SourceUpdate};

/// What an entry is now; `None`: it is removed.
pub(super) type Content = Option<String>;

/// The entries by name.
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "they are what it is about")]
pub(super) struct Entries {
    shape: Shape,
    /// What all names begin with.
    prefix: String,
    entries: BTreeMap<Arc<str>, Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    objects: BTreeMap<ObjectId, String>,
    is_broken: bool,
    /// The objects in the order in which its text has them.
    order: Vec<ObjectId>,
    /// Each object as it was readable last; one that is gone isn't there.
    readable: BTreeMap<ObjectId, Readable>,
}

/// An object that was readable.
#[derive(Debug)]
struct Readable {
    /// As its source delivers it.
    delivered: EntryContent,
    /// As it was written.
    written: String,
}

/// A text that can't be read.
const BROKEN: &str = "kind: [unclosed";
const SEPARATOR: &str = "\n---\n";

impl Entries {
    pub(super) fn new(shape: Shape, prefix: String) -> Self {
        Self { shape, prefix, entries: BTreeMap::new() }
    }

    /// The name of the entry with an object.
    fn name(&self, id: &ObjectId) -> Arc<str> {
        let Self { shape, prefix, .. } = self;
        let (kind, namespace, name) = (id.kind.as_str(), &id.namespace, &id.name);
        match (shape, namespace.as_str()) {
            (Shape::Files, "" | "default") => format!("{prefix}platform.yaml").into(),
            (Shape::Files, _) => format!("{prefix}{namespace}.yaml").into(),
            (_, "") => format!("{prefix}{kind}/{name}").into(),
            _ => format!("{prefix}{kind}/{namespace}/{name}").into(),
        }
    }

    /// Applies changes; returns the entries that differ.
    pub(super) fn apply<'a>(&mut self, changes: impl Iterator<Item = &'a Change>) -> Vec<(Arc<str>, Content)> {
        let mut changed = BTreeSet::new();
        for change in changes {
            let name = self.name(change.id());
            let entry = self.entries.entry(name.clone()).or_default();
            match change {
                Change::Put(id, value) => drop(entry.objects.insert(id.clone(), value.to_string())),
                Change::Remove(id) => {
                    entry.objects.remove(id);
                    entry.is_broken &= !entry.objects.is_empty();
                }
                Change::Break(_) => entry.is_broken = !entry.objects.is_empty(),
                Change::Mend(_) => entry.is_broken = false,
            }
            changed.insert(name);
        }
        changed.into_iter().map(|name| (name.clone(), self.content(&name))).collect()
    }

    /// All entries, for a source that starts.
    pub(super) fn all(&mut self) -> Vec<(Arc<str>, Content)> {
        self.entries.values_mut().for_each(|entry| entry.readable.clear());
        let names: Vec<Arc<str>> = self.entries.keys().cloned().collect();
        names.into_iter().map(|name| (name.clone(), self.content(&name))).collect()
    }

    fn content(&mut self, name: &str) -> Content {
        let entry = self.entries.get_mut(name)?;
        if entry.is_broken {
            return Some(BROKEN.to_owned());
        }
        entry.order = entry.objects.keys().cloned().collect();
        let texts: Vec<&str> = entry.objects.values().map(String::as_str).collect();
        (!texts.is_empty()).then(|| texts.join(SEPARATOR))
    }

    /// Notes what is readable of an update.
    pub(super) fn note(&mut self, update: &SourceUpdate, unclassed: UnclassedServices) {
        for name in &update.removed {
            self.entries.remove(name);
        }
        for (name, content) in &update.changed {
            let Some(entry) = self.entries.get_mut(name) else { continue };
            let content = content.clone().unwrap_or_else(|_| BROKEN.into());
            entry.note(name, &content, unclassed);
        }
    }

    /// The entries as they were readable last.
    pub(super) fn readable(&self) -> SourceUpdate {
        let entries = self.entries.iter().filter(|(_, entry)| !entry.readable.is_empty());
        let changed = entries.map(|(name, entry)| {
            let mut texts = Vec::new();
            for Readable { delivered, .. } in entry.readable.values() {
                match delivered {
                    EntryContent::Text(text) => texts.push(text.as_str()),
                    // It is the only one of its entry.
                    EntryContent::Object(_) => return (name.clone(), Ok(delivered.clone())),
                }
            }
            (name.clone(), Ok(texts.join(SEPARATOR).into()))
        });
        SourceUpdate { full: true, changed: changed.collect(), ..SourceUpdate::default() }
    }

    /// The objects as they were readable last.
    pub(super) fn objects(&self) -> BTreeMap<&ObjectId, Value> {
        let all = self.entries.values().flat_map(|entry| &entry.readable);
        all.map(|(id, it)| (id, serde_json::from_str(&it.written).expect("JSON"))).collect()
    }

    /// Whether there are objects that couldn't be read once since the source has started: what is gone isn't known then.
    pub(super) fn has_unknown(&self) -> bool {
        self.entries.values().any(|entry| entry.is_broken && entry.readable.is_empty())
    }

    /// Whether an object has been readable.
    pub(super) fn is_readable(&self, id: &ObjectId) -> bool {
        self.entries.values().any(|entry| entry.readable.contains_key(id))
    }

    /// The object that a diagnostic is about, if it is about one: each is one line, and one between two.
    pub(super) fn object_of(&self, diagnostic: &Diagnostic) -> Option<&ObjectId> {
        let entry = self.entries.get(&diagnostic.file)?;
        entry.order.get((diagnostic.line as usize).saturating_sub(1) / 2)
    }
}

impl Entry {
    /// Objects that can't be read stay as they were; so do all that are missing if an error can't be attributed.
    fn note(&mut self, name: &Arc<str>, content: &EntryContent, unclassed: UnclassedServices) {
        let mut manifests = Manifests::default();
        let options = ReadOptions { unsupported: UnsupportedKinds::Ignore, unclassed };
        let texts: Vec<EntryContent> = match content {
            EntryContent::Text(text) => {
                read(&Arc::new(Source::new(name, text.clone())), options, &mut manifests);
                text.split(SEPARATOR).map(EntryContent::from).collect()
            }
            EntryContent::Object(object) => {
                read_object(name, object.clone(), options, &mut manifests);
                vec![content.clone()]
            }
        };
        let mut invalid: BTreeSet<ObjectId> = manifests.unreadable.iter().map(|(_, id)| id.clone()).collect();
        let mut is_unattributed = false;
        for error in manifests.diagnostics.iter().filter(|it| it.is_error()) {
            let place = |it: &&vipgate_policy::manifest::Object| Some(it.origin.location()) == error.object;
            match manifests.objects.iter().find(place) {
                Some(object) => drop(invalid.insert(object.id.clone())),
                None => is_unattributed |= !manifests.unreadable.iter().any(|(place, _)| Some(*place) == error.object),
            }
        }
        let before = std::mem::take(&mut self.readable);
        for object in manifests.objects.iter().filter(|object| !invalid.contains(&object.id)) {
            let at = (object.origin.line as usize).saturating_sub(1) / 2;
            let written = self.objects.get(&object.id).cloned().unwrap_or_default();
            self.readable.insert(object.id.clone(), Readable { delivered: texts[at].clone(), written });
        }
        let is_kept = |id: &ObjectId| is_unattributed || invalid.contains(id);
        for (id, last) in before.into_iter().filter(|(id, _)| is_kept(id)) {
            self.readable.entry(id).or_insert(last);
        }
    }
}
