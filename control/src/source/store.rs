//! The manifests of a source, text by text, and what they come to.
//!
//! One that is broken never takes others with it: its last good version stays, or, if there was none, it is left out, with
//! what depends on it; the rest goes on. Only texts that have changed are read again.
//!
//! Emptiness is not believed: a text or a folder that had objects and is now empty or missing keeps them, and so does a source
//! that had objects and now has none at all, until it has some again, or somebody accepts that it is empty. A text that was
//! removed while others are still there is a removal; and what a text still says elsewhere in the source is never kept twice.

mod aside;
#[cfg(test)]
mod tests;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use self::aside::Aside;
use self::text::{Presence, Text};
use super::{Hidden, Update};
use crate::complaint::{Complaint, settle};
use crate::manifest::{Object, ObjectId, Origin};
use crate::policy::{Cluster, Deal, compile};

/// Rounds of leaving out what is at fault: each makes at least one object older, or leaves it out.
const ROUNDS: usize = 32;

/// All manifests.
#[derive(Debug, Default)]
pub struct Store {
    texts: BTreeMap<Arc<str>, Text>,
    /// The objects of all texts, in the order that compiling brings them into.
    sorted: BTreeMap<Rank, Arc<Object>>,
    /// Files and folders that can't be looked into.
    hidden: Vec<Hidden>,
    /// Those of them whose absence was accepted.
    accepted: BTreeSet<Arc<str>>,
    /// Whether emptiness is believed.
    allow_empty: bool,
    /// Whether there was anything to put in force yet.
    begun: bool,
    /// What the server's own configuration says of the cluster.
    cluster: Cluster,
}

/// An object among all others: its name, then its place.
type Rank = (ObjectId, Arc<str>, usize, Option<usize>);

fn rank(object: &Object) -> Rank {
    let Origin { source, document, item, .. } = &object.origin;
    (object.id.clone(), source.name().clone(), *document, *item)
}

/// What all manifests come to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The policy of all gateways; none before there was a manifest, or somebody has accepted that there is none.
    pub deal: Option<Arc<Deal>>,
    /// Everything that is wrong, in the order of texts and lines.
    pub complaints: Vec<Complaint>,
    /// Objects that are not in force as they are written.
    pub faulty: BTreeMap<ObjectId, Faulty>,
    /// Objects that are in force, broken ones' last good versions included.
    pub objects: usize,
    /// Why the source is not what it should be: empty, unreadable, or a part of it is. Empty while all is well.
    pub unhealthy: Vec<String>,
}

impl Outcome {
    /// Objects by state: in force as they are written, in force as they were before, and left out.
    pub fn states(&self) -> [(&'static str, u64); 3] {
        let last_good = self.faulty.values().filter(|faulty| faulty.has_last_good).count();
        let rejected = self.faulty.len() - last_good;
        let accepted = self.objects.saturating_sub(last_good);
        [("accepted", accepted as u64), ("last_good", last_good as u64), ("rejected", rejected as u64)]
    }
}

/// An object that is not in force as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faulty {
    /// Whether an earlier version of it is in force.
    pub has_last_good: bool,
    /// What is wrong with it.
    pub reasons: Vec<String>,
}

/// What goes out of force since somebody has accepted that a source, or a part of it, is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// Texts and how many objects of each.
    pub texts: Vec<(Arc<str>, usize)>,
}

impl Store {
    /// A store that believes in emptiness, or doesn't.
    pub fn new(allow_empty: bool) -> Self {
        Self { allow_empty, ..Self::default() }
    }

    /// The same of a server whose configuration says this of the cluster.
    #[must_use]
    pub fn in_cluster(self, cluster: Cluster) -> Self {
        Self { cluster, ..self }
    }

    /// Takes in what has changed.
    pub fn update(&mut self, update: Update) {
        let Update { whole, changed, gone, hidden } = update;
        self.accepted.retain(|place| hidden.iter().any(|it| it.place == *place));
        let named: BTreeSet<&Arc<str>> = changed.iter().map(|(name, _)| name).collect();
        let unnamed = self.texts.keys().filter(|name| whole && !named.contains(name)).cloned();
        let gone: Vec<Arc<str>> = unnamed.chain(gone).collect();
        for name in gone {
            self.keep(&name, Presence::Gone);
        }
        for it in &hidden {
            // What was removed before can't be missing with its folder, and nobody says again that it is gone.
            let is_below = |(name, text): &(&Arc<str>, &Text)| it.hides(name) && text.presence != Presence::Gone;
            let below: Vec<Arc<str>> = self.texts.iter().filter(is_below).map(|(name, _)| name.clone()).collect();
            let presence = if it.missing { Presence::Missing } else { Presence::Unreadable };
            for name in &below {
                self.keep(name, presence);
            }
        }
        self.hidden = hidden;
        for (name, content) in changed {
            let text = self.take(&name).unwrap_or_default().changed(&name, content);
            self.put(name, text);
        }
        self.yield_kept();
        if self.allow_empty {
            let all = [Presence::Blank, Presence::Missing, Presence::Gone, Presence::Without];
            self.let_go(&all);
        } else if self.texts.values().any(Text::is_there) {
            self.let_go(&[Presence::Gone, Presence::Without]);
        }
        self.texts.retain(|_, text| text.presence != Presence::Gone || !text.objects.is_empty());
        let is_readable = self.hidden.iter().all(|it| it.missing)
            && self.texts.values().all(|text| text.presence != Presence::Unreadable);
        self.begun |= !self.sorted.is_empty() || self.allow_empty && is_readable;
    }

    /// Takes the source at its word where it is empty: what stays in force only since that wasn't believed, goes.
    ///
    /// # Errors
    /// When nothing of it is empty, and why it isn't.
    pub fn accept_empty(&mut self) -> Result<Accepted, String> {
        let all = [Presence::Blank, Presence::Missing, Presence::Gone, Presence::Without];
        let withheld = self.texts.iter().map(|(name, text)| (name.clone(), text.withheld()));
        let texts: Vec<(Arc<str>, usize)> = withheld.filter(|(_, objects)| *objects > 0).collect();
        let missing = || self.hidden.iter().filter(|it| it.missing);
        let is_news = missing().any(|it| it.named && !self.accepted.contains(&it.place));
        if texts.is_empty() && self.begun && !is_news {
            return Err("nothing of the source is empty that had manifests".to_owned());
        }
        if !self.begun {
            let texts = self.texts.iter().filter(|(_, text)| text.presence == Presence::Unreadable);
            let hidden = self.hidden.iter().filter(|it| !it.missing).map(|it| &it.place);
            if let Some(name) = hidden.chain(texts.map(|(name, _)| name)).next() {
                return Err(format!("the source isn't empty: {name} can't be read: mend it, or remove it"));
            }
        }
        self.begun = true;
        self.accepted.extend(self.hidden.iter().filter(|it| it.missing).map(|it| it.place.clone()));
        self.let_go(&all);
        Ok(Accepted { texts })
    }

    /// Takes a text out.
    fn take(&mut self, name: &str) -> Option<Text> {
        let text = self.texts.remove(name)?;
        for object in &text.objects {
            self.sorted.remove(&rank(object));
        }
        Some(text)
    }

    /// Puts a text in.
    fn put(&mut self, name: Arc<str>, text: Text) {
        self.sorted.extend(text.objects.iter().map(|object| (rank(object), object.clone())));
        self.texts.insert(name, text);
    }

    /// Keeps all that a text said, though it doesn't say it now.
    fn keep(&mut self, name: &Arc<str>, presence: Presence) {
        if let Some(text) = self.take(name) {
            self.put(name.clone(), text.keeping(presence));
        }
    }

    /// Lets go of what is kept of texts that are there no more.
    fn let_go(&mut self, presences: &[Presence]) {
        let these = self.texts.iter().filter(|(_, text)| presences.contains(&text.presence));
        let names: Vec<Arc<str>> = these.map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(text) = self.take(&name) else { continue };
            if matches!(text.presence, Presence::Blank | Presence::Without) {
                // It is there, and what is wrong with it is still said.
                let Text { presence, refused, complaints, .. } = text;
                self.texts.insert(name, Text { presence, refused, complaints, differs: true, ..Text::default() });
            }
        }
    }

    /// What another text says readably is kept by none.
    fn yield_kept(&mut self) {
        let mut moved: Vec<(Arc<str>, ObjectId)> = Vec::new();
        for (name, text) in self.texts.iter().filter(|(_, text)| !text.kept.is_empty()) {
            let is_elsewhere = |id: &&ObjectId| {
                let first = ((*id).clone(), Arc::from(""), 0, None);
                let same = self.sorted.range(first..).take_while(|(rank, _)| rank.0 == **id);
                let others = same.map(|(rank, _)| &rank.1).filter(|other| *other != name);
                others.filter_map(|other| self.texts.get(other)).any(|other| !other.kept.contains(*id))
            };
            moved.extend(text.kept.iter().filter(is_elsewhere).map(|id| (name.clone(), id.clone())));
        }
        for (name, id) in moved {
            let Some(mut text) = self.take(&name) else { continue };
            text.objects.retain(|object| object.id != id);
            text.kept.remove(&id);
            if text.presence == Presence::Read {
                // It still says it wrongly.
                text.refused.insert(id);
            }
            text.differs = true;
            self.put(name, text);
        }
    }

    /// Compiles everything. What is at fault is replaced by its last good version, or left out, until the rest is fine.
    pub fn compile(&mut self) -> Outcome {
        let unhealthy = self.unhealthy();
        let mut complaints: Vec<Complaint> =
            self.texts.values().flat_map(|text| text.complaints.iter().cloned()).collect();
        complaints.extend(
            unhealthy.iter().filter(|it| !it.is_complaint).map(|it| Complaint::about_file(&it.name, &*it.reason)),
        );
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
        let objects = self.texts.values().map(|text| text.in_force.len()).sum();
        let cluster = self.cluster.clone().with(&compiled.deal.cluster.take().unwrap_or_default());
        compiled.deal.cluster = cluster.said();
        let deal = self.begun.then(|| Arc::new(compiled.deal));
        let unhealthy = unhealthy.iter().map(|it| format!("{}: {}", it.name, it.reason)).collect();
        Outcome { deal, complaints, faulty, objects, unhealthy }
    }

    /// Objects that their texts don't say readably.
    fn unreadable(&self) -> BTreeMap<ObjectId, Faulty> {
        let mut faulty: BTreeMap<ObjectId, Faulty> = BTreeMap::new();
        for (name, text) in self.texts.iter().filter(|(_, text)| !text.kept.is_empty()) {
            let reasons = text.reasons(name);
            let entry = |id: &ObjectId| (id.clone(), Faulty { has_last_good: true, reasons: reasons.clone() });
            faulty.extend(text.kept.iter().map(entry));
        }
        // What one text says wrongly may be in force as another one said it before.
        for (name, text) in self.texts.iter().filter(|(_, text)| !text.refused.is_empty()) {
            let reasons = text.reasons(name);
            for id in &text.refused {
                let entry = || Faulty { has_last_good: false, reasons: Vec::new() };
                faulty.entry(id.clone()).or_insert_with(entry).reasons.extend(reasons.iter().cloned());
            }
        }
        faulty
    }

    /// What is empty or can't be read, and what it had.
    fn unhealthy(&self) -> Vec<Unhealthy> {
        let had = |objects: usize| match objects {
            0 => String::new(),
            1 => ": the object that it had stays in force".to_owned(),
            objects => format!(": the {objects} objects that it had stay in force"),
        };
        let mut all = Vec::new();
        let is_believed = |it: &&Hidden| it.missing && (self.allow_empty || self.accepted.contains(&it.place));
        for it in self.hidden.iter().filter(|it| !is_believed(it)) {
            let below = self.texts.iter().filter(|(name, _)| it.hides(name));
            let objects = below.map(|(_, text)| text.objects.len()).sum();
            if objects == 0 && !it.named {
                continue;
            }
            all.push(Unhealthy::new(&it.place, format!("{}{}", it.reason, had(objects))));
        }
        let is_hidden = |name: &str| self.hidden.iter().any(|it| it.hides(name));
        let mut withheld = 0;
        for (name, text) in &self.texts {
            match text.presence {
                Presence::Unreadable if !is_hidden(name) => {
                    let errors = text.complaints.iter().filter(|complaint| complaint.is_error());
                    let what = errors.min().map_or_else(String::new, |it| it.reason.clone());
                    let reason = format!("{what}{}", had(text.kept.len()));
                    all.push(Unhealthy { is_complaint: true, ..Unhealthy::new(name, reason) });
                }
                Presence::Blank if !text.objects.is_empty() => {
                    all.push(Unhealthy::new(name, format!("is empty{}", had(text.objects.len()))));
                }
                Presence::Gone | Presence::Without => withheld += text.objects.len(),
                Presence::Read | Presence::Unreadable | Presence::Blank | Presence::Missing => {}
            }
        }
        if withheld > 0 {
            all.push(Unhealthy::new("source", format!("has no manifests any more{}", had(withheld))));
        } else if !self.begun && all.is_empty() {
            all.push(Unhealthy::new("source", "has no manifests".to_owned()));
        }
        all
    }
}

/// A part of the source, or all of it, that is empty or can't be read.
#[derive(Debug)]
struct Unhealthy {
    name: Arc<str>,
    reason: String,
    /// Whether a complaint says the same.
    is_complaint: bool,
}

impl Unhealthy {
    fn new(name: &str, reason: String) -> Self {
        Self { name: name.into(), reason, is_complaint: false }
    }
}
