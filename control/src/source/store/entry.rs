//! One entry of a source: its objects, and retained objects that it no longer has but that stay in force.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vipgate_policy::diagnostic::{Code, Diagnostic, ObjectLocation};
use vipgate_policy::manifest::{
    AddressPool, Body, CloudPool, Manifests, Object, ObjectId, Origin, ReadOptions, read, read_object,
};
use vipgate_policy::yaml::Source;

use crate::source::EntryContent;

/// The state of an entry at its last update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Presence {
    /// Parsed; some of its objects may be invalid.
    #[default]
    Read,
    /// It or its directory can't be read, or its objects can't be identified.
    Unreadable,
    /// It has no documents, such as a file truncated by a shell's `>` before it is written.
    Empty,
    /// The configured file or its directory is missing.
    Missing,
    Removed,
    /// Parsed, and has no objects any more.
    NoObjects,
}

/// One entry.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) presence: Presence,
    /// Whether all of its objects have been known once.
    pub(super) has_been_read: bool,
    /// Its objects, and the last good versions of the retained ones.
    pub(super) objects: Vec<Arc<Object>>,
    /// The retained ones of them, which it doesn't have readably now.
    pub(super) retained: BTreeSet<ObjectId>,
    /// Invalid objects without a last good version.
    pub(super) rejected: BTreeSet<ObjectId>,
    pub(super) diagnostics: Vec<Diagnostic>,
}

/// Maximum number of objects of an entry whose unchanged ones stay the same: each keeps the text that it is from.
const MAX_KEPT_OBJECTS: usize = 8;

/// Whether an object is in the same lines of another version of its text, so that it and its positions are the same.
fn has_same_text(old: &Object, new: &Object) -> bool {
    let (Origin { source: before, .. }, Origin { source: after, document, item, line }) = (&old.origin, &new.origin);
    if item.is_some() || (old.origin.document, old.origin.item, old.origin.line) != (*document, None, *line) {
        return false;
    }
    // Up to the end of the document. One that begins in the line of its marker may begin elsewhere in it.
    let lines = |source: &'_ Source| -> Option<Vec<String>> {
        let mut lines = source.text().split_inclusive('\n').skip((*line as usize).saturating_sub(1));
        let is_marker = |line: &str| line.starts_with("---");
        let first = lines.next().filter(|line| !is_marker(line))?;
        Some(std::iter::once(first).chain(lines.take_while(|line| !is_marker(line))).map(str::to_owned).collect())
    };
    lines(before).is_some_and(|lines_before| lines(after) == Some(lines_before))
}

impl Entry {
    /// Whether it has been read without a diagnostic.
    pub(super) fn is_regular(&self) -> bool {
        let Self { presence, has_been_read: _, objects: _, retained, rejected, diagnostics } = self;
        let is_faultless = retained.is_empty() && rejected.is_empty() && diagnostics.is_empty();
        *presence == Presence::Read && is_faultless
    }

    /// The entry with new content. Retains previous objects that are unreadable now, and all of them if it has none
    /// now.
    pub(super) fn with_content(
        self,
        name: &Arc<str>,
        content: Result<EntryContent, String>,
        options: ReadOptions,
    ) -> Self {
        let mut manifests = Manifests::default();
        match content {
            Ok(EntryContent::Text(text)) => read(&Arc::new(Source::new(name, text)), options, &mut manifests),
            Ok(EntryContent::Object(object)) => read_object(name, object, options, &mut manifests),
            Err(error) => {
                let diagnostics = vec![Diagnostic::for_file(name, Code::Unreadable, error.clone())];
                return Self { diagnostics, ..self.with_all_retained(Presence::Unreadable) };
            }
        }
        let Manifests { objects, diagnostics, unreadable, documents } = manifests;
        let mut objects: Vec<Arc<Object>> = objects.into_iter().map(Arc::new).collect();
        let mut invalid: BTreeSet<ObjectLocation> = BTreeSet::new();
        let mut invalid_ids: BTreeSet<ObjectId> = unreadable.iter().map(|(_, id)| id.clone()).collect();
        // An error that can't be attributed to an object may concern any of the previous objects.
        let mut unattributed = false;
        for error in diagnostics.iter().filter(|diagnostic| diagnostic.is_error()) {
            let Some(location) = error.object else {
                unattributed = true;
                continue;
            };
            match objects.iter().find(|object| object.origin.location() == location) {
                Some(object) => drop(invalid_ids.insert(object.id.clone())),
                None => unattributed |= !unreadable.iter().any(|(place, _)| *place == location),
            }
            invalid.insert(location);
        }
        objects.retain(|object| !invalid.contains(&object.origin.location()));
        let named: BTreeSet<ObjectId> = objects.iter().map(|object| object.id.clone()).collect();
        let (mut retained, mut rejected) = (BTreeSet::new(), invalid_ids.clone());
        rejected.retain(|id| !named.contains(id));
        for object in &self.objects {
            if !named.contains(&object.id) && (unattributed || invalid_ids.contains(&object.id)) {
                retained.insert(object.id.clone());
                rejected.remove(&object.id);
                objects.push(object.clone());
            }
        }
        if objects.len() <= MAX_KEPT_OBJECTS {
            for object in &mut objects {
                if let Some(same) = self.objects.iter().find(|old| old.id == object.id && has_same_text(old, object)) {
                    *object = same.clone();
                }
            }
        }
        let presence = if unattributed { Presence::Unreadable } else { Presence::Read };
        if objects.is_empty() && !unattributed {
            let presence = if documents == 0 { Presence::Empty } else { Presence::NoObjects };
            return Self { has_been_read: true, rejected, diagnostics, ..self.with_all_retained(presence) };
        }
        let has_been_read = self.has_been_read || !unattributed;
        Self { presence, has_been_read, objects, retained, rejected, diagnostics }
    }

    /// The entry with all its objects retained.
    pub(super) fn with_all_retained(self, presence: Presence) -> Self {
        let retained = self.objects.iter().map(|object| object.id.clone()).collect();
        Self { presence, retained, rejected: BTreeSet::new(), diagnostics: Vec::new(), ..self }
    }

    /// Gives its pools what their providers have; the same allocations stay where nothing differs.
    pub(super) fn set_cloud(&mut self, cloud: &BTreeMap<String, Arc<CloudPool>>) {
        for object in &mut self.objects {
            let Body::AddressPool(pool) = &object.body else { continue };
            let wanted = cloud.get(&object.id.name).filter(|_| pool.has_provider());
            if wanted != pool.cloud.as_ref() {
                let pool = AddressPool { cloud: wanted.cloned(), ..(**pool).clone() };
                *object = Arc::new(Object { body: Body::AddressPool(Box::new(pool)), ..(**object).clone() });
            }
        }
    }

    /// Why some of its objects aren't in force as written.
    pub(super) fn reasons(&self, name: &str) -> Vec<String> {
        let errors = self.diagnostics.iter().filter(|diagnostic| diagnostic.is_error());
        let errors: Vec<String> = errors.map(ToString::to_string).collect();
        if !errors.is_empty() {
            return errors;
        }
        let reason = match self.presence {
            Presence::Read | Presence::Unreadable => "can't be read",
            Presence::Empty => "is empty",
            Presence::Missing => "is missing with its directory",
            Presence::Removed => "was removed as the last manifest of the source",
            Presence::NoObjects => "has no objects any more, and neither has the source",
        };
        vec![format!("{name}: {reason}")]
    }

    /// Whether it proves that the source isn't empty: it has objects now, or can't be read.
    pub(super) fn is_present(&self) -> bool {
        match self.presence {
            Presence::Read | Presence::Unreadable => !self.objects.is_empty(),
            Presence::Empty | Presence::Missing | Presence::Removed | Presence::NoObjects => false,
        }
    }

    /// The number of its objects that are in force only because its emptiness isn't accepted.
    pub(super) fn withheld(&self) -> usize {
        match self.presence {
            Presence::Empty | Presence::Missing | Presence::Removed | Presence::NoObjects => self.objects.len(),
            Presence::Read | Presence::Unreadable => 0,
        }
    }
}
