//! Policy compiler: Kubernetes objects to VIPs, egress policies, endpoints and Services.
//!
//! [`compile`] is pure: neither the policy nor its version depends on the order of the objects. The manifest reader
//! checks single documents; here objects are checked against each other. In doubt, an endpoint is covered without a
//! VIP, so its traffic is dropped: nothing leaves untranslated.

mod backends;
mod changes;
mod claim;
mod cluster;
mod endpoints;
mod gateways;
mod inventory;
mod memo;
mod overlay;
mod placement;
mod placement_diff;
mod pods;
mod pool;
mod services;
mod shard_maps;
mod shard_moves;
mod slices;
mod tenancy;
mod vips;

use std::net::IpAddr;
use std::sync::Arc;

use self::changes::Changes;
pub use self::cluster::Cluster;
use self::gateways::Gateways;
pub use self::gateways::MAX_BACKUPS;
use self::inventory::Inventory;
pub(crate) use self::inventory::namespace_labels;
use self::memo::Memo;
pub use self::placement::{
    Difference, GatewayLocality, Iter, Keyed, Peer, PlacedBackend, PlacedService, Placement, Table, differences,
};
pub use self::placement_diff::{
    BlockMoves, EndpointChanges, EndpointMoves, GatewayChanges, Homes, PlacedVip, PlacementDiff, PortChanges,
    VipChanges, VipMove, placement_diff,
};
use self::pods::Pods;
use self::pool::Pools;
use self::shard_maps::ShardMaps;
pub use self::shard_moves::{Placed, ShardMove, shard_groups, shard_moves};
use self::slices::Slices;
pub use self::tenancy::Tenancy;
use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::manifest::Object;

/// Result of a compilation: the policy and its diagnostics.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    /// The policy of all gateways; valid only without errors among the diagnostics.
    pub placement: Placement,
    /// Errors and warnings, ordered by file and line.
    pub diagnostics: Vec<Diagnostic>,
    /// VIPs that policies have of their own, not from a Service, sorted.
    pub policy_addresses: Vec<IpAddr>,
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
pub fn compile_for<'a>(tenancy: Tenancy, objects: impl IntoIterator<Item = &'a Object>) -> Compiled {
    let mut objects: Vec<&Object> = objects.into_iter().collect();
    objects.sort_by(|a, b| inventory::order(a, b));
    Memo::default().compile(tenancy, objects.into_iter(), &Changes::default())
}

/// A compiler that keeps its last result, and compiles only what a change of the objects concerns. Each result equals
/// that of [`compile_for`], diagnostics included.
#[derive(Debug, Default)]
pub struct Compiler {
    tenancy: Tenancy,
    /// In the order of the inventory.
    objects: Vec<Arc<Object>>,
    memo: Memo,
}

impl Compiler {
    /// A compiler without a result.
    pub fn new(tenancy: Tenancy) -> Self {
        Self { tenancy, ..Self::default() }
    }

    /// What tenants may use.
    pub fn tenancy(&self) -> Tenancy {
        self.tenancy
    }

    /// Compiles the policy of all objects. An object that is the same as in the previous call is the same allocation.
    pub fn compile<'a>(&mut self, objects: impl IntoIterator<Item = &'a Arc<Object>>) -> Compiled {
        let mut objects: Vec<Arc<Object>> = objects.into_iter().cloned().collect();
        sort_changed(&self.objects, &mut objects);
        let compiled = {
            let changes = Changes::between(&self.objects, &objects);
            self.memo.compile(self.tenancy, objects.iter().map(Arc::as_ref), &changes)
        };
        self.objects = objects;
        compiled
    }
}

/// Sorts objects in the order of the inventory. Those that both lists begin and end with are sorted in the first one, and
/// aren't compared again: of a hundred thousand, few change.
fn sort_changed(sorted: &[Arc<Object>], objects: &mut [Arc<Object>]) {
    let is_same = |(one, other): &(&Arc<Object>, &Arc<Object>)| Arc::ptr_eq(one, other);
    let first = sorted.iter().zip(objects.iter()).take_while(is_same).count();
    let rest = (&sorted[first..], &objects[first..]);
    let last = rest.0.iter().rev().zip(rest.1.iter().rev()).take_while(is_same).count();
    let changed = first..objects.len() - last;
    objects[changed.clone()].sort_by(|a, b| inventory::order(a, b));
    let around = &objects[changed.start.saturating_sub(1)..objects.len().min(changed.end + 1)];
    if !around.is_sorted_by(|a, b| inventory::order(a, b).is_le()) {
        objects.sort_by(|a, b| inventory::order(a, b));
    }
}

#[cfg(test)]
mod tests;
