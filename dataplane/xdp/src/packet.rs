//! Packet sockets of the control thread, for ARP and neighbor discovery probes. They also receive frames that the
//! steering program passes to the kernel.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::{io, mem};

/// Receive filter of a packet socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyFilter {
    /// ARP replies.
    Arp,
    /// Neighbor advertisements (RFC 4861).
    NeighborAdvertisement,
}

impl ReplyFilter {
    fn protocol(self) -> u16 {
        match self {
            Self::Arp => libc::ETH_P_ARP as u16,
            Self::NeighborAdvertisement => libc::ETH_P_IPV6 as u16,
        }
    }

    /// Classic BPF over the whole frame: bytes or 16-bit words at offsets, with the value required there.
    fn filter(self) -> Vec<libc::sock_filter> {
        const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
        const LOAD_U16: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
        const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
        let conditions: &[(u16, u32, u32)] = match self {
            // Operation: reply.
            Self::Arp => &[(LOAD_U16, 20, 2)],
            // Next header: ICMPv6; type: advertisement.
            Self::NeighborAdvertisement => &[(LOAD_BYTE, 20, 58), (LOAD_BYTE, 54, 136)],
        };
        let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut program = Vec::new();
        for (at, &(load, offset, value)) in conditions.iter().enumerate() {
            // Jumps to the last instruction, over the remaining conditions and the first return.
            let jump_if_false = 2 * (conditions.len() - at - 1) as u8 + 1;
            program.push(instruction(load, 0, 0, offset));
            program.push(instruction(JUMP_IF_EQUAL, 0, jump_if_false, value));
        }
        program.extend([instruction(RETURN, 0, 0, u32::MAX), instruction(RETURN, 0, 0, 0)]);
        program
    }
}

/// A non-blocking packet socket on one interface.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
}

impl PacketSocket {
    /// Opens a socket with a receive filter.
    ///
    /// # Errors
    /// When the kernel refuses: missing `CAP_NET_RAW`, or no such interface.
    pub fn open(ifindex: u32, filter: ReplyFilter) -> io::Result<Self> {
        // Protocol 0: nothing is received before the filter is attached.
        // SAFETY: socket takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the file descriptor is new and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut instructions = filter.filter();
        let program = libc::sock_fprog { len: instructions.len() as u16, filter: instructions.as_mut_ptr() };
        // SAFETY: the kernel reads the given number of bytes of `program`, and the instructions it points to; both are
        // valid during the call.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                size_of::<libc::sock_fprog>() as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: all zeros are valid for sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = filter.protocol().to_be();
        address.sll_ifindex = ifindex.cast_signed();
        // SAFETY: the kernel reads the given number of bytes of `address`, which is valid during the call.
        let result = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { socket }) }
    }

    /// Sends an Ethernet frame.
    ///
    /// # Errors
    /// When the kernel refuses: the interface is down or removed, or its queue is full.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the kernel reads the given number of bytes of `frame`, which is valid during the call.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives a frame, truncated to the buffer's size; `None` if none is available.
    ///
    /// # Errors
    /// When the interface is down or removed.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        // SAFETY: the kernel writes at most the given number of bytes to `buffer`, which is valid during the call.
        let received = unsafe { libc::recv(self.socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        match usize::try_from(received) {
            Ok(length) => Ok(buffer.get(..length)),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                error => Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_jump_to_their_last_instruction() {
        for filter in [ReplyFilter::Arp, ReplyFilter::NeighborAdvertisement] {
            let program = filter.filter();
            for (at, instruction) in program.iter().enumerate().filter(|(_, it)| it.jf > 0) {
                assert_eq!(at + 1 + usize::from(instruction.jf), program.len() - 1, "{filter:?}");
            }
            assert_eq!(program.last().map(|it| it.k), Some(0));
        }
    }
}
