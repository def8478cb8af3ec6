//! Ring of captured packets between a worker and a capture client.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;
use vipgate_mem::prefetch_read;

use super::HEADER_BYTES;
use crate::flow::direction::Direction;
use crate::flow::ids::{InterfaceId, WorkerId};
use crate::flow::time::Tick;
use crate::flow::verdict::Verdict;

/// Bytes of a cache line.
const LINE: usize = 64;

#[derive(Clone, Debug)]
pub struct CapturedPacket {
    /// Time of capture.
    pub at: Tick,
    /// The worker that captured it.
    pub worker: WorkerId,
    /// Its ingress interface.
    pub interface: InterfaceId,
    /// Whether it was received from a device, and not by hand-off or hairpin.
    pub is_first: bool,
    pub verdict: Verdict,
    /// The direction that it was counted in; `None` if it was not forwarded, and for replies.
    pub direction: Option<Direction>,
    /// Its egress interface.
    pub out: Option<InterfaceId>,
    /// The packet on arrival, up to the snap length.
    pub before: Vec<u8>,
    /// Its length on arrival.
    pub before_length: u16,
    /// The packet as it was sent, up to the snap length; empty if it was not sent.
    pub after: Vec<u8>,
    /// Its length as it was sent.
    pub after_length: u16,
}

impl CapturedPacket {
    /// Prefetches the memory that the headers are copied to.
    pub(super) fn prefetch(&self) {
        for at in (0..HEADER_BYTES).step_by(LINE) {
            prefetch_read(&self.before, at);
            prefetch_read(&self.after, at);
        }
    }
}

/// Buffers for captured packets, recycled between a worker and a capture client.
#[derive(Debug)]
pub struct CaptureRing {
    pub(super) full: ArrayQueue<Box<CapturedPacket>>,
    pub(super) free: ArrayQueue<Box<CapturedPacket>>,
    pub(super) missed: AtomicU64,
}

impl CaptureRing {
    /// A ring of `buffers` packets with `length` bytes each.
    pub fn new(buffers: usize, length: usize) -> Self {
        let ring = Self { full: ArrayQueue::new(buffers), free: ArrayQueue::new(buffers), missed: AtomicU64::new(0) };
        for _ in 0..buffers {
            let buffer = CapturedPacket {
                at: Tick(0),
                worker: WorkerId(0),
                interface: InterfaceId(0),
                is_first: false,
                verdict: Verdict::Undecided,
                direction: None,
                out: None,
                before: prefaulted(length),
                before_length: 0,
                after: prefaulted(length),
                after_length: 0,
            };
            // The queue has space for all of them.
            let _ = ring.free.push(Box::new(buffer));
        }
        ring
    }

    /// The next captured packet.
    pub fn pop(&self) -> Option<Box<CapturedPacket>> {
        self.full.pop()
    }

    /// Recycles its buffer.
    pub fn recycle(&self, buffer: Box<CapturedPacket>) {
        let _ = self.free.push(buffer);
    }

    /// Packets missed: no buffer was free, or the rate limit was reached.
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
    }
}

/// Allocates a buffer and touches its pages, so that a worker does not take the page faults.
fn prefaulted(length: usize) -> Vec<u8> {
    let mut buffer = vec![u8::MAX; length];
    buffer.clear();
    buffer
}
