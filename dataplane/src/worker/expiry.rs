//! Expiry: sweeps the deadlines of both session tables about twice per second, whatever their size and the rate of
//! turns. While packets arrive, the backlog is processed in small slices, so that no packet waits for it.

use crate::flow::time::Tick;
use crate::session::entry::Entry;
use crate::session::{Expiry, SessionFamily, Sessions};

/// Duration of one sweep of a table.
const SWEEP_MS: u64 = 500;
/// Slots per turn at most: about 20 us of sequential reading.
const MAX_SLOTS_PER_TURN: u32 = 1 << 16;
/// Slots per turn with packets: a tenth of the time that the packets take.
const MAX_SLOTS_WITH_PACKETS: u32 = 1 << 9;

/// The progress of the sweeps of both tables.
#[derive(Debug)]
pub struct ExpirySweep {
    tables: [TableSweep; 2],
    last_turn: Tick,
}

/// The sweep of one table.
#[derive(Clone, Copy, Debug, Default)]
struct TableSweep {
    cursor: u32,
    /// Slots that are due to be swept.
    backlog: u32,
}

impl ExpirySweep {
    /// Sweeps that start now.
    pub fn new(now: Tick) -> Self {
        Self { tables: [TableSweep::default(); 2], last_turn: now }
    }

    /// Sweeps one family's slice of this turn. `has_packets`: the turn has packets. `is_ours`: whether the shard of a
    /// standby session is this gateway's.
    pub fn sweep_slice<A: SessionFamily>(
        &mut self,
        sessions: &mut Sessions,
        now: Tick,
        has_packets: bool,
        is_ours: impl Fn(&Entry<A>) -> bool,
        on_expiry: impl FnMut(Expiry<A>),
    ) {
        let elapsed = u64::from(now.since(self.last_turn)).min(SWEEP_MS);
        let table = &mut self.tables[usize::from(A::BITS == 128)];
        if elapsed > 0 {
            let slots = A::table(sessions).slots();
            let due = (u64::from(slots) * elapsed).div_ceil(SWEEP_MS) as u32;
            table.backlog =
                if A::table(sessions).occupied() == 0 { 0 } else { table.backlog.saturating_add(due).min(slots) };
        }
        let slots = table.backlog.min(if has_packets { MAX_SLOTS_WITH_PACKETS } else { MAX_SLOTS_PER_TURN });
        if slots > 0 {
            table.backlog -= slots;
            table.cursor = sessions.sweep(table.cursor, slots, now, is_ours, on_expiry).unwrap_or(0);
        }
    }

    /// Ends the turn, after both families were swept.
    pub fn end_turn(&mut self, now: Tick) {
        self.last_turn = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::{draft, sessions};
    use crate::session::timeout::Timeouts;

    /// Milliseconds until 20 000 expired sessions are gone, at this many turns per millisecond.
    fn time_to_expire(turns_per_ms: u32, has_packets: bool) -> u32 {
        let mut sessions = sessions(20_000);
        for n in 0..20_000 {
            sessions.commit(&draft(n, n), Tick(1)).unwrap();
        }
        let end = 1 + Timeouts::default().udp;
        let mut expiry = ExpirySweep::new(Tick(end));
        for elapsed in 1..10_000 {
            let now = Tick(end + elapsed);
            for _ in 0..turns_per_ms {
                expiry.sweep_slice::<u32>(&mut sessions, now, has_packets, |_| false, |_| ());
                expiry.end_turn(now);
            }
            if sessions.open_count() == 0 {
                return elapsed;
            }
        }
        panic!("{} sessions are left", sessions.open_count());
    }

    #[test]
    fn a_sweep_takes_half_a_second_at_any_rate_of_turns_and_packets() {
        let sweep = SWEEP_MS as u32;
        for (turns, has_packets) in [(1, false), (100, false), (1, true), (100, true)] {
            let took = time_to_expire(turns, has_packets);
            assert!(
                (sweep - 10..=sweep + 10).contains(&took),
                "{turns} turns per ms, packets {has_packets}: {took} ms"
            );
        }
    }
}
