//! The manifests of a source, text by text, and what they come to.
//!
//! One that is broken never takes others with it: its last good version stays, or, if there was none, it is left out, with
//! what depends on it; the rest goes on. Only texts that have changed are read again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::source::Update;
use crate::complaint::{Complaint, Place, settle};
use crate::manifest::{Foreign, Manifests, Object, ObjectId, read};
use crate::policy::{Compiled, Deal, compile};
use crate::yaml::Source;

/// Rounds of leaving out what is at fault: each makes at least one object older, or leaves it out.
const ROUNDS: usize = 32;

/// All manifests.
#[derive(Debug, Default)]
pub struct Store {
    texts: BTreeMap<Arc<str>, Text>,
    /// What was in force of each object when it was last fine.
    good: HashMap<ObjectId, Arc<Object>>,
}

/// One text.
#[derive(Debug, Default)]
struct Text {
    /// What it says, and what it said of objects that it says nothing readable about now.
    objects: Vec<Arc<Object>>,
    /// Those of them that it says nothing readable about now.
    kept: BTreeSet<ObjectId>,
    /// What is wrong with it.
    complaints: Vec<Complaint>,
}

/// What all manifests come to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The policy of all gateways.
    pub deal: Arc<Deal>,
    /// Everything that is wrong, in the order of texts and lines.
    pub complaints: Vec<Complaint>,
    /// Objects that are not in force as they are written.
    pub faulty: BTreeMap<ObjectId, Faulty>,
    /// Objects that are in force, broken ones' last good versions included.
    pub objects: usize,
}

/// An object that is not in force as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faulty {
    /// Whether an earlier version of it is in force.
    pub has_last_good: bool,
    /// What is wrong with it.
    pub reasons: Vec<String>,
}

impl Store {
    /// Takes in what has changed.
    pub fn update(&mut self, update: Update) {
        let Update { whole, changed, gone } = update;
        if whole {
            let named: BTreeSet<&Arc<str>> = changed.iter().map(|(name, _)| name).collect();
            self.texts.retain(|name, _| named.contains(name));
        }
        for name in gone {
            self.texts.remove(&name);
        }
        for (name, content) in changed {
            let before = self.texts.remove(&name).unwrap_or_default();
            self.texts.insert(name.clone(), before.changed(&name, content));
        }
    }

    /// Compiles everything. What is at fault is replaced by its last good version, or left out, until the rest is fine.
    pub fn compile(&mut self) -> Outcome {
        let mut complaints: Vec<Complaint> = self.texts.values().flat_map(|text| text.complaints.clone()).collect();
        let mut objects: BTreeMap<Place, Arc<Object>> = BTreeMap::new();
        for object in self.texts.values().flat_map(|text| &text.objects) {
            objects.insert(object.origin.object(), object.clone());
        }
        let mut faulty: BTreeMap<ObjectId, Faulty> = BTreeMap::new();
        for text in self.texts.values().filter(|text| !text.kept.is_empty()) {
            let errors = text.complaints.iter().filter(|complaint| complaint.is_error());
            let reasons: Vec<String> = errors.map(ToString::to_string).collect();
            let entry = |id: &ObjectId| (id.clone(), Faulty { has_last_good: true, reasons: reasons.clone() });
            faulty.extend(text.kept.iter().map(entry));
        }
        let mut compiled = Compiled::default();
        for round in 0..ROUNDS {
            compiled = compile(objects.values().map(Arc::as_ref));
            let errors: Vec<&Complaint> = compiled.complaints.iter().filter(|complaint| complaint.is_error()).collect();
            if errors.is_empty() {
                break;
            }
            complaints.extend(errors.iter().map(|complaint| (*complaint).clone()));
            // Behind the last round nothing older is tried: whatever is wrong goes.
            self.set_aside(&errors, &mut objects, &mut faulty, round + 2 < ROUNDS);
        }
        complaints.extend(compiled.complaints);
        settle(&mut complaints);
        let used: HashMap<ObjectId, Arc<Object>> =
            objects.into_values().map(|object| (object.id.clone(), object)).collect();
        let count = used.len();
        self.good = used;
        Outcome { deal: Arc::new(compiled.deal), complaints, faulty, objects: count }
    }

    /// Replaces what errors are about by something older, or takes it out.
    fn set_aside(
        &self,
        errors: &[&Complaint],
        objects: &mut BTreeMap<Place, Arc<Object>>,
        faulty: &mut BTreeMap<ObjectId, Faulty>,
        may_be_older: bool,
    ) {
        let mut reasons: BTreeMap<Place, Vec<String>> = BTreeMap::new();
        for error in errors {
            if let Some(place) = error.object {
                reasons.entry(place).or_default().push(error.to_string());
            }
        }
        for (place, reasons) in reasons {
            let Some(object) = objects.remove(&place) else { continue };
            let known = faulty.contains_key(&object.id);
            // Another object of the same name is no older version of this one.
            let is_there = objects.values().any(|other| other.id == object.id);
            let older = self.good.get(&object.id).filter(|_| may_be_older && !known && !is_there);
            let older = older.filter(|older| older.origin.object() != place);
            if let Some(older) = older {
                objects.insert(older.origin.object(), older.clone());
            }
            let entry =
                faulty.entry(object.id.clone()).or_insert_with(|| Faulty { has_last_good: false, reasons: Vec::new() });
            entry.has_last_good = older.is_some() || is_there;
            entry.reasons.extend(reasons);
        }
    }
}

impl Text {
    /// The text with another content.
    fn changed(self, name: &Arc<str>, content: Result<String, String>) -> Self {
        let text = match content {
            Ok(text) => text,
            // Nobody knows what it says: what it said stays.
            Err(reason) => {
                let kept = self.objects.iter().map(|object| object.id.clone()).collect();
                return Self { objects: self.objects, kept, complaints: vec![Complaint::about_file(name, reason)] };
            }
        };
        let mut manifests = Manifests::default();
        read(&Arc::new(Source::new(name, text)), Foreign::Ignore, &mut manifests);
        let Manifests { objects, complaints } = manifests;
        let mut objects: Vec<Arc<Object>> = objects.into_iter().map(Arc::new).collect();
        let errors: Vec<&Complaint> = complaints.iter().filter(|complaint| complaint.is_error()).collect();
        let mut kept = BTreeSet::new();
        if !errors.is_empty() {
            // Some of it means nothing: whatever it said of objects that it says nothing readable of now stays.
            let broken: BTreeSet<Place> = errors.iter().filter_map(|complaint| complaint.object).collect();
            objects.retain(|object| !broken.contains(&object.origin.object()));
            let named: BTreeSet<ObjectId> = objects.iter().map(|object| object.id.clone()).collect();
            for object in self.objects.into_iter().filter(|object| !named.contains(&object.id)) {
                kept.insert(object.id.clone());
                objects.push(object);
            }
        }
        Self { objects, kept, complaints }
    }
}
