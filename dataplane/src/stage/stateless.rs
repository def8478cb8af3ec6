//! Services without sessions, from policy alone. What backends answer leaves as the VIP and port of the frontend that they serve; so a
//! client hears the right one also after its session was forgotten, or where another gateway has it. And what a client says in a connection
//! that another gateway has, or had, goes to the backend that it would get anew: the same one, unless backends have changed since.

use crate::batch::{Batch, Lane};
use crate::counters::{Direction, DropReason};
use crate::ids::Ids;
use crate::pipeline::Context;
use crate::session::entry::{Entry, Flags};
use crate::session::tuple::Tuple;
use crate::snapshot::service::FrontendId;
use crate::stage::rewrite::{self, OnWire, write_payload};
use crate::stage::{route, serve};
use crate::verdict::Verdict;

/// Sends on what backends answer without sessions.
pub fn run<A: OnWire>(batch: &mut Batch, ids: &mut Ids, context: &Context<'_>) {
    for i in batch.open_of::<A>().and(batch.stateless) {
        let tuple = A::tuples(batch)[i];
        let direction = direction(batch, i);
        let Some(to) = translated::<A>(batch, i, context) else {
            batch.decide(i, Verdict::Drop(DropReason::NoSession));
            continue;
        };
        let Some(hop) = route::stateless_hop(batch, i, to.destination, context.view) else { continue };
        let entry = Entry::new(tuple, to, direction, Flags::default());
        let head = batch.heads[i];
        let Some((headers, payload)) = batch.frames[i].frame.bytes_mut().split_at_mut_checked(head.l4.into()) else {
            continue;
        };
        A::write_header(headers, &entry);
        write_payload(payload, head.kind, entry.to_ports(), entry.l4_delta());
        batch.directions[i] = direction;
        if direction == Direction::ServiceReply && batch.renumber.contains(i) {
            rewrite::renumber::<A>(batch, i, ids);
        }
        rewrite::send_on(batch, i, hop, context.view);
    }
}

/// Which way a packet goes: what isn't a client's is a backend's answer.
pub fn direction(batch: &Batch, i: usize) -> Direction {
    if batch.inbound.contains(i) { Direction::Inbound } else { Direction::ServiceReply }
}

/// A packet as it goes on; `None` if that isn't known.
pub fn translated<A: Lane>(batch: &Batch, i: usize, context: &Context<'_>) -> Option<Tuple<A>> {
    let (tuple, frontend) = (&A::tuples(batch)[i], batch.frontends[i]);
    match direction(batch, i) {
        Direction::Inbound => serve::without_session(tuple, frontend, batch.heads[i].sides, context),
        _ => as_frontend(tuple, frontend, context),
    }
}

/// A backend's packet as its client knows it.
fn as_frontend<A: Lane>(tuple: &Tuple<A>, id: FrontendId, context: &Context<'_>) -> Option<Tuple<A>> {
    let service = context.view.policy.service(id.service)?;
    let port = service.spec.ports.get(usize::from(id.port))?;
    let source = *A::half(service).vips.first()?;
    Some(Tuple { source, source_port: port.port, ..*tuple })
}
