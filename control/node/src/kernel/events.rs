//! Notices of the kernel that somebody has changed what vipgate programs: only a reason to look.

use std::io;

use rtnetlink::MulticastGroup;
use rtnetlink::sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};

/// linux/netfilter/nfnetlink.h: `NFNLGRP_NFTABLES`.
const NFTABLES_GROUP: u32 = 7;
/// Type of a message that a table was deleted: `NFNL_SUBSYS_NFTABLES` and `NFT_MSG_DELTABLE`.
const DELETED_TABLE: u16 = 10 << 8 | 2;
/// Netlink header, and netfilter's behind it (nfgenmsg).
const HEADER: usize = 16;
const NETFILTER_HEADER: usize = 4;
/// The first attribute of messages about nftables: the name of the table.
const TABLE_ATTRIBUTE: u16 = 1;
const BUFFER_BYTES: usize = 64 << 10;

/// What may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeNotice {
    Table,
    /// The table is gone: packets aren't steered until it is back.
    TableDeleted,
    /// Links, addresses, rules or routes.
    Routing,
}

/// Receives notices.
pub struct Events {
    netfilter: TokioSocket,
    route: TokioSocket,
    buffer: Vec<u8>,
    other_buffer: Vec<u8>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// Subscribes.
    ///
    /// # Errors
    /// Netlink isn't available.
    pub fn open() -> io::Result<Self> {
        let mut netfilter = TokioSocket::new(NETLINK_NETFILTER)?;
        netfilter.socket_mut().bind(&SocketAddr::new(0, 0))?;
        netfilter.socket_mut().add_membership(NFTABLES_GROUP)?;
        let mut route = TokioSocket::new(NETLINK_ROUTE)?;
        route.socket_mut().bind(&SocketAddr::new(0, 0))?;
        for group in [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Rule,
            MulticastGroup::Ipv6Rule,
        ] {
            route.socket_mut().add_membership(group as u32)?;
        }
        let (buffer, other_buffer) = (Vec::with_capacity(BUFFER_BYTES), Vec::with_capacity(BUFFER_BYTES));
        Ok(Self { netfilter, route, buffer, other_buffer })
    }

    /// The next notice. Cancel-safe.
    ///
    /// # Errors
    /// A socket failed.
    pub async fn next(&mut self) -> io::Result<ChangeNotice> {
        loop {
            self.buffer.clear();
            self.other_buffer.clear();
            tokio::select! {
                received = self.netfilter.recv_from(&mut self.buffer) => match received {
                    Ok(_) => if let Some(notice) = about_table(&self.buffer, "vipgate") {
                        return Ok(notice);
                    },
                    // Some were lost.
                    Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(ChangeNotice::Table),
                    Err(error) => return Err(error),
                },
                received = self.route.recv_from(&mut self.other_buffer) => match received {
                    Ok(_) => return Ok(ChangeNotice::Routing),
                    Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(ChangeNotice::Routing),
                    Err(error) => return Err(error),
                },
            }
        }
    }
}

/// What a datagram says about the table with this name.
fn about_table(mut datagram: &[u8], name: &str) -> Option<ChangeNotice> {
    let mut notice = None;
    while let Some(length) = datagram.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes) as usize) {
        let Some(message) = datagram.get(..length).filter(|message| message.len() >= HEADER) else { break };
        let attributes = message.get(HEADER + NETFILTER_HEADER..).unwrap_or_default();
        if let Some([l0, l1, k0, k1]) = attributes.first_chunk() {
            let (length, kind) = (usize::from(u16::from_ne_bytes([*l0, *l1])), u16::from_ne_bytes([*k0, *k1]));
            let text = attributes.get(4..length).and_then(|text| text.split_last()).map(|(_, text)| text);
            if kind == TABLE_ATTRIBUTE && text == Some(name.as_bytes()) {
                if u16::from_ne_bytes([message[4], message[5]]) == DELETED_TABLE {
                    return Some(ChangeNotice::TableDeleted);
                }
                notice = Some(ChangeNotice::Table);
            }
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    notice
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of nftables with the name of a table.
    fn message(kind: u8, name: &str) -> Vec<u8> {
        let attribute_length = 4 + name.len() as u16 + 1;
        let length = 20 + u32::from(attribute_length.next_multiple_of(4));
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(u16::from_ne_bytes([kind, 10]).to_ne_bytes());
        bytes.extend([0; 14]);
        bytes.extend(attribute_length.to_ne_bytes());
        bytes.extend(TABLE_ATTRIBUTE.to_ne_bytes());
        bytes.extend(name.as_bytes());
        bytes.resize(length as usize, 0);
        bytes
    }

    #[test]
    fn notices_are_about_our_table_and_say_whether_it_is_gone() {
        let (rule, deleted) = (8, 2);
        assert_eq!(about_table(&message(deleted, "kube-proxy"), "vipgate"), None);
        assert_eq!(about_table(&message(rule, "vipgate"), "vipgate"), Some(ChangeNotice::Table));
        let flushed = [message(deleted, "nat"), message(rule, "vipgate"), message(deleted, "vipgate")].concat();
        assert_eq!(about_table(&flushed, "vipgate"), Some(ChangeNotice::TableDeleted));
        assert_eq!(about_table(&flushed[..30], "vipgate"), None);
    }
}
