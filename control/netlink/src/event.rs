//! Decoded rtnetlink messages, limited to the fields that vipgate uses.
//!
//! One [`NetworkEvent`] is one object that was added, replaced or removed. Dumps and notifications yield the same
//! events.

pub(crate) mod decode;

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{DecodeError, NLM_F_REPLACE};

use crate::message::Message;

/// linux/neighbour.h: the kernel keeps the entry resolved.
pub const NTF_EXT_MANAGED: u32 = 1;

/// A change of one kernel object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkEvent {
    /// A network device.
    Link(Change, Link),
    /// An address of a device.
    Address(Change, Address),
    Route(Change, Route),
    /// A nexthop object (`ip nexthop`).
    NextHop(Change, NextHopObject),
    Neighbor(Change, Neighbor),
}

impl NetworkEvent {
    /// Decodes a message; `None`: of a type that isn't used.
    ///
    /// # Errors
    /// The message is malformed.
    pub fn decode(message: &Message<'_>) -> Result<Option<Self>, DecodeError> {
        let new = if message.flags & NLM_F_REPLACE == 0 { Change::New } else { Change::Replaced };
        let body = message.body;
        Ok(match message.kind {
            libc::RTM_NEWLINK => decode::link(body)?.map(|link| Self::Link(new, link)),
            libc::RTM_DELLINK => decode::link(body)?.map(|link| Self::Link(Change::Removed, link)),
            libc::RTM_NEWADDR => decode::address(body)?.map(|address| Self::Address(new, address)),
            libc::RTM_DELADDR => decode::address(body)?.map(|address| Self::Address(Change::Removed, address)),
            libc::RTM_NEWROUTE => decode::route(body)?.map(|route| Self::Route(new, route)),
            libc::RTM_DELROUTE => decode::route(body)?.map(|route| Self::Route(Change::Removed, route)),
            libc::RTM_NEWNEIGH => decode::neighbor(body)?.map(|neighbor| Self::Neighbor(new, neighbor)),
            libc::RTM_DELNEIGH => decode::neighbor(body)?.map(|neighbor| Self::Neighbor(Change::Removed, neighbor)),
            decode::RTM_NEWNEXTHOP => Some(Self::NextHop(new, decode::next_hop(body)?)),
            decode::RTM_DELNEXTHOP => Some(Self::NextHop(Change::Removed, decode::next_hop(body)?)),
            _ => None,
        })
    }
}

/// The kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Added, or changed in place.
    New,
    /// Replaces another object (`NLM_F_REPLACE`).
    Replaced,
    Removed,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its interface index.
    pub ifindex: u32,
    pub name: String,
    /// Its ARPHRD type.
    pub hardware_type: u16,
    /// Its `IFF_*` flags.
    pub flags: u32,
    /// Its MAC address; `None` if its address isn't six bytes long.
    pub mac: Option<[u8; 6]>,
    /// Its MTU, bytes.
    pub mtu: u32,
    /// The index of its bridge, bond or VRF.
    pub master: Option<u32>,
    /// Whether it is a device of the kernel's own: veth, tun, bridge and the like.
    pub is_virtual: bool,
    /// The UDP port of a VXLAN device whose tunnels are in the metadata of packets, from routes or eBPF programs.
    pub metadata_vxlan_port: Option<u16>,
}

impl Link {
    /// Whether it is administratively up and has a carrier.
    pub fn is_up(&self) -> bool {
        let required = (libc::IFF_UP | libc::IFF_LOWER_UP).cast_unsigned();
        self.flags & required == required
    }

    /// Its state: the first condition that prevents forwarding, or up.
    pub fn state(&self) -> LinkState {
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
pub struct Address {
    /// The device.
    pub ifindex: u32,
    /// Whether it is an IPv6 address.
    pub v6: bool,
    /// Whether it is a secondary address of its subnet.
    pub secondary: bool,
    /// `RT_SCOPE_*`; 0 is universe.
    pub scope: u8,
    /// The address.
    pub ip: IpAddr,
    /// Whether it may be a source address: duplicate address detection is done and found none.
    pub usable: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub table: u32,
    /// Its destination.
    pub prefix: IpNet,
    /// Its metric; the lowest is preferred.
    pub metric: u32,
    /// Its type (`RTN_*`).
    pub kind: u8,
    /// Its originator (`RTPROT_*`).
    pub protocol: u8,
    /// The next hops listed in the route itself.
    pub next_hops: Vec<NextHop>,
    /// The id of its nexthop object.
    pub nexthop_id: Option<u32>,
}

/// One next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The output device; 0: none.
    pub ifindex: u32,
    /// The gateway's address; `None`: on-link.
    pub gateway: Option<IpAddr>,
    /// Unusable at present (`RTNH_F_DEAD`).
    pub dead: bool,
    /// Lightweight tunnel encapsulation is set (`RTA_ENCAP`).
    pub encapsulated: bool,
}

impl NextHop {
    /// Whether both are the same next hop, regardless of state.
    pub fn same_next_hop(&self, other: &Self) -> bool {
        (self.ifindex, self.gateway, self.encapsulated) == (other.ifindex, other.gateway, other.encapsulated)
    }
}

/// A nexthop object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextHopObject {
    pub id: u32,
    pub target: NextHopObjectTarget,
}

/// The target of a nexthop object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextHopObjectTarget {
    /// Packets are dropped.
    Blackhole,
    /// One next hop.
    Single(NextHop),
    /// A group of nexthop objects, by id.
    Group(Vec<u32>),
}

/// A neighbor (ARP or ND entry).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbor {
    /// The index of its interface.
    pub ifindex: u32,
    pub address: IpAddr,
    /// Its state (`NUD_*`).
    pub state: u16,
    /// `NTF_*`.
    pub flags: u8,
    /// `NTF_EXT_*`.
    pub ext_flags: u32,
    /// Its originator (`RTPROT_*`); 0: unknown.
    pub protocol: u8,
    /// Its MAC address; `None` if its link-layer address isn't six bytes long.
    pub mac: Option<[u8; 6]>,
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
    pub fn usable_mac(&self) -> Option<[u8; 6]> {
        let is_unicast = |mac: &[u8; 6]| mac[0] & 1 == 0 && mac != &[0; 6];
        let valid = self.state & Self::VALID != 0 && self.flags & libc::NTF_PROXY == 0;
        self.mac.filter(|mac| valid && !self.address.is_multicast() && is_unicast(mac))
    }

    /// Whether the resolution failed.
    pub fn has_failed(&self) -> bool {
        self.state & libc::NUD_FAILED != 0
    }

    /// Whether the kernel keeps it resolved (`NTF_EXT_MANAGED`).
    pub fn is_managed(&self) -> bool {
        self.ext_flags & NTF_EXT_MANAGED != 0
    }
}
