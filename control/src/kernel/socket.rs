//! Two kinds of netlink sockets: one that hears of changes, one that asks and gets answers.
//!
//! They are apart because a socket that overflows with notifications loses answers too.

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

use super::message::Event;
use super::parse;

/// The longest datagram of route netlink is 32 KiB.
const DATAGRAM_BYTES: usize = 64 * 1024;
/// Room for about 10 000 notifications; the kernel grants at most net.core.rmem_max.
const NOTIFICATION_BYTES: i32 = 8 << 20;
/// The kernel answers at once, but it may be busy with a table of a million routes.
const PATIENCE: Duration = Duration::from_secs(10);
/// Datagrams that are thrown away at once before a storm of them is believed to be endless.
const DRAIN_LIMIT: usize = 100_000;

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

/// What a subscription heard.
#[derive(Debug)]
pub(super) enum Heard {
    /// These changes.
    Events(Vec<Event>),
    /// Changes that nobody knows: the kernel had no room for more of them, or one was unreadable.
    Lost,
}

/// Hears of every change of the kernel's network.
pub(super) struct Subscription {
    socket: TokioSocket,
    buffer: Vec<u8>,
}

impl Subscription {
    /// Subscribes. Changes from now on will be heard.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket.socket_mut().set_rx_buf_sz(NOTIFICATION_BYTES)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        for group in GROUPS {
            socket.socket_mut().add_membership(group as u32)?;
        }
        Ok(Self { socket, buffer: Vec::with_capacity(DATAGRAM_BYTES) })
    }

    /// Waits for the next changes. Nothing is lost when the future is dropped.
    pub(super) async fn next(&mut self) -> io::Result<Heard> {
        loop {
            self.buffer.clear();
            match self.socket.recv_from(&mut self.buffer).await {
                Ok(sender) if sender.port_number() == 0 => {}
                // Another process, not the kernel.
                Ok(_) => continue,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Heard::Lost),
                Err(error) => return Err(error),
            }
            let mut events = Vec::new();
            for message in Messages(&self.buffer) {
                match message.and_then(|message| parse::event(message.kind, message.flags, message.body)) {
                    Ok(event) => events.extend(event),
                    Err(error) => {
                        debug!(%error, "a netlink notification is unreadable; reading everything again");
                        return Ok(Heard::Lost);
                    }
                }
            }
            if !events.is_empty() {
                return Ok(Heard::Events(events));
            }
        }
    }

    /// Throws away what was heard so far. After an overflow the kernel tells nothing more, not even of a further
    /// overflow, until the socket has been read empty; so this has to stand before a dump.
    ///
    /// Returns whether it is empty: in an endless storm of changes it never is.
    pub(super) fn drain(&mut self) -> bool {
        for _ in 0..DRAIN_LIMIT {
            self.buffer.clear();
            // Not by the runtime, which lets a task read so many times only before it pretends that there is no more.
            match self.socket.socket_ref().recv_from(&mut self.buffer, libc::MSG_DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Ok(_) | Err(_) => {}
            }
        }
        false
    }
}

/// Asks the kernel, one question at a time.
pub(super) struct Client {
    socket: TokioSocket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Client {
    /// A socket for questions.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(DATAGRAM_BYTES) })
    }

    /// The same, but the kernel takes questions by the letter and lists only what they ask for. Linux before 4.20 can't, and
    /// lists all of a family.
    pub(super) fn strict() -> io::Result<Self> {
        let client = Self::open()?;
        match client.socket.socket_ref().set_netlink_get_strict_chk(true) {
            Err(error) if error.raw_os_error() != Some(libc::ENOPROTOOPT) => Err(error),
            Ok(()) | Err(_) => Ok(client),
        }
    }

    /// Reads a table. Returns whether the kernel's table stood still while it was read: else entries that didn't
    /// change may be missing.
    pub(super) async fn dump(&mut self, question: RouteNetlinkMessage, each: impl FnMut(Event)) -> io::Result<bool> {
        self.exchange(encode(question), NLM_F_DUMP, each).await
    }

    /// Reads the next-hop objects. A kernel before 5.3 has none.
    pub(super) async fn dump_next_hops(&mut self, each: impl FnMut(Event)) -> io::Result<bool> {
        // A header, and struct nhmsg: all zero, any family.
        let mut question = vec![0; HEADER + 8];
        NetlinkBuffer::new(&mut question).set_message_type(parse::RTM_GETNEXTHOP);
        match self.exchange(question, NLM_F_DUMP, each).await {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(true),
            result => result,
        }
    }

    /// Reads one object.
    pub(super) async fn get(&mut self, question: RouteNetlinkMessage) -> io::Result<Option<Event>> {
        let mut answer = None;
        match self.exchange(encode(question), NLM_F_ACK, |event| answer = Some(event)).await {
            Ok(_) => Ok(answer),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Changes something: `flags` are the `NLM_F_*` besides request and acknowledgement.
    pub(super) async fn set(&mut self, order: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.exchange(encode(order), NLM_F_ACK | flags, |_| {}).await.map(drop)
    }

    async fn exchange(&mut self, message: Vec<u8>, flags: u16, each: impl FnMut(Event)) -> io::Result<bool> {
        let stuck = || io::Error::new(io::ErrorKind::TimedOut, "the kernel doesn't answer a netlink request");
        timeout(PATIENCE, self.exchange_patiently(message, flags, each)).await.map_err(|_| stuck())?
    }

    async fn exchange_patiently(
        &mut self,
        mut message: Vec<u8>,
        flags: u16,
        mut each: impl FnMut(Event),
    ) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        let mut header = NetlinkBuffer::new(&mut message);
        header.set_length(length);
        header.set_flags(NLM_F_REQUEST | flags);
        header.set_sequence_number(self.sequence);
        self.socket.send_to(&message, &SocketAddr::new(0, 0)).await?;
        let mut stood_still = true;
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
                stood_still &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.kind {
                    // Both begin with an error number, 0 for none; NLMSG_ERROR is also the acknowledgement.
                    NLMSG_ERROR | NLMSG_DONE => return result(message.body).map(|()| stood_still),
                    kind => match parse::event(kind, message.flags, message.body) {
                        Ok(event) => event.into_iter().for_each(&mut each),
                        Err(error) => debug!(%error, kind, "left out an unreadable entry of a netlink dump"),
                    },
                }
            }
        }
    }
}

/// The bytes of a message whose header isn't complete yet.
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

/// The messages of a datagram; ends at the first one that is cut short.
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
