//! Fast forwarding of replies from outside to an SNAT port in another gateway's shard: with ECMP over gateways, most
//! packets are of this kind. The port alone determines the owner, so a packet enters the tunnel right after parsing,
//! without a session lookup; the owner checks the sender. All others, and packets that can't be encapsulated whole, are
//! left to the later stages, which do the same and everything else.

use crate::flow::direction::Direction;
use crate::flow::ids::{GatewayId, Owner, TunnelRemote};
use crate::flow::tuple::Tuple;
use crate::io::batch::{Batch, PacketSet, TunnelDestination};
use crate::policy::compiled::{Family, Policy};
use crate::policy::spec::Role;
use crate::session::Sessions;
use crate::stage::context::{Context, PacketFamily};
use crate::stage::encap;

/// Forwards the fast-parsed replies of the batch to their owners.
pub fn run<A: PacketFamily>(batch: &mut Batch, sessions: &Sessions, context: &Context<'_>) {
    let snapshot = context.snapshot;
    if !snapshot.tunnels.accepts_gateways() {
        return;
    }
    let mut travelling = PacketSet::default();
    for i in batch.undecided_of::<A>().and(batch.plain) {
        if batch.headers[i].sides != Role::Outside.sides() || batch.frames[i].is_from_peer() {
            continue;
        }
        let key = &A::keys(batch)[i];
        let Some(remote) = owner(&key.tuple(), &snapshot.policy) else { continue };
        let hash = sessions.hash_key(key);
        batch.hashes[i] = hash;
        batch.frames[i].frame.prefetch_headroom();
        batch.tunnel_destinations[i] = TunnelDestination { remote: TunnelRemote::Gateway(remote), hop_count: 1 };
        travelling.insert(i);
    }
    for i in travelling {
        let TunnelDestination { remote, .. } = batch.tunnel_destinations[i];
        let tunnel = snapshot.tunnels.to(remote);
        if let Some(verdict) = tunnel.and_then(|tunnel| encap::encap_unfragmented(batch, i, tunnel, &snapshot.network))
        {
            batch.directions[i] = Direction::PeerOut;
            batch.decide(i, verdict);
        }
    }
}

/// The other gateway that owns the packet's destination port, unless a frontend listens there.
#[inline]
fn owner<A: Family>(tuple: &Tuple<A>, policy: &Policy) -> Option<GatewayId> {
    let vip = policy.vip(tuple.destination)?;
    let Owner::Other(to) = vip.shards.owner_of_port(tuple.destination_port) else { return None };
    policy.frontend(&tuple.receiver()).is_none().then_some(to)
}
