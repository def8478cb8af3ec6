//! Who serves what a gateway was dealt while it doesn't.
//!
//! Rendezvous once more: over the group of a VIP and the VIP's home. So what a dead gateway had is spread over all others, and
//! VIPs of one group that have one home go to one place: with them, all sessions of an endpoint.

use std::cmp::Reverse;

use super::{GatewayId, Gateways};
use crate::policy::fingerprint::{Fingerprint, mix};

/// Stand-ins that a share has at most: as many gateways and one more must be gone before nobody serves it.
pub const MOST_BACKUPS: usize = 3;

impl Gateways<'_> {
    /// Who of `among` stands in for `home`, the first one first. Those that have no `room` for another VIP come last: they take
    /// it rather than let it be nobody's.
    pub(in crate::policy) fn backups(
        &self,
        group: &str,
        home: GatewayId,
        among: &[GatewayId],
        room: &[usize],
    ) -> Vec<GatewayId> {
        let key = mix(self.all[home].seed ^ Fingerprint::of(group.as_bytes()));
        let others = among.iter().copied().filter(|id| *id != home);
        let mut order: Vec<_> = others.map(|id| (room[id] == 0, Reverse(self.score(id, key)), id)).collect();
        // A VIP that a hundred gateways share has a hundred orders: what isn't taken isn't sorted.
        if order.len() > MOST_BACKUPS {
            order.select_nth_unstable(MOST_BACKUPS);
            order.truncate(MOST_BACKUPS);
        }
        order.sort_unstable();
        order.into_iter().map(|(.., id)| id).collect()
    }
}
