//! After the last rewrite: packets that another gateway is to have go into the tunnel to it, as they came, and those for pods of the
//! overlay network into the tunnel to their node. What is too long for the tunnel is cut, where it may be, or its sender hears how long it
//! may be.

use crate::batch::{Batch, Lane, Travel, Wanted};
use crate::counters::{Direction, DropReason};
use crate::io::InterfaceId;
use crate::snapshot::Snapshot;
use crate::snapshot::members::GatewayId;
use crate::snapshot::network::{Network, NextHop};
use crate::snapshot::tunnels::{End, Mark, Way};
use crate::verdict::{Then, Verdict};
use crate::wire::ethernet::Link;
use crate::wire::tunnel_tag::TagKey;
use crate::wire::vxlan::{LONGEST, Outer};
use crate::wire::{cut, ethernet};

/// Wraps the packets of the batch that go into tunnels.
pub fn run(batch: &mut Batch, view: &Snapshot) {
    for i in batch.open.and(batch.travelling) {
        let to = batch.travels[i].to;
        let is_to_gateway = matches!(to, End::Gateway(_));
        let Some(way) = view.tunnels.to(to) else {
            batch.decide(i, Verdict::Drop(if is_to_gateway { DropReason::NoOwner } else { DropReason::NoRoute }));
            continue;
        };
        let Some((hop, out, mtu)) = way.exit(&view.network) else {
            batch.decide(i, Verdict::Drop(DropReason::NoRoute));
            continue;
        };
        let head = batch.heads[i];
        if is_to_gateway {
            batch.directions[i] = Direction::PeerOut;
        }
        if head.length > mtu {
            batch.mtus[i] = mtu;
            if cut::may_cut(batch.frames[i].frame.bytes()) {
                let frame = batch.frames[i].frame.bytes_mut();
                way.inner_link().into_iter().for_each(|link| ethernet::set_link(frame, link));
                if link_of(hop, &view.network).is_some() {
                    batch.decide(i, Verdict::CutIntoTunnel);
                } else {
                    batch.wanted[i] = neighbour(way, hop, out, &view.network);
                    batch.decide(i, Verdict::Wait(Then::CutIntoTunnel));
                }
            } else if is_to_gateway {
                batch.refuse(i, DropReason::TooBig);
            } else {
                // It was asked before it was rewritten, and the sender has heard of it: it can't be quoted any more.
                batch.decide(i, Verdict::Drop(DropReason::TooBig));
            }
            continue;
        }
        let is_wrapped = wrap(batch, i, way);
        let sent = if is_wrapped { Some(send(batch, i, way, hop, out, &view.network)) } else { None };
        let verdict = sent.unwrap_or(Verdict::Drop(DropReason::TooBig));
        batch.decide(i, verdict);
    }
}

/// Wraps a packet that the tunnel carries as it is, to a next hop whose link address is known; `None`, and nothing done, for all others.
#[inline]
pub fn whole(batch: &mut Batch, i: usize, way: &Way, network: &Network) -> Option<Verdict> {
    let NextHop::Known(hop) = way.hop? else { return None };
    let exit = network.exits().get(usize::from(hop.0))?;
    // With the headers of the tunnel, a frame is as much longer than its packet is now as the packet was without.
    if batch.frames[i].frame.len().saturating_add(way.outer.overhead()) > exit.mtu.saturating_add(LINK) {
        return None;
    }
    wrap(batch, i, way).then(|| {
        ethernet::set_link(batch.frames[i].frame.bytes_mut(), &exit.link);
        Verdict::Forward(exit.interface)
    })
}

/// Puts an answer of our own into a tunnel, also to a next hop whose link address isn't known yet; `None` if it can't go there.
#[cold]
pub fn answer(batch: &mut Batch, i: usize, way: &Way, network: &Network) -> Option<Verdict> {
    let (hop, out, mtu) = way.exit(network)?;
    if batch.frames[i].frame.len() > mtu.saturating_add(LINK) {
        return None;
    }
    if !wrap(batch, i, way) {
        return None;
    }
    Some(match send(batch, i, way, hop, out, network) {
        Verdict::Wait(_) => Verdict::Wait(Then::Answer),
        _ => Verdict::Answer(out),
    })
}

/// Bytes of the link header.
const LINK: u16 = ethernet::HEADER as u16;

/// Puts the headers of the tunnel before a packet; false if there is no room for them.
#[inline]
fn wrap(batch: &mut Batch, i: usize, way: &Way) -> bool {
    let vni = way.vni(Mark { sides: batch.heads[i].sides, leg: batch.travels[i].leg });
    let entropy = (batch.hashes[i] >> 32) as u16 >> 2;
    let frame = &mut batch.frames[i].frame;
    let (length, inner) = (way.outer.length() as u16, frame.len());
    let traffic_class = traffic_class(frame.bytes());
    let Some(start) = frame.start().checked_sub(length) else { return false };
    if let Some(link) = way.inner_link() {
        ethernet::set_link(frame.bytes_mut(), link);
    }
    // Its end stays where it is.
    if !frame.place(start, inner + length) {
        return false;
    }
    let bytes = frame.bytes_mut();
    way.outer.write(bytes, inner, vni, entropy, traffic_class);
    if let Some(key) = way.key()
        && let Some(inner) = bytes.get_mut(usize::from(length)..)
    {
        key.seal(inner, vni);
    }
    true
}

/// The traffic class of a packet, ECN included.
#[inline]
fn traffic_class(frame: &[u8]) -> u8 {
    match frame.get(ethernet::HEADER..).and_then(|packet| packet.first_chunk()) {
        Some([first, second]) if first >> 4 == 4 => *second,
        Some([first, second]) => first << 4 | second >> 4,
        None => 0,
    }
}

/// The link addresses of what goes by this next hop, once they are known.
fn link_of(hop: NextHop, network: &Network) -> Option<Link> {
    match hop {
        NextHop::Known(id) => network.hop(id).link,
        NextHop::Unknown(_) | NextHop::Hairpin | NextHop::Node(_) => None,
    }
}

/// Whose link address is missing.
fn neighbour(way: &Way, hop: NextHop, out: InterfaceId, network: &Network) -> Wanted {
    let address = if let NextHop::Known(id) = hop { network.hop(id).address } else { way.address };
    Wanted { interface: out, address }
}

fn send(batch: &mut Batch, i: usize, way: &Way, hop: NextHop, out: InterfaceId, network: &Network) -> Verdict {
    let Some(link) = link_of(hop, network) else {
        batch.wanted[i] = neighbour(way, hop, out, network);
        return Verdict::Wait(Then::Forward);
    };
    ethernet::set_link(batch.frames[i].frame.bytes_mut(), &link);
    Verdict::Forward(out)
}

/// What comes before each piece of a packet that is cut on its way into a tunnel.
#[derive(Clone, Copy, Debug)]
pub struct Lining {
    outer: Outer,
    vni: u32,
    key: Option<TagKey>,
}

/// What a piece is in a tunnel: the tunnel's headers and its link header, and how long they are.
pub type Lined = ([u8; LONGEST + ethernet::HEADER], usize);

impl Lining {
    /// That of a packet, the interface that it leaves by, and the link addresses there, once they are known.
    pub fn of(view: &Snapshot, travel: Travel, sides: u8) -> Option<(Self, InterfaceId, Option<Link>)> {
        let way = view.tunnels.to(travel.to)?;
        let (hop, out, _) = way.exit(&view.network)?;
        let vni = way.vni(Mark { sides, leg: travel.leg });
        Some((Self { outer: way.outer, vni, key: way.key().copied() }, out, link_of(hop, &view.network)))
    }

    /// The headers of the tunnel before a piece, with its own link header, whose rest stands in two places; `None` if it has none.
    pub fn before(&self, headers: &[u8], payload: &[u8], link: &Link) -> Option<Lined> {
        let mut lined = [0; LONGEST + ethernet::HEADER];
        let inner = (headers.len() + payload.len()) as u16;
        self.outer.write(&mut lined, inner, self.vni, 0, traffic_class(headers));
        ethernet::set_link(&mut lined, link);
        let (link, packet) = headers.split_first_chunk::<{ ethernet::HEADER }>()?;
        let own = lined.get_mut(self.outer.length()..)?.first_chunk_mut()?;
        *own = *link;
        if let Some(key) = &self.key {
            key.seal_parts(own, [packet, payload], self.vni);
        }
        Some((lined, self.outer.length() + ethernet::HEADER))
    }
}

/// Notes that a packet goes to the gateway that owns it. Equal ways are chosen by its hash, which kinds without sessions don't have yet.
pub fn send_to_owner<A: Lane>(batch: &mut Batch, i: usize, to: GatewayId) {
    if !batch.heads[i].kind.has_session() {
        batch.hashes[i] = super::classify::WAYS.hash(&A::tuples(batch)[i]);
    }
    batch.send_to(i, to);
}
