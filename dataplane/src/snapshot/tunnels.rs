//! The ways between gateways: what comes before a packet to each of them, and whose packets come out of a tunnel.

use std::net::{IpAddr, SocketAddr};

use foldhash::HashMap;

use super::members::{GatewayId, Members};
use super::network::{Network, NextHop};
use crate::address::V6;
use crate::wire::ethernet;
use crate::wire::vxlan::Outer;

/// What a packet between gateways says of itself, in the VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The sides that it came in on: see [`super::spec::Role::sides`] and [`super::spec::AROUND`].
    pub sides: u8,
    /// Whether it is sent to its owner, beyond whom it never goes.
    pub is_last: bool,
}

/// The upper bits of the VNIs between gateways.
const NETWORK: u32 = 0x7670;
const SIDES: u32 = 7;
const LAST: u32 = 8;

impl Mark {
    /// As a VNI.
    #[inline]
    pub fn vni(self) -> u32 {
        NETWORK << 8 | u32::from(self.sides) & SIDES | if self.is_last { LAST } else { 0 }
    }

    /// What a VNI says; `None` if it isn't one of gateways.
    #[inline]
    pub fn of_vni(vni: u32) -> Option<Self> {
        let known = vni >> 8 == NETWORK && vni & 0xff & !(SIDES | LAST) == 0;
        known.then_some(Self { sides: (vni & SIDES) as u8, is_last: vni & LAST != 0 })
    }
}

/// Tunnels of one gateway to all others.
#[derive(Debug, Default)]
pub struct Tunnels {
    /// Where this gateway takes packets from others.
    own: Option<Door>,
    /// By number.
    ways: Vec<Option<Way>>,
    by_address: HashMap<IpAddr, GatewayId>,
}

/// Address and port at which tunnel packets come in, as they stand in a frame.
#[derive(Clone, Copy, Debug)]
struct Door {
    address: [u8; 16],
    /// Where the address stands in a frame, how long it is, and where the port does.
    at: usize,
    length: usize,
    port_at: usize,
    port: [u8; 2],
    kind: [u8; 2],
}

/// The way to one gateway.
#[derive(Debug)]
pub struct Way {
    /// What comes before a packet, but for link addresses.
    pub outer: Outer,
    /// Where it goes next; `None`: no route leads there.
    pub hop: Option<NextHop>,
    /// The gateway's address.
    pub address: IpAddr,
}

impl Tunnels {
    pub(super) fn new(members: &Members, network: &Network) -> Self {
        let own = members.this().and_then(|this| members.tunnel(this));
        let way = |id: GatewayId| {
            let (own, other) = (own?, members.tunnel(id).filter(|_| Some(id) != members.this())?);
            let hop = match other.ip() {
                IpAddr::V4(v4) => network.next_hop(v4.to_bits(), 0),
                IpAddr::V6(v6) => network.next_hop(V6::from_bits(v6.to_bits()), 0),
            };
            Some(Way { outer: Outer::new(own.ip(), other)?, hop: hop.ok(), address: other.ip() })
        };
        let ways: Vec<Option<Way>> = members.ids().map(way).collect();
        let by_address = members.ids().zip(&ways).filter_map(|(id, way)| Some((way.as_ref()?.address, id))).collect();
        Self { own: own.map(Door::new), ways, by_address }
    }

    /// The way to a gateway, if there is one.
    #[inline]
    pub fn to(&self, id: GatewayId) -> Option<&Way> {
        self.ways.get(usize::from(id.0))?.as_ref()
    }

    /// Whether tunnel packets may come in at all.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.own.is_some()
    }

    /// Whether a frame is addressed to where tunnel packets come in.
    #[inline]
    pub fn is_arrival(&self, frame: &[u8]) -> bool {
        self.own.is_some_and(|own| own.is_for(frame))
    }

    /// The gateway that sends from this address.
    pub fn sender(&self, address: IpAddr) -> Option<GatewayId> {
        self.by_address.get(&address).copied()
    }
}

impl Door {
    fn new(own: SocketAddr) -> Self {
        let mut address = [0; 16];
        let (at, length, kind) = match own.ip() {
            IpAddr::V4(v4) => {
                address[..4].copy_from_slice(&v4.octets());
                (ethernet::HEADER + 16, 4, ethernet::IPV4)
            }
            IpAddr::V6(v6) => {
                address = v6.octets();
                (ethernet::HEADER + 24, 16, ethernet::IPV6)
            }
        };
        Self { address, at, length, port_at: at + length + 2, port: own.port().to_be_bytes(), kind: kind.to_be_bytes() }
    }

    #[inline]
    fn is_for(&self, frame: &[u8]) -> bool {
        // Only whoever has no IP options stands where it is looked for; others are no tunnel packets.
        frame.get(self.at..self.at + self.length) == Some(&self.address[..self.length])
            && frame.get(self.port_at..self.port_at + 2) == Some(&self.port[..])
            && frame.get(ethernet::TYPE..ethernet::HEADER) == Some(&self.kind[..])
    }
}
