//! Connections of pods whose coverage has changed. The kernel decides on source NAT with the first packet of a connection,
//! so one that was masqueraded stays so: into the tunnel it would have the node's address. Such entries are deleted, and
//! the next packet makes a new one.

use std::io;
use std::net::IpAddr;

use vipgate_netlink::protocols::NETLINK_NETFILTER;
use vipgate_netlink::{Client, Request, attributes, push_attribute};

use crate::error::is_errno;

/// linux/netfilter/nfnetlink.h: `NFNL_SUBSYS_CTNETLINK`, and its messages.
const GET: u16 = 0x0101;
const DELETE: u16 = 0x0102;
/// Length of netfilter's header behind netlink's (nfgenmsg).
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
/// A flag of an attribute's type.
const NESTED: u16 = 0x8000;

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
    let mut client = Client::open(NETLINK_NETFILTER)?;
    let mut deleted = 0;
    for family in FAMILIES {
        let header = [family, 0, 0, 0];
        let stale = client.dump(Request::new(GET, &header), |message| {
            let entry = message.body.get(NETFILTER_HEADER..).unwrap_or_default();
            Ok(connection(entry).filter(&is_stale).map(|_| identity(entry)))
        });
        for entry in stale.await? {
            match client.set(Request::new(DELETE, &[&header[..], &entry].concat()), 0).await {
                // It has ended by itself meanwhile.
                Err(error) if is_errno(&error, libc::ENOENT) => {}
                result => {
                    result?;
                    deleted += 1;
                }
            }
        }
    }
    Ok(deleted)
}

/// The attributes in a list, up to the first malformed one.
fn list(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    attributes(bytes, 0).into_iter().flatten().map_while(Result::ok)
}

fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    list(bytes).find(|(other, _)| *other == kind).map(|(_, value)| value)
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
    for (kind, value) in list(bytes).filter(|(kind, _)| [TUPLE_ORIG, ID, ZONE].contains(kind)) {
        let flag = if kind == TUPLE_ORIG { NESTED } else { 0 };
        push_attribute(&mut identity, kind | flag, value);
    }
    identity
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        push_attribute(&mut bytes, kind, value);
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
        let kinds: Vec<u16> = list(&identity).map(|(kind, _)| kind).collect();
        assert_eq!(kinds, [TUPLE_ORIG, ID, ZONE]);
        assert_eq!(find(&identity, TUPLE_ORIG), find(&entry, TUPLE_ORIG));
        // A cut entry is none, and nothing panics.
        for length in 0..entry.len() {
            let cut = connection(&entry[..length]);
            assert!(cut.is_none() || cut == Some(expected), "{length}");
        }
    }
}
