//! Capabilities of network interfaces.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::{io, mem};

use thiserror::Error;

/// XDP feature bits of a driver (`enum netdev_xdp_act` of the kernel).
const NATIVE_XDP: u64 = 1 | 2;
const ZERO_COPY: u64 = 8;

/// A network interface in this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    pub name: String,
    /// Interface index.
    pub ifindex: u32,
    /// Active receive queues, when it was queried.
    pub queues: u32,
    /// Whether the driver supports native XDP.
    pub native_xdp: bool,
    /// Whether the driver supports AF_XDP zero copy.
    pub zero_copy: bool,
}

/// Failed query of an interface.
#[derive(Debug, Error)]
pub enum NicError {
    /// No interface has this name.
    #[error("interface {name}: no such interface in this network namespace")]
    Missing { name: String },
    /// A query failed.
    #[error("interface {name}: {what}: {source}")]
    Query {
        /// Name of the interface.
        name: String,
        /// The query.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl Nic {
    /// Queries an interface by name.
    ///
    /// # Errors
    /// When there is no such interface, or a query fails.
    pub fn find(name: &str) -> Result<Self, NicError> {
        crate::program::silence_libbpf();
        let missing = || NicError::Missing { name: name.to_owned() };
        let query = |what, source| NicError::Query { name: name.to_owned(), what, source };
        let c_name = CString::new(name).map_err(|_| missing())?;
        // SAFETY: the name is a C string, valid during the call.
        let ifindex = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
        if ifindex == 0 {
            let error = io::Error::last_os_error();
            let is_missing = error.raw_os_error() == Some(libc::ENODEV);
            return Err(if is_missing { missing() } else { query("cannot query its index", error) });
        }
        let queues = queue_count(name).map_err(|source| query("cannot query its channels", source))?;
        let features =
            xdp_features(ifindex).map_err(|source| query("cannot query the XDP features of its driver", source))?;
        Ok(Self {
            name: name.to_owned(),
            ifindex,
            queues,
            // Kernels before 6.3 don't report features; attachment tells then.
            native_xdp: features.is_none_or(|bits| bits & NATIVE_XDP == NATIVE_XDP),
            zero_copy: features.is_some_and(|bits| bits & ZERO_COPY != 0),
        })
    }

    /// Its active receive queues now: `ethtool -L` changes them under a running process.
    ///
    /// # Errors
    /// When the query fails, or the interface no longer exists.
    pub fn current_queues(&self) -> io::Result<u32> {
        queue_count(&current_name(self.ifindex)?)
    }
}

/// The name of an interface, which may have been renamed.
fn current_name(ifindex: u32) -> io::Result<String> {
    let mut name: [libc::c_char; libc::IFNAMSIZ] = [0; libc::IFNAMSIZ];
    // SAFETY: the array has the size that the call requires.
    if unsafe { libc::if_indextoname(ifindex, name.as_mut_ptr()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has written a C string to the array.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
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
    // SAFETY: the file descriptor is new and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
    // SAFETY: all zeros are valid for ifreq.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: for this command the kernel writes a `struct ethtool_channels`, whose layout `channels` has, through the
    // pointer in the request; both are valid during the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    if result < 0 {
        let error = io::Error::last_os_error();
        // A driver without channels has one queue.
        return if error.raw_os_error() == Some(libc::EOPNOTSUPP) { Ok(1) } else { Err(error) };
    }
    let [receive, _, _, combined] = channels.count;
    Ok((receive + combined).max(1))
}

/// XDP feature bits of the driver; `None` if the kernel doesn't report them.
fn xdp_features(ifindex: u32) -> io::Result<Option<u64>> {
    // SAFETY: all zeros are valid for the struct; its first field is its size.
    let mut options: libxdp_sys::bpf_xdp_query_opts = unsafe { mem::zeroed() };
    options.sz = size_of::<libxdp_sys::bpf_xdp_query_opts>();
    // SAFETY: libbpf writes at most `sz` bytes to the struct, which is valid during the call.
    let result = unsafe { libxdp_sys::bpf_xdp_query(ifindex.cast_signed(), 0, &raw mut options) };
    reported_features(crate::program::check_result(result), options.feature_flags)
}

/// The features by the outcome of their query. A failed query says nothing of the driver, unless the kernel doesn't
/// know it.
fn reported_features(outcome: io::Result<()>, flags: u64) -> io::Result<Option<u64>> {
    match outcome {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOENT)) => Ok(None),
        Err(error) => Err(error),
        Ok(()) => Ok((flags != 0).then_some(flags)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_counted_by_interface_index() {
        // The loopback interface: it has no channels, so one queue.
        let loopback = Nic { name: "renamed".to_owned(), ifindex: 1, queues: 1, native_xdp: false, zero_copy: false };
        assert_eq!(loopback.current_queues().unwrap(), 1);
        let gone = Nic { ifindex: i32::MAX.cast_unsigned(), ..loopback };
        assert!(gone.current_queues().is_err());
    }

    #[test]
    fn a_failed_query_is_an_error_not_a_driver_without_features() {
        let failed = |number| reported_features(Err(io::Error::from_raw_os_error(number)), 0);
        for number in [libc::EOPNOTSUPP, libc::ENOENT] {
            assert!(matches!(failed(number), Ok(None)), "error {number}");
        }
        for number in [libc::ENOMEM, libc::ENOBUFS, libc::EMFILE, libc::ENODEV] {
            assert_eq!(failed(number).unwrap_err().raw_os_error(), Some(number));
        }
        assert!(matches!(reported_features(Ok(()), 0), Ok(None)));
        assert!(matches!(reported_features(Ok(()), ZERO_COPY), Ok(Some(ZERO_COPY))));
        assert!(matches!(Nic::find("no-such-device"), Err(NicError::Missing { .. })));
    }
}
