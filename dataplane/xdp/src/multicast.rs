//! Asking a NIC for all multicast frames, for as long as the membership is held.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A membership in all multicast groups of an interface; the kernel ends it when this is dropped, or the process dies.
#[derive(Debug)]
pub struct AllMulticast {
    _socket: OwnedFd,
}

impl AllMulticast {
    /// Joins.
    ///
    /// # Errors
    /// When the kernel refuses: no privilege (`CAP_NET_RAW`), or no such interface.
    pub fn join(ifindex: u32) -> io::Result<Self> {
        // Protocol 0: the socket itself receives nothing.
        // SAFETY: socket takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made just now and belongs to nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: all-zero bytes are a valid packet_mreq.
        let mut request: libc::packet_mreq = unsafe { mem::zeroed() };
        request.mr_ifindex = ifindex.cast_signed();
        request.mr_type = libc::PACKET_MR_ALLMULTI as u16;
        // SAFETY: the kernel reads as many bytes as said from `request`, which lives until the call returns.
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
