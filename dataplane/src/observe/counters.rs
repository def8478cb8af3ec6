//! Counters of a worker: packets and bytes by direction, drops by reason, sessions opened and ended.
//!
//! One block per worker, written by that worker only (relaxed load and store, no locked instruction), read by any
//! thread. The names defined here are the ones in metrics, `drops`, `trace`, logs and tests.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::utils::CachePadded;

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::observe::address_conflict::ConflictQueue;
use crate::session::end_reason::EndReason;

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning worker calls it, so a plain load and store suffice.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Sets a gauge.
    #[inline]
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// The counters of one worker, cache-padded: no other core writes to their cache lines.
pub type WorkerCounters = CachePadded<Counters>;

/// The counters of one worker.
#[derive(Debug, Default)]
pub struct Counters {
    /// Packets received from the device.
    pub received: Counter,
    /// Packets by direction: see [`Direction`].
    pub packets: [Counter; Direction::ALL.len()],
    /// Bytes by direction, whole frames.
    pub bytes: [Counter; Direction::ALL.len()],
    /// Drops by reason: see [`DropReason`].
    pub drops: [Counter; DropReason::ALL.len()],
    /// Replies and packets of the gateway's own: ARP and NDP replies, ICMP errors, resets, replies to health checks,
    /// announcements.
    pub replies_sent: Counter,
    /// Packets for the gateway itself that get no reply: acknowledgments of health checks and segments of them beyond
    /// the rate limit, address conflicts.
    pub consumed: Counter,
    /// ARP and neighbor discovery packets by which another host claims a VIP of this gateway.
    pub vip_conflicts: Counter,
    /// Those address conflicts, for the control thread.
    pub conflicts: ConflictQueue,
    /// ICMP errors, resets and replies to health checks suppressed by the rate limit.
    pub replies_suppressed: Counter,
    /// Active sessions.
    pub sessions: Counter,
    /// Table space reserved for holders below their fair share, sessions.
    pub session_reserve: Counter,
    /// Fair share of each VIP, sessions.
    pub session_fair_share: Counter,
    pub standby_sessions: Counter,
    /// Standby sessions that found no space, or were evicted for an active one.
    pub standby_rejected: Counter,
    /// Standby sessions that became active here.
    pub sessions_failed_over: Counter,
    /// Sessions opened since start.
    pub sessions_created: Counter,
    /// Sessions ended since start, by reason: see [`EndReason`].
    pub sessions_ended: [Counter; EndReason::ALL.len()],
    /// TCP and SCTP packets outside the window, where only an off-path host would send: forwarded, without effect on
    /// the session.
    pub out_of_window: Counter,
    /// Packets whose partial checksums were completed.
    pub checksums_completed: Counter,
    /// Packets handed off to the worker that owns their session.
    pub handoffs: Counter,
    /// Packets that wait for a neighbor to be resolved.
    pub neighbor_waiting: Counter,
    /// Frames held by the engine and its rings; together with the device's audit this accounts for every frame.
    pub frames_held: Counter,
    /// Frames held by the worker's device.
    pub frames_device: Counter,
}

impl Counters {
    /// Counts forwarded packets and their bytes.
    #[inline]
    pub fn forwarded(&self, direction: Direction, packets: u64, bytes: u64) {
        if packets == 0 {
            return;
        }
        self.packets[direction as usize].add(packets);
        self.bytes[direction as usize].add(bytes);
    }

    /// Counts a drop.
    #[inline]
    pub fn dropped(&self, reason: DropReason) {
        self.drops[reason as usize].add(1);
    }
}
