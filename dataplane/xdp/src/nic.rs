//! Facts about network interfaces.

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use thiserror::Error;

/// What a driver can do for XDP (`enum netdev_xdp_act` of the kernel).
const NATIVE_XDP: u64 = 1 | 2;
const ZERO_COPY: u64 = 8;

/// A network interface of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its name.
    pub name: String,
    /// The kernel's index of it.
    pub ifindex: u32,
    /// Receive queues that are in use.
    pub queues: u32,
    /// Whether its driver runs XDP programs itself.
    pub native_xdp: bool,
    /// Whether its driver shares frames with sockets.
    pub zero_copy: bool,
}

/// An interface that can't be used.
#[derive(Debug, Error)]
pub enum NicError {
    /// There is none of this name.
    #[error("interface {name}: there is none of this name in this network namespace")]
    Missing {
        /// The name.
        name: String,
    },
    /// The kernel wouldn't say.
    #[error("interface {name}: {what}: {source}")]
    Query {
        /// The interface's name.
        name: String,
        /// What was asked.
        what: &'static str,
        /// What the kernel says.
        source: io::Error,
    },
}

impl Nic {
    /// Looks an interface up.
    ///
    /// # Errors
    /// When there is none of this name, or the kernel can't be asked.
    pub fn find(name: &str) -> Result<Self, NicError> {
        crate::program::silence_libbpf();
        let missing = || NicError::Missing { name: name.to_owned() };
        let c_name = CString::new(name).map_err(|_| missing())?;
        // SAFETY: the name is a C string that outlives the call.
        let ifindex = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
        if ifindex == 0 {
            return Err(missing());
        }
        let query = |what, source| NicError::Query { name: name.to_owned(), what, source };
        let queues = queue_count(name).map_err(|source| query("cannot ask for its channels", source))?;
        let features = xdp_features(ifindex);
        Ok(Self {
            name: name.to_owned(),
            ifindex,
            queues,
            // Kernels that don't say (before 6.3) leave it to the attempt.
            native_xdp: features.is_none_or(|bits| bits & NATIVE_XDP == NATIVE_XDP),
            zero_copy: features.is_some_and(|bits| bits & ZERO_COPY != 0),
        })
    }
}

/// `struct ethtool_channels` of the kernel's uapi.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    max: [u32; 4],
    /// Receive, transmit, other, combined.
    count: [u32; 4],
}

const ETHTOOL_GCHANNELS: u32 = 0x3c;

fn queue_count(name: &str) -> io::Result<u32> {
    // SAFETY: socket takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was made just now and belongs to nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: for this command the kernel writes a `struct ethtool_channels`, which `channels` is laid out as, through
    // the pointer in the request; both live until the call returns.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    if result < 0 {
        let error = io::Error::last_os_error();
        // A driver without channels has one queue.
        return if error.raw_os_error() == Some(libc::EOPNOTSUPP) { Ok(1) } else { Err(error) };
    }
    let [receive, _, _, combined] = channels.count;
    Ok((receive + combined).max(1))
}

/// What the driver says that it can do; `None` where the kernel has no such question.
fn xdp_features(ifindex: u32) -> Option<u64> {
    // SAFETY: all-zero bytes are a valid options record; its first field says how long it is.
    let mut options: libxdp_sys::bpf_xdp_query_opts = unsafe { mem::zeroed() };
    options.sz = size_of::<libxdp_sys::bpf_xdp_query_opts>();
    // SAFETY: libbpf writes no more than `sz` bytes into the record, which lives until the call returns.
    let error = unsafe { libxdp_sys::bpf_xdp_query(ifindex.cast_signed(), 0, &raw mut options) };
    (error == 0 && options.feature_flags != 0).then_some(options.feature_flags)
}
