//! Shards of a VIP: their port blocks and owners.
//!
//! A shard is placed on its home gateway; while that is inactive, the first active backup owns it. The owner follows
//! from placement and active members alone, so all gateways agree on it. A VIP that one gateway owns as a whole has one
//! shard, with all blocks; a VIP that all gateways announce has one shard for each of them.

use std::sync::Arc;

use super::members::Members;
use super::spec::ShardSpec;
use crate::flow::ids::{GatewayId, Owner};
use crate::ports::allocator::PortShard;
use crate::ports::{BLOCKS, BlockId, BlockSet, Stripe};

/// The shards of one VIP.
#[derive(Clone, Debug, Default)]
pub struct Shards {
    /// Index of each block's shard; `None`: the first one has all blocks.
    of_block: Option<Arc<[u8; BLOCKS]>>,
    /// Empty: everything belongs to this gateway.
    list: Box<[Shard]>,
}

/// Marks a block without a shard.
const NO_SHARE: u8 = u8::MAX;

/// A shard: the part of a VIP that is placed on one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its home first, then its backups.
    order: Box<[GatewayId]>,
    /// Its blocks; `None`: all.
    blocks: Option<Arc<BlockSet>>,
    /// The gateway that owns it now.
    pub owner: Owner,
    /// Whether this gateway may open sessions in it.
    pub may_open: bool,
    /// The ports that this gateway allocates from: others than its previous owner's.
    pub stripe: Stripe,
    /// The other gateway that must have all its sessions: the owner, or, if this gateway owns it, the next in line for
    /// failover.
    replica: Option<GatewayId>,
    /// The replication epoch since which it is the replica; 1: for all sessions ever.
    replica_since: u64,
}

impl Shard {
    /// The gateway that it is placed on.
    pub fn home(&self) -> Option<GatewayId> {
        self.order.first().copied()
    }

    /// Its blocks; `None`: all.
    pub fn blocks(&self) -> Option<&BlockSet> {
        self.blocks.as_deref()
    }

    /// Whether this gateway owns it, but the former owner hasn't released it yet and may still send sessions.
    pub fn awaits_release(&self) -> bool {
        self.owner == Owner::This && !self.may_open
    }

    /// Its ports, for allocation.
    #[inline]
    pub fn part(&self) -> PortShard<'_> {
        PortShard { blocks: self.blocks().unwrap_or(&BlockSet::ALL), stripe: self.stripe }
    }

    /// Assigns owner and replica by the state of the members.
    fn assign_owner(&mut self, members: &Members) {
        let Some(this) = members.this() else {
            (self.owner, self.may_open, self.stripe) = (Owner::This, true, Stripe::ALL);
            return;
        };
        let was_owner = self.owner == Owner::This && self.stripe != Stripe::ALL;
        let owner = self.order.iter().copied().find(|&id| members.is_active(id));
        self.owner = match owner {
            Some(id) if id == this => Owner::This,
            Some(id) => Owner::Other(id),
            None => Owner::Unowned,
        };
        let is_ours = self.owner == Owner::This;
        if is_ours && !was_owner {
            self.stripe = Stripe::for_epoch(members.active_changes());
        }
        self.may_open = is_ours && self.home().is_some_and(|home| members.may_open(home));
        let replica = self.replica(members);
        if replica != self.replica {
            (self.replica, self.replica_since) = (replica, members.replication_epoch() + 1);
        }
    }

    /// The gateway that must have all sessions. Replication channels don't matter, since they change between views:
    /// sessions sent only to another standby gateway while the channel to this replica was down are sent by that one if
    /// it becomes the owner.
    fn replica(&self, members: &Members) -> Option<GatewayId> {
        match self.owner {
            Owner::Other(owner) => Some(owner),
            Owner::This => {
                let next = self.order.iter().copied().find(|&id| Some(id) != members.this());
                // Only the first one: an inactive gateway before an active one gets records, too, and those sent only
                // to it are missing on the active one.
                next.filter(|&id| members.is_active(id))
            }
            Owner::Unowned => None,
        }
    }

    /// Whether the replica may lack sessions that other gateways have: those sent to others before it became the
    /// replica. `synced_epoch` is the epoch of the last full synchronization that it has completed, 0 if none. Sessions
    /// never sent to any gateway are marked in their own entries.
    pub fn replica_may_lack_sessions(&self, synced_epoch: u64) -> bool {
        synced_epoch < self.replica_since
    }

    /// The connected gateways that receive its sessions while this gateway owns it: up to the next active one, and
    /// inactive ones before it, which would own the shard if they were active.
    pub fn replica_targets<'a>(&'a self, members: &'a Members) -> impl Iterator<Item = GatewayId> + 'a {
        self.replica_chain(members).filter(|&id| members.is_connected(id))
    }

    /// Whether a gateway is a replica target once it is connected. For an initial synchronization, which doesn't wait
    /// until the workers see the connection: what they left out would be purged there.
    pub fn is_replica_target(&self, id: GatewayId, members: &Members) -> bool {
        self.replica_chain(members).any(|target| target == id)
    }

    fn replica_chain<'a>(&'a self, members: &'a Members) -> impl Iterator<Item = GatewayId> + 'a {
        let mut is_done = false;
        let others = self.order.iter().copied().filter(|&id| self.owner == Owner::This && Some(id) != members.this());
        others.take_while(move |&id| {
            let is_last = members.is_active(id) && members.is_connected(id);
            !std::mem::replace(&mut is_done, is_last)
        })
    }
}

impl Shards {
    /// The shards of a spec, replacing `before`; all gateways must have numbers.
    pub(super) fn new(specs: &[ShardSpec], before: &Self, members: &Members) -> Self {
        let list = specs.iter().map(|spec| {
            let order = std::iter::once(&spec.gateway).chain(&spec.backups).filter_map(|name| members.id(name));
            let mut shard = Shard {
                order: order.collect(),
                blocks: spec.blocks.clone(),
                owner: Owner::Unowned,
                may_open: false,
                stripe: Stripe::ALL,
                replica: None,
                replica_since: 1,
            };
            let Some(known) = shard.home().and_then(|home| before.of_home(home)) else {
                shard.assign_owner(members);
                if before.list.is_empty() {
                    // A new VIP has no sessions yet, so no replica lacks any.
                    shard.replica_since = 1;
                }
                return shard;
            };
            if shard.blocks == known.blocks {
                // Its sessions stay valid, also with other backups.
                (shard.replica, shard.replica_since) = (known.replica, known.replica_since);
                (shard.owner, shard.stripe) = (known.owner, known.stripe);
            }
            shard.assign_owner(members);
            shard
        });
        let list: Box<[Shard]> = list.collect();
        let is_whole = matches!(&*list, [] | [Shard { blocks: None, .. }]);
        let of_block = (!is_whole).then(|| {
            let mut of_block = [NO_SHARE; BLOCKS];
            for (shard, number) in list.iter().zip(0..NO_SHARE) {
                let blocks = shard.blocks.as_deref().into_iter().flat_map(|blocks| blocks.iter());
                blocks.for_each(|block| of_block[usize::from(block.0)] = number);
            }
            Arc::new(of_block)
        });
        Self { of_block, list }
    }

    /// The shards after a change of members; `None` if nothing has changed.
    pub(super) fn with_members(&self, members: &Members) -> Option<Self> {
        let mut after = self.clone();
        after.list.iter_mut().for_each(|shard| shard.assign_owner(members));
        (after.list != self.list).then_some(after)
    }

    /// Whether the replica of any shard changes with the epoch that begins.
    pub(super) fn starts_epoch(&self, members: &Members) -> bool {
        self.list.iter().any(|shard| shard.replica_since > members.replication_epoch())
    }

    /// Whether all owners and blocks are the same.
    pub(super) fn has_same_owners(&self, other: &Self) -> bool {
        let owners = |shards: &Self| shards.list.iter().map(|shard| shard.owner).collect::<Vec<_>>();
        self.of_block == other.of_block && owners(self) == owners(other)
    }

    /// All shards; none: everything belongs to this gateway.
    pub fn list(&self) -> &[Shard] {
        &self.list
    }

    /// The blocks that this gateway owns; all if there are no shards.
    pub fn own_blocks(&self) -> BlockSet {
        if self.list.is_empty() {
            return BlockSet::ALL;
        }
        let own = self.list.iter().filter(|shard| shard.owner == Owner::This);
        own.fold(BlockSet::default(), |all, shard| all.union(shard.blocks().unwrap_or(&BlockSet::ALL)))
    }

    /// Whether its blocks are distributed over several gateways.
    #[inline]
    pub fn is_distributed(&self) -> bool {
        self.of_block.is_some()
    }

    /// The shard of a port; `None` if there are no shards, or none has the port.
    #[inline]
    pub fn of_port(&self, port: u16) -> Option<&Shard> {
        match &self.of_block {
            None => self.list.first(),
            Some(of_block) => self.list.get(usize::from(of_block[usize::from(BlockId::of(port).0)])),
        }
    }

    /// The owner of a port.
    #[inline]
    pub fn owner_of_port(&self, port: u16) -> Owner {
        match self.of_port(port) {
            Some(shard) => shard.owner,
            None if self.list.is_empty() => Owner::This,
            None => Owner::Unowned,
        }
    }

    /// The shard placed on a gateway.
    pub fn of_home(&self, home: GatewayId) -> Option<&Shard> {
        self.list.iter().find(|shard| shard.home() == Some(home))
    }

    /// The shard for sessions of endpoints without a home: this gateway's own, or else the first one that it owns by
    /// failover.
    pub fn local(&self, this: Option<GatewayId>) -> Option<&Shard> {
        let own_shard = this.and_then(|this| self.of_home(this)).filter(|shard| shard.owner == Owner::This);
        own_shard.or_else(|| self.list.iter().find(|shard| shard.owner == Owner::This))
    }

    /// The gateway that reassembles a datagram, by the datagram's hash.
    pub fn reassembly_owner(&self, hash: u64) -> Owner {
        let place = ((hash >> 32) * self.list.len() as u64) >> 32;
        self.list.get(place as usize).map_or(Owner::This, |shard| shard.owner)
    }

    /// Whether this gateway may answer ARP and ND for the VIP: it owns it, and the former owner has released it. If the
    /// VIP has several shards, any owner may.
    pub fn answers_arp_nd(&self) -> bool {
        match &*self.list {
            [only] => only.owner == Owner::This && only.may_open,
            _ => self.owner() == Owner::This,
        }
    }

    /// The owner of the VIP: of one with several shards, this gateway if it owns any.
    pub fn owner(&self) -> Owner {
        match &*self.list {
            [] => Owner::This,
            [only] => only.owner,
            several if several.iter().any(|shard| shard.owner == Owner::This) => Owner::This,
            several => {
                several.iter().map(|shard| shard.owner).find(|owner| *owner != Owner::Unowned).unwrap_or(Owner::Unowned)
            }
        }
    }
}
