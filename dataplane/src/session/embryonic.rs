//! Clients' sessions that nobody has confirmed yet, in the order in which they opened: the first to go when a flood opens more
//! of them than one VIP may have, or the table is nearly full. Sessions that were confirmed are never touched.
//!
//! The queue isn't told when a session is confirmed or ends; whoever comes to its head is looked at then. All of it happens
//! between batches, so nothing that a packet has found is taken away from it.

use std::collections::VecDeque;

use super::entry::{Flags, Slot};
use super::tuple::Tuple;
use super::{Ended, SessionFamily, Sessions};
use crate::address::V6;
use crate::batch;
use crate::counters::{Direction, EndReason};
use crate::session::Expiry;
use crate::settle::Settle;
use crate::snapshot::build::MOST_VIPS;
use crate::snapshot::policy::VipId;

/// Sessions that one call looks at most at: more than a batch can open.
const AT_ONCE: usize = 2 * batch::MOST;
/// Sessions of VIPs that have less than others that one call leaves alone, where others must go all the same.
const SPARED_AT_ONCE: usize = batch::MOST / 4;

#[derive(Clone, Copy, Debug)]
struct Candidate {
    slot: Slot,
    /// Tells the session from another one that has its slot later.
    print: u32,
    vip: VipId,
    v6: bool,
}

/// A session's first packet in few bits.
fn print<A: SessionFamily>(origin: &Tuple<A>) -> u32 {
    let ports = u32::from(origin.source_port) << 16 | u32::from(origin.destination_port);
    origin.source.spread() ^ ports
}

/// What is fetched of sessions that are about to end: each step needs what the one before it has fetched.
#[derive(Clone, Copy, Debug)]
enum Step {
    Entry,
    Twin,
    Home,
}

/// The unconfirmed sessions of one worker.
#[derive(Debug)]
pub struct Embryonic {
    queue: VecDeque<Candidate>,
    /// Candidates that fit.
    room: usize,
    /// How many a VIP has in the queue.
    counts: Box<[u32]>,
    /// How many it may have.
    most: u32,
    /// How many too many all VIPs have together.
    over: u32,
}

impl Embryonic {
    /// For a worker with `capacity` sessions, of which those to one VIP may be `most` while they aren't confirmed.
    pub fn new(capacity: u32, most: u32) -> Self {
        let room = capacity as usize / 2 + 2 * batch::MOST;
        let counts = vec![0; MOST_VIPS].into();
        Self { queue: VecDeque::with_capacity(room), room, counts, most: most.max(1), over: 0 }
    }

    /// A client has opened a session.
    pub fn push<A: SessionFamily>(&mut self, slot: Slot, origin: &Tuple<A>, vip: VipId) {
        debug_assert!(self.queue.len() < self.room, "room was made for more than a batch");
        if self.queue.len() < self.room {
            self.enqueue(Candidate { slot, print: print(origin), vip, v6: A::BITS == 128 });
        }
    }

    fn enqueue(&mut self, candidate: Candidate) {
        let count = &mut self.counts[usize::from(candidate.vip.0)];
        *count += 1;
        self.over += u32::from(*count > self.most);
        self.queue.push_back(candidate);
    }

    fn dequeue(&mut self) -> Option<(Candidate, bool)> {
        let candidate = self.queue.pop_front()?;
        let count = &mut self.counts[usize::from(candidate.vip.0)];
        let too_many = *count > self.most;
        self.over -= u32::from(too_many);
        *count -= 1;
        Some((candidate, too_many))
    }

    /// Whether the queue has hardly room for another batch.
    fn is_full(&self) -> bool {
        self.queue.len() + batch::MOST > self.room
    }

    /// Whether the table, without its reserve, or the queue has hardly room for another batch. The last ones stay: where the table is full of sessions
    /// that were confirmed, new ones need time to be, too.
    fn is_pressed(&self, sessions: &Sessions) -> bool {
        let is_crowded = self.queue.len() > batch::MOST && !sessions.has_room_for(batch::MOST as u32);
        is_crowded || self.is_full()
    }

    /// Fetches what the next `count` sessions are made of, for all of them before the first ends.
    fn fetch(&self, sessions: &Sessions, count: usize) {
        for step in [Step::Entry, Step::Twin, Step::Home] {
            for candidate in self.queue.iter().take(count) {
                if candidate.v6 {
                    fetch::<V6>(sessions, candidate.slot, step);
                } else {
                    fetch::<u32>(sessions, candidate.slot, step);
                }
            }
        }
    }

    /// Ends the oldest sessions of VIPs that have too many, and, when the table has hardly room for another batch, the oldest
    /// of VIPs that don't have less than others. Where that isn't enough, since a flood comes to many VIPs, the oldest of all go, but for as
    /// many as the reserve holds: before anybody's established session ends for them.
    pub fn make_room(&mut self, sessions: &mut Sessions, settle: &mut Settle<'_>) {
        let kept = batch::MOST.max(sessions.reserve() as usize);
        self.end_large(sessions, settle, kept);
        if self.queue.len() > kept && self.is_pressed(sessions) {
            self.fetch(sessions, batch::MOST);
        }
        for _ in 0..AT_ONCE {
            if self.queue.len() <= kept || !self.is_pressed(sessions) {
                return;
            }
            let Some((candidate, _)) = self.dequeue() else { return };
            if look_at(sessions, candidate, false).is_some() {
                end(sessions, candidate, settle);
            }
        }
    }

    /// The same for VIPs that have too many, or don't have less than others. With more than `kept` in the queue it gives up where all are
    /// of VIPs that have less.
    fn end_large(&mut self, sessions: &mut Sessions, settle: &mut Settle<'_>, kept: usize) {
        let mut spared = 0;
        let soon = if self.is_pressed(sessions) { batch::MOST } else { (self.over as usize).min(batch::MOST) };
        self.fetch(sessions, soon);
        for _ in 0..AT_ONCE {
            let is_pressed = self.is_pressed(sessions);
            if self.over == 0 && (!is_pressed || (spared >= SPARED_AT_ONCE && self.queue.len() > kept)) {
                return;
            }
            let Some((candidate, too_many)) = self.dequeue() else { return };
            let asks = is_pressed && !too_many && !self.is_full();
            let Some(is_large) = look_at(sessions, candidate, asks) else { continue };
            if too_many || is_pressed && is_large {
                end(sessions, candidate, settle);
            } else {
                spared += 1;
                self.enqueue(candidate);
            }
        }
    }
}

/// See [`look`].
fn look_at(sessions: &Sessions, candidate: Candidate, asks: bool) -> Option<bool> {
    if candidate.v6 { look::<V6>(sessions, candidate, asks) } else { look::<u32>(sessions, candidate, asks) }
}

fn end(sessions: &mut Sessions, candidate: Candidate, settle: &mut Settle<'_>) {
    if candidate.v6 {
        evict::<V6>(sessions, candidate.slot, settle);
    } else {
        evict::<u32>(sessions, candidate.slot, settle);
    }
}

/// The same for one session.
fn fetch<A: SessionFamily>(sessions: &Sessions, slot: Slot, step: Step) {
    let table = A::table(sessions);
    let entry = table.entry(slot);
    match step {
        Step::Entry => table.prefetch_slot(slot),
        Step::Twin => {
            table.prefetch(sessions.hash(&entry.key()));
            table.prefetch_slot(entry.twin());
        }
        Step::Home => drop(table.prefetch(sessions.hash(&table.entry(entry.twin()).key()))),
    }
}

/// Whether a client's session is one of a VIP that doesn't have less than others, if that is asked; `None` unless it is still open and
/// not confirmed.
fn look<A: SessionFamily>(
    sessions: &Sessions,
    Candidate { slot, print: own, .. }: Candidate,
    asks: bool,
) -> Option<bool> {
    let table = A::table(sessions);
    let entry = table.entry(slot);
    let is_unconfirmed = table.is_occupied(slot)
        && entry.direction() == Direction::Inbound
        && entry.flags().has(Flags::ORIGIN)
        && !entry.flags().has(Flags::QUARANTINED)
        && !entry.is_confirmed()
        && print(&entry.key()) == own;
    is_unconfirmed.then(|| !asks || sessions.is_large::<A>(slot))
}

fn evict<A: SessionFamily>(sessions: &mut Sessions, slot: Slot, settle: &mut Settle<'_>) {
    let ended: Ended<A> = sessions.remove(slot);
    settle.settle(&Expiry::Ended(EndReason::Evicted, ended));
}
