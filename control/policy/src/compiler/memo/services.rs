//! Services that a change concerns: their own manifests, endpoint slices or assigned VIPs differ.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;

use super::{Differences, Placement, Table, VipMemo};
use crate::compiler::backends::BackendBuilder;
use crate::compiler::budget::{Grants, Totals, Usage};
use crate::compiler::claim::Inputs;
use crate::compiler::inventory::{Inventory, ObjectRef, age_key};
use crate::compiler::options::Share;
use crate::compiler::placement::PlacedService;
use crate::compiler::services;
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::Service;

/// The Services of the previous compilation, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct ServiceMemo {
    services: HashMap<Arc<str>, PlacedMemo>,
    /// What they take of limits.
    totals: Totals,
    /// Counts compilations of all Services: those of an earlier one are gone.
    round: u64,
}

/// A Service of the previous compilation.
#[derive(Clone, Debug)]
struct PlacedMemo {
    assigned: Vec<IpAddr>,
    diagnostics: Vec<Diagnostic>,
    usage: Usage,
    /// Whether it fits into one update of a gateway.
    fits: bool,
    round: u64,
}

/// The namespace of `Service namespace/name`.
fn namespace_of(name: &str) -> &str {
    let path = name.split_once(' ').map_or(name, |(_, path)| path);
    path.split_once('/').map_or("", |(namespace, _)| namespace)
}

impl ServiceMemo {
    /// The Services with at least one VIP that is assigned to a gateway.
    pub(super) fn compile<'a>(
        &mut self,
        previous: &Placement,
        sources: &'a Inputs<'a>,
        vips: &VipMemo,
        differences: &Differences<'a>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Table<PlacedService> {
        let mut builder = BackendBuilder::new(sources);
        let changes = differences.changes;
        let mut compiled = Vec::new();
        let mut gone = Vec::new();
        if !differences.vips.is_new && !changes.has_pods {
            // Only endpoint slices differ.
            for service in changes.services.iter().filter_map(|key| sources.inventory.service(*key)) {
                let Some(memo) = self.services.get(service.name) else { continue };
                let assigned = memo.assigned.clone();
                compiled.push(self.place(service, assigned, &mut builder));
            }
        } else {
            self.round += 1;
            let is_all = changes.has_pods || changes.has_gateways || differences.vips.in_use;
            for service in &sources.inventory.services {
                let assigned = services::assigned_vips(service.body, &vips.table);
                if assigned.is_empty() || vips.refused.contains(service.name) {
                    continue;
                }
                match self.services.get_mut(service.name) {
                    Some(memo)
                        if !is_all
                            && memo.assigned == assigned
                            && !changes.services.contains(&service.namespaced_name()) =>
                    {
                        memo.round = self.round;
                    }
                    _ => compiled.push(self.place(*service, assigned, &mut builder)),
                }
            }
            let round = self.round;
            for (name, memo) in self.services.extract_if(|_, memo| memo.round != round) {
                self.totals.remove(namespace_of(&name), &memo.usage);
                gone.push(name);
            }
        }
        diagnostics.extend(self.services.values().flat_map(|memo| memo.diagnostics.iter().cloned()));
        compiled.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        gone.sort_unstable();
        previous.services.edit(&gone.iter().collect::<Vec<_>>(), compiled)
    }

    fn place<'a>(
        &mut self,
        service: ObjectRef<'a, Service>,
        assigned: Vec<IpAddr>,
        builder: &mut BackendBuilder<'a>,
    ) -> PlacedService {
        let mut diagnostics = Vec::new();
        let placed = services::compile(service, assigned, builder, &mut diagnostics);
        let fits = !diagnostics.iter().any(Diagnostic::is_error);
        let usage = if fits { services::usage(&placed) } else { Usage::default() };
        self.totals.add(&service.id.namespace, &usage);
        let memo = PlacedMemo { assigned: placed.vips.clone(), diagnostics, usage, fits, round: self.round };
        if let Some(before) = self.services.insert(service.name.clone(), memo) {
            self.totals.remove(&service.id.namespace, &before.usage);
        }
        placed
    }

    /// The names of Services that don't fit: into one update, or beside older ones into the limits of the whole.
    pub(super) fn beyond_budget(
        &self,
        inventory: &Inventory<'_>,
        share: Share,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Vec<Arc<str>> {
        let too_large = self.services.iter().filter(|(_, memo)| !memo.fits).map(|(name, _)| name.clone());
        let mut beyond: Vec<Arc<str>> = too_large.collect();
        if !self.totals.fits(share) {
            let all = inventory.services.iter().filter_map(|it| Some((it, self.services.get(it.name)?)));
            let mut all: Vec<_> = all.filter(|(_, memo)| memo.fits).collect();
            all.sort_by_cached_key(|(service, _)| age_key(service.body.created.as_ref(), service.id));
            let mut grants = Grants::new(share);
            for (service, memo) in all {
                if let Err(reason) = grants.grant(&service.id.namespace, &memo.usage) {
                    diagnostics.push(service.error(Code::LimitExceeded, "metadata.name", reason));
                    beyond.push(service.name.clone());
                }
            }
        }
        beyond.sort_unstable();
        beyond
    }
}
