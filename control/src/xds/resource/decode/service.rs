//! Decodes a Service and its backend slices.

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::policy::limits::{MAX_SOURCE_RANGES_OF_SERVICE, MAX_VIPS_OF_SERVICE};
use vipgate_dataplane::policy::spec::{BackendState, Scope, ServicePortSpec};
use vipgate_policy::compiler::{PlacedBackend, PlacedService};
use vipgate_policy::manifest::{Hints, MAX_WEIGHT, Protocol};

use super::super::super::proto;
use super::super::slices::{BackendSlice, MAX_SLICES, ServiceResource, parse_name, sort_backends};
use super::{
    MAX_ENTRIES, ResourceError, check_len, check_name, field_error, parse_address, parse_enum, parse_limit,
    parse_prefixes, parse_text,
};

/// Decodes a Service.
pub(super) fn service(name: &str, message: &proto::Service) -> Result<ServiceResource, ResourceError> {
    check_name(&message.name, name)?;
    if message.backend_slices > MAX_SLICES {
        let reason = format!("is {}, the maximum is {MAX_SLICES}", message.backend_slices);
        return Err(field_error("backend_slices", reason));
    }
    let lists = [("backends", &message.backends), ("more_backends", &message.more_backends)];
    if let Some((field, _)) = lists.iter().find(|(_, backends)| message.backend_slices > 0 && !backends.is_empty()) {
        return Err(field_error(*field, "isn't empty, but the Service has backend slices"));
    }
    check_len(&message.vips, "vips", MAX_VIPS_OF_SERVICE)?;
    check_len(&message.source_ranges, "source_ranges", MAX_SOURCE_RANGES_OF_SERVICE)?;
    let health_port = u16::try_from(message.health_check_port)
        .map_err(|_| field_error("health_check_port", format!("{} is not a port", message.health_check_port)))?;
    let vips = message.vips.iter().enumerate().map(|(i, vip)| parse_address(&format!("vips[{i}]"), vip));
    let mut all = backends("backends", &message.backends)?;
    all.extend(backends("more_backends", &message.more_backends)?);
    sort_backends(&mut all);
    let service = PlacedService {
        name: parse_text("name", name)?,
        vips: ascending(vips.collect::<Result<_, _>>()?, |vip: &IpAddr| *vip, |i| format!("vips[{i}]"))?,
        ports: ports(&message.ports)?,
        backends: all,
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

/// Decodes a part of a Service's backends.
pub(super) fn slice(name: &str, message: &proto::BackendSlice) -> Result<BackendSlice, ResourceError> {
    let Some((service, number)) = parse_name(name).filter(|(service, _)| !service.is_empty()) else {
        let reason = format!("`{name}` isn't the name of a Service with `#` and a number below {MAX_SLICES}");
        return Err(field_error("name", reason));
    };
    if message.service != service {
        return Err(field_error("service", format!("is `{}`, but the resource is of `{service}`", message.service)));
    }
    for (field, backends) in [("backends", &message.backends), ("more_backends", &message.more_backends)] {
        check_len(backends, field, MAX_ENTRIES)?;
    }
    Ok(BackendSlice {
        service: parse_text("service", service)?,
        number,
        backends: backends("backends", &message.backends)?,
        more_backends: backends("more_backends", &message.more_backends)?,
    })
}

fn backends(field: &str, messages: &[proto::Backend]) -> Result<Vec<PlacedBackend>, ResourceError> {
    messages.iter().enumerate().map(|(i, it)| backend(&format!("{field}[{i}]"), it)).collect()
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
    let port = |(i, it): (usize, &proto::ServicePort)| {
        let field = |name: &str| format!("ports[{i}].{name}");
        let protocol = Protocol::ALL.into_iter().map(Protocol::number).find(|known| u32::from(*known) == it.protocol);
        let protocol =
            protocol.ok_or_else(|| field_error(field("protocol"), format!("{} has no ports", it.protocol)))?;
        let port = u16::try_from(it.port).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| field_error(field("port"), format!("{} is not a port", it.port)))?;
        Ok(ServicePortSpec { name: parse_text(&field("name"), &it.name)?, protocol, port })
    };
    messages.iter().enumerate().map(port).collect()
}

fn backend(field: &str, message: &proto::Backend) -> Result<PlacedBackend, ResourceError> {
    let field = |name: &str| format!("{field}.{name}");
    let port =
        |port: &u32| u16::try_from(*port).map_err(|_| field_error(field("ports"), format!("{port} is not a port")));
    let weight = u16::try_from(message.weight).ok().filter(|weight| *weight <= MAX_WEIGHT);
    let weight = weight
        .ok_or_else(|| field_error(field("weight"), format!("is {}, the maximum is {}", message.weight, MAX_WEIGHT)))?;
    let optional = |name: &str, value: &str| (!value.is_empty()).then(|| parse_text(&field(name), value)).transpose();
    let names = |name: &str, names: &[String]| -> Result<Vec<Arc<str>>, ResourceError> {
        check_len(names, &field(name), MAX_ENTRIES)?;
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
