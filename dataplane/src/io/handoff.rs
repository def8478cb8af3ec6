//! Hand-off of packets between workers: one ring for each pair. A reply that arrived on another worker's queue goes
//! through it to the worker that owns the session; the frame moves, nothing is copied.

use std::fmt::Debug;
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;

use crate::flow::ids::WorkerId;
use crate::io::Received;

/// Capacity of a ring, packets.
const RING_CAPACITY: usize = 2048;

/// Something that can wake a sleeping worker.
pub trait Wake: Send + Sync + Debug {
    /// Wakes it. Cheap if it is awake.
    fn wake(&self);
}

type Ring = Arc<ArrayQueue<Received>>;

/// One worker's ends of the rings.
#[derive(Debug)]
pub struct WorkerLinks {
    this: WorkerId,
    /// From worker i to this one.
    inbound: Vec<Ring>,
    /// From this worker to worker i, and how to wake it.
    outbound: Vec<(Ring, Arc<dyn Wake>)>,
    /// Workers with packets sent since their last wake-up, one bit each.
    touched: u64,
}

impl WorkerLinks {
    /// A full mesh of rings between as many workers as there are doorbells; element i belongs to worker i.
    pub fn mesh(doorbells: &[Arc<dyn Wake>]) -> Vec<Self> {
        let count = doorbells.len();
        let rings: Vec<Vec<Ring>> =
            (0..count).map(|_| (0..count).map(|_| Arc::new(ArrayQueue::new(RING_CAPACITY))).collect()).collect();
        (0..count)
            .map(|this| Self {
                this: WorkerId(this as u8),
                inbound: rings.iter().map(|from| from[this].clone()).collect(),
                outbound: rings[this].iter().cloned().zip(doorbells.iter().cloned()).collect(),
                touched: 0,
            })
            .collect()
    }

    /// The worker whose ends these are.
    pub fn worker(&self) -> WorkerId {
        self.this
    }

    /// Number of workers.
    pub fn workers(&self) -> u8 {
        self.outbound.len().max(1) as u8
    }

    /// Appends up to `limit` packets from other workers to `into`; returns how many.
    pub fn receive(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        let before = into.len();
        for ring in &self.inbound {
            while into.len() - before < limit {
                let Some(received) = ring.pop() else { break };
                received.frame.prefetch();
                into.push(received);
            }
        }
        into.len() - before
    }

    /// Sends a packet to another worker.
    ///
    /// # Errors
    /// Returns the packet if the ring is full, or there is no other worker of this number.
    pub fn send(&mut self, to: WorkerId, packet: Received) -> Result<(), Received> {
        let at = usize::from(to.0);
        if to == self.this || at >= self.outbound.len() {
            return Err(packet);
        }
        self.outbound[at].0.push(packet)?;
        self.touched |= 1 << (at % 64);
        Ok(())
    }

    /// Wakes the workers with packets sent since the last call.
    pub fn wake_receivers(&mut self) {
        while self.touched != 0 {
            let at = self.touched.trailing_zeros() as usize;
            self.touched &= self.touched - 1;
            if let Some((_, doorbell)) = self.outbound.get(at) {
                doorbell.wake();
            }
        }
    }

    /// Whether no packet is pending for this worker.
    pub fn is_empty(&self) -> bool {
        self.inbound.iter().all(|ring| ring.is_empty())
    }

    /// Packets pending for this worker.
    pub fn pending(&self) -> usize {
        self.inbound.iter().map(|ring| ring.len()).sum()
    }
}
