//! Metrics of the gateway among others.

use std::collections::BTreeSet;
use std::sync::Arc;

use vipgate_dataplane::snapshot::shares::Owner;

use super::families::{Family, Kind, Labels, family};
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
        let others = vip.shares.list().iter().filter(|share| share.owner != Owner::This);
        let elsewhere = others.map(|share| share.blocks().map_or(state.port_blocks, |it| it.count() as usize)).sum();
        let elsewhere = state.port_blocks.min(elsewhere);
        let claimed = vip.pool.claimed();
        let free = (state.port_blocks - elsewhere).saturating_sub(claimed);
        let states = [("claimed", claimed), ("free", free), ("elsewhere", elsewhere)];
        states.map(|(name, count)| (vec![("vip", vip.address.to_string()), ("state", name.to_owned())], count as u64))
    });
    let help = "Blocks of 64 ports by VIP: claimed by a worker, free, or in shares that aren't this gateway's";
    family("port_blocks", help, Kind::Gauge, blocks.collect())
}
