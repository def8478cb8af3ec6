//! Rejects: turns dropped packets, where policy or an RFC wants it, into an ICMP error or a TCP reset to the sender.
//! The packet is still unmodified. Never for an ICMP error, a later fragment or a multicast packet (RFC 1122 section
//! 3.2.2), and rate-limited.

use crate::flow::drop_reason::DropReason;
use crate::flow::tuple::HashKey;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, BatchFamily, PacketKind};
use crate::observe::drops::{Attribution, DropStats};
use crate::observe::packet_summary::PacketSummary;
use crate::policy::spec::OnExhaustion;
use crate::stage::context::Context;
use crate::stage::icmp_reply;
use crate::stage::reply_limiter::ReplyLimiter;
use crate::wire::icmp_error::{IcmpError, compose_v4, compose_v6};
use crate::wire::tcp_reset::reset;
use crate::wire::{ipv4, ipv6};

/// Hashes senders for the rate limit. A fixed key will do: two senders that collide only delay each other's replies.
const SENDER_HASH: HashKey = HashKey::fixed();

/// Replies to the rejected packets of the batch.
pub fn run(batch: &mut Batch, limiter: &mut ReplyLimiter, drops: &mut DropStats, context: &Context<'_>) {
    for i in batch.rejected {
        let Verdict::Drop(reason) = batch.verdicts[i] else { continue };
        let v4 = batch.families[<u32 as BatchFamily>::INDEX].contains(i);
        let Some(reply) = reject_reply(batch, i, reason, context) else { continue };
        let sender = if v4 {
            SENDER_HASH.hash(&batch.tuples_v4[i].only_source())
        } else {
            SENDER_HASH.hash(&batch.tuples_v6[i].only_source())
        };
        if !limiter.allow(sender, context.now) {
            context.counters.replies_suppressed.add(1);
            continue;
        }
        let network = &*context.snapshot.network;
        let (head, interface) = (PacketSummary::of(batch.frames[i].frame.bytes()), batch.frames[i].interface);
        let sources = network.source_addresses(batch.frames[i].interface);
        let verdict =
            icmp_reply::reply(batch, i, context.snapshot, |into, packet| match (reply, packet.first()? >> 4) {
                (RejectReply::TcpReset, _) => reset(into, packet),
                // A port unreachable has the destination as source; every other error has the gateway's address.
                (RejectReply::IcmpError(error @ IcmpError::PortUnreachable), 4) => {
                    compose_v4(into, packet, error, ipv4::destination(packet))
                }
                (RejectReply::IcmpError(error @ IcmpError::PortUnreachable), _) => {
                    compose_v6(into, packet, error, ipv6::destination(packet))
                }
                (RejectReply::IcmpError(error), 4) => compose_v4(into, packet, error, sources.0),
                (RejectReply::IcmpError(error), _) => compose_v6(into, packet, error, sources.1?),
            });
        if let Some(verdict) = verdict {
            context.counters.dropped(reason);
            let owner = Attribution::of(network.interface(interface).role);
            drops.count_packet(reason, head, interface, owner, context.now);
            batch.verdicts[i] = verdict;
        }
    }
}

/// The reply to the sender of a rejected packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReply {
    IcmpError(IcmpError),
    TcpReset,
}

/// The reply to the sender of a dropped packet, if it gets one.
pub fn reject_reply(batch: &Batch, i: usize, reason: DropReason, context: &Context<'_>) -> Option<RejectReply> {
    let prohibited = || {
        let (_, egress) = context.snapshot.policy.endpoint_by_id(batch.endpoints[i]);
        let reply = if batch.headers[i].kind == PacketKind::Tcp {
            RejectReply::TcpReset
        } else {
            RejectReply::IcmpError(IcmpError::Prohibited)
        };
        (egress.spec.on_exhaustion == OnExhaustion::Reject).then_some(reply)
    };
    let unreachable = || {
        let reply = match batch.headers[i].kind {
            PacketKind::Tcp => Some(RejectReply::TcpReset),
            PacketKind::Udp | PacketKind::Sctp => Some(RejectReply::IcmpError(IcmpError::PortUnreachable)),
            _ => None,
        };
        // A segment other than a SYN may be a late one of a former connection.
        reply.filter(|_| batch.headers[i].kind != PacketKind::Tcp || batch.segments[i].flags.is_initial_syn())
    };
    match reason {
        DropReason::NoService if context.rules.reject_no_service => unreachable(),
        DropReason::NoBackend if context.rules.reject_no_backend => unreachable(),
        DropReason::Ttl => Some(RejectReply::IcmpError(IcmpError::TtlExceeded)),
        DropReason::NoRoute => Some(RejectReply::IcmpError(IcmpError::NoRoute)),
        DropReason::TooBig => Some(RejectReply::IcmpError(IcmpError::PacketTooBig { mtu: batch.mtus[i] })),
        // The other reasons are rejected only for pods, as their policy says (`onExhaustion`).
        _ if !batch.new_egress.contains(i) => None,
        DropReason::PortsExhausted | DropReason::Quota | DropReason::SessionTableFull | DropReason::NoVip => {
            prohibited()
        }
        _ => None,
    }
}
