//! Replies to health checks of a Service (`healthCheckNodePort`) at its VIP, statelessly, segment by segment
//! ([`crate::wire::health_responder`]): no host has that address. At the node's own address the control thread replies.

use crate::flow::drop_reason::DropReason;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind};
use crate::stage::context::{Context, PacketFamily};
use crate::stage::icmp_reply;
use crate::wire::health_responder;

/// Replies to the health check segments of the batch.
pub fn run<A: PacketFamily>(batch: &mut Batch, context: &Context<'_>) {
    for i in batch.undecided_of::<A>().and(batch.health_checks) {
        let service = context.snapshot.policy.service(batch.frontends[i].service);
        let http =
            service.and_then(|service| service.health_response()).filter(|_| batch.headers[i].kind == PacketKind::Tcp);
        let cookie = context.rules.cookie_key.hash(&A::tuples(batch)[i]) as u32;
        let verdict = http.and_then(|http| {
            icmp_reply::reply(batch, i, context.snapshot, |into, packet| {
                health_responder::reply(into, packet, cookie, http)
            })
        });
        let without_reply = if http.is_some() { Verdict::Consume } else { Verdict::Drop(DropReason::NoService) };
        batch.decide(i, verdict.unwrap_or(without_reply));
    }
}
