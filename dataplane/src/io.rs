//! Where packets come from and go to: the one door between the engine and the world.
//!
//! The engine sees a device as rings of owned [`Frame`]s. AF_XDP stands in the crate `vipgate-xdp`; [`memory`] and
//! [`pcap`] are the devices of tests, benchmarks and fuzzers. Every frame that a device hands out comes back to it,
//! as transmitted or as given back: [`PacketIo::audit`] lets anyone check the sum.

pub mod memory;
pub mod note;
pub mod pcap;

use std::time::Duration;

use vipgate_mem::{FRAME, Frame, HEADROOM};

use crate::wire::ethernet;

/// One interface of the gateway: its place in the configuration's list of interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InterfaceId(pub u8);

/// The longest IP packet that a frame receives, bytes: the kernel drops what is longer. What leaves isn't longer either, so that all
/// gateways and tunnels agree on what a link carries.
pub const MAX_MTU: u16 = FRAME - HEADROOM - ethernet::HEADER as u16;

/// A packet and the interface that it came in on.
#[derive(Debug)]
pub struct Received {
    /// The packet, from the first byte of its Ethernet header.
    pub frame: Frame,
    /// Where it came in.
    pub interface: InterfaceId,
}

impl Received {
    /// A packet from outside.
    #[inline]
    pub fn new(mut frame: Frame, interface: InterfaceId) -> Self {
        frame.set_mark(0);
        Self { frame, interface }
    }
}

/// Where a device's frames are at one moment. Frames in [`Received`] or in the engine's hands are in none of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameAudit {
    /// Ready to be taken.
    pub free: u64,
    /// With the kernel or the generator, to be received into.
    pub filled: u64,
    /// Queued for transmission or being transmitted.
    pub in_flight: u64,
}

impl FrameAudit {
    /// The frames that the device answers for now.
    pub fn sum(self) -> u64 {
        self.free + self.filled + self.in_flight
    }
}

/// A set of receive and transmit rings with the frames for them, owned by one worker.
pub trait PacketIo {
    /// Appends up to `limit` received packets to `into`, taking the interfaces in turn, and begins to fetch their headers from
    /// memory; returns how many.
    /// Does not allocate as long as `into` has room for `limit` more.
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize;

    /// Queues a packet for transmission on `interface`.
    ///
    /// # Errors
    /// Gives the frame back when the interface's ring is full.
    fn tx(&mut self, interface: InterfaceId, frame: Frame) -> Result<(), Frame>;

    /// A free frame to write a packet of our own into; `None` when all are in use.
    fn take(&mut self) -> Option<Frame>;

    /// Gives a frame back that isn't needed any more. It may have come from another worker's device on the same memory.
    fn give(&mut self, frame: Frame);

    /// Ends a turn: wakes the kernel where it waits to be woken, collects what was transmitted, refills what was received.
    fn flush(&mut self);

    /// Sleeps until a packet arrives, the doorbell rings or `timeout` has passed.
    fn wait(&mut self, timeout: Duration);

    /// Where the frames are.
    fn audit(&self) -> FrameAudit;
}
