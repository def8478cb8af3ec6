//! Packets whose next hop has no link address yet: kept for a moment while the kernel asks for it.
//!
//! Bounded twice, in all and for each neighbour, so that neither a silent neighbour nor a scan of a whole subnet takes
//! the place of others for longer than the patience below.

use std::collections::VecDeque;
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use vipgate_mem::Frame;

use crate::batch::Wanted;
use crate::counters::Direction;
use crate::link::handoff::Wake;
use crate::snapshot::network::Network;
use crate::stage::wrap::Lining;
use crate::time::Tick;
use crate::wire::ethernet::Link;

/// Packets that wait at once.
const MOST: usize = 1024;
/// Packets that wait for one neighbour.
const MOST_PER_NEIGHBOUR: usize = 64;
/// How long a packet waits: a kernel asks three times, a second apart.
const PATIENCE_MS: u32 = 3_000;
/// How often the kernel is asked again.
const ASK_AGAIN_MS: u32 = 500;

/// Neighbours that the workers want the control thread to resolve, and how to wake it.
#[derive(Clone, Debug)]
pub struct Questions {
    /// The questions; a full queue drops some, which are asked again.
    pub queue: Arc<ArrayQueue<Wanted>>,
    /// Wakes the control thread.
    pub bell: Arc<dyn Wake>,
}

impl Questions {
    fn ask(&self, wanted: Wanted) {
        // A full queue means that control is busy with others; the question is asked again soon.
        let _ = self.queue.push(wanted);
        self.bell.wake();
    }
}

/// A packet that is complete but for the link addresses, and not cut yet.
#[derive(Debug)]
pub struct Parked {
    /// The packet.
    pub frame: Frame,
    /// Where it wants to go.
    pub wanted: Wanted,
    /// How it goes there.
    pub departure: Departure,
    since: Tick,
}

/// How a packet leaves once its neighbour is known.
#[derive(Clone, Copy, Debug)]
pub enum Departure {
    /// As it is.
    Whole(Direction),
    /// In pieces.
    Cut(Direction, Pieces),
    /// As it is: our own answer.
    Answer,
}

/// How a packet is cut.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// The longest IP packet that a piece may be, bytes.
    pub mtu: u16,
    /// What comes before each of them, of those that go into a tunnel.
    pub lining: Option<Lining>,
}

/// What became of a packet that waited.
#[derive(Debug)]
pub enum Outcome {
    /// It can go now, with these link addresses.
    Ready(Parked, Link),
    /// Its neighbour didn't answer.
    Expired(Parked),
}

/// The packets of one worker that wait.
#[derive(Debug)]
pub struct Waiting {
    parked: VecDeque<Parked>,
    questions: Questions,
    asked: Tick,
}

impl Waiting {
    /// Nothing waits; questions go to `questions`.
    pub fn new(questions: Questions) -> Self {
        Self { parked: VecDeque::with_capacity(MOST), questions, asked: Tick::default() }
    }

    /// Packets that wait.
    pub fn len(&self) -> usize {
        self.parked.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.parked.is_empty()
    }

    /// Keeps a packet, and asks for its neighbour if nobody has.
    ///
    /// # Errors
    /// Gives the frame back when there is no room for it.
    pub fn park(&mut self, frame: Frame, wanted: Wanted, departure: Departure, now: Tick) -> Result<(), Frame> {
        if self.parked.len() == MOST {
            return Err(frame);
        }
        let already = self.parked.iter().filter(|parked| parked.wanted == wanted).count();
        if already >= MOST_PER_NEIGHBOUR {
            return Err(frame);
        }
        if already == 0 {
            self.questions.ask(wanted);
        }
        self.parked.push_back(Parked { frame, wanted, departure, since: now });
        Ok(())
    }

    /// Looks at each packet once: those that can go, or have waited too long, are handed to `settle`.
    pub fn retry(&mut self, network: &Network, now: Tick, mut settle: impl FnMut(Outcome)) {
        let ask = now.since(self.asked) >= ASK_AGAIN_MS;
        if ask {
            self.asked = now;
        }
        for _ in 0..self.parked.len() {
            let Some(parked) = self.parked.pop_front() else { break };
            let Wanted { interface, address } = parked.wanted;
            if let Some(link) = network.link_to(interface, address) {
                settle(Outcome::Ready(parked, link));
            } else if now.since(parked.since) >= PATIENCE_MS {
                settle(Outcome::Expired(parked));
            } else {
                if ask {
                    self.questions.ask(parked.wanted);
                }
                self.parked.push_back(parked);
            }
        }
    }
}
