//! A device in memory: tests and fuzzers put packets in at one end and take them out at the other.

use std::collections::VecDeque;
use std::time::Duration;

use vipgate_mem::{Arena, Frame, HEADROOM, MemoryError};

use super::{FrameAudit, InterfaceId, PacketIo, Received};

/// Bytes of a frame's buffer.
const FRAME_BYTES: u16 = 2048;

/// A device in memory.
#[derive(Debug)]
pub struct MemoryIo {
    free: Vec<Frame>,
    arrived: VecDeque<Received>,
    sent: VecDeque<(InterfaceId, Frame)>,
    transmit_room: usize,
    total: u64,
}

impl MemoryIo {
    /// A device with this many frames, which live as long as the process.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn new(frames: usize) -> Result<Self, MemoryError> {
        Ok(Self::with_frames(Arena::allocate(frames, FRAME_BYTES)?.frames()))
    }

    /// A device with frames that were made before.
    pub fn with_frames(free: Vec<Frame>) -> Self {
        let count = free.len();
        Self {
            free,
            arrived: VecDeque::with_capacity(count),
            sent: VecDeque::with_capacity(count),
            transmit_room: usize::MAX,
            total: count as u64,
        }
    }

    /// Lets a packet arrive; says whether there was a frame for it and it fits.
    pub fn inject(&mut self, interface: InterfaceId, packet: &[u8]) -> bool {
        let Some(mut frame) = self.take() else { return false };
        if !frame.replace(packet) {
            self.give(frame);
            return false;
        }
        self.arrived.push_back(Received::new(frame, interface));
        true
    }

    /// The next packet that was sent, and where.
    pub fn sent(&mut self) -> Option<(InterfaceId, Vec<u8>)> {
        let (interface, frame) = self.sent.pop_front()?;
        let bytes = frame.bytes().to_vec();
        self.give(frame);
        Some((interface, bytes))
    }

    /// Takes at most this many packets for transmission until they are collected, as a full ring does.
    pub fn limit_transmit(&mut self, room: usize) {
        self.transmit_room = room;
    }

    /// Frames that it was made with.
    pub fn total(&self) -> u64 {
        self.total
    }
}

impl PacketIo for MemoryIo {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        let count = limit.min(self.arrived.len());
        into.extend(self.arrived.drain(..count));
        count
    }

    fn tx(&mut self, interface: InterfaceId, frame: Frame) -> Result<(), Frame> {
        if self.sent.len() >= self.transmit_room {
            return Err(frame);
        }
        self.sent.push_back((interface, frame));
        Ok(())
    }

    fn take(&mut self) -> Option<Frame> {
        let mut frame = self.free.pop()?;
        frame.reset(HEADROOM);
        Some(frame)
    }

    fn give(&mut self, frame: Frame) {
        self.free.push(frame);
    }

    fn flush(&mut self) {}

    fn wait(&mut self, _timeout: Duration) {}

    fn audit(&self) -> FrameAudit {
        FrameAudit {
            free: self.free.len() as u64,
            filled: self.arrived.len() as u64,
            in_flight: self.sent.len() as u64,
        }
    }
}
