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
use crate::command::SessionState;
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
/// The same where nobody waits but those who have their share already.
const FEW_SLOTS: u32 = 1 << 9;
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
}

impl Eviction {
    /// Ends sessions until the reserve is whole again.
    pub fn make_room(&mut self, sessions: &mut Sessions, settle: &mut Settle<'_>, now: Tick) {
        let refused = settle.counters.drops[DropReason::SessionTableFull as usize].get();
        let waiting = refused.wrapping_sub(std::mem::replace(&mut self.refused, refused));
        if sessions.reserve() == 0 {
            return;
        }
        let overdrawn = sessions.overdrawn().min(MOST_ENDED);
        if overdrawn > 0 {
            self.budget = (overdrawn * SAMPLE_SLOTS).clamp(LEAST_SLOTS, MOST_SLOTS);
            self.end(Wanted::OverShare, overdrawn, sessions, settle, now);
        } else if waiting > 0 {
            self.budget = FEW_SLOTS;
            let wanted = u32::try_from(waiting).unwrap_or(MOST_ENDED).min(MOST_ENDED);
            self.end(Wanted::Cheap, wanted, sessions, settle, now);
        }
        self.release::<u32>(sessions, settle, now);
        self.release::<V6>(sessions, settle, now);
    }

    fn end(&mut self, wanted: Wanted, count: u32, sessions: &mut Sessions, settle: &mut Settle<'_>, now: Tick) {
        for _ in 0..count {
            match self.pick(wanted, sessions, now) {
                None => return,
                Some(victim) if victim.v6 => end::<V6>(victim, sessions, settle, now),
                Some(victim) => end::<u32>(victim, sessions, settle, now),
            }
        }
    }

    /// Quarantined sessions count for nobody, but have their places in a family's table: where another batch wouldn't fit, ports come out
    /// of quarantine too early.
    fn release<A: SessionFamily>(&mut self, sessions: &mut Sessions, settle: &mut Settle<'_>, now: Tick) {
        let room = 2 * sessions.reserve().min(batch::MOST as u32);
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
            let Some(other) = look::<A>(wanted, Slot(from + looked - 1), sessions, now) else { continue };
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
        Wanted::Cheap => !is_quarantined && sessions.is_large::<A>(slot),
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
    let is_missed = rank == Rank::Established || idle_ms < SILENT_MS;
    let v6 = A::BITS == 128;
    (wanted != Wanted::Cheap || !is_missed).then_some(Victim { slot, v6, rank, idle_ms })
}

/// Ends a session of a holder that has more than others. The port of a pod's stays in quarantine.
fn end<A: SessionFamily>(
    Victim { slot, rank, .. }: Victim,
    sessions: &mut Sessions,
    settle: &mut Settle<'_>,
    now: Tick,
) {
    if rank == Rank::Standby {
        // Its gateway still has its port, so that stays in quarantine as if that had ended it.
        sessions.end_copy::<A>(slot, now);
        settle.counters.copies_refused.add(1);
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
