//! What only the device and the steering program count, as metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vipgate_dataplane::counters::WorkerCounters;
use vipgate_xdp::figures::{Losses, Pool};
use vipgate_xdp::steering::Steering;

use super::state::{DeviceFigures, Figure, RingDrops};

/// The sources of these figures.
#[derive(Debug)]
pub(super) struct XdpFigures {
    /// The steering program, which the control thread changes.
    steering: Arc<Mutex<Steering>>,
    /// The sockets of each worker.
    losses: Vec<Losses>,
    /// What each worker's sockets are known to have lost for being too long.
    too_long: Vec<AtomicU64>,
    /// The frames of all workers.
    pool: Pool,
    /// Where the workers say how many frames they hold.
    counters: Vec<Arc<WorkerCounters>>,
}

impl XdpFigures {
    pub(super) fn new(
        steering: Arc<Mutex<Steering>>,
        losses: Vec<Losses>,
        pool: Pool,
        counters: Vec<Arc<WorkerCounters>>,
    ) -> Self {
        let too_long = losses.iter().map(|_| AtomicU64::new(0)).collect();
        Self { steering, losses, too_long, pool, counters }
    }
}

impl DeviceFigures for XdpFigures {
    fn ring_drops(&self, worker: usize) -> RingDrops {
        let Some((losses, known)) = self.losses.get(worker).zip(self.too_long.get(worker)) else {
            return RingDrops::default();
        };
        let losses = losses.read();
        // For each frame that is missing the kernel counts both, one after the other: what is counted here must not fall in between.
        let too_long = losses.dropped.saturating_sub(losses.fill_ring_empty);
        let too_long = known.fetch_max(too_long, Ordering::Relaxed).max(too_long);
        RingDrops { no_buffer: losses.fill_ring_empty, ring_full: losses.receive_ring_full, too_long }
    }

    fn captures(&self, frame: &[u8], ifindex: u32) -> Option<bool> {
        let mut steering = self.steering.lock().unwrap_or_else(PoisonError::into_inner);
        let captures = steering.captures(frame, ifindex);
        captures.inspect_err(|error| tracing::warn!(%error, "the steering program can't be asked")).ok()
    }

    fn figures(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        if let Ok(outcomes) = self.steering.lock().unwrap_or_else(PoisonError::into_inner).outcomes() {
            let all = [
                ("passed", outcomes.passed),
                ("captured", outcomes.captured),
                ("no_socket", outcomes.no_socket),
                ("guarded", outcomes.guarded),
            ];
            figures.extend(all.map(|(outcome, value)| Figure {
                name: "steered_packets",
                help: "Packets that the XDP program has seen: passed to the kernel, captured, or dropped for want of a socket; guarded: dropped behind it, while it was off",
                counter: true,
                labels: vec![("outcome", outcome.to_owned())],
                value,
            }));
        }
        for (worker, losses) in self.losses.iter().enumerate() {
            let losses = losses.read();
            let all = [
                ("receive_ring_full", losses.receive_ring_full),
                ("fill_ring_empty", losses.fill_ring_empty),
                ("dropped", losses.dropped),
                ("invalid_descriptor", losses.invalid),
            ];
            figures.extend(all.map(|(cause, value)| Figure {
                name: "ring_losses",
                help: "Packets that the kernel dropped at the sockets' rings",
                counter: true,
                labels: vec![("worker", worker.to_string()), ("cause", cause.to_owned())],
                value,
            }));
        }
        let with_workers: u64 = self.counters.iter().map(|counters| counters.frames_device.get()).sum();
        let held: u64 = self.counters.iter().map(|counters| counters.frames_held.get()).sum();
        let places =
            [("pool", self.pool.free()), ("device", with_workers), ("held", held), ("total", self.pool.total())];
        figures.extend(places.map(|(place, value)| Figure {
            name: "frames",
            help: "Packet buffers by place; pool, device and held together are the total, but for packets in a batch",
            counter: false,
            labels: vec![("place", place.to_owned())],
            value,
        }));
        figures
    }
}
