//! The short way for what a network that spreads packets over gateways brings most of: answers from outside to a port in another
//! gateway's share. They go into the tunnel as soon as their headers are read, without a look at this gateway's sessions: whose they
//! are, the port alone says. Who may send them is asked where their session is. All others, and what can't be wrapped as it is,
//! are left to the stages behind, which do the same and everything else.

use crate::batch::{Batch, Lane, Packets, Travel};
use crate::counters::Direction;
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::tuple::Tuple;
use crate::snapshot::members::GatewayId;
use crate::snapshot::policy::{Family, Policy};
use crate::snapshot::shares::Owner;
use crate::snapshot::spec::Role;
use crate::snapshot::tunnels::End;
use crate::stage::wrap;

/// Sends the plain answers of the batch to those whose they are.
pub fn run<A: Lane>(batch: &mut Batch, sessions: &Sessions, context: &Context<'_>) {
    let view = context.view;
    if !view.tunnels.is_open() {
        return;
    }
    let mut travelling = Packets::default();
    for i in batch.open_of::<A>().and(batch.plain) {
        if batch.heads[i].sides != Role::Outside.sides() || batch.frames[i].is_from_peer() {
            continue;
        }
        let key = &A::keys(batch)[i];
        let Some(to) = owner(&key.tuple(), &view.policy) else { continue };
        let hash = sessions.hash_key(key);
        batch.hashes[i] = hash;
        batch.frames[i].frame.prefetch_headroom();
        batch.travels[i] = Travel { to: End::Gateway(to), leg: 1 };
        travelling.insert(i);
    }
    for i in travelling {
        let Travel { to, .. } = batch.travels[i];
        let way = view.tunnels.to(to);
        if let Some(verdict) = way.and_then(|way| wrap::whole(batch, i, way, &view.network)) {
            batch.directions[i] = Direction::PeerOut;
            batch.decide(i, verdict);
        }
    }
}

/// The other gateway that has the port which a packet is for, if that is one of sessions.
#[inline]
fn owner<A: Family>(tuple: &Tuple<A>, policy: &Policy) -> Option<GatewayId> {
    let vip = policy.vip(tuple.destination)?;
    let Owner::Other(to) = vip.shares.owner_of_port(tuple.destination_port) else { return None };
    policy.frontend(&tuple.receiver()).is_none().then_some(to)
}
