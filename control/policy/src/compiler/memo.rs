//! What a compiler remembers of the previous compilation, so that it compiles only what a change concerns.
//!
//! ```text
//!   objects -> inventory -> claims ------------> VIPs -----------------> endpoints ---------> Services
//!              all, cheap   all, without the     all, unless only        of the claims that   that a change
//!                           covered addresses    endpoint slices differ  a change concerns    concerns
//!                                                that move no VIP
//! ```
//! Each part has its diagnostics with it. The order of slices stays as long as objects only replace those with the same
//! identity, that of claims as long as policies and Services stay. Shard maps stay until a gateway differs, as long as a
//! VIP or an endpoint uses them. The result equals a compilation without memory.

mod endpoints;
mod services;

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashSet;
use vipgate_dataplane::policy::spec::{EndpointSpec, NodeSpec, ShardMapSpec, VipSpec};

use self::endpoints::EndpointMemo;
use self::services::ServiceMemo;
use super::changes::Changes;
use super::claim::{self, Claim, Collected, Inputs};
use super::cluster::{self, ClusterPrefixes};
use super::inventory::Order;
use super::options::Share;
use super::placement::Table;
use super::pool::Reserved;
use super::pool_addresses::PoolAddresses;
use super::precedence::Precedence;
use super::vips::{self, AssignedVip, Closed, VipTable};
use super::{Compiled, Gateways, Inventory, Options, Placement, Pods, Pools, ShardMaps, Tenancy, agent_nodes, overlay};
use crate::diagnostic::{Diagnostic, sort_and_dedup};
use crate::manifest::Object;

/// The previous compilation.
#[derive(Clone, Debug, Default)]
pub(super) struct Memo {
    order: Option<Order>,
    precedence: Option<Precedence>,
    /// Of the same gateways, maps with the same name are equal.
    shard_maps: ShardMaps,
    vips: Option<VipMemo>,
    endpoints: EndpointMemo,
    services: ServiceMemo,
    overlay: Option<OverlayMemo>,
    placement: Placement,
}

/// The overlay nodes with their diagnostics.
#[derive(Clone, Debug)]
struct OverlayMemo {
    nodes: Vec<NodeSpec>,
    diagnostics: Vec<Diagnostic>,
}

/// The VIP table with its diagnostics.
#[derive(Clone)]
struct VipMemo {
    table: VipTable,
    diagnostics: Vec<Diagnostic>,
    /// The VIPs of all Services and policies.
    all: HashSet<IpAddr>,
    /// Those that were admitted.
    admitted: Arc<HashSet<IpAddr>>,
    /// The names of Services that were refused.
    refused: HashSet<Arc<str>>,
    /// Claims that were closed.
    closed: Closed,
    /// The names of the VIPs' shard maps.
    maps: HashSet<Arc<str>>,
}

impl std::fmt::Debug for VipMemo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VipMemo").field("vips", &self.table.assigned.len()).finish_non_exhaustive()
    }
}

/// What differs in the VIP table.
#[derive(Debug, Default)]
struct VipChanges {
    /// Whether it was compiled again.
    is_new: bool,
    /// VIPs that were added, removed, or have other owners.
    vips: HashSet<IpAddr>,
    /// Whether other VIPs are addresses of pods, hosts or endpoints.
    in_use: bool,
}

/// What differs from the previous compilation.
struct Differences<'a> {
    changes: &'a Changes<'a>,
    vips: &'a VipChanges,
}

impl Memo {
    /// Compiles objects, which differ from those of the previous compilation by `changes`.
    pub(super) fn compile<'a>(
        &mut self,
        options: &Options,
        sorted: impl Iterator<Item = &'a Object>,
        changes: &Changes<'a>,
    ) -> Compiled {
        let mut diagnostics = Vec::new();
        let sink = &mut diagnostics;
        let known = self.order.take().filter(|_| changes.are_in_place());
        let inventory = Inventory::new(sorted, known, sink);
        let gateways = Gateways::new(&inventory, sink);
        let pods = Pods::new(&inventory, sink);
        let pools = Pools::new(&inventory, sink);
        let cluster = cluster::compile(&inventory, &options.cluster, options.node_agents.is_some(), sink);
        let prefixes = ClusterPrefixes::new(&cluster, &inventory);
        let (tenancy, none, unreserved) = (options.tenancy, HashSet::default(), Reserved::default());
        let sources = Inputs {
            inventory: &inventory,
            gateways: &gateways,
            pods: &pods,
            pools: &pools,
            cluster: &prefixes,
            tenancy,
            vips: &none,
            recorded: options.recorded.as_ref(),
            reserved: &unreserved,
        };
        let known = self.precedence.take().filter(|_| !changes.concerns_vips);
        let precedence = known.unwrap_or_else(|| Precedence::new(&inventory));
        let Collected { mut claims, reserved } = claim::collect(&sources, &precedence, sink);
        let sources = Inputs { reserved: &reserved, ..sources };
        if changes.has_gateways {
            self.shard_maps = ShardMaps::default();
        }
        let (vips, vip_changes) = self.compile_vips(&sources, &mut claims, options.namespace_share, changes);
        let sources = Inputs { vips: &vips.admitted, ..sources };
        sink.extend(vips.diagnostics.iter().cloned());
        let addresses = PoolAddresses::new(&claims, &sources, &vips.refused, changes, sink);
        let shortages = claims.iter().flat_map(|claim| claim.shortages.iter().cloned()).collect();
        let differences = Differences { changes, vips: &vip_changes };
        let (previous, maps) = (&self.placement, &mut self.shard_maps);
        let (policies, endpoints) =
            self.endpoints.compile(previous, maps, claims, &sources, &vips.table, &differences, sink);
        let services = self.services.compile(&self.placement, &sources, &vips, &differences, sink);
        let has_nodes = self.overlay.is_none() || changes.has_pods || vip_changes.in_use || changes.overlay_nodes > 0;
        let nodes = self.compile_overlay(&sources, options, changes, sink);
        let has_agents = has_nodes || !changes.slices.is_empty() || endpoints != self.placement.endpoints;
        let agents = match options.node_agents {
            None => Arc::default(),
            Some(_) if has_agents => agent_nodes::compile(&sources, &nodes, &endpoints, &self.placement.agents),
            Some(_) => self.placement.agents.clone(),
        };
        let (shard_maps, specs) =
            (self.compile_shard_maps(&vips, changes), self.compile_specs(&vips.table, &vip_changes));
        let (peers, cluster) = (gateways.peers(), cluster.non_empty());
        let placement =
            Placement { policies, shard_maps, vips: specs, endpoints, services, nodes, agents, peers, cluster };
        self.vips = Some(vips);
        let slices_unverified = tenancy == Tenancy::Strict && !pods.are_known() && inventory.has_slices();
        self.placement = placement.clone();
        let placement = self.within_budget(placement, &inventory, options.namespace_share, sink);
        (self.order, self.precedence) = (Some(inventory.into_order()), Some(precedence));
        sort_and_dedup(&mut diagnostics);
        Compiled { placement, diagnostics, addresses, shortages, slices_unverified }
    }

    /// The placement without the endpoints and Services that exceed a limit. The memory keeps them: only what a change
    /// concerns is compiled again.
    fn within_budget(
        &self,
        placement: Placement,
        inventory: &Inventory<'_>,
        share: Share,
        sink: &mut Vec<Diagnostic>,
    ) -> Placement {
        let services = self.services.beyond_budget(inventory, share, sink);
        let policies = self.endpoints.beyond_budget(inventory, share, sink);
        if services.is_empty() && policies.is_empty() {
            return placement;
        }
        let services: Vec<&Arc<str>> = services.iter().collect();
        let is_beyond = |endpoint: &&EndpointSpec| policies.contains(&endpoint.policy);
        let beyond: Vec<IpAddr> = placement.endpoints.iter().filter(is_beyond).map(|it| it.address).collect();
        let endpoints: Vec<&IpAddr> = beyond.iter().collect();
        Placement {
            services: placement.services.edit(&services, Vec::new()),
            endpoints: placement.endpoints.edit(&endpoints, Vec::new()),
            ..placement
        }
    }

    /// The overlay nodes; the previous ones if nothing that they follow from differs.
    fn compile_overlay(
        &mut self,
        sources: &Inputs<'_>,
        options: &Options,
        changes: &Changes<'_>,
        sink: &mut Vec<Diagnostic>,
    ) -> Vec<NodeSpec> {
        let previous = self.overlay.take().filter(|_| !changes.has_pods && changes.overlay_nodes == 0);
        let overlay = self.overlay.insert(previous.unwrap_or_else(|| {
            let mut diagnostics = Vec::new();
            let nodes = overlay::compile(sources.inventory, sources.pods, options.node_agents, &mut diagnostics);
            OverlayMemo { nodes, diagnostics }
        }));
        sink.extend(overlay.diagnostics.iter().cloned());
        overlay.nodes.clone()
    }

    /// The shard maps of the placement; forgets the others.
    fn compile_shard_maps(&mut self, vips: &VipMemo, changes: &Changes<'_>) -> Arc<[ShardMapSpec]> {
        self.shard_maps.retain(|name| vips.maps.contains(name) || self.endpoints.has_map(name));
        let previous = &self.placement.shard_maps;
        let is_same = !changes.has_gateways && self.shard_maps.names().eq(previous.iter().map(|map| &map.name));
        if is_same { previous.clone() } else { self.shard_maps.specs() }
    }

    /// The VIPs of the placement.
    fn compile_specs(&self, table: &VipTable, changes: &VipChanges) -> Table<VipSpec> {
        let previous = &self.placement.vips;
        if !changes.is_new {
            return previous.clone();
        }
        previous.replaced(table.assigned.iter().map(|vip| vip.spec.clone()).collect())
    }

    /// The VIP table; the previous one if only endpoint slices differ, none of their addresses is a VIP, and no owner
    /// follows from what differs. Closes claims that aren't admitted.
    fn compile_vips<'a>(
        &mut self,
        sources: &Inputs<'a>,
        claims: &mut Vec<Claim<'a>>,
        share: Share,
        changes: &Changes<'_>,
    ) -> (VipMemo, VipChanges) {
        let mut slices = changes.slices.iter().flat_map(|slice| &slice.endpoints);
        let is_same = |previous: &mut VipMemo| {
            let sources = Inputs { vips: &previous.admitted, ..*sources };
            !changes.concerns_vips
                && !slices.any(|endpoint| previous.all.contains(&endpoint.address))
                && !previous.table.local.differ(&sources, changes)
        };
        let mut previous = self.vips.take();
        if let Some(previous) = previous.take_if(is_same) {
            previous.closed.apply(claims);
            return (previous, VipChanges::default());
        }
        let mut diagnostics = Vec::new();
        let of_services = sources.inventory.services.iter().flat_map(|service| &service.body.vips);
        let all = of_services.chain(claims.iter().flat_map(|claim| claim.vips.iter())).map(|(_, vip)| *vip).collect();
        let admitted = vips::admit(sources, claims, share, &mut diagnostics);
        let addresses = Arc::new(admitted.addresses());
        let sources = Inputs { vips: &addresses, ..*sources };
        let table = vips::compile(&sources, &admitted, claims, &mut self.shard_maps, &mut diagnostics);
        if !table.in_use.is_empty() {
            vips::warn_about_addresses(&sources, &mut diagnostics);
        }
        let maps = table.assigned.iter().filter_map(|vip| Some(vip.spec.shard_map.as_ref()?.map.clone())).collect();
        let changes = VipChanges::between(previous.as_ref().map(|previous| &previous.table), &table);
        let refused = sources.inventory.services.iter().filter(|it| admitted.refused.contains(&it.namespaced_name()));
        let refused = refused.map(|service| service.name.clone()).collect();
        (VipMemo { table, diagnostics, all, admitted: addresses, refused, closed: admitted.closed, maps }, changes)
    }
}

impl VipChanges {
    fn between(old: Option<&VipTable>, new: &VipTable) -> Self {
        let is_same = |a: &AssignedVip, b: &AssignedVip| a.spec == b.spec && a.owners == b.owners;
        let mut vips = HashSet::default();
        let mut old_vips = old.map(|old| old.assigned.as_slice()).unwrap_or_default().iter().peekable();
        for vip in &new.assigned {
            while let Some(removed) = old_vips.next_if(|old| old.spec.address < vip.spec.address) {
                vips.insert(removed.spec.address);
            }
            let before = old_vips.next_if(|old| old.spec.address == vip.spec.address);
            if before.is_none_or(|before| !is_same(before, vip)) {
                vips.insert(vip.spec.address);
            }
        }
        vips.extend(old_vips.map(|removed| removed.spec.address));
        let in_use = old.is_none_or(|old| old.in_use != new.in_use);
        Self { is_new: true, vips, in_use }
    }
}
