//! In-memory device for tests and fuzzers, which inject received packets and read sent ones.

use std::collections::VecDeque;
use std::fmt::{self, Debug, Formatter};
use std::time::Duration;

use vipgate_mem::{Arena, Frame, HEADROOM, MemoryError};

use super::{FrameAudit, PacketIo, Received};
use crate::flow::ids::InterfaceId;

/// Bytes of a frame's buffer.
const FRAME_BYTES: u16 = 2048;

/// An in-memory device.
#[derive(Debug)]
pub struct MemoryIo {
    free: Vec<Frame>,
    rx_queue: VecDeque<Received>,
    tx_queue: VecDeque<(InterfaceId, Frame)>,
    tx_capacity: usize,
    total: u64,
    before_rx: BeforeRx,
}

/// Runs once, when packets are received next.
#[derive(Default)]
struct BeforeRx(Option<Box<dyn FnOnce() + Send>>);

impl Debug for BeforeRx {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BeforeRx").field(&self.0.is_some()).finish()
    }
}

impl MemoryIo {
    /// A device with this many frames, which live as long as the process.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn new(frames: usize) -> Result<Self, MemoryError> {
        Ok(Self::with_frames(Arena::allocate(frames, FRAME_BYTES)?.frames()))
    }

    /// A device with existing frames.
    pub fn with_frames(free: Vec<Frame>) -> Self {
        let count = free.len();
        Self {
            free,
            rx_queue: VecDeque::with_capacity(count),
            tx_queue: VecDeque::with_capacity(count),
            tx_capacity: usize::MAX,
            total: count as u64,
            before_rx: BeforeRx::default(),
        }
    }

    /// Runs an action at the start of the next receive: what another thread does while a worker is in a turn.
    pub fn before_rx(&mut self, action: impl FnOnce() + Send + 'static) {
        self.before_rx = BeforeRx(Some(Box::new(action)));
    }

    /// Injects a received packet; false if there is no free frame or it does not fit.
    pub fn inject(&mut self, interface: InterfaceId, packet: &[u8]) -> bool {
        let Some(mut frame) = self.allocate(packet.len()) else { return false };
        if !frame.replace(packet) {
            self.release(frame);
            return false;
        }
        self.rx_queue.push_back(Received::new(frame, interface));
        true
    }

    /// The next packet that was sent, and on which interface.
    pub fn pop_sent(&mut self) -> Option<(InterfaceId, Vec<u8>)> {
        let (interface, frame) = self.tx_queue.pop_front()?;
        let bytes = frame.bytes().to_vec();
        self.release(frame);
        Some((interface, bytes))
    }

    /// Limits the transmit ring to this many packets that are not read yet.
    pub fn limit_tx(&mut self, capacity: usize) {
        self.tx_capacity = capacity;
    }

    /// Frames that it was created with.
    pub fn total(&self) -> u64 {
        self.total
    }
}

impl PacketIo for MemoryIo {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        if let Some(action) = self.before_rx.0.take() {
            action();
        }
        let count = limit.min(self.rx_queue.len());
        into.extend(self.rx_queue.drain(..count));
        count
    }

    fn tx(&mut self, interface: InterfaceId, frame: Frame) -> Result<(), Frame> {
        if self.tx_queue.len() >= self.tx_capacity {
            return Err(frame);
        }
        self.tx_queue.push_back((interface, frame));
        Ok(())
    }

    fn allocate(&mut self, _length: usize) -> Option<Frame> {
        let mut frame = self.free.pop()?;
        frame.reset(HEADROOM);
        Some(frame)
    }

    fn release(&mut self, frame: Frame) {
        self.free.push(frame);
    }

    fn flush(&mut self) {}

    fn wait(&mut self, _timeout: Duration) {}

    fn audit(&self) -> FrameAudit {
        FrameAudit {
            free: self.free.len() as u64,
            filled: self.rx_queue.len() as u64,
            in_flight: self.tx_queue.len() as u64,
        }
    }
}
