//! Packets that are captured, and those that aren't.

use std::sync::Arc;

use vipgate_dataplane::command::Command;
use vipgate_dataplane::ports::pool::WorkerId;
use vipgate_dataplane::watch::tap::{Captured, Tap, TapFilter, TapRing};

use super::Gateway;

/// Whether packets are captured. What is captured takes another way than what isn't, so tests have both, by draws.
#[derive(Clone, Copy, Debug)]
pub enum Watching {
    Now(u64),
    Not(u64),
    /// The test says what is captured.
    AsToldTo,
}

/// A tap on all packets of a worker.
pub fn everything(ring: &Arc<TapRing>, worker: WorkerId) -> Tap {
    Tap::new(TapFilter::default(), ring.clone(), worker, 2048, u32::MAX)
}

impl Gateway {
    /// Each worker captures what matches from now on, at most so many packets a second and bytes of each.
    pub fn capture(&mut self, filter: &TapFilter, length: usize, rate: u32) {
        self.watching = Watching::AsToldTo;
        self.rings.clear();
        for (worker, commands) in self.commands.iter().enumerate() {
            let ring = Arc::new(TapRing::new(16, length));
            self.rings.push(ring.clone());
            let tap = Tap::new(filter.clone(), ring, WorkerId(worker as u8), length, rate);
            commands.send(Command::Capture(Some(Box::new(tap)))).unwrap();
        }
        self.turn();
    }

    /// Draws whether the next packets are captured.
    pub fn watch_or_not(&mut self) {
        let (was, state) = match self.watching {
            Watching::Now(state) => (true, state),
            Watching::Not(state) => (false, state),
            Watching::AsToldTo => return,
        };
        // A linear congruential generator (Knuth, MMIX): its upper bits are random enough.
        let state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let is = state >> 63 == 0;
        self.watching = if is { Watching::Now(state) } else { Watching::Not(state) };
        if is == was {
            return;
        }
        for (worker, ring) in self.rings.iter().enumerate() {
            let tap = is.then(|| Box::new(everything(ring, WorkerId(worker as u8))));
            self.commands[worker].send(Command::Capture(tap)).unwrap();
        }
        self.turn();
    }

    /// What was captured since it was asked last.
    pub fn captured(&self) -> Vec<Captured> {
        let mut all = Vec::new();
        for ring in &self.rings {
            while let Some(place) = ring.take() {
                all.push((*place).clone());
                ring.give(place);
            }
        }
        all
    }
}
