//! Netlink requests for one neighbor, chosen by the kernel's current entry.
//!
//! Every request replaces the flags of an entry: a careless one makes a permanent entry dynamic. So entries owned by
//! others are left alone, and vipgate's carry its protocol number.

use std::net::IpAddr;

use vipgate_netlink::packet_route::RouteNetlinkMessage;
use vipgate_netlink::packet_route::neighbour::{NeighbourAttribute, NeighbourExtFlags, NeighbourFlags};
use vipgate_netlink::{NLM_F_CREATE, Neighbor, PROTOCOL, neighbor_message};

/// How to resolve a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResolveAction {
    /// Owned by another program or static: no request.
    Skip,
    /// Probe once.
    Probe,
    /// Probe and let the kernel keep it resolved.
    Manage,
}

impl ResolveAction {
    /// Chooses by the kernel's entry; `None`: there is none.
    pub(super) fn new(entry: Option<&Neighbor>, can_manage: bool) -> Self {
        let default = if can_manage { Self::Manage } else { Self::Probe };
        let Some(entry) = entry else { return default };
        let is_static = entry.state & (libc::NUD_PERMANENT | libc::NUD_NOARP) != 0;
        let is_learned = entry.flags & libc::NTF_EXT_LEARNED != 0;
        if is_static || is_learned || entry.is_managed() && entry.protocol != PROTOCOL {
            Self::Skip
        } else if entry.protocol != 0 && entry.protocol != PROTOCOL {
            Self::Probe
        } else {
            default
        }
    }
}

/// How to release a managed entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseAction {
    /// Not managed by vipgate: no request.
    Skip,
    /// Make it an ordinary entry.
    Unmanage,
    /// Delete it: it is unresolved, and vipgate created it.
    Delete,
}

impl ReleaseAction {
    /// Chooses by the kernel's entry; `None`: there is none.
    pub(super) fn new(entry: Option<&Neighbor>) -> Self {
        match entry {
            Some(entry) if entry.is_managed() && entry.protocol == PROTOCOL => {
                if entry.usable_mac().is_some() {
                    Self::Unmanage
                } else {
                    Self::Delete
                }
            }
            Some(_) | None => Self::Skip,
        }
    }
}

/// RTM_NEWNEIGH with `NTF_USE`: resolves it as if a packet were sent, optionally managed. Returns the message and its
/// flags.
pub(super) fn probe(ifindex: u32, address: IpAddr, manage: bool) -> (RouteNetlinkMessage, u16) {
    let mut message = neighbor_message(ifindex, address);
    message.header.flags = NeighbourFlags::Use;
    if manage {
        message.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
        message.attributes.push(NeighbourAttribute::Protocol(PROTOCOL.into()));
    }
    (RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE)
}

/// Clears the managed flag; the entry must exist.
pub(super) fn unmanage(ifindex: u32, address: IpAddr) -> RouteNetlinkMessage {
    probe(ifindex, address, false).0
}

/// RTM_DELNEIGH: deletes the entry.
pub(super) fn delete(ifindex: u32, address: IpAddr) -> RouteNetlinkMessage {
    RouteNetlinkMessage::DelNeighbour(neighbor_message(ifindex, address))
}

#[cfg(test)]
mod tests {
    use vipgate_netlink::NTF_EXT_MANAGED;

    use super::*;

    fn entry() -> Neighbor {
        Neighbor {
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
    fn entries_owned_by_others_are_not_changed() {
        for other in [
            Neighbor { state: libc::NUD_PERMANENT, ..entry() },
            Neighbor { state: libc::NUD_NOARP, ..entry() },
            Neighbor { flags: libc::NTF_EXT_LEARNED, ..entry() },
            Neighbor { ext_flags: NTF_EXT_MANAGED, ..entry() },
            Neighbor { ext_flags: NTF_EXT_MANAGED, protocol: 186, ..entry() },
        ] {
            assert_eq!(ResolveAction::new(Some(&other), true), ResolveAction::Skip, "{other:?}");
            assert_eq!(ReleaseAction::new(Some(&other)), ReleaseAction::Skip, "{other:?}");
        }
        // Not managed: that would overwrite the other program's protocol number.
        assert_eq!(ResolveAction::new(Some(&Neighbor { protocol: 186, ..entry() }), true), ResolveAction::Probe);
    }

    #[test]
    fn own_and_unowned_entries_are_managed_if_supported() {
        let ours = Neighbor { ext_flags: NTF_EXT_MANAGED, protocol: PROTOCOL, ..entry() };
        for entry in [None, Some(&entry()), Some(&ours)] {
            assert_eq!(ResolveAction::new(entry, true), ResolveAction::Manage);
            assert_eq!(ResolveAction::new(entry, false), ResolveAction::Probe);
        }
        assert_eq!(ReleaseAction::new(Some(&ours)), ReleaseAction::Unmanage);
        assert_eq!(
            ReleaseAction::new(Some(&Neighbor { state: libc::NUD_INCOMPLETE, mac: None, ..ours })),
            ReleaseAction::Delete
        );
        assert_eq!(ReleaseAction::new(None), ReleaseAction::Skip);
    }
}
