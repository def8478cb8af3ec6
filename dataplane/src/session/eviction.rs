//! Room in a full table. What holders below their fair share have taken of the reserve, holders above theirs make up for: of sessions that
//! are looked at one after the other, those that nobody confirmed end first, then closing ones, standby sessions, and whichever was idle for
//! longest. A holder that has its share, or less, loses nothing.
//!
//! The table is keyed, so what stands side by side in it is a random draw, and a cursor that goes round comes by all. All of it happens
//! between batches, and a turn looks at a bounded number of slots: where it doesn't find enough, newcomers live on the reserve meanwhile.

use super::entry::{Flags, Slot};
use super::{Expiry, SessionFamily, Sessions};
use crate::address::V6;
use crate::batch;
use crate::command::{MOST_TAKEN, SessionState};
use crate::counters::{DropReason, EndReason};
use crate::settle::Settle;
use crate::time::Tick;

/// Sessions that one turn ends at most: more than a batch can open.
const MOST_ENDED: u32 = 2 * batch::MOST as u32;
/// Sessions that one that ends is chosen from, and slots that are looked at for more than one of them.
const SAMPLE: u32 = 8;
const SAMPLE_SLOTS: u32 = 512;
/// Slots that one turn looks at, if it must, and at most.
const LEAST_SLOTS: u32 = 1 << 12;
const MOST_SLOTS: u32 = 1 << 14;
/// The same where nobody waits but those who have their share already, and where standby sessions are in the reserve.
const FEW_SLOTS: u32 = 1 << 9;
/// Turns without a search for those, at most, after one in vain: first one, then twice as many each time. A search takes up to 21 µs, as long
/// as 130 packets that are refused (163 ns each): one in 33 full turns adds a sixteenth to what these take. And they take a third of a
/// millisecond, so a newcomer doesn't notice that nobody looks meanwhile. Where turns are longer or rarer, the next millisecond ends the wait.
const MOST_SKIPPED: u32 = 32;
/// Whoever has been silent for so long isn't in the midst of a handshake.
const SILENT_MS: u32 = 1_000;

/// What would end before what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Unconfirmed,
    Closing,
    Standby,
    Established,
}

/// A session that may end.
#[derive(Clone, Copy, Debug)]
struct Victim {
    slot: Slot,
    v6: bool,
    rank: Rank,
    idle_ms: u32,
}

/// What is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Sessions of holders above their share.
    OverShare,
    /// Those of them that nobody misses.
    OverShareUnmissed,
    /// Sessions that nobody misses, of holders that don't have less than others.
    Cheap,
    /// Quarantined ones.
    Quarantined,
}

/// Where the search for sessions that make room stands.
#[derive(Debug, Default)]
pub struct Eviction {
    /// The next slot: first those of IPv4, then those of IPv6.
    cursor: u32,
    /// Slots that this turn may still look at.
    budget: u32,
    /// Packets that found no room, by the end of the last turn.
    refused: u64,
    back_off: BackOff,
}

/// How long nobody looks for sessions that nobody misses, after there were none.
#[derive(Debug, Default)]
struct BackOff {
    /// Turns that are left out after the last search; 0: it has ended some.
    turns: u32,
    /// Those of them that are still to come.
    left: u32,
    /// When that search was.
    searched: Tick,
}

impl BackOff {
    /// Whether a turn goes by without a search: each asks once.
    fn skips(&mut self, now: Tick) -> bool {
        if now != self.searched {
            self.left = 0;
        }
        let skips = self.left > 0;
        self.left -= u32::from(skips);
        skips
    }

    /// Notes how many sessions a search has ended.
    fn note(&mut self, ended: u32, now: Tick) {
        self.turns = if ended > 0 { 0 } else { (2 * self.turns).clamp(1, MOST_SKIPPED) };
        (self.left, self.searched) = (self.turns, now);
    }
}

impl Eviction {
    /// Ends sessions until the reserve is whole again.
    pub fn make_room(&mut self, sessions: &mut Sessions, settle: &mut Settle<'_>, now: Tick) {
        let refused = settle.counters.drops[DropReason::SessionTableFull as usize].get();
        let waiting = refused.wrapping_sub(std::mem::replace(&mut self.refused, refused));
        sessions.fairness.renew_levels();
        if sessions.reserve() == 0 {
            return;
        }
        let (standby, skips) = (sessions.overdrawn_by_standby(), self.back_off.skips(now));
        let overdrawn = (sessions.overdrawn() - standby).min(MOST_ENDED);
        if overdrawn > 0 {
            self.back_off = BackOff::default();
            self.budget = (overdrawn * SAMPLE_SLOTS).clamp(LEAST_SLOTS, MOST_SLOTS);
            self.end(Wanted::OverShare, overdrawn, sessions, settle, now);
        } else if (standby > 0 || waiting > 0) && !skips {
            self.budget = FEW_SLOTS;
            let waiting = u32::try_from(waiting).unwrap_or(MOST_ENDED).min(MOST_ENDED);
            let mut ended = self.end(Wanted::OverShareUnmissed, standby.min(MOST_ENDED), sessions, settle, now);
            if ended == 0 {
                self.budget = FEW_SLOTS;
                ended = self.end(Wanted::Cheap, waiting, sessions, settle, now);
            }
            self.back_off.note(ended, now);
        }
        self.release::<u32>(sessions, settle, now);
        self.release::<V6>(sessions, settle, now);
    }

    /// Ends so many sessions, if it finds them; how many it has ended.
    fn end(&mut self, wanted: Wanted, count: u32, sessions: &mut Sessions, settle: &mut Settle<'_>, now: Tick) -> u32 {
        for ended in 0..count {
            match self.pick(wanted, sessions, now) {
                None => return ended,
                Some(victim) if victim.v6 => end::<V6>(wanted, victim, sessions, settle, now),
                Some(victim) => end::<u32>(wanted, victim, sessions, settle, now),
            }
        }
        count
    }

    /// Quarantined sessions count for nobody, but have their places in a family's table: where another batch wouldn't fit, and what a command
    /// brings of standby sessions, as far as half of the reserve is enough for it, ports come out of quarantine too early.
    fn release<A: SessionFamily>(&mut self, sessions: &mut Sessions, settle: &mut Settle<'_>, now: Tick) {
        let reserve = sessions.reserve();
        let most = (batch::MOST + MOST_TAKEN) as u32;
        let room = 2 * (reserve / 2).clamp(reserve.min(batch::MOST as u32), most);
        if A::table(sessions).has_room(room) {
            return;
        }
        let slots = A::table(sessions).slots();
        // The families have one cursor, so one may come late; the other one's slots cost nothing.
        let first = if A::BITS == 128 { u32::table(sessions).slots() } else { 0 };
        if !(first..first + slots).contains(&self.cursor) {
            self.cursor = first;
        }
        self.budget = MOST_SLOTS;
        let mut is_second = false;
        for _ in 0..MOST_ENDED {
            if A::table(sessions).has_room(room) {
                return;
            }
            let found = self.pick_in::<A>(Wanted::Quarantined, first, sessions, now);
            let Some(victim) = found else {
                if self.budget == 0 || is_second {
                    return;
                }
                (self.cursor, is_second) = (first, true);
                continue;
            };
            let expiry: Expiry<A> = Expiry::Released(sessions.remove(victim.slot));
            settle.settle(&expiry);
        }
    }

    /// The best of some sessions of either family.
    fn pick(&mut self, wanted: Wanted, sessions: &Sessions, now: Tick) -> Option<Victim> {
        let v4_slots = u32::table(sessions).slots();
        // Once round both is enough, whatever is empty.
        for _ in 0..3 {
            if self.cursor < v4_slots {
                let found = self.pick_in::<u32>(wanted, 0, sessions, now);
                if found.is_some() || self.budget == 0 {
                    return found;
                }
                self.cursor = v4_slots;
            }
            let found = self.pick_in::<V6>(wanted, v4_slots, sessions, now);
            if found.is_some() || self.budget == 0 {
                return found;
            }
            self.cursor = 0;
        }
        None
    }

    /// The best of some sessions from the cursor to the end of a family's slots, of which the first one has the number `first`.
    fn pick_in<A: SessionFamily>(
        &mut self,
        wanted: Wanted,
        first: u32,
        sessions: &Sessions,
        now: Tick,
    ) -> Option<Victim> {
        let table = A::table(sessions);
        if table.occupied() == 0 {
            return None;
        }
        let from = self.cursor - first;
        let most = (table.slots() - from).min(self.budget);
        let (mut best, mut seen, mut looked) = (None::<Victim>, 0, 0);
        for &deadline in table.deadlines(from, most) {
            if seen == SAMPLE || (best.is_some() && looked >= SAMPLE_SLOTS) {
                break;
            }
            looked += 1;
            if deadline == 0 {
                continue;
            }
            let Some(other) = look::<A>(wanted, Slot(from + looked - 1), sessions, now) else {
                continue;
            };
            seen += 1;
            let is_better = |best: Victim| (other.rank, best.idle_ms) < (best.rank, other.idle_ms);
            if best.is_none_or(is_better) {
                best = Some(other);
            }
        }
        self.cursor += looked;
        self.budget -= looked;
        best
    }
}

/// The session whose first direction is in a slot, if it is one that is wanted.
fn look<A: SessionFamily>(wanted: Wanted, slot: Slot, sessions: &Sessions, now: Tick) -> Option<Victim> {
    let table = A::table(sessions);
    let entry = table.entry(slot);
    let is_quarantined = entry.flags().has(Flags::QUARANTINED);
    let is_wanted = match wanted {
        Wanted::Quarantined => is_quarantined,
        Wanted::OverShare => !is_quarantined && sessions.is_over::<A>(slot),
        // Most are told by what has been read already. Whose it is takes longest to say, and is asked last.
        Wanted::Cheap | Wanted::OverShareUnmissed => !is_quarantined && now.since(entry.last_seen()) >= SILENT_MS,
    };
    if !is_wanted {
        return None;
    }
    let twin = table.entry(entry.twin());
    let (state, _) = sessions.timeouts().state(entry, twin);
    let rank = match state {
        _ if entry.is_copy() => Rank::Standby,
        _ if entry.is_of_service() && !entry.is_confirmed() => Rank::Unconfirmed,
        SessionState::Opening => Rank::Unconfirmed,
        SessionState::Closing | SessionState::Quarantined => Rank::Closing,
        SessionState::Established | SessionState::HalfClosed => Rank::Established,
    };
    let idle_ms = now.since(entry.last_seen().later(twin.last_seen()));
    let is_unmissed = rank != Rank::Established && idle_ms >= SILENT_MS;
    let may_end = match wanted {
        Wanted::OverShare | Wanted::Quarantined => true,
        Wanted::OverShareUnmissed => is_unmissed && sessions.is_over::<A>(slot),
        Wanted::Cheap => is_unmissed && sessions.is_large::<A>(slot),
    };
    may_end.then_some(Victim { slot, v6: A::BITS == 128, rank, idle_ms })
}

/// Ends a session of a holder that has more than others. The port of a pod's stays in quarantine.
fn end<A: SessionFamily>(
    wanted: Wanted,
    Victim { slot, rank, .. }: Victim,
    sessions: &mut Sessions,
    settle: &mut Settle<'_>,
    now: Tick,
) {
    if rank == Rank::Standby {
        // Its gateway still has its port, so that stays in quarantine as if that had ended it.
        sessions.end_copy::<A>(slot, now);
        settle.counters.copies_refused.add(1);
        // Whoever is above its share has no claim to this one.
        if wanted == Wanted::Cheap {
            settle.outbox.evicted();
        }
        if A::table(sessions).entry(slot).is_of_service() {
            sessions.remove::<A>(slot);
        }
        return;
    }
    let reason = if rank == Rank::Established { EndReason::OverShare } else { EndReason::Evicted };
    let expiry: Expiry<A> = sessions.end_because(slot, reason, now);
    settle.settle(&expiry);
    // A client's session has no port that could rest, and is in no packet's hands.
    if A::table(sessions).entry(slot).is_of_service() {
        sessions.remove::<A>(slot);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::counters::Counters;
    use crate::link::handoff::Wake;
    use crate::link::outbox::Outbox;
    use crate::link::outlet::Outlet;
    use crate::ports::PortRange;
    use crate::ports::allocator::Allocator;
    use crate::ports::pool::WorkerId;
    use crate::session::tests::{draft, sessions};
    use crate::session::tuple::HashKey;
    use crate::snapshot::build::Builder;
    use crate::snapshot::policy::Policy;
    use crate::snapshot::spec::NetworkSpec;
    use crate::watch::log::SessionLog;

    const CAPACITY: u32 = 512;
    const RESERVE: u32 = 128;
    const SHARED: u16 = (CAPACITY - RESERVE) as u16;

    #[derive(Debug)]
    struct NoBell;

    impl Wake for NoBell {
        fn wake(&self) {}
    }

    /// A table that a pod has filled but for the reserve, and what its sessions give back when they end.
    struct Crowded {
        eviction: Eviction,
        sessions: Sessions,
        policy: Arc<Policy>,
        ports: Allocator,
        counters: Counters,
        outbox: Outbox,
        log: SessionLog,
    }

    impl Crowded {
        fn at(now: Tick) -> Self {
            let mut sessions = sessions(CAPACITY).with_reserve(RESERVE);
            for n in 0..SHARED {
                sessions.commit(&draft(n, n), now).unwrap();
            }
            Self {
                eviction: Eviction::default(),
                sessions,
                policy: Builder::new(NetworkSpec::default()).snapshot().policy,
                ports: Allocator::new(WorkerId(0), 1, PortRange::default(), HashKey::fixed()).unwrap(),
                counters: Counters::default(),
                outbox: Outbox::new(Arc::new(Outlet::new(Arc::new(NoBell))), 50),
                log: SessionLog::default(),
            }
        }

        /// A turn in which so many packets found no room; whether it has looked at any slot.
        fn searches(&mut self, refused: u64, now: Tick) -> bool {
            const UNTOUCHED: u32 = u32::MAX;
            self.counters.drops[DropReason::SessionTableFull as usize].add(refused);
            let Self { eviction, sessions, policy, ports, counters, outbox, log } = self;
            let mut settle = Settle { policy, ports, counters, outbox, log };
            eviction.budget = UNTOUCHED;
            eviction.make_room(sessions, &mut settle, now);
            eviction.budget != UNTOUCHED
        }
    }

    #[test]
    fn searches_in_vain_get_rarer_until_one_ends_something_or_somebody_has_taken_of_the_reserve() {
        let mut now = Tick(1000);
        let mut table = Crowded::at(now);
        let searches: Vec<u32> = (0..140).filter(|_| table.searches(64, now)).collect();
        assert_eq!(searches, [0, 2, 5, 10, 19, 36, 69, 102, 135], "33 turns apart at most");
        now = now.plus(1);
        assert!(table.searches(64, now), "the next millisecond");
        assert!(!table.searches(64, now));
        // Whoever is below its share waits for nothing.
        table.sessions.commit(&draft(SHARED, SHARED), now).unwrap();
        assert!(table.searches(0, now));
        assert_eq!(table.sessions.open_count(), u32::from(SHARED), "the reserve is whole again");
        let searches: Vec<u32> = (0..10).filter(|_| table.searches(64, now)).collect();
        assert_eq!(searches, [0, 2, 5], "it begins anew");
        // All of them are silent, and were never answered.
        now = now.plus(SILENT_MS);
        assert!((0..20).all(|_| table.searches(1, now)));
        assert_eq!(table.sessions.open_count(), u32::from(SHARED) - 20);
    }
}
