//! `LoadBalancer` Services: their VIPs, the ports that belong to them, and what their annotations ask for.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;

use super::inventory::{Inventory, Key, Located};
use super::{ANNOUNCE_ANNOTATION, EGRESS_ANNOTATION, LOAD_BALANCER_CLASS};
use crate::complaint::Complaint;
use crate::manifest::Announce;
use crate::yaml::nearest;

/// A Service as the gateway sees it.
#[derive(Debug)]
pub(super) struct Frontend<'a> {
    pub(super) service: Located<'a, Service>,
    /// Its VIPs and the fields that they stand in; empty when it has none of ours.
    pub(super) vips: Vec<(String, IpAddr)>,
    /// Why it has no VIP of ours.
    pub(super) unserved: Option<String>,
    /// It has no VIP yet: whoever gives out addresses hasn't come to it. That is no mistake, and its pods wait closed.
    pub(super) pending: bool,
    /// Port, protocol and field of what is reached at its VIPs.
    pub(super) ports: Vec<(u16, String, String)>,
    /// What its annotation says about announcing.
    pub(super) announce: Option<Announce>,
    /// Whether its annotation makes it an egress policy.
    pub(super) egress: bool,
}

/// All Services of the inventory.
pub(super) fn read<'a>(inventory: &Inventory<'a>, log: &mut Vec<Complaint>) -> BTreeMap<Key<'a>, Frontend<'a>> {
    inventory.services.iter().map(|(key, service)| (*key, frontend(*service, log))).collect()
}

fn frontend<'a>(service: Located<'a, Service>, log: &mut Vec<Complaint>) -> Frontend<'a> {
    let spec = service.body.spec.as_ref();
    let kind = spec.and_then(|spec| spec.type_.as_deref()).unwrap_or("ClusterIP");
    let class = spec.and_then(|spec| spec.load_balancer_class.as_deref()).unwrap_or(LOAD_BALANCER_CLASS);
    complain_about_annotations(service, log);
    let egress = annotation(service, EGRESS_ANNOTATION, &[("true", true), ("false", false)], log).unwrap_or_default();
    let mut frontend = Frontend {
        service,
        vips: Vec::new(),
        unserved: None,
        pending: false,
        ports: Vec::new(),
        announce: None,
        egress,
    };
    if kind != "LoadBalancer" {
        frontend.unserved = Some(format!("its type is {kind}, not LoadBalancer"));
        return frontend;
    }
    if class != LOAD_BALANCER_CLASS {
        frontend.unserved = Some(format!("its loadBalancerClass is {class}, not {LOAD_BALANCER_CLASS}"));
        return frontend;
    }
    let announces = [("L2", Announce::L2), ("BGP", Announce::Bgp)];
    frontend.announce = annotation(service, ANNOUNCE_ANNOTATION, &announces, log);
    frontend.ports = ports(service, log);
    let ingress = service.body.status.iter().flat_map(|status| &status.load_balancer);
    for (i, ingress) in ingress.flat_map(|balancer| balancer.ingress.iter().flatten()).enumerate() {
        let Some(text) = ingress.ip.as_deref().filter(|text| !text.is_empty()) else { continue };
        let field = format!("status.loadBalancer.ingress[{i}].ip");
        match text.parse() {
            Ok(address) if frontend.vips.iter().any(|(_, known)| *known == address) => {}
            Ok(address) => frontend.vips.push((field, address)),
            Err(_) => log.push(service.error(&field, format!("`{text}` is no address"))),
        }
    }
    if frontend.vips.is_empty() {
        frontend.unserved = Some("its status.loadBalancer.ingress has no address".into());
        frontend.pending = true;
    }
    frontend
}

/// Frontend ports and the health-check port.
fn ports(service: Located<'_, Service>, log: &mut Vec<Complaint>) -> Vec<(u16, String, String)> {
    let Some(spec) = &service.body.spec else { return Vec::new() };
    let frontends = spec
        .ports
        .iter()
        .flatten()
        .enumerate()
        .map(|(i, port)| (port.port, port.protocol.as_deref().unwrap_or("TCP"), format!("spec.ports[{i}].port")));
    let health = spec.health_check_node_port.filter(|port| *port != 0);
    let health = health.map(|port| (port, "TCP", "spec.healthCheckNodePort".to_owned()));
    let mut ports = Vec::new();
    for (port, protocol, field) in frontends.chain(health) {
        match u16::try_from(port) {
            Ok(port) if port > 0 => ports.push((port, protocol.to_owned(), field)),
            _ => log.push(service.error(&field, format!("must be from 1 to 65535, is {port}"))),
        }
    }
    ports
}

/// An annotation of ours that is unknown is misspelt, and what it asks for would silently not be done.
fn complain_about_annotations(service: Located<'_, Service>, log: &mut Vec<Complaint>) {
    let known = [EGRESS_ANNOTATION, ANNOUNCE_ANNOTATION];
    let names = service.body.metadata.annotations.iter().flat_map(|annotations| annotations.keys());
    for name in names.filter(|name| name.starts_with("vipgate.io/") && !known.contains(&name.as_str())) {
        let hint = nearest(name, &known).map(|near| format!(", did you mean {near}?")).unwrap_or_default();
        log.push(service.warning(&format!("metadata.annotations[{name}]"), format!("unknown annotation{hint}")));
    }
}

fn annotation<T: Copy>(
    service: Located<'_, Service>,
    name: &str,
    values: &[(&str, T)],
    log: &mut Vec<Complaint>,
) -> Option<T> {
    let text = service.body.metadata.annotations.as_ref()?.get(name)?;
    let value = values.iter().find(|(word, _)| word == text).map(|(_, value)| *value);
    if value.is_none() {
        let words = values.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>().join(" or ");
        log.push(service.error(&format!("metadata.annotations[{name}]"), format!("must be {words}, is \"{text}\"")));
    }
    value
}
