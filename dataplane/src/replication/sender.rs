//! Replication sender side: passes session records from a worker to the control thread, and peers' acknowledgements
//! back. Bounded: an overflow is recorded for the peer and triggers a full resynchronization.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crossbeam::queue::ArrayQueue;

use crate::flow::ids::GatewayId;
use crate::io::handoff::Wake;
use crate::session::record::ReplicationRecord;

/// Gateway numbers.
const MAX_GATEWAYS: usize = 256;
/// Records waiting for the control thread.
const QUEUE_CAPACITY: usize = 16_384;

/// A session record for a peer gateway.
#[derive(Clone, Copy, Debug)]
pub struct OutgoingRecord {
    /// The peer.
    pub to: GatewayId,
    /// Sequence number of this worker's records for this peer, from 1.
    pub number: u64,
    pub record: ReplicationRecord,
}

/// One worker's outgoing records, shared with the control thread.
#[derive(Debug)]
pub struct ReplicationSender {
    queue: ArrayQueue<OutgoingRecord>,
    /// Peers with lost records, one bit each.
    lost: [AtomicU64; MAX_GATEWAYS / 64],
    /// The highest sequence number that each peer has acknowledged.
    acknowledged: Box<[AtomicU64; MAX_GATEWAYS]>,
    /// Standby sessions evicted.
    evicted: AtomicU64,
    doorbell: Arc<dyn Wake>,
}

impl ReplicationSender {
    /// An empty queue; `doorbell` wakes the control thread.
    pub fn new(doorbell: Arc<dyn Wake>) -> Self {
        Self {
            queue: ArrayQueue::new(QUEUE_CAPACITY),
            lost: [const { AtomicU64::new(0) }; MAX_GATEWAYS / 64],
            acknowledged: Box::new([const { AtomicU64::new(0) }; MAX_GATEWAYS]),
            evicted: AtomicU64::new(0),
            doorbell,
        }
    }

    /// The next record.
    pub fn pop(&self) -> Option<OutgoingRecord> {
        self.queue.pop()
    }

    /// Whether a record for this peer was lost since the last call.
    pub fn take_lost(&self, gateway: GatewayId) -> bool {
        let (word, bit) = bit_of(gateway);
        // Load first: nearly always nothing is lost.
        self.lost[word].load(Relaxed) & bit != 0 && self.lost[word].fetch_and(!bit, AcqRel) & bit != 0
    }

    /// Records that a peer has everything up to this number.
    pub fn acknowledge(&self, gateway: GatewayId, number: u64) {
        self.acknowledged[usize::from(gateway.0)].fetch_max(number, Release);
    }

    /// The highest sequence number that a peer has acknowledged.
    pub fn acknowledged(&self, gateway: GatewayId) -> u64 {
        self.acknowledged[usize::from(gateway.0)].load(Acquire)
    }

    /// Queues a record; false if it was lost.
    pub fn push(&self, record: OutgoingRecord) -> bool {
        let is_queued = self.queue.push(record).is_ok();
        if !is_queued {
            self.mark_lost(record.to);
        }
        is_queued
    }

    /// Whether there is room for records that may be lost, so that they cause no loss of others.
    pub fn has_room(&self) -> bool {
        self.queue.len() < QUEUE_CAPACITY / 2
    }

    /// Marks records for a peer as lost.
    pub fn mark_lost(&self, gateway: GatewayId) {
        let (word, bit) = bit_of(gateway);
        self.lost[word].fetch_or(bit, AcqRel);
    }

    /// Counts an evicted standby session: its owner still counts it as replicated here.
    pub fn count_evicted(&self) {
        self.evicted.fetch_add(1, Relaxed);
    }

    /// Standby sessions evicted so far.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Wakes the control thread.
    pub fn notify(&self) {
        self.doorbell.wake();
    }
}

fn bit_of(gateway: GatewayId) -> (usize, u64) {
    (usize::from(gateway.0) / 64, 1 << (gateway.0 % 64))
}
