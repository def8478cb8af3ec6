//! A tap on a worker's packets: each that matches is copied as it came and as it goes on, with its verdict.
//!
//! The stages write into packets, so the heads of those that may match are copied before. What takes the short way has its addresses
//! before and after at hand there, in its key and in its session: who is near by them takes the long way, and all that do are copied,
//! and asked everything afterwards. How many are captured a second is limited, and while the limit is reached, or no place is free,
//! nothing is looked at. Memory comes from whoever captures, and goes around.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;
use ipnet::IpNet;

use super::glimpse::Glimpse;
use crate::address::{Address, V6};
use crate::batch::{Batch, Lane, MOST, Packets};
use crate::counters::{Direction, DropReason};
use crate::io::InterfaceId;
use crate::ports::pool::WorkerId;
use crate::time::Tick;
use crate::verdict::Verdict;
use crate::wire::ethernet;

/// Bytes of a packet that the stages may write to: link, IPv6 and TCP with all its options.
const HEAD: usize = 128;

const V4: usize = <u32 as Lane>::FAMILY;

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
    asked: Asked,
    is_silent: bool,
    ring: Arc<TapRing>,
    worker: WorkerId,
    /// Bytes of a packet that are copied at most.
    length: usize,
    /// Packets a second, and how many are left of them in this one.
    rate: u32,
    left: u32,
    second: u32,
    /// Those of the batch's packets that may match, and their heads and lengths as they came.
    chosen: Packets,
    heads: Box<[[u8; HEAD]; MOST]>,
    lengths: [u16; MOST],
}

/// What packets on the short way are asked, in each family.
#[derive(Clone, Copy, Debug)]
struct Asked {
    v4: Near,
    v6: Near,
}

/// Which packets on the short way may match.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// None.
    Nobody,
    /// Those that have an address in this, before or after.
    In(Prefix),
    /// Each.
    Everybody,
}

/// A prefix, twice, as [`Address::pair_words`] gives addresses.
#[derive(Clone, Copy, Debug)]
pub struct Prefix {
    first: [u64; 4],
    mask: [u64; 4],
}

impl Prefix {
    /// Whether one of two addresses, as they stand in packets, is in it.
    #[inline]
    pub fn has<A: Address>(&self, pair: [A; 2]) -> bool {
        let mut words = A::pair_words(pair[0], pair[1]);
        for ((word, first), mask) in words.iter_mut().zip(self.first).zip(self.mask) {
            *word = (*word ^ first) & mask;
        }
        A::has_zero(words)
    }
}

impl Near {
    fn of<A: Address>(filter: &TapFilter) -> Self {
        let Some(net) = filter.nets.first() else { return Self::Everybody };
        let Some(first) = A::from_ip(net.network()) else { return Self::Nobody };
        let twice = |address: A| A::pair_words(address.in_packet_order(), address.in_packet_order());
        let (first, last) = (twice(first), twice(first.last_of_prefix(net.prefix_len())));
        let mut mask = first;
        mask.iter_mut().zip(last).for_each(|(word, last)| *word = !(*word ^ last));
        Self::In(Prefix { first, mask })
    }
}

impl Tap {
    /// Captures what matches, into the ring, at most `rate` packets a second and `length` bytes of each.
    pub fn new(filter: TapFilter, ring: Arc<TapRing>, worker: WorkerId, length: usize, rate: u32) -> Self {
        let asked = Asked { v4: Near::of::<u32>(&filter), v6: Near::of::<V6>(&filter) };
        let (heads, lengths) = (Box::new([[0; HEAD]; MOST]), [0; MOST]);
        let chosen = Packets::default();
        Self {
            filter,
            asked,
            is_silent: false,
            ring,
            worker,
            length,
            rate,
            left: rate,
            second: 0,
            chosen,
            heads,
            lengths,
        }
    }

    /// Looks at a batch whose headers were read, and nothing more: at those packets that are not plain.
    pub fn begin(&mut self, batch: &Batch, now: Tick) {
        let second = now.0 / 1000;
        if second != self.second {
            (self.second, self.left) = (second, self.rate);
        }
        self.chosen = Packets::default();
        self.is_silent = self.left == 0 || self.ring.free.is_empty();
        if self.is_silent {
            self.ring.missed.fetch_add(batch.len() as u64, Relaxed);
            return;
        }
        for i in Packets::first(batch.len()).without(batch.plain) {
            self.keep(i, batch.frames[i].frame.bytes());
        }
    }

    /// Looks at plain packets that went into a tunnel untranslated: they stand at their frames' ends, as they came.
    pub fn travelling<A: Lane>(&mut self, batch: &Batch) {
        let near = self.near::<A>();
        for i in batch.plain.and(batch.families[A::FAMILY]).without(batch.open) {
            let may_match = match near {
                Near::Nobody => false,
                Near::In(prefix) => prefix.has(A::keys(batch)[i].in_packet().0),
                Near::Everybody => true,
            };
            if may_match {
                let bytes = batch.frames[i].frame.bytes();
                let length = ethernet::HEADER + usize::from(batch.heads[i].length);
                self.keep(i, &bytes[bytes.len().saturating_sub(length)..]);
            }
        }
    }

    /// Which packets must not take the short way.
    pub fn near<A: Lane>(&self) -> Near {
        match A::FAMILY {
            _ if self.is_silent => Near::Nobody,
            V4 => self.asked.v4,
            _ => self.asked.v6,
        }
    }

    /// Looks at the plain packets that the short way has left, to which nothing has happened yet.
    pub fn left(&mut self, batch: &Batch) {
        if self.is_silent {
            return;
        }
        for i in batch.plain.and(batch.open) {
            self.keep(i, batch.frames[i].frame.bytes());
        }
    }

    fn keep(&mut self, i: usize, bytes: &[u8]) {
        let kept = bytes.len().min(HEAD);
        self.heads[i][..kept].copy_from_slice(&bytes[..kept]);
        self.lengths[i] = bytes.len() as u16;
        self.chosen.insert(i);
    }

    /// What is kept of a packet.
    fn head(&self, i: usize) -> &[u8] {
        &self.heads[i][..usize::from(self.lengths[i]).min(HEAD)]
    }

    /// Looks at nothing of a batch that no stage has seen.
    pub fn skip(&mut self) {
        self.chosen = Packets::default();
    }

    /// Looks at the chosen packets again, when all has been decided about them.
    pub fn after(&mut self, batch: &Batch, now: Tick) {
        for i in self.chosen {
            if self.is_wanted(batch, i) {
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
        let came = Glimpse::of(self.head(i));
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
        let (length, head) = (usize::from(self.lengths[i]), self.head(i));
        place.before.clear();
        place.before.extend_from_slice(&head[..head.len().min(self.length)]);
        // What lies behind is as it came, and at the packet's end, unless the packet has become another one.
        if !matches!(verdict, Verdict::Answer(_)) && bytes.len() >= length - head.len() {
            let tail = &bytes[bytes.len() - (length - head.len())..];
            place.before.extend_from_slice(&tail[..tail.len().min(self.length.saturating_sub(head.len()))]);
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
