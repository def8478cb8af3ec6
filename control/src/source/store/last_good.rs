//! Substitution of faulty objects by their last good versions during compilation.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use vipgate_policy::diagnostic::{Diagnostic, ObjectLocation};
use vipgate_policy::manifest::{Object, ObjectId};

use super::Faulty;
use super::entries::{Entries, SortKey};
use super::entry::Entry;

/// The faulty objects of a compilation and their replacements.
#[derive(Debug, Default)]
pub(super) struct LastGood {
    /// The last good version of each faulty object, by the address of its allocation; `None`: it is left out.
    replacements: HashMap<usize, Option<Arc<Object>>>,
    /// The names of their entries.
    entries: BTreeSet<Arc<str>>,
    /// Objects whose last good version was tried.
    tried: BTreeSet<ObjectId>,
}

fn address(object: &Arc<Object>) -> usize {
    Arc::as_ptr(object).addr()
}

impl LastGood {
    /// Replaces the objects with errors by their last good version if `may_be_older` and there is one, else leaves them
    /// out.
    pub(super) fn substitute_faulty(
        &mut self,
        errors: &[Diagnostic],
        entries: &Entries,
        faulty: &mut BTreeMap<ObjectId, Faulty>,
        may_be_older: bool,
    ) {
        let mut reasons: BTreeMap<ObjectLocation, Vec<String>> = BTreeMap::new();
        let mut names: BTreeSet<&str> = BTreeSet::new();
        for error in errors {
            if let Some(location) = error.object {
                reasons.entry(location).or_default().push(error.to_string());
                names.insert(&error.file);
            }
        }
        for (name, entry) in names.into_iter().filter_map(|name| entries.get(name)) {
            for written in &entry.objects {
                let Some(object) = self.substitute(written).cloned() else { continue };
                let location = object.origin.location();
                let Some(reasons) = reasons.remove(&location) else { continue };
                let is_older = |it: &&Arc<Object>| it.id == object.id && it.origin.location() != location;
                let older = entry.in_force.iter().find(is_older);
                let older = older.filter(|_| may_be_older && self.tried.insert(object.id.clone()));
                self.replacements.insert(address(written), older.cloned());
                self.entries.insert(name.clone());
                let fault = faulty
                    .entry(object.id.clone())
                    .or_insert_with(|| Faulty { has_last_good: false, reasons: Vec::new() });
                fault.has_last_good = older.is_some();
                fault.reasons.extend(reasons);
            }
        }
    }

    /// All objects after substitution.
    pub(super) fn objects<'a>(
        &'a self,
        sorted: &'a BTreeMap<SortKey, Arc<Object>>,
    ) -> impl DoubleEndedIterator<Item = &'a Arc<Object>> {
        sorted.values().filter_map(|object| self.substitute(object))
    }

    /// The objects of one entry after substitution.
    pub(super) fn entry_objects<'a>(&'a self, entry: &'a Entry) -> impl Iterator<Item = &'a Arc<Object>> {
        entry.objects.iter().filter_map(|object| self.substitute(object))
    }

    /// The object, its replacement, or `None` if it is left out.
    pub(super) fn substitute<'a>(&'a self, object: &'a Arc<Object>) -> Option<&'a Arc<Object>> {
        if self.is_empty() {
            return Some(object);
        }
        self.replacements.get(&address(object)).map_or(Some(object), Option::as_ref)
    }

    /// Whether no object was faulty.
    pub(super) fn is_empty(&self) -> bool {
        self.replacements.is_empty()
    }

    /// The names of the entries with faulty objects.
    pub(super) fn entries(&self) -> &BTreeSet<Arc<str>> {
        &self.entries
    }
}
