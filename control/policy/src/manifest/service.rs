//! `LoadBalancer` Services: VIPs, ports, traffic policies, session affinity and annotations.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Service as Document, ServiceSpec, ServiceStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use vipgate_dataplane::policy::limits::{MAX_PORTS_OF_SERVICE, MAX_SOURCE_RANGES_OF_SERVICE, MAX_VIPS_OF_SERVICE};
use vipgate_dataplane::policy::maglev;
use vipgate_dataplane::policy::spec::Scope;

use super::{Announce, Protocol, ServiceRequest, annotation, port};
use crate::diagnostic::{Code, Report, Severity};

/// vipgate's load balancer class; Services without a class depend on [`UnclassedServices`].
const LOAD_BALANCER_CLASS: &str = "vipgate.io/vipgate";
/// Type of Services with addresses of a load balancer.
const LOAD_BALANCER: &str = "LoadBalancer";
/// Default slots of a Maglev table: with 100 backends their load differs by a tenth.
pub const DEFAULT_TABLE_SIZE: u32 = 2039;
/// Kubernetes' default and range of the client IP affinity timeout, seconds.
const DEFAULT_AFFINITY_TIMEOUT: i32 = 10_800;
const AFFINITY_TIMEOUT_RANGE: std::ops::RangeInclusive<i32> = 1..=86_400;

/// Handling of `LoadBalancer` Services without `spec.loadBalancerClass`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnclassedServices {
    /// They are vipgate's.
    #[default]
    Serve,
    /// They are another controller's, unless they have an annotation of vipgate: in a cluster, Services without a class
    /// are those of its default load balancer.
    Ignore,
}

/// The fields of a Service that are used.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// `metadata.creationTimestamp`.
    pub created: Option<Time>,
    /// Its VIPs, with their fields; empty if vipgate doesn't handle it.
    pub vips: Vec<(Arc<str>, IpAddr)>,
    /// Why it has no VIPs.
    pub no_vip_reason: Option<String>,
    /// It has no VIP yet, since no address was allocated. Not an error; until then the traffic of its pods is dropped.
    pub pending: bool,
    /// Its frontend ports.
    pub ports: Vec<ServicePort>,
    /// Announce mode of its annotation.
    pub announce: Option<Announce>,
    /// Whether its annotation makes it an egress policy.
    pub egress: bool,
    /// Client IP affinity, seconds; `None`: each session selects a backend by itself.
    pub affinity: Option<u32>,
    /// External client prefixes that may reach it, without host bits; empty: all.
    pub source_ranges: Vec<IpNet>,
    /// Slots of its Maglev table.
    pub table_size: u32,
    /// External traffic policy.
    pub external: Scope,
    /// Internal traffic policy.
    pub internal: Scope,
    /// The port of its health check.
    pub health_check: Option<u16>,
    /// What it asks of address management; `None`: it has no address and may have none.
    pub request: Option<Box<ServiceRequest>>,
}

/// A frontend port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name; empty if it has none.
    pub name: Arc<str>,
    /// Port number at the VIPs.
    pub port: u16,
    pub protocol: Protocol,
    /// Target port, for slices without a number; `None` if it is a named port.
    pub target: Option<u16>,
    /// Index in `spec.ports`.
    pub index: usize,
}

impl ServicePort {
    /// Field of the port number.
    pub fn field(&self) -> String {
        format!("spec.ports[{}].port", self.index)
    }
}

impl Service {
    /// Field of the health check port.
    pub const HEALTH_CHECK_FIELD: &str = "spec.healthCheckNodePort";

    /// The health check port, if it is used: only with external traffic policy `Local`.
    pub fn active_health_check(&self) -> Option<u16> {
        self.health_check.filter(|_| self.external == Scope::Local)
    }
}

/// Reads a Service; invalid fields are reported and left out.
pub(super) fn read(document: &Document, unclassed: UnclassedServices, report: &mut Report<'_>) -> Service {
    let metadata = &document.metadata;
    let spec = document.spec.as_ref();
    annotation::warn_about_unknown(metadata, &annotation::SERVICE_ANNOTATIONS, report);
    let egress = annotation::enum_value(metadata, annotation::EGRESS, &[("true", true), ("false", false)], report);
    let mut service = Service {
        created: metadata.creation_timestamp.clone(),
        vips: Vec::new(),
        no_vip_reason: None,
        pending: false,
        ports: Vec::new(),
        announce: None,
        egress: egress.unwrap_or_default(),
        affinity: None,
        source_ranges: Vec::new(),
        table_size: DEFAULT_TABLE_SIZE,
        external: Scope::Cluster,
        internal: Scope::Cluster,
        health_check: None,
        request: ServiceRequest::read(document, unclassed).map(Box::new),
    };
    let kind = spec.and_then(|spec| spec.type_.as_deref()).unwrap_or("ClusterIP");
    if kind != LOAD_BALANCER {
        service.no_vip_reason = Some(format!("its type is {kind}, not LoadBalancer"));
        return service;
    }
    if let Some(reason) = other_class(document, unclassed) {
        service.no_vip_reason = Some(reason);
        return service;
    }
    if let Some(request) = &service.request {
        request.check(metadata, report);
    }
    let announces = [("L2", Announce::L2), ("BGP", Announce::Bgp)];
    service.announce = annotation::enum_value(metadata, annotation::ANNOUNCE, &announces, report);
    let expected = "a prime from 7 to 131071, e.g. \"4093\"";
    let table_size = annotation::number(metadata, annotation::TABLE_SIZE, maglev::is_valid_size, expected, report);
    service.table_size = table_size.unwrap_or(DEFAULT_TABLE_SIZE);
    if let Some(spec) = spec {
        read_spec(&mut service, spec, report);
    }
    service.vips = document.status.as_ref().map(|status| vips(status, report)).unwrap_or_default();
    for (field, count, max) in [
        ("status.loadBalancer.ingress", service.vips.len(), MAX_VIPS_OF_SERVICE),
        ("spec.ports", service.ports.len(), MAX_PORTS_OF_SERVICE),
        ("spec.loadBalancerSourceRanges", service.source_ranges.len(), MAX_SOURCE_RANGES_OF_SERVICE),
    ] {
        if count > max {
            let reason = format!("has {count} entries, the maximum is {max}");
            report(Severity::Error, Code::ServiceTooLarge, field, reason);
        }
    }
    if service.vips.is_empty() {
        service.no_vip_reason = Some("its status.loadBalancer.ingress has no address".into());
        service.pending = true;
    }
    service
}

/// Whether a Service is a load balancer of vipgate's.
pub(super) fn is_handled(document: &Document, unclassed: UnclassedServices) -> bool {
    let kind = document.spec.as_ref().and_then(|spec| spec.type_.as_deref());
    kind == Some(LOAD_BALANCER) && other_class(document, unclassed).is_none()
}

/// Why a `LoadBalancer` Service is another controller's; `None` if it is vipgate's.
fn other_class(document: &Document, unclassed: UnclassedServices) -> Option<String> {
    let class = document.spec.as_ref().and_then(|spec| spec.load_balancer_class.as_deref());
    match class {
        Some(LOAD_BALANCER_CLASS) => None,
        Some(class) => Some(format!("its loadBalancerClass is {class}, not {LOAD_BALANCER_CLASS}")),
        None if unclassed == UnclassedServices::Ignore && !annotation::has_any(&document.metadata) => Some(format!(
            "it has no loadBalancerClass {LOAD_BALANCER_CLASS} and no annotation of vipgate: create it with this \
             class, or annotate it, e.g. with {}: L2",
            annotation::ANNOUNCE
        )),
        None => None,
    }
}

fn read_spec(service: &mut Service, spec: &ServiceSpec, report: &mut Report<'_>) {
    service.ports = ports(spec, report);
    service.affinity = affinity(spec, report);
    service.source_ranges = source_ranges(spec, report);
    service.external = scope("spec.externalTrafficPolicy", spec.external_traffic_policy.as_deref(), report);
    service.internal = scope("spec.internalTrafficPolicy", spec.internal_traffic_policy.as_deref(), report);
    // 0: none.
    let health = spec.health_check_node_port.filter(|port| *port != 0);
    service.health_check =
        health.and_then(|port| port::number(port, || Service::HEALTH_CHECK_FIELD.to_owned(), report));
    if service.health_check.is_some() && service.active_health_check().is_none() {
        let reason = "is used only with externalTrafficPolicy Local";
        report(Severity::Warning, Code::HealthCheckPortUnused, Service::HEALTH_CHECK_FIELD, reason.to_owned());
    }
}

fn vips(status: &ServiceStatus, report: &mut Report<'_>) -> Vec<(Arc<str>, IpAddr)> {
    let mut vips: Vec<(Arc<str>, IpAddr)> = Vec::new();
    let ingress = status.load_balancer.iter().flat_map(|balancer| balancer.ingress.iter().flatten());
    for (i, ingress) in ingress.enumerate() {
        let Some(text) = ingress.ip.as_deref().filter(|text| !text.is_empty()) else { continue };
        let field = format!("status.loadBalancer.ingress[{i}].ip");
        match text.parse() {
            Ok(address) if vips.iter().any(|(_, vip)| *vip == address) => {}
            Ok(address) => vips.push((field.into(), address)),
            Err(_) => {
                report(Severity::Error, Code::MalformedValue, &field, format!("`{text}` is not an IP address"));
            }
        }
    }
    vips
}

fn ports(spec: &ServiceSpec, report: &mut Report<'_>) -> Vec<ServicePort> {
    let mut ports = Vec::new();
    for (at, it) in spec.ports.iter().flatten().enumerate() {
        let number = port::number(it.port, || format!("spec.ports[{at}].port"), report);
        let protocol = port::protocol("spec.ports", at, it.protocol.as_deref(), report);
        let name = port::name(it.name.as_deref(), || format!("spec.ports[{at}].name"), report);
        let (Some(number), Some(protocol), Some(name)) = (number, protocol, name) else { continue };
        let target = match &it.target_port {
            None | Some(IntOrString::Int(0)) => Some(number),
            Some(IntOrString::Int(target)) => port::number(*target, || format!("spec.ports[{at}].targetPort"), report),
            Some(IntOrString::String(_)) => None,
        };
        ports.push(ServicePort { name, port: number, protocol, target, index: at });
    }
    ports
}

fn affinity(spec: &ServiceSpec, report: &mut Report<'_>) -> Option<u32> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return None,
        Some("ClientIP") => {}
        Some(other) => {
            let reason = format!("`{other}` is unknown, expected None or ClientIP");
            report(Severity::Error, Code::UnknownValue, "spec.sessionAffinity", reason);
            return None;
        }
    }
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let seconds = config.and_then(|config| config.timeout_seconds).unwrap_or(DEFAULT_AFFINITY_TIMEOUT);
    if !AFFINITY_TIMEOUT_RANGE.contains(&seconds) {
        let reason = format!(
            "must be from {} to {} seconds, is {seconds}",
            AFFINITY_TIMEOUT_RANGE.start(),
            AFFINITY_TIMEOUT_RANGE.end()
        );
        report(Severity::Error, Code::OutOfRange, "spec.sessionAffinityConfig.clientIP.timeoutSeconds", reason);
    }
    u32::try_from(seconds).ok()
}

fn source_ranges(spec: &ServiceSpec, report: &mut Report<'_>) -> Vec<IpNet> {
    let mut ranges = Vec::new();
    for (i, text) in spec.load_balancer_source_ranges.iter().flatten().enumerate() {
        match text.trim().parse::<IpNet>() {
            Ok(range) => ranges.push(range.trunc()),
            Err(_) => report(
                Severity::Error,
                Code::MalformedValue,
                &format!("spec.loadBalancerSourceRanges[{i}]"),
                format!("`{text}` is not a prefix: write address/length, e.g. 198.51.100.0/24 or 2001:db8::/32"),
            ),
        }
    }
    ranges.sort_unstable();
    ranges.dedup();
    ranges
}

fn scope(field: &str, text: Option<&str>, report: &mut Report<'_>) -> Scope {
    match text {
        None | Some("" | "Cluster") => Scope::Cluster,
        Some("Local") => Scope::Local,
        Some(other) => {
            let reason = format!("`{other}` is unknown, expected Cluster or Local");
            report(Severity::Error, Code::UnknownValue, field, reason);
            Scope::Cluster
        }
    }
}
