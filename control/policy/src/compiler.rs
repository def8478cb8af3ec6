//! Policy compiler: Kubernetes objects to VIPs, egress policies, endpoints and Services.
//!
//! [`compile`] is pure: neither the policy nor its version depends on the order of the objects. The manifest reader
//! checks single documents; here objects are checked against each other. In doubt, an endpoint is covered without a
//! VIP, so its traffic is dropped: nothing leaves untranslated.

mod backends;
mod claim;
mod cluster;
mod endpoints;
mod gateways;
mod inventory;
mod overlay;
mod placement;
mod placement_diff;
mod pods;
mod pool;
mod services;
mod shard_maps;
mod shard_moves;
mod slices;
mod vips;

pub use self::cluster::Cluster;
use self::gateways::Gateways;
pub use self::gateways::MAX_BACKUPS;
use self::inventory::Inventory;
pub use self::placement::{GatewayLocality, Peer, PlacedBackend, PlacedService, Placement};
pub use self::placement_diff::{
    BlockMoves, EndpointChanges, EndpointMoves, GatewayChanges, Homes, PlacedVip, PlacementDiff, PortChanges,
    VipChanges, VipMove, placement_diff,
};
use self::pods::Pods;
use self::pool::Pools;
use self::shard_maps::ShardMaps;
pub use self::shard_moves::{Placed, ShardMove, shard_groups, shard_moves};
use self::slices::Slices;
use crate::diagnostic::{Diagnostic, Diagnostics, sort_and_dedup};
use crate::manifest::Object;

/// Result of a compilation: the policy and its diagnostics.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    /// The policy of all gateways; valid only without errors among the diagnostics.
    pub placement: Placement,
    /// Errors and warnings, ordered by file and line.
    pub diagnostics: Vec<Diagnostic>,
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

/// Compiles the policy of all objects.
pub fn compile<'a>(objects: impl IntoIterator<Item = &'a Object>) -> Compiled {
    let mut diagnostics = Vec::new();
    let sink = &mut diagnostics;
    let inventory = Inventory::new(objects, sink);
    let gateways = Gateways::new(&inventory, sink);
    let pods = Pods::new(&inventory, sink);
    let slices = Slices::new(&inventory, &pods);
    let pools = Pools::new(&inventory, sink);
    let sources =
        claim::Inputs { inventory: &inventory, gateways: &gateways, pods: &pods, slices: &slices, pools: &pools };
    let claims = claim::collect(&sources, sink);
    let mut shard_maps = ShardMaps::default();
    let vips = vips::compile(&sources, &claims, &mut shard_maps, sink);
    let endpoints = endpoints::assign(&sources, &claims, &vips.assigned, &mut shard_maps, sink);
    let services = services::compile(&sources, &vips, sink);
    let nodes = overlay::compile(&inventory, sink);
    let cluster = cluster::compile(&inventory, sink);
    let mut policies: Vec<_> = claims.into_iter().map(|claim| claim.spec).collect();
    policies.sort_by(|a, b| a.name.cmp(&b.name));
    let vips = vips.assigned.into_iter().map(|vip| vip.spec).collect();
    sort_and_dedup(&mut diagnostics);
    let peers = gateways.peers();
    let shard_maps = shard_maps.into_specs();
    let placement = Placement { policies, shard_maps, vips, endpoints, services, nodes, peers, cluster };
    Compiled { placement, diagnostics }
}

#[cfg(test)]
mod tests;
