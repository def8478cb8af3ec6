//! Health checks of Services, asked at the VIP itself: nobody has that address, so the gateway answers, segment by segment
//! ([`crate::wire::probe`]). On the node's own address the control thread does.

use crate::batch::{Batch, Kind, Lane};
use crate::counters::DropReason;
use crate::pipeline::Context;
use crate::stage::say;
use crate::verdict::Verdict;
use crate::wire::probe;

/// Answers the segments of health checks.
pub fn run<A: Lane>(batch: &mut Batch, context: &Context<'_>) {
    for i in batch.open_of::<A>().and(batch.health) {
        let service = context.view.policy.service(batch.frontends[i].service);
        let answer = service.and_then(|service| service.health_answer()).filter(|_| batch.heads[i].kind == Kind::Tcp);
        let cookie = context.rules.secret.hash(&A::tuples(batch)[i]) as u32;
        let verdict = answer.and_then(|http| {
            say::answer(batch, i, context.view, |into, packet| probe::answer(into, packet, cookie, http))
        });
        let unanswered = if answer.is_some() { Verdict::Heard } else { Verdict::Drop(DropReason::NoService) };
        batch.decide(i, verdict.unwrap_or(unanswered));
    }
}
