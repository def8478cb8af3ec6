//! VXLAN encapsulation (RFC 7348): untranslated packets to the gateway that owns them, and translated packets to pods
//! of the overlay network, in the tunnel of their node. A packet longer than the tunnel's MTU is fragmented if it may
//! be; otherwise the sender receives the MTU in an ICMP error.

use vipgate_mem::Frame;

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{GatewayId, InterfaceId, TunnelRemote};
use crate::flow::verdict::{AfterResolution, Verdict};
use crate::io::batch::{Batch, NeighborKey, TunnelDestination};
use crate::policy::Snapshot;
use crate::policy::network::{Network, NextHop};
use crate::policy::tunnels::Tunnel;
use crate::stage::context::PacketFamily;
use crate::wire::ethernet::MacPair;
use crate::wire::tunnel_auth::TagKey;
use crate::wire::vxlan::{MAX_HEADERS, OuterHeaders};
use crate::wire::{ethernet, fragmentation};

/// Encapsulates the packets of the batch that go into tunnels.
pub fn run(batch: &mut Batch, snapshot: &Snapshot) {
    for i in batch.undecided.and(batch.tunneled) {
        let to = batch.tunnel_destinations[i].remote;
        let is_to_gateway = matches!(to, TunnelRemote::Gateway(_));
        let Some(tunnel) = snapshot.tunnels.to(to) else {
            batch.decide(i, Verdict::Drop(if is_to_gateway { DropReason::NoOwner } else { DropReason::NoRoute }));
            continue;
        };
        let Some((hop, out, mtu)) = tunnel.route(&snapshot.network) else {
            batch.decide(i, Verdict::Drop(DropReason::NoRoute));
            continue;
        };
        let head = batch.headers[i];
        if is_to_gateway {
            batch.directions[i] = Direction::PeerOut;
        }
        if head.ip_length > mtu {
            batch.mtus[i] = mtu;
            if fragmentation::may_fragment(batch.frames[i].frame.bytes(), mtu) {
                let frame = batch.frames[i].frame.bytes_mut();
                tunnel.inner_macs().into_iter().for_each(|link| ethernet::set_macs(frame, link));
                if macs_of(hop, &snapshot.network).is_some() {
                    batch.decide(i, Verdict::FragmentIntoTunnel);
                } else {
                    batch.neighbors[i] = unresolved(tunnel, hop, out, &snapshot.network);
                    batch.decide(i, Verdict::AwaitNeighbor(AfterResolution::FragmentIntoTunnel));
                }
            } else if is_to_gateway {
                batch.reject(i, DropReason::TooBig);
            } else {
                // `route` has checked the MTU before the rewrite; a rewritten packet can't be quoted.
                batch.decide(i, Verdict::Drop(DropReason::TooBig));
            }
            continue;
        }
        let verdict = if encap(batch, i, tunnel) {
            forward(batch, i, tunnel, hop, out, &snapshot.network)
        } else {
            Verdict::Drop(DropReason::TooBig)
        };
        batch.decide(i, verdict);
    }
}

/// Encapsulates a packet for a gateway, MAC addresses included; `None`, with nothing done, if it doesn't fit the
/// tunnel's MTU or the frame, or the next hop's MAC address is unknown.
#[inline]
pub fn encap_unfragmented(frame: &mut Frame, tunnel: &Tunnel, vni: u32, entropy: u16) -> Option<InterfaceId> {
    let exit = tunnel.exit.as_ref()?;
    let inner = frame.len();
    if inner > exit.max_frame {
        return None;
    }
    let length = exit.outer.length() as u16;
    let start = frame.start().checked_sub(length)?;
    let traffic_class = traffic_class(frame.bytes());
    // The end of the frame stays in place.
    if !frame.set_packet(start, inner + length) {
        return None;
    }
    let bytes = frame.bytes_mut();
    exit.outer.write(bytes, inner, vni, entropy, traffic_class);
    if let Some(key) = tunnel.tag_key()
        && let Some(inner) = bytes.get_mut(usize::from(length)..)
    {
        key.write_tag(inner, vni);
    }
    Some(exit.interface)
}

/// The outer source port of a flow, from its hash.
#[inline]
pub fn entropy(hash: u64) -> u16 {
    (hash >> 32) as u16 >> 2
}

/// Encapsulates a reply of this gateway, also to a next hop whose MAC address isn't known yet; `None` if it doesn't fit
/// or has no route.
#[cold]
pub fn encap_reply(batch: &mut Batch, i: usize, tunnel: &Tunnel, network: &Network) -> Option<Verdict> {
    let (hop, out, mtu) = tunnel.route(network)?;
    if batch.frames[i].frame.len() > mtu.saturating_add(ETHERNET_HEADER) {
        return None;
    }
    if !encap(batch, i, tunnel) {
        return None;
    }
    Some(send_reply(batch, i, tunnel, hop, out, network))
}

/// The verdict of a reply of this gateway that is encapsulated, toward the tunnel's next hop.
pub fn send_reply(
    batch: &mut Batch,
    i: usize,
    tunnel: &Tunnel,
    hop: NextHop,
    out: InterfaceId,
    network: &Network,
) -> Verdict {
    match forward(batch, i, tunnel, hop, out, network) {
        Verdict::AwaitNeighbor(_) => Verdict::AwaitNeighbor(AfterResolution::Reply),
        _ => Verdict::Reply(out),
    }
}

/// Length of the Ethernet header, bytes.
const ETHERNET_HEADER: u16 = ethernet::HEADER as u16;

/// Prepends the tunnel headers; false if the frame's headroom is too small.
#[inline]
fn encap(batch: &mut Batch, i: usize, tunnel: &Tunnel) -> bool {
    let vni = tunnel.vni(batch.tunnel_destinations[i].metadata(batch.headers[i].sides));
    let entropy = entropy(batch.hashes[i]);
    let frame = &mut batch.frames[i].frame;
    let (length, inner) = (tunnel.outer.length() as u16, frame.len());
    let traffic_class = traffic_class(frame.bytes());
    let Some(start) = frame.start().checked_sub(length) else { return false };
    if let Some(link) = tunnel.inner_macs() {
        ethernet::set_macs(frame.bytes_mut(), link);
    }
    // The end of the frame stays in place.
    if !frame.set_packet(start, inner + length) {
        return false;
    }
    let bytes = frame.bytes_mut();
    tunnel.outer.write(bytes, inner, vni, entropy, traffic_class);
    if let Some(key) = tunnel.tag_key()
        && let Some(inner) = bytes.get_mut(usize::from(length)..)
    {
        key.write_tag(inner, vni);
    }
    true
}

/// The traffic class of a packet: DSCP and ECN.
#[inline]
fn traffic_class(frame: &[u8]) -> u8 {
    match frame.get(ethernet::HEADER..).and_then(|packet| packet.first_chunk()) {
        Some([first, second]) if first >> 4 == 4 => *second,
        Some([first, second]) => first << 4 | second >> 4,
        None => 0,
    }
}

/// The MAC addresses toward this next hop, if they are known.
fn macs_of(hop: NextHop, network: &Network) -> Option<MacPair> {
    match hop {
        NextHop::Neighbor(id) => network.neighbor(id).macs,
        NextHop::OnLink(_) | NextHop::Hairpin | NextHop::Node(_) => None,
    }
}

/// The neighbor whose MAC address is missing.
fn unresolved(tunnel: &Tunnel, hop: NextHop, out: InterfaceId, network: &Network) -> NeighborKey {
    let address = if let NextHop::Neighbor(id) = hop { network.neighbor(id).address } else { tunnel.address };
    NeighborKey { interface: out, address }
}

fn forward(batch: &mut Batch, i: usize, tunnel: &Tunnel, hop: NextHop, out: InterfaceId, network: &Network) -> Verdict {
    let Some(link) = macs_of(hop, network) else {
        batch.neighbors[i] = unresolved(tunnel, hop, out, network);
        return Verdict::AwaitNeighbor(AfterResolution::Forward);
    };
    ethernet::set_macs(batch.frames[i].frame.bytes_mut(), &link);
    Verdict::Forward(out)
}

/// Tunnel headers for the fragments of one packet.
#[derive(Clone, Copy, Debug)]
pub struct FragmentEncap {
    outer: OuterHeaders,
    vni: u32,
    key: Option<TagKey>,
}

/// The tunnel headers and the inner Ethernet header of a fragment, and their length.
pub type FragmentHeaders = ([u8; MAX_HEADERS + ethernet::HEADER], usize);

impl FragmentEncap {
    /// The tunnel headers of a packet, its egress interface, and the outer MAC addresses if they are known.
    pub fn of(
        snapshot: &Snapshot,
        travel: TunnelDestination,
        sides: u8,
    ) -> Option<(Self, InterfaceId, Option<MacPair>)> {
        let tunnel = snapshot.tunnels.to(travel.remote)?;
        let (hop, out, _) = tunnel.route(&snapshot.network)?;
        let vni = tunnel.vni(travel.metadata(sides));
        Some((Self { outer: tunnel.outer, vni, key: tunnel.tag_key().copied() }, out, macs_of(hop, &snapshot.network)))
    }

    /// The tunnel headers of a fragment, followed by its own Ethernet header. The fragment is given as `headers` (from
    /// the Ethernet header on) and `payload`; `None` if `headers` is too short.
    pub fn headers(&self, headers: &[u8], payload: &[u8], outer_macs: &MacPair) -> Option<FragmentHeaders> {
        let mut tunnel_headers = [0; MAX_HEADERS + ethernet::HEADER];
        let inner = (headers.len() + payload.len()) as u16;
        self.outer.write(&mut tunnel_headers, inner, self.vni, 0, traffic_class(headers));
        ethernet::set_macs(&mut tunnel_headers, outer_macs);
        let (header, packet) = headers.split_first_chunk::<{ ethernet::HEADER }>()?;
        let inner_header = tunnel_headers.get_mut(self.outer.length()..)?.first_chunk_mut()?;
        *inner_header = *header;
        if let Some(key) = &self.key {
            key.write_tag_parts(inner_header, [packet, payload], self.vni);
        }
        Some((tunnel_headers, self.outer.length() + ethernet::HEADER))
    }
}

/// Marks a packet for the tunnel to the gateway that owns it. ECMP needs its hash, which kinds without sessions don't
/// have yet.
pub fn forward_to_owner<A: PacketFamily>(batch: &mut Batch, i: usize, to: GatewayId) {
    if !batch.headers[i].kind.has_session() {
        batch.hashes[i] = super::classify::ECMP_HASH.hash(&A::tuples(batch)[i]);
    }
    batch.forward_to_gateway(i, to);
}
