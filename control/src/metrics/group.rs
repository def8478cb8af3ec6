//! Metrics of the group: membership, lease, peer links, replication and shards.

use std::collections::BTreeSet;

use vipgate_dataplane::policy::compiled::Vip;
use vipgate_dataplane::policy::members::Authentication;

use super::definitions as defined;
use crate::admin::ports;
use crate::metric::{Family, Metric};
use crate::peer::PeerStatus;
use crate::state::GatewayState;
use crate::state::lease::LeaseStatus;

/// Collects membership, lease, peer link and replication metrics.
pub(super) fn collect(state: &GatewayState) -> Vec<Family> {
    let group = state.group.load();
    let policy = state.policy.load();
    let names = policy.peers.iter().map(|peer| &peer.name).chain(group.links.peers.keys());
    let peers: BTreeSet<_> = names.filter(|name| ***name != *state.name).collect();
    let each = |metric: &'static Metric, field: fn(&PeerStatus) -> u64| {
        metric.by_label(peers.iter().map(|name| (&***name, group.links.peers.get(*name).map_or(0, field))))
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
        defined::ACTIVE.single(group.is_active().into()),
        defined::DRAINING.single(group.draining.into()),
        defined::DRAINS_REFUSED.single(group.refused_drains.count),
        defined::ACTIVE_MEMBERS.single(group.active_count() as u64),
        defined::VIEW.single(group.view.number),
        defined::LEASE.family(lease.into_iter().map(|ms| (vec![], ms.into())).collect()),
        each(&defined::PEER_UP, |peer| peer.linked.into()),
        defined::PEER_AUTHENTICATED.by_label(peers.iter().map(|name| (&***name, is_authenticated(name).into()))),
        defined::PEER_REFUSED.single(refused),
        each(&defined::RECORDS_SENT, |peer| peer.replication.sent),
        each(&defined::RECORDS_APPLIED, |peer| peer.replication.received),
        each(&defined::RECORDS_QUEUED, |peer| peer.replication.queued_bytes as u64),
        each(&defined::FULL_SYNCS, |peer| peer.replication.resyncs),
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
    defined::PORT_BLOCKS.family(blocks.collect())
}

/// Number of port blocks in this gateway's shards of a VIP, and of usable ports in them.
fn own_ports(vip: &Vip, state: &GatewayState) -> (u64, u64) {
    let (blocks, ports) = ports::blocks_and_ports(&vip.shards.own_blocks(), vip, state);
    (blocks.into(), ports.into())
}

/// Ports of VIPs that are split into shards, and port exhaustion.
pub(super) fn shards(state: &GatewayState) -> [Family; 2] {
    let compiled = state.compiled.load();
    let split = compiled.vips().filter(|vip| vip.shards.is_distributed());
    let own = split.map(|vip| (vip.address.to_string(), own_ports(vip, state).1));
    let refused = compiled.vips().flat_map(|vip| {
        let refused = vip.ports.pool.refused();
        let scopes = [("vip", refused.whole), ("shard", refused.in_shard)];
        scopes.map(|(scope, count)| (vec![("vip", vip.address.to_string()), ("scope", scope.to_owned())], count))
    });
    // Only VIPs with exhaustion, to limit the number of series.
    let refused = refused.filter(|(_, count)| *count > 0).collect();
    [defined::VIP_SHARD_PORTS.by_label(own), defined::VIP_PORTS_EXHAUSTED.family(refused)]
}
