//! `LoadBalancer` Services: their VIPs, the ports that belong to them, and what their annotations ask for.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service as Document, ServiceSpec, ServiceStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use super::Announce;
use super::read::Report;
use crate::complaint::Severity;
use crate::yaml::nearest;

/// The annotation of a Service that makes it an egress policy too, and the field that it is.
const EGRESS_ANNOTATION: &str = "vipgate.io/egress";
pub(crate) const EGRESS_FIELD: &str = "metadata.annotations[vipgate.io/egress]";
/// The annotation of a Service that says how its VIPs are announced, and the field that it is.
const ANNOUNCE_ANNOTATION: &str = "vipgate.io/announce";
pub(crate) const ANNOUNCE_FIELD: &str = "metadata.annotations[vipgate.io/announce]";
/// The load balancer class that is ours; Services without a class are too.
const LOAD_BALANCER_CLASS: &str = "vipgate.io/vipgate";

/// What counts of a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    /// When it was made.
    pub created: Option<Time>,
    /// Its VIPs and the fields that they stand in; empty when it has none of ours.
    pub vips: Vec<(Arc<str>, IpAddr)>,
    /// Why it has no VIP of ours.
    pub unserved: Option<String>,
    /// It has no VIP yet: whoever gives out addresses hasn't come to it. That is no mistake, and its pods wait closed.
    pub pending: bool,
    /// What is reached at its VIPs: frontends, and the health check.
    pub ports: Vec<ServicePort>,
    /// What its annotation says about announcing.
    pub announce: Option<Announce>,
    /// Whether its annotation makes it an egress policy.
    pub egress: bool,
}

/// A port that is reached at a VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its number.
    pub port: u16,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// Field that it stands in.
    pub field: String,
}

/// Reads a Service; what makes no sense is reported, and left out.
pub(super) fn read(document: &Document, report: &mut Report<'_>) -> Service {
    let metadata = &document.metadata;
    let spec = document.spec.as_ref();
    complain_about_annotations(metadata, report);
    let egress = annotation(metadata, EGRESS_ANNOTATION, &[("true", true), ("false", false)], report);
    let created = metadata.creation_timestamp.clone();
    let mut service = Service { created, egress: egress.unwrap_or_default(), ..Service::default() };
    let kind = spec.and_then(|spec| spec.type_.as_deref()).unwrap_or("ClusterIP");
    if kind != "LoadBalancer" {
        service.unserved = Some(format!("its type is {kind}, not LoadBalancer"));
        return service;
    }
    let class = spec.and_then(|spec| spec.load_balancer_class.as_deref()).unwrap_or(LOAD_BALANCER_CLASS);
    if class != LOAD_BALANCER_CLASS {
        service.unserved = Some(format!("its loadBalancerClass is {class}, not {LOAD_BALANCER_CLASS}"));
        return service;
    }
    let announces = [("L2", Announce::L2), ("BGP", Announce::Bgp)];
    service.announce = annotation(metadata, ANNOUNCE_ANNOTATION, &announces, report);
    service.ports = spec.map(|spec| ports(spec, report)).unwrap_or_default();
    service.vips = document.status.as_ref().map(|status| vips(status, report)).unwrap_or_default();
    if service.vips.is_empty() {
        service.unserved = Some("its status.loadBalancer.ingress has no address".into());
        service.pending = true;
    }
    service
}

fn vips(status: &ServiceStatus, report: &mut Report<'_>) -> Vec<(Arc<str>, IpAddr)> {
    let mut vips: Vec<(Arc<str>, IpAddr)> = Vec::new();
    let ingress = status.load_balancer.iter().flat_map(|balancer| balancer.ingress.iter().flatten());
    for (i, ingress) in ingress.enumerate() {
        let Some(text) = ingress.ip.as_deref().filter(|text| !text.is_empty()) else { continue };
        let field = format!("status.loadBalancer.ingress[{i}].ip");
        match text.parse() {
            Ok(address) if vips.iter().any(|(_, known)| *known == address) => {}
            Ok(address) => vips.push((field.into(), address)),
            Err(_) => report(Severity::Error, &field, format!("`{text}` is no address")),
        }
    }
    vips
}

/// Frontend ports and the health-check port.
fn ports(spec: &ServiceSpec, report: &mut Report<'_>) -> Vec<ServicePort> {
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
            Ok(port) if port > 0 => ports.push(ServicePort { port, protocol: protocol.to_owned(), field }),
            _ => report(Severity::Error, &field, format!("must be from 1 to 65535, is {port}")),
        }
    }
    ports
}

/// An annotation of ours that is unknown is misspelt, and what it asks for would silently not be done.
fn complain_about_annotations(metadata: &ObjectMeta, report: &mut Report<'_>) {
    let known = [EGRESS_ANNOTATION, ANNOUNCE_ANNOTATION];
    let names = metadata.annotations.iter().flat_map(|annotations| annotations.keys());
    for name in names.filter(|name| name.starts_with("vipgate.io/") && !known.contains(&name.as_str())) {
        let hint = nearest(name, &known).map(|near| format!(", did you mean {near}?")).unwrap_or_default();
        report(Severity::Warning, &format!("metadata.annotations[{name}]"), format!("unknown annotation{hint}"));
    }
}

fn annotation<T: Copy>(metadata: &ObjectMeta, name: &str, values: &[(&str, T)], report: &mut Report<'_>) -> Option<T> {
    let text = metadata.annotations.as_ref()?.get(name)?;
    let value = values.iter().find(|(word, _)| word == text).map(|(_, value)| *value);
    if value.is_none() {
        let words = values.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>().join(" or ");
        let reason = format!("must be {words}, is \"{text}\"");
        report(Severity::Error, &format!("metadata.annotations[{name}]"), reason);
    }
    value
}
