//! Statistics of the AF_XDP sockets, the frame pool and the steering program, as metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vipgate_dataplane::observe::counters::WorkerCounters;
use vipgate_xdp::stats::{FramePool, SocketStats};
use vipgate_xdp::steering::Steering;

use crate::metric::Family;
use crate::metrics::definitions::{FRAMES, RING_LOSSES, STEERED_PACKETS};
use crate::state::{DeviceStats, RingDrops};

/// Sources of the statistics.
#[derive(Debug)]
pub(super) struct XdpStats {
    /// The steering program, shared with the control thread.
    steering: Arc<Mutex<Steering>>,
    /// Ring statistics of each worker's sockets.
    losses: Vec<SocketStats>,
    /// Highest difference of two counters of lost packets read so far, by worker.
    other_losses: Vec<AtomicU64>,
    pool: FramePool,
    /// Worker counters, for the frames that workers hold.
    counters: Vec<Arc<WorkerCounters>>,
}

impl XdpStats {
    /// Once the steering program is attached.
    pub(super) fn new(
        steering: Arc<Mutex<Steering>>,
        mut losses: Vec<SocketStats>,
        pool: FramePool,
        counters: Vec<Arc<WorkerCounters>>,
    ) -> Self {
        losses.iter_mut().for_each(SocketStats::exclude_setup);
        let other_losses = losses.iter().map(|_| AtomicU64::new(0)).collect();
        Self { steering, losses, other_losses, pool, counters }
    }
}

impl DeviceStats for XdpStats {
    fn ring_drops(&self, worker: usize) -> RingDrops {
        let Some((losses, known)) = self.losses.get(worker).zip(self.other_losses.get(worker)) else {
            return RingDrops::default();
        };
        let losses = losses.read();
        // The kernel increments both counters for each missing frame, one after the other: the difference must not
        // decrease in between.
        let other = losses.dropped.saturating_sub(losses.fill_ring_empty);
        let other = known.fetch_max(other, Ordering::Relaxed).max(other);
        // With jumbo frames, the kernel drops no packet for its length, and doesn't count each missing frame twice.
        let (too_long, no_buffer) =
            if self.pool.has_jumbo_frames() { (losses.too_long, other + losses.no_jumbo_frame) } else { (other, 0) };
        RingDrops { no_buffer: losses.fill_ring_empty + no_buffer, ring_full: losses.receive_ring_full, too_long }
    }

    fn captures(&self, frame: &[u8], ifindex: u32) -> Option<bool> {
        let mut steering = self.steering.lock().unwrap_or_else(PoisonError::into_inner);
        let captures = steering.captures(frame, ifindex);
        captures.inspect_err(|error| tracing::warn!(%error, "cannot run the steering program on a packet")).ok()
    }

    fn metrics(&self) -> Vec<Family> {
        let mut families = Vec::new();
        if let Ok(outcomes) = self.steering.lock().unwrap_or_else(PoisonError::into_inner).outcomes() {
            families.push(STEERED_PACKETS.by_label([
                ("passed", outcomes.passed),
                ("captured", outcomes.captured),
                ("no_socket", outcomes.no_socket),
                ("guarded", outcomes.guarded),
                ("held", outcomes.held),
            ]));
        }
        let losses = self.losses.iter().enumerate().flat_map(|(worker, losses)| {
            let losses = losses.read();
            let causes = [
                ("receive_ring_full", losses.receive_ring_full),
                ("fill_ring_empty", losses.fill_ring_empty),
                ("dropped", losses.dropped + losses.no_jumbo_frame + losses.too_long),
                ("invalid_descriptor", losses.invalid),
            ];
            causes.map(|(cause, count)| (vec![("worker", worker.to_string()), ("cause", cause.to_owned())], count))
        });
        families.push(RING_LOSSES.family(losses.collect()));
        let device = self.counters.iter().map(|counters| counters.frames_device.get()).sum();
        let held = self.counters.iter().map(|counters| counters.frames_held.get()).sum();
        let (pool, total) = (self.pool.free(), self.pool.total());
        families.push(FRAMES.by_label([("pool", pool), ("device", device), ("held", held), ("total", total)]));
        families
    }
}
