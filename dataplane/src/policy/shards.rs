//! Shards of a VIP: which gateway owns which of its ports.
//!
//! A VIP that one gateway owns as a whole has one shard, with all blocks. The blocks of a VIP that all gateways announce
//! are distributed over many, by a shard map that it shares with other VIPs.

use std::sync::Arc;

use super::members::Members;
use super::shard::Shard;
use super::shard_map::{OwnSlots, ShardMap};
use super::spec::SLOTS;
use crate::flow::ids::{GatewayId, Owner, ShardMapId};
use crate::ports::allocator::PortShard;
use crate::ports::{BLOCKS, BlockId, BlockSet};

/// The shards of one VIP.
#[derive(Clone, Debug, Default)]
pub struct Shards {
    map: Arc<ShardMap>,
    /// The number of the map; `None`: it belongs to this VIP alone.
    id: Option<ShardMapId>,
    rotation: u16,
    /// The replication epoch since which the VIP has this map; 0: always.
    since: u64,
    /// The blocks that this gateway may allocate, if they are distributed.
    own: Box<[OwnSlots]>,
}

/// The part of a VIP that is placed on one gateway and has one owner.
#[derive(Clone, Debug)]
pub struct HomePart<'a> {
    /// One of its shards; all have this home and owner.
    pub shard: &'a Shard,
    pub blocks: BlockSet,
}

impl Shards {
    /// The shards of a VIP with a map.
    pub(super) fn new(map: Arc<ShardMap>, id: Option<ShardMapId>, rotation: u16) -> Self {
        let of_vip = |own: &OwnSlots| OwnSlots { blocks: own.blocks.rotated(rotation), ..own.clone() };
        Self { own: map.own().iter().map(of_vip).collect(), map, id, rotation, since: 0 }
    }

    /// The number of its map, if it shares that with other VIPs.
    pub(super) fn map_id(&self) -> Option<ShardMapId> {
        self.id
    }

    pub(super) fn map(&self) -> &Arc<ShardMap> {
        &self.map
    }

    /// The same VIP with a new version of its map.
    #[must_use]
    pub(super) fn with_map(&self, map: Arc<ShardMap>) -> Self {
        Self { since: self.since, ..Self::new(map, self.id, self.rotation) }
    }

    /// The same VIP with its map for itself alone.
    #[must_use]
    pub(super) fn without_id(&self) -> Self {
        Self { id: None, ..self.clone() }
    }

    /// As the shards that replace `before` by policy: with another map, every replica may lack sessions.
    pub(super) fn replacing(mut self, before: &Self, members: &Members) -> Self {
        let is_same = (self.id, self.rotation) == (before.id, before.rotation);
        self.since = match before.map.list() {
            [] => 0,
            _ if is_same => before.since,
            _ => members.replication_epoch() + 1,
        };
        self
    }

    /// Whether the gateways that receive its sessions change with the epoch that begins.
    pub(super) fn starts_epoch(&self, members: &Members) -> bool {
        self.since > members.replication_epoch() || (self.id.is_none() && self.map.starts_epoch(members))
    }

    /// Whether all owners and blocks are the same.
    pub(super) fn has_same_owners(&self, other: &Self) -> bool {
        self.rotation == other.rotation && self.map.has_same_owners(&other.map)
    }

    /// Whether no gateway shares it: everything belongs to this one.
    pub fn is_standalone(&self) -> bool {
        self.map.list().is_empty()
    }

    /// Whether its blocks are distributed over several gateways.
    #[inline]
    pub fn is_distributed(&self) -> bool {
        self.map.is_split()
    }

    /// The only shard, with all blocks; `None` if there are several, or none.
    pub fn only(&self) -> Option<&Shard> {
        self.map.list().first().filter(|_| !self.is_distributed())
    }

    /// The shard of a port; `None` if there are no shards, or none has the port.
    #[inline]
    pub fn of_port(&self, port: u16) -> Option<&Shard> {
        self.map.of_block(BlockId::of(port), self.rotation)
    }

    /// The other gateways that own ports, if these are distributed.
    pub fn other_owners(&self) -> &[GatewayId] {
        self.map.other_owners()
    }

    /// The owner of a port.
    #[inline]
    pub fn owner_of_port(&self, port: u16) -> Owner {
        self.map.owner_of_block(BlockId::of(port), self.rotation)
    }

    /// The shard placed on a gateway: of several, the first one.
    pub fn of_home(&self, home: GatewayId) -> Option<&Shard> {
        self.map.of_home(home)
    }

    /// Whether the replica of the shard of a session may lack it; see [`Shard::replica_may_lack_sessions`].
    pub fn replica_may_lack_sessions(&self, shard: &Shard, synced_epoch: u64) -> bool {
        synced_epoch < self.since || shard.replica_may_lack_sessions(synced_epoch)
    }

    /// The gateway that owns what has this hash and no port of the VIP: a fragmented datagram, or a client's flow. The same
    /// for all VIPs with the same map.
    pub fn owner_of_hash(&self, hash: u64) -> Owner {
        let place = ((hash >> 32) * SLOTS as u64) >> 32;
        self.map.owner_of_block(BlockId(place as u16), 0)
    }

    /// Whether this gateway may answer ARP and ND for the VIP: it owns it, and the former owner has released it. If the
    /// VIP has several shards, any owner may.
    pub fn answers_arp_nd(&self) -> bool {
        self.owner() == Owner::This && self.only().is_none_or(|only| only.may_open)
    }

    /// The owner of the VIP: of one with several shards, this gateway if it owns any.
    pub fn owner(&self) -> Owner {
        self.map.owner()
    }

    /// The parts that sessions are opened in at this gateway, in order of preference: those with the home of the
    /// endpoint first, so that most of its sessions move together with it.
    pub fn parts(&self, home: Option<GatewayId>) -> impl Iterator<Item = PortShard<'_>> {
        let whole = match self.only() {
            Some(only) => only.may_open.then_some(PortShard { blocks: &BlockSet::ALL, stripe: only.stripe }),
            None => self.is_standalone().then_some(PortShard::ALL),
        };
        let is_preferred = move |own: &&OwnSlots| own.home == home;
        let preferred = self.own.iter().filter(is_preferred);
        let rest = self.own.iter().filter(move |own| !is_preferred(own));
        whole.into_iter().chain(preferred.chain(rest).map(OwnSlots::part))
    }

    /// The blocks that this gateway owns; all if there are no shards.
    pub fn own_blocks(&self) -> BlockSet {
        let mut own = BlockSet::default();
        let is_own = |block: &BlockId| self.map.owner_of_block(*block, self.rotation) == Owner::This;
        blocks().filter(is_own).for_each(|block| own.insert(block));
        own
    }

    /// Its parts by home and owner, in the order of their first blocks; none if it is standalone.
    pub fn home_parts(&self) -> Vec<HomePart<'_>> {
        if let Some(only) = self.only() {
            return vec![HomePart { shard: only, blocks: BlockSet::ALL }];
        }
        let mut parts: Vec<HomePart<'_>> = Vec::new();
        for block in blocks() {
            let Some(shard) = self.map.of_block(block, self.rotation) else { continue };
            let key = |shard: &Shard| (shard.home(), shard.owner, shard.may_open);
            let at = parts.iter().position(|part| key(part.shard) == key(shard));
            let at = at.unwrap_or_else(|| {
                parts.push(HomePart { shard, blocks: BlockSet::default() });
                parts.len() - 1
            });
            parts[at].blocks.insert(block);
        }
        parts
    }
}

fn blocks() -> impl Iterator<Item = BlockId> {
    (0..BLOCKS as u16).map(BlockId)
}

#[cfg(test)]
mod tests;
