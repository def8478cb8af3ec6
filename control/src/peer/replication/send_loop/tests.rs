//! Send loop: order of full syncs, and the acknowledged epoch of each peer.

use std::sync::Mutex;

use vipgate_dataplane::replication::sender::{OutgoingRecord, ReplicationSender};
use vipgate_dataplane::session::record::ReplicationRecord;

use super::*;
use crate::peer::session_record;

const NAMES: [&str; 3] = ["a", "b", "c"];

/// One worker whose table takes three chunks. Records the target and the acknowledged epoch of each request.
#[derive(Debug)]
struct MockWorker {
    sender: ReplicationSender,
    requests: Mutex<Vec<(usize, u64)>>,
}

impl Workers for MockWorker {
    fn count(&self) -> usize {
        1
    }

    fn replication_sender(&self, _: usize) -> &ReplicationSender {
        &self.sender
    }

    fn send(&self, _: usize, command: Command, _: std::time::Instant) -> bool {
        let Command::ListRecords { mut chunk, reply } = command else { panic!("unexpected command: {command:?}") };
        self.requests.lock().unwrap().push((chunk.target.0.into(), chunk.acknowledged_epoch));
        chunk.cursor = chunk.cursor.map(|cursor| cursor + 1).filter(|cursor| *cursor < 3);
        reply.send(chunk).is_ok()
    }

    fn replication_epoch(&self) -> u64 {
        7
    }

    fn gateway_id(&self, name: &str) -> Option<GatewayId> {
        NAMES.iter().position(|it| *it == name).map(|at| GatewayId(at as u8))
    }

    fn worker_of(&self, _: &ReplicationRecord) -> usize {
        0
    }
}

fn pump() -> (SendLoop, Arc<MockWorker>) {
    pump_with(false)
}

fn pump_with(sends_at_once: bool) -> (SendLoop, Arc<MockWorker>) {
    let bell = Arc::new(ReplicationWaker::default());
    let workers = Arc::new(MockWorker { sender: ReplicationSender::new(bell.clone()), requests: Mutex::default() });
    (SendLoop::new(workers.clone(), bell, sends_at_once, StatusPublisher::new()), workers)
}

fn link(pump: &mut SendLoop, id: u64, peer: &str) -> (mpsc::Receiver<Vec<u8>>, mpsc::Receiver<Vec<u8>>) {
    link_to_process(pump, id, peer, 1)
}

/// A link to the process of a peer with this incarnation.
fn link_to_process(
    pump: &mut SendLoop,
    id: u64,
    peer: &str,
    incarnation: u64,
) -> (mpsc::Receiver<Vec<u8>>, mpsc::Receiver<Vec<u8>>) {
    let (lane, frames) = mpsc::channel(16);
    let (urgent, requests) = mpsc::channel(16);
    let link = LinkHandle { id, incarnation, bulk: lane, urgent, stop: mpsc::channel(1).0 };
    pump.handle_command(SendCommand::LinkUp { peer: peer.into(), link });
    (frames, requests)
}

/// Runs full syncs to their end; returns the requests.
async fn complete_syncs(pump: &mut SendLoop, workers: &MockWorker) -> Vec<(usize, u64)> {
    pump.send_requests();
    while let Some(reply) = pump.replies.join_next().await {
        pump.handle_reply(reply.unwrap());
        pump.send_requests();
    }
    std::mem::take(&mut *workers.requests.lock().unwrap())
}

fn set_peers(pump: &mut SendLoop, names: &[&str], view: u64) {
    pump.handle_command(SendCommand::SetPeers(names.iter().map(|name| (*name).into()).collect(), view));
}

#[tokio::test]
async fn full_syncs_of_several_peers_are_interleaved() {
    let (mut pump, workers) = pump();
    set_peers(&mut pump, &NAMES, 7);
    let _links = NAMES.map(|name| link(&mut pump, 1, name));
    let requested = complete_syncs(&mut pump, &workers).await;
    assert_eq!(requested.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
    // Also while one of them requests a full sync again and again.
    pump.handle_command(SendCommand::Resync("b".into()));
    pump.send_requests();
    for _ in 0..4 {
        pump.handle_command(SendCommand::Resync("a".into()));
        let reply = pump.replies.join_next().await.unwrap();
        pump.handle_reply(reply.unwrap());
        pump.send_requests();
    }
    let reply = pump.replies.join_next().await.unwrap();
    pump.handle_reply(reply.unwrap());
    let requested: Vec<usize> =
        std::mem::take(&mut *workers.requests.lock().unwrap()).iter().map(|(to, _)| *to).collect();
    assert_eq!(requested, [1, 0, 1, 0, 1]);
}

#[tokio::test]
async fn peers_of_the_first_view_inherit_the_acknowledged_epoch() {
    let (mut pump, workers) = pump();
    set_peers(&mut pump, &[], 0);
    set_peers(&mut pump, &["a", "b"], 7);
    let _a = link(&mut pump, 1, "a");
    assert_eq!(complete_syncs(&mut pump, &workers).await, [(0, 7); 3]);
    // Peers that are added or return later have received nothing from this process.
    set_peers(&mut pump, &["b", "c"], 9);
    set_peers(&mut pump, &["a", "b", "c"], 10);
    let _b = link(&mut pump, 2, "b");
    assert_eq!(complete_syncs(&mut pump, &workers).await, [(1, 7); 3]);
    let _links = [link(&mut pump, 3, "a"), link(&mut pump, 4, "c")];
    assert_eq!(complete_syncs(&mut pump, &workers).await, [(0, 0), (2, 0), (0, 0), (2, 0), (0, 0), (2, 0)]);
}

#[tokio::test]
async fn a_restarted_peer_has_no_acknowledged_epoch() {
    let (mut pump, workers) = pump();
    set_peers(&mut pump, &["a"], 7);
    let _first = link_to_process(&mut pump, 1, "a", 5);
    assert_eq!(complete_syncs(&mut pump, &workers).await, [(0, 7); 3]);
    let _again = link_to_process(&mut pump, 2, "a", 5);
    assert_eq!(complete_syncs(&mut pump, &workers).await, [(0, 7); 3], "a reconnected link");
    let _restarted = link_to_process(&mut pump, 3, "a", 6);
    assert_eq!(complete_syncs(&mut pump, &workers).await, [(0, 0); 3]);
}

/// Whether the loop, having just read a record, is woken by the next one.
async fn is_woken_by_the_next_record(sends_at_once: bool) -> bool {
    let (mut pump, workers) = pump_with(sends_at_once);
    set_peers(&mut pump, &["a"], 7);
    let (mut frames, _requests) = link(&mut pump, 1, "a");
    complete_syncs(&mut pump, &workers).await;
    pump.send();
    while frames.try_recv().is_ok() {}
    let queue = |number: u32| {
        let record = session_record(number);
        assert!(workers.sender.push(OutgoingRecord { to: GatewayId(0), number: number.into(), record }));
        workers.sender.notify();
    };
    queue(1);
    assert_eq!(pump.read_queues(), BATCH_INTERVAL);
    pump.send();
    assert!(frames.try_recv().is_ok(), "the first record is sent at once in any case");
    queue(2);
    tokio::time::timeout(Duration::from_millis(20), pump.waker.notified()).await.is_ok()
}

#[tokio::test]
async fn records_are_sent_as_soon_as_they_are_queued_or_batched() {
    assert!(is_woken_by_the_next_record(true).await);
    assert!(!is_woken_by_the_next_record(false).await);
}
