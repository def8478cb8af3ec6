//! Shard map: the shards of one VIP, or of all VIPs with the same eligible gateways, by slot.

use std::collections::BTreeSet;

use foldhash::{HashMap, HashMapExt};

use super::members::Members;
use super::shard::Shard;
use super::spec::{SLOTS, ShardMapSpec, ShardSpec};
use crate::flow::ids::{GatewayId, Owner};
use crate::ports::allocator::PortShard;
use crate::ports::{BlockId, BlockSet, Stripe};

/// Marks a slot without a shard.
const NO_SHARD: u16 = u16::MAX;

/// Shards by slot.
#[derive(Clone, Debug, Default)]
pub struct ShardMap {
    /// `None`: the first shard has everything.
    slots: Option<Slots>,
    /// Empty: everything belongs to this gateway.
    list: Box<[Shard]>,
}

/// Shard of each slot, and what follows from their owners.
#[derive(Clone, Debug)]
struct Slots {
    shard: Box<[u16; SLOTS]>,
    /// The owner of each slot, so that a packet needs one lookup.
    owner: Box<[Owner; SLOTS]>,
    /// The slots that this gateway may open sessions in.
    own: Box<[OwnSlots]>,
    /// The owner of the first slot that has one; this gateway, if it owns any slot.
    any_owner: Owner,
    /// The other gateways that own a slot.
    others: Box<[GatewayId]>,
}

/// Slots with the same home and stripe that this gateway may open sessions in, as blocks of a VIP without rotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnSlots {
    pub(super) home: Option<GatewayId>,
    pub(super) stripe: Stripe,
    pub(super) blocks: BlockSet,
}

/// The gateways of a placement by name, with their numbers.
struct Orders<'a> {
    members: &'a Members,
    known: HashMap<&'a str, Option<GatewayId>>,
}

impl<'a> Orders<'a> {
    fn new(members: &'a Members) -> Self {
        Self { members, known: HashMap::new() }
    }

    /// The numbers of these gateways.
    fn of(&mut self, names: impl Iterator<Item = &'a std::sync::Arc<str>>) -> Box<[GatewayId]> {
        let members = self.members;
        names.filter_map(|name| *self.known.entry(&**name).or_insert_with(|| members.id(name))).collect()
    }
}

impl OwnSlots {
    /// Its ports, for allocation.
    pub(super) fn part(&self) -> PortShard<'_> {
        PortShard { blocks: &self.blocks, stripe: self.stripe }
    }
}

impl Slots {
    fn new(shard: Box<[u16; SLOTS]>, list: &[Shard]) -> Self {
        let mut owner = Box::new([Owner::Unowned; SLOTS]);
        let mut own: Vec<OwnSlots> = Vec::new();
        for (slot, number) in shard.iter().enumerate() {
            let Some(shard) = list.get(usize::from(*number)) else { continue };
            owner[slot] = shard.owner;
            if !shard.may_open {
                continue;
            }
            let (home, stripe) = (shard.home(), shard.stripe);
            let at = own.iter().position(|own| (own.home, own.stripe) == (home, stripe)).unwrap_or_else(|| {
                own.push(OwnSlots { home, stripe, blocks: BlockSet::default() });
                own.len() - 1
            });
            own[at].blocks.insert(BlockId(slot as u16));
        }
        let is_own = list.iter().any(|shard| shard.owner == Owner::This);
        let first = owner.iter().copied().find(|owner| *owner != Owner::Unowned);
        let any_owner = if is_own { Owner::This } else { first.unwrap_or(Owner::Unowned) };
        let others = list.iter().filter_map(|shard| match shard.owner {
            Owner::Other(id) => Some(id),
            Owner::This | Owner::Unowned => None,
        });
        let others: BTreeSet<GatewayId> = others.collect();
        Self { shard, owner, own: own.into(), any_owner, others: others.into_iter().collect() }
    }
}

impl ShardMap {
    /// The map of a spec, replacing `before`; all gateways must have numbers.
    pub(super) fn new(spec: &ShardMapSpec, before: &Self, members: &Members) -> Self {
        let mut orders = Orders::new(members);
        let orders: Vec<_> = spec.orders.iter().map(|names| orders.of(names.iter())).collect();
        Self::split(&orders, |slot| spec.slots.get(slot).copied().unwrap_or(NO_SHARD), before, members)
    }

    /// The map of the listed shards of one VIP, replacing `before`; all gateways must have numbers.
    pub(super) fn of_vip(specs: &[ShardSpec], before: &Self, members: &Members) -> Self {
        let mut orders = Orders::new(members);
        let of_spec: Vec<_> =
            specs.iter().map(|spec| orders.of(std::iter::once(&spec.gateway).chain(&spec.backups))).collect();
        if let [] | [ShardSpec { blocks: None, .. }] = specs {
            let shard = |order| match (&*before.list, &before.slots) {
                ([former], None) => Shard::replacing(order, former, members),
                _ => Shard::new(order, members),
            };
            return Self { slots: None, list: of_spec.into_iter().map(shard).collect() };
        }
        let mut of_block = Box::new([NO_SHARD; SLOTS]);
        for (spec, number) in specs.iter().zip(0..NO_SHARD) {
            let blocks = spec.blocks.as_deref().into_iter().flat_map(|blocks| blocks.iter());
            blocks.for_each(|block| of_block[usize::from(block.0)] = number);
        }
        Self::split(&of_spec, |slot| of_block[slot], before, members)
    }

    /// A map with several shards: one for each order of gateways, and for each former shard of its slots.
    fn split(orders: &[Box<[GatewayId]>], order_of: impl Fn(usize) -> u16, before: &Self, members: &Members) -> Self {
        let former_of = |slot: usize| match (&before.slots, &*before.list) {
            (_, []) => NO_SHARD,
            (None, _) => 0,
            (Some(slots), _) => slots.shard[slot],
        };
        let mut list: Vec<Shard> = Vec::new();
        let mut numbers: HashMap<(u16, u16), u16> = HashMap::new();
        let mut shard = Box::new([NO_SHARD; SLOTS]);
        for (slot, number) in shard.iter_mut().enumerate() {
            let (order, former) = (order_of(slot), former_of(slot));
            let Some(gateways) = orders.get(usize::from(order)) else { continue };
            *number = *numbers.entry((order, former)).or_insert_with(|| {
                list.push(match before.list.get(usize::from(former)) {
                    Some(former) => Shard::replacing(gateways.clone(), former, members),
                    None => Shard::new(gateways.clone(), members),
                });
                list.len() as u16 - 1
            });
        }
        Self { slots: Some(Slots::new(shard, &list)), list: list.into() }
    }

    /// The map after a change of members; `None` if nothing has changed.
    pub(super) fn with_members(&self, members: &Members) -> Option<Self> {
        let mut after = self.clone();
        after.list.iter_mut().for_each(|shard| shard.assign_owner(members));
        if after.list == self.list {
            return None;
        }
        after.slots = after.slots.map(|slots| Slots::new(slots.shard, &after.list));
        Some(after)
    }

    /// Whether the gateways that receive sessions of any shard change with the epoch that begins.
    pub(super) fn starts_epoch(&self, members: &Members) -> bool {
        self.list.iter().any(|shard| shard.starts_epoch(members))
    }

    /// Whether any shard awaits releases by policy.
    pub(super) fn awaits_release(&self) -> bool {
        self.list.iter().any(|shard| shard.former_owner().is_some())
    }

    /// Whether all owners are the same.
    pub(super) fn has_same_owners(&self, other: &Self) -> bool {
        match (&self.slots, &other.slots) {
            (None, None) => self.list.iter().map(|it| it.owner).eq(other.list.iter().map(|it| it.owner)),
            (Some(slots), Some(others)) => slots.owner == others.owner,
            _ => false,
        }
    }

    /// Its shards; none: everything belongs to this gateway.
    pub fn list(&self) -> &[Shard] {
        &self.list
    }

    /// Whether it has several shards.
    #[inline]
    pub fn is_split(&self) -> bool {
        self.slots.is_some()
    }

    /// The other gateways that own a slot; none if it isn't split.
    pub(super) fn other_owners(&self) -> &[GatewayId] {
        self.slots.as_ref().map_or(&[], |slots| &slots.others)
    }

    /// The slots that this gateway may open sessions in, by home and stripe; none if it isn't split.
    pub(super) fn own(&self) -> &[OwnSlots] {
        self.slots.as_ref().map_or(&[], |slots| &slots.own)
    }

    /// The slot of a block.
    #[inline]
    fn slot_of(block: BlockId, rotation: u16) -> usize {
        usize::from(block.0 + rotation) % SLOTS
    }

    /// The shard of a slot; `None` if it has none.
    pub fn of_slot(&self, slot: u16) -> Option<&Shard> {
        match &self.slots {
            None => self.list.first(),
            Some(slots) => self.list.get(usize::from(slots.shard[usize::from(slot) % SLOTS])),
        }
    }

    /// The shard of a block of a VIP with this rotation; `None` if it has none.
    #[inline]
    pub fn of_block(&self, block: BlockId, rotation: u16) -> Option<&Shard> {
        self.of_slot(Self::slot_of(block, rotation) as u16)
    }

    /// The owner of a block of a VIP with this rotation.
    #[inline]
    pub fn owner_of_block(&self, block: BlockId, rotation: u16) -> Owner {
        match (&self.slots, &*self.list) {
            (Some(slots), _) => slots.owner[Self::slot_of(block, rotation)],
            (None, []) => Owner::This,
            (None, [first, ..]) => first.owner,
        }
    }

    /// The shard placed on a gateway: of several, the first one.
    pub fn of_home(&self, home: GatewayId) -> Option<&Shard> {
        self.list.iter().find(|shard| shard.home() == Some(home))
    }

    /// The owner of all of it: of several shards, this gateway if it owns any.
    pub fn owner(&self) -> Owner {
        match (&self.slots, &*self.list) {
            (Some(slots), _) => slots.any_owner,
            (None, []) => Owner::This,
            (None, [first, ..]) => first.owner,
        }
    }
}
