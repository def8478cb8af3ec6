//! Replies to health checks of a Service (`healthCheckNodePort`) at its VIP, statelessly, segment by segment
//! ([`crate::wire::health_responder`]): no host has that address. At the node's own address the control thread replies.
//! Replies are rate-limited ([`crate::stage::reply_limiter::ProbeLimiter`]). Source ranges of the Service don't apply:
//! they are those of its clients, and probers have other addresses.

use crate::flow::drop_reason::DropReason;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind};
use crate::stage::context::{Context, PacketFamily};
use crate::stage::icmp_reply;
use crate::stage::reply_limiter::ReplyLimiter;
use crate::wire::health_responder;

/// Replies to the health check segments of the batch.
pub fn run<A: PacketFamily>(batch: &mut Batch, limiter: &mut ReplyLimiter, context: &Context<'_>) {
    let Context { counters, now, .. } = *context;
    for i in batch.undecided_of::<A>().and(batch.health_checks) {
        let sender = A::tuples(batch)[i].source;
        let check = HealthCheck::of::<A>(batch, i, context);
        let is_open = check.is_some_and(|check| check.is_open);
        if is_open {
            limiter.probes.confirm(sender, now);
        }
        respond(batch, i, check, context, || {
            let is_allowed = limiter.probes.allow(sender, is_open, now);
            counters.replies_suppressed.add((!is_allowed).into());
            is_allowed
        });
    }
}

/// Replies to a health check segment as if the rate limit allowed it.
pub fn trace<A: PacketFamily>(batch: &mut Batch, i: usize, context: &Context<'_>) {
    let check = HealthCheck::of::<A>(batch, i, context);
    respond(batch, i, check, context, || true);
}

/// A segment of a health check.
#[derive(Clone, Copy)]
struct HealthCheck<'a> {
    /// The complete HTTP response.
    http: &'a [u8],
    /// The server's initial sequence number.
    cookie: u32,
    /// Whether it belongs to an open connection.
    is_open: bool,
}

impl<'a> HealthCheck<'a> {
    /// The packet as a segment of a health check; `None` if it isn't TCP.
    fn of<A: PacketFamily>(batch: &Batch, i: usize, context: &Context<'a>) -> Option<Self> {
        if batch.headers[i].kind != PacketKind::Tcp {
            return None;
        }
        let http = context.snapshot.policy.service(batch.frontends[i].service)?.health_response()?;
        let cookie = context.rules.cookie_key.hash(&A::tuples(batch)[i]) as u32;
        Some(Self { http, cookie, is_open: health_responder::is_open(&batch.segments[i], cookie, http) })
    }
}

/// Decides on a segment. `is_allowed` is asked for each reply.
fn respond(
    batch: &mut Batch,
    i: usize,
    check: Option<HealthCheck<'_>>,
    context: &Context<'_>,
    is_allowed: impl FnOnce() -> bool,
) {
    let Some(HealthCheck { http, cookie, .. }) = check else {
        return batch.decide(i, Verdict::Drop(DropReason::NoService));
    };
    let verdict = icmp_reply::reply(batch, i, context.snapshot, |into, packet| {
        health_responder::reply(into, packet, cookie, http).filter(|_| is_allowed())
    });
    batch.decide(i, verdict.unwrap_or(Verdict::Consume));
}
