//! After all: what we say to the sender of a packet that can't go on, where somebody should hear it. The packet is as it
//! came, and its frame becomes the answer. Never about an error, a fragment's rest, or to a group (RFC 1122 section 3.2.2), and
//! never faster than the limit.

use crate::batch::{Batch, Kind, Lane};
use crate::counters::DropReason;
use crate::limiter::Limiter;
use crate::pipeline::Context;
use crate::session::tuple::HashKey;
use crate::snapshot::spec::OnExhaustion;
use crate::stage::say;
use crate::verdict::Verdict;
use crate::watch::drops::{DropTable, Whose};
use crate::watch::glimpse::Glimpse;
use crate::wire::icmp_error::{Error, compose_v4, compose_v6};
use crate::wire::reset::reset;
use crate::wire::{ipv4, ipv6};

/// Tells senders apart for the limit. Fixed is good enough: who finds two that share a place delays answers to one of them.
const SENDERS: HashKey = HashKey::fixed();

/// Answers the refused packets of the batch.
pub fn run(batch: &mut Batch, limiter: &mut Limiter, drops: &mut DropTable, context: &Context<'_>) {
    for i in batch.refused {
        let Verdict::Drop(reason) = batch.verdicts[i] else { continue };
        let v4 = batch.families[<u32 as Lane>::FAMILY].contains(i);
        let Some(word) = what_to_say(batch, i, reason, context) else { continue };
        let sender =
            if v4 { SENDERS.hash(&batch.v4[i].only_source()) } else { SENDERS.hash(&batch.v6[i].only_source()) };
        if !limiter.may(sender, context.now) {
            context.counters.answers_limited.add(1);
            continue;
        }
        let network = &*context.view.network;
        let (packet, interface) = (Glimpse::of(batch.frames[i].frame.bytes()), batch.frames[i].interface);
        let sources = network.sources(batch.frames[i].interface);
        let answer = say::answer(batch, i, context.view, |into, packet| match (word, packet.first()? >> 4) {
            (Word::Reset, _) => reset(into, packet),
            // Whom the packet was for says that nobody listens there; of everything else the gateway tells itself.
            (Word::Error(error @ Error::PortUnreachable), 4) => {
                compose_v4(into, packet, error, ipv4::destination(packet))
            }
            (Word::Error(error @ Error::PortUnreachable), _) => {
                compose_v6(into, packet, error, ipv6::destination(packet))
            }
            (Word::Error(error), 4) => compose_v4(into, packet, error, sources.0),
            (Word::Error(error), _) => compose_v6(into, packet, error, sources.1?),
        });
        if let Some(verdict) = answer {
            context.counters.dropped(reason);
            let whose = Whose::of(network.interface(interface).role);
            drops.note_packet(reason, packet, interface, whose, context.now);
            batch.verdicts[i] = verdict;
        }
    }
}

/// What a sender hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// An ICMP error.
    Error(Error),
    /// A reset of its connection.
    Reset,
}

/// What the sender of a dropped packet is to hear, if anything.
pub fn what_to_say(batch: &Batch, i: usize, reason: DropReason, context: &Context<'_>) -> Option<Word> {
    let prohibited = || {
        let (_, egress) = context.view.policy.endpoint_with(batch.endpoints[i]);
        let word = if batch.heads[i].kind == Kind::Tcp { Word::Reset } else { Word::Error(Error::Prohibited) };
        (egress.spec.on_exhaustion == OnExhaustion::Reject).then_some(word)
    };
    let unreachable = || {
        let word = match batch.heads[i].kind {
            Kind::Tcp => Some(Word::Reset),
            Kind::Udp | Kind::Sctp => Some(Word::Error(Error::PortUnreachable)),
            _ => None,
        };
        // A segment of a connection that nobody knows any more may be a late one.
        word.filter(|_| batch.heads[i].kind != Kind::Tcp || batch.segments[i].flags.opens())
    };
    match reason {
        DropReason::NoService if context.rules.reject_no_service => unreachable(),
        DropReason::NoBackend if context.rules.reject_no_backend => unreachable(),
        DropReason::Ttl => Some(Word::Error(Error::TtlExceeded)),
        DropReason::NoRoute => Some(Word::Error(Error::NoRoute)),
        DropReason::TooBig => Some(Word::Error(Error::PacketTooBig { mtu: batch.mtus[i] })),
        // Only a pod's policy says whether its pods hear of it.
        _ if !batch.opening.contains(i) => None,
        DropReason::PortsExhausted | DropReason::Quota | DropReason::SessionTableFull | DropReason::NoVip => {
            prohibited()
        }
        _ => None,
    }
}
