//! Packets that the next batch takes in again, in the order in which this one had them: whatever stage puts them off, and whenever it does,
//! none overtakes another.

use std::collections::VecDeque;

use super::MOST_RELEASED;
use crate::io::Received;

/// When a packet's turn is, among those of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn(u16);

impl Turn {
    /// That of packet `i`.
    pub fn of(i: usize) -> Self {
        Self(2 * i as u16)
    }

    /// Right behind packet `i`.
    pub fn behind(i: usize) -> Self {
        Self(2 * i as u16 + 1)
    }
}

/// Packets that are taken in again.
#[derive(Debug)]
pub struct Requeued(Vec<Place>);

#[derive(Debug)]
struct Place {
    turn: Turn,
    /// Among those with one turn, the first one goes first.
    number: u32,
    /// `None`: a packet of the batch, until its frame is moved.
    frame: Option<Received>,
}

impl Default for Requeued {
    fn default() -> Self {
        Self(Vec::with_capacity(MOST_RELEASED))
    }
}

impl Requeued {
    /// A place for a packet, which may be there already.
    pub fn push(&mut self, turn: Turn, frame: Option<Received>) -> u32 {
        let number = self.0.len() as u32;
        self.0.push(Place { turn, number, frame });
        number
    }

    /// A packet has its place: its frame is moved there.
    pub fn fill(&mut self, number: u32, frame: Received) {
        self.0[number as usize].frame = Some(frame);
    }

    /// Puts all of them before what comes around, when each has got its frame.
    #[inline]
    pub fn flush(&mut self, queue: &mut VecDeque<Received>) {
        if !self.0.is_empty() {
            self.flush_some(queue);
        }
    }

    #[cold]
    fn flush_some(&mut self, queue: &mut VecDeque<Received>) {
        self.0.sort_unstable_by_key(|place| (place.turn, place.number));
        for Place { frame, .. } in self.0.drain(..).rev() {
            debug_assert!(frame.is_some(), "each has got its frame");
            if let Some(frame) = frame {
                queue.push_front(frame);
            }
        }
    }
}
