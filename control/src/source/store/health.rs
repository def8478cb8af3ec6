//! What a source lacks: objects that can't be read, and parts that are empty or unreadable.

use std::collections::BTreeMap;
use std::sync::Arc;

use vipgate_policy::manifest::ObjectId;

use super::entry::Presence;
use super::{Faulty, ManifestStore};
use crate::source::UnavailablePath;

/// A part of the source that is empty or unreadable.
#[derive(Debug)]
pub(super) struct Unhealthy {
    pub(super) name: Arc<str>,
    pub(super) reason: String,
    /// Whether a diagnostic reports it already.
    pub(super) has_diagnostic: bool,
    /// Whether its objects are known all the same, as they were readable last.
    is_known: bool,
}

impl Unhealthy {
    fn new(name: &str, reason: String) -> Self {
        Self { name: name.into(), reason, has_diagnostic: false, is_known: false }
    }
}

impl ManifestStore {
    /// Objects that are unreadable in their entries.
    pub(super) fn unreadable(&self) -> BTreeMap<ObjectId, Faulty> {
        let mut faulty: BTreeMap<ObjectId, Faulty> = BTreeMap::new();
        for (name, entry) in self.entries.irregular().filter(|(_, entry)| !entry.retained.is_empty()) {
            let reasons = entry.reasons(name);
            let retained = |id: &ObjectId| (id.clone(), Faulty { has_last_good: true, reasons: reasons.clone() });
            faulty.extend(entry.retained.iter().map(retained));
        }
        // The last good version of an invalid object may be from another entry.
        for (name, entry) in self.entries.irregular().filter(|(_, entry)| !entry.rejected.is_empty()) {
            let reasons = entry.reasons(name);
            for id in &entry.rejected {
                let rejected = || Faulty { has_last_good: false, reasons: Vec::new() };
                faulty.entry(id.clone()).or_insert_with(rejected).reasons.extend(reasons.iter().cloned());
            }
        }
        faulty
    }

    /// Whether all objects are known: what isn't there is gone then. Where a path can't be read, even of which nothing is
    /// known, objects may be behind it. An entry that could be read once has the objects that it had: who makes it
    /// unreadable keeps nobody else from getting what others give up.
    pub(super) fn is_complete(&self, unhealthy: &[Unhealthy]) -> bool {
        self.initialized && unhealthy.iter().all(|it| it.is_known) && self.unavailable.iter().all(|it| it.is_missing)
    }

    /// The parts of the source that are empty or unreadable, and the number of objects retained for each.
    pub(super) fn unhealthy(&self) -> Vec<Unhealthy> {
        let retained = |objects: usize| match objects {
            0 => String::new(),
            1 => ": the object that it had stays in force".to_owned(),
            objects => format!(": the {objects} objects that it had stay in force"),
        };
        let mut all = Vec::new();
        let is_accepted =
            |it: &&UnavailablePath| it.is_missing && (self.allow_empty || self.accepted.contains(&it.path));
        for it in self.unavailable.iter().filter(|it| !is_accepted(it)) {
            let below = self.entries.iter().filter(|(name, _)| it.covers(name));
            let objects = below.map(|(_, entry)| entry.objects.len()).sum();
            // Without a policy yet, it may be what the first one waits for.
            if objects == 0 && !it.is_configured && self.initialized {
                continue;
            }
            all.push(Unhealthy::new(&it.path, format!("{}{}", it.reason, retained(objects))));
        }
        let is_unavailable = |name: &str| self.unavailable.iter().any(|it| it.covers(name));
        let mut withheld = 0;
        for (name, entry) in self.entries.irregular() {
            match entry.presence {
                Presence::Unreadable if !is_unavailable(name) => {
                    let errors = entry.diagnostics.iter().filter(|diagnostic| diagnostic.is_error());
                    let first = errors.min().map_or_else(String::new, |it| it.reason.clone());
                    let reason = format!("{first}{}", retained(entry.retained.len()));
                    let is_known = entry.has_been_read;
                    all.push(Unhealthy { has_diagnostic: true, is_known, ..Unhealthy::new(name, reason) });
                }
                Presence::Empty if !entry.objects.is_empty() => {
                    all.push(Unhealthy::new(name, format!("is empty{}", retained(entry.objects.len()))));
                }
                Presence::Removed | Presence::NoObjects => withheld += entry.objects.len(),
                Presence::Read | Presence::Unreadable | Presence::Empty | Presence::Missing => {}
            }
        }
        if withheld > 0 {
            all.push(Unhealthy::new("source", format!("has no manifests any more{}", retained(withheld))));
        } else if !self.initialized && all.is_empty() {
            all.push(Unhealthy::new("source", "has no manifests".to_owned()));
        }
        all
    }
}
