//! What to tell the kernel about one neighbour, given what it has of it now.
//!
//! Every order replaces the flags of an entry: used carelessly, one makes a permanent entry forget that it is
//! permanent. So entries that somebody else decides on are left alone, and ours carry a mark to know them by.

use std::net::IpAddr;

use rtnetlink::packet_core::NLM_F_CREATE;
use rtnetlink::packet_route::neighbour::{NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use super::super::message::{Neighbour, OURS};

/// What to do about a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Somebody else decides what it is, and keeps it.
    Leave,
    /// Ask once.
    Probe,
    /// Ask, and keep it known.
    Manage,
}

impl Plan {
    /// The plan for an entry as the kernel has it; `None`: it has none.
    pub(super) fn new(entry: Option<&Neighbour>, can_manage: bool) -> Self {
        let plan = if can_manage { Self::Manage } else { Self::Probe };
        let Some(entry) = entry else { return plan };
        let is_fixed = entry.state & (libc::NUD_PERMANENT | libc::NUD_NOARP) != 0;
        let is_learned = entry.flags & libc::NTF_EXT_LEARNED != 0;
        if is_fixed || is_learned || entry.is_managed() && entry.protocol != OURS {
            Self::Leave
        } else if entry.protocol != 0 && entry.protocol != OURS {
            Self::Probe
        } else {
            plan
        }
    }
}

/// How an entry of ours is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Return {
    /// It isn't ours.
    Keep,
    /// It becomes an ordinary entry.
    Unmanage,
    /// It has no link address, and we made it.
    Delete,
}

impl Return {
    /// How to give back an entry as the kernel has it.
    pub(super) fn new(entry: Option<&Neighbour>) -> Self {
        match entry {
            Some(entry) if entry.is_managed() && entry.protocol == OURS => {
                if entry.usable_mac().is_some() {
                    Self::Unmanage
                } else {
                    Self::Delete
                }
            }
            Some(_) | None => Self::Keep,
        }
    }
}

/// "What do you have of it?"
pub(super) fn get(ifindex: u32, address: IpAddr) -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetNeighbour(message(ifindex, address))
}

/// "Send to it as if there were a packet", and perhaps "and keep it known".
pub(super) fn probe(ifindex: u32, address: IpAddr, manage: bool) -> (RouteNetlinkMessage, u16) {
    let mut message = message(ifindex, address);
    message.header.flags = NeighbourFlags::Use;
    if manage {
        message.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
        message.attributes.push(NeighbourAttribute::Protocol(OURS.into()));
    }
    (RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE)
}

/// "Keep it no longer"; it must exist.
pub(super) fn unmanage(ifindex: u32, address: IpAddr) -> RouteNetlinkMessage {
    probe(ifindex, address, false).0
}

/// "Forget it."
pub(super) fn delete(ifindex: u32, address: IpAddr) -> RouteNetlinkMessage {
    RouteNetlinkMessage::DelNeighbour(message(ifindex, address))
}

fn message(ifindex: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = ifindex;
    message.attributes.push(NeighbourAttribute::Destination(address.into()));
    message
}

#[cfg(test)]
mod tests {
    use super::super::super::message::NTF_EXT_MANAGED;
    use super::*;

    fn entry() -> Neighbour {
        Neighbour {
            ifindex: 1,
            address: "192.0.2.1".parse().unwrap(),
            state: libc::NUD_STALE,
            flags: 0,
            ext_flags: 0,
            protocol: 0,
            mac: Some([2, 0, 0, 0, 0, 1]),
        }
    }

    #[test]
    fn entries_of_others_are_left_alone() {
        for other in [
            Neighbour { state: libc::NUD_PERMANENT, ..entry() },
            Neighbour { state: libc::NUD_NOARP, ..entry() },
            Neighbour { flags: libc::NTF_EXT_LEARNED, ..entry() },
            Neighbour { ext_flags: NTF_EXT_MANAGED, ..entry() },
            Neighbour { ext_flags: NTF_EXT_MANAGED, protocol: 186, ..entry() },
        ] {
            assert_eq!(Plan::new(Some(&other), true), Plan::Leave, "{other:?}");
            assert_eq!(Return::new(Some(&other)), Return::Keep, "{other:?}");
        }
        // Not marked as ours where somebody else's mark would be lost.
        assert_eq!(Plan::new(Some(&Neighbour { protocol: 186, ..entry() }), true), Plan::Probe);
    }

    #[test]
    fn ours_and_nobodys_are_managed_where_the_kernel_can() {
        let ours = Neighbour { ext_flags: NTF_EXT_MANAGED, protocol: OURS, ..entry() };
        for entry in [None, Some(&entry()), Some(&ours)] {
            assert_eq!(Plan::new(entry, true), Plan::Manage);
            assert_eq!(Plan::new(entry, false), Plan::Probe);
        }
        assert_eq!(Return::new(Some(&ours)), Return::Unmanage);
        assert_eq!(Return::new(Some(&Neighbour { state: libc::NUD_INCOMPLETE, mac: None, ..ours })), Return::Delete);
        assert_eq!(Return::new(None), Return::Keep);
    }
}
