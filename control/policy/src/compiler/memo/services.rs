//! Services that a change concerns: their own manifests, endpoint slices or assigned VIPs differ.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;

use super::{Differences, Placement, Table, VipTable};
use crate::compiler::backends::BackendBuilder;
use crate::compiler::claim::Inputs;
use crate::compiler::inventory::ObjectRef;
use crate::compiler::placement::PlacedService;
use crate::compiler::services;
use crate::diagnostic::Diagnostic;
use crate::manifest::Service;

/// The Services of the previous compilation, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct ServiceMemo {
    services: HashMap<Arc<str>, PlacedMemo>,
    /// Counts compilations of all Services: those of an earlier one are gone.
    round: u64,
}

/// A Service of the previous compilation.
#[derive(Clone, Debug)]
struct PlacedMemo {
    assigned: Vec<IpAddr>,
    diagnostics: Vec<Diagnostic>,
    round: u64,
}

impl ServiceMemo {
    /// The Services with at least one VIP that is assigned to a gateway.
    pub(super) fn compile<'a>(
        &mut self,
        previous: &Placement,
        sources: &'a Inputs<'a>,
        (vips, differences): (&'a VipTable, &Differences<'a>),
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Table<PlacedService> {
        services::check_health_check_ports(&sources.inventory.services, diagnostics);
        let mut builder = BackendBuilder::new(sources, &vips.endpoint_addresses);
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
            let is_all = changes.has_pods || differences.vips.endpoint_addresses;
            for service in &sources.inventory.services {
                let assigned = services::assigned_vips(service.body, vips);
                if assigned.is_empty() {
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
            gone.extend(self.services.extract_if(|_, memo| memo.round != round).map(|(name, _)| name));
        }
        diagnostics.extend(self.services.values().flat_map(|memo| memo.diagnostics.iter().cloned()));
        compiled.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        gone.sort_unstable();
        let gone: Vec<&str> = gone.iter().map(|name| &**name).collect();
        previous.services.edit(&gone, compiled)
    }

    fn place<'a>(
        &mut self,
        service: ObjectRef<'a, Service>,
        assigned: Vec<IpAddr>,
        builder: &mut BackendBuilder<'a>,
    ) -> PlacedService {
        let mut diagnostics = Vec::new();
        let placed = services::compile(service, assigned, builder, &mut diagnostics);
        let memo = PlacedMemo { assigned: placed.vips.clone(), diagnostics, round: self.round };
        self.services.insert(service.name.clone(), memo);
        placed
    }
}
