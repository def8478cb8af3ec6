//! The policies of a world: its gateways, and for each shard of one VIP the gateways that may own it, in order. A
//! policy that comes back has the version that it had before, like the fingerprints of real policies.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use vipgate_policy::compiler;

use crate::authority::ShardGroup;
use crate::fixtures::policy_peer;

/// Maximum number of gateways of a world.
pub(super) const MAX_GATEWAYS: usize = 4;
/// Shards of the VIP.
pub(super) const SHARDS: usize = 2;

pub(super) const NAMES: [&str; MAX_GATEWAYS] = ["a", "b", "c", "d"];

/// The number of a gateway by its name.
pub(super) fn index_of(name: &str) -> usize {
    usize::from(name.as_bytes()[0] - b'a')
}

/// The gateways that may own a shard, home first.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Order {
    list: [u8; MAX_GATEWAYS],
    length: u8,
}

impl Order {
    pub(super) fn new(gateways: &[usize]) -> Self {
        let mut list = [0; MAX_GATEWAYS];
        list.iter_mut().zip(gateways).for_each(|(to, gateway)| *to = *gateway as u8);
        Self { list, length: gateways.len() as u8 }
    }

    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        self.list.into_iter().take(self.length.into()).map(usize::from)
    }
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|gateway| f.write_str(NAMES[gateway]))
    }
}

/// What a policy says about placement.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Placement {
    /// Its gateways, as a bit set.
    pub(super) gateways: u8,
    pub(super) orders: [Order; SHARDS],
    /// Whether the VIP has a shard map; if not, it lists its shards.
    pub(super) has_map: bool,
}

impl Placement {
    pub(super) fn has(self, gateway: usize) -> bool {
        self.gateways >> gateway & 1 == 1
    }
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: String = (0..MAX_GATEWAYS).filter(|it| self.has(*it)).map(|it| NAMES[it]).collect();
        let kind = if self.has_map { "map" } else { "listed" };
        write!(f, "{all}:{:?}/{:?} {kind}", self.orders[0], self.orders[1])
    }
}

/// A policy, as server and gateways need it.
#[derive(Debug)]
pub(super) struct ModelPolicy {
    pub(super) number: u32,
    pub(super) version: Arc<str>,
    pub(super) placement: Placement,
    pub(super) peers: Arc<[compiler::Peer]>,
    pub(super) names: Vec<Arc<str>>,
    pub(super) shard_groups: Arc<BTreeSet<ShardGroup>>,
}

/// All policies so far.
#[derive(Debug)]
pub(super) struct Policies {
    pub(super) names: [Arc<str>; MAX_GATEWAYS],
    known: HashMap<Placement, Rc<ModelPolicy>>,
    count: u32,
}

impl Policies {
    pub(super) fn new() -> Self {
        Self { names: NAMES.map(Arc::from), known: HashMap::new(), count: 0 }
    }

    /// The policy with this placement.
    pub(super) fn of(&mut self, placement: Placement) -> Rc<ModelPolicy> {
        if let Some(policy) = self.known.get(&placement) {
            return policy.clone();
        }
        self.count += 1;
        let number = self.count;
        let names: Vec<_> = self.names.iter().enumerate().filter(|(at, _)| placement.has(*at)).map(|it| it.1).collect();
        let group = |order: &Order| {
            let mut group: ShardGroup = order.iter().map(|it| self.names[it].clone()).collect();
            group.sort();
            group
        };
        let policy = Rc::new(ModelPolicy {
            number,
            version: number.to_string().into(),
            placement,
            peers: names.iter().map(|name| policy_peer(name)).collect(),
            names: names.iter().map(|name| Arc::clone(name)).collect(),
            shard_groups: Arc::new(placement.orders.iter().map(group).collect()),
        });
        self.known.insert(placement, policy.clone());
        policy
    }
}
