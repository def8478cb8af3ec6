//! Packet sockets for a few frames of the control thread's own: what the steering program leaves to the kernel, they see, too.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Which frames a socket receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replies {
    /// ARP replies.
    Arp,
    /// Neighbour advertisements (RFC 4861).
    NeighborAdvertisement,
}

impl Replies {
    fn protocol(self) -> u16 {
        match self {
            Self::Arp => libc::ETH_P_ARP as u16,
            Self::NeighborAdvertisement => libc::ETH_P_IPV6 as u16,
        }
    }

    /// Classic BPF over the whole frame: where a byte or a pair of them must have which value, 14 bytes behind the Ethernet header.
    fn filter(self) -> Vec<libc::sock_filter> {
        const BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
        const PAIR: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
        const UNLESS_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
        let conditions: &[(u16, u32, u32)] = match self {
            // Operation: reply.
            Self::Arp => &[(PAIR, 20, 2)],
            // Next header: ICMPv6; type: advertisement.
            Self::NeighborAdvertisement => &[(BYTE, 20, 58), (BYTE, 54, 136)],
        };
        let operation = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut program = Vec::new();
        for (at, &(load, offset, value)) in conditions.iter().enumerate() {
            // To the last operation, over what remains of the conditions and the first return.
            let skipped = 2 * (conditions.len() - at - 1) as u8 + 1;
            program.push(operation(load, 0, 0, offset));
            program.push(operation(UNLESS_EQUAL, 0, skipped, value));
        }
        program.extend([operation(RETURN, 0, 0, u32::MAX), operation(RETURN, 0, 0, 0)]);
        program
    }
}

/// A packet socket on one interface, which never blocks.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
}

impl PacketSocket {
    /// Opens one that receives only these frames.
    ///
    /// # Errors
    /// When the kernel refuses: no privilege (`CAP_NET_RAW`), or no such interface.
    pub fn open(ifindex: u32, replies: Replies) -> io::Result<Self> {
        // Protocol 0: nothing is received before the filter is there.
        // SAFETY: socket takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made just now and belongs to nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut filter = replies.filter();
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the kernel reads as many bytes as said from `program`, and from there `filter`; both live until the call returns.
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
        // SAFETY: all-zero bytes are a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = replies.protocol().to_be();
        address.sll_ifindex = ifindex.cast_signed();
        // SAFETY: the kernel reads as many bytes as said from `address`, which lives until the call returns.
        let result = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { socket }) }
    }

    /// Sends a whole frame.
    ///
    /// # Errors
    /// When the kernel refuses: the interface is down or gone, or its queue is full.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the kernel reads as many bytes as said from `frame`, which lives until the call returns.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives a frame, or as much of it as there is room for; `None`: there is none now.
    ///
    /// # Errors
    /// When the interface is down or gone.
    pub fn receive<'a>(&self, room: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        // SAFETY: the kernel writes at most as many bytes as said into `room`, which lives until the call returns.
        let received = unsafe { libc::recv(self.socket.as_raw_fd(), room.as_mut_ptr().cast(), room.len(), 0) };
        match usize::try_from(received) {
            Ok(length) => Ok(room.get(..length)),
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
    fn filters_jump_to_their_last_operation() {
        for replies in [Replies::Arp, Replies::NeighborAdvertisement] {
            let program = replies.filter();
            for (at, operation) in program.iter().enumerate().filter(|(_, it)| it.jf > 0) {
                assert_eq!(at + 1 + usize::from(operation.jf), program.len() - 1, "{replies:?}");
            }
            assert_eq!(program.last().map(|it| it.k), Some(0));
        }
    }
}
