//! Opens the AF_XDP sockets of all workers.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use thiserror::Error;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use xsk_rs::Socket;
use xsk_rs::config::{BindFlags, Interface, LibxdpFlags, QueueSize, SocketConfig};

use crate::device::{QueueSocket, XdpDevice};
use crate::doorbell::Doorbell;
use crate::nic::Nic;
use crate::steering::MAX_QUEUES;
pub use crate::umem::{DEFAULT_FILL_RING, FILL_RING_SIZES};
use crate::umem::{RING_SIZE, SharedUmem, kernel_error};

/// Frames per socket beside those of the fill ring: for the transmit ring, and half as many for the engine.
const OTHER_FRAMES: u32 = RING_SIZE + RING_SIZE / 2;
/// Jumbo frames per worker: twice those that its queues can hold, of packets for which a neighbor, a fragment or another
/// gateway is awaited.
const JUMBO_FRAMES: usize = 4096;
/// Minimum fill ring size if none is configured and memory is scarce.
const MIN_DEFAULT_FILL_RING: u32 = 1024;
/// Timeout for the release of a queue by a process that has exited.
const BIND_TIMEOUT: Duration = Duration::from_secs(3);
/// Retry interval for it.
const BIND_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Configured zero-copy mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// If all interfaces support it.
    #[default]
    Auto,
    /// Required.
    Always,
    /// Disabled.
    Never,
}

/// Configuration of the devices.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// The interfaces, by ID.
    pub interfaces: Vec<Nic>,
    /// Number of workers: queue q belongs to worker q modulo this.
    pub workers: usize,
    /// Packet buffers.
    pub frames: FrameLayout,
    /// Zero-copy mode.
    pub zero_copy: ZeroCopy,
    /// Whether NAPI runs on the worker's core, in its system calls (busy polling).
    pub busy_poll: bool,
    /// Packets that each queue can receive while its worker isn't scheduled, a power of two. `None`:
    /// [`DEFAULT_FILL_RING`], or less if memory is scarce.
    pub fill_ring: Option<u32>,
}

/// Failed opening of a device.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The UMEM can't be allocated.
    #[error("cannot allocate memory for {frames} frames: {source}{}", hint(.source))]
    Umem {
        /// Number of frames.
        frames: u32,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A socket can't be opened.
    #[error("cannot open an AF_XDP socket on {interface} queue {queue}: {source}{}", hint(.source))]
    Socket {
        /// Name of the interface.
        interface: String,
        queue: u32,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A socket can't receive packets in several frames.
    #[error(
        "interface {interface} queue {queue}: an MTU of more than {max} bytes needs XDP multi-buffer, which this kernel \
             (before Linux 6.6) or, in zero-copy mode, the driver doesn't support ({source}): \
             `ip link set dev INTERFACE mtu {max}`",
        max = FrameLayout::Page.max_mtu()
    )]
    MultiBuffer {
        /// Name of the interface.
        interface: String,
        queue: u32,
        /// Error of the kernel.
        source: io::Error,
    },
    /// More queues than the XSKMAP supports.
    #[error(
        "interface {interface} has {queues} receive queues; the maximum is {MAX_QUEUES}: \
             `ethtool -L {interface} combined {MAX_QUEUES}`"
    )]
    TooManyQueues {
        /// Name of the interface.
        interface: String,
        queues: u32,
    },
    /// Fewer queues than workers.
    #[error("interface {interface} has {queues} receive queue{} for {workers} workers: \
             worker {queues} would have none; \
             list fewer cores, or add queues (`ethtool -L {interface} combined {workers}`)",
             if *.queues == 1 { "" } else { "s" })]
    TooFewQueues {
        /// Name of the interface.
        interface: String,
        queues: u32,
        /// Number of workers.
        workers: usize,
    },
}

impl OpenError {
    /// Whether the kernel or the driver doesn't support what a socket asks for. Other errors may be gone the next time.
    fn is_unsupported(&self) -> bool {
        match self {
            Self::Socket { source, .. } | Self::MultiBuffer { source, .. } => is_unsupported(source),
            Self::Umem { .. } | Self::TooManyQueues { .. } | Self::TooFewQueues { .. } => false,
        }
    }

    /// Whether the kernel has no memory, or no more that may be locked.
    fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Umem { source, .. } if is_out_of_memory(source))
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

fn is_out_of_memory(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM))
}

/// Required capabilities, with their bits of `CapEff` in /proc/self/status.
const CAPABILITIES: [(&str, u32); 3] = [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_IPC_LOCK", 14)];

/// Required capabilities that this process lacks.
fn missing_capabilities() -> Vec<&'static str> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    // Without /proc, none is reported as missing.
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(u64::MAX);
    CAPABILITIES.into_iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| name).collect()
}

fn hint(error: &io::Error) -> String {
    let missing = missing_capabilities();
    let is_denied = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
    if is_denied && !missing.is_empty() || is_out_of_memory(error) && missing.contains(&"CAP_IPC_LOCK") {
        let alternative = if is_denied { "" } else { ", or raise RLIMIT_MEMLOCK" };
        return format!(
            " (this process lacks {}: vipgate needs root, or CAP_NET_ADMIN, CAP_NET_RAW and CAP_IPC_LOCK{alternative})",
            missing.join(" and ")
        );
    }
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (vipgate needs root, or CAP_NET_ADMIN, CAP_NET_RAW and CAP_IPC_LOCK)",
        Some(libc::EAFNOSUPPORT) => " (this kernel has no AF_XDP: it needs CONFIG_XDP_SOCKETS, Linux 5.11 or later)",
        Some(libc::EBUSY) => " (another program has a socket on this queue)",
        Some(libc::EOPNOTSUPP) => " (the driver doesn't support zero copy: set `xdp.zero_copy: never`)",
        Some(libc::ENOBUFS | libc::ENOMEM) => " (the limit of locked memory is too low: raise RLIMIT_MEMLOCK)",
        _ => "",
    };
    hint.to_owned()
}

/// Opens the devices of all workers, in the order of workers.
///
/// # Errors
/// When a socket can't be opened; all others are closed.
pub fn open(config: &DeviceConfig) -> Result<Vec<XdpDevice>, OpenError> {
    for nic in &config.interfaces {
        check_queues(nic, config.workers)?;
    }
    let zero_copy = match config.zero_copy {
        ZeroCopy::Always => true,
        ZeroCopy::Never => false,
        ZeroCopy::Auto => config.interfaces.iter().all(|nic| nic.zero_copy && nic.native_xdp),
    };
    open_in_supported_mode(config.zero_copy, zero_copy, |zero_copy| open_with(config, zero_copy))
}

/// Opens in copy mode where zero copy isn't supported after all.
fn open_in_supported_mode<T>(
    configured: ZeroCopy,
    zero_copy: bool,
    mut open: impl FnMut(bool) -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    match open(zero_copy) {
        Err(error) if zero_copy && configured == ZeroCopy::Auto && error.is_unsupported() => {
            tracing::warn!(%error, "the driver reports zero copy, but the socket can't use it; using copy mode");
            open(false)
        }
        result => result,
    }
}

/// Checks that workers can poll the receive queues of an interface.
///
/// # Errors
/// When it has more than the XSKMAP supports, or fewer than workers.
pub fn check_queues(nic: &Nic, workers: usize) -> Result<(), OpenError> {
    let (interface, queues) = (nic.name.clone(), nic.queues);
    if queues > MAX_QUEUES {
        Err(OpenError::TooManyQueues { interface, queues })
    } else if (queues as usize) < workers {
        Err(OpenError::TooFewQueues { interface, queues, workers })
    } else {
        Ok(())
    }
}

fn open_with(config: &DeviceConfig, zero_copy: bool) -> Result<Vec<XdpDevice>, OpenError> {
    let sockets: u32 = config.interfaces.iter().map(|nic| nic.queues).sum();
    let (umem, fill_ring) = open_umem(sockets, config)?;
    let frames = umem.frames() as u32;
    let mut devices = Vec::with_capacity(config.workers);
    for worker in 0..config.workers {
        let mut sockets = Vec::new();
        for (nic, id) in config.interfaces.iter().zip(0..) {
            for queue in (0..nic.queues).filter(|queue| *queue as usize % config.workers == worker) {
                let socket = open_socket(&umem, nic, InterfaceId(id), queue, fill_ring, zero_copy, config);
                sockets.push(socket.map_err(|source| socket_error(config.frames, &nic.name, queue, source))?);
            }
        }
        let doorbell = Doorbell::new().map_err(|source| OpenError::Umem { frames, source })?;
        let mut device = XdpDevice::new(umem.clone(), sockets, config.interfaces.len(), fill_ring, doorbell);
        // Before the program redirects packets: a driver may stop permanently on an empty fill ring.
        device.prefill();
        devices.push(device);
    }
    Ok(devices)
}

fn socket_error(frames: FrameLayout, interface: &str, queue: u32, source: io::Error) -> OpenError {
    let interface = interface.to_owned();
    if is_unsupported(&source) && frames == FrameLayout::MultiBuffer {
        return OpenError::MultiBuffer { interface, queue, source };
    }
    OpenError::Socket { interface, queue, source }
}

/// Allocates the UMEM; returns it with the number of frames per fill ring.
fn open_umem(sockets: u32, config: &DeviceConfig) -> Result<(Arc<SharedUmem>, u32), OpenError> {
    with_largest_fill_ring(config.fill_ring, |fill_ring| {
        let frames = sockets * (fill_ring + OTHER_FRAMES);
        // The kernel removes entries from a fill ring later than it returns their frames, so the ring has twice as many
        // entries as frames.
        SharedUmem::new(config.frames, frames, 2 * fill_ring, config.workers * JUMBO_FRAMES)
            .map_err(|source| OpenError::Umem { frames, source })
    })
}

/// Allocates the UMEM for fill rings of the configured size, or else of the largest one for which there is memory.
fn with_largest_fill_ring<T>(
    configured: Option<u32>,
    mut allocate: impl FnMut(u32) -> Result<T, OpenError>,
) -> Result<(T, u32), OpenError> {
    let mut fill_ring = configured.unwrap_or(DEFAULT_FILL_RING);
    loop {
        match allocate(fill_ring) {
            Err(error) if configured.is_none() && fill_ring > MIN_DEFAULT_FILL_RING && error.is_out_of_memory() => {
                fill_ring /= 2;
            }
            Err(error) => return Err(error),
            Ok(umem) => {
                if fill_ring < configured.unwrap_or(DEFAULT_FILL_RING) {
                    tracing::warn!(
                        event = "fill_ring",
                        fill_ring,
                        "the limit of locked memory is too low for fill rings of {DEFAULT_FILL_RING} frames"
                    );
                }
                return Ok((umem, fill_ring));
            }
        }
    }
}

fn open_socket(
    umem: &SharedUmem,
    nic: &Nic,
    interface: InterfaceId,
    queue: u32,
    fill_ring: u32,
    zero_copy: bool,
    device: &DeviceConfig,
) -> io::Result<QueueSocket> {
    let size = |entries| QueueSize::new(entries).map_err(io::Error::other);
    let copy_mode = if zero_copy { BindFlags::XDP_ZEROCOPY } else { BindFlags::XDP_COPY };
    let is_multi_buffer = device.frames == FrameLayout::MultiBuffer;
    let multi_buffer = if is_multi_buffer { BindFlags::XDP_USE_SG } else { BindFlags::empty() };
    let config = SocketConfig::builder()
        // As large as the number of filled frames, so that it can't overflow.
        .rx_queue_size(size(fill_ring)?)
        .tx_queue_size(size(RING_SIZE)?)
        .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
        .bind_flags(BindFlags::XDP_USE_NEED_WAKEUP | copy_mode | multi_buffer)
        .build();
    let name: Interface = nic.name.parse().map_err(io::Error::other)?;
    let deadline = Instant::now() + BIND_TIMEOUT;
    let created = loop {
        // SAFETY: the only requirement is the flag INHIBIT_PROG_LOAD, which is set above.
        match unsafe { Socket::new(config, &umem.umem, &name, queue) }.map_err(|error| kernel_error(&error)) {
            // The kernel releases the queues of an exited process asynchronously.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                sleep(BIND_RETRY_INTERVAL);
            }
            created => break created,
        }
    };
    let (transmit, receive, rings) = created?;
    let (fill, completion) = rings.ok_or_else(|| io::Error::from_raw_os_error(libc::EBUSY))?;
    set_close_on_exec(receive.fd().as_raw_fd())?;
    if device.busy_poll {
        enable_busy_poll(receive.fd().as_raw_fd())?;
    }
    if !zero_copy {
        raise_transmit_budget(receive.fd().as_raw_fd());
    }
    Ok(QueueSocket::new(interface, queue, transmit, receive, fill, completion))
}

/// Sets `FD_CLOEXEC`, which the library doesn't: otherwise a child process would hold the queue.
fn set_close_on_exec(socket: i32) -> io::Result<()> {
    // SAFETY: this sets a flag of a file descriptor and accesses no memory; the caller owns the socket.
    if unsafe { libc::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Raises the number of packets that the kernel sends per call in copy mode from 32 to a whole ring. Needs Linux 6.17;
/// ignored by earlier kernels.
fn raise_transmit_budget(socket: i32) {
    // From linux/if_xdp.h; missing in older headers.
    const XDP_MAX_TX_SKB_BUDGET: i32 = 9;
    let packets = RING_SIZE;
    // SAFETY: the kernel reads four bytes of `packets`, which is valid during the call.
    unsafe { libc::setsockopt(socket, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, (&raw const packets).cast(), 4) };
}

/// Enables preferred busy polling (Linux 5.11).
fn enable_busy_poll(socket: i32) -> io::Result<()> {
    const SO_BUSY_POLL: i32 = 46;
    const SO_PREFER_BUSY_POLL: i32 = 69;
    const SO_BUSY_POLL_BUDGET: i32 = 70;
    for (option, value) in [(SO_PREFER_BUSY_POLL, 1_i32), (SO_BUSY_POLL, 20), (SO_BUSY_POLL_BUDGET, 64)] {
        // SAFETY: the kernel reads four bytes of `value`, which is valid during the call.
        let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, option, (&raw const value).cast(), 4) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_worker_has_a_queue_and_each_queue_a_place_in_the_xskmap() {
        let check = |queues, workers| {
            let nic = Nic { name: "gw-in".to_owned(), ifindex: 2, queues, native_xdp: true, zero_copy: false };
            check_queues(&nic, workers)
        };
        assert!(check(2, 2).is_ok() && check(MAX_QUEUES, 1).is_ok());
        assert!(matches!(check(1, 2), Err(OpenError::TooFewQueues { queues: 1, workers: 2, .. })));
        assert!(matches!(check(MAX_QUEUES + 1, 1), Err(OpenError::TooManyQueues { .. })));
    }

    /// Opens where zero copy fails with this error; returns whether it succeeds, and the modes that were tried.
    fn open_where_zero_copy_fails(configured: ZeroCopy, error: impl Fn() -> OpenError) -> (bool, Vec<bool>) {
        let mut tried = Vec::new();
        let result = open_in_supported_mode(configured, true, |zero_copy| {
            tried.push(zero_copy);
            if zero_copy { Err(error()) } else { Ok(()) }
        });
        (result.is_ok(), tried)
    }

    #[test]
    fn copy_mode_is_used_only_where_zero_copy_is_not_supported() {
        for frames in [FrameLayout::Standard, FrameLayout::MultiBuffer] {
            let outcome = |configured, number| {
                let error = || socket_error(frames, "gw-in", 0, io::Error::from_raw_os_error(number));
                open_where_zero_copy_fails(configured, error)
            };
            for number in [libc::EOPNOTSUPP, libc::EINVAL] {
                assert_eq!(outcome(ZeroCopy::Auto, number), (true, vec![true, false]));
                assert_eq!(outcome(ZeroCopy::Always, number), (false, vec![true]));
            }
            for number in [libc::ENOMEM, libc::ENOBUFS, libc::EMFILE, libc::EBUSY, libc::EPERM] {
                assert_eq!(outcome(ZeroCopy::Auto, number), (false, vec![true]), "error {number}");
            }
        }
        let umem = || OpenError::Umem { frames: 1, source: io::Error::from_raw_os_error(libc::EINVAL) };
        assert_eq!(open_where_zero_copy_fails(ZeroCopy::Auto, umem), (false, vec![true]));
    }

    #[test]
    fn fill_rings_are_smaller_only_where_memory_is_scarce() {
        // The sizes that were tried, where memory is enough for rings of this size.
        let tried = |configured, largest, error| {
            let mut sizes = Vec::new();
            let result = with_largest_fill_ring(configured, |size| {
                sizes.push(size);
                let source = io::Error::from_raw_os_error(error);
                if size > largest { Err(OpenError::Umem { frames: size, source }) } else { Ok(()) }
            });
            (result.ok().map(|((), size)| size), sizes)
        };
        for error in [libc::ENOBUFS, libc::ENOMEM] {
            assert_eq!(tried(None, 1024, error), (Some(1024), vec![4096, 2048, 1024]));
            assert_eq!(tried(None, 512, error), (None, vec![4096, 2048, 1024]));
            assert_eq!(tried(Some(4096), 1024, error), (None, vec![4096]));
        }
        for error in [libc::EMFILE, libc::EINTR, libc::EPERM, libc::EINVAL] {
            assert_eq!(tried(None, 1024, error), (None, vec![4096]));
        }
    }
}
