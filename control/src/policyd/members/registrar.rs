//! The one task that asks the roster: gathers what has come, lets it decide, writes that down, and answers then. So nobody hears
//! of anything that another server may not know.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::outage::Outage;
use super::roster::{Heard, Refusal, Roster};
use super::store::{Change, Committed, Etcd, Memory, News, Store, StoreError};
use crate::config::{Leases, PolicydSource};
use crate::members::{Beat, Member, View, Wish};
use crate::policyd::figures::Figures;
use crate::policyd::publication::Publication;

/// Beats that wait; then their streams do.
const QUEUE: usize = 1024;
/// Beats that are taken together: etcd takes 128 operations in a transaction.
const MOST_BEATS: usize = 100;
/// How often something is tried when other servers come first.
const TRIES: usize = 8;
/// Strangers whose names are remembered, so that each is told of once.
const MOST_STRANGERS: usize = 1024;

/// Gateways whose rivals are remembered until they can be told.
const MOST_RIVALS: usize = 1024;

/// A stream, and where it comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Origin {
    /// Another one for each stream of this server.
    pub(super) stream: u64,
    pub(super) address: Option<SocketAddr>,
}

/// What streams tell the registrar.
#[derive(Debug)]
pub(super) enum Event {
    /// A gateway beats.
    Beat(Beat, Origin, oneshot::Sender<Result<Answer, Unanswered>>),
    /// The stream of a process has ended.
    Left(Arc<str>, u64, Origin),
}

/// What a gateway gets for a beat.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// From when the beat was sent.
    pub(super) lease: Option<Duration>,
    /// The view under which it is given.
    pub(super) view: Arc<View>,
    /// Where another process has tried to have its name from.
    pub(super) rival: Option<SocketAddr>,
    /// Whether the policy has no gateway of this name.
    pub(super) is_stranger: bool,
}

/// Why it gets nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unanswered {
    #[error("{refusal}{}", live.map(|at| format!("; that one is at {at}")).unwrap_or_default())]
    Refused {
        refusal: Refusal,
        /// Where the process is that has the name, if it is connected to this server.
        live: Option<SocketAddr>,
    },
    #[error("what gateways say can't be kept: {0}")]
    Store(#[from] StoreError),
    #[error("other servers were faster {TRIES} times in a row")]
    Late,
}

/// The authority, as streams, answers and metrics see it.
#[derive(Clone, Debug)]
pub struct Members {
    pub(super) events: mpsc::Sender<Event>,
    /// Who serves.
    pub view: watch::Receiver<Arc<View>>,
    /// With what was last heard of each gateway.
    pub roster: Arc<ArcSwap<Roster>>,
}

/// Begins to listen to gateways as it is configured: where manifests are in etcd, views are as well.
pub fn open(
    source: &PolicydSource,
    leases: Leases,
    published: watch::Receiver<Option<Arc<Publication>>>,
    figures: Arc<Figures>,
) -> Members {
    let ttl = leases.ttl;
    match source {
        PolicydSource::Etcd(etcd) => start(ttl, Etcd::open(etcd, ttl), published, figures),
        PolicydSource::Files(_) | PolicydSource::Kubernetes(_) => start(ttl, Memory, published, figures),
    }
}

/// Begins to listen to gateways: silence for longer than `ttl` is taken for death. Ends with the policy.
pub fn start(
    ttl: Duration,
    store: impl Store,
    published: watch::Receiver<Option<Arc<Publication>>>,
    figures: Arc<Figures>,
) -> Members {
    let (sender, events) = mpsc::channel(QUEUE);
    let (view, viewed) = watch::channel(Arc::default());
    let roster = Roster::new(ttl);
    let shared = Arc::new(ArcSwap::from_pointee(roster.clone()));
    let members = Members { events: sender, view: viewed, roster: shared.clone() };
    let strangers = BTreeSet::new();
    let registrar = Registrar {
        ttl,
        roster,
        store,
        events,
        published,
        view,
        shared,
        figures,
        strangers,
        origins: BTreeMap::new(),
        rivals: BTreeMap::new(),
        outage: Outage::default(),
    };
    tokio::spawn(registrar.run());
    members
}

struct Registrar<S> {
    ttl: Duration,
    roster: Roster,
    store: S,
    events: mpsc::Receiver<Event>,
    published: watch::Receiver<Option<Arc<Publication>>>,
    view: watch::Sender<Arc<View>>,
    shared: Arc<ArcSwap<Roster>>,
    figures: Arc<Figures>,
    strangers: BTreeSet<Arc<str>>,
    /// The stream of the last beat of each gateway that counted, and where it came from.
    origins: BTreeMap<Arc<str>, Origin>,
    /// Where others have tried to have a gateway's name from, until it is told.
    rivals: BTreeMap<Arc<str>, SocketAddr>,
    outage: Outage,
}

/// A beat and who waits for what it gets.
type Waiting = Vec<(Beat, Origin, oneshot::Sender<Result<Answer, Unanswered>>)>;

impl<S: Store> Registrar<S> {
    async fn run(mut self) {
        self.see_policy();
        let mut batch = Vec::new();
        loop {
            let due = self.roster.due().map(Instant::from_std);
            tokio::select! {
                biased;
                number = self.events.recv_many(&mut batch, MOST_BEATS) => if number == 0 {
                    return;
                },
                changed = self.published.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.see_policy();
                }
                news = self.store.news() => self.see_news(news),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
            let woken = Instant::now();
            if due.is_some_and(|due| woken.saturating_duration_since(due) > self.ttl / 2) {
                // The machine, or whoever had it, kept us from listening.
                self.roster.was_deaf(woken.into_std());
            }
            self.turn(batch.drain(..)).await;
            if woken.elapsed() > self.ttl / 2 {
                self.roster.was_deaf(Instant::now().into_std());
            }
        }
    }

    fn see_policy(&mut self) {
        let published = self.published.borrow_and_update().clone();
        if let Some(published) = published {
            self.roster.set_policy(published.deal.peers.iter().map(|peer| peer.name.clone()));
        }
    }

    fn see_news(&mut self, news: News) {
        let now = Instant::now().into_std();
        match news {
            News::View(view) => self.roster.load(now, Some(view)),
            News::Beat(beat) => self.roster.observe(now, &beat),
        }
    }

    /// Takes in what has come, and decides.
    async fn turn(&mut self, batch: impl Iterator<Item = Event>) {
        let (mut waiting, mut ended) = (Waiting::new(), BTreeSet::new());
        for event in batch {
            match event {
                Event::Beat(beat, origin, answer) => waiting.push((beat, origin, answer)),
                Event::Left(name, incarnation, origin) => {
                    ended.insert(origin.stream);
                    self.leave(&name, incarnation, origin);
                }
            }
        }
        // Nobody waits for what a stream that has ended would get, and its process would look alive.
        waiting.retain(|(_, origin, _)| !ended.contains(&origin.stream));
        let mut outcome = Err(Unanswered::Late);
        let mut was_asked = true;
        for _ in 0..TRIES {
            let before = self.roster.clone();
            let now = Instant::now().into_std();
            let heard: Vec<_> = waiting.iter().map(|(beat, ..)| self.roster.beat(now, beat)).collect();
            self.roster.decide(now);
            match self.commit(&before, &waiting, &heard).await {
                Ok(done @ (None | Some(Committed::Done))) => {
                    was_asked = done.is_some();
                    self.note(before.view());
                    outcome = Ok(heard);
                    break;
                }
                Ok(Some(Committed::Outdated(there))) => {
                    self.roster = before;
                    let now = Instant::now().into_std();
                    self.roster.load(now, there.view);
                    there.beats.iter().for_each(|beat| self.roster.observe(now, beat));
                }
                Err(error) => {
                    self.roster = before;
                    self.roster.was_deaf(Instant::now().into_std());
                    outcome = Err(error.into());
                    break;
                }
            }
        }
        // While nothing is to be written, nobody knows whether it could be.
        if was_asked {
            self.complain(outcome.as_ref().err());
        }
        self.publish();
        self.answer(waiting, outcome);
    }

    /// A stream has ended. It says something of the process only if that process's beats came over it: anybody can open one, say a
    /// name and an incarnation, and go.
    fn leave(&mut self, name: &Arc<str>, incarnation: u64, origin: Origin) {
        if self.origins.get(name) == Some(&origin) {
            self.origins.remove(name);
            self.roster.left(name, incarnation);
        }
    }

    /// Writes down what counts and what is decided; none: there is nothing to write.
    async fn commit(
        &mut self,
        before: &Roster,
        waiting: &Waiting,
        heard: &[Result<Heard, Refusal>],
    ) -> Result<Option<Committed>, StoreError> {
        let counts = waiting.iter().zip(heard).filter(|(_, heard)| **heard == Ok(Heard::Counts));
        let beats: BTreeMap<&str, &Beat> = counts.map(|((beat, ..), _)| (&*beat.gateway, beat)).collect();
        let beats: Vec<&Beat> = beats.into_values().collect();
        let is_another = |it: &&Beat| before.seat(&it.gateway).is_some_and(|seat| seat.incarnation != it.incarnation);
        let replaced = beats.iter().copied().filter(is_another).map(|it| it.gateway.clone());
        let (old, new) = (before.view(), self.roster.view());
        let view = (old != new).then_some(&**new);
        let stops = |it: &&Member| !new.member(&it.name).is_some_and(|now| now.serving);
        let silent: BTreeSet<Arc<str>> =
            old.serving().filter(stops).map(|it| it.name.clone()).chain(replaced).collect();
        let silent: Vec<Arc<str>> = silent.into_iter().collect();
        let gone = old.members.iter().filter(|it| new.member(&it.name).is_none());
        let gone: Vec<Arc<str>> = gone.map(|it| it.name.clone()).collect();
        if beats.is_empty() && view.is_none() {
            return Ok(None);
        }
        self.store.commit(Change { beats: &beats, view, silent: &silent, gone: &gone }).await.map(Some)
    }

    fn answer(&mut self, waiting: Waiting, outcome: Result<Vec<Result<Heard, Refusal>>, Unanswered>) {
        let heard = match outcome {
            Ok(heard) => heard,
            Err(why) => {
                for (_, _, answer) in waiting {
                    // Whoever has gone away needs no reason.
                    let _ = answer.send(Err(why.clone()));
                }
                return;
            }
        };
        let (now, view) = (Instant::now().into_std(), self.roster.view().clone());
        for ((beat, origin, answer), heard) in waiting.into_iter().zip(heard) {
            let said = match heard {
                Ok(heard) => {
                    let is_stranger = heard == Heard::Stranger;
                    if is_stranger {
                        self.meet(&beat.gateway);
                    }
                    let counts = heard == Heard::Counts;
                    let rival = if counts { self.rivals.remove(&beat.gateway) } else { None };
                    if counts {
                        self.origins.insert(beat.gateway.clone(), origin);
                    }
                    let lease = counts.then(|| self.roster.grant(now, &beat.gateway, beat.incarnation)).flatten();
                    Ok(Answer { lease, view: view.clone(), rival, is_stranger })
                }
                Err(refusal) => {
                    self.figures.refused_beats.add();
                    self.contest(&beat.gateway, origin);
                    let live = self.origins.get(&beat.gateway);
                    Err(Unanswered::Refused { refusal, live: live.and_then(|it| it.address) })
                }
            };
            let _ = answer.send(said);
        }
    }

    /// Remembers where a process is that may not have the name, for whoever has it.
    fn contest(&mut self, name: &Arc<str>, origin: Origin) {
        let has_room = self.rivals.len() < MOST_RIVALS || self.rivals.contains_key(name);
        if let Some(address) = origin.address.filter(|_| has_room) {
            self.rivals.insert(name.clone(), address);
        }
    }

    /// Says once that a gateway isn't in the policy. Without any in it, each is alone, and that is as it should be.
    fn meet(&mut self, name: &Arc<str>) {
        if self.roster.has_policy() && self.strangers.len() < MOST_STRANGERS && self.strangers.insert(name.clone()) {
            tracing::warn!(event = "gateway_unknown", gateway = %name,
                "the policy has no gateway {name}: it gets no lease; write a Gateway manifest, or see how it is spelt");
        }
    }

    /// Says when nothing can be kept, and when it can again.
    fn complain(&mut self, why: Option<&Unanswered>) {
        let now = Instant::now().into_std();
        match why {
            Some(error) if self.outage.fails(now, &error.to_string()) => {
                tracing::error!(event = "leases_stopped", %error, "no gateway gets a lease: {error}");
            }
            None if self.outage.ends(now) => tracing::info!(event = "leases_again", "gateways get leases again"),
            _ => {}
        }
    }

    /// Logs and counts what a new view changes.
    fn note(&self, before: &View) {
        let view = self.roster.view();
        for member in &view.members {
            let was = before.member(&member.name).is_some_and(|old| old.serving);
            let (gateway, epoch) = (&*member.name, member.epoch);
            let wants_to_stop = self.roster.seat(gateway).is_some_and(|seat| seat.wish == Wish::Draining);
            match (was, member.serving) {
                (false, true) => {
                    tracing::info!(event = "gateway_serves", gateway, epoch, view = view.number, "gateway serves");
                }
                (true, false) if member.unable.is_some() && !member.lapsed => {
                    let reason = member.unable.as_deref();
                    tracing::warn!(
                        event = "gateway_unable",
                        gateway,
                        epoch,
                        view = view.number,
                        reason,
                        "gateway serves no more, since it can't: others do"
                    );
                }
                (true, false) if wants_to_stop => {
                    tracing::info!(event = "gateway_drained", gateway, epoch, view = view.number, "gateway drained");
                }
                (true, false) => {
                    self.figures.expiries.add();
                    tracing::warn!(
                        event = "gateway_expired",
                        gateway,
                        epoch,
                        view = view.number,
                        "gateway serves no more: it was silent for too long, or is another process now"
                    );
                }
                (true, true) | (false, false) => {}
            }
        }
    }

    fn publish(&self) {
        let now = self.roster.view();
        self.view.send_if_modified(|view| {
            let is_new = view != now;
            view.clone_from(now);
            is_new
        });
        self.shared.store(Arc::new(self.roster.clone()));
    }
}

#[cfg(test)]
mod tests;
