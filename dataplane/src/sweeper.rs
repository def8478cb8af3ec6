//! The pace of expiry: every deadline of a table is looked at about once a second, however many there are and however
//! often turns come, and no turn looks at more than its share.

use crate::session::{Expiry, SessionFamily, Sessions};
use crate::time::Tick;

/// One round over a table takes this long.
const ROUND_MS: u64 = 500;
/// Slots in one turn at most: about 20 us of reading in order.
const MOST_IN_A_TURN: u32 = 1 << 16;

/// Where the sweep of both tables stands.
#[derive(Debug)]
pub struct Sweeper {
    cursors: [u32; 2],
    last_turn: Tick,
}

impl Sweeper {
    /// A sweep that begins now.
    pub fn new(now: Tick) -> Self {
        Self { cursors: [0; 2], last_turn: now }
    }

    /// Sweeps a family's share of this turn.
    pub fn turn<A: SessionFamily>(&mut self, sessions: &mut Sessions, now: Tick, happened: impl FnMut(Expiry<A>)) {
        let elapsed = u64::from(now.since(self.last_turn)).min(ROUND_MS);
        if elapsed == 0 || A::table(sessions).occupied() == 0 {
            return;
        }
        let share = (u64::from(A::table(sessions).slots()) * elapsed).div_ceil(ROUND_MS);
        let slots = share.min(MOST_IN_A_TURN.into()) as u32;
        let cursor = &mut self.cursors[usize::from(A::BITS == 128)];
        *cursor = sessions.sweep(*cursor, slots, now, happened).unwrap_or(0);
    }

    /// Notes that both families had their turn.
    pub fn end_turn(&mut self, now: Tick) {
        self.last_turn = now;
    }
}
