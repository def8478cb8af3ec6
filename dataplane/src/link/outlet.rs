//! Where a worker puts what other gateways are to hear of its sessions, and where it hears what they have. Bounded: what doesn't fit
//! is lost, which is noted, and all is told again.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crossbeam::queue::ArrayQueue;

use super::handoff::Wake;
use crate::session::image::Image;
use crate::snapshot::members::GatewayId;

/// A place for each number that a gateway can have.
const NUMBERS: usize = 256;
/// Pieces of news that wait for the control thread.
const QUEUE: usize = 16_384;

/// News of a session for another gateway.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing {
    /// For whom.
    pub to: GatewayId,
    /// Counts what this worker has told this gateway, from 1 on.
    pub number: u64,
    /// The session.
    pub image: Image,
}

/// What one worker tells, shared with the control thread.
#[derive(Debug)]
pub struct Outlet {
    queue: ArrayQueue<Outgoing>,
    /// Gateways that weren't told something, one bit each.
    lost: [AtomicU64; NUMBERS / 64],
    /// The highest number that each gateway has.
    acknowledged: Box<[AtomicU64; NUMBERS]>,
    /// Standby sessions that were ended to make room.
    evicted: AtomicU64,
    bell: Arc<dyn Wake>,
}

impl Outlet {
    /// An empty one; `bell` wakes whoever empties it.
    pub fn new(bell: Arc<dyn Wake>) -> Self {
        Self {
            queue: ArrayQueue::new(QUEUE),
            lost: [const { AtomicU64::new(0) }; NUMBERS / 64],
            acknowledged: Box::new([const { AtomicU64::new(0) }; NUMBERS]),
            evicted: AtomicU64::new(0),
            bell,
        }
    }

    /// The next piece of news.
    pub fn pop(&self) -> Option<Outgoing> {
        self.queue.pop()
    }

    /// Whether this gateway wasn't told something since this was last asked.
    pub fn take_lost(&self, gateway: GatewayId) -> bool {
        let (word, bit) = place(gateway);
        // Read first: nearly always nothing is lost.
        self.lost[word].load(Relaxed) & bit != 0 && self.lost[word].fetch_and(!bit, AcqRel) & bit != 0
    }

    /// Notes that a gateway has everything up to this number.
    pub fn acknowledge(&self, gateway: GatewayId, number: u64) {
        self.acknowledged[usize::from(gateway.0)].fetch_max(number, Release);
    }

    /// The highest number that a gateway has.
    pub fn acknowledged(&self, gateway: GatewayId) -> u64 {
        self.acknowledged[usize::from(gateway.0)].load(Acquire)
    }

    /// Tells something; false if it is lost.
    pub fn push(&self, news: Outgoing) -> bool {
        let told = self.queue.push(news).is_ok();
        if !told {
            self.lose(news.to);
        }
        told
    }

    /// Notes that a gateway wasn't told something.
    pub fn lose(&self, gateway: GatewayId) {
        let (word, bit) = place(gateway);
        self.lost[word].fetch_or(bit, AcqRel);
    }

    /// Notes that a standby session was ended to make room: whoever has told it takes it for known here.
    pub fn note_evicted(&self) {
        self.evicted.fetch_add(1, Relaxed);
    }

    /// How many were.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Wakes whoever empties it.
    pub fn ring(&self) {
        self.bell.wake();
    }
}

fn place(gateway: GatewayId) -> (usize, u64) {
    (usize::from(gateway.0) / 64, 1 << (gateway.0 % 64))
}
