//! Decodes a Service and its backend slices.

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::policy::maglev;
use vipgate_dataplane::policy::spec::{BackendState, Scope, ServicePortSpec};
use vipgate_policy::compiler::{PlacedBackend, PlacedService};
use vipgate_policy::manifest::{Hints, MAX_WEIGHT, Protocol};

use super::super::super::proto;
use super::super::slices::{BackendSlice, MAX_SLICES, ServiceResource, parse_name};
use super::{
    ResourceError, check_entry_count, check_len, check_name, field_error, parse_address, parse_enum, parse_limit,
    parse_prefixes, parse_text,
};

/// Decodes a Service.
pub(super) fn service(name: &str, message: &proto::Service) -> Result<ServiceResource, ResourceError> {
    check_name(&message.name, name)?;
    if message.backend_slices > MAX_SLICES {
        let reason = format!("is {}, the maximum is {MAX_SLICES}", message.backend_slices);
        return Err(field_error("backend_slices", reason));
    }
    if message.backend_slices > 0 && !message.backends.is_empty() {
        return Err(field_error("backends", "isn't empty, but the Service has backend slices"));
    }
    check_entry_count(&message.vips, "vips")?;
    check_len(&message.ports, "ports", PlacedService::MAX_PORTS)?;
    check_len(&message.backends, "backends", PlacedService::MAX_BACKENDS)?;
    check_len(&message.source_ranges, "source_ranges", PlacedService::MAX_SOURCE_RANGES)?;
    if !maglev::is_valid_size(message.table_size) {
        return Err(field_error("table_size", format!("{} is not a prime from 7 to 131071", message.table_size)));
    }
    let health_port = u16::try_from(message.health_check_port)
        .map_err(|_| field_error("health_check_port", format!("{} is not a port", message.health_check_port)))?;
    let vips = message.vips.iter().enumerate().map(|(i, vip)| parse_address(&format!("vips[{i}]"), vip));
    let ports = ports(&message.ports)?;
    let backends = message.backends.iter().enumerate();
    let backends: Vec<_> = backends.map(|(i, it)| backend(i, it, ports.len())).collect::<Result<_, _>>()?;
    let backend = |i: usize| format!("backends[{i}].address");
    let service = PlacedService {
        name: parse_text("name", name)?,
        vips: ascending(vips.collect::<Result<_, _>>()?, |vip: &IpAddr| *vip, |i| format!("vips[{i}]"))?,
        ports,
        backends: ascending(backends, |it: &PlacedBackend| it.address, backend)?,
        source_ranges: ascending(
            parse_prefixes("source_ranges", &message.source_ranges)?,
            |net| *net,
            |i| format!("source_ranges[{i}]"),
        )?,
        affinity: parse_limit(message.affinity_seconds),
        table_size: message.table_size,
        external: scope("external_traffic_policy", message.external_traffic_policy)?,
        internal: scope("internal_traffic_policy", message.internal_traffic_policy)?,
        health_port: (health_port > 0).then_some(health_port),
    };
    Ok(ServiceResource { service, slices: message.backend_slices })
}

/// Decodes a part of a Service's backends. How many ports they must have, the Service says.
pub(super) fn slice(name: &str, message: &proto::BackendSlice) -> Result<BackendSlice, ResourceError> {
    let Some((service, number)) = parse_name(name).filter(|(service, _)| !service.is_empty()) else {
        let reason = format!("`{name}` isn't the name of a Service with `#` and a number below {MAX_SLICES}");
        return Err(field_error("name", reason));
    };
    if message.service != service {
        return Err(field_error("service", format!("is `{}`, but the resource is of `{service}`", message.service)));
    }
    check_entry_count(&message.backends, "backends")?;
    for (i, it) in message.backends.iter().enumerate() {
        check_len(&it.ports, &format!("backends[{i}].ports"), PlacedService::MAX_PORTS)?;
    }
    let backends = message.backends.iter().enumerate();
    let backends: Vec<_> = backends.map(|(i, it)| backend(i, it, it.ports.len())).collect::<Result<_, _>>()?;
    let address = |i: usize| format!("backends[{i}].address");
    let backends = ascending(backends, |it: &PlacedBackend| it.address, address)?;
    Ok(BackendSlice { service: parse_text("service", service)?, number, backends })
}

/// Checks for strictly ascending order, so without duplicates.
fn ascending<T, K: Ord>(
    all: Vec<T>,
    key: impl Fn(&T) -> K,
    field: impl Fn(usize) -> String,
) -> Result<Vec<T>, ResourceError> {
    match all.windows(2).position(|pair| key(&pair[0]) >= key(&pair[1])) {
        Some(previous) => Err(field_error(field(previous + 1), "is not in ascending order")),
        None => Ok(all),
    }
}

fn ports(messages: &[proto::ServicePort]) -> Result<Vec<ServicePortSpec>, ResourceError> {
    let mut seen = foldhash::HashSet::default();
    let port = |(i, it): (usize, &proto::ServicePort)| {
        let field = |name: &str| format!("ports[{i}].{name}");
        let protocol = Protocol::ALL.into_iter().map(Protocol::number).find(|known| u32::from(*known) == it.protocol);
        let protocol =
            protocol.ok_or_else(|| field_error(field("protocol"), format!("{} has no ports", it.protocol)))?;
        let port = u16::try_from(it.port).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| field_error(field("port"), format!("{} is not a port", it.port)))?;
        if !seen.insert((protocol, port)) {
            return Err(field_error(field("port"), format!("{port} of this protocol is a duplicate")));
        }
        Ok(ServicePortSpec { name: parse_text(&field("name"), &it.name)?, protocol, port })
    };
    messages.iter().enumerate().map(port).collect()
}

fn backend(i: usize, message: &proto::Backend, ports: usize) -> Result<PlacedBackend, ResourceError> {
    let field = |name: &str| format!("backends[{i}].{name}");
    if message.ports.len() != ports {
        let reason = format!("has {} entries, but the Service has {ports} ports", message.ports.len());
        return Err(field_error(field("ports"), reason));
    }
    let port =
        |port: &u32| u16::try_from(*port).map_err(|_| field_error(field("ports"), format!("{port} is not a port")));
    let weight = u16::try_from(message.weight).ok().filter(|weight| *weight <= MAX_WEIGHT);
    let weight = weight
        .ok_or_else(|| field_error(field("weight"), format!("is {}, the maximum is {}", message.weight, MAX_WEIGHT)))?;
    let optional = |name: &str, value: &str| (!value.is_empty()).then(|| parse_text(&field(name), value)).transpose();
    let names = |name: &str, names: &[String]| -> Result<Vec<Arc<str>>, ResourceError> {
        check_entry_count(names, &field(name))?;
        let names = names.iter().map(|it| parse_text(&field(name), it)).collect::<Result<_, _>>()?;
        ascending(names, Arc::clone, |at| field(&format!("{name}[{at}]")))
    };
    let (nodes, zones) = (names("hint_nodes", &message.hint_nodes)?, names("hint_zones", &message.hint_zones)?);
    let has_hints = !nodes.is_empty() || !zones.is_empty();
    Ok(PlacedBackend {
        address: parse_address(&field("address"), &message.address)?,
        name: parse_text(&field("name"), &message.name)?,
        ports: message.ports.iter().map(port).collect::<Result<_, _>>()?,
        weight,
        state: match parse_enum(&field("state"), message.state)? {
            proto::BackendState::Ready => BackendState::Ready,
            proto::BackendState::Terminating => BackendState::Terminating,
            proto::BackendState::NotReady => BackendState::NotReady,
        },
        node: optional("node", &message.node)?,
        zone: optional("zone", &message.zone)?,
        hints: has_hints.then(|| Arc::new(Hints { nodes, zones })),
    })
}

fn scope(field: &str, number: i32) -> Result<Scope, ResourceError> {
    Ok(match parse_enum(field, number)? {
        proto::TrafficPolicy::Cluster => Scope::Cluster,
        proto::TrafficPolicy::Local => Scope::Local,
    })
}
