//! Carries out what `outbound` decides, for all gateways: empties the outlets of the workers, asks them for slices of all their
//! sessions, gives frames to links.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use vipgate_dataplane::command::{Command, CopyChunk, MOST_TAKEN};
use vipgate_dataplane::snapshot::members::GatewayId;

use super::outbound::{Outbound, Question};
use crate::peer::frame::{self, Broken};
use crate::peer::proto::SyncRequest;
use crate::peer::proto::frame::Kind;
use crate::peer::status::Board;
use crate::peer::work::{Bell, Workers, ask};

/// News are looked for no more often than this while there are any: so they travel together.
const GAP: Duration = Duration::from_millis(1);
/// They are looked for this often although nobody rang: what was lost rings no bell. Figures are as old at most.
const LOOK: Duration = Duration::from_millis(50);
/// News taken up of a worker before others have their turn.
const SLICE: usize = 4096;

/// What the pump is told.
#[derive(Debug)]
pub(crate) enum Order {
    /// These gateways there are.
    Keep(Vec<Arc<str>>, u64),
    /// A link has come up.
    Up { peer: Arc<str>, link: Outlink },
    /// It is gone.
    Down { peer: Arc<str>, link: u64 },
    /// The other gateway has everything up to a number, or, where it had no place for it, all but some sessions.
    Acknowledged { peer: Arc<str>, link: u64, number: u64, refused: bool },
    /// A gateway is to be told everything.
    Resync(Arc<str>),
    /// A gateway is to tell everything.
    Request(Arc<str>),
    /// A gateway is to hear that we have let go.
    Release(Arc<str>, u64),
}

/// A link as the pump uses it.
#[derive(Clone, Debug)]
pub(crate) struct Outlink {
    /// Which of all links there ever were.
    pub(crate) id: u64,
    /// The process at its other end.
    pub(crate) incarnation: u64,
    /// Takes as many frames as may be on their way.
    pub(crate) lane: mpsc::Sender<Vec<u8>>,
    /// For what waits behind no sessions.
    pub(crate) urgent: mpsc::Sender<Vec<u8>>,
    /// Ends it.
    pub(crate) stop: mpsc::Sender<Broken>,
}

#[derive(Debug)]
struct Peer {
    number: Option<GatewayId>,
    outbound: Outbound,
    /// The process that the last link led to.
    incarnation: Option<u64>,
    link: Option<Outlink>,
    shown: Shown,
    /// Which of all questions was the last one about it.
    last_asked: u64,
}

/// Whether it has everything, what it knows that we have let go of, and in which replication epoch it was told all.
type Shown = (bool, Option<u64>, u64);

impl Peer {
    fn new(workers: usize, told_by: u64) -> Self {
        let outbound = Outbound::new(workers, told_by);
        Self { number: None, outbound, incarnation: None, link: None, shown: Shown::default(), last_asked: 0 }
    }

    /// Looks whether policy knows it by now. What it was told until then was nothing.
    fn find(&mut self, name: &str, workers: &dyn Workers) {
        if self.number.is_none() {
            self.number = workers.gateway(name);
            if self.number.is_some() {
                self.outbound.owe();
            }
        }
    }
}

type Answer = (Arc<str>, Question, Result<Vec<CopyChunk>, usize>);

#[derive(Debug)]
pub(crate) struct Pump {
    workers: Arc<dyn Workers>,
    bell: Arc<Bell>,
    board: Board,
    peers: BTreeMap<Arc<str>, Peer>,
    /// Whether a view has named others.
    has_view: bool,
    /// Questions that were asked.
    questions: u64,
    /// Workers that are asked for a slice: their news wait (see `outbound`).
    asked: Vec<bool>,
    answers: JoinSet<Answer>,
}

impl Pump {
    pub(crate) fn new(workers: Arc<dyn Workers>, bell: Arc<Bell>, board: Board) -> Self {
        let asked = vec![false; workers.count()];
        let (peers, answers) = (BTreeMap::new(), JoinSet::new());
        Self { workers, bell, board, peers, has_view: false, questions: 0, asked, answers }
    }

    /// Runs until nobody orders anything any more.
    pub(crate) async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>, mut links: mpsc::Receiver<Order>) {
        let (mut look, mut show) = (Instant::now(), Instant::now());
        loop {
            tokio::select! {
                biased;
                order = orders.recv() => match order {
                    Some(order) => {
                        self.order(order);
                        look = look.min(Instant::now() + GAP);
                    }
                    None => return,
                },
                Some(order) = links.recv() => self.order(order),
                Some(answer) = self.answers.join_next() => {
                    if let Ok(answer) = answer {
                        self.answer(answer);
                    }
                    look = Instant::now();
                }
                () = self.bell.rung() => look = Instant::now(),
                () = sleep_until(look) => {}
            }
            let now = Instant::now();
            if look <= now {
                look = now + self.look();
            }
            self.ask();
            self.send();
            let all = show <= now;
            if all {
                show = now + LOOK;
            }
            self.show(all);
        }
    }

    fn order(&mut self, order: Order) {
        match order {
            Order::Keep(names, view) => {
                self.peers.retain(|name, _| names.contains(name));
                let workers = self.workers.count();
                // What a former process has left in the tables went on elsewhere, and may have ended: of that, only news are told.
                let told_by = if self.has_view { 0 } else { self.workers.replication_epoch() };
                self.has_view |= view > 0;
                for name in names {
                    self.peers.entry(name).or_insert_with(|| Peer::new(workers, told_by)).outbound.go_by(view);
                }
            }
            Order::Up { peer, link } => {
                if let Some(peer) = self.peers.get_mut(&peer)
                    && peer.link.as_ref().is_none_or(|before| before.id < link.id)
                {
                    if peer.incarnation.replace(link.incarnation).is_some_and(|before| before != link.incarnation) {
                        peer.outbound.forget_told();
                    }
                    peer.outbound.up();
                    peer.link = Some(link);
                }
            }
            Order::Down { peer, link } => {
                if let Some(peer) = self.peers.get_mut(&peer)
                    && peer.link.take_if(|current| current.id == link).is_some()
                {
                    peer.outbound.down();
                }
            }
            Order::Acknowledged { peer, link, number, refused } => {
                if let Some(peer) = self.peers.get_mut(&peer)
                    && let Some(current) = peer.link.as_ref().filter(|current| current.id == link)
                {
                    if refused {
                        peer.outbound.refused(number);
                    }
                    match peer.outbound.acknowledged(number) {
                        Ok(marks) => {
                            let Some(id) = peer.number else { return };
                            for (worker, number) in marks.into_iter().enumerate().filter(|(_, number)| *number > 0) {
                                self.workers.outlet(worker).acknowledge(id, number);
                            }
                        }
                        // If it is full, it ends already.
                        Err(why) => drop(current.stop.try_send(why)),
                    }
                }
            }
            Order::Resync(peer) => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.outbound.owe();
                }
            }
            Order::Request(peer) => {
                // Without a link it will be asked for nothing: the next one begins with everything.
                if let Some(link) = self.peers.get(&peer).and_then(|peer| peer.link.as_ref()) {
                    let _ = link.urgent.try_send(frame::encode(Kind::SyncRequest(SyncRequest {})));
                }
            }
            Order::Release(peer, view) => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.outbound.release(view);
                }
            }
        }
    }

    /// Takes up news; says when to look again.
    fn look(&mut self) -> Duration {
        if self.drain() {
            return GAP;
        }
        // What is said from here on rings.
        self.bell.listen();
        if self.drain() { GAP } else { LOOK }
    }

    fn drain(&mut self) -> bool {
        for (name, peer) in &mut self.peers {
            peer.find(name, &*self.workers);
        }
        let mut places: BTreeMap<GatewayId, &mut Outbound> =
            self.peers.values_mut().filter_map(|peer| Some((peer.number?, &mut peer.outbound))).collect();
        let (mut found, mut whole) = (false, true);
        for worker in (0..self.asked.len()).filter(|&worker| !self.asked[worker]) {
            let outlet = self.workers.outlet(worker);
            for (&gateway, outbound) in &mut places {
                if outlet.take_lost(gateway) {
                    outbound.owe();
                }
            }
            let mut left = SLICE;
            while left > 0
                && let Some(news) = outlet.pop()
            {
                left -= 1;
                // For others than those of the view there will be a sync when they come.
                if let Some(outbound) = places.get_mut(&news.to) {
                    outbound.news(worker, news.number, &news.image);
                }
            }
            found |= left < SLICE;
            whole &= left > 0;
        }
        if whole && !self.asked.contains(&true) {
            // Of whom policy doesn't know there is no news.
            for peer in self.peers.values_mut() {
                peer.outbound.drained();
            }
        }
        found
    }

    fn ask(&mut self) {
        // Whoever was asked for last comes last: one with many sessions, or that wants all again and again, holds up no other.
        let mut peers: Vec<(&Arc<str>, &mut Peer)> = self.peers.iter_mut().collect();
        peers.sort_by_key(|(_, peer)| peer.last_asked);
        for (name, peer) in peers {
            peer.find(name, &*self.workers);
            while let Some(question) = peer.outbound.question() {
                let Some(to) = peer.number else {
                    // Nothing belongs at a gateway that policy doesn't know.
                    peer.outbound.asked();
                    peer.outbound.answer(question, &[], None);
                    continue;
                };
                if self.asked[question.worker] {
                    break;
                }
                self.asked[question.worker] = true;
                peer.outbound.asked();
                self.questions += 1;
                peer.last_asked = self.questions;
                let (workers, name, told_by) = (self.workers.clone(), name.clone(), peer.outbound.told_by);
                self.answers.spawn(async move {
                    let images = Vec::with_capacity(MOST_TAKEN);
                    let Question { cursor, begun_by, .. } = question;
                    let chunk = CopyChunk { to, told_by, cursor: Some(cursor), images, begun_by, listed_by: (0, 0) };
                    let command = move |reply: Sender<CopyChunk>| Command::Copies { chunk, reply };
                    (name, question, ask(&workers, vec![(question.worker, Box::new(command))], ()).await)
                });
            }
        }
    }

    fn answer(&mut self, (name, question, answer): Answer) {
        self.asked[question.worker] = false;
        let Some(peer) = self.peers.get_mut(&name) else { return };
        match answer {
            Ok(chunks) => {
                for chunk in chunks {
                    peer.outbound.listed_by(question, chunk.listed_by);
                    peer.outbound.answer(question, &chunk.images, chunk.cursor);
                }
            }
            Err(worker) => {
                // Without its sessions the other gateway can't have all: from the start, on another link.
                if let Some(link) = &peer.link {
                    drop(link.stop.try_send(Broken::Worker(worker)));
                }
            }
        }
    }

    fn send(&mut self) {
        for peer in self.peers.values_mut() {
            let Some(link) = &peer.link else { continue };
            while let Some(frame) = peer.outbound.frame() {
                // It has room for all that may be on their way; if it is closed, we hear of that in a moment.
                let _ = link.lane.try_send(frame);
            }
        }
    }

    fn show(&mut self, all: bool) {
        for (name, peer) in &mut self.peers {
            let outbound = &peer.outbound;
            let now = (outbound.in_sync(), outbound.released, outbound.told_by);
            if all || now != peer.shown {
                peer.shown = now;
                self.board.update(name, |status| {
                    let copies = &mut status.copies;
                    (copies.in_sync_to, copies.released, copies.told_by) = now;
                    (copies.sent, copies.queued, copies.resyncs) = (outbound.sent, outbound.queued(), outbound.resyncs);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
