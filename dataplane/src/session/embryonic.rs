//! Embryonic sessions: unconfirmed inbound sessions, in the order in which they opened. They are the first to be
//! evicted when a flood opens more of them than one VIP may have, or the table is nearly full. Confirmed sessions are
//! never touched.
//!
//! The queue isn't updated when a session is confirmed or ends; its head is checked when it is dequeued. Eviction runs
//! between batches, so no slot that a packet of a batch refers to is freed.

use std::collections::VecDeque;

use super::entry::Flags;
use super::{Ended, SessionFamily, Sessions};
use crate::flow::address::V6;
use crate::flow::direction::Direction;
use crate::flow::ids::{MAX_VIPS, Slot, VipId};
use crate::flow::tuple::Tuple;
use crate::io::batch;
use crate::session::end_reason::EndReason;
use crate::session::{Accounting, Expiry};

/// Sessions that one call checks at most: more than a batch can open.
const MAX_CHECKS: usize = 2 * batch::BATCH_SIZE;
/// Sessions of VIPs below the average that one call spares before it evicts regardless of the VIP.
const MAX_SPARED: usize = batch::BATCH_SIZE / 4;

#[derive(Clone, Copy, Debug)]
struct Candidate {
    slot: Slot,
    /// Distinguishes the session from a later one in the same slot.
    fingerprint: u32,
    vip: VipId,
    v6: bool,
}

/// Short fingerprint of an original-direction tuple.
fn fingerprint<A: SessionFamily>(origin: &Tuple<A>) -> u32 {
    let ports = u32::from(origin.source_port) << 16 | u32::from(origin.destination_port);
    origin.source.mix() ^ ports
}

/// Prefetch steps for sessions that are about to be evicted: each needs what the one before has fetched.
#[derive(Clone, Copy, Debug)]
enum Step {
    Entry,
    Twin,
    Home,
}

/// Unconfirmed inbound sessions of one worker.
#[derive(Debug)]
pub struct Embryonic {
    queue: VecDeque<Candidate>,
    /// Capacity of the queue.
    capacity: usize,
    /// Sessions in the queue, by VIP.
    counts: Box<[u32]>,
    /// Limit per VIP.
    max_per_vip: u32,
    /// Sessions above the limit, of all VIPs together.
    excess: u32,
}

impl Embryonic {
    /// Queue for a worker with `capacity` sessions; one VIP may have `max_per_vip` unconfirmed ones.
    pub fn new(capacity: u32, max_per_vip: u32) -> Self {
        let capacity = capacity as usize / 2 + 2 * batch::BATCH_SIZE;
        let counts = vec![0; MAX_VIPS].into();
        Self { queue: VecDeque::with_capacity(capacity), capacity, counts, max_per_vip: max_per_vip.max(1), excess: 0 }
    }

    /// Enqueues an inbound session that has just opened.
    pub fn push<A: SessionFamily>(&mut self, slot: Slot, origin: &Tuple<A>, vip: VipId) {
        debug_assert!(self.queue.len() < self.capacity, "capacity for more than a batch was freed before");
        if self.queue.len() < self.capacity {
            self.enqueue(Candidate { slot, fingerprint: fingerprint(origin), vip, v6: A::BITS == 128 });
        }
    }

    fn enqueue(&mut self, candidate: Candidate) {
        let count = &mut self.counts[usize::from(candidate.vip.0)];
        *count += 1;
        self.excess += u32::from(*count > self.max_per_vip);
        self.queue.push_back(candidate);
    }

    fn dequeue(&mut self) -> Option<(Candidate, bool)> {
        let candidate = self.queue.pop_front()?;
        let count = &mut self.counts[usize::from(candidate.vip.0)];
        let too_many = *count > self.max_per_vip;
        self.excess -= u32::from(too_many);
        *count -= 1;
        Some((candidate, too_many))
    }

    /// Whether another batch may not fit in the queue.
    fn is_full(&self) -> bool {
        self.queue.len() + batch::BATCH_SIZE > self.capacity
    }

    /// Whether another batch may not fit in the shared part of the table, or in the queue. The queue's last batch is
    /// spared: if the table is full of confirmed sessions, new ones need time to be confirmed, too.
    fn is_under_pressure(&self, sessions: &Sessions) -> bool {
        let is_table_full =
            self.queue.len() > batch::BATCH_SIZE && !sessions.has_shared_capacity_for(batch::BATCH_SIZE as u32);
        is_table_full || self.is_full()
    }

    /// Prefetches the entries of the next `count` sessions, for all of them before the first is evicted.
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

    /// Evicts the oldest sessions of VIPs above their limit, and, when another batch may not fit, the oldest of VIPs
    /// that have no fewer than the average. If that isn't enough, since a flood hits many VIPs, it evicts the oldest of
    /// all VIPs, except for as many as the reserve holds: before any established session is evicted for them.
    pub fn evict(&mut self, sessions: &mut Sessions, accounting: &mut impl Accounting) {
        let min_queue = batch::BATCH_SIZE.max(sessions.reserve() as usize);
        self.evict_large(sessions, accounting, min_queue);
        if self.queue.len() > min_queue && self.is_under_pressure(sessions) {
            self.fetch(sessions, batch::BATCH_SIZE);
        }
        for _ in 0..MAX_CHECKS {
            if self.queue.len() <= min_queue || !self.is_under_pressure(sessions) {
                return;
            }
            let Some((candidate, _)) = self.dequeue() else { return };
            if check(sessions, candidate, false).is_some() {
                evict_candidate(sessions, candidate, accounting);
            }
        }
    }

    /// Evicts for VIPs above their limit or, under pressure, not below the average. Gives up if there are more than
    /// `min_queue` in the queue and all that it checks are of VIPs below the average.
    fn evict_large(&mut self, sessions: &mut Sessions, accounting: &mut impl Accounting, min_queue: usize) {
        let mut spared = 0;
        let expected = if self.is_under_pressure(sessions) {
            batch::BATCH_SIZE
        } else {
            (self.excess as usize).min(batch::BATCH_SIZE)
        };
        self.fetch(sessions, expected);
        for _ in 0..MAX_CHECKS {
            let is_under_pressure = self.is_under_pressure(sessions);
            if self.excess == 0 && (!is_under_pressure || (spared >= MAX_SPARED && self.queue.len() > min_queue)) {
                return;
            }
            let Some((candidate, too_many)) = self.dequeue() else { return };
            let check_share = is_under_pressure && !too_many && !self.is_full();
            let Some(is_large) = check(sessions, candidate, check_share) else { continue };
            if too_many || is_under_pressure && is_large {
                evict_candidate(sessions, candidate, accounting);
            } else {
                spared += 1;
                self.enqueue(candidate);
            }
        }
    }
}

/// See [`check_candidate`].
fn check(sessions: &Sessions, candidate: Candidate, check_share: bool) -> Option<bool> {
    if candidate.v6 {
        check_candidate::<V6>(sessions, candidate, check_share)
    } else {
        check_candidate::<u32>(sessions, candidate, check_share)
    }
}

fn evict_candidate(sessions: &mut Sessions, candidate: Candidate, accounting: &mut impl Accounting) {
    if candidate.v6 {
        evict::<V6>(sessions, candidate.slot, accounting);
    } else {
        evict::<u32>(sessions, candidate.slot, accounting);
    }
}

/// Prefetches one step of one session.
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

/// Whether a session's VIP has no fewer than the average, if `check_share`; `None` unless the session is still open and
/// unconfirmed.
fn check_candidate<A: SessionFamily>(
    sessions: &Sessions,
    Candidate { slot, fingerprint: own, .. }: Candidate,
    check_share: bool,
) -> Option<bool> {
    let table = A::table(sessions);
    let entry = table.entry(slot);
    let is_unconfirmed = table.is_occupied(slot)
        && entry.direction() == Direction::Inbound
        && entry.flags().has(Flags::ORIGIN)
        && !entry.flags().has(Flags::QUARANTINED)
        && !entry.is_confirmed()
        && fingerprint(&entry.key()) == own;
    is_unconfirmed.then(|| !check_share || sessions.is_above_average::<A>(slot))
}

fn evict<A: SessionFamily>(sessions: &mut Sessions, slot: Slot, accounting: &mut impl Accounting) {
    let ended: Ended<A> = sessions.remove(slot);
    accounting.release(&Expiry::Ended(EndReason::Evicted, ended));
}
