//! Backup gateways of a shard: the failover order after its home gateway.
//!
//! Rendezvous hashing over the VIP's group and home. So the shards of a failed gateway are spread over all others, and
//! VIPs with the same group and home fail over to the same gateway, and with them all sessions of an endpoint.

use std::cmp::Reverse;

use super::{GatewayId, Gateways};
use crate::fingerprint::{Fingerprint, mix};

/// Backups of a shard, at most. A shard is without an owner only if its home and all backups have failed.
pub const MAX_BACKUPS: usize = 3;

impl Gateways<'_> {
    /// The backups of `home` among the candidates, in failover order. Gateways without `capacity` for another VIP come
    /// last: they take over only if no other gateway can.
    pub(in crate::compiler) fn backups(
        &self,
        group: &str,
        home: GatewayId,
        candidates: &[GatewayId],
        capacity: &[usize],
    ) -> Vec<GatewayId> {
        let key = mix(self.all[home].seed ^ Fingerprint::of(group.as_bytes()));
        let others = candidates.iter().copied().filter(|id| *id != home);
        let mut order: Vec<_> = others.map(|id| (capacity[id] == 0, Reverse(self.score(id, key)), id)).collect();
        // A VIP of a hundred gateways has a hundred such lists: only the part that is used is sorted.
        if order.len() > MAX_BACKUPS {
            order.select_nth_unstable(MAX_BACKUPS);
            order.truncate(MAX_BACKUPS);
        }
        order.sort_unstable();
        order.into_iter().map(|(.., id)| id).collect()
    }
}
