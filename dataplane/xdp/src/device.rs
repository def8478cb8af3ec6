//! AF_XDP device of one worker: a socket for each of its (interface, queue) pairs, over a shared UMEM.
//!
//! ```text
//!        fill ring -> kernel -> receive ring -> Frame -> engine -> Frame -> transmit ring -> kernel -> completion ring
//!           ^                                                                                              |
//!           +---- free frames <----------------------------------------------------------------------------+
//! ```
//! A frame is in exactly one of these states; [`XdpDevice::audit`] counts the device's frames.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::{FrameAudit, PacketIo, Received};
use vipgate_mem::Frame;
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, TxQueue};

use crate::doorbell::Doorbell;
use crate::frames::FreeFrames;
use crate::multi_buffer::{self, Discards, Reception};
use crate::stats::{FramePool, SocketStats, is_zero_copy};
use crate::umem::{RING_SIZE, SharedUmem};

/// Sleep while poll(2) reports POLLERR or POLLHUP.
const ERROR_PAUSE: Duration = Duration::from_millis(5);
/// Descriptors per ring operation.
const BURST: usize = 64;
/// In copy mode, Linux before 6.17 sends at most 32 packets per call, so a full ring needs this many calls.
const MAX_KICKS: u32 = RING_SIZE / 32 + 1;

/// One socket and its rings.
#[derive(Debug)]
pub(crate) struct QueueSocket {
    interface: InterfaceId,
    queue: u32,
    transmit: TxQueue,
    receive: RxQueue,
    fill: FillQueue,
    completion: CompQueue,
    /// Packets for the transmit ring at the next flush.
    pending: Vec<FrameDesc>,
    /// Frames on the fill ring, in the kernel, and on the receive ring.
    filled: u32,
    /// Frames on the transmit ring, in the kernel, and on the completion ring.
    in_flight: u32,
    reception: Reception,
}

/// The device of one worker.
#[derive(Debug)]
pub struct XdpDevice {
    ports: Vec<QueueSocket>,
    /// Index in `ports` of the socket that transmits on each interface.
    senders: Vec<Option<usize>>,
    free: FreeFrames,
    discards: Arc<Discards>,
    /// Target of `filled` for each socket.
    fill_ring: u32,
    doorbell: Arc<Doorbell>,
    poll_fds: Vec<libc::pollfd>,
    burst: Box<[FrameDesc; BURST]>,
    /// Socket that the last receive started with.
    first: usize,
}

impl QueueSocket {
    pub(crate) fn new(
        interface: InterfaceId,
        queue: u32,
        transmit: TxQueue,
        receive: RxQueue,
        fill: FillQueue,
        completion: CompQueue,
    ) -> Self {
        let pending = Vec::with_capacity(RING_SIZE as usize);
        Self {
            interface,
            queue,
            transmit,
            receive,
            fill,
            completion,
            pending,
            filled: 0,
            in_flight: 0,
            reception: Reception::Idle,
        }
    }
}

impl XdpDevice {
    pub(crate) fn new(
        umem: Arc<SharedUmem>,
        ports: Vec<QueueSocket>,
        interfaces: usize,
        fill_ring: u32,
        doorbell: Doorbell,
    ) -> Self {
        let sender = |interface: usize| ports.iter().position(|port| usize::from(port.interface.0) == interface);
        let senders = (0..interfaces).map(sender).collect();
        let poll_fd = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut poll_fds: Vec<_> = ports.iter().map(|port| poll_fd(port.receive.fd().as_raw_fd())).collect();
        poll_fds.push(poll_fd(doorbell.fd()));
        let burst = Box::new([FrameDesc::default(); BURST]);
        Self {
            ports,
            senders,
            free: FreeFrames::new(umem),
            discards: Arc::default(),
            fill_ring,
            doorbell: Arc::new(doorbell),
            poll_fds,
            burst,
            first: 0,
        }
    }

    /// Wakes the worker from poll(2).
    pub fn doorbell(&self) -> Arc<Doorbell> {
        self.doorbell.clone()
    }

    /// Its sockets: interface, queue, file descriptor for the XSKMAP, and whether it uses zero copy.
    pub fn sockets(&self) -> impl Iterator<Item = (InterfaceId, u32, i32, bool)> {
        self.ports.iter().map(|port| {
            let fd = port.receive.fd().as_raw_fd();
            (port.interface, port.queue, fd, is_zero_copy(fd))
        })
    }

    /// Statistics of the sockets, for other threads.
    pub fn socket_stats(&self) -> SocketStats {
        SocketStats::new(self.ports.iter().map(|port| port.receive.fd().as_raw_fd()).collect(), self.discards.clone())
    }

    /// The shared frame pool.
    pub fn pool(&self) -> FramePool {
        FramePool(self.free.umem.clone())
    }

    /// Refills the fill rings of all sockets.
    pub(crate) fn refill(&mut self) {
        for port in &mut self.ports {
            fill(port, self.fill_ring, &mut self.burst, &mut self.free);
        }
    }

    /// Fills the fill rings of new sockets, and wakes drivers that have found them empty: they receive nothing until
    /// then, neither for the gateway nor for the kernel.
    pub(crate) fn prefill(&mut self) {
        self.refill();
        self.ports.iter_mut().for_each(wake_receiver);
    }

    /// Moves pending packets to the transmit rings and reclaims frames from the completion rings.
    fn transmit(&mut self) {
        for port in &mut self.ports {
            if !port.pending.is_empty() {
                // SAFETY: the frames were consumed when they were queued, so there is no other reference; they belong
                // to this UMEM. `tx` ensures that the ring has capacity for all of them.
                let sent = unsafe { port.transmit.produce(&port.pending) };
                debug_assert_eq!(sent, port.pending.len(), "tx limits the number of pending packets");
                port.in_flight += sent as u32;
                port.pending.clear();
            }
            if port.in_flight > 0 {
                kick(&mut port.transmit);
                reclaim(port, &mut self.burst, &mut self.free);
            }
        }
    }
}

/// Fills a socket's fill ring up to `fill_ring` frames, as far as frames are available.
fn fill(port: &mut QueueSocket, fill_ring: u32, burst: &mut [FrameDesc; BURST], free: &mut FreeFrames) {
    while port.filled < fill_ring {
        let target = BURST.min((fill_ring - port.filled) as usize);
        let mut count = 0;
        while count < target {
            let Some(frame) = free.allocate() else { break };
            let Some(descriptor) = free.umem.descriptor(frame) else { continue };
            burst[count] = descriptor;
            count += 1;
        }
        if count == 0 {
            return;
        }
        // SAFETY: the frames were consumed just now, so there is no other reference; they belong to this UMEM. The ring
        // has twice as many entries as `fill_ring`, so it has capacity for all of them.
        let filled = unsafe { port.fill.produce(&burst[..count]) };
        debug_assert_eq!(filled, count, "the fill ring is larger than the number of filled frames");
        port.filled += filled as u32;
    }
}

/// Wakes a driver that waits for frames on the fill ring.
fn wake_receiver(port: &mut QueueSocket) {
    if port.fill.needs_wakeup() {
        // An error loses nothing; the next call tries again.
        let _ = port.fill.wakeup(port.receive.fd_mut(), 0);
    }
}

/// Wakes the kernel until the transmit ring is empty or there is no progress.
fn kick(transmit: &mut TxQueue) {
    for _ in 0..MAX_KICKS {
        if !transmit.needs_wakeup() {
            return;
        }
        let free_before = transmit.nb_free_exact();
        // Errors are those of the interface (down, removed, packet too long); remaining descriptors stay in flight.
        if free_before == RING_SIZE || transmit.wakeup().is_err() || transmit.nb_free_exact() == free_before {
            return;
        }
    }
}

/// Moves frames from the completion ring to the free list.
fn reclaim(port: &mut QueueSocket, burst: &mut [FrameDesc; BURST], free: &mut FreeFrames) {
    loop {
        // SAFETY: the descriptors in `burst` are only written to.
        let count = unsafe { port.completion.consume(&mut burst[..]) };
        for descriptor in &burst[..count] {
            // SAFETY: the kernel has returned the frame just now, and no other frame is made from the descriptor.
            if let Some(frame) = unsafe { free.umem.frame(descriptor) } {
                free.release(frame);
            }
        }
        port.in_flight -= count as u32;
        if count < BURST {
            return;
        }
    }
}

impl PacketIo for XdpDevice {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        let mut received = 0;
        let count = self.ports.len();
        // Round robin, so that a busy socket doesn't starve the others.
        self.first = (self.first + 1) % count.max(1);
        for at in (self.first..count).chain(0..self.first) {
            let capacity = (limit - received).min(BURST);
            if capacity == 0 {
                break;
            }
            let port = &mut self.ports[at];
            // SAFETY: the descriptors in `burst` are only written to.
            let consumed = unsafe { port.receive.consume(&mut self.burst[..capacity]) };
            if consumed == 0 {
                wake_receiver(port);
            }
            for descriptor in &self.burst[..consumed] {
                // SAFETY: the kernel has passed the frame just now, and no other frame is made from the descriptor.
                let Some(frame) = (unsafe { self.free.umem.frame(descriptor) }) else { continue };
                let continues = descriptor.has_more_frames();
                if let Some(packet) = port.reception.push(frame, continues, &mut self.free, &self.discards) {
                    packet.prefetch();
                    into.push(Received::new(packet, port.interface));
                    received += 1;
                }
            }
            port.filled -= consumed as u32;
            // Before these packets are processed: packets received meanwhile need frames.
            fill(port, self.fill_ring, &mut self.burst, &mut self.free);
        }
        received
    }

    fn tx(&mut self, interface: InterfaceId, frame: Frame) -> Result<(), Frame> {
        let Some(at) = self.senders.get(usize::from(interface.0)).copied().flatten() else { return Err(frame) };
        if frame.is_empty() {
            // The kernel discards empty descriptors without a completion.
            self.release(frame);
            return Ok(());
        }
        let (port, umem) = (&mut self.ports[at], &self.free.umem);
        // The completion ring has the size of the transmit ring: more frames in flight would be lost.
        let capacity = RING_SIZE as usize - port.in_flight as usize - port.pending.len();
        if capacity == 0 {
            return Err(frame);
        }
        if !umem.fits(&frame) {
            return multi_buffer::send(frame, capacity, &mut self.free, &mut port.pending);
        }
        if let Some(descriptor) = umem.descriptor_with_packet(frame) {
            port.pending.push(descriptor);
        }
        Ok(())
    }

    fn allocate(&mut self, length: usize) -> Option<Frame> {
        self.free.allocate_for(length)
    }

    fn release(&mut self, frame: Frame) {
        self.free.release(frame);
    }

    fn flush(&mut self) {
        self.transmit();
        self.refill();
        self.free.release_surplus();
    }

    fn wait(&mut self, timeout: Duration) {
        let milliseconds = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the array is valid during the call, with this length; its file descriptors are owned by the sockets
        // and the doorbell, which are fields of self. An error (a signal) only ends the sleep.
        unsafe { libc::poll(self.poll_fds.as_mut_ptr(), self.poll_fds.len() as libc::nfds_t, milliseconds) };
        // Sockets of an interface that is down or removed are always ready; sleeping prevents a busy loop.
        if self.poll_fds.iter().any(|it| it.revents & (libc::POLLERR | libc::POLLHUP) != 0) {
            std::thread::sleep(timeout.min(ERROR_PAUSE));
        }
    }

    fn audit(&self) -> FrameAudit {
        FrameAudit {
            free: self.free.count() as u64,
            filled: self.ports.iter().map(|port| u64::from(port.filled) + port.reception.frames()).sum(),
            in_flight: self.ports.iter().map(|port| u64::from(port.in_flight) + port.pending.len() as u64).sum(),
        }
    }
}
