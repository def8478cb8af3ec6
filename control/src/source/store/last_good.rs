//! Substitution of faulty objects by their last good versions during compilation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vipgate_policy::diagnostic::{Diagnostic, ObjectLocation};
use vipgate_policy::manifest::{Object, ObjectId};

use super::{Faulty, SortKey};
use crate::source::store::entry::Entry;

/// The faulty objects of a compilation and their replacements.
#[derive(Debug, Default)]
pub(super) struct LastGood {
    /// Excluded objects.
    excluded: BTreeSet<ObjectLocation>,
    /// The last good versions of excluded objects.
    replacements: BTreeMap<ObjectLocation, Arc<Object>>,
    /// Objects whose last good version was tried.
    tried: BTreeSet<ObjectId>,
}

impl LastGood {
    /// Excludes the objects with errors; replaces them by their last good version if `may_be_older` and there is one.
    pub(super) fn substitute_faulty(
        &mut self,
        errors: &[Diagnostic],
        entries: &BTreeMap<Arc<str>, Entry>,
        faulty: &mut BTreeMap<ObjectId, Faulty>,
        may_be_older: bool,
    ) {
        let mut reasons: BTreeMap<ObjectLocation, Vec<String>> = BTreeMap::new();
        for error in errors {
            if let Some(location) = error.object {
                reasons.entry(location).or_default().push(error.to_string());
            }
        }
        for entry in entries.values() {
            let invalid: Vec<Arc<Object>> = self
                .entry_objects(entry)
                .filter(|object| reasons.contains_key(&object.origin.location()))
                .cloned()
                .collect();
            for object in invalid {
                let location = object.origin.location();
                let older =
                    entry.in_force.iter().find(|older| older.id == object.id && older.origin.location() != location);
                let older = older.filter(|_| may_be_older && self.tried.insert(object.id.clone()));
                // A replacement is indexed by the location of the written object.
                let written = self.replacements.iter().find(|(_, it)| it.origin.location() == location);
                let written = written.map_or(location, |(written, _)| *written);
                match older {
                    Some(older) => drop(self.replacements.insert(written, older.clone())),
                    None => drop(self.replacements.remove(&written)),
                }
                self.excluded.insert(written);
                let fault = faulty
                    .entry(object.id.clone())
                    .or_insert_with(|| Faulty { has_last_good: false, reasons: Vec::new() });
                fault.has_last_good = older.is_some();
                fault.reasons.extend(reasons.remove(&location).unwrap_or_default());
            }
        }
    }

    /// All objects after substitution.
    pub(super) fn objects<'a>(
        &'a self,
        sorted: &'a BTreeMap<SortKey, Arc<Object>>,
    ) -> impl Iterator<Item = &'a Arc<Object>> {
        sorted.values().filter_map(|object| self.substitute(object))
    }

    /// The objects of one entry after substitution.
    pub(super) fn entry_objects<'a>(&'a self, entry: &'a Entry) -> impl Iterator<Item = &'a Arc<Object>> {
        entry.objects.iter().filter_map(|object| self.substitute(object))
    }

    /// The object, its replacement, or `None` if it is left out.
    fn substitute<'a>(&'a self, object: &'a Arc<Object>) -> Option<&'a Arc<Object>> {
        if self.excluded.is_empty() {
            return Some(object);
        }
        let location = object.origin.location();
        if self.excluded.contains(&location) { self.replacements.get(&location) } else { Some(object) }
    }

    /// Whether an object of the entry was excluded.
    pub(super) fn affects(&self, entry: &Entry) -> bool {
        !self.excluded.is_empty()
            && entry.objects.iter().any(|object| self.excluded.contains(&object.origin.location()))
    }
}
