//! Eviction: restores the reserve of a full table. Holders above their fair share pay for the reserve that holders
//! below theirs have used: of a sample of sessions, unconfirmed ones end first, then closing, standby and established
//! ones, of equal rank the one idle for longest. A holder at or below its share loses nothing.
//!
//! The table is hashed with a secret key, so neighboring slots are a random sample, and a cursor that wraps around
//! visits all. Eviction runs between batches and scans a bounded number of slots; while it finds too few sessions, new
//! ones use the reserve.

use super::entry::Flags;
use super::standby::MAX_RECORDS_APPLIED;
use super::{Accounting, Expiry, SessionFamily, Sessions};
use crate::flow::address::V6;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::io::batch;
use crate::session::end_reason::EndReason;
use crate::session::query::SessionState;

/// Sessions that one run evicts at most: more than a batch can open.
const MAX_EVICTIONS: u32 = 2 * batch::BATCH_SIZE as u32;
/// Sessions that a victim is chosen from, and slots to scan for more than one of them.
const SAMPLE: u32 = 8;
const SAMPLE_SLOTS: u32 = 512;
/// Minimum and maximum of the slots that one run scans.
const MIN_SLOTS: u32 = 1 << 12;
const MAX_SLOTS: u32 = 1 << 14;
/// Slots to scan when only holders at their share are rejected, or standby sessions are in the reserve.
const FEW_SLOTS: u32 = 1 << 9;
/// Maximum of the back-off: runs without a search after a fruitless one; first one, then twice as many each time. A
/// search takes up to 21 µs, as long as 130 rejected packets (163 ns each): one in 33 full loops adds a sixteenth to
/// what these take. Those loops take a third of a millisecond, so the delay doesn't matter to a new session. Where
/// loops are longer or rarer, the next millisecond ends the back-off.
const MAX_SKIPPED: u32 = 32;
/// A session that is idle for so long is not in the middle of a handshake.
const MIN_IDLE_MS: u32 = 1_000;

/// Order of eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Unconfirmed,
    Closing,
    Standby,
    Established,
}

/// A session that may be evicted.
#[derive(Clone, Copy, Debug)]
struct Victim {
    slot: Slot,
    v6: bool,
    rank: Rank,
    idle_ms: u32,
}

/// Which sessions to evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Criterion {
    /// Sessions of holders above their share.
    OverShare,
    /// Those of them that are not established.
    OverShareCheap,
    /// Sessions that are not established, of holders that have no fewer than the average.
    Cheap,
    /// Quarantined sessions.
    Quarantined,
}

/// State of eviction.
#[derive(Debug, Default)]
pub struct Eviction {
    /// Next slot to scan: first those of IPv4, then those of IPv6.
    cursor: u32,
    /// Slots that this run may still scan.
    budget: u32,
    /// Packets rejected for a full table, as of the last run.
    refused: u64,
    back_off: BackOff,
}

/// Exponential back-off of searches for sessions that are not established.
#[derive(Debug, Default)]
struct BackOff {
    /// Runs to skip after the last search; 0: it has evicted some.
    interval: u32,
    /// Runs still to skip.
    remaining: u32,
    /// Time of the last search.
    searched: Tick,
}

impl BackOff {
    /// Whether this run skips the search. Called once per run.
    fn skips(&mut self, now: Tick) -> bool {
        if now != self.searched {
            self.remaining = 0;
        }
        let skips = self.remaining > 0;
        self.remaining -= u32::from(skips);
        skips
    }

    /// Notes how many sessions a search has evicted.
    fn note(&mut self, ended: u32, now: Tick) {
        self.interval = if ended > 0 { 0 } else { (2 * self.interval).clamp(1, MAX_SKIPPED) };
        (self.remaining, self.searched) = (self.interval, now);
    }
}

impl Eviction {
    /// Evicts sessions until the reserve is free again, and publishes how full the table is then. `refused` is how many
    /// packets have been rejected for a full table since start.
    pub fn restore_reserve(
        &mut self,
        sessions: &mut Sessions,
        refused: u64,
        accounting: &mut impl Accounting,
        now: Tick,
    ) {
        self.evict_excess(sessions, refused, accounting, now);
        sessions.publish_shares();
    }

    fn evict_excess(&mut self, sessions: &mut Sessions, refused: u64, accounting: &mut impl Accounting, now: Tick) {
        let rejected = refused.wrapping_sub(std::mem::replace(&mut self.refused, refused));
        sessions.fairness.invalidate_levels();
        if sessions.reserve() == 0 {
            return;
        }
        let (standby, skips) = (sessions.standby_reserve_in_use(), self.back_off.skips(now));
        let excess = (sessions.reserve_in_use() - standby).min(MAX_EVICTIONS);
        if excess > 0 {
            self.back_off = BackOff::default();
            self.budget = (excess * SAMPLE_SLOTS).clamp(MIN_SLOTS, MAX_SLOTS);
            self.evict(Criterion::OverShare, excess, sessions, accounting, now);
        } else if (standby > 0 || rejected > 0) && !skips {
            self.budget = FEW_SLOTS;
            let rejected = u32::try_from(rejected).unwrap_or(MAX_EVICTIONS).min(MAX_EVICTIONS);
            let mut ended =
                self.evict(Criterion::OverShareCheap, standby.min(MAX_EVICTIONS), sessions, accounting, now);
            if ended == 0 {
                self.budget = FEW_SLOTS;
                ended = self.evict(Criterion::Cheap, rejected, sessions, accounting, now);
            }
            self.back_off.note(ended, now);
        }
        self.release::<u32>(sessions, accounting, now);
        self.release::<V6>(sessions, accounting, now);
    }

    /// Evicts up to `count` sessions; returns how many.
    fn evict(
        &mut self,
        criterion: Criterion,
        count: u32,
        sessions: &mut Sessions,
        accounting: &mut impl Accounting,
        now: Tick,
    ) -> u32 {
        for ended in 0..count {
            match self.pick(criterion, sessions, now) {
                None => return ended,
                Some(victim) if victim.v6 => evict::<V6>(criterion, victim, sessions, accounting, now),
                Some(victim) => evict::<u32>(criterion, victim, sessions, accounting, now),
            }
        }
        count
    }

    /// Quarantined sessions count for no holder, but use slots of a family's table: where another batch wouldn't fit,
    /// or the standby sessions that one command can bring (as far as half of the reserve allows), ports leave
    /// quarantine early.
    fn release<A: SessionFamily>(&mut self, sessions: &mut Sessions, accounting: &mut impl Accounting, now: Tick) {
        let reserve = sessions.reserve();
        let limit = (batch::BATCH_SIZE + MAX_RECORDS_APPLIED) as u32;
        let entries = 2 * (reserve / 2).clamp(reserve.min(batch::BATCH_SIZE as u32), limit);
        if A::table(sessions).has_capacity(entries) {
            return;
        }
        let slots = A::table(sessions).slots();
        // Both families share the cursor; it is moved to this family's slots if it is outside.
        let first = if A::BITS == 128 { u32::table(sessions).slots() } else { 0 };
        if !(first..first + slots).contains(&self.cursor) {
            self.cursor = first;
        }
        self.budget = MAX_SLOTS;
        let mut is_second = false;
        for _ in 0..MAX_EVICTIONS {
            if A::table(sessions).has_capacity(entries) {
                return;
            }
            let found = self.pick_in::<A>(Criterion::Quarantined, first, sessions, now);
            let Some(victim) = found else {
                if self.budget == 0 || is_second {
                    return;
                }
                (self.cursor, is_second) = (first, true);
                continue;
            };
            let expiry: Expiry<A> = Expiry::Released(sessions.remove(victim.slot));
            accounting.release(&expiry);
        }
    }

    /// Best victim of a sample of sessions of either family.
    fn pick(&mut self, criterion: Criterion, sessions: &Sessions, now: Tick) -> Option<Victim> {
        let v4_slots = u32::table(sessions).slots();
        // One round through both families is enough, even if one is empty.
        for _ in 0..3 {
            if self.cursor < v4_slots {
                let found = self.pick_in::<u32>(criterion, 0, sessions, now);
                if found.is_some() || self.budget == 0 {
                    return found;
                }
                self.cursor = v4_slots;
            }
            let found = self.pick_in::<V6>(criterion, v4_slots, sessions, now);
            if found.is_some() || self.budget == 0 {
                return found;
            }
            self.cursor = 0;
        }
        None
    }

    /// Best victim of a sample of sessions from the cursor to the end of a family's slots, whose first slot has the
    /// number `first`.
    fn pick_in<A: SessionFamily>(
        &mut self,
        criterion: Criterion,
        first: u32,
        sessions: &Sessions,
        now: Tick,
    ) -> Option<Victim> {
        let table = A::table(sessions);
        if table.occupied() == 0 {
            return None;
        }
        let from = self.cursor - first;
        let limit = (table.slots() - from).min(self.budget);
        let (mut best, mut seen, mut scanned) = (None::<Victim>, 0, 0);
        for &deadline in table.deadlines(from, limit) {
            if seen == SAMPLE || (best.is_some() && scanned >= SAMPLE_SLOTS) {
                break;
            }
            scanned += 1;
            if deadline == 0 {
                continue;
            }
            let Some(other) = candidate::<A>(criterion, Slot(from + scanned - 1), sessions, now) else {
                continue;
            };
            seen += 1;
            let is_better = |best: Victim| (other.rank, best.idle_ms) < (best.rank, other.idle_ms);
            if best.is_none_or(is_better) {
                best = Some(other);
            }
        }
        self.cursor += scanned;
        self.budget -= scanned;
        best
    }
}

/// The session whose original direction is in a slot, if it meets the criterion.
fn candidate<A: SessionFamily>(criterion: Criterion, slot: Slot, sessions: &Sessions, now: Tick) -> Option<Victim> {
    let table = A::table(sessions);
    let entry = table.entry(slot);
    let is_quarantined = entry.flags().has(Flags::QUARANTINED);
    let is_candidate = match criterion {
        Criterion::Quarantined => is_quarantined,
        Criterion::OverShare => !is_quarantined && sessions.is_over_share::<A>(slot),
        // Most are rejected by what has been read already. The holder's share is the most expensive check, and comes
        // last.
        Criterion::Cheap | Criterion::OverShareCheap => !is_quarantined && now.since(entry.last_seen()) >= MIN_IDLE_MS,
    };
    if !is_candidate {
        return None;
    }
    let twin = table.entry(entry.twin());
    let (state, _) = sessions.timeouts().state(entry, twin);
    let rank = match state {
        _ if entry.is_standby() => Rank::Standby,
        _ if entry.is_dnat() && !entry.is_confirmed() => Rank::Unconfirmed,
        SessionState::Opening => Rank::Unconfirmed,
        SessionState::Closing | SessionState::Quarantined => Rank::Closing,
        SessionState::Established | SessionState::HalfClosed => Rank::Established,
    };
    let idle_ms = now.since(entry.last_seen().later(twin.last_seen()));
    let is_cheap = rank != Rank::Established && idle_ms >= MIN_IDLE_MS;
    let may_end = match criterion {
        Criterion::OverShare | Criterion::Quarantined => true,
        Criterion::OverShareCheap => is_cheap && sessions.is_over_share::<A>(slot),
        Criterion::Cheap => is_cheap && sessions.is_above_average::<A>(slot),
    };
    may_end.then_some(Victim { slot, v6: A::BITS == 128, rank, idle_ms })
}

/// Evicts a session. The port of an egress session stays in quarantine.
fn evict<A: SessionFamily>(
    criterion: Criterion,
    Victim { slot, rank, .. }: Victim,
    sessions: &mut Sessions,
    accounting: &mut impl Accounting,
    now: Tick,
) {
    if rank == Rank::Standby {
        // Its owner still uses the port, so the port is quarantined as if the owner had ended the session.
        sessions.end_standby::<A>(slot, now);
        // A holder above its share has no claim to this session.
        accounting.standby_evicted(criterion == Criterion::Cheap);
        if A::table(sessions).entry(slot).is_dnat() {
            sessions.remove::<A>(slot);
        }
        return;
    }
    if criterion == Criterion::OverShare {
        sessions.note_eviction::<A>(slot);
    }
    let reason = if rank == Rank::Established { EndReason::OverShare } else { EndReason::Evicted };
    let expiry: Expiry<A> = sessions.end_with_reason(slot, reason, now);
    accounting.release(&expiry);
    // An inbound session has no port to quarantine, and no packet of a batch refers to it.
    if A::table(sessions).entry(slot).is_dnat() {
        sessions.remove::<A>(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::{draft, sessions};

    const CAPACITY: u32 = 512;
    const RESERVE: u32 = 128;
    const SHARED: u16 = (CAPACITY - RESERVE) as u16;

    /// Nothing but the table is updated.
    struct Unaccounted;

    impl Accounting for Unaccounted {
        fn release<A: SessionFamily>(&mut self, _: &Expiry<A>) {}
        fn standby_evicted(&mut self, _: bool) {}
    }

    /// A table that one pod has filled except for the reserve.
    struct FullTable {
        eviction: Eviction,
        sessions: Sessions,
        /// Packets rejected since start.
        refused: u64,
    }

    impl FullTable {
        fn at(now: Tick) -> Self {
            let mut sessions = sessions(CAPACITY).with_reserve(RESERVE);
            for n in 0..SHARED {
                sessions.commit(&draft(n, n), now).unwrap();
            }
            Self { eviction: Eviction::default(), sessions, refused: 0 }
        }

        /// A run after so many rejected packets; returns whether it has scanned any slot.
        fn searches(&mut self, refused: u64, now: Tick) -> bool {
            const UNTOUCHED: u32 = u32::MAX;
            self.refused += refused;
            let Self { eviction, sessions, refused } = self;
            eviction.budget = UNTOUCHED;
            eviction.restore_reserve(sessions, *refused, &mut Unaccounted, now);
            eviction.budget != UNTOUCHED
        }
    }

    #[test]
    fn fruitless_searches_back_off_until_one_evicts_or_the_reserve_is_used() {
        let mut now = Tick(1000);
        let mut table = FullTable::at(now);
        let searches: Vec<u32> = (0..140).filter(|_| table.searches(64, now)).collect();
        assert_eq!(searches, [0, 2, 5, 10, 19, 36, 69, 102, 135], "at most 33 runs apart");
        now = now.plus(1);
        assert!(table.searches(64, now), "the next millisecond");
        assert!(!table.searches(64, now));
        // A holder below its share is not delayed.
        table.sessions.commit(&draft(SHARED, SHARED), now).unwrap();
        assert!(table.searches(0, now));
        assert_eq!(table.sessions.open_count(), u32::from(SHARED), "the reserve is free again");
        let searches: Vec<u32> = (0..10).filter(|_| table.searches(64, now)).collect();
        assert_eq!(searches, [0, 2, 5], "the back-off restarts");
        // All of them are idle and have had no reply.
        now = now.plus(MIN_IDLE_MS);
        assert!((0..20).all(|_| table.searches(1, now)));
        assert_eq!(table.sessions.open_count(), u32::from(SHARED) - 20);
    }
}
