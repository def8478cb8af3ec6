//! Where captured packets stand, and how they get from a worker to whoever captures.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;
use vipgate_mem::prefetch_read;

use super::HEAD;
use crate::counters::Direction;
use crate::io::InterfaceId;
use crate::ports::pool::WorkerId;
use crate::time::Tick;
use crate::verdict::Verdict;

/// Bytes of a cache line.
const LINE: usize = 64;

/// A packet that was captured.
#[derive(Clone, Debug)]
pub struct Captured {
    /// When.
    pub at: Tick,
    /// By whom.
    pub worker: WorkerId,
    /// Where it came in.
    pub interface: InterfaceId,
    /// Whether it came from outside, and not from another worker, or around.
    pub is_first: bool,
    /// How its way ended.
    pub verdict: Verdict,
    /// Which way it counts; `None` of what wasn't sent on, and of answers.
    pub direction: Option<Direction>,
    /// Where it leaves, or will when its neighbour is known.
    pub out: Option<InterfaceId>,
    /// As it came: as much of it as is wanted, and its length.
    pub before: Vec<u8>,
    /// Its length.
    pub before_length: u16,
    /// As it went on; empty if it didn't.
    pub after: Vec<u8>,
    /// Its length.
    pub after_length: u16,
}

impl Captured {
    /// Starts to fetch where the first bytes will be written to.
    pub(super) fn fetch(&self) {
        for at in (0..HEAD).step_by(LINE) {
            prefetch_read(&self.before, at);
            prefetch_read(&self.after, at);
        }
    }
}

/// Places for captured packets that go around between a worker and whoever captures.
#[derive(Debug)]
pub struct TapRing {
    pub(super) full: ArrayQueue<Box<Captured>>,
    pub(super) free: ArrayQueue<Box<Captured>>,
    pub(super) missed: AtomicU64,
}

impl TapRing {
    /// Room for `places` packets of `length` bytes each.
    pub fn new(places: usize, length: usize) -> Self {
        let ring = Self { full: ArrayQueue::new(places), free: ArrayQueue::new(places), missed: AtomicU64::new(0) };
        for _ in 0..places {
            let empty = Captured {
                at: Tick(0),
                worker: WorkerId(0),
                interface: InterfaceId(0),
                is_first: false,
                verdict: Verdict::Undecided,
                direction: None,
                out: None,
                before: touched(length),
                before_length: 0,
                after: touched(length),
                after_length: 0,
            };
            // There is room for just as many.
            let _ = ring.free.push(Box::new(empty));
        }
        ring
    }

    /// The next packet.
    pub fn take(&self) -> Option<Box<Captured>> {
        self.full.pop()
    }

    /// Gives its place back.
    pub fn give(&self, place: Box<Captured>) {
        let _ = self.free.push(place);
    }

    /// Packets that found no place, or came while too many did.
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
    }
}

/// Room that is really there: the kernel gives memory when it is first written to, which a worker shouldn't wait for.
fn touched(length: usize) -> Vec<u8> {
    let mut room = vec![u8::MAX; length];
    room.clear();
    room
}
