//! A tap on a worker's packets: each that matches is copied as it came and as it goes on, with its verdict.
//!
//! The stages write into packets, so the heads of all are copied before, a line of 64 bytes of nearly all; only those that match afterwards
//! are copied whole. How many that are a second is limited, and while the limit is reached, or no place is free, nothing is looked at. Memory
//! comes from whoever captures, and goes around. Most packets are refused by two addresses before and two after; all else is asked of
//! those that are left.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;
use ipnet::IpNet;
use vipgate_mem::Frame;

use super::glimpse::Glimpse;
use crate::batch::{Batch, MOST, Packets};
use crate::counters::{Direction, DropReason};
use crate::io::InterfaceId;
use crate::ports::pool::WorkerId;
use crate::time::Tick;
use crate::verdict::Verdict;
use crate::wire::{ethernet, protocol};

/// Bytes of a packet that the stages may write to: link, IP and ports; of IPv6, and where TCP says how long segments may be, twice as many.
const LINE: usize = 64;

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
    quick: Quick,
    ring: Arc<TapRing>,
    worker: WorkerId,
    /// Bytes of a packet that are copied at most.
    length: usize,
    /// Packets a second, and how many are left of them in this one.
    rate: u32,
    left: u32,
    second: u32,
    /// The beginnings of the batch's packets as they came.
    heads: Box<Heads>,
    /// How many there are; none while nothing is looked at.
    looked_at: usize,
}

/// The beginnings of the packets of a batch.
#[derive(Debug)]
struct Heads {
    /// Of a shorter packet, what lies behind it is anything.
    first: [[u8; LINE]; MOST],
    second: [[u8; LINE]; MOST],
    /// The packets' lengths.
    lengths: [u16; MOST],
    /// Those of which there is a second line.
    long: Packets,
}

impl Heads {
    #[inline]
    fn keep(&mut self, i: usize, frame: &Frame) {
        self.lengths[i] = frame.len();
        match frame.line() {
            Some(line) => self.first[i] = *line,
            None => self.keep_last(i, frame),
        }
        if usize::from(frame.len()) > LINE && is_long(&self.first[i]) {
            let more = &frame.bytes()[LINE..];
            let more = &more[..more.len().min(LINE)];
            self.second[i][..more.len()].copy_from_slice(more);
            self.long.insert(i);
        }
    }

    /// Of a packet at the very end of its frame.
    #[cold]
    fn keep_last(&mut self, i: usize, frame: &Frame) {
        let bytes = frame.bytes();
        let length = bytes.len().min(LINE);
        self.first[i][..length].copy_from_slice(&bytes[..length]);
    }

    /// What is kept of a packet, in two pieces.
    fn of(&self, i: usize) -> (&[u8], &[u8]) {
        let length = usize::from(self.lengths[i]);
        let second = if self.long.contains(i) { (length - LINE).min(LINE) } else { 0 };
        (&self.first[i][..length.min(LINE)], &self.second[i][..second])
    }
}

/// Whether the stages may write behind the first line: anything but IPv4 without options that doesn't begin a connection.
#[inline]
fn is_long(first: &[u8; LINE]) -> bool {
    const TCP_FLAGS: usize = ethernet::HEADER + 20 + 13;
    const SYN: u8 = 2;
    first[12..15] != [8, 0, 0x45] || (first[23] == protocol::TCP && first[TCP_FLAGS] & SYN != 0)
}

/// What is asked of every packet first.
#[derive(Clone, Copy, Debug)]
enum Quick {
    /// Nothing: all are asked everything.
    Nothing,
    /// One address in this prefix of IPv4, before or after: value and mask, as they stand in packets. No other packet matches.
    V4(u32, u32),
    /// That it is IPv6: no other packet matches.
    V6,
}

impl Quick {
    fn of(filter: &TapFilter) -> Self {
        match filter.nets.first() {
            Some(IpNet::V4(net)) => {
                let [value, mask] = [net.network(), net.netmask()].map(|it| u32::from_ne_bytes(it.octets()));
                Self::V4(value, mask)
            }
            Some(IpNet::V6(_)) => Self::V6,
            None => Self::Nothing,
        }
    }

    /// Whether a packet may match: source and destination as they stand in its beginning, before and after.
    #[inline]
    fn may_match(self, before: &[u8; LINE], after: Option<&[u8; LINE]>) -> bool {
        let (value, mask) = match self {
            Self::V4(value, mask) => (value, mask),
            Self::V6 => return before[12..14] == [0x86, 0xdd],
            Self::Nothing => return true,
        };
        let is_in = |frame: &[u8; LINE]| {
            let address = |at: usize| u32::from_ne_bytes([frame[at], frame[at + 1], frame[at + 2], frame[at + 3]]);
            ((address(26) ^ value) & mask == 0) | ((address(30) ^ value) & mask == 0)
        };
        // What lies there in other packets is no address, but those are few, and asked again.
        is_in(before) | after.is_none_or(is_in)
    }
}

impl Tap {
    /// Captures what matches, into the ring, at most `rate` packets a second and `length` bytes of each.
    pub fn new(filter: TapFilter, ring: Arc<TapRing>, worker: WorkerId, length: usize, rate: u32) -> Self {
        let line = [[0; LINE]; MOST];
        let heads = Box::new(Heads { first: line, second: line, lengths: [0; MOST], long: Packets::default() });
        let quick = Quick::of(&filter);
        Self { filter, quick, ring, worker, length, rate, left: rate, second: 0, heads, looked_at: 0 }
    }

    /// Looks at a batch that has come in.
    #[inline]
    pub fn before(&mut self, batch: &Batch, now: Tick) {
        let second = now.0 / 1000;
        if second != self.second {
            (self.second, self.left) = (second, self.rate);
        }
        (self.looked_at, self.heads.long) = (0, Packets::default());
        if self.left == 0 || self.ring.free.is_empty() {
            self.ring.missed.fetch_add(batch.len() as u64, Relaxed);
            return;
        }
        for (i, received) in batch.frames.iter().take(MOST).enumerate() {
            self.heads.keep(i, &received.frame);
        }
        self.looked_at = batch.len();
    }

    /// Looks at the same batch again, when all has been decided about it.
    #[inline]
    pub fn after(&mut self, batch: &Batch, now: Tick) {
        let quick = self.quick;
        for (i, received) in batch.frames.iter().take(self.looked_at).enumerate() {
            if quick.may_match(&self.heads.first[i], received.frame.line()) && self.is_wanted(batch, i) {
                self.copy(batch, i, now);
            }
        }
    }

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
        // Addresses and ports of both families are in the first line.
        let came = Glimpse::of(self.heads.of(i).0);
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
        let (bytes, verdict) = (received.frame.bytes(), batch.verdicts[i]);
        let (length, (first, second)) = (usize::from(self.heads.lengths[i]), self.heads.of(i));
        let kept = first.len() + second.len();
        place.before.clear();
        place.before.extend_from_slice(&first[..first.len().min(self.length)]);
        place.before.extend_from_slice(&second[..second.len().min(self.length.saturating_sub(LINE))]);
        // What lies behind is as it came, and at the packet's end, unless the packet has become another one.
        if !matches!(verdict, Verdict::Answer(_)) && bytes.len() >= length - kept {
            let tail = &bytes[bytes.len() - (length - kept)..];
            place.before.extend_from_slice(&tail[..tail.len().min(self.length.saturating_sub(kept))]);
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
