//! Inbound Services: frontends and backends of each Service with a VIP, and checks across Services.

use std::net::IpAddr;

use foldhash::{HashMap, HashMapExt};
use vipgate_dataplane::policy::spec::ServicePortSpec;

use super::backends::BackendBuilder;
use super::inventory::{ObjectRef, age_key};
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

/// Health check ports are unique: they listen on the gateway's own addresses, too. The oldest Service keeps the port.
pub(super) fn check_health_check_ports<'a>(services: &[ObjectRef<'a, Service>], diagnostics: &mut Vec<Diagnostic>) {
    let mut checked: Vec<_> = services
        .iter()
        .filter(|service| !service.body.vips.is_empty())
        .filter_map(|service| Some((service.body.active_health_check()?, *service)))
        .collect();
    checked.sort_by_cached_key(|(_, service)| age_key(service.body.created.as_ref(), service.id));
    let mut taken: HashMap<u16, ObjectRef<'a, Service>> = HashMap::new();
    for (port, service) in checked {
        let ObjectRef { id, origin, .. } = *taken.entry(port).or_insert(service);
        if id != service.id {
            let reason = format!("port {port} is already the health check port of {id} ({origin})");
            diagnostics.push(service.error(Code::HealthCheckPortConflict, Service::HEALTH_CHECK_FIELD, reason));
        }
    }
}

/// Limits of one Service resource, so that it fits into a gRPC message.
fn check_limits(service: ObjectRef<'_, Service>, backends: &[PlacedBackend], diagnostics: &mut Vec<Diagnostic>) {
    let Service { ports, source_ranges, .. } = service.body;
    for (field, what, count, max) in [
        ("spec.ports", "ports", ports.len(), PlacedService::MAX_PORTS),
        ("spec.loadBalancerSourceRanges", "prefixes", source_ranges.len(), PlacedService::MAX_SOURCE_RANGES),
        ("spec", "backend addresses", backends.len(), PlacedService::MAX_BACKENDS),
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
