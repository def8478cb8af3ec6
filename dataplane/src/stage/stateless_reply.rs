//! Service packets without a session, translated from policy alone. A backend's reply gets the frontend's VIP and port
//! as source, so a client receives replies also after its session has ended, or if another gateway has it. A client's
//! packet of a connection that another gateway has, or had, goes to the backend that it would get now: the same one,
//! unless the backends have changed.

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::FrontendId;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::batch::Batch;
use crate::stage::context::{Context, PacketFamily};
use crate::stage::rewrite::{self, HeaderRewrite};
use crate::stage::{load_balance, route};
use crate::wire::ip_id::IpIdAllocator;

/// Translates and forwards the Service packets of the batch that have no session.
pub fn run<A: HeaderRewrite>(batch: &mut Batch, ids: &mut IpIdAllocator, context: &Context<'_>) {
    for i in batch.undecided_of::<A>().and(batch.stateless_replies) {
        let direction = direction(batch, i);
        let Some(to) = translated::<A>(batch, i, context) else {
            batch.decide(i, Verdict::Drop(DropReason::NoSession));
            continue;
        };
        let Some(hop) = route::stateless_next_hop(batch, i, to.destination, context.snapshot) else { continue };
        rewrite::translate::<A>(batch, i, to, direction);
        if direction == Direction::ServiceReply && batch.new_ip_id.contains(i) {
            rewrite::rewrite_ip_id::<A>(batch, i, ids);
        }
        rewrite::forward(batch, i, hop, context.snapshot);
    }
}

/// The direction of a packet: inbound from a client, otherwise a backend's reply.
pub fn direction(batch: &Batch, i: usize) -> Direction {
    if batch.new_inbound.contains(i) { Direction::Inbound } else { Direction::ServiceReply }
}

/// The translated tuple of a packet; `None` if there is no frontend or backend for it.
pub fn translated<A: PacketFamily>(batch: &Batch, i: usize, context: &Context<'_>) -> Option<Tuple<A>> {
    let (tuple, frontend) = (&A::tuples(batch)[i], batch.frontends[i]);
    match direction(batch, i) {
        Direction::Inbound => {
            let target = load_balance::stateless_backend(tuple, frontend, batch.headers[i].sides, context)?;
            Some(target.dnat(tuple))
        }
        _ => as_frontend(tuple, frontend, context),
    }
}

/// A backend's packet with the frontend's address and port as source.
fn as_frontend<A: PacketFamily>(tuple: &Tuple<A>, id: FrontendId, context: &Context<'_>) -> Option<Tuple<A>> {
    let service = context.snapshot.policy.service(id.service)?;
    let port = service.spec.ports.get(usize::from(id.port))?;
    let source = *A::part(service).vips.first()?;
    Some(Tuple { source, source_port: port.port, ..*tuple })
}
