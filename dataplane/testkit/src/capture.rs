//! Packet capture in tests.

use std::sync::Arc;

use vipgate_dataplane::flow::ids::WorkerId;
use vipgate_dataplane::observe::capture::{Capture, CaptureFilter, CaptureRing, CapturedPacket};
use vipgate_dataplane::worker::command::Command;

use crate::Gateway;

/// Whether packets are captured. Captured packets skip the fast path, so tests switch at random to cover both paths.
#[derive(Clone, Copy, Debug)]
pub enum CaptureMode {
    /// On now; the random state.
    On(u64),
    /// Off now; the random state.
    Off(u64),
    /// The test controls the capture.
    Manual,
}

/// A capture of all packets of a worker.
pub fn capture_all(ring: &Arc<CaptureRing>, worker: WorkerId) -> Capture {
    Capture::new(CaptureFilter::default(), ring.clone(), worker, 2048, u32::MAX)
}

impl Gateway {
    /// Starts a capture at each worker, limited to `rate` packets a second and `length` bytes of each.
    pub fn capture(&mut self, filter: &CaptureFilter, length: usize, rate: u32) {
        self.capture_mode = CaptureMode::Manual;
        self.capture_rings.clear();
        for (worker, commands) in self.commands.iter().enumerate() {
            let ring = Arc::new(CaptureRing::new(16, length));
            self.capture_rings.push(ring.clone());
            let capture = Capture::new(filter.clone(), ring, WorkerId(worker as u8), length, rate);
            commands.send(Command::Capture(Some(Box::new(capture)))).unwrap();
        }
        self.turn();
    }

    /// Turns the capture on or off at random.
    pub fn toggle_capture(&mut self) {
        let (was_on, state) = match self.capture_mode {
            CaptureMode::On(state) => (true, state),
            CaptureMode::Off(state) => (false, state),
            CaptureMode::Manual => return,
        };
        // A linear congruential generator (Knuth, MMIX); its upper bits are random enough.
        let state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let is_on = state >> 63 == 0;
        self.capture_mode = if is_on { CaptureMode::On(state) } else { CaptureMode::Off(state) };
        if is_on == was_on {
            return;
        }
        for (worker, ring) in self.capture_rings.iter().enumerate() {
            let capture = is_on.then(|| Box::new(capture_all(ring, WorkerId(worker as u8))));
            self.commands[worker].send(Command::Capture(capture)).unwrap();
        }
        self.turn();
    }

    /// Packets captured since the last call.
    pub fn captured(&self) -> Vec<CapturedPacket> {
        let mut all = Vec::new();
        for ring in &self.capture_rings {
            while let Some(packet) = ring.pop() {
                all.push((*packet).clone());
                ring.recycle(packet);
            }
        }
        all
    }
}
