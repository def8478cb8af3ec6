//! What only the device and the steering program count, as metrics.

use std::sync::{Arc, Mutex, PoisonError};

use vipgate_dataplane::counters::WorkerCounters;
use vipgate_xdp::figures::{Losses, Pool};
use vipgate_xdp::steering::Steering;

use super::state::{DeviceFigures, Figure, RingDrops};

/// The sources of these figures.
#[derive(Debug)]
pub(super) struct XdpFigures {
    /// The steering program, which the control thread changes.
    pub(super) steering: Arc<Mutex<Steering>>,
    /// The sockets of each worker.
    pub(super) losses: Vec<Losses>,
    /// The frames of all workers.
    pub(super) pool: Pool,
    /// Where the workers say how many frames they hold.
    pub(super) counters: Vec<Arc<WorkerCounters>>,
}

impl DeviceFigures for XdpFigures {
    fn ring_drops(&self, worker: usize) -> RingDrops {
        let losses = self.losses.get(worker).map(Losses::read).unwrap_or_default();
        RingDrops { no_buffer: losses.fill_ring_empty, ring_full: losses.receive_ring_full }
    }

    fn captures(&self, frame: &[u8], ifindex: u32) -> Option<bool> {
        let mut steering = self.steering.lock().unwrap_or_else(PoisonError::into_inner);
        let captures = steering.captures(frame, ifindex);
        captures.inspect_err(|error| tracing::warn!(%error, "the steering program can't be asked")).ok()
    }

    fn figures(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        if let Ok(outcomes) = self.steering.lock().unwrap_or_else(PoisonError::into_inner).outcomes() {
            let all = [("passed", outcomes.passed), ("captured", outcomes.captured), ("no_socket", outcomes.no_socket)];
            figures.extend(all.map(|(outcome, value)| Figure {
                name: "steered_packets",
                help: "Packets that the XDP program has seen: passed to the kernel, captured, or dropped for want of a socket",
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
