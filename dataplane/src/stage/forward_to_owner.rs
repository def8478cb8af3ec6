//! Fast forwarding of replies from outside to an SNAT port in another gateway's shard: with ECMP over gateways, most
//! packets are of this kind. The port alone determines the owner, so a packet enters the tunnel right after parsing,
//! without a session lookup; the owner checks the sender. All others, and packets that can't be encapsulated whole, are
//! left to the later stages, which do the same and everything else.

use crate::flow::direction::Direction;
use crate::flow::ids::{GatewayId, Owner, TunnelRemote};
use crate::flow::key::Key;
use crate::flow::tunnel_metadata::TunnelMetadata;
use crate::flow::verdict::Verdict;
use crate::io::batch::{BATCH_SIZE, Batch, FastPathArrays, PacketSet};
use crate::policy::compiled::{Policy, Vip};
use crate::policy::spec::Role;
use crate::stage::context::{Context, PacketFamily};
use crate::stage::encap;

/// Forwards the fast-parsed replies of the batch to their owners.
#[inline(never)]
pub fn run<A: PacketFamily>(batch: &mut Batch, context: &Context<'_>) {
    let snapshot = context.snapshot;
    let packets = batch.undecided_of::<A>().and(batch.plain);
    if packets.is_empty() || !snapshot.tunnels.accepts_gateways() {
        return;
    }
    let FastPathArrays { frames, headers, keys, hashes, directions, verdicts, .. } = A::fast_path_arrays(batch);
    let (mut owners, mut travelling) = ([GatewayId(0); BATCH_SIZE], PacketSet::default());
    let mut latest = None;
    for i in packets {
        if headers[i].sides != Role::Outside.sides() || frames[i].is_from_peer() {
            continue;
        }
        let Some(owner) = owner(&keys[i], &snapshot.policy, &mut latest) else { continue };
        frames[i].frame.prefetch_headroom();
        owners[i] = owner;
        travelling.insert(i);
    }
    let vni = TunnelMetadata { sides: Role::Outside.sides(), hop_count: 1, requests_port: false }.vni();
    let mut forwarded = PacketSet::default();
    for i in travelling {
        let Some(tunnel) = snapshot.tunnels.to(TunnelRemote::Gateway(owners[i])) else { continue };
        // The same hash as in other stages, so that all packets of a flow take one path.
        let entropy = encap::entropy(hashes[i]);
        let Some(interface) = encap::encap_unfragmented(&mut frames[i].frame, tunnel, vni, entropy) else { continue };
        directions[i] = Direction::PeerOut;
        verdicts[i] = Verdict::Forward(interface);
        forwarded.insert(i);
    }
    batch.mark_decided(forwarded);
}

/// The other gateway that owns the packet's destination port, unless a frontend listens there. `latest` is the VIP of
/// an earlier packet, and its address in network byte order: mostly the same.
#[inline]
fn owner<'a, A: PacketFamily>(
    key: &Key<A>,
    policy: &'a Policy,
    latest: &mut Option<(A, &'a Vip)>,
) -> Option<GatewayId> {
    let ([_, destination], [_, _, high, low]) = key.in_packet();
    let vip = match *latest {
        Some((address, vip)) if address == destination => vip,
        _ => {
            let vip = policy.vip(destination.swap_network_order())?;
            *latest = Some((destination, vip));
            vip
        }
    };
    let port = u16::from_be_bytes([high, low]);
    let Owner::Other(to) = vip.shards.owner_of_port(port) else { return None };
    let may_be_frontend = policy.may_have_frontend(destination.swap_network_order(), port);
    (!may_be_frontend || policy.frontend(&key.tuple().receiver()).is_none()).then_some(to)
}
