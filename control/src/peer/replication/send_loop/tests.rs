//! Send loop: when records are sent.

use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::replication::sender::{OutgoingRecord, ReplicationSender};
use vipgate_dataplane::session::record::ReplicationRecord;

use super::*;
use crate::peer::session_record;

/// One worker with an empty table.
#[derive(Debug)]
struct MockWorker {
    sender: ReplicationSender,
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
        chunk.cursor = None;
        reply.send(chunk).is_ok()
    }

    fn replication_epoch(&self) -> u64 {
        7
    }

    fn gateway_id(&self, _: &str) -> Option<GatewayId> {
        Some(GatewayId(0))
    }

    fn worker_of(&self, _: &ReplicationRecord) -> usize {
        0
    }
}

fn pump_with(sends_at_once: bool) -> (SendLoop, Arc<MockWorker>) {
    let bell = Arc::new(ReplicationWaker::default());
    let workers = Arc::new(MockWorker { sender: ReplicationSender::new(bell.clone()) });
    (SendLoop::new(workers.clone(), bell, sends_at_once, StatusPublisher::new()), workers)
}

fn link(pump: &mut SendLoop, id: u64, peer: &str) -> (mpsc::Receiver<Vec<u8>>, mpsc::Receiver<Vec<u8>>) {
    let (lane, frames) = mpsc::channel(16);
    let (urgent, requests) = mpsc::channel(16);
    let link = LinkHandle { id, incarnation: 1, bulk: lane, urgent, stop: mpsc::channel(1).0 };
    pump.handle_command(SendCommand::LinkUp { peer: peer.into(), link });
    (frames, requests)
}

/// Runs full syncs to their end.
async fn complete_syncs(pump: &mut SendLoop) {
    pump.send_requests();
    while let Some(reply) = pump.replies.join_next().await {
        pump.handle_reply(reply.unwrap());
        pump.send_requests();
    }
}

/// Whether the loop, having just read a record, is woken by the next one.
async fn is_woken_by_the_next_record(sends_at_once: bool) -> bool {
    let (mut pump, workers) = pump_with(sends_at_once);
    pump.handle_command(SendCommand::SetPeers(vec!["a".into()], 7));
    let (mut frames, _requests) = link(&mut pump, 1, "a");
    complete_syncs(&mut pump).await;
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
