//! Opening the sockets of all workers, all or none.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use thiserror::Error;
use vipgate_dataplane::io::InterfaceId;
use xsk_rs::Socket;
use xsk_rs::config::{BindFlags, Interface, LibxdpFlags, QueueSize, SocketConfig};

use crate::device::{Port, XdpDevice};
use crate::doorbell::Doorbell;
use crate::nic::Nic;
use crate::steering::MOST_QUEUES;
pub use crate::umem::{DEFAULT_FILL_RING, FILL_RINGS};
use crate::umem::{RING, SharedUmem};

/// Frames for each socket beside those to receive into: in transmission, and half as many in the engine's hands.
const FRAMES_BESIDE: u32 = RING + RING / 2;
/// The smallest fill ring that a gateway without a configured one starts with, where memory is scarce.
const MIN_DEFAULT_FILL_RING: u32 = 1024;
/// How long to wait for a queue that a dead process had.
const PATIENCE: Duration = Duration::from_secs(3);
/// How often to try.
const RETRY: Duration = Duration::from_millis(10);

/// Whether frames are shared with the NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// Where all interfaces can.
    #[default]
    Auto,
    /// Or fail.
    Always,
    /// Copy.
    Never,
}

/// What to open.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The interfaces, by number.
    pub interfaces: Vec<Nic>,
    /// How many workers share them: queue q belongs to worker q modulo this.
    pub workers: usize,
    /// Whether frames are shared with the NIC.
    pub zero_copy: ZeroCopy,
    /// Whether the kernel's half runs on the worker's core, when the worker asks for packets.
    pub busy_poll: bool,
    /// Frames that each queue can receive into while its worker is off its core, a power of two; `None`: [`DEFAULT_FILL_RING`], or fewer
    /// where memory is scarce.
    pub fill_ring: Option<u32>,
}

/// A socket that can't be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The kernel gave no memory for frames.
    #[error("cannot make the memory for {frames} frames: {source}{}", hint(.source))]
    Umem {
        /// How many frames.
        frames: u32,
        /// What the kernel says.
        source: io::Error,
    },
    /// The kernel gave no socket.
    #[error("cannot open an AF_XDP socket on {interface} queue {queue}: {source}{}", hint(.source))]
    Socket {
        /// The interface's name.
        interface: String,
        /// Its queue.
        queue: u32,
        /// What the kernel says.
        source: io::Error,
    },
    /// More queues than the steering program knows.
    #[error(
        "interface {interface} has {queues} receive queues, but {MOST_QUEUES} are the most that can be used: \
             `ethtool -L {interface} combined {MOST_QUEUES}`"
    )]
    TooManyQueues {
        /// The interface's name.
        interface: String,
        /// Its queues.
        queues: u32,
    },
    /// A queue that no one can poll.
    #[error("interface {interface} has {queues} receive queue{}, but there are {workers} workers: worker {queues} would \
             have none; list fewer cores, or give the interface more queues (`ethtool -L {interface} combined {workers}`)",
             if *.queues == 1 { "" } else { "s" })]
    TooFewQueues {
        /// The interface's name.
        interface: String,
        /// Its queues.
        queues: u32,
        /// The workers.
        workers: usize,
    },
}

/// What sockets and their memory need, with the bits of `CapEff` in /proc/self/status.
const CAPABILITIES: [(&str, u32); 3] = [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_IPC_LOCK", 14)];

/// Those of them that this process lacks.
fn lacking() -> Vec<&'static str> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    // Without /proc nobody knows.
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(u64::MAX);
    CAPABILITIES.into_iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| name).collect()
}

fn hint(error: &io::Error) -> String {
    let lacking = lacking();
    let is_refused = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
    let is_short = matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM));
    if is_refused && !lacking.is_empty() || is_short && lacking.contains(&"CAP_IPC_LOCK") {
        let else_raise = if is_refused { "" } else { ", or raise RLIMIT_MEMLOCK" };
        return format!(
            " (this process lacks {}: vipgate needs root, or CAP_NET_ADMIN, CAP_NET_RAW and CAP_IPC_LOCK{else_raise})",
            lacking.join(" and ")
        );
    }
    let known = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (vipgate needs root, or CAP_NET_ADMIN, CAP_NET_RAW and CAP_IPC_LOCK)",
        Some(libc::EAFNOSUPPORT) => " (this kernel has no AF_XDP: it needs CONFIG_XDP_SOCKETS, Linux 5.11 or later)",
        Some(libc::EBUSY) => " (another program has a socket on this queue)",
        Some(libc::EOPNOTSUPP) => " (the driver can't share frames: set `xdp.zero_copy: never`)",
        Some(libc::ENOBUFS | libc::ENOMEM) => " (too little memory may be locked: raise RLIMIT_MEMLOCK)",
        _ => "",
    };
    known.to_owned()
}

/// Opens the sockets of all workers; element i is worker i's.
///
/// # Errors
/// When a socket can't be had; all that were opened are closed again.
pub fn open(plan: &Plan) -> Result<Vec<XdpDevice>, OpenError> {
    for nic in &plan.interfaces {
        if nic.queues > MOST_QUEUES {
            return Err(OpenError::TooManyQueues { interface: nic.name.clone(), queues: nic.queues });
        }
        if (nic.queues as usize) < plan.workers {
            return Err(OpenError::TooFewQueues {
                interface: nic.name.clone(),
                queues: nic.queues,
                workers: plan.workers,
            });
        }
    }
    let zero_copy = match plan.zero_copy {
        ZeroCopy::Always => true,
        ZeroCopy::Never => false,
        ZeroCopy::Auto => plan.interfaces.iter().all(|nic| nic.zero_copy && nic.native_xdp),
    };
    match open_with(plan, zero_copy) {
        Err(error) if zero_copy && plan.zero_copy == ZeroCopy::Auto => {
            tracing::warn!(%error, "zero copy was promised but not granted; copying instead");
            open_with(plan, false)
        }
        result => result,
    }
}

fn open_with(plan: &Plan, zero_copy: bool) -> Result<Vec<XdpDevice>, OpenError> {
    let sockets: u32 = plan.interfaces.iter().map(|nic| nic.queues).sum();
    let (umem, fill_ring) = open_umem(sockets, plan.fill_ring)?;
    let frames = umem.frames() as u32;
    let mut devices = Vec::with_capacity(plan.workers);
    for worker in 0..plan.workers {
        let mut ports = Vec::new();
        for (nic, number) in plan.interfaces.iter().zip(0..) {
            for queue in (0..nic.queues).filter(|queue| *queue as usize % plan.workers == worker) {
                let port = open_port(&umem, nic, (InterfaceId(number), queue), fill_ring, zero_copy, plan.busy_poll);
                ports.push(port.map_err(|source| OpenError::Socket { interface: nic.name.clone(), queue, source })?);
            }
        }
        let doorbell = Doorbell::new().map_err(|source| OpenError::Umem { frames, source })?;
        let mut device = XdpDevice::new(umem.clone(), ports, plan.interfaces.len(), fill_ring, doorbell);
        // A driver may stop for good on an empty fill ring, so it is filled before the program sends packets here.
        device.refill();
        devices.push(device);
    }
    Ok(devices)
}

/// The memory for packets, sized with the fill rings, and the frames that each of those gets.
fn open_umem(sockets: u32, wanted: Option<u32>) -> Result<(Arc<SharedUmem>, u32), OpenError> {
    let mut fill_ring = wanted.unwrap_or(DEFAULT_FILL_RING);
    loop {
        let frames = sockets * (fill_ring + FRAMES_BESIDE);
        // The kernel takes descriptors off a fill ring in its own time, later than their frames come back: twice the places
        // always have room for all that is lent.
        match SharedUmem::new(frames, 2 * fill_ring) {
            Err(_) if wanted.is_none() && fill_ring > MIN_DEFAULT_FILL_RING => fill_ring /= 2,
            Err(source) => return Err(OpenError::Umem { frames, source }),
            Ok(umem) => {
                if fill_ring < wanted.unwrap_or(DEFAULT_FILL_RING) {
                    tracing::warn!(
                        event = "fill_ring",
                        fill_ring,
                        "too little memory may be locked for fill rings of {DEFAULT_FILL_RING} frames"
                    );
                }
                return Ok((umem, fill_ring));
            }
        }
    }
}

fn open_port(
    umem: &SharedUmem,
    nic: &Nic,
    (interface, queue): (InterfaceId, u32),
    fill_ring: u32,
    zero_copy: bool,
    busy_poll: bool,
) -> io::Result<Port> {
    let ring = |places| QueueSize::new(places).map_err(io::Error::other);
    let copy = if zero_copy { BindFlags::XDP_ZEROCOPY } else { BindFlags::XDP_COPY };
    let config = SocketConfig::builder()
        // As many as are ever lent: it can't be full.
        .rx_queue_size(ring(fill_ring)?)
        .tx_queue_size(ring(RING)?)
        .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
        .bind_flags(BindFlags::XDP_USE_NEED_WAKEUP | copy)
        .build();
    let name: Interface = nic.name.parse().map_err(io::Error::other)?;
    let until = Instant::now() + PATIENCE;
    let created = loop {
        // SAFETY: the one demand is the flag INHIBIT_PROG_LOAD, which is set above.
        match unsafe { Socket::new(config, &umem.umem, &name, queue) }.map_err(|error| cause(&error)) {
            // The kernel frees the queues of a process that has just died in the background.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < until => sleep(RETRY),
            created => break created,
        }
    };
    let (transmit, receive, rings) = created?;
    let (fill, completion) = rings.ok_or_else(|| io::Error::from_raw_os_error(libc::EBUSY))?;
    keep_from_children(receive.fd().as_raw_fd())?;
    if busy_poll {
        ask_for_busy_poll(receive.fd().as_raw_fd())?;
    }
    if !zero_copy {
        ask_for_long_calls(receive.fd().as_raw_fd());
    }
    Ok(Port::new(interface, queue, (transmit, receive), (fill, completion)))
}

/// The library doesn't: a process that the gateway starts would hold the queue as long as it lives.
fn keep_from_children(socket: i32) -> io::Result<()> {
    // SAFETY: this sets a flag of a descriptor and touches no memory; the socket is open as long as its owner, the caller's.
    if unsafe { libc::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// What the kernel said, behind what the library says about it.
pub(crate) fn cause(error: &dyn std::error::Error) -> io::Error {
    let number = error.source().and_then(|cause| cause.downcast_ref::<io::Error>()).and_then(io::Error::raw_os_error);
    number.map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
}

/// Lets the kernel copy and send a whole ring in one call instead of 32 packets. Linux 6.17 and later can; on others it
/// takes more calls.
fn ask_for_long_calls(socket: i32) {
    // From linux/if_xdp.h, which is older where we build.
    const XDP_MAX_TX_SKB_BUDGET: i32 = 9;
    let packets = RING;
    // SAFETY: the kernel reads four bytes from `packets`, which lives until the call returns.
    unsafe { libc::setsockopt(socket, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, (&raw const packets).cast(), 4) };
}

/// Lets the kernel's half of the work run when the worker asks for it (Linux 5.11).
fn ask_for_busy_poll(socket: i32) -> io::Result<()> {
    const SO_BUSY_POLL: i32 = 46;
    const SO_PREFER_BUSY_POLL: i32 = 69;
    const SO_BUSY_POLL_BUDGET: i32 = 70;
    for (option, value) in [(SO_PREFER_BUSY_POLL, 1_i32), (SO_BUSY_POLL, 20), (SO_BUSY_POLL_BUDGET, 64)] {
        // SAFETY: the kernel reads four bytes from `value`, which lives until the call returns.
        let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, option, (&raw const value).cast(), 4) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
