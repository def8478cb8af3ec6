//! VXLAN tunnels to other gateways and to overlay nodes: outer headers, routes and authentication of each, and the
//! local tunnel addresses.

use std::net::{IpAddr, SocketAddr};

use super::members::Authentication;
use super::network::{Network, NextHop};
use super::reverse_path::InterfaceSet;
use super::spec::NodeSpec;
use crate::flow::address::of_family;
use crate::flow::ids::{GatewayId, InterfaceId, TunnelRemote};
use crate::flow::tunnel_metadata::TunnelMetadata;
use crate::policy::compiled::Policy;
use crate::policy::tunnel_sources::{TunnelSource, TunnelSources};
use crate::wire::ethernet::{self, Mac, MacPair};
use crate::wire::tunnel_auth::TagKey;
use crate::wire::vxlan::OuterHeaders;

/// The tunnels of a gateway.
#[derive(Debug, Default)]
pub struct Tunnels {
    /// The local tunnel address for gateways, and the one for nodes.
    gateway_listener: Option<TunnelListener>,
    overlay_listener: Option<TunnelListener>,
    /// By gateway number, and by node number.
    gateways: Vec<Option<Tunnel>>,
    nodes: Vec<Option<Tunnel>>,
    sources: TunnelSources,
}

/// A local tunnel address and port as they appear in a frame: every received packet is compared with them.
#[derive(Clone, Copy, Debug)]
struct TunnelListener {
    ethertype: [u8; 2],
    /// The bytes of an IPv6 address before its last four.
    address_prefix: Option<[u8; 12]>,
    /// As one number: the last four bytes of the address, two for the source port (ignored), and the destination port.
    tail: u64,
    /// Offset of `tail` in a frame.
    tail_offset: usize,
}

/// Masks the source port out of [`TunnelListener::tail`].
const TAIL_MASK: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0, 0, 0xff, 0xff]);

/// A tunnel to a gateway or an overlay node.
#[derive(Debug)]
pub struct Tunnel {
    /// The outer headers, without MAC addresses.
    pub outer: OuterHeaders,
    /// Its next hop; `None`: no route.
    pub next_hop: Option<NextHop>,
    /// The remote address.
    pub address: IpAddr,
    /// Interfaces on which its packets are accepted: see [`super::reverse_path`].
    interfaces: InterfaceSet,
    /// Authentication of its packets.
    authentication: Authentication,
    /// How inner frames are encapsulated.
    encapsulation: Encapsulation,
    /// Its way out, if the next hop has a known MAC address.
    pub exit: Option<TunnelExit>,
}

/// The way of tunnel packets out of this gateway.
#[derive(Clone, Copy, Debug)]
pub struct TunnelExit {
    /// The outer headers with MAC addresses.
    pub outer: OuterHeaders,
    /// Length of the longest inner frame that fits, bytes.
    pub max_frame: u16,
    /// Egress interface.
    pub interface: InterfaceId,
}

impl TunnelExit {
    fn new(outer: OuterHeaders, next_hop: Option<NextHop>, network: &Network) -> Option<Self> {
        let NextHop::Neighbor(hop) = next_hop? else { return None };
        let exit = network.adjacencies().get(usize::from(hop.0))?;
        // The tunnel headers include an Ethernet header, so the frame length grows exactly by the overhead. An exit
        // without a MAC address has an MTU of 0.
        let max_frame = exit.mtu.saturating_add(ethernet::HEADER as u16).checked_sub(outer.overhead())?;
        Some(Self { outer: outer.with_macs(&exit.macs), max_frame, interface: exit.interface })
    }
}

/// Encapsulation of inner frames.
#[derive(Clone, Copy, Debug)]
enum Encapsulation {
    /// Between gateways: the frame is unchanged, and the VNI carries [`TunnelMetadata`].
    Unchanged,
    /// Overlay network: its VNI, and the inner MAC addresses.
    Overlay(u32, MacPair),
}

impl Tunnel {
    fn new(
        own: SocketAddr,
        other: SocketAddr,
        encapsulation: Encapsulation,
        authentication: Authentication,
        network: &Network,
    ) -> Option<Self> {
        let hop = of_family!(other.ip(), it => network.next_hop(it, 0));
        let interfaces = InterfaceSet::toward(other.ip(), network);
        let outer = OuterHeaders::new(own.ip(), other)?;
        let exit = TunnelExit::new(outer, hop.ok(), network);
        Some(Self { outer, next_hop: hop.ok(), address: other.ip(), interfaces, authentication, encapsulation, exit })
    }

    /// Whether its packets are accepted on an interface (reverse path filter).
    #[inline]
    pub fn passes_reverse_path(&self, interface: InterfaceId) -> bool {
        self.interfaces.contains(interface)
    }

    /// The key of transmitted packets; `None`: they have no tag.
    #[inline]
    pub fn tag_key(&self) -> Option<&TagKey> {
        match &self.authentication {
            Authentication::Tagged { transmit_key: sent, .. } => Some(sent),
            Authentication::None | Authentication::Rejected => None,
        }
    }

    /// The VNI of a packet with this metadata.
    #[inline]
    pub fn vni(&self, mark: TunnelMetadata) -> u32 {
        match self.encapsulation {
            Encapsulation::Unchanged => mark.vni(),
            Encapsulation::Overlay(vni, _) => vni,
        }
    }

    /// Inner MAC addresses; `None`: unchanged.
    #[inline]
    pub fn inner_macs(&self) -> Option<&MacPair> {
        match &self.encapsulation {
            Encapsulation::Unchanged => None,
            Encapsulation::Overlay(_, link) => Some(link),
        }
    }

    /// This gateway's MAC address in the overlay network; `None`: the tunnel isn't one to a node.
    pub fn own_mac(&self) -> Option<Mac> {
        self.inner_macs().and_then(|macs| ethernet::source(macs))
    }

    /// Next hop, interface, and MTU inside the tunnel, bytes; `None`: no route.
    #[inline]
    pub fn route(&self, network: &Network) -> Option<(NextHop, InterfaceId, u16)> {
        let hop = self.next_hop?;
        let out = network.interface_of(hop)?;
        Some((hop, out, network.interface_entry(out).mtu.saturating_sub(self.outer.overhead())))
    }
}

impl Tunnels {
    pub(super) fn new(policy: &Policy, overlay: Option<SocketAddr>, network: &Network) -> Self {
        let members = &policy.members;
        let own = members.this().and_then(|this| members.tunnel(this));
        let gateway = |id: GatewayId| {
            let other = members.tunnel(id).filter(|_| Some(id) != members.this())?;
            Tunnel::new(own?, other, Encapsulation::Unchanged, members.authentication(id), network)
        };
        let node = |node: &NodeSpec| {
            let own = overlay?;
            let encapsulation = Encapsulation::Overlay(node.vni, ethernet::mac_pair(node.mac, overlay_mac(own.ip())));
            Tunnel::new(own, node.address, encapsulation, Authentication::None, network)
        };
        let gateways: Vec<Option<Tunnel>> = members.ids().map(gateway).collect();
        let source = |tunnel: &Tunnel| TunnelSource::new(tunnel.address, tunnel.interfaces, tunnel.authentication);
        let senders = TunnelSources::new(gateways.iter().flatten().map(source).collect());
        let nodes = if overlay.is_some() { policy.nodes.list().iter().map(node).collect() } else { Vec::new() };
        let (gateway_listener, overlay_listener) = (own.map(TunnelListener::new), overlay.map(TunnelListener::new));
        Self { gateway_listener, overlay_listener, gateways, nodes, sources: senders }
    }

    /// The tunnel to a remote, if there is one.
    #[inline]
    pub fn to(&self, end: TunnelRemote) -> Option<&Tunnel> {
        match end {
            TunnelRemote::Gateway(id) => self.gateways.get(usize::from(id.0))?.as_ref(),
            TunnelRemote::Node(id) => self.nodes.get(id.0 as usize)?.as_ref(),
        }
    }

    /// Whether tunnel packets of other gateways are accepted at all.
    #[inline]
    pub fn accepts_gateways(&self) -> bool {
        self.gateway_listener.is_some()
    }

    /// Whether tunnel packets of overlay nodes are accepted at all.
    #[inline]
    pub fn accepts_nodes(&self) -> bool {
        self.overlay_listener.is_some()
    }

    /// Whether a frame is addressed to the local tunnel address for gateways.
    #[inline]
    pub fn is_gateway_packet(&self, frame: &[u8]) -> bool {
        self.gateway_listener.as_ref().is_some_and(|listener| listener.matches(frame))
    }

    /// Whether a frame is addressed to the local tunnel address for overlay nodes.
    #[inline]
    pub fn is_overlay_packet(&self, frame: &[u8]) -> bool {
        self.overlay_listener.as_ref().is_some_and(|listener| listener.matches(frame))
    }

    /// The only gateway that sends from this address; `None` if there may be others, or none.
    #[inline]
    pub fn only_source(&self, address: u32) -> Option<&TunnelSource> {
        self.sources.only(address)
    }

    /// The gateways that send from this address.
    #[inline]
    pub fn sources(&self, address: IpAddr) -> impl Iterator<Item = &TunnelSource> {
        self.sources.at(address)
    }
}

/// MAC address of this gateway in the overlay network: locally administered and unique per gateway, since nodes that
/// learn MAC addresses must not confuse two gateways.
fn overlay_mac(own: IpAddr) -> Mac {
    let [.., a, b, c, d] = match own {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    [0x0a, 0x76, a, b, c, d]
}

impl TunnelListener {
    fn new(own: SocketAddr) -> Self {
        let (address_prefix, [a, b, c, d], tail_offset, ethertype) = match own.ip() {
            IpAddr::V4(v4) => (None, v4.octets(), ethernet::HEADER + 16, ethernet::IPV4),
            IpAddr::V6(v6) => {
                let [prefix @ .., a, b, c, d] = v6.octets();
                (Some(prefix), [a, b, c, d], ethernet::HEADER + 24 + prefix.len(), ethernet::IPV6)
            }
        };
        let [high, low] = own.port().to_be_bytes();
        let tail = u64::from_ne_bytes([a, b, c, d, 0, 0, high, low]);
        Self { ethertype: ethertype.to_be_bytes(), address_prefix, tail, tail_offset }
    }

    #[inline]
    fn matches(&self, frame: &[u8]) -> bool {
        // Only with a header without IP options are the fields at these offsets; others are no tunnel packets.
        let Some((headers, rest)) = frame.split_at_checked(self.tail_offset) else { return false };
        let tail = rest.first_chunk().map(|tail| u64::from_ne_bytes(*tail) & TAIL_MASK);
        tail == Some(self.tail)
            && headers.get(ethernet::ETHERTYPE..ethernet::HEADER) == Some(&self.ethertype[..])
            && self.address_prefix.is_none_or(|prefix| headers.ends_with(&prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tunnel_packet_is_recognized_by_address_port_and_ethertype_alone() {
        for (own, from) in [("10.2.0.1:4790", "10.2.0.2"), ("[fd00:2::1]:4790", "fd00:2::2")] {
            let own: SocketAddr = own.parse().unwrap();
            let (listener, outer) = (TunnelListener::new(own), OuterHeaders::new(from.parse().unwrap(), own).unwrap());
            let mut frame = vec![0; outer.length()];
            outer.write(&mut frame, 0, 0, 0x1234, 0xb9);
            assert!(listener.matches(&frame));
            // Up to the destination port; after it are length and checksum of UDP, and VXLAN.
            let end = frame.len() - 8 - 4;
            assert!((0..frame.len()).all(|length| listener.matches(&frame[..length]) == (length >= end)));
            let address = if own.is_ipv4() { 30..34 } else { 38..54 };
            for at in 0..frame.len() {
                let mut other = frame.clone();
                other[at] ^= 1;
                let matters = (12..14).contains(&at) || address.contains(&at) || (end - 2..end).contains(&at);
                assert_eq!(listener.matches(&other), !matters, "byte {at}");
            }
        }
    }
}
