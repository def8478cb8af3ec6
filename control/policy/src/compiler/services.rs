//! Inbound Services: frontends and backends of each Service with a VIP, and what it takes of limits.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;
use vipgate_dataplane::policy::limits::MAX_BACKENDS_OF_SERVICE;
use vipgate_dataplane::policy::spec::ServicePortSpec;

use super::backends::BackendBuilder;
use super::budget::Usage;
use super::inventory::ObjectRef;
use super::vips::{AssignedVip, VipTable};
use crate::compiler::placement::{PlacedBackend, PlacedService};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{Family, Service, ServicePort, TABLE_SIZE_FIELD};

/// Maglev slots per backend below which the load of backends differs by more than a tenth.
const MIN_SLOTS_PER_BACKEND: usize = 20;

/// The VIPs of a Service that are assigned to a gateway, ascending.
pub(super) fn assigned_vips(service: &Service, vips: &VipTable) -> Vec<IpAddr> {
    let is_assigned =
        |vip: &IpAddr| vips.assigned.binary_search_by_key(vip, |AssignedVip { spec, .. }| spec.address).is_ok();
    let mut assigned: Vec<IpAddr> = service.vips.iter().map(|(_, vip)| *vip).filter(is_assigned).collect();
    assigned.sort_unstable();
    assigned
}

/// Compiles a Service with these assigned VIPs.
pub(super) fn compile<'a>(
    service: ObjectRef<'a, Service>,
    assigned: Vec<IpAddr>,
    builder: &mut BackendBuilder<'a>,
    diagnostics: &mut Vec<Diagnostic>,
) -> PlacedService {
    let backends = builder.backends_of(service, diagnostics);
    check_limits(service, &backends, diagnostics);
    check_backends(service, &assigned, &backends, diagnostics);
    let Service { ports, source_ranges, affinity, table_size, external, internal, .. } = service.body;
    let port =
        |it: &ServicePort| ServicePortSpec { name: it.name.clone(), protocol: it.protocol.number(), port: it.port };
    PlacedService {
        name: service.name.clone(),
        vips: assigned,
        ports: ports.iter().map(port).collect(),
        backends,
        source_ranges: source_ranges.clone(),
        affinity: *affinity,
        table_size: *table_size,
        external: *external,
        internal: *internal,
        health_port: service.body.active_health_check(),
    }
}

/// What a Service takes of limits.
pub(super) fn usage(service: &PlacedService) -> Usage {
    let ports = |family| {
        let of_family = service.backends.iter().filter(move |it| Family::of(it.address) == family);
        of_family.map(|it| it.ports.iter().filter(|port| **port > 0).count()).sum()
    };
    let backend_ports = Family::ALL.map(ports);
    Usage { backend_ports, lookup_tables: lookup_table_bytes(service), ..Usage::default() }
}

/// Bytes of the Maglev tables of a Service at a gateway, at most: one of each distinct set of backends, and two where the
/// traffic policies differ. A set of one backend has a table of one slot.
pub fn lookup_table_bytes(service: &PlacedService) -> usize {
    /// A slot is the number of a backend.
    const SLOT_BYTES: usize = size_of::<u16>();
    let kinds = if service.external == service.internal { 1 } else { 2 };
    let mut slots = 0;
    for family in Family::ALL {
        let backends: Vec<_> = service.backends.iter().filter(|it| Family::of(it.address) == family).collect();
        // Most backends have the same ports, in one allocation: a set is a list of such groups.
        let mut groups: Vec<(&Arc<[u16]>, usize)> = Vec::new();
        for backend in backends {
            match groups.last_mut() {
                Some((ports, count)) if Arc::ptr_eq(ports, &backend.ports) => *count += 1,
                _ => groups.push((&backend.ports, 1)),
            }
        }
        let sets: HashMap<Vec<usize>, usize> = (0..service.ports.len())
            .map(|port| {
                let with_port = groups.iter().enumerate().filter(|(_, (ports, _))| ports[port] > 0);
                let set: Vec<usize> = with_port.clone().map(|(group, _)| group).collect();
                (set, with_port.map(|(_, (_, count))| count).sum())
            })
            .collect();
        let table = |backends: &usize| if *backends > 1 { service.table_size as usize } else { *backends };
        slots += sets.values().map(table).sum::<usize>();
    }
    slots * kinds * SLOT_BYTES
}

/// Limits of one Service resource, so that it fits into a gRPC message.
fn check_limits(service: ObjectRef<'_, Service>, backends: &[PlacedBackend], diagnostics: &mut Vec<Diagnostic>) {
    for (field, what, count, max) in [
        ("spec", "backends", backends.len(), MAX_BACKENDS_OF_SERVICE),
        ("spec", "bytes of backend names", PlacedService::encoded_size(backends), PlacedService::MAX_ENCODED_SIZE),
    ] {
        if count > max {
            let reason = format!("has {count} {what}, the maximum is {max}");
            diagnostics.push(service.error(Code::ServiceTooLarge, field, reason));
        }
    }
}

/// Warns of ports and VIPs without backends, and of Maglev tables too small to spread sessions evenly.
fn check_backends(
    service: ObjectRef<'_, Service>,
    assigned: &[IpAddr],
    backends: &[PlacedBackend],
    diagnostics: &mut Vec<Diagnostic>,
) {
    if backends.is_empty() {
        return;
    }
    for (i, port) in service.body.ports.iter().enumerate() {
        if backends.iter().all(|backend| backend.ports[i] == 0) {
            let (field, name) = match &*port.name {
                "" => (port.field(), format!("{} port {}", port.protocol, port.port)),
                name => (format!("spec.ports[{}].name", port.index), format!("port `{name}`")),
            };
            let reason = format!("{name} has no backend: no EndpointSlice has this port");
            diagnostics.push(service.warning(Code::PortWithoutBackend, &field, reason));
        }
    }
    let of_family = |family| backends.iter().filter(move |it| Family::of(it.address) == family);
    let has = Family::ALL.map(|family| of_family(family).next().is_some());
    for (field, vip) in service.body.vips.iter().filter(|(_, vip)| assigned.binary_search(vip).is_ok()) {
        if !has[usize::from(vip.is_ipv6())] {
            let family = Family::of(*vip);
            let reason = format!("{vip} has no backend: {} has no {family} endpoint", service.id);
            diagnostics.push(service.warning(Code::VipWithoutBackend, field, reason));
        }
    }
    let slots = service.body.table_size as usize;
    for family in Family::ALL {
        let count = of_family(family).filter(|it| it.accepts_sessions()).count();
        if count > slots / MIN_SLOTS_PER_BACKEND {
            let reason = format!(
                "{count} {family} endpoints in a Maglev table of {slots} slots spread sessions unevenly: set \
                 vipgate.io/maglev-table-size to a prime of at least {}",
                count * MIN_SLOTS_PER_BACKEND
            );
            diagnostics.push(service.warning(Code::MaglevTableTooSmall, TABLE_SIZE_FIELD, reason));
        }
    }
}
