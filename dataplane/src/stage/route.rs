//! The next hop of a packet, and whether it may go there: its time to live, and what the link carries. Asked by the last
//! stage before it writes anything, so what can't go on can still be answered as it came.

use std::net::IpAddr;

use crate::address::Address;
use crate::batch::{Batch, Lane, Wanted};
use crate::counters::DropReason;
use crate::io::InterfaceId;
use crate::session::Sessions;
use crate::snapshot::Snapshot;
use crate::snapshot::network::{HopId, NextHop, NoRoute};
use crate::snapshot::tunnels::End;
use crate::wire::{cut, ethernet, ipv4, ipv6};

/// Says where a packet with a session goes next; `None` if it can't, and its way has ended.
#[inline]
pub fn session_hop<A: Lane>(batch: &mut Batch, i: usize, sessions: &mut Sessions, view: &Snapshot) -> Option<NextHop> {
    let entry = A::table(sessions).entry(batch.slots[i]);
    // Under another generation the number may be that of another hop, or of none: what quotes a session doesn't check it anew.
    let hop = match entry.next_hop().filter(|_| entry.generation() == view.generation) {
        Some(HopId::HAIRPIN) => Ok(NextHop::Hairpin),
        Some(hop) => Ok(NextHop::Known(hop)),
        None => find_hop::<A>(batch, i, sessions, view),
    };
    check(batch, i, hop, view)
}

/// Where packets to `destination` go, which may be a VIP of this gateway, or on a node of the overlay network.
///
/// # Errors
/// When no route leads there.
pub fn hop_to<A: Lane>(destination: A, hash: u64, view: &Snapshot) -> Result<NextHop, NoRoute> {
    if view.policy.vip(destination).is_some() {
        return Ok(NextHop::Hairpin);
    }
    beyond(destination, hash, view)
}

/// The same of a destination that is no VIP.
fn beyond<A: Lane>(destination: A, hash: u64, view: &Snapshot) -> Result<NextHop, NoRoute> {
    view.node_of(destination).map_or_else(|| view.network.next_hop(destination, hash), |node| Ok(NextHop::Node(node)))
}

/// A next hop as a session remembers it.
pub fn number(hop: NextHop) -> Option<HopId> {
    match hop {
        NextHop::Known(hop) => Some(hop),
        NextHop::Hairpin => Some(HopId::HAIRPIN),
        NextHop::Unknown(_) | NextHop::Node(_) => None,
    }
}

/// Whether a packet may go that way; `None` if not, and its way has ended.
pub fn checked(batch: &mut Batch, i: usize, hop: NextHop, view: &Snapshot) -> Option<NextHop> {
    check(batch, i, Ok(hop), view)
}

/// The same for a packet that has no session, and goes to `destination`.
pub fn stateless_hop<A: Lane>(batch: &mut Batch, i: usize, destination: A, view: &Snapshot) -> Option<NextHop> {
    let hop = hop_to(destination, batch.hashes[i], view);
    check(batch, i, hop, view)
}

/// The same for a packet that goes on unchanged.
pub fn unchanged_hop<A: Lane>(batch: &mut Batch, i: usize, view: &Snapshot) -> Option<NextHop> {
    let hop = beyond(A::tuples(batch)[i].destination, batch.hashes[i], view);
    check(batch, i, hop, view)
}

/// Finds a session's next hop, and lets the session remember it.
#[cold]
fn find_hop<A: Lane>(batch: &Batch, i: usize, sessions: &mut Sessions, view: &Snapshot) -> Result<NextHop, NoRoute> {
    let entry = A::table_mut(sessions).entry_mut(batch.slots[i]);
    let hop = hop_to(entry.to().destination, batch.hashes[i], view)?;
    entry.set_next_hop(number(hop));
    Ok(hop)
}

#[inline]
fn check(batch: &mut Batch, i: usize, hop: Result<NextHop, NoRoute>, view: &Snapshot) -> Option<NextHop> {
    let head = batch.heads[i];
    let carried = hop.ok().and_then(|hop| Some((hop, mtu(hop, view)?)));
    let refused = match carried {
        None => DropReason::NoRoute,
        Some(_) if head.ttl <= 1 => DropReason::Ttl,
        Some((hop, mtu)) => {
            if head.length <= mtu {
                return Some(hop);
            }
            batch.mtus[i] = mtu;
            if cut::may_cut(batch.frames[i].frame.bytes()) {
                batch.cut.insert(i);
                return Some(hop);
            }
            DropReason::TooBig
        }
    };
    batch.refuse(i, refused);
    None
}

/// The longest IP packet that goes that way whole; `None`: none does.
#[inline]
fn mtu(hop: NextHop, view: &Snapshot) -> Option<u16> {
    if let NextHop::Node(node) = hop {
        return view.tunnels.to(End::Node(node))?.exit(&view.network).map(|(_, _, mtu)| mtu);
    }
    Some(interface(hop, view).map_or(u16::MAX, |out| view.network.port(out).mtu))
}

/// The interface of a next hop; a hairpin has none.
#[inline]
pub fn interface(hop: NextHop, view: &Snapshot) -> Option<InterfaceId> {
    match hop {
        NextHop::Node(node) => view.network.exit_of(view.tunnels.to(End::Node(node))?.hop?),
        _ => view.network.exit_of(hop),
    }
}

/// Whose link address is missing: the router's, or the destination's as it stands in the rewritten packet.
pub fn wanted(batch: &Batch, i: usize, hop: NextHop, view: &Snapshot) -> Option<Wanted> {
    let interface = interface(hop, view)?;
    let address: IpAddr = if let NextHop::Known(id) = hop {
        view.network.hop(id).address
    } else {
        let packet = &batch.frames[i].frame.bytes()[ethernet::HEADER..];
        if batch.families[<u32 as Lane>::FAMILY].contains(i) {
            ipv4::destination(packet).to_ip()
        } else {
            ipv6::destination(packet).to_ip()
        }
    };
    Some(Wanted { interface, address })
}
