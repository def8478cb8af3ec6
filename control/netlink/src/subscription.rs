//! Notifications of multicast groups, on a socket of their own: one that overflows with notifications loses responses,
//! too.

use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tracing::debug;

use crate::client::DATAGRAM_BYTES;
use crate::event::NetworkEvent;
use crate::message::Messages;

/// SO_RCVBUF for about 10 000 notifications; the kernel grants at most net.core.rmem_max.
const BUFFER_BYTES: i32 = 8 << 20;
/// Datagrams discarded by one drain; a socket that isn't empty then is under a continuous storm.
const MAX_DRAINED_DATAGRAMS: usize = 100_000;

/// A socket that receives the notifications of some groups.
pub struct Subscription {
    socket: TokioSocket,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Subscription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscription").finish_non_exhaustive()
    }
}

impl Subscription {
    /// Subscribes to changes from now on, of groups (`RTNLGRP_*`, `NFNLGRP_*`) of one protocol (`NETLINK_*`).
    ///
    /// # Errors
    /// Netlink isn't available, or there is no such group.
    pub fn open(protocol: isize, groups: &[u32]) -> io::Result<Self> {
        let mut socket = TokioSocket::new(protocol)?;
        socket.socket_mut().set_rx_buf_sz(BUFFER_BYTES)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        for group in groups {
            socket.socket_mut().add_membership(*group)?;
        }
        Ok(Self { socket, buffer: Vec::with_capacity(DATAGRAM_BYTES) })
    }

    /// Subscribes to links, addresses, neighbors, routes and nexthop objects.
    ///
    /// # Errors
    /// As for [`Subscription::open`].
    pub fn network() -> io::Result<Self> {
        let groups = [
            libc::RTNLGRP_LINK,
            libc::RTNLGRP_NEIGH,
            libc::RTNLGRP_IPV4_IFADDR,
            libc::RTNLGRP_IPV4_ROUTE,
            libc::RTNLGRP_IPV6_IFADDR,
            libc::RTNLGRP_IPV6_ROUTE,
            libc::RTNLGRP_NEXTHOP,
        ];
        Self::open(NETLINK_ROUTE, &groups)
    }

    /// Waits for the next datagram of the kernel; `None`: some were lost, since the socket's buffer overflowed.
    /// Cancel-safe.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn next(&mut self) -> io::Result<Option<Messages<'_>>> {
        loop {
            self.buffer.clear();
            match self.socket.recv_from(&mut self.buffer).await {
                Ok(sender) if sender.port_number() == 0 => break,
                // From another process, not the kernel.
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(Messages(&self.buffer)))
    }

    /// Waits for the next events; `None`: some were lost, or a message was unreadable. Cancel-safe.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn next_events(&mut self) -> io::Result<Option<Vec<NetworkEvent>>> {
        loop {
            let Some(messages) = self.next().await? else { return Ok(None) };
            let mut events = Vec::new();
            for message in messages {
                match message.and_then(|message| NetworkEvent::decode(&message)) {
                    Ok(event) => events.extend(event),
                    Err(error) => {
                        debug!(%error, "a netlink notification is unreadable");
                        return Ok(None);
                    }
                }
            }
            if !events.is_empty() {
                return Ok(Some(events));
            }
        }
    }

    /// Discards all queued notifications. After an overflow the kernel queues nothing, not even another overflow, until
    /// the socket is empty; so this must precede a dump.
    ///
    /// Returns whether the socket is empty: in a continuous storm of changes it never is.
    pub fn drain(&mut self) -> bool {
        for _ in 0..MAX_DRAINED_DATAGRAMS {
            self.buffer.clear();
            // Not through tokio, whose cooperative budget reports WouldBlock after a number of reads.
            match self.socket.socket_ref().recv_from(&mut self.buffer, libc::MSG_DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Ok(_) | Err(_) => {}
            }
        }
        false
    }
}
