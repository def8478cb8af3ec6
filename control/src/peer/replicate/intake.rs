//! Carries out what `inbound` decides, for one link, frame after frame: each is acknowledged when the workers have done it.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use vipgate_dataplane::command::{Command, PurgeChunk};
use vipgate_dataplane::session::image::Image;

use super::inbound::{Inbound, Step};
use super::rounds::Rounds;
use crate::peer::Event;
use crate::peer::frame::{self, Broken};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Ack, SyncRequest};
use crate::peer::status::{Board, CopiesStatus};
use crate::peer::view::View;
use crate::peer::work::{Question, Turn, Turns, Workers, ask};

/// The longest wait for a view that another gateway goes by already.
const PATIENCE: Duration = Duration::from_secs(5);

/// So long after sessions have found no place here all are asked for again, and each time twice as long, up to a minute: a table that is full
/// may stay so.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// Whether sessions have found no place here, and when all are asked for again.
#[derive(Debug)]
struct Refusals {
    due: Option<Instant>,
    pause: Duration,
    /// Within a round: whether any have since its beginning. All are asked for after its end, since that would end it.
    in_round: Option<bool>,
}

impl Refusals {
    fn new() -> Self {
        Self { due: None, pause: RETRY, in_round: None }
    }

    fn note(&mut self, now: Instant) {
        match &mut self.in_round {
            Some(in_round) => *in_round = true,
            None => _ = self.due.get_or_insert(now + self.pause),
        }
    }

    fn asked(&mut self) {
        (self.due, self.pause) = (None, (2 * self.pause).min(LONGEST_RETRY));
    }

    fn round_begins(&mut self) {
        (self.due, self.in_round) = (None, Some(false));
    }

    fn round_ends(&mut self, now: Instant) {
        if self.in_round.take() == Some(true) {
            self.note(now);
        } else {
            self.pause = (self.pause / 2).max(RETRY);
        }
    }

    /// Waits until all are to be asked for again; while nothing was refused, for ever.
    async fn due(&self) {
        match self.due {
            Some(due) => sleep_until(due).await,
            None => std::future::pending().await,
        }
    }
}

/// What the end of a round has brought about.
#[derive(Clone, Copy, Debug, Default)]
struct Purged {
    forgotten: u64,
    /// Others serve by now than when it began.
    outdated: bool,
    /// Some were kept that the other gateway may not know of yet.
    spared: bool,
}

/// What copies go through.
#[derive(Debug)]
pub(crate) struct Intake<'a> {
    pub(crate) peer: Arc<str>,
    pub(crate) workers: Arc<dyn Workers>,
    pub(crate) rounds: Rounds,
    pub(crate) turns: &'a Turns,
    pub(crate) board: Board,
    pub(crate) events: mpsc::Sender<Event>,
    /// The view that workers act by.
    pub(crate) view: watch::Receiver<Arc<View>>,
    /// Where acknowledgements go.
    pub(crate) lane: mpsc::Sender<Vec<u8>>,
}

impl Intake<'_> {
    /// Runs until something is wrong.
    pub(crate) async fn run(self, mut frames: mpsc::Receiver<Kind>) -> Broken {
        match self.work(&mut frames).await {
            Ok(()) => Broken::Stopping,
            Err(why) => why,
        }
    }

    async fn work(&self, frames: &mut mpsc::Receiver<Kind>) -> Result<(), Broken> {
        let turn = self.turns.take(&self.peer).await;
        let mut inbound = Inbound::new(self.peer.clone(), self.rounds.clone());
        // The replication epoch in which it had been told all when its round began; and that of a round that had to spare something.
        let (mut told_by, mut spared) = (0, None);
        let (mut refusals, mut evicted) = (Refusals::new(), self.evicted());
        loop {
            let kind = tokio::select! {
                kind = frames.recv() => match kind {
                    Some(kind) => kind,
                    None => return Ok(()),
                },
                () = self.told_after(spared) => {
                    spared = None;
                    self.say(Kind::SyncRequest(SyncRequest {}))?;
                    continue;
                }
                () = refusals.due() => {
                    refusals.asked();
                    self.say(Kind::SyncRequest(SyncRequest {}))?;
                    continue;
                }
            };
            // What a full table has ended to make room is known here no more, whoever told it.
            let now_evicted = self.evicted();
            let mut refused = now_evicted - std::mem::replace(&mut evicted, now_evicted);
            let (number, step) = inbound.frame(&kind)?;
            match step {
                Step::Begin { view } => {
                    self.note(|copies| copies.in_sync_from = false);
                    self.catch_up(view).await?;
                    (told_by, spared) = (self.board.told_by(&self.peer), None);
                    refusals.round_begins();
                    tracing::debug!(event = "round_begins", gateway = &*self.peer, view, told_by);
                }
                Step::Take { images, round } => {
                    let count = images.len() as u64;
                    refused += self.take(images, round, &turn).await?;
                    self.note(|copies| copies.taken += count);
                }
                Step::Purge { round, view, again } => {
                    let purged = self.purge(round, view, told_by, &turn).await?;
                    tracing::debug!(event = "round_ends", gateway = &*self.peer, view, again, ?purged);
                    refusals.round_ends(Instant::now());
                    let is_whole = !purged.outdated && !purged.spared;
                    if is_whole {
                        inbound.purged(round);
                    }
                    self.note(|copies| {
                        // What was spared is known here: of the other gateway's sessions none is missing.
                        copies.in_sync_from = !purged.outdated && !again;
                        copies.synced_by = view;
                        copies.forgotten += purged.forgotten;
                    });
                    if purged.spared && !purged.outdated {
                        // At once it would only name the same again: it has still to be told of what was spared.
                        spared = Some(told_by);
                    } else if again || purged.outdated {
                        self.say(Kind::SyncRequest(SyncRequest {}))?;
                    } else {
                        self.tell(Event::Synced { gateway: self.peer.clone() }).await;
                    }
                }
                Step::Released { view } => {
                    self.note(|copies| copies.released_by = copies.released_by.max(Some(view)));
                    self.tell(Event::Released { gateway: self.peer.clone(), view }).await;
                }
            }
            if refused > 0 {
                tracing::debug!(event = "copies_refused", gateway = &*self.peer, refused);
                refusals.note(Instant::now());
            }
            self.say(Kind::Ack(Ack { number, refused: refused > 0 }))?;
        }
    }

    /// Waits until the other gateway was told all in a later replication epoch; without one for ever.
    async fn told_after(&self, epoch: Option<u64>) {
        match epoch {
            Some(epoch) => self.board.told_after(&self.peer, epoch).await,
            None => std::future::pending().await,
        }
    }

    /// Waits until this gateway goes by the view that the other one goes by: what is told is looked at by whose a share is.
    async fn catch_up(&self, view: u64) -> Result<(), Broken> {
        let mut own = self.view.clone();
        let there = timeout(PATIENCE, own.wait_for(|own| own.number >= view)).await;
        match there {
            Ok(_) => Ok(()),
            Err(_) => Err(Broken::Connection(format!("it goes by view {view}, which didn't come here"))),
        }
    }

    /// Standby sessions that workers have ended to make room.
    fn evicted(&self) -> u64 {
        (0..self.workers.count()).map(|worker| self.workers.outlet(worker).evicted()).sum()
    }

    fn say(&self, kind: Kind) -> Result<(), Broken> {
        self.lane.try_send(frame::encode(kind)).map_err(|_| Broken::Stuck)
    }

    /// Lets the workers take in what is told; says how many sessions found no place.
    async fn take(&self, images: Vec<Image>, round: u8, turn: &Turn) -> Result<u64, Broken> {
        // Policy doesn't know it, so nothing belongs to it, or here by way of it.
        let Some(from) = self.workers.gateway(&self.peer) else { return Ok(0) };
        let mut sorted: Vec<Vec<Image>> = vec![Vec::new(); self.workers.count()];
        for image in images {
            sorted[self.workers.place(&image)].push(image);
        }
        let mut questions: Vec<Question<Vec<Image>>> = Vec::new();
        for (worker, images) in sorted.into_iter().enumerate().filter(|(_, images)| !images.is_empty()) {
            questions.push((worker, Box::new(move |reply| Command::Take { images, round, from, reply })));
        }
        let refused = ask(&self.workers, questions, turn.clone()).await.map_err(Broken::Worker)?;
        Ok(refused.iter().map(|images| images.len() as u64).sum())
    }

    async fn purge(&self, round: u8, view: u64, told_by: u64, turn: &Turn) -> Result<Purged, Broken> {
        let mut purged = Purged::default();
        // Policy doesn't know it, so it owns nothing.
        let Some(owner) = self.workers.gateway(&self.peer) else { return Ok(purged) };
        for worker in 0..self.workers.count() {
            let (cursor, forgotten, outdated, spared) = (Some(0), 0, false, false);
            let mut chunk = PurgeChunk { owner, round, view, told_by, cursor, forgotten, outdated, spared };
            while chunk.cursor.is_some() {
                let command = move |reply: Sender<PurgeChunk>| Command::Purge { chunk, reply };
                let answers = ask(&self.workers, vec![(worker, Box::new(command))], turn.clone())
                    .await
                    .map_err(Broken::Worker)?;
                chunk = answers.into_iter().next().ok_or(Broken::Worker(worker))?;
            }
            purged.forgotten += chunk.forgotten;
            purged.outdated |= chunk.outdated;
            purged.spared |= chunk.spared;
        }
        Ok(purged)
    }

    fn note(&self, change: impl FnOnce(&mut CopiesStatus)) {
        self.board.update(&self.peer, |peer| change(&mut peer.copies));
    }

    async fn tell(&self, event: Event) {
        // Nobody listens: nobody misses it.
        let _ = self.events.send(event).await;
    }
}

#[cfg(test)]
mod tests;
