//! Shard: a part of a VIP, or of several VIPs, with one owner.
//!
//! A shard is placed on its home gateway; while that is inactive, the first active backup owns it. The owner follows
//! from placement and active members alone, so all gateways agree on it.

use super::members::Members;
use crate::flow::ids::{GatewayId, Owner};
use crate::ports::Stripe;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its home first, then its backups.
    order: Box<[GatewayId]>,
    /// The gateway that owns it now.
    pub owner: Owner,
    /// Whether this gateway may open sessions in it.
    pub may_open: bool,
    /// The ports that this gateway allocates from: others than its previous owner's.
    pub stripe: Stripe,
    /// The former owner, if the shard has moved here, and that one or another gateway hasn't released by the same policy
    /// yet: by another one, it may derive another owner.
    former_owner: Option<GatewayId>,
    /// The other gateway that must have all its sessions: the owner, or, if this gateway owns it, the next in line for
    /// failover.
    replica: Option<GatewayId>,
    /// The replication epoch since which it is the replica; 1: for all sessions ever.
    replica_since: u64,
    /// The first two active gateways other than this one.
    active_others: [Option<GatewayId>; 2],
    /// The replication epoch since which they are.
    active_others_since: u64,
}

impl Shard {
    /// A shard with these gateways, home first, that no gateway has owned yet.
    pub(super) fn new(order: Box<[GatewayId]>, members: &Members) -> Self {
        let mut shard = Self::unassigned(order);
        shard.assign_owner(members);
        // It has no sessions yet, so nobody has to release any, and no replica lacks any.
        shard.former_owner = None;
        shard.await_release(members);
        (shard.replica_since, shard.active_others_since) = (1, 1);
        shard
    }

    /// The shard with these gateways that takes over the ports and endpoints of a former one by policy.
    pub(super) fn replacing(order: Box<[GatewayId]>, before: &Self, members: &Members) -> Self {
        let mut shard = Self { order, ..before.clone() };
        shard.assign_owner(members);
        if before.owner == Owner::This && shard.owner != Owner::This {
            // The new owner gets what was never sent with a full round, which a new epoch begins.
            shard.active_others_since = members.replication_epoch() + 1;
        }
        if before.awaits_release() && shard.owner == Owner::This {
            // Its former home hasn't released it yet by a view.
            shard.former_owner = before.former_owner.or(before.home());
            shard.await_release(members);
        }
        shard
    }

    fn unassigned(order: Box<[GatewayId]>) -> Self {
        Self {
            order,
            owner: Owner::Unowned,
            may_open: false,
            stripe: Stripe::ALL,
            former_owner: None,
            replica: None,
            replica_since: 1,
            active_others: [None; 2],
            active_others_since: 1,
        }
    }

    /// The gateway that it is placed on.
    pub fn home(&self) -> Option<GatewayId> {
        self.order.first().copied()
    }

    /// All gateways that may own it.
    pub(super) fn gateways(&self) -> impl Iterator<Item = GatewayId> + use<'_> {
        self.order.iter().copied()
    }

    /// Whether this gateway owns it, but the former owner hasn't released it yet and may still send sessions.
    pub fn awaits_release(&self) -> bool {
        self.owner == Owner::This && !self.may_open
    }

    /// The gateway that has to release it by policy.
    pub(super) fn former_owner(&self) -> Option<GatewayId> {
        self.former_owner
    }

    /// Assigns owner and replica by the state of the members.
    pub(super) fn assign_owner(&mut self, members: &Members) {
        let Some(this) = members.this() else {
            (self.owner, self.may_open, self.stripe) = (Owner::This, true, Stripe::ALL);
            return;
        };
        let (was_owner, before) = (self.owner == Owner::This && self.stripe != Stripe::ALL, self.owner);
        let owner = self.order.iter().copied().find(|&id| members.is_active(id));
        self.owner = match owner {
            Some(id) if id == this => Owner::This,
            Some(id) => Owner::Other(id),
            None => Owner::Unowned,
        };
        if self.owner == Owner::This && !self.may_open {
            // Also while it awaits releases: what the former owner hasn't sent may be lost by another change.
            self.stripe = Stripe::for_epoch(members.active_changes());
        }
        if self.owner == Owner::This && !was_owner {
            self.stripe = Stripe::for_epoch(members.active_changes());
            self.former_owner = match before {
                Owner::Other(former) => Some(former),
                Owner::This | Owner::Unowned => self.home(),
            };
        }
        self.await_release(members);
        // A new owner has sessions that a previous process, whose sessions the replica has, didn't have.
        let is_new_owner = self.owner == Owner::This && !was_owner;
        let replica = self.replica(members);
        if replica != self.replica || is_new_owner {
            (self.replica, self.replica_since) = (replica, members.replication_epoch() + 1);
        }
        let active_others = {
            let mut others = self.others(members).filter(|&id| members.is_active(id));
            [others.next(), others.next()]
        };
        if active_others != self.active_others {
            (self.active_others, self.active_others_since) = (active_others, members.replication_epoch() + 1);
        }
    }

    /// Sets whether this gateway may open sessions: the former owner, by view and by policy, has released the shard.
    fn await_release(&mut self, members: &Members) {
        let is_ours = self.owner == Owner::This;
        self.former_owner = self.former_owner.filter(|_| is_ours && members.awaits_policy_release());
        let may_open = self.home().is_some_and(|home| members.may_open(home));
        self.may_open = is_ours && may_open && self.former_owner.is_none();
    }

    /// All gateways but this one, in order.
    fn others<'a>(&'a self, members: &Members) -> impl Iterator<Item = GatewayId> + use<'a> {
        let this = members.this();
        self.order.iter().copied().filter(move |&id| Some(id) != this)
    }

    /// The gateway that must have all sessions. Replication channels don't matter, since they change between views:
    /// sessions sent only to another standby gateway while the channel to this replica was down are sent by that one if
    /// it becomes the owner.
    fn replica(&self, members: &Members) -> Option<GatewayId> {
        match self.owner {
            Owner::Other(owner) => Some(owner),
            // Only the first one: an inactive gateway before an active one gets records, too, and those sent only to it
            // are missing on the active one.
            Owner::This => self.others(members).next().filter(|&id| members.is_active(id)),
            Owner::Unowned => None,
        }
    }

    /// The other gateway that owns it now, or would own it if this one stopped. Only what that one has acknowledged is
    /// safe: while the channel to it is down, sessions are sent to others.
    pub fn successor(&self) -> Option<GatewayId> {
        match self.owner {
            Owner::Other(owner) => Some(owner),
            Owner::This => self.active_others[0],
            Owner::Unowned => None,
        }
    }

    /// Whether the gateways that receive its sessions, or those of its endpoints, change with the epoch that begins.
    pub(super) fn starts_epoch(&self, members: &Members) -> bool {
        self.replica_since.max(self.active_others_since) > members.replication_epoch()
    }

    /// Whether the replica may lack sessions that other gateways have: those sent to others before it became the
    /// replica. `synced_epoch` is the epoch of the last full synchronization that it has completed, 0 if none. Sessions
    /// never sent to any gateway are marked in their own entries.
    pub fn replica_may_lack_sessions(&self, synced_epoch: u64) -> bool {
        synced_epoch < self.replica_since
    }

    /// The gateways that receive its sessions while this gateway owns it: up to the next active one, and inactive ones
    /// before it, which would own the shard if they were active.
    pub fn replica_targets<'a>(&'a self, members: &'a Members) -> impl Iterator<Item = GatewayId> + 'a {
        self.standby_gateways(members, usize::from(self.owner == Owner::This))
    }

    /// The gateways that receive sessions of its endpoints with a port of another shard, since they forward the
    /// endpoints' packets: its owner, the next one for failover, and inactive ones before these.
    pub fn locator_targets<'a>(&'a self, members: &'a Members) -> impl Iterator<Item = GatewayId> + 'a {
        let active = match self.owner {
            Owner::This => 1,
            Owner::Other(_) => 2,
            Owner::Unowned => 0,
        };
        self.standby_gateways(members, active)
    }

    /// The other gateways in order, up to this number of active and connected ones.
    fn standby_gateways<'a>(&'a self, members: &'a Members, active: usize) -> impl Iterator<Item = GatewayId> + 'a {
        let mut left = active;
        self.others(members).take_while(move |&id| {
            let is_target = left > 0;
            left -= usize::from(is_target && members.is_active(id) && members.is_connected(id));
            is_target
        })
    }
}
