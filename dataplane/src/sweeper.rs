//! The pace of expiry: every deadline of a table is looked at about twice a second, however many there are and however
//! often turns come. What is owed is paid in small parts while packets come, so that none of them waits for it.

use crate::session::entry::Entry;
use crate::session::{Expiry, SessionFamily, Sessions};
use crate::time::Tick;

/// One round over a table takes this long.
const ROUND_MS: u64 = 500;
/// Slots in one turn at most: about 20 us of reading in order.
const MOST_IN_A_TURN: u32 = 1 << 16;
/// The same in a turn with packets: a tenth of the time that they take.
const MOST_BESIDE_PACKETS: u32 = 1 << 9;

/// Where the sweep of both tables stands.
#[derive(Debug)]
pub struct Sweeper {
    parts: [Part; 2],
    last_turn: Tick,
}

/// The sweep of one table.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    cursor: u32,
    /// Slots that should have been looked at by now.
    owed: u32,
}

impl Sweeper {
    /// A sweep that begins now.
    pub fn new(now: Tick) -> Self {
        Self { parts: [Part::default(); 2], last_turn: now }
    }

    /// Sweeps a family's share of this turn. `has_packets`: there are some in it. `is_ours`: of a copy, whether its share is.
    pub fn turn<A: SessionFamily>(
        &mut self,
        sessions: &mut Sessions,
        now: Tick,
        has_packets: bool,
        is_ours: impl Fn(&Entry<A>) -> bool,
        happened: impl FnMut(Expiry<A>),
    ) {
        let elapsed = u64::from(now.since(self.last_turn)).min(ROUND_MS);
        let part = &mut self.parts[usize::from(A::BITS == 128)];
        if elapsed > 0 {
            let slots = A::table(sessions).slots();
            let due = (u64::from(slots) * elapsed).div_ceil(ROUND_MS) as u32;
            part.owed = if A::table(sessions).occupied() == 0 { 0 } else { part.owed.saturating_add(due).min(slots) };
        }
        let slots = part.owed.min(if has_packets { MOST_BESIDE_PACKETS } else { MOST_IN_A_TURN });
        if slots > 0 {
            part.owed -= slots;
            part.cursor = sessions.sweep(part.cursor, slots, now, is_ours, happened).unwrap_or(0);
        }
    }

    /// Notes that both families had their turn.
    pub fn end_turn(&mut self, now: Tick) {
        self.last_turn = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::{draft, sessions};
    use crate::session::timeout::Timeouts;

    /// Milliseconds from the end of 20 000 sessions until all are gone, with a turn every so many.
    fn time_to_end(turns_a_millisecond: u32, has_packets: bool) -> u32 {
        let mut sessions = sessions(20_000);
        for n in 0..20_000 {
            sessions.commit(&draft(n, n), Tick(1)).unwrap();
        }
        let end = 1 + Timeouts::default().udp;
        let mut sweeper = Sweeper::new(Tick(end));
        for elapsed in 1..10_000 {
            let now = Tick(end + elapsed);
            for _ in 0..turns_a_millisecond {
                sweeper.turn::<u32>(&mut sessions, now, has_packets, |_| false, |_| ());
                sweeper.end_turn(now);
            }
            if sessions.open_count() == 0 {
                return elapsed;
            }
        }
        panic!("{} sessions are left", sessions.open_count());
    }

    #[test]
    fn a_round_takes_half_a_second_whatever_else_there_is_to_do() {
        let round = ROUND_MS as u32;
        for (turns, has_packets) in [(1, false), (100, false), (1, true), (100, true)] {
            let took = time_to_end(turns, has_packets);
            assert!((round - 10..=round + 10).contains(&took), "{turns} turns a ms, packets {has_packets}: {took} ms");
        }
    }
}
