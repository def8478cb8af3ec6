//! Metrics of the group: membership, lease, peer links, replication and shards.

use std::collections::BTreeSet;
use std::sync::Arc;

use vipgate_dataplane::policy::compiled::Vip;
use vipgate_dataplane::policy::members::Authentication;

use crate::admin::ports;
use crate::metric::{Family, Kind, Labels, family};
use crate::peer::PeerStatus;
use crate::state::GatewayState;
use crate::state::lease::LeaseStatus;

/// Collects membership, lease, peer link and replication metrics.
pub(super) fn collect(state: &GatewayState) -> Vec<Family> {
    use Kind::{Counter, Gauge, Milliseconds};
    let group = state.group.load();
    let policy = state.policy.load();
    let names = policy.peers.iter().map(|peer| &peer.name).chain(group.links.peers.keys());
    let peers: BTreeSet<_> = names.filter(|name| ***name != *state.name).collect();
    let each = |field: fn(&PeerStatus) -> u64| -> Vec<(Labels, u64)> {
        let value = |name: &Arc<str>| (vec![("peer", name.to_string())], group.links.peers.get(name).map_or(0, field));
        peers.iter().copied().map(value).collect()
    };
    let is_authenticated = |name: &str| {
        let member = group.spec.gateways.iter().find(|member| *member.name == *name);
        member.is_some_and(|member| matches!(member.authentication, Authentication::Tagged { .. }))
    };
    let lease = match group.lease() {
        LeaseStatus::NotRequired => None,
        LeaseStatus::Held(ms) => Some(ms),
        LeaseStatus::Expired => Some(0),
    };
    let refused = group.links.unauthenticated + group.links.peers.values().map(|peer| peer.rejections).sum::<u64>();
    vec![
        family("serving", "Whether this gateway is an active member", Gauge, vec![(vec![], group.is_active().into())]),
        family("draining", "Whether this gateway is draining", Gauge, vec![(vec![], group.draining.into())]),
        family("members_serving", "Number of active members", Gauge, vec![(vec![], group.active_count() as u64)]),
        family("view", "Number of the latest membership view; 0: none yet", Gauge, vec![(vec![], group.view.number)]),
        family(
            "lease_seconds",
            "Remaining time of the lease, without which no sessions are opened; absent if none is required",
            Milliseconds,
            lease.into_iter().map(|ms| (vec![], ms.into())).collect(),
        ),
        family("peer_up", "Whether the link to a peer is up", Gauge, each(|peer| peer.linked.into())),
        family(
            "peer_authenticated",
            "Whether tunnel packets from a peer must carry a valid tag",
            Gauge,
            peers.iter().map(|name| (vec![("peer", name.to_string())], is_authenticated(name).into())).collect(),
        ),
        family("peer_refused", "Peer links refused", Counter, vec![(vec![], refused)]),
        family("copies_sent", "Session records sent to a peer", Counter, each(|peer| peer.replication.sent)),
        family("copies_taken", "Session records applied from a peer", Counter, each(|peer| peer.replication.received)),
        family(
            "copies_queued_bytes",
            "Bytes of session records queued for a peer",
            Gauge,
            each(|peer| peer.replication.queued_bytes as u64),
        ),
        family("copies_resyncs", "Full syncs of sessions to a peer", Counter, each(|peer| peer.replication.resyncs)),
    ]
}

/// Port blocks, by state.
pub(super) fn port_blocks(state: &GatewayState) -> Family {
    let compiled = state.compiled.load();
    let blocks = compiled.vips().flat_map(|vip| {
        let own = own_ports(vip, state).0;
        let claimed = ports::claimed_blocks(vip).into();
        let elsewhere = (state.port_blocks as u64).saturating_sub(own);
        let states = [("claimed", claimed), ("free", own.saturating_sub(claimed)), ("elsewhere", elsewhere)];
        states.map(|(name, count)| (vec![("vip", vip.address.to_string()), ("state", name.to_owned())], count))
    });
    let help = "Blocks of 64 ports by VIP: claimed by a worker, free, or elsewhere: in shards of other gateways";
    family("port_blocks", help, Kind::Gauge, blocks.collect())
}

/// Number of port blocks in this gateway's shards of a VIP, and of usable ports in them.
fn own_ports(vip: &Vip, state: &GatewayState) -> (u64, u64) {
    let (blocks, ports) = ports::blocks_and_ports(&vip.shards.own_blocks(), vip, state);
    (blocks.into(), ports.into())
}

/// Ports of VIPs that are split into shards, and port exhaustion.
pub(super) fn shards(state: &GatewayState) -> [Family; 2] {
    let compiled = state.compiled.load();
    let label = |vip: &Vip| ("vip", vip.address.to_string());
    let split = compiled.vips().filter(|vip| vip.shards.is_distributed());
    let own = split.map(|vip| (vec![label(vip)], own_ports(vip, state).1)).collect();
    let refused = compiled.vips().flat_map(|vip| {
        let refused = vip.ports.pool.refused();
        let scopes = [("vip", refused.whole), ("shard", refused.in_shard)];
        scopes.map(|(scope, count)| (vec![label(vip), ("scope", scope.to_owned())], count))
    });
    // Only VIPs with exhaustion, to limit the number of series.
    let refused = refused.filter(|(_, count)| *count > 0).collect();
    [
        family(
            "vip_shard_ports",
            "Ports of this gateway's shards of a VIP that is split: the maximum of sessions toward one destination",
            Kind::Gauge,
            own,
        ),
        family(
            "vip_ports_exhausted",
            "Packets refused by port exhaustion, by scope: whole VIP, or shard (others may have had free ports)",
            Kind::Counter,
            refused,
        ),
    ]
}
