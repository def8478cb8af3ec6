//! Next-hop lookup with the checks of TTL and MTU. `rewrite` calls it before it writes anything, so that a packet that
//! can't be forwarded can still be quoted unmodified.

use std::net::IpAddr;

use crate::flow::address::Address;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{InterfaceId, TunnelRemote};
use crate::io::batch::{Batch, BatchFamily, NeighborKey};
use crate::policy::Snapshot;
use crate::policy::network::{NextHop, NextHopId, NoRoute};
use crate::session::Sessions;
use crate::session::entry::Entry;
use crate::stage::context::PacketFamily;
use crate::wire::{ethernet, fragmentation, ipv4, ipv6};

/// The next hop of a packet with a session; `None` if it can't be forwarded: its verdict is set.
#[inline]
pub fn session_next_hop<A: PacketFamily>(
    batch: &mut Batch,
    i: usize,
    sessions: &mut Sessions,
    snapshot: &Snapshot,
) -> Option<NextHop> {
    let entry = A::table(sessions).entry(batch.slots[i]);
    // In another generation the id may be that of another hop or of none: the session of a quoted packet isn't
    // revalidated.
    let hop = match cached_hop(entry, entry.generation() == snapshot.generation) {
        Some(hop) => Ok(hop),
        None => resolve_hop::<A>(batch, i, sessions, snapshot),
    };
    check(batch, i, hop, snapshot)
}

/// The next hop that a session has cached, if that `is_current`.
#[inline]
fn cached_hop<A: PacketFamily>(entry: &Entry<A>, is_current: bool) -> Option<NextHop> {
    match entry.next_hop().filter(|_| is_current)? {
        NextHopId::HAIRPIN => Some(NextHop::Hairpin),
        hop => Some(NextHop::Neighbor(hop)),
    }
}

/// The next hop that a session has, or would look up, without checks of the packet.
///
/// # Errors
/// When there is no route.
pub fn hop_of_session<A: PacketFamily>(entry: &Entry<A>, hash: u64, snapshot: &Snapshot) -> Result<NextHop, NoRoute> {
    let is_current = entry.generation() == snapshot.generation
        || snapshot.freshness.is_fresh(entry.generation(), entry.pod_remote_vip());
    cached_hop(entry, is_current).map_or_else(|| next_hop_to(entry.translated().destination, hash, snapshot), Ok)
}

/// The next hop toward `destination`: a hairpin for a VIP of this gateway, a node of the overlay network, or a route.
///
/// # Errors
/// When there is no route.
pub fn next_hop_to<A: PacketFamily>(destination: A, hash: u64, snapshot: &Snapshot) -> Result<NextHop, NoRoute> {
    if snapshot.policy.vip(destination).is_some() {
        return Ok(NextHop::Hairpin);
    }
    external_hop(destination, hash, snapshot)
}

/// The next hop toward a destination that is not a VIP.
fn external_hop<A: PacketFamily>(destination: A, hash: u64, snapshot: &Snapshot) -> Result<NextHop, NoRoute> {
    if let Some(node) = snapshot.node_of(destination) {
        return Ok(NextHop::Node(node));
    }
    let Snapshot { network, policy, .. } = snapshot;
    let hop = network.next_hop(destination, hash)?;
    let is_inside = network.interface_of(hop).is_none_or(|out| network.interface(out).role.is_inside());
    // While a pod's own route is gone, the default route would take its packets, and its address, outside.
    if !is_inside && policy.endpoint(destination).is_some() {
        return Err(NoRoute);
    }
    Ok(hop)
}

/// The id of a next hop that a session caches; `None` if it can't be cached.
pub fn hop_id(hop: NextHop) -> Option<NextHopId> {
    match hop {
        NextHop::Neighbor(hop) => Some(hop),
        NextHop::Hairpin => Some(NextHopId::HAIRPIN),
        NextHop::OnLink(_) | NextHop::Node(_) => None,
    }
}

/// Checks TTL and MTU for a next hop; `None` if the packet can't be forwarded: its verdict is set.
pub fn check_next_hop(batch: &mut Batch, i: usize, hop: NextHop, snapshot: &Snapshot) -> Option<NextHop> {
    check(batch, i, Ok(hop), snapshot)
}

/// The next hop of a packet without a session toward `destination`; `None` as above.
pub fn stateless_next_hop<A: PacketFamily>(
    batch: &mut Batch,
    i: usize,
    destination: A,
    snapshot: &Snapshot,
) -> Option<NextHop> {
    let hop = next_hop_to(destination, batch.hashes[i], snapshot);
    check(batch, i, hop, snapshot)
}

/// The next hop of a packet that is forwarded untranslated; `None` as above.
pub fn untranslated_next_hop<A: PacketFamily>(batch: &mut Batch, i: usize, snapshot: &Snapshot) -> Option<NextHop> {
    let hop = external_hop(A::tuples(batch)[i].destination, batch.hashes[i], snapshot);
    check(batch, i, hop, snapshot)
}

/// Looks up a session's next hop and caches it in the session.
#[cold]
fn resolve_hop<A: PacketFamily>(
    batch: &Batch,
    i: usize,
    sessions: &mut Sessions,
    snapshot: &Snapshot,
) -> Result<NextHop, NoRoute> {
    let entry = A::table_mut(sessions).entry_mut(batch.slots[i]);
    let hop = next_hop_to(entry.translated().destination, batch.hashes[i], snapshot)?;
    entry.set_next_hop(hop_id(hop));
    Ok(hop)
}

#[inline]
fn check(batch: &mut Batch, i: usize, hop: Result<NextHop, NoRoute>, snapshot: &Snapshot) -> Option<NextHop> {
    let head = batch.headers[i];
    let hop_and_mtu = hop.ok().and_then(|hop| Some((hop, mtu(hop, snapshot)?)));
    let reason = match hop_and_mtu {
        None => DropReason::NoRoute,
        Some(_) if head.ttl <= 1 => DropReason::Ttl,
        Some((hop, mtu)) => {
            if head.ip_length <= mtu {
                return Some(hop);
            }
            batch.mtus[i] = mtu;
            if fragmentation::may_fragment(batch.frames[i].frame.bytes(), mtu) {
                batch.to_fragment.insert(i);
                return Some(hop);
            }
            DropReason::TooBig
        }
    };
    batch.reject(i, reason);
    None
}

/// The MTU toward a next hop, bytes of IP packet; `None` if there is no route.
#[inline]
fn mtu(hop: NextHop, snapshot: &Snapshot) -> Option<u16> {
    if let NextHop::Node(node) = hop {
        return snapshot.tunnels.to(TunnelRemote::Node(node))?.route(&snapshot.network).map(|(_, _, mtu)| mtu);
    }
    Some(egress_interface(hop, snapshot).map_or(u16::MAX, |out| snapshot.network.interface_entry(out).mtu))
}

/// The egress interface of a next hop; a hairpin has none.
#[inline]
pub fn egress_interface(hop: NextHop, snapshot: &Snapshot) -> Option<InterfaceId> {
    match hop {
        NextHop::Node(node) => snapshot.network.interface_of(snapshot.tunnels.to(TunnelRemote::Node(node))?.next_hop?),
        _ => snapshot.network.interface_of(hop),
    }
}

/// The neighbor to resolve: the next-hop router, or the destination of the rewritten packet.
pub fn unresolved_neighbor(batch: &Batch, i: usize, hop: NextHop, snapshot: &Snapshot) -> Option<NeighborKey> {
    let interface = egress_interface(hop, snapshot)?;
    let address: IpAddr = if let NextHop::Neighbor(id) = hop {
        snapshot.network.neighbor(id).address
    } else {
        let packet = &batch.frames[i].frame.bytes()[ethernet::HEADER..];
        if batch.families[<u32 as BatchFamily>::INDEX].contains(i) {
            ipv4::destination(packet).to_ip()
        } else {
            ipv6::destination(packet).to_ip()
        }
    };
    Some(NeighborKey { interface, address })
}
