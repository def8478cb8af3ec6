//! After all: what we say to the sender of a packet that can't go on, where somebody should hear it. The packet is as it
//! came, and its frame becomes the answer. Never about an error, a fragment's rest, or to a group (RFC 1122 section 3.2.2), and
//! never faster than the limit.

use crate::batch::{Batch, Kind, Lane};
use crate::counters::DropReason;
use crate::limiter::Limiter;
use crate::pipeline::Context;
use crate::session::tuple::HashKey;
use crate::snapshot::spec::OnExhaustion;
use crate::verdict::Verdict;
use crate::wire::ethernet::{self, Mac};
use crate::wire::icmp_error::{Error, LONGEST_V6, compose_v4, compose_v6};
use crate::wire::reset::reset;

/// Bytes that an answer takes at most.
const LONGEST: usize = ethernet::HEADER + LONGEST_V6;

/// Tells senders apart for the limit. Fixed is good enough: who finds two that share a place delays answers to one of them.
const SENDERS: HashKey = HashKey::fixed();

/// Answers the refused packets of the batch.
pub fn run(batch: &mut Batch, limiter: &mut Limiter, context: &Context<'_>) {
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
        let received = &mut batch.frames[i];
        let network = &*context.view.network;
        let own = network.interface(received.interface).mac;
        let mut answer = [0; LONGEST];
        let Some(length) = write(&mut answer, received.frame.bytes(), word, own, network.sources(received.interface))
        else {
            continue;
        };
        if received.frame.replace(&answer[..length]) {
            context.counters.dropped(reason);
            batch.verdicts[i] = Verdict::Answer(received.interface);
        }
    }
}

/// What a sender hears.
#[derive(Clone, Copy)]
enum Word {
    Error(Error),
    Reset,
}

fn what_to_say(batch: &Batch, i: usize, reason: DropReason, context: &Context<'_>) -> Option<Word> {
    let prohibited = || {
        let (_, egress) = context.view.policy.endpoint_with(batch.endpoints[i]);
        let word = if batch.heads[i].kind == Kind::Tcp { Word::Reset } else { Word::Error(Error::Prohibited) };
        (egress.spec.on_exhaustion == OnExhaustion::Reject).then_some(word)
    };
    match reason {
        DropReason::Ttl => Some(Word::Error(Error::TtlExceeded)),
        DropReason::NoRoute => Some(Word::Error(Error::NoRoute)),
        DropReason::TooBig => Some(Word::Error(Error::PacketTooBig { mtu: batch.mtus[i] })),
        DropReason::PortsExhausted | DropReason::Quota | DropReason::SessionTableFull | DropReason::NoVip => {
            prohibited()
        }
        _ => None,
    }
}

/// Writes the whole frame of an answer to `asked`; its length.
fn write(
    answer: &mut [u8; LONGEST],
    asked: &[u8],
    word: Word,
    own: Mac,
    (v4, v6): (u32, Option<crate::address::V6>),
) -> Option<usize> {
    let (link, packet) = asked.split_first_chunk::<{ ethernet::HEADER }>()?;
    let (header, into) = answer.split_at_mut(ethernet::HEADER);
    header.copy_from_slice(link);
    ethernet::set_link(header, &ethernet::link(ethernet::source(link)?, own));
    let length = match (word, packet.first()? >> 4) {
        (Word::Reset, _) => reset(into, packet),
        (Word::Error(error), 4) => compose_v4(into, packet, error, v4),
        (Word::Error(error), _) => compose_v6(into, packet, error, v6?),
    }?;
    Some(ethernet::HEADER + length)
}
