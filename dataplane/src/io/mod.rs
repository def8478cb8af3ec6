//! Packet I/O: the device interface between the engine and the outside.
//!
//! The engine sees a device as rings of owned [`Frame`]s. The AF_XDP device is in the crate `vipgate-xdp`; [`memory`]
//! and [`pcap`] are the devices of tests, benchmarks and fuzzers. Every frame that a device hands out returns to it,
//! transmitted or released; [`PacketIo::audit`] allows a check of the sum.

use crate::flow::ids::InterfaceId;
pub mod batch;
pub mod frame_layout;
pub mod handoff;
pub mod memory;
pub mod metadata;
pub mod pcap;

use std::time::Duration;

use vipgate_mem::Frame;

/// A packet and its ingress interface.
#[derive(Debug)]
pub struct Received {
    /// The packet, from the first byte of its Ethernet header.
    pub frame: Frame,
    /// Its ingress interface.
    pub interface: InterfaceId,
}

impl Received {
    /// A packet received from a device.
    #[inline]
    pub fn new(mut frame: Frame, interface: InterfaceId) -> Self {
        frame.set_mark(0);
        Self { frame, interface }
    }
}

/// Locations of a device's frames at one moment. Frames in [`Received`] or held by the engine are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameAudit {
    /// In the free list.
    pub free: u64,
    /// In the fill ring: with the kernel, or the traffic generator, to be received into.
    pub filled: u64,
    /// Queued for transmission or being transmitted.
    pub in_flight: u64,
}

impl FrameAudit {
    /// The frames that the device holds.
    pub fn sum(self) -> u64 {
        self.free + self.filled + self.in_flight
    }
}

/// Receive and transmit rings with their frames, owned by one worker.
pub trait PacketIo {
    /// Appends up to `limit` received packets to `into`, round robin over the interfaces, and prefetches their headers;
    /// returns how many. Does not allocate as long as `into` has space for `limit` more.
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize;

    /// Queues a packet for transmission on `interface`.
    ///
    /// # Errors
    /// Returns the frame when the interface's transmit ring is full.
    fn tx(&mut self, interface: InterfaceId, frame: Frame) -> Result<(), Frame>;

    /// Allocates a frame for a packet of our own of `length` bytes; `None` when all that are large enough are in use.
    fn allocate(&mut self, length: usize) -> Option<Frame>;

    /// Releases a frame. It may belong to another worker's device on the same memory.
    fn release(&mut self, frame: Frame);

    /// Ends a turn: wakes the kernel if it needs a wakeup, collects completed transmissions, refills the fill ring.
    fn flush(&mut self);

    /// Sleeps until a packet arrives, the worker is woken or `timeout` has passed.
    fn wait(&mut self, timeout: Duration);

    /// Where the frames are now.
    fn audit(&self) -> FrameAudit;
}
