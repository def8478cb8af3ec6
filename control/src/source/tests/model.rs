//! The rule of the last good state, slowly: a state of all texts, and what a look at the whole disk makes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vipgate_dataplane::snapshot::spec::PolicySet;

use super::disk::{Doc, Fault, Id, Look, Sight};
use crate::complaint::Complaint;
use crate::manifest::{Foreign, Kind, Manifests, Object, ObjectId, read};
use crate::policy::{Viewer, compile};
use crate::xds::resource::version_of;
use crate::yaml::Source;

/// An object, and whether it says something that can't be.
#[derive(Clone, Debug)]
struct Known {
    id: Id,
    object: Arc<Object>,
    is_contradiction: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Read,
    Unreadable,
    Blank,
    Missing,
    /// Removed, or without an object.
    Without,
}

#[derive(Clone, Debug)]
struct Text {
    state: State,
    /// What it says, and what it is kept of.
    objects: Vec<Known>,
    kept: BTreeSet<Id>,
    refused: BTreeSet<Id>,
    /// What of it was in force last.
    in_force: BTreeMap<Id, Arc<Object>>,
    is_gone: bool,
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) allow_empty: bool,
    begun: bool,
    texts: BTreeMap<String, Text>,
    sight: Sight,
    accepted: BTreeSet<String>,
}

/// What a text says: objects, the names of those that are wrong, and whether that can be told.
fn said(name: &str, look: &Look) -> (Vec<Known>, BTreeSet<Id>, bool) {
    match look {
        Look::Docs(docs) => {
            let (wrong, fine): (Vec<&Doc>, Vec<&Doc>) = docs.iter().partition(|doc| doc.fault == Fault::Wrong);
            let known = |doc: &&Doc| {
                let (mut objects, ..) = parse(name, &doc.text());
                let object = objects.pop().unwrap();
                Known { id: doc.id, object, is_contradiction: doc.fault == Fault::Contradiction }
            };
            (fine.iter().map(known).collect(), wrong.iter().map(|doc| doc.id).collect(), true)
        }
        Look::Cut(text) => {
            // What is left of the last document may be one of its own; all that is wrong with it means that it isn't.
            let (objects, wrong, can_tell) = parse(name, text);
            let known = |object: Arc<Object>| {
                let id = short(&object.id);
                let is_contradiction = compile([&*object]).complaints.iter().any(Complaint::is_error);
                Known { id, object, is_contradiction }
            };
            (objects.into_iter().map(known).collect(), wrong, can_tell)
        }
        Look::Unreadable => (Vec::new(), BTreeSet::new(), false),
        Look::Blank | Look::Nothing => (Vec::new(), BTreeSet::new(), true),
    }
}

fn parse(name: &str, text: &str) -> (Vec<Arc<Object>>, BTreeSet<Id>, bool) {
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new(name, text.to_owned())), Foreign::Ignore, &mut manifests);
    let Manifests { objects, complaints, broken, .. } = manifests;
    let is_of_one = |place| broken.iter().any(|(of, _)| *of == place);
    let can_tell = complaints.iter().filter(|it| it.is_error()).all(|it| it.object.is_some_and(is_of_one));
    (objects.into_iter().map(Arc::new).collect(), broken.iter().map(|(_, id)| short(id)).collect(), can_tell)
}

fn short(id: &ObjectId) -> Id {
    (id.name[1..].parse().unwrap(), id.kind == Kind::Service)
}

impl Model {
    pub(super) fn new(allow_empty: bool) -> Self {
        let (texts, sight, accepted) = Default::default();
        Self { allow_empty, begun: false, texts, sight, accepted }
    }

    /// What a look at the whole disk makes of what was.
    pub(super) fn look(&mut self, sight: &Sight) {
        self.sight = sight.clone();
        self.accepted.retain(|place| sight.hidden.iter().any(|(hidden, ..)| hidden == place));
        let names: BTreeSet<String> = self.texts.keys().chain(sight.files.keys()).cloned().collect();
        let mut next = BTreeMap::new();
        for name in names {
            let old = self.texts.remove(&name);
            let old_objects = old.as_ref().map(|text| text.objects.clone()).unwrap_or_default();
            let was_gone = old.as_ref().is_some_and(|text| text.is_gone);
            let in_force = old.map(|text| text.in_force).unwrap_or_default();
            let all: BTreeSet<Id> = old_objects.iter().map(|known| known.id).collect();
            let keeping = |state: State, refused, is_gone| {
                let (objects, kept, in_force) = (old_objects.clone(), all.clone(), in_force.clone());
                Text { state, objects, kept, refused, in_force, is_gone }
            };
            let hidden =
                sight.hidden.iter().find(|(place, ..)| name == *place || name.starts_with(&format!("{place}/")));
            let text = match (sight.files.get(&name), hidden.filter(|_| !was_gone)) {
                (None, Some((_, true, _))) => keeping(State::Missing, BTreeSet::new(), false),
                (None, Some((_, false, _))) => keeping(State::Unreadable, BTreeSet::new(), false),
                (None, None) => keeping(State::Without, BTreeSet::new(), true),
                (Some(look), _) => {
                    let (mut objects, wrong, can_tell) = said(&name, look);
                    let named: BTreeSet<Id> = objects.iter().map(|known| known.id).collect();
                    let stays = |known: &&Known| !named.contains(&known.id) && (!can_tell || wrong.contains(&known.id));
                    let stay: Vec<Known> = old_objects.iter().filter(stays).cloned().collect();
                    let kept: BTreeSet<Id> = stay.iter().map(|known| known.id).collect();
                    let refused = wrong;
                    objects.extend(stay);
                    if objects.is_empty() && can_tell {
                        let is_blank =
                            matches!(look, Look::Blank) || matches!(look, Look::Cut(text) if text.trim().is_empty());
                        keeping(if is_blank { State::Blank } else { State::Without }, refused, false)
                    } else {
                        let state = if can_tell { State::Read } else { State::Unreadable };
                        Text { state, objects, kept, refused, in_force: in_force.clone(), is_gone: false }
                    }
                }
            };
            next.insert(name, text);
        }
        let readable: BTreeMap<Id, String> = next
            .iter()
            .flat_map(|(name, text)| text.objects.iter().map(move |known| (name, text, known.id)))
            .filter(|(_, text, id)| !text.kept.contains(id))
            .map(|(name, _, id)| (id, name.clone()))
            .collect();
        // A text doesn't keep what it doesn't say readably, when another one does.
        for (name, text) in &mut next {
            text.kept.retain(|id| !readable.contains_key(id));
            let kept = &text.kept;
            text.objects.retain(|known| kept.contains(&known.id) || readable.get(&known.id) == Some(name));
            text.refused.retain(|id| !kept.contains(id));
        }
        self.texts = next;
        let is_there = |text: &Text| matches!(text.state, State::Read | State::Unreadable) && !text.objects.is_empty();
        if self.allow_empty {
            self.let_go(&[State::Blank, State::Missing, State::Without]);
        } else if self.texts.values().any(is_there) {
            self.let_go(&[State::Without]);
        }
        let is_readable = sight.hidden.iter().all(|(_, missing, _)| *missing)
            && self.texts.values().all(|text| text.state != State::Unreadable);
        self.begun |= self.texts.values().any(|text| !text.objects.is_empty()) || self.allow_empty && is_readable;
        self.settle();
    }

    fn let_go(&mut self, states: &[State]) {
        for text in self.texts.values_mut().filter(|text| states.contains(&text.state)) {
            text.objects.clear();
            text.kept.clear();
            text.in_force.clear();
        }
        self.texts.retain(|_, text| !text.objects.is_empty() || !text.is_gone && text.state != State::Missing);
    }

    pub(super) fn accept_empty(&mut self) -> Result<usize, ()> {
        let withheld = |text: &&Text| !matches!(text.state, State::Read | State::Unreadable);
        let objects = self.texts.values().filter(withheld).map(|text| text.objects.len()).sum();
        let missing: Vec<_> = self.sight.hidden.iter().filter(|(_, missing, _)| *missing).cloned().collect();
        let is_news = missing.iter().any(|(place, _, named)| *named && !self.accepted.contains(place));
        if objects == 0 && self.begun && !is_news {
            return Err(());
        }
        let is_unreadable = self.texts.values().any(|text| text.state == State::Unreadable)
            || self.sight.hidden.iter().any(|(_, missing, _)| !missing);
        if !self.begun && is_unreadable {
            return Err(());
        }
        self.begun = true;
        self.accepted.extend(missing.into_iter().map(|(place, ..)| place));
        self.let_go(&[State::Blank, State::Missing, State::Without]);
        self.settle();
        Ok(objects)
    }

    /// What contradicts is as it was in force before, or out.
    fn settle(&mut self) {
        for text in self.texts.values_mut() {
            let before = std::mem::take(&mut text.in_force);
            for known in &text.objects {
                let object = if known.is_contradiction { before.get(&known.id) } else { Some(&known.object) };
                text.in_force.extend(object.map(|object| (known.id, object.clone())));
            }
        }
    }

    /// The policy; none before there was anything.
    pub(super) fn in_force(&self) -> Option<PolicySet> {
        let objects: Vec<Arc<Object>> = self.texts.values().flat_map(|text| text.in_force.values().cloned()).collect();
        let compiled = compile(objects.iter().map(Arc::as_ref));
        assert!(!compiled.complaints.iter().any(Complaint::is_error), "{:?}", compiled.complaints);
        let set = compiled.deal.part_of(Some(&Viewer::named("g1")), &version_of(&compiled.deal));
        self.begun.then_some(set)
    }

    /// Names of the objects that are in force, or would be.
    pub(super) fn ids(&self) -> BTreeSet<Id> {
        self.texts.values().flat_map(|text| text.objects.iter().map(|known| known.id)).collect()
    }

    pub(super) fn has_nothing(&self) -> bool {
        self.texts.values().all(|text| text.objects.is_empty())
    }

    /// Whether all that is in force is what is written now.
    pub(super) fn is_as_written(&self) -> bool {
        let as_written = |text: &Text| {
            let is_bad = |known: &Known| known.is_contradiction && text.in_force.contains_key(&known.id);
            text.kept.is_empty() && !text.objects.iter().any(is_bad)
        };
        self.texts.values().all(as_written)
    }

    /// Objects that are accepted, in force as they were, and out.
    pub(super) fn states(&self) -> [u64; 3] {
        let (mut in_force, mut last_good, mut rejected) = (0, BTreeSet::<Id>::new(), BTreeSet::<Id>::new());
        for text in self.texts.values() {
            in_force += text.in_force.len();
            rejected.extend(text.refused.iter().copied());
            last_good.extend(text.kept.iter().filter(|id| text.in_force.contains_key(id)).copied());
            for known in text.objects.iter().filter(|known| known.is_contradiction) {
                if text.in_force.contains_key(&known.id) { &mut last_good } else { &mut rejected }.insert(known.id);
            }
        }
        rejected.retain(|id| !last_good.contains(id));
        [in_force - last_good.len(), last_good.len(), rejected.len()].map(|count| count as u64)
    }

    pub(super) fn is_healthy(&self) -> bool {
        let below = |place: &str| {
            let prefix = format!("{place}/");
            let texts = self.texts.iter().filter(|(name, _)| *name == place || name.starts_with(&prefix));
            texts.map(|(_, text)| text.objects.len()).sum::<usize>()
        };
        let is_well = |(place, missing, named): &(String, bool, bool)| {
            *missing && (self.allow_empty || self.accepted.contains(place)) || !named && below(place) == 0
        };
        let is_hidden = |name: &str| {
            self.sight.hidden.iter().any(|(place, ..)| name == place || name.starts_with(&format!("{place}/")))
        };
        let text_is_well = |(name, text): (&String, &Text)| match text.state {
            State::Read | State::Missing => true,
            State::Unreadable => is_hidden(name),
            State::Blank | State::Without => text.objects.is_empty(),
        };
        self.begun && self.sight.hidden.iter().all(is_well) && self.texts.iter().all(text_is_well)
    }
}
