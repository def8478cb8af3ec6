//! Turning a packet into the gateway's own answer to it.

use crate::address::Address;
use crate::batch::{Batch, Wanted};
use crate::counters::Direction;
use crate::io::{InterfaceId, Received};
use crate::snapshot::Snapshot;
use crate::snapshot::network::{Hop, NextHop};
use crate::snapshot::overlay::NodeId;
use crate::snapshot::tunnels::End;
use crate::stage::wrap;
use crate::verdict::{Then, Verdict};
use crate::wire::ethernet::{self, Link};
use crate::wire::icmp_error::LONGEST_V6;
use crate::wire::{ipv4, ipv6};

/// Bytes that an answer takes at most.
const LONGEST: usize = ethernet::HEADER + LONGEST_V6;

/// Puts what `write` makes of the packet, an IP packet and its length, in its place; how its way ends then. `None` if there is no
/// answer, or no way for it.
pub fn answer(
    batch: &mut Batch,
    i: usize,
    view: &Snapshot,
    write: impl FnOnce(&mut [u8], &[u8]) -> Option<usize>,
) -> Option<Verdict> {
    let received = &mut batch.frames[i];
    let (link, packet) = received.frame.bytes().split_first_chunk::<{ ethernet::HEADER }>()?;
    let mut answer = [0; LONGEST];
    let (header, into) = answer.split_at_mut(ethernet::HEADER);
    header.copy_from_slice(link);
    let length = ethernet::HEADER + write(into, packet)?;
    let way = way_back(received, link, into, view)?;
    if let Back::Link(link, _) = &way {
        ethernet::set_link(header, link);
    }
    if !received.frame.replace(&answer[..length]) {
        return None;
    }
    match way {
        Back::Link(_, out) => Some(Verdict::Answer(out)),
        Back::Neighbour(wanted) => {
            batch.wanted[i] = wanted;
            Some(Verdict::Wait(Then::Answer))
        }
        Back::Around => {
            batch.directions[i] = Direction::ServiceReply;
            Some(Verdict::Around)
        }
        Back::Node(node) => wrap::answer(batch, i, view.tunnels.to(End::Node(node))?, &view.network),
    }
}

/// How an answer goes to whoever has sent the packet.
enum Back {
    /// With these link addresses, out of this interface.
    Link(Link, InterfaceId),
    /// To a neighbour whose link address isn't known yet.
    Neighbour(Wanted),
    /// Who is behind a VIP of this gateway hears by way of the VIP: the answer comes around as the question did.
    Around,
    /// Into the tunnel to a node of the overlay network.
    Node(NodeId),
}

/// Back over the link that the packet came by, but for those that came out of a tunnel: whoever stands on its other end didn't send them.
fn way_back(received: &Received, link: &[u8], answer: &[u8], view: &Snapshot) -> Option<Back> {
    if received.is_hairpin() {
        return Some(Back::Around);
    }
    let is_v4 = answer.first()? >> 4 == 4;
    let node = if is_v4 { view.node_of(ipv4::destination(answer)) } else { view.node_of(ipv6::destination(answer)) };
    if let Some(node) = node {
        return Some(Back::Node(node));
    }
    if received.is_from_peer() {
        let (hop, destination) = if is_v4 {
            let destination = ipv4::destination(answer);
            (view.network.next_hop(destination, 0), destination.to_ip())
        } else {
            let destination = ipv6::destination(answer);
            (view.network.next_hop(destination, 0), destination.to_ip())
        };
        return match hop.ok()? {
            NextHop::Known(id) => {
                let Hop { interface, address, link } = *view.network.hop(id);
                Some(link.map_or(Back::Neighbour(Wanted { interface, address }), |link| Back::Link(link, interface)))
            }
            NextHop::Unknown(interface) => Some(Back::Neighbour(Wanted { interface, address: destination })),
            NextHop::Hairpin | NextHop::Node(_) => None,
        };
    }
    let own = view.network.interface(received.interface).mac;
    Some(Back::Link(ethernet::link(ethernet::source(link)?, own), received.interface))
}
