//! Worker to worker: one ring for each pair. A reply that the network delivered to another worker's queue goes over it to
//! the worker that owns its session; frames move, nothing is copied.

use std::fmt::Debug;
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;

use crate::io::Received;
use crate::ports::pool::WorkerId;

/// Packets that wait in one ring at most.
const RING: usize = 2048;

/// Something that can wake a sleeping worker.
pub trait Wake: Send + Sync + Debug {
    /// Wakes it. Cheap when it is awake.
    fn wake(&self);
}

type Ring = Arc<ArrayQueue<Received>>;

/// One worker's ends of the rings.
#[derive(Debug)]
pub struct Links {
    this: WorkerId,
    /// From worker i to this one.
    inbound: Vec<Ring>,
    /// From this worker to worker i, and how to wake it.
    outbound: Vec<(Ring, Arc<dyn Wake>)>,
    /// Workers that were sent something since the last time they were woken.
    touched: u64,
}

impl Links {
    /// The rings between as many workers as there are doorbells; element i belongs to worker i.
    pub fn mesh(doorbells: &[Arc<dyn Wake>]) -> Vec<Self> {
        let count = doorbells.len();
        let rings: Vec<Vec<Ring>> =
            (0..count).map(|_| (0..count).map(|_| Arc::new(ArrayQueue::new(RING))).collect()).collect();
        (0..count)
            .map(|this| Self {
                this: WorkerId(this as u8),
                inbound: rings.iter().map(|from| from[this].clone()).collect(),
                outbound: rings[this].iter().cloned().zip(doorbells.iter().cloned()).collect(),
                touched: 0,
            })
            .collect()
    }

    /// How many workers there are.
    pub fn workers(&self) -> u8 {
        self.outbound.len().max(1) as u8
    }

    /// Appends up to `limit` packets that other workers handed over to `into`; returns how many.
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

    /// Hands a packet to a worker.
    ///
    /// # Errors
    /// Gives the packet back when the ring is full, or there is no such other worker.
    pub fn send(&mut self, to: WorkerId, packet: Received) -> Result<(), Received> {
        let at = usize::from(to.0);
        if to == self.this || at >= self.outbound.len() {
            return Err(packet);
        }
        self.outbound[at].0.push(packet)?;
        self.touched |= 1 << (at % 64);
        Ok(())
    }

    /// Wakes the workers that were sent something since the last call.
    pub fn ring(&mut self) {
        while self.touched != 0 {
            let at = self.touched.trailing_zeros() as usize;
            self.touched &= self.touched - 1;
            if let Some((_, doorbell)) = self.outbound.get(at) {
                doorbell.wake();
            }
        }
    }

    /// Whether nothing waits for this worker.
    pub fn is_empty(&self) -> bool {
        self.inbound.iter().all(|ring| ring.is_empty())
    }

    /// Packets that wait for this worker.
    pub fn waiting(&self) -> usize {
        self.inbound.iter().map(|ring| ring.len()).sum()
    }
}
