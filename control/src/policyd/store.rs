//! The manifests of a source, text by text, and what they come to.
//!
//! One that is broken never takes others with it: its last good version stays, or, if there was none, it is left out, with
//! what depends on it; the rest goes on. Only texts that have changed are read again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::source::Update;
use crate::complaint::{Complaint, Place, settle};
use crate::manifest::{Foreign, Manifests, Object, ObjectId, Origin, read};
use crate::policy::{Cluster, Deal, compile};
use crate::yaml::Source;

/// Rounds of leaving out what is at fault: each makes at least one object older, or leaves it out.
const ROUNDS: usize = 32;

/// All manifests.
#[derive(Debug, Default)]
pub struct Store {
    texts: BTreeMap<Arc<str>, Text>,
    /// The objects of all texts, in the order that compiling brings them into.
    sorted: BTreeMap<Rank, Arc<Object>>,
    /// Why the last reading of everything was not believed.
    disbelief: Option<String>,
    /// What the server's own configuration says of the cluster.
    cluster: Cluster,
}

/// An object among all others: its name, then its place.
type Rank = (ObjectId, Arc<str>, usize, Option<usize>);

fn rank(object: &Object) -> Rank {
    let Origin { source, document, item, .. } = &object.origin;
    (object.id.clone(), source.name().clone(), *document, *item)
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
    /// What of it was in force when everything was compiled last.
    in_force: Vec<Arc<Object>>,
    /// Whether `in_force` may be something else than `objects`.
    differs: bool,
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
    /// A store without manifests of a server whose configuration says this of the cluster.
    pub fn in_cluster(cluster: Cluster) -> Self {
        Self { cluster, ..Self::default() }
    }

    /// Takes in what has changed.
    pub fn update(&mut self, update: Update) {
        let Update { whole, changed, gone } = update;
        self.disbelief = None;
        if whole && changed.is_empty() && !self.texts.is_empty() {
            // A source that was full and is empty when it is read again has been lost, more likely than emptied: whoever empties
            // it on purpose takes away one after the other.
            self.disbelief = Some(format!("is empty, but had {} entries before: they stay in force", self.texts.len()));
            return;
        }
        if whole {
            let named: BTreeSet<&Arc<str>> = changed.iter().map(|(name, _)| name).collect();
            let unnamed: Vec<Arc<str>> = self.texts.keys().filter(|name| !named.contains(name)).cloned().collect();
            for name in unnamed {
                self.take(&name);
            }
        }
        for name in gone {
            self.take(&name);
        }
        for (name, content) in changed {
            let text = self.take(&name).unwrap_or_default().changed(&name, content);
            self.sorted.extend(text.objects.iter().map(|object| (rank(object), object.clone())));
            self.texts.insert(name, text);
        }
    }

    /// Takes a text out.
    fn take(&mut self, name: &str) -> Option<Text> {
        let text = self.texts.remove(name)?;
        for object in &text.objects {
            self.sorted.remove(&rank(object));
        }
        Some(text)
    }

    /// Compiles everything. What is at fault is replaced by its last good version, or left out, until the rest is fine.
    pub fn compile(&mut self) -> Outcome {
        let mut complaints: Vec<Complaint> =
            self.texts.values().flat_map(|text| text.complaints.iter().cloned()).collect();
        complaints.extend(self.disbelief.iter().map(|why| Complaint::about_file("source", why.clone())));
        let mut faulty = self.unreadable();
        let mut aside = Aside::default();
        let mut compiled = compile(aside.objects(&self.sorted));
        for round in 1..=ROUNDS {
            let errors: Vec<Complaint> = compiled.complaints.iter().filter(|it| it.is_error()).cloned().collect();
            if errors.is_empty() {
                break;
            }
            // Toward the end nothing older is tried any more: whatever is wrong goes.
            aside.set_aside(&errors, &self.texts, &mut faulty, round < ROUNDS / 2);
            complaints.extend(errors);
            compiled = compile(aside.objects(&self.sorted));
        }
        complaints.extend(compiled.complaints);
        settle(&mut complaints);
        for text in self.texts.values_mut() {
            let has_aside = aside.touches(text);
            if text.differs || has_aside {
                text.in_force = aside.of(text).cloned().collect();
                text.differs = has_aside;
            }
        }
        let cluster = self.cluster.clone().with(&compiled.deal.cluster.take().unwrap_or_default());
        compiled.deal.cluster = cluster.said();
        let objects = self.texts.values().map(|text| text.in_force.len()).sum();
        Outcome { deal: Arc::new(compiled.deal), complaints, faulty, objects }
    }

    /// Objects that their texts say nothing readable about now.
    fn unreadable(&self) -> BTreeMap<ObjectId, Faulty> {
        let mut faulty = BTreeMap::new();
        for text in self.texts.values().filter(|text| !text.kept.is_empty()) {
            let errors = text.complaints.iter().filter(|complaint| complaint.is_error());
            let reasons: Vec<String> = errors.map(ToString::to_string).collect();
            let entry = |id: &ObjectId| (id.clone(), Faulty { has_last_good: true, reasons: reasons.clone() });
            faulty.extend(text.kept.iter().map(entry));
        }
        faulty
    }
}

/// What was set aside while compiling: objects at fault, and what stands in for them.
#[derive(Debug, Default)]
struct Aside {
    out: BTreeSet<Place>,
    instead: BTreeMap<Place, Arc<Object>>,
    /// Those that something older was tried for.
    tried: BTreeSet<ObjectId>,
}

impl Aside {
    /// Sets aside what errors are about, for something older where there is such.
    fn set_aside(
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
    fn objects<'a>(&'a self, sorted: &'a BTreeMap<Rank, Arc<Object>>) -> impl Iterator<Item = &'a Object> {
        sorted.values().filter_map(|object| self.stand_in(object)).map(Arc::as_ref)
    }

    /// Those of one text.
    fn of<'a>(&'a self, text: &'a Text) -> impl Iterator<Item = &'a Arc<Object>> {
        text.objects.iter().filter_map(|object| self.stand_in(object))
    }

    /// An object, or what stands in for it.
    fn stand_in<'a>(&'a self, object: &'a Arc<Object>) -> Option<&'a Arc<Object>> {
        let place = object.origin.object();
        if self.out.contains(&place) { self.instead.get(&place) } else { Some(object) }
    }

    fn touches(&self, text: &Text) -> bool {
        !self.out.is_empty() && text.objects.iter().any(|object| self.out.contains(&object.origin.object()))
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
                return Self { kept, complaints: vec![Complaint::about_file(name, reason)], ..self };
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
        Self { objects, kept, complaints, in_force: self.in_force, differs: true }
    }
}

#[cfg(test)]
mod tests;
