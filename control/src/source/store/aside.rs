//! What compiling sets aside: objects at fault, and the last good versions that stand in for them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::text::Text;
use super::{Faulty, Rank};
use crate::complaint::{Complaint, Place};
use crate::manifest::{Object, ObjectId};

/// What was set aside while compiling: objects at fault, and what stands in for them.
#[derive(Debug, Default)]
pub(super) struct Aside {
    out: BTreeSet<Place>,
    instead: BTreeMap<Place, Arc<Object>>,
    /// Those that something older was tried for.
    tried: BTreeSet<ObjectId>,
}

impl Aside {
    /// Sets aside what errors are about, for something older where there is such.
    pub(super) fn set_aside(
        &mut self,
        errors: &[Complaint],
        texts: &BTreeMap<Arc<str>, Text>,
        faulty: &mut BTreeMap<ObjectId, Faulty>,
        may_be_older: bool,
    ) {
        let mut reasons: BTreeMap<Place, Vec<String>> = BTreeMap::new();
        for error in errors {
            if let Some(place) = error.object {
                reasons.entry(place).or_default().push(error.to_string());
            }
        }
        for text in texts.values() {
            let at_fault: Vec<Arc<Object>> =
                self.of(text).filter(|object| reasons.contains_key(&object.origin.object())).cloned().collect();
            for object in at_fault {
                let place = object.origin.object();
                let older = text.in_force.iter().find(|older| older.id == object.id && older.origin.object() != place);
                let older = older.filter(|_| may_be_older && self.tried.insert(object.id.clone()));
                // What stands in for something stands at the place of what is written.
                let written = self.instead.iter().find(|(_, stand_in)| stand_in.origin.object() == place);
                let written = written.map_or(place, |(written, _)| *written);
                match older {
                    Some(older) => drop(self.instead.insert(written, older.clone())),
                    None => drop(self.instead.remove(&written)),
                }
                self.out.insert(written);
                let entry = faulty
                    .entry(object.id.clone())
                    .or_insert_with(|| Faulty { has_last_good: false, reasons: Vec::new() });
                entry.has_last_good = older.is_some();
                entry.reasons.extend(reasons.remove(&place).unwrap_or_default());
            }
        }
    }

    /// All objects, as they are with what is set aside.
    pub(super) fn objects<'a>(&'a self, sorted: &'a BTreeMap<Rank, Arc<Object>>) -> impl Iterator<Item = &'a Object> {
        sorted.values().filter_map(|object| self.stand_in(object)).map(Arc::as_ref)
    }

    /// Those of one text.
    pub(super) fn of<'a>(&'a self, text: &'a Text) -> impl Iterator<Item = &'a Arc<Object>> {
        text.objects.iter().filter_map(|object| self.stand_in(object))
    }

    /// An object, or what stands in for it.
    fn stand_in<'a>(&'a self, object: &'a Arc<Object>) -> Option<&'a Arc<Object>> {
        let place = object.origin.object();
        if self.out.contains(&place) { self.instead.get(&place) } else { Some(object) }
    }

    pub(super) fn touches(&self, text: &Text) -> bool {
        !self.out.is_empty() && text.objects.iter().any(|object| self.out.contains(&object.origin.object()))
    }
}
