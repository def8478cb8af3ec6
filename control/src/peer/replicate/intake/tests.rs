//! What follows of the end of a round.

use std::sync::atomic::{AtomicBool, Ordering};

use prost::Message;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::snapshot::members::GatewayId;

use super::*;
use crate::peer::Bell;
use crate::peer::proto::{Frame, SyncBegin, SyncEnd};

/// A worker that says whether it had to spare something, and by which view the other gateway was told all when it was asked.
#[derive(Debug)]
struct Forgetful {
    outlet: Outlet,
    spares: AtomicBool,
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
        let Command::Purge { mut chunk, reply } = command else { panic!("nothing else is asked: {command:?}") };
        self.asked.lock().unwrap().push(chunk.told_by);
        (chunk.cursor, chunk.spared) = (None, self.spares.load(Ordering::Relaxed));
        reply.send(chunk).is_ok()
    }

    fn gateway(&self, _: &str) -> Option<GatewayId> {
        Some(GatewayId(1))
    }

    fn place(&self, _: &Image) -> usize {
        0
    }
}

async fn said(lane: &mut mpsc::Receiver<Vec<u8>>) -> Kind {
    let bytes = timeout(Duration::from_secs(30), lane.recv()).await.unwrap().unwrap();
    Frame::decode(&bytes[4..]).unwrap().kind.unwrap()
}

#[tokio::test]
async fn who_may_not_know_all_yet_is_asked_again_when_it_does_and_not_before() {
    let outlet = Outlet::new(Arc::new(Bell::default()));
    let workers = Arc::new(Forgetful { outlet, spares: AtomicBool::new(true), asked: std::sync::Mutex::default() });
    let (board, turns) = (Board::new(), Turns::default());
    board.keep(&["b".into()]);
    let told = |view| board.update("b", |peer| peer.copies.told_by = view);
    let copies = || board.watch().borrow().peers["b"].copies.clone();
    told(5);
    let (events, _events) = mpsc::channel(16);
    let (lane, mut lane_of_it) = mpsc::channel(16);
    let (_view, view) = watch::channel(Arc::new(View { number: 9, ..View::default() }));
    let (peer, rounds) = (Arc::from("b"), Rounds::default());
    let intake =
        Intake { peer, workers: workers.clone(), rounds, turns: &turns, board: board.clone(), events, view, lane };
    let (frames, taken) = mpsc::channel(16);
    let story = async {
        let mut number = 0;
        let mut round = async |lane: &mut mpsc::Receiver<Vec<u8>>, is_told_meanwhile: bool| {
            let begin = SyncBegin { number: number + 1, round: 1, view: 8 };
            frames.send(Kind::SyncBegin(begin)).await.unwrap();
            assert_eq!(said(lane).await, Kind::Ack(Ack { number: number + 1 }));
            if is_told_meanwhile {
                told(8);
            }
            frames.send(Kind::SyncEnd(SyncEnd { number: number + 2, round: 1 })).await.unwrap();
            assert_eq!(said(lane).await, Kind::Ack(Ack { number: number + 2 }));
            number += 2;
        };
        round(&mut lane_of_it, false).await;
        told(5);
        assert!(timeout(Duration::from_millis(50), lane_of_it.recv()).await.is_err(), "it would tell the same again");
        assert!(!copies().in_sync_from);
        told(7);
        assert_eq!(said(&mut lane_of_it).await, Kind::SyncRequest(SyncRequest {}));
        // Between its beginning and its end it was told the rest: it knew that too late to name it.
        round(&mut lane_of_it, true).await;
        assert_eq!(said(&mut lane_of_it).await, Kind::SyncRequest(SyncRequest {}));
        workers.spares.store(false, Ordering::Relaxed);
        round(&mut lane_of_it, false).await;
        assert_eq!((copies().in_sync_from, copies().synced_by), (true, 8));
        told(9);
        assert!(timeout(Duration::from_millis(50), lane_of_it.recv()).await.is_err(), "nothing is left to ask for");
        assert_eq!(*workers.asked.lock().unwrap(), [5, 7, 8]);
    };
    tokio::select! {
        why = intake.run(taken) => panic!("{why:?}"),
        () = story => {}
    }
}
