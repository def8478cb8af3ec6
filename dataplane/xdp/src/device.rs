//! The AF_XDP device of one worker: a socket for each of its (interface, queue) pairs, all over one UMEM.
//!
//! ```text
//!        fill ring -> kernel -> receive ring -> Frame -> engine -> Frame -> transmit ring -> kernel -> completion ring
//!           ^                                                                                              |
//!           +---- free frames <----------------------------------------------------------------------------+
//! ```
//! A frame is in exactly one of these places; what the device holds says [`XdpDevice::audit`].

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use vipgate_dataplane::io::{FrameAudit, InterfaceId, PacketIo, Received};
use vipgate_mem::{Frame, HEADROOM};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, TxQueue};

use crate::doorbell::Doorbell;
use crate::figures::{Losses, Pool};
use crate::umem::{RING, SharedUmem};

/// Free frames that a worker keeps for itself; more goes to the shared pool.
const KEEP: usize = 512;
/// How long to sleep when a socket says nothing but that it is broken.
const BROKEN_LINK_PAUSE: Duration = Duration::from_millis(5);
/// Descriptors that move at once.
const BURST: usize = 64;
/// In copy mode the kernel before Linux 6.17 sends at most 32 packets for each call, so a full ring takes this many.
const KICKS: u32 = RING / 32 + 1;

/// One socket and its rings.
#[derive(Debug)]
pub(crate) struct Port {
    interface: InterfaceId,
    queue: u32,
    transmit: TxQueue,
    receive: RxQueue,
    fill: FillQueue,
    completion: CompQueue,
    /// Packets for the transmit ring at the end of this turn.
    pending: Vec<FrameDesc>,
    /// Frames lent to the kernel to receive into, and received ones that nobody has taken yet.
    filled: u32,
    /// Frames on the transmit ring, in the kernel, and on the completion ring.
    in_flight: u32,
}

/// The device of one worker.
#[derive(Debug)]
pub struct XdpDevice {
    umem: Arc<SharedUmem>,
    ports: Vec<Port>,
    /// Place in `ports` of the socket that sends on an interface, by interface.
    senders: Vec<Option<usize>>,
    free: Vec<Frame>,
    /// Frames that each socket should have to receive into, taken or not.
    fill_ring: u32,
    doorbell: Arc<Doorbell>,
    polled: Vec<libc::pollfd>,
    burst: Box<[FrameDesc; BURST]>,
    first: usize,
}

impl Port {
    pub(crate) fn new(
        interface: InterfaceId,
        queue: u32,
        (transmit, receive): (TxQueue, RxQueue),
        (fill, completion): (FillQueue, CompQueue),
    ) -> Self {
        let pending = Vec::with_capacity(RING as usize);
        Self { interface, queue, transmit, receive, fill, completion, pending, filled: 0, in_flight: 0 }
    }
}

impl XdpDevice {
    pub(crate) fn new(
        umem: Arc<SharedUmem>,
        ports: Vec<Port>,
        interfaces: usize,
        fill_ring: u32,
        doorbell: Doorbell,
    ) -> Self {
        let sender = |interface: usize| ports.iter().position(|port| usize::from(port.interface.0) == interface);
        let senders = (0..interfaces).map(sender).collect();
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut polled: Vec<_> = ports.iter().map(|port| poll(port.receive.fd().as_raw_fd())).collect();
        polled.push(poll(doorbell.fd()));
        let burst = Box::new([FrameDesc::default(); BURST]);
        let free = Vec::with_capacity(4 * KEEP);
        Self { umem, ports, senders, free, fill_ring, doorbell: Arc::new(doorbell), polled, burst, first: 0 }
    }

    /// Its bell.
    pub fn doorbell(&self) -> Arc<Doorbell> {
        self.doorbell.clone()
    }

    /// Its sockets: interface, queue, descriptor for the steering program, and whether frames are shared with the NIC.
    pub fn sockets(&self) -> impl Iterator<Item = (InterfaceId, u32, i32, bool)> {
        self.ports.iter().map(|port| {
            let fd = port.receive.fd().as_raw_fd();
            (port.interface, port.queue, fd, is_zero_copy(fd))
        })
    }

    /// A view of what the device counts, for other threads.
    pub fn losses(&self) -> Losses {
        Losses { sockets: self.ports.iter().map(|port| port.receive.fd().as_raw_fd()).collect() }
    }

    /// The frames of all workers together.
    pub fn pool(&self) -> Pool {
        Pool(self.umem.clone())
    }

    /// Lends frames to the kernel until it has as many as it should.
    pub(crate) fn refill(&mut self) {
        for port in &mut self.ports {
            lend(port, self.fill_ring, &self.umem, &mut self.burst, &mut self.free);
        }
    }

    /// Puts the turn's packets on the transmit rings and collects those that the kernel has sent.
    fn transmit(&mut self) {
        for port in &mut self.ports {
            if !port.pending.is_empty() {
                // SAFETY: the frames were taken apart when they were queued, so nobody else uses them; they are of this
                // UMEM. `tx` has made sure that the ring has room for all of them.
                let sent = unsafe { port.transmit.produce(&port.pending) };
                debug_assert_eq!(sent, port.pending.len(), "tx counted the room");
                port.in_flight += sent as u32;
                port.pending.clear();
            }
            if port.in_flight > 0 {
                kick(&mut port.transmit);
                collect(port, &self.umem, &mut self.burst, &mut self.free);
            }
        }
    }

    /// Leaves frames that this worker doesn't need to those who lack some.
    fn share(&mut self) {
        while self.free.len() > 2 * KEEP {
            let Some(frame) = self.free.pop() else { return };
            // The pool has room for all frames that there are.
            if let Err(frame) = self.umem.pool.push(frame) {
                self.free.push(frame);
                return;
            }
        }
    }
}

/// Lends frames to the kernel on one socket, until it has as many as it should or there are none.
fn lend(port: &mut Port, fill_ring: u32, umem: &SharedUmem, burst: &mut [FrameDesc; BURST], free: &mut Vec<Frame>) {
    while port.filled < fill_ring {
        let wanted = BURST.min((fill_ring - port.filled) as usize);
        let mut count = 0;
        while count < wanted {
            let Some(frame) = free.pop().or_else(|| umem.pool.pop()) else { break };
            let Some(descriptor) = umem.descriptor(frame) else { continue };
            burst[count] = descriptor;
            count += 1;
        }
        if count == 0 {
            return;
        }
        // SAFETY: the frames were taken apart just now, so nobody else uses them; they are of this UMEM. The ring
        // has twice as many places as we ever lend, so it takes all of them.
        let lent = unsafe { port.fill.produce(&burst[..count]) };
        debug_assert_eq!(lent, count, "the fill ring has room for all that we lend");
        port.filled += lent as u32;
    }
}

/// Lets the kernel send, until the ring is empty or nothing moves.
fn kick(transmit: &mut TxQueue) {
    for _ in 0..KICKS {
        if !transmit.needs_wakeup() {
            return;
        }
        let before = transmit.nb_free_exact();
        // An error is the link's (down, gone, too long a packet); what remains on the ring stays counted as in flight.
        if before == RING || transmit.wakeup().is_err() || transmit.nb_free_exact() == before {
            return;
        }
    }
}

fn collect(port: &mut Port, umem: &SharedUmem, burst: &mut [FrameDesc; BURST], free: &mut Vec<Frame>) {
    loop {
        // SAFETY: the descriptors in `burst` are only written to.
        let count = unsafe { port.completion.consume(&mut burst[..]) };
        for descriptor in &burst[..count] {
            // SAFETY: the kernel gave the frame back just now, and this is the one place that takes it.
            if let Some(mut frame) = unsafe { umem.frame(descriptor) } {
                frame.reset(HEADROOM);
                free.push(frame);
            }
        }
        port.in_flight -= count as u32;
        if count < BURST {
            return;
        }
    }
}

fn is_zero_copy(socket: i32) -> bool {
    let mut options = 0_u32;
    let mut length = 4;
    // SAFETY: the kernel writes at most `length` bytes into `options` (struct xdp_options is one u32).
    let result = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_XDP,
            libxdp_sys::XDP_OPTIONS.cast_signed(),
            (&raw mut options).cast(),
            &raw mut length,
        )
    };
    result == 0 && options & libxdp_sys::XDP_OPTIONS_ZEROCOPY != 0
}

impl PacketIo for XdpDevice {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        let mut received = 0;
        let count = self.ports.len();
        // Each turn begins with another socket, so that a busy one doesn't starve the others.
        self.first = (self.first + 1) % count.max(1);
        for at in (self.first..count).chain(0..self.first) {
            let room = (limit - received).min(BURST);
            if room == 0 {
                break;
            }
            let port = &mut self.ports[at];
            // SAFETY: the descriptors in `burst` are only written to.
            let taken = unsafe { port.receive.consume(&mut self.burst[..room]) };
            if taken == 0 && port.fill.needs_wakeup() {
                // Nothing is lost by an error here; the next turn tries again.
                let _ = port.fill.wakeup(port.receive.fd_mut(), 0);
            }
            for descriptor in &self.burst[..taken] {
                // SAFETY: the kernel gave the frame to us just now, and this is the one place that takes it.
                if let Some(frame) = unsafe { self.umem.frame(descriptor) } {
                    frame.prefetch();
                    into.push(Received::new(frame, port.interface));
                }
            }
            port.filled -= taken as u32;
            received += taken;
            // Before these packets are worked on: what comes meanwhile needs frames.
            lend(port, self.fill_ring, &self.umem, &mut self.burst, &mut self.free);
        }
        received
    }

    fn tx(&mut self, interface: InterfaceId, frame: Frame) -> Result<(), Frame> {
        let Some(at) = self.senders.get(usize::from(interface.0)).copied().flatten() else { return Err(frame) };
        if frame.is_empty() {
            // The kernel forgets such a descriptor without giving its frame back.
            self.give(frame);
            return Ok(());
        }
        let port = &mut self.ports[at];
        // The completion ring is as long as the transmit ring: more in flight than it holds would be lost.
        if port.in_flight as usize + port.pending.len() >= RING as usize {
            return Err(frame);
        }
        if let Some(descriptor) = self.umem.descriptor_with_packet(frame) {
            port.pending.push(descriptor);
        }
        Ok(())
    }

    fn take(&mut self) -> Option<Frame> {
        let mut frame = self.free.pop().or_else(|| self.umem.pool.pop())?;
        frame.reset(HEADROOM);
        Some(frame)
    }

    fn give(&mut self, frame: Frame) {
        self.free.push(frame);
    }

    fn flush(&mut self) {
        self.transmit();
        self.refill();
        self.share();
    }

    fn wait(&mut self, timeout: Duration) {
        let milliseconds = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the array lives until the call returns and is as long as said; its descriptors stay open as long as
        // the sockets and the bell that own them, which are fields of self. An error (a signal) only ends the sleep.
        unsafe { libc::poll(self.polled.as_mut_ptr(), self.polled.len() as libc::nfds_t, milliseconds) };
        // A socket whose interface is down or gone is "ready" all the time; that is no reason to spin.
        if self.polled.iter().any(|polled| polled.revents & (libc::POLLERR | libc::POLLHUP) != 0) {
            std::thread::sleep(timeout.min(BROKEN_LINK_PAUSE));
        }
    }

    fn audit(&self) -> FrameAudit {
        FrameAudit {
            free: self.free.len() as u64,
            filled: self.ports.iter().map(|port| u64::from(port.filled)).sum(),
            in_flight: self.ports.iter().map(|port| u64::from(port.in_flight) + port.pending.len() as u64).sum(),
        }
    }
}
