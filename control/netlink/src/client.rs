//! Requests, one at a time.

use std::io;
use std::time::Duration;

use netlink_packet_core::{DecodeError, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer};
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tokio::time::timeout;
use tracing::debug;

use crate::message::{Message, Messages, Request};

/// Receive buffer; rtnetlink datagrams have at most 32 KiB.
pub(crate) const DATAGRAM_BYTES: usize = 64 * 1024;
/// How long the kernel may take for a datagram of a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Attempts to dump a table while it changes during the dump.
const MAX_DUMP_ATTEMPTS: usize = 4;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// A socket for requests.
pub struct Client {
    socket: TokioSocket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// Opens a socket for requests of one protocol (`NETLINK_*`).
    ///
    /// # Errors
    /// Netlink isn't available.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = TokioSocket::new(protocol)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(DATAGRAM_BYTES) })
    }

    /// Has the kernel filter dumps by the fields of the request. Linux before 4.20 can't, and dumps all of a family.
    ///
    /// # Errors
    /// The option can't be set.
    pub fn with_strict_checks(self) -> io::Result<Self> {
        match self.socket.socket_ref().set_netlink_get_strict_chk(true) {
            Err(error) if error.raw_os_error() != Some(libc::ENOPROTOOPT) => Err(error),
            Ok(()) | Err(_) => Ok(self),
        }
    }

    /// Dumps a table: all entries of which `decode` makes something. A table that changes during the dump is dumped
    /// again, since unchanged entries may be missing (`NLM_F_DUMP_INTR`); after some attempts the last dump counts.
    ///
    /// # Errors
    /// Netlink failed, or the kernel refused the request.
    pub async fn dump<T>(
        &mut self,
        request: impl Into<Request>,
        decode: impl Fn(&Message<'_>) -> Result<Option<T>, DecodeError>,
    ) -> io::Result<Vec<T>> {
        let mut request = request.into();
        let mut entries = Vec::new();
        for attempt in 1..=MAX_DUMP_ATTEMPTS {
            entries.clear();
            if self
                .request(&mut request, NLM_F_DUMP, |message| decode(message).map(|entry| entries.extend(entry)))
                .await?
            {
                break;
            }
            debug!(attempt, "a table changed during the dump");
        }
        Ok(entries)
    }

    /// Gets one object; `None`: it or its device doesn't exist.
    ///
    /// # Errors
    /// Netlink failed, or the kernel refused the request.
    pub async fn get<T>(
        &mut self,
        request: impl Into<Request>,
        decode: impl Fn(&Message<'_>) -> Result<Option<T>, DecodeError>,
    ) -> io::Result<Option<T>> {
        let mut response = None;
        let each = |message: &Message<'_>| decode(message).map(|object| response = object.or(response.take()));
        match self.request(&mut request.into(), NLM_F_ACK, each).await {
            Ok(_) => Ok(response),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Adds, changes or removes an object; `flags` are `NLM_F_*` in addition to REQUEST and ACK.
    ///
    /// # Errors
    /// Netlink failed, or the kernel refused the request: with its error number.
    pub async fn set(&mut self, request: impl Into<Request>, flags: u16) -> io::Result<()> {
        self.request(&mut request.into(), NLM_F_ACK | flags, |_| Ok(())).await.map(drop)
    }

    /// Returns whether the response is consistent.
    async fn request(
        &mut self,
        Request(bytes): &mut Request,
        flags: u16,
        mut each: impl FnMut(&Message<'_>) -> Result<(), DecodeError>,
    ) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let mut header = NetlinkBuffer::new(&mut *bytes);
        header.set_length(length);
        header.set_flags(NLM_F_REQUEST | flags);
        header.set_sequence_number(self.sequence);
        self.socket.send_to(bytes, &SocketAddr::new(0, 0)).await?;
        let mut is_consistent = true;
        loop {
            self.buffer.clear();
            let received = timeout(RESPONSE_TIMEOUT, self.socket.recv_from(&mut self.buffer)).await;
            let timed_out =
                |_| io::Error::new(io::ErrorKind::TimedOut, "the kernel doesn't respond to a netlink request");
            let sender = received.map_err(timed_out)??;
            if sender.port_number() != 0 {
                continue;
            }
            for message in Messages(&self.buffer) {
                let message = message.map_err(io::Error::other)?;
                if message.sequence != self.sequence {
                    continue;
                }
                is_consistent &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.kind {
                    // Both begin with an errno, 0 for success; NLMSG_ERROR is also the ACK.
                    NLMSG_ERROR | NLMSG_DONE => return result(message.body).map(|()| is_consistent),
                    kind => {
                        if let Err(error) = each(&message) {
                            debug!(%error, kind, "skipped an unreadable entry of a netlink dump");
                        }
                    }
                }
            }
        }
    }
}

fn result(body: &[u8]) -> io::Result<()> {
    match body.first_chunk::<4>().map(|number| i32::from_ne_bytes(*number)) {
        None | Some(0) => Ok(()),
        Some(number) => Err(io::Error::from_raw_os_error(number.wrapping_neg())),
    }
}
