//! Netlink sockets: one for notifications, one for requests.
//!
//! They are separate because a socket that overflows with notifications loses responses too.

use std::io;
use std::time::Duration;

use rtnetlink::MulticastGroup;
use rtnetlink::packet_core::{
    DecodeError, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkMessage,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tokio::time::timeout;
use tracing::debug;

use super::message::KernelEvent;
use super::parse;

/// Receive buffer; rtnetlink datagrams have at most 32 KiB.
const DATAGRAM_BYTES: usize = 64 * 1024;
/// SO_RCVBUF for about 10 000 notifications; the kernel grants at most net.core.rmem_max.
const NOTIFICATION_BUFFER_BYTES: i32 = 8 << 20;
/// Timeout of a request: long enough for a dump of a million routes.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Datagrams discarded by one drain; a socket that isn't empty then is under a continuous storm.
const MAX_DRAINED_DATAGRAMS: usize = 100_000;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const HEADER: usize = 16;

const GROUPS: [MulticastGroup; 7] = [
    MulticastGroup::Link,
    MulticastGroup::Neigh,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv6Route,
    MulticastGroup::Nexthop,
];

/// What a subscription received.
#[derive(Debug)]
pub(super) enum Notification {
    /// Decoded events.
    Events(Vec<KernelEvent>),
    /// Events were lost: the socket buffer overflowed (ENOBUFS), or a message was unreadable.
    Lost,
}

/// A socket that receives all notifications of the kernel's network state.
pub(super) struct Subscription {
    socket: TokioSocket,
    buffer: Vec<u8>,
}

impl Subscription {
    /// Subscribes to changes from now on.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket.socket_mut().set_rx_buf_sz(NOTIFICATION_BUFFER_BYTES)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        for group in GROUPS {
            socket.socket_mut().add_membership(group as u32)?;
        }
        Ok(Self { socket, buffer: Vec::with_capacity(DATAGRAM_BYTES) })
    }

    /// Waits for the next events. Cancel-safe.
    pub(super) async fn next(&mut self) -> io::Result<Notification> {
        loop {
            self.buffer.clear();
            match self.socket.recv_from(&mut self.buffer).await {
                Ok(sender) if sender.port_number() == 0 => {}
                // From another process, not the kernel.
                Ok(_) => continue,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Notification::Lost),
                Err(error) => return Err(error),
            }
            let mut events = Vec::new();
            for message in Messages(&self.buffer) {
                match message.and_then(|message| parse::event(message.kind, message.flags, message.body)) {
                    Ok(event) => events.extend(event),
                    Err(error) => {
                        debug!(%error, "a netlink notification is unreadable; dumping all tables again");
                        return Ok(Notification::Lost);
                    }
                }
            }
            if !events.is_empty() {
                return Ok(Notification::Events(events));
            }
        }
    }

    /// Discards all queued notifications. After an overflow the kernel queues nothing, not even another overflow, until
    /// the socket is empty; so this must precede a dump.
    ///
    /// Returns whether the socket is empty: in a continuous storm of changes it never is.
    pub(super) fn drain(&mut self) -> bool {
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

/// A socket for requests, one at a time.
pub(super) struct RequestSocket {
    socket: TokioSocket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl RequestSocket {
    /// Opens a socket for requests.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(DATAGRAM_BYTES) })
    }

    /// Opens a socket with strict checking: the kernel filters dumps by the fields of the request. Linux before 4.20
    /// can't, and dumps all of a family.
    pub(super) fn strict() -> io::Result<Self> {
        let client = Self::open()?;
        match client.socket.socket_ref().set_netlink_get_strict_chk(true) {
            Err(error) if error.raw_os_error() != Some(libc::ENOPROTOOPT) => Err(error),
            Ok(()) | Err(_) => Ok(client),
        }
    }

    /// Dumps a table. Returns whether the dump is consistent: otherwise the table changed meanwhile
    /// (`NLM_F_DUMP_INTR`), and unchanged entries may be missing.
    pub(super) async fn dump(
        &mut self,
        request: RouteNetlinkMessage,
        each: impl FnMut(KernelEvent),
    ) -> io::Result<bool> {
        self.request(encode(request), NLM_F_DUMP, each).await
    }

    /// Dumps the nexthop objects. Linux before 5.3 has none.
    pub(super) async fn dump_next_hops(&mut self, each: impl FnMut(KernelEvent)) -> io::Result<bool> {
        // Netlink header and struct nhmsg: all zero is any family.
        let mut message = vec![0; HEADER + 8];
        NetlinkBuffer::new(&mut message).set_message_type(parse::RTM_GETNEXTHOP);
        match self.request(message, NLM_F_DUMP, each).await {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(true),
            result => result,
        }
    }

    /// Gets one object.
    pub(super) async fn get(&mut self, request: RouteNetlinkMessage) -> io::Result<Option<KernelEvent>> {
        let mut response = None;
        match self.request(encode(request), NLM_F_ACK, |event| response = Some(event)).await {
            Ok(_) => Ok(response),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Adds, changes or removes an object; `flags` are `NLM_F_*` in addition to REQUEST and ACK.
    pub(super) async fn set(&mut self, request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.request(encode(request), NLM_F_ACK | flags, |_| {}).await.map(drop)
    }

    async fn request(&mut self, message: Vec<u8>, flags: u16, each: impl FnMut(KernelEvent)) -> io::Result<bool> {
        let timed_out = || io::Error::new(io::ErrorKind::TimedOut, "the kernel doesn't respond to a netlink request");
        timeout(REQUEST_TIMEOUT, self.request_without_timeout(message, flags, each)).await.map_err(|_| timed_out())?
    }

    async fn request_without_timeout(
        &mut self,
        mut message: Vec<u8>,
        flags: u16,
        mut each: impl FnMut(KernelEvent),
    ) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        let mut header = NetlinkBuffer::new(&mut message);
        header.set_length(length);
        header.set_flags(NLM_F_REQUEST | flags);
        header.set_sequence_number(self.sequence);
        self.socket.send_to(&message, &SocketAddr::new(0, 0)).await?;
        let mut is_consistent = true;
        loop {
            self.buffer.clear();
            let sender = self.socket.recv_from(&mut self.buffer).await?;
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
                    kind => match parse::event(kind, message.flags, message.body) {
                        Ok(event) => event.into_iter().for_each(&mut each),
                        Err(error) => debug!(%error, kind, "skipped an unreadable entry of a netlink dump"),
                    },
                }
            }
        }
    }
}

/// Serializes a message; flags and sequence number are set later.
fn encode(message: RouteNetlinkMessage) -> Vec<u8> {
    let mut message = NetlinkMessage::from(message);
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn result(body: &[u8]) -> io::Result<()> {
    match body.first_chunk::<4>().map(|number| i32::from_ne_bytes(*number)) {
        None | Some(0) => Ok(()),
        Some(number) => Err(io::Error::from_raw_os_error(number.wrapping_neg())),
    }
}

/// One message of a datagram.
struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// Iterator over the messages of a datagram; ends at the first truncated one.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let bytes = self.0;
        let header = match NetlinkBuffer::new_checked(bytes) {
            Ok(header) => header,
            Err(error) => {
                self.0 = &[];
                return Some(Err(error));
            }
        };
        let length = header.length() as usize;
        self.0 = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Ok(Message {
            kind: header.message_type(),
            flags: header.flags(),
            sequence: header.sequence_number(),
            body: &bytes[HEADER..length],
        }))
    }
}
