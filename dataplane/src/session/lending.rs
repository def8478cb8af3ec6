//! Lending: `sessions.capacity` is of all workers together, and each has a table for a part of it. A worker whose part
//! is full hands the first packet of a new session off to one with free slots, which opens the session and owns its
//! flow from then on (see flow_directory.rs). If no worker has any, the packet goes to the one with the highest fair
//! shares: who loses a session there has more than who would lose one here. So a flood that has filled free slots
//! everywhere gives way before holders who are large at one worker alone.
//!
//! Each worker has one word that says how full it is: written between batches, and read only by workers that are full.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::utils::CachePadded;

use super::admission::Admission;
use super::fairness::Holder;
use super::{SessionFamily, Sessions};
use crate::flow::ids::{Slot, WorkerId};
use crate::flow::sync::AtomicU64;
use crate::io::batch;
use crate::io::metadata::MAX_WORKERS_TRIED;

/// Free slots with which a worker that was full lends again, in a large table: fewer may be in use before the packets
/// for them arrive.
const MIN_FREE_SLOTS: u32 = batch::BATCH_SIZE as u32;
/// The same as a part of a small table.
const MIN_FREE_PART: u32 = 16;
/// First packets of holders at their share that a full worker hands off per batch although no other has a free slot:
/// there their holders may have less. The rest of a flood is rejected at once, and takes no other worker's time.
const MAX_RETRIES: u32 = 8;

/// Fair shares at a worker, in sessions: of a VIP, and of a member of it. A holder above both loses sessions there
/// for new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shares {
    vip: u32,
    member: u32,
}

impl Shares {
    /// At a worker with free slots: nobody loses a session.
    const FREE: Self = Self { vip: u32::MAX, member: u32::MAX };
    /// At a full worker where no session has been evicted for another one yet.
    const UNKNOWN: Self = Self { vip: u32::MAX, member: u32::MAX - 1 };

    fn from_word(word: u64) -> Self {
        Self { vip: (word >> 32) as u32, member: word as u32 }
    }

    fn to_word(self) -> u64 {
        u64::from(self.vip) << 32 | u64::from(self.member)
    }

    /// Whether shares are higher than others by more than an eighth: less isn't worth a hand-off of each packet of the
    /// session. VIPs come first, as in fairness.rs.
    fn exceed(self, other: Self) -> bool {
        let exceeds = |one: u32, other: u32| u64::from(one) * 8 > u64::from(other) * 9;
        exceeds(self.vip, other.vip) || (!exceeds(other.vip, self.vip) && exceeds(self.member, other.member))
    }
}

/// The words of all workers.
#[derive(Debug)]
pub struct WorkerShares(Box<[CachePadded<AtomicU64>]>);

impl WorkerShares {
    /// Of so many workers, all with free slots.
    pub fn new(workers: u8) -> Self {
        Self((0..workers).map(|_| CachePadded::new(AtomicU64::new(Shares::FREE.to_word()))).collect())
    }

    fn word(&self, worker: WorkerId) -> Option<&AtomicU64> {
        self.0.get(usize::from(worker.0)).map(|word| &**word)
    }

    fn get(&self, worker: WorkerId) -> Shares {
        Shares::from_word(self.word(worker).map_or(0, |word| word.load(Relaxed)))
    }

    fn set(&self, worker: WorkerId, shares: Shares) {
        if let Some(word) = self.word(worker).filter(|word| word.load(Relaxed) != shares.to_word()) {
            word.store(shares.to_word(), Relaxed);
        }
    }
}

/// A worker that may open a session in place of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lender {
    pub worker: WorkerId,
    /// Its distance from the other one in the ring of workers. Those between are not tried.
    pub distance: u8,
}

impl Lender {
    /// The worker at a distance from another one in the ring.
    pub fn behind(this: WorkerId, distance: u8, workers: u8) -> Self {
        let worker = (u16::from(this.0) + u16::from(distance)) % u16::from(workers.max(1));
        Self { worker: WorkerId(worker as u8), distance }
    }

    /// Greatest distance in a ring of workers for a packet for which some have been tried.
    pub fn max_distance(workers: u8, tried: u8) -> u8 {
        workers.saturating_sub(1).min(MAX_WORKERS_TRIED).saturating_sub(tried)
    }
}

/// One worker's part in lending.
#[derive(Debug)]
pub(super) struct Lending {
    workers: Arc<WorkerShares>,
    this: WorkerId,
    /// As published.
    shares: Shares,
    /// Holder of the last session that was evicted for another one since this worker has been full.
    victim: Option<Holder>,
    /// Hand-offs of rejected packets that are left to this batch, of [`MAX_RETRIES`].
    retries: Cell<u32>,
}

impl Lending {
    fn lender(&self, admission: Admission, tried: u8) -> Option<Lender> {
        let count = self.workers.0.len() as u8;
        let left = Lender::max_distance(count, tried);
        let others = (1..=left).map(|distance| Lender::behind(self.this, distance, count));
        if let Some(free) = others.clone().find(|other| self.workers.get(other.worker) == Shares::FREE) {
            return Some(free);
        }
        let is_rejected = admission == Admission::Rejected;
        if is_rejected && left > 0 {
            self.retries.set(self.retries.get().checked_sub(1)?);
        }
        // Once per packet: what is rejected where shares are highest has its share.
        let highest = if tried == 0 { self.highest(others) } else { None };
        highest.or_else(|| (is_rejected && left > 0).then(|| Lender::behind(self.this, 1, count)))
    }

    /// The worker with the highest shares, unless it is this one.
    fn highest(&self, others: impl Iterator<Item = Lender>) -> Option<Lender> {
        let own = if self.shares == Shares::FREE { Shares::UNKNOWN } else { self.shares };
        let (highest, _) = others.fold((None, own), |(best, highest), other| {
            let shares = self.workers.get(other.worker);
            if shares.exceed(highest) { (Some(other), shares) } else { (best, highest) }
        });
        highest
    }
}

impl Sessions {
    /// Lends free slots to the other workers, and uses theirs.
    #[must_use]
    pub fn with_lending(mut self, workers: Arc<WorkerShares>, this: WorkerId) -> Self {
        let (shares, retries) = (Shares::FREE, Cell::new(0));
        self.lending = Some(Lending { workers, this, shares, victim: None, retries });
        self.publish_shares();
        self
    }

    /// The worker to which a new session goes that has no place in the shared part of this table, but this admission,
    /// when so many workers have been tried before: one with a free slot, else one with higher shares. If it is
    /// rejected here, also the next one, where its holder may have less than its share. `None`: the admission holds.
    #[cold]
    pub fn lender(&self, admission: Admission, tried: u8) -> Option<Lender> {
        self.lending.as_ref()?.lender(admission, tried)
    }

    /// Notes that a session of a holder above its share is evicted for another one.
    pub(super) fn note_eviction<A: SessionFamily>(&mut self, slot: Slot) {
        let holder = self.lending.is_some().then(|| self.holder::<A>(slot));
        if let Some(lending) = &mut self.lending {
            lending.victim = holder;
        }
    }

    /// Publishes whether this worker has free slots, and if not, its shares. Called between batches.
    pub(super) fn publish_shares(&mut self) {
        let Some(lending) = &self.lending else { return };
        let was_free = lending.shares == Shares::FREE;
        let needed = if was_free { 1 } else { (self.shared_capacity() / MIN_FREE_PART).clamp(1, MIN_FREE_SLOTS) };
        let is_free = self.has_shared_capacity_for(needed);
        let victim = lending.victim.filter(|_| !is_free);
        let shares = match victim.and_then(|victim| self.fairness.shares(victim)) {
            _ if is_free => Shares::FREE,
            Some((vip, member)) => Shares { vip, member },
            None => Shares::UNKNOWN,
        };
        // Of the table before the next batch.
        self.fairness.invalidate_levels();
        // Without fair shares nobody may have less elsewhere.
        let retries = if self.reserve == 0 { 0 } else { MAX_RETRIES };
        let Some(lending) = &mut self.lending else { return };
        (lending.shares, lending.victim) = (shares, victim);
        lending.retries.set(retries);
        lending.workers.set(lending.this, shares);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::flow::time::Tick;
    use crate::session::tests::{draft, sessions};

    const FULL: Shares = shares(100, 100);

    const fn shares(vip: u32, member: u32) -> Shares {
        Shares { vip, member }
    }

    /// A worker among others with these shares.
    fn lending(this: u8, all: &[Shares]) -> Lending {
        let workers = WorkerShares::new(all.len() as u8);
        for (worker, shares) in (0..).map(WorkerId).zip(all) {
            workers.set(worker, *shares);
        }
        let (shares, retries) = (all[usize::from(this)], Cell::new(MAX_RETRIES));
        Lending { workers: Arc::new(workers), this: WorkerId(this), shares, victim: None, retries }
    }

    /// The number of the lender, and its distance.
    fn lender(lending: &Lending, admission: Admission, tried: u8) -> Option<(u8, u8)> {
        lending.lender(admission, tried).map(|lender| (lender.worker.0, lender.distance))
    }

    #[test]
    fn the_next_worker_with_a_free_slot_lends_it() {
        for admission in [Admission::Reserved, Admission::Rejected] {
            let near = lending(2, &[Shares::FREE, FULL, FULL, Shares::FREE]);
            assert_eq!(lender(&near, admission, 0), Some((3, 1)));
            let far = lending(2, &[Shares::FREE, FULL, FULL, FULL]);
            assert_eq!((lender(&far, admission, 0), lender(&far, admission, 1)), (Some((0, 2)), Some((0, 2))));
            assert_eq!(lender(&far, admission, 3), None, "all were tried");
        }
        let far = lending(2, &[Shares::FREE, FULL, FULL, FULL]);
        assert_eq!(lender(&far, Admission::Reserved, 2), None, "the free one was tried");
        assert_eq!(lender(&far, Admission::Rejected, 2), Some((3, 1)), "the next one may have it below its share");
        assert_eq!(lender(&lending(0, &[FULL]), Admission::Rejected, 0), None, "a worker alone");
    }

    #[test]
    fn of_full_workers_the_one_with_the_highest_shares_takes_a_session() {
        let reserved = |all: &[Shares]| lender(&lending(0, all), Admission::Reserved, 0).map(|(worker, _)| worker);
        assert_eq!(reserved(&[FULL, shares(112, 112), shares(112, 100)]), None, "not by more than an eighth");
        assert_eq!(reserved(&[FULL, shares(113, 1), shares(200, 1), shares(150, 900)]), Some(2), "VIPs come first");
        assert_eq!(reserved(&[FULL, shares(110, 113), shares(90, 200)]), Some(1), "then members");
        assert_eq!(reserved(&[FULL, shares(80, 900)]), None);
        assert_eq!(reserved(&[FULL, shares(200, 200), Shares::UNKNOWN]), Some(2));
        assert_eq!(reserved(&[Shares::UNKNOWN, shares(200, 200), Shares::UNKNOWN]), None);
        let all = [FULL, shares(200, 200), shares(300, 300)];
        assert_eq!(lender(&lending(0, &all), Admission::Reserved, 1), None, "only once");
    }

    #[test]
    fn few_rejected_packets_of_a_batch_are_retried() {
        let lending = lending(0, &[FULL, FULL, FULL]);
        let retried = (0..100).filter(|_| {
            assert_eq!(lender(&lending, Admission::Reserved, 0), None);
            lender(&lending, Admission::Rejected, 0) == Some((1, 1))
        });
        assert_eq!(retried.count(), MAX_RETRIES as usize);
    }

    /// A table of 2048 sessions, worker 1 of two, in which this many are open.
    fn filled(count: u16) -> Sessions {
        let workers = Arc::new(WorkerShares::new(2));
        let mut sessions = sessions(2048).with_reserve(128).with_lending(workers, WorkerId(1));
        for n in 0..count {
            sessions.commit(&draft(n, n), Tick(1000)).expect("a free slot");
        }
        sessions.publish_shares();
        sessions
    }

    fn published(sessions: &Sessions) -> Shares {
        sessions.lending.as_ref().expect("it lends").workers.get(WorkerId(1))
    }

    fn slot_of(sessions: &Sessions, n: u16) -> Slot {
        let origin = draft(n, n).origin;
        sessions.find(sessions.hash(&origin), &origin).expect("a session")
    }

    #[test]
    fn a_worker_that_was_full_lends_again_once_enough_slots_are_free() {
        assert_eq!(published(&filled(1919)), Shares::FREE);
        let mut sessions = filled(1920);
        assert_eq!(published(&sessions), Shares::UNKNOWN);
        for n in 0..MIN_FREE_SLOTS as u16 {
            assert_eq!(published(&sessions), Shares::UNKNOWN, "{n} free");
            let slot = slot_of(&sessions, n);
            sessions.end::<u32>(slot, Tick(1000));
            sessions.publish_shares();
        }
        assert_eq!(published(&sessions), Shares::FREE);
        for n in 2000..2000 + MIN_FREE_SLOTS as u16 {
            assert_eq!(published(&sessions), Shares::FREE, "{n}");
            sessions.commit(&draft(n, n), Tick(1000)).expect("a free slot");
            sessions.publish_shares();
        }
        assert_eq!(published(&sessions), Shares::UNKNOWN);
    }

    #[test]
    fn shares_are_those_of_the_last_victim_with_one_more_session() {
        let mut sessions = filled(1920);
        sessions.note_eviction::<u32>(slot_of(&sessions, 7));
        sessions.publish_shares();
        assert_eq!(published(&sessions), shares(1919, 1919));
        let slot = slot_of(&sessions, 7);
        sessions.end::<u32>(slot, Tick(1000));
        sessions.publish_shares();
        assert_eq!(published(&sessions).vip, u32::MAX, "one more session would displace nobody");
    }
}
