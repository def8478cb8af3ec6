//! Turns a packet into the gateway's own reply to it: an ICMP error, a TCP reset or a health check reply.

use crate::flow::address::Address;
use crate::flow::direction::Direction;
use crate::flow::ids::{InterfaceId, NodeId, TunnelRemote};
use crate::flow::verdict::{AfterResolution, Verdict};
use crate::io::Received;
use crate::io::batch::{Batch, NeighborKey};
use crate::policy::Snapshot;
use crate::policy::network::{Neighbor, NextHop};
use crate::stage::encap;
use crate::wire::ethernet::{self, MacPair};
use crate::wire::icmp_error::MAX_LENGTH_V6;
use crate::wire::{ipv4, ipv6};

/// Maximum length of a reply, bytes.
const MAX_LENGTH: usize = ethernet::HEADER + MAX_LENGTH_V6;

/// Replaces the packet with the reply that `write` makes of it, and returns the verdict for it. `write` gets the buffer
/// and the IP packet and returns the length of the reply. `None` if there is no reply or no route for it.
pub fn reply(
    batch: &mut Batch,
    i: usize,
    snapshot: &Snapshot,
    write: impl FnOnce(&mut [u8], &[u8]) -> Option<usize>,
) -> Option<Verdict> {
    let received = &mut batch.frames[i];
    let (ethernet_header, packet) = received.frame.bytes().split_first_chunk::<{ ethernet::HEADER }>()?;
    let mut reply = [0; MAX_LENGTH];
    let (header, into) = reply.split_at_mut(ethernet::HEADER);
    header.copy_from_slice(ethernet_header);
    let length = ethernet::HEADER + write(into, packet)?;
    let path = return_path(received, ethernet_header, into, snapshot)?;
    if let ReturnPath::Direct(macs, _) = &path {
        ethernet::set_macs(header, macs);
    }
    if !received.frame.replace(&reply[..length]) {
        return None;
    }
    match path {
        ReturnPath::Direct(_, out) => Some(Verdict::Reply(out)),
        ReturnPath::Unresolved(wanted) => {
            batch.neighbors[i] = wanted;
            Some(Verdict::AwaitNeighbor(AfterResolution::Reply))
        }
        ReturnPath::Hairpin => {
            batch.directions[i] = Direction::ServiceReply;
            Some(Verdict::Hairpin)
        }
        ReturnPath::Node(node) => {
            encap::encap_reply(batch, i, snapshot.tunnels.to(TunnelRemote::Node(node))?, &snapshot.network)
        }
    }
}

/// How a reply reaches the sender of the packet.
enum ReturnPath {
    /// With these MAC addresses, out of this interface.
    Direct(MacPair, InterfaceId),
    /// To a neighbor whose MAC address isn't known yet.
    Unresolved(NeighborKey),
    /// The sender is behind a VIP of this gateway: the reply is hairpinned, as the packet was.
    Hairpin,
    /// Into the tunnel to a node of the overlay network.
    Node(NodeId),
}

/// Back to the MAC address and interface that the packet came from, except for packets out of a tunnel: the outer
/// sender is not the inner one.
fn return_path(received: &Received, ethernet_header: &[u8], reply: &[u8], snapshot: &Snapshot) -> Option<ReturnPath> {
    if received.is_hairpin() {
        return Some(ReturnPath::Hairpin);
    }
    let is_v4 = reply.first()? >> 4 == 4;
    let node =
        if is_v4 { snapshot.node_of(ipv4::destination(reply)) } else { snapshot.node_of(ipv6::destination(reply)) };
    if let Some(node) = node {
        return Some(ReturnPath::Node(node));
    }
    if received.is_from_peer() {
        let (hop, destination) = if is_v4 {
            let destination = ipv4::destination(reply);
            (snapshot.network.next_hop(destination, 0), destination.to_ip())
        } else {
            let destination = ipv6::destination(reply);
            (snapshot.network.next_hop(destination, 0), destination.to_ip())
        };
        return match hop.ok()? {
            NextHop::Neighbor(id) => {
                let Neighbor { interface, address, macs } = *snapshot.network.neighbor(id);
                Some(macs.map_or(ReturnPath::Unresolved(NeighborKey { interface, address }), |macs| {
                    ReturnPath::Direct(macs, interface)
                }))
            }
            NextHop::OnLink(interface) => Some(ReturnPath::Unresolved(NeighborKey { interface, address: destination })),
            NextHop::Hairpin | NextHop::Node(_) => None,
        };
    }
    let own_mac = snapshot.network.interface(received.interface).mac;
    Some(ReturnPath::Direct(ethernet::mac_pair(ethernet::source(ethernet_header)?, own_mac), received.interface))
}
