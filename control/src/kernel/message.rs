//! The kernel's messages as values: only the fields that vipgate has a use for.
//!
//! One [`Event`] is one object that the kernel has, or has no more. Dumps and notifications give the same events.

use std::net::IpAddr;

use ipnet::IpNet;

/// The originator (`RTPROT_*`) of what vipgate gives the kernel, routes and neighbours, as `ip` shows it: a number that no
/// routing daemon has.
pub(super) const OURS: u8 = 118;
/// linux/neighbour.h: the kernel keeps the entry resolved by itself.
pub(super) const NTF_EXT_MANAGED: u32 = 1;

/// One object of the kernel, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A network device.
    Link(Change, Link),
    /// An address of a device.
    Address(Change, Address),
    /// A route.
    Route(Change, Route),
    /// A next-hop object (`ip nexthop`).
    NextHop(Change, NextHop),
    /// A neighbour.
    Neighbour(Change, Neighbour),
}

/// What became of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It is there now.
    New,
    /// It is there now, in place of another one (`NLM_F_REPLACE`).
    Replaced,
    /// It is gone.
    Gone,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// The kernel's index of it.
    pub(super) ifindex: u32,
    /// Its name.
    pub(super) name: String,
    /// Its ARPHRD number.
    pub(super) hardware: u16,
    /// Its IFF flags.
    pub(super) flags: u32,
    /// Its link address, where that has six bytes.
    pub(super) mac: Option<[u8; 6]>,
    /// The longest IP packet that it sends, bytes.
    pub(super) mtu: u32,
    /// The index of the bridge, bond or VRF that it belongs to.
    pub(super) master: Option<u32>,
}

impl Link {
    /// Whether it is up and has a carrier.
    pub(super) fn is_up(&self) -> bool {
        let wanted = (libc::IFF_UP | libc::IFF_LOWER_UP).cast_unsigned();
        self.flags & wanted == wanted
    }

    /// The first thing that keeps packets from it, if anything does.
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

/// Whether packets can be sent and received by an interface, as far as the kernel knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkState {
    /// They can.
    #[default]
    Up,
    /// Somebody has set it down.
    Down,
    /// Nothing is at the other end of the cable.
    NoCarrier,
    /// Its operational state isn't `up` (RFC 2863): it waits for an authentication, or for what is below it.
    NotOperational,
    /// There is no such device.
    Gone,
}

impl LinkState {
    /// As it ends a sentence about an interface.
    pub fn phrase(self) -> &'static str {
        match self {
            Self::Up => "is up",
            Self::Down => "is set down",
            Self::NoCarrier => "has no carrier",
            Self::NotOperational => "is not operational",
            Self::Gone => "is gone",
        }
    }
}

/// An address of a device. The order is the order in which a source address would be picked: IPv4 first, then what is
/// no secondary address, then the widest scope.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    /// The device.
    pub(super) ifindex: u32,
    /// Whether it is an IPv6 address.
    pub(super) v6: bool,
    /// Whether another address of the same subnet stands before it.
    pub(super) secondary: bool,
    /// `RT_SCOPE_*`: 0 is the universe.
    pub(super) scope: u8,
    /// The address.
    pub(super) ip: IpAddr,
    /// Whether packets may have it as their source: no duplicate was found, and none is being looked for.
    pub(super) usable: bool,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// Its table.
    pub(super) table: u32,
    /// What it is for.
    pub(super) prefix: IpNet,
    /// The lowest one wins.
    pub(super) metric: u32,
    /// `RTN_*`.
    pub(super) kind: u8,
    /// Who made it (`RTPROT_*`).
    pub(super) protocol: u8,
    /// Its next hops, as the route itself names them.
    pub(super) hops: Vec<Hop>,
    /// The next-hop object that it leads to.
    pub(super) object: Option<u32>,
}

/// One next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    /// The device; 0: none.
    pub(super) ifindex: u32,
    /// The router's address; `None`: the destination is on the link.
    pub(super) gateway: Option<IpAddr>,
    /// The kernel won't use it now (`RTNH_F_DEAD`).
    pub(super) dead: bool,
    /// Packets would be encapsulated.
    pub(super) encapsulated: bool,
}

impl Hop {
    /// Whether both lead to the same place, whatever their state.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.ifindex, self.gateway, self.encapsulated) == (other.ifindex, other.gateway, other.encapsulated)
    }
}

/// A next-hop object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NextHop {
    /// Its number.
    pub(super) id: u32,
    /// Where it leads.
    pub(super) target: NextHopTarget,
}

/// Where a next-hop object leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextHopTarget {
    /// Packets are dropped.
    Blackhole,
    /// To one place.
    Hop(Hop),
    /// To the objects with these numbers.
    Group(Vec<u32>),
}

/// A neighbour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Neighbour {
    /// The device that it is behind.
    pub(super) ifindex: u32,
    /// Its address.
    pub(super) address: IpAddr,
    /// `NUD_*`.
    pub(super) state: u16,
    /// `NTF_*`.
    pub(super) flags: u8,
    /// `NTF_EXT_*`.
    pub(super) ext_flags: u32,
    /// Who made the entry (`RTPROT_*`); 0: unknown.
    pub(super) protocol: u8,
    /// Its link address, where that has six bytes.
    pub(super) mac: Option<[u8; 6]>,
}

impl Neighbour {
    /// States in which the kernel itself would send to the link address.
    const VALID: u16 = libc::NUD_REACHABLE
        | libc::NUD_STALE
        | libc::NUD_DELAY
        | libc::NUD_PROBE
        | libc::NUD_PERMANENT
        | libc::NUD_NOARP;

    /// Its link address, if packets can be sent there: multicast mappings, which the kernel keeps among its
    /// neighbours, are none, and neither are addresses that it only answers for (proxies).
    pub(super) fn usable_mac(&self) -> Option<[u8; 6]> {
        let is_station = |mac: &[u8; 6]| mac[0] & 1 == 0 && mac != &[0; 6];
        let valid = self.state & Self::VALID != 0 && self.flags & libc::NTF_PROXY == 0;
        self.mac.filter(|mac| valid && !self.address.is_multicast() && is_station(mac))
    }

    /// Whether the kernel has asked and nobody has answered.
    pub(super) fn has_failed(&self) -> bool {
        self.state & libc::NUD_FAILED != 0
    }

    /// Whether the kernel keeps it resolved by itself.
    pub(super) fn is_managed(&self) -> bool {
        self.ext_flags & NTF_EXT_MANAGED != 0
    }
}
