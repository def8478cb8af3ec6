//! All-multicast mode of an interface, by a packet socket membership.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::{io, mem};

/// Enables all-multicast mode of an interface until it is dropped or the process exits.
#[derive(Debug)]
pub struct AllMulticast {
    _socket: OwnedFd,
}

impl AllMulticast {
    /// Enables all-multicast mode.
    ///
    /// # Errors
    /// When the kernel refuses: missing `CAP_NET_RAW`, or no such interface.
    pub fn join(ifindex: u32) -> io::Result<Self> {
        // Protocol 0: the socket receives no packets.
        // SAFETY: socket takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the file descriptor is new and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: all zeros are valid for packet_mreq.
        let mut request: libc::packet_mreq = unsafe { mem::zeroed() };
        request.mr_ifindex = ifindex.cast_signed();
        request.mr_type = libc::PACKET_MR_ALLMULTI as u16;
        // SAFETY: the kernel reads the given number of bytes of `request`, which is valid during the call.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_ADD_MEMBERSHIP,
                (&raw const request).cast(),
                size_of::<libc::packet_mreq>() as libc::socklen_t,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { _socket: socket }) }
    }
}
