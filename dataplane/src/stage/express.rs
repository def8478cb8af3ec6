//! The short way for what almost every packet is: one of a session that is known, checked and routed, to which nothing
//! happens. It is translated in one pass, as soon as its entry has come from memory. All others are left to the stages behind,
//! which do the same and everything else; on the wire the order stays that of the batch.

use crate::batch::{Batch, Kind};
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::entry::Flags;
use crate::stage::rewrite::{self, LINK_HEADER, OnWire};
use crate::verdict::Verdict;
use crate::wire::{ethernet, tcp};

/// Translates the packets to whose sessions nothing happens.
pub fn run<A: OnWire>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>) {
    let (network, generation) = (&*context.view.network, context.view.generation);
    let table = A::table_mut(sessions);
    for i in batch.open_of::<A>().without(batch.sessionless).without(batch.renumber) {
        let head = batch.heads[i];
        let entry = table.entry_mut(batch.slots[i]);
        let flags = entry.flags();
        let known = entry.has_key(&A::tuples(batch)[i]) && entry.generation() == generation;
        if !known || flags.has(Flags::QUARANTINED) || head.sides & flags.side() == 0 || head.ttl <= 1 {
            continue;
        }
        // Without a link address nothing fits.
        let Some(exit) = entry.next_hop().and_then(|hop| network.exit(hop)) else { continue };
        if head.length > exit.mtu {
            continue;
        }
        match head.kind {
            Kind::Udp => {}
            Kind::Tcp => {
                let segment = &batch.segments[i];
                if segment.flags.is_rare() {
                    continue;
                }
                let ack = segment.flags.has(tcp::Flags::ACK).then_some(segment.acknowledgement);
                entry.advance(segment.sequence.wrapping_add(segment.space), ack, false);
            }
            _ => continue,
        }
        let frame = batch.frames[i].frame.bytes_mut();
        let Some((headers, payload)) = frame.split_at_mut_checked(head.l4.into()) else { continue };
        entry.count(head.length + LINK_HEADER, context.now);
        let to = entry.to();
        A::write_header(headers, &to, entry.ip_delta());
        rewrite::write_payload(payload, head.kind, to.source_port, to.destination_port, entry.l4_delta());
        ethernet::set_link(headers, &exit.link);
        batch.directions[i] = entry.direction();
        batch.decide(i, Verdict::Forward(exit.interface));
    }
}
