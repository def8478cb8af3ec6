//! A tap on a worker's packets: each that matches is copied as it came and as it goes on, with its verdict.
//!
//! The stages write into packets, so the heads of those that may match are copied before. What takes the short way has
//! addresses, ports and protocol at hand there, in its key and in its session: who is near by them takes the long way, and all that do are
//! copied, and asked everything afterwards. How many are captured a second is limited, and while the limit is reached, or no place is free,
//! nothing is looked at. Memory comes from whoever captures, and goes around.

mod filter;
mod near;
mod ring;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vipgate_mem::prefetch_read;

use self::filter::Passed;
pub use self::filter::{Outcome, TapFilter};
use self::near::Asked;
pub use self::near::{Near, Pattern};
pub use self::ring::{Captured, TapRing};
use crate::batch::{Batch, Kind, Lane, MOST, Packets};
use crate::counters::Direction;
use crate::ports::pool::WorkerId;
use crate::session::Sessions;
use crate::session::table::Table;
use crate::time::Tick;
use crate::verdict::Verdict;
use crate::wire::ethernet;

/// Bytes of a packet that the stages may write to: link, IPv6 and TCP with all its options.
const HEAD: usize = 128;

const V4: usize = <u32 as Lane>::FAMILY;

/// What a worker captures, and where to.
#[derive(Debug)]
pub struct Tap {
    filter: TapFilter,
    asked: Asked,
    is_silent: bool,
    ring: Arc<TapRing>,
    /// Where the next packet will stand. It is fetched while the packet is on its way: places are cold.
    next: Option<Box<Captured>>,
    worker: WorkerId,
    /// Bytes of a packet that are copied at most.
    length: usize,
    /// Packets a second, and how many are left of them in this one.
    rate: u32,
    left: u32,
    second: u32,
    /// Those of the batch's packets that may match, and their heads and lengths as they came.
    chosen: Packets,
    /// Those among them that match only if they are answered, or go into a tunnel.
    far: Packets,
    heads: Box<[[u8; HEAD]; MOST]>,
    lengths: Box<[u16; MOST]>,
}

impl Tap {
    /// Captures what matches, into the ring, at most `rate` packets a second and `length` bytes of each.
    pub fn new(filter: TapFilter, ring: Arc<TapRing>, worker: WorkerId, length: usize, rate: u32) -> Self {
        let asked = Asked::by(&filter);
        let (heads, lengths) = (Box::new([[0; HEAD]; MOST]), Box::new([0; MOST]));
        let (chosen, far) = Default::default();
        Self {
            filter,
            asked,
            is_silent: false,
            ring,
            next: None,
            worker,
            length,
            rate,
            left: rate,
            second: 0,
            chosen,
            far,
            heads,
            lengths,
        }
    }

    /// Looks at a batch whose headers were read, and nothing more: at those packets that are not plain.
    #[inline]
    pub fn begin(&mut self, batch: &Batch, now: Tick) {
        let second = now.0 / 1000;
        if second != self.second {
            (self.second, self.left) = (second, self.rate);
        }
        (self.chosen, self.far) = Default::default();
        self.is_silent = self.left == 0 || !self.has_place();
        if self.is_silent {
            self.ring.missed.fetch_add(batch.len() as u64, Relaxed);
            return;
        }
        for i in Packets::first(batch.len()).without(batch.plain) {
            self.keep(i, batch.frames[i].frame.bytes());
        }
    }

    /// Looks at plain packets that went into a tunnel untranslated: they stand at their frames' ends, as they came.
    #[inline]
    pub fn travelling<A: Lane>(&mut self, batch: &Batch) {
        let packets = batch.plain.and(batch.families[A::FAMILY]).without(batch.open);
        if !self.is_silent && !packets.is_empty() {
            self.keep_travelling::<A>(batch, packets);
        }
    }

    #[inline(never)]
    fn keep_travelling<A: Lane>(&mut self, batch: &Batch, packets: Packets) {
        let asked = *self.asked::<A>();
        for i in packets {
            let bytes = batch.frames[i].frame.bytes();
            if asked.is_near_as_it_is(&A::keys(batch)[i]) || self.filter.may_want(bytes) {
                let length = ethernet::HEADER + usize::from(batch.heads[i].length);
                self.keep(i, &bytes[bytes.len().saturating_sub(length)..]);
            }
        }
    }

    fn asked<A: Lane>(&self) -> &Near {
        if A::FAMILY == V4 { &self.asked.v4 } else { &self.asked.v6 }
    }

    /// Which packets must not take the short way. Nobody is dropped there.
    #[inline]
    pub fn near<A: Lane>(&self) -> &Near {
        if self.is_silent || self.filter.outcome.is_drop() { &Near::Nobody } else { self.asked::<A>() }
    }

    /// Looks at the plain packets that the short way has left, to which nothing has happened yet but that their sessions were found.
    #[inline]
    pub fn left<A: Lane>(&mut self, batch: &Batch, left: Packets, sessions: &Sessions) {
        let packets = left.and(batch.families[A::FAMILY]);
        if !self.is_silent && !packets.is_empty() {
            self.keep_left::<A>(batch, packets, A::table(sessions));
        }
    }

    #[inline(never)]
    fn keep_left<A: Lane>(&mut self, batch: &Batch, packets: Packets, table: &Table<A>) {
        let asked = *self.asked::<A>();
        for i in packets {
            let begins = batch.heads[i].kind == Kind::Tcp && batch.segments[i].flags.is_rare();
            // Its session says where it goes, unless it begins anew.
            let is_far = if batch.known.contains(i) && !begins {
                !asked.is_near(&A::keys(batch)[i], table.entry(batch.slots[i]))
            } else {
                matches!(asked, Near::Nobody)
            };
            if is_far {
                self.far.insert(i);
            }
            self.keep(i, batch.frames[i].frame.bytes());
        }
    }

    #[inline(never)]
    fn keep(&mut self, i: usize, bytes: &[u8]) {
        let kept = bytes.len().min(HEAD);
        self.heads[i][..kept].copy_from_slice(&bytes[..kept]);
        self.lengths[i] = bytes.len() as u16;
        self.chosen.insert(i);
        if let Some(place) = &self.next {
            place.fetch();
        }
    }

    /// What is kept of a packet.
    fn head(&self, i: usize) -> &[u8] {
        &self.heads[i][..usize::from(self.lengths[i]).min(HEAD)]
    }

    /// Whether there is one for the next packet.
    #[inline]
    fn has_place(&mut self) -> bool {
        if self.next.is_none() {
            self.next = self.ring.free.pop();
        }
        self.next.is_some()
    }

    /// Looks at nothing of a batch that no stage has seen.
    #[inline]
    pub fn skip(&mut self) {
        self.chosen = Packets::default();
    }

    /// Looks at the chosen packets again, when all has been decided about them.
    #[inline]
    pub fn after(&mut self, batch: &Batch, now: Tick) {
        if !self.chosen.is_empty() {
            self.take_wanted(batch, now);
        }
    }

    #[inline(never)]
    fn take_wanted(&mut self, batch: &Batch, now: Tick) {
        for i in self.chosen {
            let (received, verdict) = (&batch.frames[i], batch.verdicts[i]);
            let after = is_sent(verdict).then_some(received.frame.bytes());
            // Whoever answers, and the ends of a tunnel, have addresses of their own.
            let is_answer = matches!(verdict, Verdict::Answer(_));
            let inside = after.filter(|_| !is_answer).and_then(|after| inside(after, self.lengths[i].into()));
            if self.far.contains(i) && !is_answer && inside.is_none() {
                continue;
            }
            let (direction, interface) = (direction(batch, i), received.interface);
            let passed = Passed { verdict, direction, interface, before: self.head(i), after, inside };
            if self.filter.wants(&passed) {
                self.copy(batch, i, now);
            }
        }
    }

    #[cold]
    fn copy(&mut self, batch: &Batch, i: usize, now: Tick) {
        let has_place = self.left > 0 && self.has_place();
        let Some(mut place) = self.next.take_if(|_| has_place) else {
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
        (place.verdict, place.direction) = (verdict, direction(batch, i));
        place.out = match verdict {
            Verdict::Forward(out) | Verdict::Cut(out) | Verdict::Answer(out) => Some(out),
            Verdict::Wait(_) => Some(batch.wanted[i].interface),
            Verdict::Undecided
            | Verdict::CutIntoTunnel
            | Verdict::HandOff(_)
            | Verdict::Heard
            | Verdict::Park
            | Verdict::Defer(_)
            | Verdict::Requeue
            | Verdict::Around
            | Verdict::Drop(_) => None,
        };
        place.is_first = received.frame.mark() == 0;
        // Places that are out can't be more than there is room for.
        let _ = self.ring.full.push(place);
        if self.has_place()
            && let Some(place) = &self.next
        {
            prefetch_read(std::slice::from_ref(&**place), 0);
        }
    }
}

/// Whether a packet is written as it goes on.
fn is_sent(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Forward(_)
        | Verdict::Cut(_)
        | Verdict::CutIntoTunnel
        | Verdict::Answer(_)
        | Verdict::Wait(_)
        | Verdict::Around => true,
        Verdict::Undecided
        | Verdict::HandOff(_)
        | Verdict::Heard
        | Verdict::Park
        | Verdict::Defer(_)
        | Verdict::Requeue
        | Verdict::Drop(_) => false,
    }
}

/// Which way a packet counts. Answers have none, and who wasn't sent on neither.
fn direction(batch: &Batch, i: usize) -> Option<Direction> {
    let verdict = batch.verdicts[i];
    (is_sent(verdict) && !matches!(verdict, Verdict::Answer(_))).then_some(batch.directions[i])
}

/// What is in a packet that has gone into a tunnel, of which so many bytes came: nothing else makes packets longer, and it stands at the
/// end.
fn inside(packet: &[u8], came: usize) -> Option<&[u8]> {
    packet.len().checked_sub(came).filter(|&longer| longer > 0).map(|longer| &packet[longer..])
}
