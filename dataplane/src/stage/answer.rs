//! Second stage: questions for link addresses. VIPs are on no interface, so the gateway itself answers ARP (RFC 826) and
//! neighbour solicitations (RFC 4861) for them; the question's frame becomes the answer. Whoever else says that he has one of
//! them is told of (`conflicts.rs`).

use std::net::IpAddr;

use crate::address::{Address, V6};
use crate::batch::{Batch, Kind};
use crate::conflicts::Conflict;
use crate::counters::DropReason;
use crate::pipeline::Context;
use crate::snapshot::Snapshot;
use crate::snapshot::policy::{Family, Vip};
use crate::snapshot::spec::{Announce, InterfaceSpec};
use crate::verdict::Verdict;
use crate::wire::arp::{Arp, Operation};
use crate::wire::ethernet::{self, Mac};
use crate::wire::{ipv6, ndp};

/// Answers every question for a VIP that is this gateway's, and tells of claims to one; drops the others. Who can't be sure that it still
/// is its own says nothing.
pub fn run(batch: &mut Batch, context: &Context<'_>) {
    let Context { view, counters, .. } = *context;
    for i in batch.open.and(batch.questions) {
        let kind = batch.heads[i].kind;
        let received = &mut batch.frames[i];
        let interface = view.network.interface(received.interface);
        let question = received.frame.bytes();
        if let Some(conflict) = claim(question, kind, interface, view) {
            counters.vip_conflicts.add(1);
            counters.conflicts.tell(conflict);
            batch.decide(i, Verdict::Heard);
            continue;
        }
        let written = if context.is_lapsed {
            None
        } else if kind == Kind::Arp {
            answer_arp(question, interface, view).map(|answer| received.frame.replace(&answer))
        } else {
            answer_solicitation(question, interface, view).map(|answer| received.frame.replace(&answer))
        };
        let verdict = match written {
            Some(true) => Verdict::Answer(received.interface),
            Some(false) | None => Verdict::Drop(DropReason::NotOurs),
        };
        batch.decide(i, verdict);
    }
}

fn answer_arp(question: &[u8], interface: &InterfaceSpec, view: &Snapshot) -> Option<[u8; 42]> {
    let arp = Arp::parse(question.get(ethernet::HEADER..)?)?;
    // A request for the address that the sender itself claims is an announcement, and wants no answer.
    if arp.operation != Operation::Request || arp.sender == arp.target || !serves(view, arp.target, interface) {
        return None;
    }
    let answer = Arp {
        operation: Operation::Reply,
        sender_mac: interface.mac,
        sender: arp.target,
        target_mac: arp.sender_mac,
        target: arp.sender,
    };
    (!ethernet::is_group(arp.sender_mac)).then(|| answer.frame(arp.sender_mac))
}

fn answer_solicitation(question: &[u8], interface: &InterfaceSpec, view: &Snapshot) -> Option<[u8; ndp::FRAME]> {
    let sender = ethernet::source(question)?;
    let packet = question.get(ethernet::HEADER..)?;
    let header = ipv6::Header::parse(packet).ok()?;
    let target = ndp::parse_solicitation(&header, packet)?;
    if !serves(view, target, interface) || ethernet::is_group(sender) {
        return None;
    }
    // Somebody who has no address yet asks whether he may take this one: all nodes hear that he may not.
    let asker_has_address = header.source != V6::default();
    let answer = ndp::Advertisement {
        target,
        mac: interface.mac,
        destination: if asker_has_address { header.source } else { V6::from_bits(ndp::ALL_NODES) },
        destination_mac: if asker_has_address { sender } else { ethernet::ipv6_multicast(ndp::ALL_NODES) },
        solicited: asker_has_address,
    };
    Some(answer.frame())
}

/// Another host's claim that it has a VIP that this gateway alone should have. A VIP that BGP announces may have several
/// gateways on one link, and each answers for it.
fn claim(message: &[u8], kind: Kind, interface: &InterfaceSpec, view: &Snapshot) -> Option<Conflict> {
    let (vip, mac) = if kind == Kind::Arp {
        let arp = Arp::parse(message.get(ethernet::HEADER..)?)?;
        (contested(view, arp.sender, interface)?, arp.sender_mac)
    } else {
        let packet = message.get(ethernet::HEADER..)?;
        let (target, mac) = ndp::parse_advertisement(&ipv6::Header::parse(packet).ok()?, packet)?;
        (contested(view, target, interface)?, mac.or_else(|| ethernet::source(message))?)
    };
    // A link may show us our own announcements: that of another interface, or by a loop.
    let is_own = view.network.interfaces().iter().any(|own| own.mac == mac);
    (!is_own && !ethernet::is_group(mac)).then_some(Conflict { vip, mac })
}

fn contested<A: Family>(view: &Snapshot, address: A, interface: &InterfaceSpec) -> Option<IpAddr> {
    let vip = view.policy.vip(address)?;
    (serves(view, address, interface) && vip.announce == Announce::L2).then_some(vip.address)
}

/// Whether this gateway answers for an address on this interface.
fn serves<A: Family>(view: &Snapshot, address: A, interface: &InterfaceSpec) -> bool {
    interface.role.is_outside() && view.policy.vip(address).is_some_and(Vip::is_answered)
}

/// The frame that announces a VIP on an interface to everybody: gratuitous ARP (RFC 5227 section 3) or an unsolicited
/// neighbour advertisement (RFC 4861 section 7.2.6).
pub fn announcement(address: IpAddr, mac: Mac, write: impl FnOnce(&[u8])) {
    match address {
        IpAddr::V4(v4) => {
            let target = v4.to_bits();
            let arp =
                Arp { operation: Operation::Request, sender_mac: mac, sender: target, target_mac: [0; 6], target };
            write(&arp.frame(ethernet::BROADCAST));
        }
        IpAddr::V6(_) => {
            let advertisement = ndp::Advertisement {
                target: V6::from_ip(address).unwrap_or_default(),
                mac,
                destination: V6::from_bits(ndp::ALL_NODES),
                destination_mac: ethernet::ipv6_multicast(ndp::ALL_NODES),
                solicited: false,
            };
            write(&advertisement.frame());
        }
    }
}
