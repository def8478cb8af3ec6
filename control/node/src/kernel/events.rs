//! Notices of the kernel that somebody has changed what vipgate programs: only a reason to look.

use std::io;

use rtnetlink::MulticastGroup;
use rtnetlink::sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};

/// linux/netfilter/nfnetlink.h: `NFNLGRP_NFTABLES`.
const NFTABLES_GROUP: u32 = 7;
/// Netlink header, and netfilter's behind it (nfgenmsg).
const HEADER: usize = 16;
const NETFILTER_HEADER: usize = 4;
/// The first attribute of messages about nftables: the name of the table.
const TABLE_ATTRIBUTE: u16 = 1;
const BUFFER_BYTES: usize = 64 << 10;

/// What may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeNotice {
    /// The table.
    Table,
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
                    Ok(_) if is_about_table(&self.buffer, "vipgate") => return Ok(ChangeNotice::Table),
                    Ok(_) => {}
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

/// Whether a datagram has a message about the table with this name.
fn is_about_table(mut datagram: &[u8], name: &str) -> bool {
    while let Some(length) = datagram.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes) as usize) {
        let Some(message) = datagram.get(..length).filter(|message| message.len() >= HEADER) else { return false };
        let attributes = message.get(HEADER + NETFILTER_HEADER..).unwrap_or_default();
        if let Some([l0, l1, k0, k1]) = attributes.first_chunk() {
            let (length, kind) = (usize::from(u16::from_ne_bytes([*l0, *l1])), u16::from_ne_bytes([*k0, *k1]));
            let text = attributes.get(4..length).and_then(|text| text.split_last()).map(|(_, text)| text);
            if kind == TABLE_ATTRIBUTE && text == Some(name.as_bytes()) {
                return true;
            }
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}
