//! Metrics of the gateway among others.

use std::collections::BTreeSet;
use std::sync::Arc;

use vipgate_dataplane::snapshot::members::Authentication;
use vipgate_dataplane::snapshot::policy::Vip;

use super::families::{Family, Kind, Labels, family};
use crate::admin::ports;
use crate::gateway::group::LeaseStatus;
use crate::gateway::state::GatewayState;
use crate::peer::PeerStatus;

/// Everything about others.
pub(super) fn read(state: &GatewayState) -> Vec<Family> {
    use Kind::{Counter, Gauge, Milliseconds};
    let group = state.group.load();
    let policy = state.policy.load();
    let names = policy.peers.iter().map(|peer| &peer.name).chain(group.links.peers.keys());
    let others: BTreeSet<_> = names.filter(|name| ***name != *state.name).collect();
    let each = |of: fn(&PeerStatus) -> u64| -> Vec<(Labels, u64)> {
        let value = |name: &Arc<str>| (vec![("peer", name.to_string())], group.links.peers.get(name).map_or(0, of));
        others.iter().copied().map(value).collect()
    };
    let is_authenticated = |name: &str| {
        let member = group.spec.gateways.iter().find(|member| *member.name == *name);
        member.is_some_and(|member| matches!(member.authentication, Authentication::Tagged { .. }))
    };
    let lease = match group.lease() {
        LeaseStatus::NotNeeded => None,
        LeaseStatus::Held(ms) => Some(ms),
        LeaseStatus::Lapsed => Some(0),
    };
    let refused = group.links.strangers + group.links.peers.values().map(|peer| peer.refused).sum::<u64>();
    vec![
        family("serving", "Whether this gateway serves", Gauge, vec![(vec![], group.serves().into())]),
        family(
            "draining",
            "Whether somebody wants this gateway to stop serving",
            Gauge,
            vec![(vec![], group.draining.into())],
        ),
        family("members_serving", "Gateways that serve", Gauge, vec![(vec![], group.serving() as u64)]),
        family(
            "view",
            "Number of the last word on which gateways serve; 0: there was none",
            Gauge,
            vec![(vec![], group.view.number)],
        ),
        family(
            "lease_seconds",
            "What is left of the lease, without which no sessions are opened; absent when none is needed",
            Milliseconds,
            lease.into_iter().map(|ms| (vec![], ms.into())).collect(),
        ),
        family("peer_up", "Whether there is a link to a gateway", Gauge, each(|peer| peer.linked.into())),
        family(
            "peer_authenticated",
            "Whether packets out of a gateway's tunnel must have its tag",
            Gauge,
            others.iter().map(|name| (vec![("peer", name.to_string())], is_authenticated(name).into())).collect(),
        ),
        family("peer_refused", "Links that were refused", Counter, vec![(vec![], refused)]),
        family("copies_sent", "Copies of sessions sent to a gateway", Counter, each(|peer| peer.copies.sent)),
        family("copies_taken", "Copies of sessions taken from a gateway", Counter, each(|peer| peer.copies.taken)),
        family(
            "copies_queued_bytes",
            "Bytes of copies that wait to be sent to a gateway",
            Gauge,
            each(|peer| peer.copies.queued as u64),
        ),
        family(
            "copies_resyncs",
            "How often a gateway was told all sessions that it has copies of",
            Counter,
            each(|peer| peer.copies.resyncs),
        ),
    ]
}

/// Blocks of ports, by who has them.
pub(super) fn port_blocks(state: &GatewayState) -> Family {
    let compiled = state.compiled.load();
    let blocks = compiled.vips().flat_map(|vip| {
        let own = own_ports(vip, state).0;
        let claimed = ports::claimed(vip).into();
        let elsewhere = (state.port_blocks as u64).saturating_sub(own);
        let states = [("claimed", claimed), ("free", own.saturating_sub(claimed)), ("elsewhere", elsewhere)];
        states.map(|(name, count)| (vec![("vip", vip.address.to_string()), ("state", name.to_owned())], count))
    });
    let help = "Blocks of 64 ports by VIP: claimed by a worker, free, or in shares that aren't this gateway's";
    family("port_blocks", help, Kind::Gauge, blocks.collect())
}

/// Blocks in the range that are in this gateway's shards of a VIP, and ports that may be given out of them.
fn own_ports(vip: &Vip, state: &GatewayState) -> (u64, u64) {
    let (blocks, ports) = ports::size(&vip.shares.own_blocks(), vip, state);
    (blocks.into(), ports.into())
}

/// How VIPs' ports are cut in shards, and which ran out.
pub(super) fn shards(state: &GatewayState) -> [Family; 2] {
    let compiled = state.compiled.load();
    let label = |vip: &Vip| ("vip", vip.address.to_string());
    let cut = compiled.vips().filter(|vip| vip.shares.is_shared());
    let own = cut.map(|vip| (vec![label(vip)], own_ports(vip, state).1)).collect();
    let refused = compiled.vips().flat_map(|vip| {
        let refused = vip.pool.refused();
        let scopes = [("vip", refused.whole), ("shard", refused.in_shard)];
        scopes.map(|(scope, count)| (vec![label(vip), ("scope", scope.to_owned())], count))
    });
    // Thousands of VIPs never run out.
    let refused = refused.filter(|(_, count)| *count > 0).collect();
    [
        family(
            "vip_shard_ports",
            "Ports that this gateway may give out of a VIP that is cut in shards: as many sessions toward one destination",
            Kind::Gauge,
            own,
        ),
        family(
            "vip_ports_exhausted",
            "Packets refused for want of a port, by VIP: of the whole VIP, or of a shard while others may have had free ones",
            Kind::Counter,
            refused,
        ),
    ]
}
