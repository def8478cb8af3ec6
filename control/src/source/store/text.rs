//! One text of a source: the objects that it says, and those that it doesn't say any more but that stay in force.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::complaint::{Complaint, Place};
use crate::manifest::{Foreign, Manifests, Object, ObjectId, read};
use crate::yaml::Source;

/// How a text stood when it was last looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Presence {
    /// It was read, though some of its objects may be wrong.
    #[default]
    Read,
    /// It, or its folder, can't be read, or it can't be made out which objects it has.
    Unreadable,
    /// It is there without a document in it, as a shell's `>` leaves it before the first byte is written.
    Blank,
    /// The folder or file that was named is missing.
    Missing,
    /// It was removed.
    Gone,
    /// It was read, and has no object any more.
    Without,
}

/// One text.
#[derive(Debug, Default)]
pub(super) struct Text {
    pub(super) presence: Presence,
    /// What it says, and the last good versions of what it doesn't say readably.
    pub(super) objects: Vec<Arc<Object>>,
    /// Those of them that it doesn't say readably.
    pub(super) kept: BTreeSet<ObjectId>,
    /// Objects that it says but that mean nothing, and of which there was no version before.
    pub(super) refused: BTreeSet<ObjectId>,
    /// What is wrong with it.
    pub(super) complaints: Vec<Complaint>,
    /// What of it was in force when everything was compiled last.
    pub(super) in_force: Vec<Arc<Object>>,
    /// Whether `in_force` may be something else than `objects`.
    pub(super) differs: bool,
}

impl Text {
    /// The text with another content. What was in it before stays of what can't be read now, and all of it when nothing is in it now.
    pub(super) fn changed(self, name: &Arc<str>, content: Result<String, String>) -> Self {
        let text = match content {
            Ok(text) => text,
            Err(reason) => {
                let complaints = vec![Complaint::about_file(name, reason)];
                return Self { complaints, ..self.keeping(Presence::Unreadable) };
            }
        };
        let mut manifests = Manifests::default();
        read(&Arc::new(Source::new(name, text)), Foreign::Ignore, &mut manifests);
        let Manifests { objects, complaints, broken, documents } = manifests;
        let mut objects: Vec<Arc<Object>> = objects.into_iter().map(Arc::new).collect();
        let mut wrong: BTreeSet<Place> = BTreeSet::new();
        let mut wrong_ids: BTreeSet<ObjectId> = broken.iter().map(|(_, id)| id.clone()).collect();
        // Whatever can't be attributed to an object may be about any of those that were here.
        let mut unattributed = false;
        for error in complaints.iter().filter(|complaint| complaint.is_error()) {
            let Some(place) = error.object else {
                unattributed = true;
                continue;
            };
            match objects.iter().find(|object| object.origin.object() == place) {
                Some(object) => drop(wrong_ids.insert(object.id.clone())),
                None => unattributed |= !broken.iter().any(|(of, _)| *of == place),
            }
            wrong.insert(place);
        }
        objects.retain(|object| !wrong.contains(&object.origin.object()));
        let named: BTreeSet<ObjectId> = objects.iter().map(|object| object.id.clone()).collect();
        let (mut kept, mut refused) = (BTreeSet::new(), wrong_ids.clone());
        refused.retain(|id| !named.contains(id));
        for object in &self.objects {
            if !named.contains(&object.id) && (unattributed || wrong_ids.contains(&object.id)) {
                kept.insert(object.id.clone());
                refused.remove(&object.id);
                objects.push(object.clone());
            }
        }
        let presence = if unattributed { Presence::Unreadable } else { Presence::Read };
        if objects.is_empty() && !unattributed {
            let presence = if documents == 0 { Presence::Blank } else { Presence::Without };
            return Self { refused, complaints, ..self.keeping(presence) };
        }
        Self { presence, objects, kept, refused, complaints, in_force: self.in_force, differs: true }
    }

    /// The text with all that it said, though it doesn't say it now.
    pub(super) fn keeping(self, presence: Presence) -> Self {
        let kept = self.objects.iter().map(|object| object.id.clone()).collect();
        Self { presence, kept, refused: BTreeSet::new(), complaints: Vec::new(), ..self }
    }

    /// Why some of its objects are not in force as it says them, or not at all.
    pub(super) fn reasons(&self, name: &str) -> Vec<String> {
        let errors = self.complaints.iter().filter(|complaint| complaint.is_error());
        let errors: Vec<String> = errors.map(ToString::to_string).collect();
        if !errors.is_empty() {
            return errors;
        }
        let reason = match self.presence {
            Presence::Read | Presence::Unreadable => "can't be read",
            Presence::Blank => "is empty",
            Presence::Missing => "is missing with its folder",
            Presence::Gone => "was removed as the last text of the source",
            Presence::Without => "has no objects any more, and nor has the source",
        };
        vec![format!("{name}: {reason}")]
    }

    /// Whether the text is there as one of a source that has manifests: it says some, or can't be read.
    pub(super) fn is_there(&self) -> bool {
        match self.presence {
            Presence::Read | Presence::Unreadable => !self.objects.is_empty(),
            Presence::Blank | Presence::Missing | Presence::Gone | Presence::Without => false,
        }
    }

    /// What of it is in force only because its emptiness isn't believed.
    pub(super) fn withheld(&self) -> usize {
        match self.presence {
            Presence::Blank | Presence::Missing | Presence::Gone | Presence::Without => self.objects.len(),
            Presence::Read | Presence::Unreadable => 0,
        }
    }
}
