//! Replies to ARP requests (RFC 826) and neighbor solicitations (RFC 4861) for VIPs, which are on no interface. The
//! frame of the request becomes the reply. Other hosts that claim a VIP are reported as address conflicts
//! (`address_conflict.rs`).

use std::net::IpAddr;

use crate::flow::address::V6;
use crate::flow::drop_reason::DropReason;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind};
use crate::observe::address_conflict::AddressConflict;
use crate::policy::Snapshot;
use crate::policy::compiled::{Family, Vip};
use crate::policy::spec::{Announce, InterfaceSpec};
use crate::stage::context::Context;
use crate::wire::arp::{Arp, Operation};
use crate::wire::ethernet::{self, Mac};
use crate::wire::{ipv6, ndp};

/// Replies to every request for a VIP that this gateway announces, reports claims to one, and drops the others. Without
/// a lease it replies to none.
pub fn run(batch: &mut Batch, context: &Context<'_>) {
    let Context { snapshot, counters, .. } = *context;
    for i in batch.undecided.and(batch.arp_nd) {
        let kind = batch.headers[i].kind;
        let received = &mut batch.frames[i];
        let interface = snapshot.network.interface(received.interface);
        let request = received.frame.bytes();
        if let Some(conflict) = claim(request, kind, interface, snapshot) {
            counters.vip_conflicts.add(1);
            counters.conflicts.push(conflict);
            batch.decide(i, Verdict::Consume);
            continue;
        }
        let is_written = if context.lease_expired {
            None
        } else if kind == PacketKind::Arp {
            reply_to_arp(request, interface, snapshot).map(|reply| received.frame.replace(&reply))
        } else {
            reply_to_solicitation(request, interface, snapshot).map(|reply| received.frame.replace(&reply))
        };
        let verdict = match is_written {
            Some(true) => Verdict::Reply(received.interface),
            Some(false) | None => Verdict::Drop(DropReason::NotOurs),
        };
        batch.decide(i, verdict);
    }
}

fn reply_to_arp(request: &[u8], interface: &InterfaceSpec, snapshot: &Snapshot) -> Option<[u8; 42]> {
    let arp = Arp::parse(request.get(ethernet::HEADER..)?)?;
    // A gratuitous ARP request gets no reply.
    if arp.operation != Operation::Request || arp.sender == arp.target || !replies_for(snapshot, arp.target, interface)
    {
        return None;
    }
    let reply = Arp {
        operation: Operation::Reply,
        sender_mac: interface.mac,
        sender: arp.target,
        target_mac: arp.sender_mac,
        target: arp.sender,
    };
    (!ethernet::is_group(arp.sender_mac)).then(|| reply.frame(arp.sender_mac))
}

fn reply_to_solicitation(request: &[u8], interface: &InterfaceSpec, snapshot: &Snapshot) -> Option<[u8; ndp::FRAME]> {
    let sender = ethernet::source(request)?;
    let packet = request.get(ethernet::HEADER..)?;
    let header = ipv6::Header::parse(packet).ok()?;
    let target = ndp::parse_solicitation(&header, packet)?;
    if !replies_for(snapshot, target, interface) || ethernet::is_group(sender) {
        return None;
    }
    // Duplicate address detection (RFC 4862): the reply goes to all nodes, since the sender has no address yet.
    let has_source = header.source != V6::default();
    let mut reply = ndp::Advertisement::unsolicited(target, interface.mac);
    if has_source {
        reply = ndp::Advertisement { destination: header.source, destination_mac: sender, solicited: true, ..reply };
    }
    Some(reply.frame())
}

/// Another host's claim to a VIP that this gateway alone should announce. Several gateways on one link may announce the
/// same BGP VIP, and each of them replies for it.
fn claim(message: &[u8], kind: PacketKind, interface: &InterfaceSpec, snapshot: &Snapshot) -> Option<AddressConflict> {
    let (vip, mac) = if kind == PacketKind::Arp {
        let arp = Arp::parse(message.get(ethernet::HEADER..)?)?;
        (conflicting_vip(snapshot, arp.sender, interface)?, arp.sender_mac)
    } else {
        let packet = message.get(ethernet::HEADER..)?;
        let (target, mac) = ndp::parse_advertisement(&ipv6::Header::parse(packet).ok()?, packet)?;
        (conflicting_vip(snapshot, target, interface)?, mac.or_else(|| ethernet::source(message))?)
    };
    // Own announcements may come back, from another interface or through a loop.
    let is_own = snapshot.network.interfaces().iter().any(|own| own.mac == mac);
    (!is_own && !ethernet::is_group(mac)).then_some(AddressConflict { vip, mac })
}

fn conflicting_vip<A: Family>(snapshot: &Snapshot, address: A, interface: &InterfaceSpec) -> Option<IpAddr> {
    let vip = snapshot.policy.vip(address)?;
    (replies_for(snapshot, address, interface) && vip.announce == Announce::L2).then_some(vip.address)
}

/// Whether this gateway replies for an address on this interface.
fn replies_for<A: Family>(snapshot: &Snapshot, address: A, interface: &InterfaceSpec) -> bool {
    interface.role.is_outside() && snapshot.policy.vip(address).is_some_and(Vip::answers_arp_nd)
}

/// Builds the frame that announces a VIP on an interface to all neighbors: gratuitous ARP (RFC 5227 section 3) or an
/// unsolicited neighbor advertisement (RFC 4861 section 7.2.6).
pub fn announcement(address: IpAddr, mac: Mac, write: impl FnOnce(&[u8])) {
    match address {
        IpAddr::V4(v4) => write(&Arp::announcement(mac, v4.to_bits()).frame(ethernet::BROADCAST)),
        IpAddr::V6(v6) => write(&ndp::Advertisement::unsolicited(V6::from_bits(v6.to_bits()), mac).frame()),
    }
}
