//! The ways between gateways, and to nodes of the overlay network: what comes before a packet to each of them, and whose packets
//! come out of a tunnel.

use std::net::{IpAddr, SocketAddr};

use super::members::{Authentication, GatewayId};
use super::network::{Network, NextHop};
use super::overlay::NodeId;
use super::policy::Policy;
use super::reverse_path::Interfaces;
use super::senders::{Sender, Senders};
use super::spec::{AROUND, NodeSpec};
use crate::address::V6;
use crate::io::InterfaceId;
use crate::wire::ethernet::{self, Link, Mac};
use crate::wire::tunnel_tag::TagKey;
use crate::wire::vxlan::Outer;

/// What a packet between gateways says of itself, in the VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The sides that it came in on: see [`super::spec::Role::sides`] and [`super::spec::AROUND`].
    pub sides: u8,
    /// How often it has gone from gateway to gateway with this: see [`LAST_LEG`].
    pub leg: u8,
}

/// The upper bits of the VNIs between gateways.
const NETWORK: u32 = 0x7670;
const SIDES: u32 = 7;
const LEG: u32 = 3;

/// A packet goes from gateway to gateway so often at most. Once is enough as a rule; fragments go to the gateway that gathers their
/// datagram, and from there to the owner; and while a share changes hands, the former owner forwards what still arrives there, and the
/// new one, until it has the view by which it is, sends that back.
pub const LAST_LEG: u8 = 3;

impl Mark {
    /// As a VNI.
    #[inline]
    pub fn vni(self) -> u32 {
        NETWORK << 8 | u32::from(self.sides) & SIDES | u32::from(self.leg & 3) << LEG
    }

    /// What a VNI says; `None` if it isn't one of gateways.
    #[inline]
    pub fn of_vni(vni: u32) -> Option<Self> {
        let known = vni >> 8 == NETWORK && vni & 0xff & !(SIDES | 3 << LEG) == 0;
        let sides = (vni & SIDES) as u8;
        // From an interface or around, never both, and never from nowhere: nobody sends that.
        let is_possible = (1..=AROUND).contains(&sides);
        (known && is_possible).then_some(Self { sides, leg: ((vni >> LEG) as u8 & 3).max(1) })
    }
}

/// Where a tunnel leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// To another gateway.
    Gateway(GatewayId),
    /// To a node of the overlay network.
    Node(NodeId),
}

/// Tunnels of one gateway to all others, and to the nodes of the overlay network.
#[derive(Debug, Default)]
pub struct Tunnels {
    /// Where this gateway takes packets from others, and from nodes.
    own: Option<Door>,
    own_overlay: Option<Door>,
    /// By number.
    gateways: Vec<Option<Way>>,
    nodes: Vec<Option<Way>>,
    senders: Senders,
}

/// Address and port at which tunnel packets come in, as they stand in a frame: every packet is compared with them.
#[derive(Clone, Copy, Debug)]
struct Door {
    kind: [u8; 2],
    /// Of an IPv6 address, the bytes before its last four.
    before: Option<[u8; 12]>,
    /// The last four bytes of the address, two of the source port, which may be any, and the port; as one number.
    end: u64,
    /// Where these stand.
    end_at: usize,
}

/// All of [`Door::end`] but the source port.
const BESIDE_SOURCE_PORT: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0, 0, 0xff, 0xff]);

/// The way to one end.
#[derive(Debug)]
pub struct Way {
    /// What comes before a packet, but for link addresses.
    pub outer: Outer,
    /// Where it goes next; `None`: no route leads there.
    pub hop: Option<NextHop>,
    /// The end's address.
    pub address: IpAddr,
    /// Where its packets may come in: see [`super::reverse_path`].
    from: Interfaces,
    /// How packets between it and this gateway are authenticated.
    authentication: Authentication,
    /// What is in it.
    inside: Inside,
}

/// How frames look in a tunnel.
#[derive(Clone, Copy, Debug)]
enum Inside {
    /// As they came, and the VNI says what is known of them.
    AsTheyCame,
    /// Of the overlay network: its VNI, and the link addresses there.
    Overlay(u32, Link),
}

impl Way {
    fn new(
        own: SocketAddr,
        other: SocketAddr,
        inside: Inside,
        authentication: Authentication,
        network: &Network,
    ) -> Option<Self> {
        let hop = match other.ip() {
            IpAddr::V4(v4) => network.next_hop(v4.to_bits(), 0),
            IpAddr::V6(v6) => network.next_hop(V6::from_bits(v6.to_bits()), 0),
        };
        let from = Interfaces::toward(other.ip(), network);
        let outer = Outer::new(own.ip(), other)?;
        Some(Self { outer, hop: hop.ok(), address: other.ip(), from, authentication, inside })
    }

    /// Whether its packets may come in on an interface.
    #[inline]
    pub fn may_come_by(&self, interface: InterfaceId) -> bool {
        self.from.contains(interface)
    }

    /// The key of the tags of what goes there; `None`: it has none.
    #[inline]
    pub fn key(&self) -> Option<&TagKey> {
        match &self.authentication {
            Authentication::Tagged { sent, .. } => Some(sent),
            Authentication::None | Authentication::Refused => None,
        }
    }

    /// The VNI of a packet that came in on these sides.
    #[inline]
    pub fn vni(&self, mark: Mark) -> u32 {
        match self.inside {
            Inside::AsTheyCame => mark.vni(),
            Inside::Overlay(vni, _) => vni,
        }
    }

    /// The link addresses of a frame in it; `None`: those that it came with.
    #[inline]
    pub fn inner_link(&self) -> Option<&Link> {
        match &self.inside {
            Inside::AsTheyCame => None,
            Inside::Overlay(_, link) => Some(link),
        }
    }

    /// Where it goes next, by which interface, and the longest IP packet that it carries whole, bytes; `None`: it leads nowhere.
    #[inline]
    pub fn exit(&self, network: &Network) -> Option<(NextHop, InterfaceId, u16)> {
        let hop = self.hop?;
        let out = network.exit_of(hop)?;
        Some((hop, out, network.port(out).mtu.saturating_sub(self.outer.overhead())))
    }
}

impl Tunnels {
    pub(super) fn new(policy: &Policy, overlay: Option<SocketAddr>, network: &Network) -> Self {
        let members = &policy.members;
        let own = members.this().and_then(|this| members.tunnel(this));
        let gateway = |id: GatewayId| {
            let other = members.tunnel(id).filter(|_| Some(id) != members.this())?;
            Way::new(own?, other, Inside::AsTheyCame, members.authentication(id), network)
        };
        let node = |node: &NodeSpec| {
            let own = overlay?;
            let inside = Inside::Overlay(node.vni, ethernet::link(node.mac, mac_in_overlay(own.ip())));
            Way::new(own, node.address, inside, Authentication::None, network)
        };
        let gateways: Vec<Option<Way>> = members.ids().map(gateway).collect();
        let sender = |way: &Way| Sender::new(way.address, way.from, way.authentication);
        let senders = Senders::new(gateways.iter().flatten().map(sender).collect());
        let nodes = if overlay.is_some() { policy.nodes.list().iter().map(node).collect() } else { Vec::new() };
        Self { own: own.map(Door::new), own_overlay: overlay.map(Door::new), gateways, nodes, senders }
    }

    /// The way to an end, if there is one.
    #[inline]
    pub fn to(&self, end: End) -> Option<&Way> {
        match end {
            End::Gateway(id) => self.gateways.get(usize::from(id.0))?.as_ref(),
            End::Node(id) => self.nodes.get(id.0 as usize)?.as_ref(),
        }
    }

    /// Whether tunnel packets of other gateways may come in at all.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.own.is_some()
    }

    /// The same of nodes.
    #[inline]
    pub fn is_overlay_open(&self) -> bool {
        self.own_overlay.is_some()
    }

    /// Whether a frame is addressed to where tunnel packets of other gateways come in.
    #[inline]
    pub fn is_arrival(&self, frame: &[u8]) -> bool {
        self.own.as_ref().is_some_and(|own| own.is_for(frame))
    }

    /// The same of nodes.
    #[inline]
    pub fn is_overlay_arrival(&self, frame: &[u8]) -> bool {
        self.own_overlay.as_ref().is_some_and(|own| own.is_for(frame))
    }

    /// The gateways that send from this address.
    #[inline]
    pub fn senders(&self, address: IpAddr) -> impl Iterator<Item = &Sender> {
        self.senders.at(address)
    }
}

/// The link address of this gateway's end of the overlay network: its own one, in the range that anybody may use, so that nodes that
/// learn by whom a frame was sent don't take one gateway for another.
fn mac_in_overlay(own: IpAddr) -> Mac {
    let [.., a, b, c, d] = match own {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    [0x0a, 0x76, a, b, c, d]
}

impl Door {
    fn new(own: SocketAddr) -> Self {
        let (before, [a, b, c, d], end_at, kind) = match own.ip() {
            IpAddr::V4(v4) => (None, v4.octets(), ethernet::HEADER + 16, ethernet::IPV4),
            IpAddr::V6(v6) => {
                let [before @ .., a, b, c, d] = v6.octets();
                (Some(before), [a, b, c, d], ethernet::HEADER + 24 + before.len(), ethernet::IPV6)
            }
        };
        let [high, low] = own.port().to_be_bytes();
        Self { kind: kind.to_be_bytes(), before, end: u64::from_ne_bytes([a, b, c, d, 0, 0, high, low]), end_at }
    }

    #[inline]
    fn is_for(&self, frame: &[u8]) -> bool {
        // Only whoever has no IP options stands where it is looked for; others are no tunnel packets.
        let Some((headers, rest)) = frame.split_at_checked(self.end_at) else { return false };
        let end = rest.first_chunk().map(|end| u64::from_ne_bytes(*end) & BESIDE_SOURCE_PORT);
        end == Some(self.end)
            && headers.get(ethernet::TYPE..ethernet::HEADER) == Some(&self.kind[..])
            && self.before.is_none_or(|before| headers.ends_with(&before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_in_is_known_by_address_port_and_kind_alone() {
        for (own, from) in [("10.2.0.1:4790", "10.2.0.2"), ("[fd00:2::1]:4790", "fd00:2::2")] {
            let own: SocketAddr = own.parse().unwrap();
            let (door, outer) = (Door::new(own), Outer::new(from.parse().unwrap(), own).unwrap());
            let mut frame = vec![0; outer.length()];
            outer.write(&mut frame, 0, 0, 0x1234, 0xb9);
            assert!(door.is_for(&frame));
            // Up to the port; behind it are the length and the checksum of UDP, and VXLAN.
            let end = frame.len() - 8 - 4;
            assert!((0..frame.len()).all(|length| door.is_for(&frame[..length]) == (length >= end)));
            let address = if own.is_ipv4() { 30..34 } else { 38..54 };
            for at in 0..frame.len() {
                let mut other = frame.clone();
                other[at] ^= 1;
                let matters = (12..14).contains(&at) || address.contains(&at) || (end - 2..end).contains(&at);
                assert_eq!(door.is_for(&other), !matters, "byte {at}");
            }
        }
    }
}
