//! Connections of pods whose coverage has changed. The kernel decides on source NAT with the first packet of a connection,
//! so one that was masqueraded stays so: into the tunnel it would have the node's address. Such entries are deleted, and
//! the next packet makes a new one.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tokio::time::timeout;

/// linux/netfilter/nfnetlink.h: `NFNL_SUBSYS_CTNETLINK`, and its messages.
const GET: u16 = 0x0101;
const DELETE: u16 = 0x0102;
/// linux/netlink.h.
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const HEADER: usize = 16;
const NETFILTER_HEADER: usize = 4;
/// linux/netfilter/nfnetlink_conntrack.h: `CTA_TUPLE_ORIG`, `CTA_TUPLE_REPLY`, `CTA_ID`, `CTA_ZONE`; in a tuple
/// `CTA_TUPLE_IP`, and in that the addresses.
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
const TUPLE_IP: u16 = 1;
const SOURCES: [u16; 2] = [1, 3];
const DESTINATIONS: [u16; 2] = [2, 4];
/// `AF_INET`, `AF_INET6`.
const FAMILIES: [u8; 2] = [2, 10];
/// Flags of an attribute's type.
const TYPE_MASK: u16 = 0x3fff;
const NESTED: u16 = 0x8000;
const BUFFER_BYTES: usize = 64 << 10;
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection: where it was opened from and to, and where its replies come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connection {
    /// Source of its first packet.
    pub(super) source: IpAddr,
    /// Source of replies: its destination, after NAT.
    pub(super) remote: IpAddr,
    /// Destination of replies: its source, after NAT.
    pub(super) translated: IpAddr,
}

/// Deletes the connections that `is_stale` selects; how many.
pub(super) async fn delete(is_stale: impl Fn(&Connection) -> bool) -> io::Result<usize> {
    let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
    socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
    let mut stale = Vec::new();
    for family in FAMILIES {
        send(&mut socket, &message(GET, NLM_F_REQUEST | NLM_F_DUMP, family, &[])).await?;
        let mut buffer = Vec::with_capacity(BUFFER_BYTES);
        'dump: loop {
            buffer.clear();
            let received = timeout(REPLY_TIMEOUT, socket.recv_from(&mut buffer)).await;
            received.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            let mut rest = buffer.as_slice();
            while let Some((kind, body, next)) = split_message(rest) {
                match kind {
                    NLMSG_DONE => break 'dump,
                    NLMSG_ERROR => return Err(error_of(body)),
                    _ => {
                        let attributes = body.get(NETFILTER_HEADER..).unwrap_or_default();
                        if connection(attributes).is_some_and(|connection| is_stale(&connection)) {
                            stale.push(message(DELETE, NLM_F_REQUEST, family, &identity(attributes)));
                        }
                    }
                }
                rest = next;
            }
        }
    }
    for request in &stale {
        // It may have ended by itself meanwhile: without ACK there is no error to read.
        send(&mut socket, request).await?;
    }
    Ok(stale.len())
}

async fn send(socket: &mut TokioSocket, message: &[u8]) -> io::Result<()> {
    socket.send(message).await.map(drop)
}

/// A message with netlink's and netfilter's header.
fn message(kind: u16, flags: u16, family: u8, attributes: &[u8]) -> Vec<u8> {
    let length = (HEADER + NETFILTER_HEADER + attributes.len()) as u32;
    let mut bytes = Vec::with_capacity(length as usize);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family, 0, 0, 0]);
    bytes.extend(attributes);
    bytes
}

/// The type and body of the first message, and the rest.
fn split_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let body = bytes.get(HEADER..length)?;
    Some((kind, body, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

fn error_of(body: &[u8]) -> io::Error {
    let number = body.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
    io::Error::from_raw_os_error(-number)
}

/// The attributes in a list, each with its header.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8], &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & TYPE_MASK;
        let (whole, value) = (bytes.get(..length)?, bytes.get(4..length)?);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value, whole))
    })
}

fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(other, ..)| *other == kind).map(|(_, value, _)| value)
}

fn address(tuple: &[u8], kinds: [u16; 2]) -> Option<IpAddr> {
    let addresses = find(tuple, TUPLE_IP)?;
    let value = kinds.into_iter().find_map(|kind| find(addresses, kind))?;
    match value.len() {
        4 => Some(IpAddr::from(*value.first_chunk::<4>()?)),
        16 => Some(IpAddr::from(*value.first_chunk::<16>()?)),
        _ => None,
    }
}

fn connection(bytes: &[u8]) -> Option<Connection> {
    let (orig, reply) = (find(bytes, TUPLE_ORIG)?, find(bytes, TUPLE_REPLY)?);
    Some(Connection {
        source: address(orig, SOURCES)?,
        remote: address(reply, SOURCES)?,
        translated: address(reply, DESTINATIONS)?,
    })
}

/// The attributes that identify an entry.
fn identity(bytes: &[u8]) -> Vec<u8> {
    let mut identity = Vec::new();
    for (kind, value, _) in attributes(bytes).filter(|(kind, ..)| [TUPLE_ORIG, ID, ZONE].contains(kind)) {
        let flag = if kind == TUPLE_ORIG { NESTED } else { 0 };
        identity.extend((value.len() as u16 + 4).to_ne_bytes());
        identity.extend((kind | flag).to_ne_bytes());
        identity.extend(value);
        identity.resize(identity.len().next_multiple_of(4), 0);
    }
    identity
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (value.len() as u16 + 4).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn tuple(kind: u16, source: [u8; 4], destination: [u8; 4]) -> Vec<u8> {
        let addresses = [attribute(1, &source), attribute(2, &destination)].concat();
        let protocol = attribute(2 | NESTED, &attribute(1, &[17]));
        attribute(kind | NESTED, &[attribute(TUPLE_IP | NESTED, &addresses), protocol].concat())
    }

    #[test]
    fn an_entry_is_read_and_named_again_by_its_first_tuple_id_and_zone() {
        let entry = [
            tuple(TUPLE_ORIG, [10, 244, 1, 5], [198, 51, 100, 10]),
            tuple(TUPLE_REPLY, [198, 51, 100, 10], [10, 5, 1, 1]),
            attribute(3, &[0, 0, 1, 2]),
            attribute(ID, &[1, 2, 3, 4]),
            attribute(ZONE, &[0, 9]),
        ]
        .concat();
        let expected = Connection {
            source: [10, 244, 1, 5].into(),
            remote: [198, 51, 100, 10].into(),
            translated: [10, 5, 1, 1].into(),
        };
        assert_eq!(connection(&entry), Some(expected));
        let identity = identity(&entry);
        let kinds: Vec<u16> = attributes(&identity).map(|(kind, ..)| kind).collect();
        assert_eq!(kinds, [TUPLE_ORIG, ID, ZONE]);
        assert_eq!(find(&identity, TUPLE_ORIG), find(&entry, TUPLE_ORIG));
        // A cut entry is none, and nothing panics.
        for length in 0..entry.len() {
            let cut = connection(&entry[..length]);
            assert!(cut.is_none() || cut == Some(expected), "{length}");
            let whole = message(GET, 0, 2, &entry);
            let _ = split_message(&whole[..length]);
        }
    }
}
