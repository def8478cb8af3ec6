//! Shard moves: owners of each VIP shard before and after a change of the active gateways, and the gateways that can
//! own one. Pure: computed from the placement alone.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use vipgate_dataplane::policy::spec::{EndpointSpec, ShardSpec, VipSpec};

/// A shard's owner before and after a change of the active gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardMove {
    /// VIP of the shard.
    pub vip: IpAddr,
    /// Gateway that the shard is assigned to.
    pub home: Arc<str>,
    /// Active owner before; `None`: no gateway.
    pub before: Option<Arc<str>>,
    /// Active owner after; `None`: no gateway.
    pub after: Option<Arc<str>>,
    /// Endpoints assigned to the same gateway whose first VIP this is, so that each endpoint counts once.
    pub endpoints: usize,
}

impl ShardMove {
    /// Whether the owner changes.
    pub fn changes_owner(&self) -> bool {
        self.before != self.after
    }
}

/// The owner of each shard while the gateways in `before` or in `after` are active, in the order of VIPs and shards. A
/// VIP without shards has no entry: any gateway that receives its packets handles them.
pub fn shard_moves(
    vips: &[VipSpec],
    endpoints: &[EndpointSpec],
    before: &BTreeSet<Arc<str>>,
    after: &BTreeSet<Arc<str>>,
) -> Vec<ShardMove> {
    let mut counts: HashMap<(IpAddr, &str), usize> = HashMap::default();
    for endpoint in endpoints {
        if let (Some(vip), Some(home)) = (endpoint.vips.first(), &endpoint.gateway) {
            *counts.entry((*vip, &**home)).or_default() += 1;
        }
    }
    let of_shard = |vip: IpAddr, shard: &ShardSpec| ShardMove {
        vip,
        home: shard.gateway.clone(),
        before: owner(shard, before),
        after: owner(shard, after),
        endpoints: counts.get(&(vip, &*shard.gateway)).copied().unwrap_or(0),
    };
    vips.iter().flat_map(|vip| vip.shards.iter().map(move |shard| of_shard(vip.address, shard))).collect()
}

/// The distinct groups of gateways that can own a shard, its home and its backups: sorted names. Few, since most shards
/// have the same candidates.
pub fn shard_groups(vips: &[VipSpec]) -> BTreeSet<Vec<Arc<str>>> {
    let mut known: HashSet<Vec<&Arc<str>>> = HashSet::default();
    for shard in vips.iter().flat_map(|vip| &vip.shards) {
        let mut names: Vec<&Arc<str>> = std::iter::once(&shard.gateway).chain(&shard.backups).collect();
        names.sort_unstable();
        names.dedup();
        known.insert(names);
    }
    known.into_iter().map(|names| names.into_iter().cloned().collect()).collect()
}

/// The first active gateway among a shard's home and its backups.
fn owner(shard: &ShardSpec, active: &BTreeSet<Arc<str>>) -> Option<Arc<str>> {
    std::iter::once(&shard.gateway).chain(&shard.backups).find(|name| active.contains(*name)).cloned()
}
