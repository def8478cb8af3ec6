//! A resource to its Service.

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::snapshot::maglev;
use vipgate_dataplane::snapshot::spec::{BackendState, Scope, ServicePortSpec};

use super::super::super::proto;
use super::{Fault, address, at_most, fault, few, known, limit, named, nets, text};
use crate::manifest::{Hints, MOST_WEIGHT, Protocol};
use crate::policy::{DealtBackend, DealtService};

/// One Service.
pub(super) fn service(name: &str, message: &proto::Service) -> Result<DealtService, Fault> {
    named(&message.name, name)?;
    few(&message.vips, "vips")?;
    at_most(&message.ports, "ports", DealtService::MOST_PORTS)?;
    at_most(&message.backends, "backends", DealtService::MOST_BACKENDS)?;
    at_most(&message.source_ranges, "source_ranges", DealtService::MOST_RANGES)?;
    if !maglev::is_size(message.table_size) {
        return Err(fault("table_size", format!("{} is no prime from 7 to 131071", message.table_size)));
    }
    let health_port = u16::try_from(message.health_check_port)
        .map_err(|_| fault("health_check_port", format!("{} is no port", message.health_check_port)))?;
    let vips = message.vips.iter().enumerate().map(|(i, vip)| address(&format!("vips[{i}]"), vip));
    let ports = ports(&message.ports)?;
    let backends = message.backends.iter().enumerate();
    let backends: Vec<_> = backends.map(|(i, it)| backend(i, it, ports.len())).collect::<Result<_, _>>()?;
    let backend = |i: usize| format!("backends[{i}].address");
    Ok(DealtService {
        name: text("name", name)?,
        vips: ascending(vips.collect::<Result<_, _>>()?, |vip: &IpAddr| *vip, |i| format!("vips[{i}]"))?,
        ports,
        backends: ascending(backends, |it: &DealtBackend| it.address, backend)?,
        source_ranges: ascending(
            nets("source_ranges", &message.source_ranges)?,
            |net| *net,
            |i| format!("source_ranges[{i}]"),
        )?,
        affinity: limit(message.affinity_seconds),
        table_size: message.table_size,
        external: scope("external_traffic_policy", message.external_traffic_policy)?,
        internal: scope("internal_traffic_policy", message.internal_traffic_policy)?,
        health_port: (health_port > 0).then_some(health_port),
    })
}

/// Each above the one before it: so each is there once.
fn ascending<T, K: Ord>(all: Vec<T>, key: impl Fn(&T) -> K, field: impl Fn(usize) -> String) -> Result<Vec<T>, Fault> {
    match all.windows(2).position(|pair| key(&pair[0]) >= key(&pair[1])) {
        Some(before) => Err(fault(field(before + 1), "is not above the one before it")),
        None => Ok(all),
    }
}

fn ports(messages: &[proto::ServicePort]) -> Result<Vec<ServicePortSpec>, Fault> {
    let mut taken = foldhash::HashSet::default();
    let port = |(i, it): (usize, &proto::ServicePort)| {
        let field = |name: &str| format!("ports[{i}].{name}");
        let protocol = Protocol::ALL.into_iter().map(Protocol::number).find(|known| u32::from(*known) == it.protocol);
        let protocol = protocol.ok_or_else(|| fault(field("protocol"), format!("{} has no ports", it.protocol)))?;
        let port = u16::try_from(it.port).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| fault(field("port"), format!("{} is no port", it.port)))?;
        if !taken.insert((protocol, port)) {
            return Err(fault(field("port"), format!("{port} of this protocol is in the list already")));
        }
        Ok(ServicePortSpec { name: text(&field("name"), &it.name)?, protocol, port })
    };
    messages.iter().enumerate().map(port).collect()
}

fn backend(i: usize, message: &proto::Backend, ports: usize) -> Result<DealtBackend, Fault> {
    let field = |name: &str| format!("backends[{i}].{name}");
    if message.ports.len() != ports {
        let reason = format!("has {} entries, but the Service has {ports} ports", message.ports.len());
        return Err(fault(field("ports"), reason));
    }
    let port = |port: &u32| u16::try_from(*port).map_err(|_| fault(field("ports"), format!("{port} is no port")));
    let weight = u16::try_from(message.weight).ok().filter(|weight| *weight <= MOST_WEIGHT);
    let weight = weight.ok_or_else(|| {
        fault(field("weight"), format!("{} is more than a backend can have, {MOST_WEIGHT}", message.weight))
    })?;
    let place = |name: &str, place: &str| (!place.is_empty()).then(|| text(&field(name), place)).transpose();
    let names = |name: &str, names: &[String]| -> Result<Vec<Arc<str>>, Fault> {
        few(names, &field(name))?;
        let names = names.iter().map(|it| text(&field(name), it)).collect::<Result<_, _>>()?;
        ascending(names, Arc::clone, |at| field(&format!("{name}[{at}]")))
    };
    let (nodes, zones) = (names("hint_nodes", &message.hint_nodes)?, names("hint_zones", &message.hint_zones)?);
    let has_hints = !nodes.is_empty() || !zones.is_empty();
    Ok(DealtBackend {
        address: address(&field("address"), &message.address)?,
        name: text(&field("name"), &message.name)?,
        ports: message.ports.iter().map(port).collect::<Result<_, _>>()?,
        weight,
        state: match known(&field("state"), message.state)? {
            proto::BackendState::Ready => BackendState::Ready,
            proto::BackendState::Terminating => BackendState::Terminating,
            proto::BackendState::NotReady => BackendState::NotReady,
        },
        node: place("node", &message.node)?,
        zone: place("zone", &message.zone)?,
        hints: has_hints.then(|| Arc::new(Hints { nodes, zones })),
    })
}

fn scope(field: &str, number: i32) -> Result<Scope, Fault> {
    Ok(match known(field, number)? {
        proto::TrafficPolicy::Cluster => Scope::Cluster,
        proto::TrafficPolicy::Local => Scope::Local,
    })
}
