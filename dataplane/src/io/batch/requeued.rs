//! Requeued packets: processed again by the next batch, in the order of this one, whichever stage requeued them. No
//! packet overtakes another.

use std::collections::VecDeque;

use super::MAX_REINJECTED;
use crate::io::Received;

/// Position of a requeued packet among the packets of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePosition(u16);

impl QueuePosition {
    /// The position of packet `i`.
    pub fn of(i: usize) -> Self {
        Self(2 * i as u16)
    }

    /// Right after packet `i`.
    pub fn after(i: usize) -> Self {
        Self(2 * i as u16 + 1)
    }
}

/// The packets to requeue.
#[derive(Debug)]
pub struct Requeued(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    position: QueuePosition,
    /// Order among entries with the same position.
    number: u32,
    /// `None` for a packet of the current batch, until its frame is moved here.
    frame: Option<Received>,
}

impl Default for Requeued {
    fn default() -> Self {
        Self(Vec::with_capacity(MAX_REINJECTED))
    }
}

impl Requeued {
    /// Reserves an entry for a packet, with its frame if that is at hand; returns the entry's number.
    pub fn push(&mut self, position: QueuePosition, frame: Option<Received>) -> u32 {
        let number = self.0.len() as u32;
        self.0.push(Entry { position, number, frame });
        number
    }

    /// Moves a frame into a reserved entry.
    pub fn fill(&mut self, number: u32, frame: Received) {
        self.0[number as usize].frame = Some(frame);
    }

    /// Moves all packets to the front of `queue`, once each entry has its frame.
    #[inline]
    pub fn flush(&mut self, queue: &mut VecDeque<Received>) {
        if !self.0.is_empty() {
            self.flush_some(queue);
        }
    }

    #[cold]
    fn flush_some(&mut self, queue: &mut VecDeque<Received>) {
        self.0.sort_unstable_by_key(|entry| (entry.position, entry.number));
        for Entry { frame, .. } in self.0.drain(..).rev() {
            debug_assert!(frame.is_some(), "every entry has its frame");
            if let Some(frame) = frame {
                queue.push_front(frame);
            }
        }
    }
}
