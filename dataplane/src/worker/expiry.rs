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

/// Packets that were queued when a gap between turns ended, and still may be. They are counted, since under full load a
/// queue is never empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backlog {
    device: u64,
    /// Handed off by other workers.
    links: u64,
}

impl Backlog {
    /// At most so many packets are queued.
    pub fn new(device: u64, links: usize) -> Self {
        Self { device, links: links as u64 }
    }

    /// Takes the packets of one turn: how many were received from the device and from other workers, each with the
    /// limit of the turn. Queues are first in, first out, and empty where a turn received fewer than the limit.
    pub fn reduce(&mut self, device: (usize, usize), links: (usize, usize)) {
        for (queued, (received, limit)) in [(&mut self.device, device), (&mut self.links, links)] {
            *queued = if received < limit { 0 } else { queued.saturating_sub(received as u64) };
        }
    }

    /// Whether every packet that was queued has been received.
    pub fn is_empty(self) -> bool {
        self.device == 0 && self.links == 0
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
    fn a_backlog_ends_with_its_last_packet_or_an_empty_queue() {
        let mut backlog = Backlog::new(130, 40);
        let turns = [((64, 64), (0, 0), false), ((32, 32), (32, 32), false), ((34, 34), (8, 32), true)];
        for (device, links, is_empty) in turns {
            backlog.reduce(device, links);
            assert_eq!(backlog.is_empty(), is_empty);
        }
        let mut backlog = Backlog::new(10_000, 64);
        backlog.reduce((63, 64), (32, 32));
        assert!(!backlog.is_empty(), "other workers' packets are still queued");
        backlog.reduce((32, 32), (32, 32));
        assert!(backlog.is_empty());
        let mut backlog = Backlog::new(64, 0);
        backlog.reduce((0, 0), (0, 0));
        assert!(!backlog.is_empty(), "a batch of reinjected packets alone");
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
