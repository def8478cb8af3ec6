//! Replica targets: the gateways that get the records of a session.
//!
//! These are the gateways that would own the session next, and those that receive its endpoint's packets: if the
//! endpoint's shard belongs to another gateway than the session's port, the owner of the former forwards them by its
//! standby session.

use crate::flow::ids::{GatewayId, Owner};
use crate::policy::compiled::{Family, Policy, Vip};
use crate::policy::members::Members;
use crate::policy::shard::Shard;
use crate::policy::shards::Shards;
use crate::policy::spec::AddressSelection;
use crate::session::SessionFamily;
use crate::session::entry::Entry;

/// More targets than a shard has gateways: for its port and for its endpoint, which are seldom different ones.
const MAX_TARGETS: usize = 16;

/// Gateways, each once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Targets {
    list: [Option<GatewayId>; MAX_TARGETS],
    count: usize,
}

impl Targets {
    fn add(&mut self, id: GatewayId) {
        if self.count < MAX_TARGETS && !self.contains(id) {
            self.list[self.count] = Some(id);
            self.count += 1;
        }
    }

    fn add_of_endpoint<A: SessionFamily>(&mut self, entry: &Entry<A>, policy: &Policy) {
        if entry.is_dnat() {
            return;
        }
        let members = policy.members();
        let [(endpoint, _), ..] = entry.transport_addresses();
        let Some((_, endpoint, egress)) = policy.endpoint(endpoint) else { return };
        if let Some(shard) = policy.shard_of(endpoint) {
            shard.locator_targets(members).for_each(|id| self.add(id));
        }
        if egress.spec.address_selection == AddressSelection::PerConnection {
            // Each of its flows belongs to the owner of another VIP, which may be a new one.
            let shards = policy.vips_of(endpoint).filter_map(|vip| vip.shards.only());
            shards.flat_map(|shard| shard.locator_targets(members)).for_each(|id| self.add(id));
        }
    }

    /// Whether a gateway is one once it is connected. For an initial synchronization, which doesn't wait until the
    /// workers see the connection: what they left out would be purged there.
    pub fn contains(&self, id: GatewayId) -> bool {
        self.list[..self.count].contains(&Some(id))
    }

    /// Those with a replication channel.
    pub fn connected(self, members: &Members) -> impl Iterator<Item = GatewayId> + '_ {
        self.list.into_iter().take(self.count).flatten().filter(|&id| members.is_connected(id))
    }
}

/// The replica targets of a session; none if another gateway owns it: that one gets it with the next full round, and an
/// acknowledgement by a third gateway would hide that it lacks the session.
pub fn of<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> Targets {
    let members = policy.members();
    let mut targets = Targets::default();
    let Some((_, shard)) = replicated_shard(entry, policy).filter(|(_, shard)| shard.owner == Owner::This) else {
        return targets;
    };
    shard.replica_targets(members).for_each(|id| targets.add(id));
    targets.add_of_endpoint(entry, policy);
    targets
}

/// The VIP of a session and the shard of its port, if the session is replicated.
pub fn replicated_shard<'a, A: SessionFamily>(entry: &Entry<A>, policy: &'a Policy) -> Option<(&'a Vip, &'a Shard)> {
    let [_, _, (address, port)] = entry.transport_addresses();
    let vip = policy.vip(address)?;
    // If all gateways announce the VIP, any of them load-balances its clients without a session.
    let shard = if entry.is_dnat() { vip.shards.only() } else { vip.shards.of_port(port) };
    Some((vip, shard?))
}

/// The gateways that get the backends of clients of a VIP with session affinity: those that may get a client's next
/// connection. If all gateways announce the VIP, these are all its other owners; else the replica targets of its owner.
pub fn of_choice<A: Family>(vip: A, policy: &Policy) -> impl Iterator<Item = GatewayId> {
    let (shards, members) = (policy.vip(vip).map(|vip| &vip.shards), policy.members());
    let all = shards.map(Shards::other_owners).unwrap_or_default();
    let only = shards.and_then(Shards::only).filter(|shard| shard.owner == Owner::This);
    all.iter().copied().chain(only.into_iter().flat_map(move |shard| shard.replica_targets(members)))
}

/// The gateway that a session is safe with: see [`Shard::successor`].
pub fn successor<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> Option<GatewayId> {
    replicated_shard(entry, policy).and_then(|(_, shard)| shard.successor())
}
