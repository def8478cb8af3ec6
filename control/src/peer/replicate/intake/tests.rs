//! What follows of the end of a round.

use std::sync::atomic::{AtomicBool, Ordering};

use prost::Message;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::snapshot::members::GatewayId;

use super::*;
use crate::peer::proto::{Frame, Sessions, SyncBegin, SyncEnd};
use crate::peer::tests::image;
use crate::peer::{Bell, session};

/// A worker that says whether it had to spare something, and in which epoch the other gateway was told all when it was asked; and that may
/// have no place for anything.
#[derive(Debug)]
struct Forgetful {
    outlet: Outlet,
    spares: AtomicBool,
    is_full: AtomicBool,
    asked: std::sync::Mutex<Vec<u64>>,
}

impl Workers for Forgetful {
    fn count(&self) -> usize {
        1
    }

    fn outlet(&self, _: usize) -> &Outlet {
        &self.outlet
    }

    fn send(&self, _: usize, command: Command, _: std::time::Instant) -> bool {
        let (mut chunk, reply) = match command {
            Command::Purge { chunk, reply } => (chunk, reply),
            Command::Take { images, reply, .. } => {
                let refused = if self.is_full.load(Ordering::Relaxed) { images } else { Vec::new() };
                return reply.send(refused).is_ok();
            }
            _ => panic!("nothing else is asked: {command:?}"),
        };
        self.asked.lock().unwrap().push(chunk.told_by);
        (chunk.cursor, chunk.spared) = (None, self.spares.load(Ordering::Relaxed));
        reply.send(chunk).is_ok()
    }

    fn replication_epoch(&self) -> u64 {
        1
    }

    fn gateway(&self, _: &str) -> Option<GatewayId> {
        Some(GatewayId(1))
    }

    fn place(&self, _: &Image) -> usize {
        0
    }
}

struct Scene {
    workers: Arc<Forgetful>,
    board: Board,
    /// Frames that arrive.
    frames: mpsc::Sender<Kind>,
    /// What is said to the other gateway.
    lane: mpsc::Receiver<Vec<u8>>,
    number: u64,
}

impl Scene {
    /// Frames arrive, one after the other, at whom the story is about.
    async fn play(story: impl AsyncFnOnce(Self)) {
        let outlet = Outlet::new(Arc::new(Bell::default()));
        let (spares, is_full, asked) = (AtomicBool::new(false), AtomicBool::new(false), std::sync::Mutex::default());
        let workers = Arc::new(Forgetful { outlet, spares, is_full, asked });
        let (board, turns) = (Board::new(), Turns::default());
        board.keep(&["b".into()]);
        let (events, _events) = mpsc::channel(16);
        let (sender, lane) = mpsc::channel(16);
        let (_view, view) = watch::channel(Arc::new(View { number: 9, ..View::default() }));
        let (peer, rounds) = (Arc::from("b"), Rounds::default());
        let intake = Intake {
            peer,
            workers: workers.clone(),
            rounds,
            turns: &turns,
            board: board.clone(),
            events,
            view,
            lane: sender,
        };
        let (frames, taken) = mpsc::channel(16);
        tokio::select! {
            why = intake.run(taken) => panic!("{why:?}"),
            () = story(Self { workers, board, frames, lane, number: 0 }) => {}
        }
    }

    /// What it says next.
    async fn said(&mut self) -> Kind {
        let bytes = timeout(Duration::from_secs(100), self.lane.recv()).await.unwrap().unwrap();
        Frame::decode(&bytes[4..]).unwrap().kind.unwrap()
    }

    async fn is_silent_for(&mut self, time: Duration) -> bool {
        timeout(time, self.lane.recv()).await.is_err()
    }

    /// The other gateway was told all in this epoch.
    fn told(&self, epoch: u64) {
        self.board.update("b", |peer| peer.copies.told_by = epoch);
    }

    fn copies(&self) -> CopiesStatus {
        self.board.watch().borrow().peers["b"].copies.clone()
    }

    /// The next frame arrives, and is acknowledged.
    async fn frame(&mut self, kind: impl FnOnce(u64) -> Kind, refused: bool) {
        self.number += 1;
        let number = self.number;
        self.frames.send(kind(number)).await.unwrap();
        assert_eq!(self.said().await, Kind::Ack(Ack { number, refused }));
    }

    async fn begin(&mut self) {
        self.frame(|number| Kind::SyncBegin(SyncBegin { number, round: 1, view: 8 }), false).await;
    }

    async fn end(&mut self) {
        self.frame(|number| Kind::SyncEnd(SyncEnd { number, round: 1 }), false).await;
    }

    async fn session(&mut self, refused: bool) {
        let sessions = vec![session::encode(&image(1))];
        self.frame(|number| Kind::Sessions(Sessions { number, sessions }), refused).await;
    }
}

const REQUEST: Kind = Kind::SyncRequest(SyncRequest {});

#[tokio::test]
async fn who_may_not_know_all_yet_is_asked_again_when_it_does_and_not_before() {
    Scene::play(async |mut it: Scene| {
        it.told(5);
        it.workers.spares.store(true, Ordering::Relaxed);
        it.begin().await;
        it.end().await;
        it.told(5);
        assert!(it.is_silent_for(Duration::from_millis(50)).await, "it would tell the same again");
        assert!(it.copies().in_sync_from, "of what it has none is missing");
        it.told(7);
        assert_eq!(it.said().await, REQUEST);
        // Between its beginning and its end it was told the rest: it knew that too late to name it.
        it.begin().await;
        it.told(8);
        it.end().await;
        assert_eq!(it.said().await, REQUEST);
        it.workers.spares.store(false, Ordering::Relaxed);
        it.begin().await;
        it.end().await;
        assert_eq!((it.copies().in_sync_from, it.copies().synced_by), (true, 8));
        it.told(9);
        assert!(it.is_silent_for(Duration::from_millis(50)).await, "nothing is left to ask for");
        assert_eq!(*it.workers.asked.lock().unwrap(), [5, 7, 8]);
    })
    .await;
}

#[tokio::test]
async fn what_finds_no_place_is_asked_for_again() {
    Scene::play(async |mut it: Scene| {
        let full = |it: &Scene, is_full| it.workers.is_full.store(is_full, Ordering::Relaxed);
        it.begin().await;
        full(&it, true);
        it.session(true).await;
        it.session(true).await;
        full(&it, false);
        it.session(false).await;
        it.end().await;
        let begun = Instant::now();
        assert_eq!(it.said().await, REQUEST);
        assert!(begun.elapsed() > RETRY / 2, "not at once");
        it.begin().await;
        it.session(false).await;
        it.end().await;
        assert!(it.is_silent_for(RETRY + RETRY / 2).await, "nothing is left to ask for");
    })
    .await;
}

#[tokio::test]
async fn what_has_made_room_for_others_is_asked_for_again() {
    Scene::play(async |mut it: Scene| {
        it.begin().await;
        it.session(false).await;
        it.end().await;
        it.workers.outlet.note_evicted();
        it.session(true).await;
        assert_eq!(it.said().await, REQUEST);
        it.begin().await;
        it.session(false).await;
        it.end().await;
        assert!(it.is_silent_for(RETRY + RETRY / 2).await);
    })
    .await;
}

#[test]
fn what_is_refused_again_and_again_is_asked_for_ever_more_rarely() {
    let (mut refusals, mut now) = (Refusals::new(), Instant::now());
    for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
        refusals.round_begins();
        refusals.note(now);
        assert_eq!(refusals.due, None, "that would end the round");
        refusals.round_ends(now);
        refusals.note(now + RETRY / 2);
        now += Duration::from_secs(pause);
        assert_eq!(refusals.due, Some(now), "once for all that was refused since");
        refusals.asked();
    }
    // Rounds in which all found a place.
    for pause in [30, 15] {
        refusals.round_begins();
        refusals.round_ends(now);
        assert_eq!((refusals.due, refusals.pause), (None, Duration::from_secs(pause)));
    }
}
