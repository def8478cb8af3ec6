//! Decoded rtnetlink messages, limited to the fields that vipgate uses.
//!
//! One [`KernelEvent`] is one object that was added, replaced or removed. Dumps and notifications yield the same
//! events.

use std::net::IpAddr;

use ipnet::IpNet;

/// The protocol number (`RTPROT_*`) of routes and neighbors that vipgate installs, as `ip` shows it; no routing daemon
/// uses it.
pub(super) const RTPROT_VIPGATE: u8 = 118;
/// linux/neighbour.h: the kernel keeps the entry resolved.
pub(super) const NTF_EXT_MANAGED: u32 = 1;

/// A change of one kernel object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KernelEvent {
    /// A network device.
    Link(Change, Link),
    /// An address of a device.
    Address(Change, Address),
    Route(Change, Route),
    /// A nexthop object (`ip nexthop`).
    NextHop(Change, NextHopObject),
    Neighbor(Change, Neighbor),
}

/// The kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Added, or changed in place.
    New,
    /// Replaces another object (`NLM_F_REPLACE`).
    Replaced,
    Removed,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// Its interface index.
    pub(super) ifindex: u32,
    pub(super) name: String,
    /// Its ARPHRD type.
    pub(super) hardware_type: u16,
    /// Its `IFF_*` flags.
    pub(super) flags: u32,
    /// Its MAC address; `None` if its address isn't six bytes long.
    pub(super) mac: Option<[u8; 6]>,
    /// Its MTU, bytes.
    pub(super) mtu: u32,
    /// The index of its bridge, bond or VRF.
    pub(super) master: Option<u32>,
    /// Whether it is a device of the kernel's own: veth, tun, bridge and the like.
    pub(super) is_virtual: bool,
}

impl Link {
    /// Whether it is administratively up and has a carrier.
    pub(super) fn is_up(&self) -> bool {
        let required = (libc::IFF_UP | libc::IFF_LOWER_UP).cast_unsigned();
        self.flags & required == required
    }

    /// Its state: the first condition that prevents forwarding, or up.
    pub(super) fn state(&self) -> LinkState {
        let has = |flag: libc::c_int| self.flags & flag.cast_unsigned() != 0;
        if !has(libc::IFF_UP) {
            LinkState::Down
        } else if !has(libc::IFF_LOWER_UP) {
            LinkState::NoCarrier
        } else if !has(libc::IFF_RUNNING) {
            LinkState::NotOperational
        } else {
            LinkState::Up
        }
    }
}

/// The operational state of an interface, as the kernel reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkState {
    /// Up: it sends and receives.
    #[default]
    Up,
    /// Administratively down.
    Down,
    NoCarrier,
    /// Its operational state isn't `up` (RFC 2863): dormant, e.g. 802.1X, or its lower layer is down.
    NotOperational,
    /// The device was removed.
    Gone,
}

impl LinkState {
    /// The predicate of a log sentence about an interface.
    pub fn description(self) -> &'static str {
        match self {
            Self::Up => "is up",
            Self::Down => "is administratively down",
            Self::NoCarrier => "has no carrier",
            Self::NotOperational => "is not operational",
            Self::Gone => "is gone",
        }
    }
}

/// An address of a device. Ordered by preference as a source address: IPv4 first, then primary before secondary, then
/// the widest scope.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    /// The device.
    pub(super) ifindex: u32,
    /// Whether it is an IPv6 address.
    pub(super) v6: bool,
    /// Whether it is a secondary address of its subnet.
    pub(super) secondary: bool,
    /// `RT_SCOPE_*`; 0 is universe.
    pub(super) scope: u8,
    /// The address.
    pub(super) ip: IpAddr,
    /// Whether it may be a source address: duplicate address detection is done and found none.
    pub(super) usable: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) table: u32,
    /// Its destination.
    pub(super) prefix: IpNet,
    /// Its metric; the lowest is preferred.
    pub(super) metric: u32,
    /// Its type (`RTN_*`).
    pub(super) kind: u8,
    /// Its originator (`RTPROT_*`).
    pub(super) protocol: u8,
    /// The next hops listed in the route itself.
    pub(super) next_hops: Vec<NextHop>,
    /// The id of its nexthop object.
    pub(super) nexthop_id: Option<u32>,
}

/// One next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextHop {
    /// The output device; 0: none.
    pub(super) ifindex: u32,
    /// The gateway's address; `None`: on-link.
    pub(super) gateway: Option<IpAddr>,
    /// Unusable at present (`RTNH_F_DEAD`).
    pub(super) dead: bool,
    /// Lightweight tunnel encapsulation is set (`RTA_ENCAP`).
    pub(super) encapsulated: bool,
}

impl NextHop {
    /// Whether both are the same next hop, regardless of state.
    pub(super) fn same_next_hop(&self, other: &Self) -> bool {
        (self.ifindex, self.gateway, self.encapsulated) == (other.ifindex, other.gateway, other.encapsulated)
    }
}

/// A nexthop object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NextHopObject {
    pub(super) id: u32,
    pub(super) target: NextHopObjectTarget,
}

/// The target of a nexthop object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextHopObjectTarget {
    /// Packets are dropped.
    Blackhole,
    /// One next hop.
    Single(NextHop),
    /// A group of nexthop objects, by id.
    Group(Vec<u32>),
}

/// A neighbor (ARP or ND entry).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Neighbor {
    /// The index of its interface.
    pub(super) ifindex: u32,
    pub(super) address: IpAddr,
    /// Its state (`NUD_*`).
    pub(super) state: u16,
    /// `NTF_*`.
    pub(super) flags: u8,
    /// `NTF_EXT_*`.
    pub(super) ext_flags: u32,
    /// Its originator (`RTPROT_*`); 0: unknown.
    pub(super) protocol: u8,
    /// Its MAC address; `None` if its link-layer address isn't six bytes long.
    pub(super) mac: Option<[u8; 6]>,
}

impl Neighbor {
    /// States in which the kernel sends to the MAC address.
    const VALID: u16 = libc::NUD_REACHABLE
        | libc::NUD_STALE
        | libc::NUD_DELAY
        | libc::NUD_PROBE
        | libc::NUD_PERMANENT
        | libc::NUD_NOARP;

    /// Its MAC address, if it is a valid unicast destination. Excludes multicast mappings, which are in the neighbor
    /// table too, and proxy entries.
    pub(super) fn usable_mac(&self) -> Option<[u8; 6]> {
        let is_unicast = |mac: &[u8; 6]| mac[0] & 1 == 0 && mac != &[0; 6];
        let valid = self.state & Self::VALID != 0 && self.flags & libc::NTF_PROXY == 0;
        self.mac.filter(|mac| valid && !self.address.is_multicast() && is_unicast(mac))
    }

    /// Whether the resolution failed.
    pub(super) fn has_failed(&self) -> bool {
        self.state & libc::NUD_FAILED != 0
    }

    /// Whether the kernel keeps it resolved (`NTF_EXT_MANAGED`).
    pub(super) fn is_managed(&self) -> bool {
        self.ext_flags & NTF_EXT_MANAGED != 0
    }
}
