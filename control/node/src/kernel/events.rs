//! Notices of the kernel that somebody has changed what vipgate programs: only a reason to look.

use std::io;

use vipgate_netlink::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use vipgate_netlink::{Message, Subscription, attributes};

/// linux/netfilter/nfnetlink.h: `NFNLGRP_NFTABLES`.
const NFTABLES_GROUP: u32 = 7;
/// Type of a message that a table was deleted: `NFNL_SUBSYS_NFTABLES` and `NFT_MSG_DELTABLE`.
const DELETED_TABLE: u16 = 10 << 8 | 2;
/// Netfilter's header behind netlink's (nfgenmsg).
const NETFILTER_HEADER: usize = 4;
/// The first attribute of messages about nftables: the name of the table.
const TABLE_ATTRIBUTE: u16 = 1;

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
#[derive(Debug)]
pub struct Events {
    netfilter: Subscription,
    route: Subscription,
}

impl Events {
    /// Subscribes.
    ///
    /// # Errors
    /// Netlink isn't available.
    pub fn open() -> io::Result<Self> {
        let groups = [
            libc::RTNLGRP_LINK,
            libc::RTNLGRP_IPV4_IFADDR,
            libc::RTNLGRP_IPV6_IFADDR,
            libc::RTNLGRP_IPV4_RULE,
            libc::RTNLGRP_IPV6_RULE,
        ];
        Ok(Self {
            netfilter: Subscription::open(NETLINK_NETFILTER, &[NFTABLES_GROUP])?,
            route: Subscription::open(NETLINK_ROUTE, &groups)?,
        })
    }

    /// The next notice. Cancel-safe.
    ///
    /// # Errors
    /// A socket failed.
    pub async fn next(&mut self) -> io::Result<ChangeNotice> {
        loop {
            tokio::select! {
                received = self.netfilter.next() => match received? {
                    Some(messages) => if let Some(notice) = about_table(messages.flatten(), "vipgate") {
                        return Ok(notice);
                    },
                    // Some were lost.
                    None => return Ok(ChangeNotice::Table),
                },
                received = self.route.next() => return received.map(|_| ChangeNotice::Routing),
            }
        }
    }
}

/// What messages say about the table with this name.
fn about_table<'a>(messages: impl Iterator<Item = Message<'a>>, name: &str) -> Option<ChangeNotice> {
    let mut notice = None;
    for message in messages {
        let first = attributes(message.body, NETFILTER_HEADER).ok().and_then(|mut attributes| attributes.next());
        let Some(Ok((TABLE_ATTRIBUTE, text))) = first else { continue };
        if text.split_last().map(|(_, text)| text) == Some(name.as_bytes()) {
            if message.kind == DELETED_TABLE {
                return Some(ChangeNotice::TableDeleted);
            }
            notice = Some(ChangeNotice::Table);
        }
    }
    notice
}

#[cfg(test)]
mod tests {
    use vipgate_netlink::Messages;

    use super::*;

    fn notice(datagram: &[u8]) -> Option<ChangeNotice> {
        about_table(Messages(datagram).flatten(), "vipgate")
    }

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
        assert_eq!(notice(&message(deleted, "kube-proxy")), None);
        assert_eq!(notice(&message(rule, "vipgate")), Some(ChangeNotice::Table));
        let flushed = [message(deleted, "nat"), message(rule, "vipgate"), message(deleted, "vipgate")].concat();
        assert_eq!(notice(&flushed), Some(ChangeNotice::TableDeleted));
        assert_eq!(notice(&flushed[..30]), None);
    }
}
