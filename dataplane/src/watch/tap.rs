//! A tap on a worker's packets: each that matches is copied as it came and as it goes on, with its verdict.
//!
//! The stages write into packets, so the heads of all are copied before; only those that match afterwards are copied whole. How many that are
//! a second is limited, and while the limit is reached nothing is looked at. Memory comes from whoever captures, and goes around: a
//! copy that finds no free place is counted as missed.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;
use ipnet::IpNet;

use super::glimpse::Glimpse;
use crate::batch::{Batch, MOST};
use crate::counters::{Direction, DropReason};
use crate::io::InterfaceId;
use crate::ports::pool::WorkerId;
use crate::time::Tick;
use crate::verdict::Verdict;

/// Bytes of a packet that the stages may write to: link, IPv6 and TCP with all its options.
const HEAD: usize = 128;

/// Which packets; everything that is given must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapFilter {
    /// One of its addresses, before or after translation, is in each of these.
    pub nets: Vec<IpNet>,
    /// One of its ports, before or after translation, is this.
    pub port: Option<u16>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// Where it came in.
    pub interface: Option<InterfaceId>,
    /// How its way ended.
    pub outcome: Outcome,
}

/// How the way of a wanted packet ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Anyhow.
    #[default]
    Any,
    /// It was dropped.
    Dropped,
    /// It was dropped for this reason.
    DroppedFor(DropReason),
    /// It wasn't dropped.
    Passed,
    /// It was sent on, in this direction.
    Sent(Direction),
}

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
    /// Which way it counts, where it was sent on.
    pub direction: Direction,
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

/// Places for captured packets that go around between a worker and whoever captures.
#[derive(Debug)]
pub struct TapRing {
    full: ArrayQueue<Box<Captured>>,
    free: ArrayQueue<Box<Captured>>,
    missed: AtomicU64,
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
                direction: Direction::Unchanged,
                out: None,
                before: Vec::with_capacity(length),
                before_length: 0,
                after: Vec::with_capacity(length),
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

/// What a worker captures, and where to.
#[derive(Debug)]
pub struct Tap {
    filter: TapFilter,
    ring: Arc<TapRing>,
    worker: WorkerId,
    /// Bytes of a packet that are copied at most.
    length: usize,
    /// Packets a second, and how many are left of them in this one.
    rate: u32,
    left: u32,
    second: u32,
    /// The heads of the batch's packets as they came, and the packets' lengths; none while nothing is looked at.
    heads: Box<[([u8; HEAD], u16); MOST]>,
    looked_at: usize,
}

impl Tap {
    /// Captures what matches, into the ring, at most `rate` packets a second and `length` bytes of each.
    pub fn new(filter: TapFilter, ring: Arc<TapRing>, worker: WorkerId, length: usize, rate: u32) -> Self {
        let heads = Box::new([([0; HEAD], 0); MOST]);
        Self { filter, ring, worker, length, rate, left: rate, second: 0, heads, looked_at: 0 }
    }

    /// Whether nobody takes what is captured any more.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.ring) == 1
    }

    /// Looks at a batch that has come in.
    #[inline]
    pub fn before(&mut self, batch: &Batch, now: Tick) {
        let second = now.0 / 1000;
        if second != self.second {
            (self.second, self.left) = (second, self.rate);
        }
        self.looked_at = 0;
        if self.left == 0 {
            self.ring.missed.fetch_add(batch.len() as u64, Relaxed);
            return;
        }
        for (received, (head, length)) in batch.frames.iter().zip(self.heads.iter_mut()) {
            let bytes = received.frame.bytes();
            *length = bytes.len() as u16;
            // Two lines at once are faster than as many bytes as there are, and most packets have one.
            match (bytes.first_chunk::<HEAD>(), bytes.first_chunk::<64>()) {
                (Some(whole), _) => *head = *whole,
                (None, Some(line)) => {
                    head[..64].copy_from_slice(line);
                    head[64..bytes.len()].copy_from_slice(&bytes[64..]);
                }
                (None, None) => head[..bytes.len()].copy_from_slice(bytes),
            }
        }
        self.looked_at = batch.len();
    }

    /// Looks at the same batch again, when all has been decided about it.
    #[inline]
    pub fn after(&mut self, batch: &Batch, now: Tick) {
        for i in 0..self.looked_at {
            if self.is_wanted(batch, i) {
                self.copy(batch, i, now);
            }
        }
    }

    #[inline]
    fn is_wanted(&self, batch: &Batch, i: usize) -> bool {
        let TapFilter { nets, port, protocol, interface, outcome } = &self.filter;
        let (verdict, received) = (batch.verdicts[i], &batch.frames[i]);
        let by_outcome = match *outcome {
            Outcome::Any => true,
            Outcome::Dropped => matches!(verdict, Verdict::Drop(_)),
            Outcome::DroppedFor(reason) => verdict == Verdict::Drop(reason),
            Outcome::Passed => !matches!(verdict, Verdict::Drop(_)),
            Outcome::Sent(direction) => is_sent(verdict) && batch.directions[i] == direction,
        };
        if !by_outcome || interface.is_some_and(|wanted| wanted != received.interface) {
            return false;
        }
        if nets.is_empty() && port.is_none() && protocol.is_none() {
            return true;
        }
        let (head, length) = &self.heads[i];
        let came = Glimpse::of(&head[..usize::from(*length).min(HEAD)]);
        let went = if is_sent(verdict) { Glimpse::of(received.frame.bytes()) } else { None };
        let seen = || came.iter().chain(&went);
        let has_address = |net: &IpNet| {
            let is_in = |address: IpAddr| net.contains(&address);
            seen().any(|it| is_in(it.source) || is_in(it.destination))
        };
        let has_port = |port: u16| seen().any(|it| it.ports.is_some_and(|ports| ports.contains(&port)));
        nets.iter().all(has_address)
            && port.is_none_or(has_port)
            && protocol.is_none_or(|number| seen().any(|it| it.protocol == number))
    }

    #[cold]
    fn copy(&mut self, batch: &Batch, i: usize, now: Tick) {
        let place = if self.left == 0 { None } else { self.ring.free.pop() };
        let Some(mut place) = place else {
            self.ring.missed.fetch_add(1, Relaxed);
            return;
        };
        self.left -= 1;
        let received = &batch.frames[i];
        let (bytes, verdict, (head, length)) = (received.frame.bytes(), batch.verdicts[i], &self.heads[i]);
        let length = usize::from(*length);
        place.before.clear();
        place.before.extend_from_slice(&head[..length.min(HEAD).min(self.length)]);
        // What lies behind the heads is as it came, and at the packet's end, unless the packet has become another one.
        if !matches!(verdict, Verdict::Answer(_)) && length > HEAD && bytes.len() >= length - HEAD {
            let tail = &bytes[bytes.len() - (length - HEAD)..];
            place.before.extend_from_slice(&tail[..tail.len().min(self.length.saturating_sub(HEAD))]);
        }
        place.after.clear();
        if is_sent(verdict) {
            place.after.extend_from_slice(&bytes[..bytes.len().min(self.length)]);
        }
        (place.before_length, place.after_length) =
            (length as u16, if is_sent(verdict) { bytes.len() as u16 } else { 0 });
        (place.at, place.worker, place.interface) = (now, self.worker, received.interface);
        (place.verdict, place.direction) = (verdict, batch.directions[i]);
        place.out = match verdict {
            Verdict::Forward(out) | Verdict::Cut(out) | Verdict::Answer(out) => Some(out),
            Verdict::Wait => Some(batch.wanted[i].interface),
            Verdict::Undecided
            | Verdict::CutIntoTunnel
            | Verdict::HandOff(_)
            | Verdict::Heard
            | Verdict::Park
            | Verdict::Around
            | Verdict::Drop(_) => None,
        };
        place.is_first = received.frame.mark() == 0;
        // Places that are out can't be more than there is room for.
        let _ = self.ring.full.push(place);
    }
}

/// Whether a packet is written as it goes on.
fn is_sent(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Forward(_)
        | Verdict::Cut(_)
        | Verdict::CutIntoTunnel
        | Verdict::Answer(_)
        | Verdict::Wait
        | Verdict::Around => true,
        Verdict::Undecided | Verdict::HandOff(_) | Verdict::Heard | Verdict::Park | Verdict::Drop(_) => false,
    }
}
