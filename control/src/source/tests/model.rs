//! Oracle of the last-good-state rule: the state of all entries, recomputed from each whole state of the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vipgate_policy::compiler::{Placement, compile};
use vipgate_policy::diagnostic::Diagnostic;
use vipgate_policy::manifest::{Kind, Manifests, Object, ObjectId, UnsupportedKinds, read};
use vipgate_policy::yaml::Source;

use super::disk::{DiskState, Doc, Fault, Id, ObservedContent};

/// A parsed object, and whether the compiler rejects it.
#[derive(Clone, Debug)]
struct ParsedObject {
    id: Id,
    object: Arc<Object>,
    has_conflict: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Read,
    Unreadable,
    Empty,
    Missing,
    /// Removed, or without objects.
    NoObjects,
}

#[derive(Clone, Debug)]
struct Entry {
    state: State,
    /// Its objects, including the retained ones.
    objects: Vec<ParsedObject>,
    retained: BTreeSet<Id>,
    rejected: BTreeSet<Id>,
    is_removed: bool,
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) allow_empty: bool,
    initialized: bool,
    entries: BTreeMap<String, Entry>,
    disk: DiskState,
    accepted: BTreeSet<String>,
}

/// Parses an entry: its objects, the ids of the invalid ones, and whether all errors can be attributed to objects.
fn parse_entry(name: &str, content: &ObservedContent) -> (Vec<ParsedObject>, BTreeSet<Id>, bool) {
    match content {
        ObservedContent::Docs(docs) => {
            let (invalid, valid): (Vec<&Doc>, Vec<&Doc>) = docs.iter().partition(|doc| doc.fault == Fault::Invalid);
            let parsed = |doc: &&Doc| {
                let (mut objects, ..) = parse(name, &doc.text());
                let object = objects.pop().unwrap();
                ParsedObject { id: doc.id, object, has_conflict: doc.fault == Fault::Conflict }
            };
            (valid.iter().map(parsed).collect(), invalid.iter().map(|doc| doc.id).collect(), true)
        }
        ObservedContent::Truncated(text) => {
            // The truncated last document may be a valid object; any compiler error counts as a conflict.
            let (objects, invalid, is_attributed) = parse(name, text);
            let parsed = |object: Arc<Object>| {
                let id = short(&object.id);
                let has_conflict = compile([&*object]).diagnostics.iter().any(Diagnostic::is_error);
                ParsedObject { id, object, has_conflict }
            };
            (objects.into_iter().map(parsed).collect(), invalid, is_attributed)
        }
        ObservedContent::Unreadable => (Vec::new(), BTreeSet::new(), false),
        ObservedContent::Empty | ObservedContent::EmptyList => (Vec::new(), BTreeSet::new(), true),
    }
}

fn parse(name: &str, text: &str) -> (Vec<Arc<Object>>, BTreeSet<Id>, bool) {
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new(name, text.to_owned())), UnsupportedKinds::Ignore, &mut manifests);
    let Manifests { objects, diagnostics, unreadable, .. } = manifests;
    let is_known = |location| unreadable.iter().any(|(it, _)| *it == location);
    let is_attributed = diagnostics.iter().filter(|it| it.is_error()).all(|it| it.object.is_some_and(is_known));
    (objects.into_iter().map(Arc::new).collect(), unreadable.iter().map(|(_, id)| short(id)).collect(), is_attributed)
}

fn short(id: &ObjectId) -> Id {
    (id.name[1..].parse().unwrap(), id.kind == Kind::Service)
}

impl Model {
    pub(super) fn new(allow_empty: bool) -> Self {
        let (entries, disk, accepted) = Default::default();
        Self { allow_empty, initialized: false, entries, disk, accepted }
    }

    /// Computes the next state from the whole state of the disk.
    pub(super) fn update(&mut self, disk: &DiskState) {
        self.disk = disk.clone();
        self.accepted.retain(|path| disk.unavailable.iter().any(|(unavailable, ..)| unavailable == path));
        let names: BTreeSet<String> = self.entries.keys().chain(disk.files.keys()).cloned().collect();
        let mut next = BTreeMap::new();
        for name in names {
            let old = self.entries.remove(&name);
            let old_objects = old.as_ref().map(|entry| entry.objects.clone()).unwrap_or_default();
            let was_removed = old.as_ref().is_some_and(|entry| entry.is_removed);
            let all: BTreeSet<Id> = old_objects.iter().map(|it| it.id).collect();
            let retain_all = |state: State, rejected, is_removed| {
                let (objects, retained) = (old_objects.clone(), all.clone());
                Entry { state, objects, retained, rejected, is_removed }
            };
            let unavailable =
                disk.unavailable.iter().find(|(path, ..)| name == *path || name.starts_with(&format!("{path}/")));
            let entry = match (disk.files.get(&name), unavailable.filter(|_| !was_removed)) {
                (None, Some((_, true, _))) => retain_all(State::Missing, BTreeSet::new(), false),
                (None, Some((_, false, _))) => retain_all(State::Unreadable, BTreeSet::new(), false),
                (None, None) => retain_all(State::NoObjects, BTreeSet::new(), true),
                (Some(content), _) => {
                    let (mut objects, invalid, is_attributed) = parse_entry(&name, content);
                    let named: BTreeSet<Id> = objects.iter().map(|it| it.id).collect();
                    let is_retained =
                        |it: &&ParsedObject| !named.contains(&it.id) && (!is_attributed || invalid.contains(&it.id));
                    let old: Vec<ParsedObject> = old_objects.iter().filter(is_retained).cloned().collect();
                    let retained: BTreeSet<Id> = old.iter().map(|it| it.id).collect();
                    let rejected = invalid;
                    objects.extend(old);
                    if objects.is_empty() && is_attributed {
                        let is_empty = matches!(content, ObservedContent::Empty)
                            || matches!(content, ObservedContent::Truncated(text) if text.trim().is_empty());
                        retain_all(if is_empty { State::Empty } else { State::NoObjects }, rejected, false)
                    } else {
                        let state = if is_attributed { State::Read } else { State::Unreadable };
                        Entry { state, objects, retained, rejected, is_removed: false }
                    }
                }
            };
            next.insert(name, entry);
        }
        release_moved(&mut next);
        self.entries = next;
        let is_present =
            |entry: &Entry| matches!(entry.state, State::Read | State::Unreadable) && !entry.objects.is_empty();
        if self.allow_empty {
            self.remove_retained(&[State::Empty, State::Missing, State::NoObjects]);
        } else if self.entries.values().any(is_present) {
            self.remove_retained(&[State::NoObjects]);
        }
        let is_readable = disk.unavailable.iter().all(|(_, missing, _)| *missing)
            && self.entries.values().all(|entry| entry.state != State::Unreadable);
        self.initialized |=
            self.entries.values().any(|entry| !entry.objects.is_empty()) || self.allow_empty && is_readable;
    }

    fn remove_retained(&mut self, states: &[State]) {
        for entry in self.entries.values_mut().filter(|entry| states.contains(&entry.state)) {
            entry.objects.clear();
            entry.retained.clear();
        }
        self.entries.retain(|_, entry| !entry.objects.is_empty() || !entry.is_removed && entry.state != State::Missing);
    }

    pub(super) fn accept_empty(&mut self) -> Result<usize, ()> {
        let is_withheld = |entry: &&Entry| !matches!(entry.state, State::Read | State::Unreadable);
        let objects = self.entries.values().filter(is_withheld).map(|entry| entry.objects.len()).sum();
        let missing: Vec<_> = self.disk.unavailable.iter().filter(|(_, missing, _)| *missing).cloned().collect();
        let has_new_missing =
            missing.iter().any(|(path, _, is_configured)| *is_configured && !self.accepted.contains(path));
        if objects == 0 && self.initialized && !has_new_missing {
            return Err(());
        }
        let is_unreadable = self.entries.values().any(|entry| entry.state == State::Unreadable)
            || self.disk.unavailable.iter().any(|(_, missing, _)| !missing);
        if !self.initialized && is_unreadable {
            return Err(());
        }
        self.initialized = true;
        self.accepted.extend(missing.into_iter().map(|(path, ..)| path));
        self.remove_retained(&[State::Empty, State::Missing, State::NoObjects]);
        Ok(objects)
    }

    /// The policy; `None` before there is a first one.
    pub(super) fn in_force(&self) -> Option<Placement> {
        let objects: Vec<Arc<Object>> =
            self.entries.values().flat_map(|entry| &entry.objects).map(|it| it.object.clone()).collect();
        let compiled = compile(objects.iter().map(Arc::as_ref));
        self.initialized.then_some(compiled.placement)
    }

    /// The ids of all objects.
    pub(super) fn ids(&self) -> BTreeSet<Id> {
        self.entries.values().flat_map(|entry| entry.objects.iter().map(|it| it.id)).collect()
    }

    pub(super) fn has_nothing(&self) -> bool {
        self.entries.values().all(|entry| entry.objects.is_empty())
    }

    /// Whether everything in force is as written.
    pub(super) fn is_as_written(&self) -> bool {
        self.entries.values().all(|entry| entry.retained.is_empty())
    }

    /// Numbers of objects in force as written, in force in their last good version, and rejected.
    pub(super) fn states(&self) -> [u64; 3] {
        let (mut in_force, mut last_good, mut rejected) = (0, BTreeSet::<Id>::new(), BTreeSet::<Id>::new());
        for entry in self.entries.values() {
            rejected.extend(entry.rejected.iter().copied());
            for it in &entry.objects {
                in_force += usize::from(!it.has_conflict);
                if it.has_conflict {
                    rejected.insert(it.id);
                } else if entry.retained.contains(&it.id) {
                    last_good.insert(it.id);
                }
            }
        }
        rejected.retain(|id| !last_good.contains(id));
        [in_force - last_good.len(), last_good.len(), rejected.len()].map(|count| count as u64)
    }

    pub(super) fn is_healthy(&self) -> bool {
        let below = |path: &str| {
            let prefix = format!("{path}/");
            let entries = self.entries.iter().filter(|(name, _)| *name == path || name.starts_with(&prefix));
            entries.map(|(_, entry)| entry.objects.len()).sum::<usize>()
        };
        let is_path_healthy = |(path, missing, is_configured): &(String, bool, bool)| {
            *missing && (self.allow_empty || self.accepted.contains(path)) || !is_configured && below(path) == 0
        };
        let is_unavailable = |name: &str| {
            self.disk.unavailable.iter().any(|(path, ..)| name == path || name.starts_with(&format!("{path}/")))
        };
        let is_entry_healthy = |(name, entry): (&String, &Entry)| match entry.state {
            State::Read | State::Missing => true,
            State::Unreadable => is_unavailable(name),
            State::Empty | State::NoObjects => entry.objects.is_empty(),
        };
        self.initialized
            && self.disk.unavailable.iter().all(is_path_healthy)
            && self.entries.iter().all(is_entry_healthy)
    }
}

/// An entry doesn't retain an object that another entry has readably.
fn release_moved(next: &mut BTreeMap<String, Entry>) {
    let readable: BTreeMap<Id, String> = next
        .iter()
        .flat_map(|(name, entry)| entry.objects.iter().map(move |it| (name, entry, it.id)))
        .filter(|(_, entry, id)| !entry.retained.contains(id))
        .map(|(name, _, id)| (id, name.clone()))
        .collect();
    for (name, entry) in next {
        entry.retained.retain(|id| !readable.contains_key(id));
        let retained = &entry.retained;
        entry.objects.retain(|it| retained.contains(&it.id) || readable.get(&it.id) == Some(name));
        entry.rejected.retain(|id| !retained.contains(id));
    }
}
