//! Policy compiler: Kubernetes objects to VIPs, egress policies, endpoints and Services.
//!
//! [`compile`] is pure: neither the policy nor its version depends on the order of the objects. The manifest reader
//! checks single documents; here objects are checked against each other. In doubt, an endpoint is covered without a
//! VIP, so its traffic is dropped: nothing leaves untranslated.

mod agent_nodes;
mod backends;
mod budget;
mod changes;
mod claim;
mod cluster;
mod endpoints;
mod gateways;
mod inventory;
mod memo;
mod options;
mod overlay;
mod placement;
mod placement_diff;
mod pods;
mod pool;
mod pool_addresses;
mod precedence;
mod services;
mod shard_maps;
mod shard_moves;
mod slices;
mod tenancy;
mod vips;

use std::ops::Range;
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;

use self::changes::Changes;
pub use self::cluster::Cluster;
use self::gateways::Gateways;
pub use self::gateways::MAX_BACKUPS;
use self::inventory::Inventory;
pub(crate) use self::inventory::namespace_labels;
use self::memo::Memo;
pub use self::options::{NODE_AGENT_MAC, NodeAgents, Options, Share, TunnelSecret};
pub use self::placement::{
    AgentNode, GatewayLocality, Iter, Peer, PlacedBackend, PlacedService, Placement, SetAside, Table, differences,
};
pub use self::placement_diff::{
    BlockMoves, EndpointChanges, EndpointMoves, GatewayChanges, Homes, PlacedVip, PlacementDiff, PortChanges,
    VipChanges, VipMove, placement_diff,
};
use self::pods::Pods;
use self::pool::Pools;
pub use self::pool_addresses::PoolAddresses;
pub use self::services::lookup_table_bytes;
use self::shard_maps::ShardMaps;
pub use self::shard_moves::{Placed, ShardMove, shard_groups, shard_moves};
pub use self::tenancy::Tenancy;
use crate::address_record::Recorded;
use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::manifest::Object;
use crate::shortage::Shortage;

/// Result of a compilation: the policy and its diagnostics.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    /// The policy of all gateways. An object with an error is not in force; what it covers stays covered without a VIP.
    pub placement: Placement,
    /// Errors and warnings, ordered by file and line.
    pub diagnostics: Vec<Diagnostic>,
    /// What objects have of pools.
    pub addresses: PoolAddresses,
    /// What policies lack, and providers of pools can allocate; in the order in which policies get addresses.
    pub shortages: Vec<Shortage>,
    /// Whether tenancy is strict, and addresses of slices can't be checked, since no Pod is known.
    pub slices_unverified: bool,
}

impl Compiled {
    /// The policy and its warnings.
    ///
    /// # Errors
    /// All diagnostics, including warnings, if at least one is an error.
    pub fn accept(self) -> Result<(Placement, Vec<Diagnostic>), Diagnostics> {
        if self.diagnostics.iter().any(Diagnostic::is_error) {
            Err(Diagnostics(self.diagnostics))
        } else {
            Ok((self.placement, self.diagnostics))
        }
    }
}

/// Compiles the policy of all objects for open tenancy.
pub fn compile<'a>(objects: impl IntoIterator<Item = &'a Object>) -> Compiled {
    compile_for(Tenancy::Open, objects)
}

/// Compiles the policy of all objects.
pub fn compile_for<'a>(options: impl Into<Options>, objects: impl IntoIterator<Item = &'a Object>) -> Compiled {
    let mut objects: Vec<&Object> = objects.into_iter().collect();
    objects.sort_by(|a, b| inventory::order(a, b));
    Memo::default().compile(&options.into(), objects.into_iter(), &Changes::all())
}

/// A compiler that keeps its last result, and compiles only what a change of the objects concerns. Each result equals
/// that of [`compile_for`], diagnostics included.
#[derive(Clone, Debug, Default)]
pub struct Compiler {
    options: Options,
    /// In the order of the inventory.
    objects: Vec<Arc<Object>>,
    /// Whether the record of addresses, or what they wait for, is new.
    has_new_record: bool,
    /// What the last result says of addresses.
    waits_until: Option<Timestamp>,
    memo: Memo,
}

impl Compiler {
    /// A compiler without a result.
    pub fn new(options: impl Into<Options>) -> Self {
        Self { options: options.into(), ..Self::default() }
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Sets the record of addresses of pools, and the time.
    pub fn set_recorded(&mut self, recorded: Recorded) {
        let now = recorded.now;
        let is_same = |last: &Recorded| Recorded { now, ..last.clone() } == recorded;
        self.has_new_record |=
            self.waits_until.is_some_and(|end| end <= now) || !self.options.recorded.as_ref().is_some_and(is_same);
        self.options.recorded = Some(recorded);
    }

    /// Has the next result say again what is to be recorded: the last one's isn't yet.
    pub fn repeat_next_record(&mut self) {
        self.has_new_record = true;
    }

    /// Compiles the policy of all objects. An object that is the same as in the previous call is the same allocation.
    pub fn compile<'a, I: DoubleEndedIterator<Item = &'a Arc<Object>>>(
        &mut self,
        objects: impl IntoIterator<IntoIter = I>,
    ) -> Compiled {
        let Replaced { at, removed } = replace(&mut self.objects, objects.into_iter());
        let mut changes = Changes::between(&removed, &self.objects[at]);
        changes.concerns_vips |= std::mem::take(&mut self.has_new_record);
        let compiled = self.memo.compile(&self.options, self.objects.iter().map(Arc::as_ref), &changes);
        self.waits_until = compiled.addresses.waits_until;
        compiled
    }
}

/// The part of a list that isn't what it was.
struct Replaced {
    at: Range<usize>,
    /// What it was.
    removed: Vec<Arc<Object>>,
}

/// Replaces a list in the order of the inventory by other objects, in this order. What both begin and end with stays as
/// it is: of a hundred thousand objects, few change.
fn replace<'a>(sorted: &mut Vec<Arc<Object>>, objects: impl DoubleEndedIterator<Item = &'a Arc<Object>>) -> Replaced {
    let mut objects = objects.peekable();
    let mut start = 0;
    while let Some(same) = sorted.get(start)
        && objects.next_if(|object| Arc::ptr_eq(object, same)).is_some()
    {
        start += 1;
    }
    let mut end = sorted.len();
    let mut last = objects.next_back();
    while let Some(object) = last
        && end > start
        && Arc::ptr_eq(object, &sorted[end - 1])
    {
        end -= 1;
        last = objects.next_back();
    }
    let mut added: Vec<Arc<Object>> = objects.chain(last).cloned().collect();
    added.sort_by(|a, b| inventory::order(a, b));
    // Of objects with the same identity the first one counts, so what is next to them differs with them.
    let is_same = |a: Option<&Arc<Object>>, b: &Arc<Object>| a.is_some_and(|a| a.id == b.id);
    while start > 0
        && let before = &sorted[start - 1]
        && (is_same(added.first(), before) || is_same(sorted[start..end].first(), before))
    {
        added.insert(0, before.clone());
        start -= 1;
    }
    while let Some(after) = sorted.get(end)
        && (is_same(added.last(), after) || is_same(sorted[start..end].last(), after))
    {
        added.push(after.clone());
        end += 1;
    }
    added.sort_by(|a, b| inventory::order(a, b));
    let at = start..start + added.len();
    let around = [start.checked_sub(1).map(|before| &sorted[before]), added.first(), added.last(), sorted.get(end)];
    if around.into_iter().flatten().is_sorted_by(|a, b| inventory::order(a, b).is_le()) {
        return Replaced { at, removed: sorted.splice(start..end, added).collect() };
    }
    let mut all = [&sorted[..start], &added, &sorted[end..]].concat();
    all.sort_by(|a, b| inventory::order(a, b));
    Replaced { at: 0..all.len(), removed: std::mem::replace(sorted, all) }
}

#[cfg(test)]
mod tests;
