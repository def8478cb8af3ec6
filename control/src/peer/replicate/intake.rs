//! Carries out what `inbound` decides, for one link, frame after frame: each is acknowledged when the workers have done it.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
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
        while let Some(kind) = frames.recv().await {
            let (number, step) = inbound.frame(&kind)?;
            match step {
                Step::Begin { view } => {
                    self.note(|copies| copies.in_sync_from = false);
                    self.catch_up(view).await?;
                }
                Step::Take { images, round } => {
                    let count = images.len() as u64;
                    self.take(images, round, &turn).await?;
                    self.note(|copies| copies.taken += count);
                }
                Step::Purge { round, view, again } => {
                    let (forgotten, outdated) = self.purge(round, view, &turn).await?;
                    if !outdated {
                        inbound.purged(round);
                    }
                    let again = again || outdated;
                    self.note(|copies| {
                        copies.in_sync_from = !again;
                        copies.forgotten += forgotten;
                    });
                    if again {
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
            self.say(Kind::Ack(Ack { number }))?;
        }
        Ok(())
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

    fn say(&self, kind: Kind) -> Result<(), Broken> {
        self.lane.try_send(frame::encode(kind)).map_err(|_| Broken::Stuck)
    }

    async fn take(&self, images: Vec<Image>, round: u8, turn: &Turn) -> Result<(), Broken> {
        // Policy doesn't know it, so nothing belongs to it, or here by way of it.
        let Some(from) = self.workers.gateway(&self.peer) else { return Ok(()) };
        let mut sorted: Vec<Vec<Image>> = vec![Vec::new(); self.workers.count()];
        for image in images {
            sorted[self.workers.place(&image)].push(image);
        }
        let mut questions: Vec<Question<Vec<Image>>> = Vec::new();
        for (worker, images) in sorted.into_iter().enumerate().filter(|(_, images)| !images.is_empty()) {
            questions.push((worker, Box::new(move |reply| Command::Take { images, round, from, reply })));
        }
        ask(&self.workers, questions, turn.clone()).await.map(drop).map_err(Broken::Worker)
    }

    /// How many were forgotten, and whether others serve by now than when the round began.
    async fn purge(&self, round: u8, view: u64, turn: &Turn) -> Result<(u64, bool), Broken> {
        // Policy doesn't know it, so it owns nothing.
        let Some(owner) = self.workers.gateway(&self.peer) else { return Ok((0, false)) };
        let (mut forgotten, mut outdated) = (0, false);
        for worker in 0..self.workers.count() {
            let mut chunk = PurgeChunk { owner, round, view, cursor: Some(0), forgotten: 0, outdated: false };
            while chunk.cursor.is_some() {
                let command = move |reply: Sender<PurgeChunk>| Command::Purge { chunk, reply };
                let answers = ask(&self.workers, vec![(worker, Box::new(command))], turn.clone())
                    .await
                    .map_err(Broken::Worker)?;
                chunk = answers.into_iter().next().ok_or(Broken::Worker(worker))?;
            }
            forgotten += chunk.forgotten;
            outdated |= chunk.outdated;
        }
        Ok((forgotten, outdated))
    }

    fn note(&self, change: impl FnOnce(&mut CopiesStatus)) {
        self.board.update(&self.peer, |peer| change(&mut peer.copies));
    }

    async fn tell(&self, event: Event) {
        // Nobody listens: nobody misses it.
        let _ = self.events.send(event).await;
    }
}
