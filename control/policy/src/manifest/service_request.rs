//! What a Service asks of address management, and what its status has now.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Service as Document, ServiceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta, Time};

use super::annotation::{ADDRESSES, ANNOUNCE, POOL, SHARING_KEY, field, text};
use super::service::is_handled;
use super::{DEFAULT_NAMESPACE, Family, Kind, ObjectId, Protocol, UnclassedServices, is_object_name};
use crate::diagnostic::{Code, Report, Severity};

/// The field manager of addresses in the status of Services: the API server keeps it with the fields that it has set.
pub const FIELD_MANAGER: &str = "vipgate-ipam";

/// How many families a Service has: `spec.ipFamilyPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FamilyPolicy {
    /// One.
    #[default]
    SingleStack,
    /// Two if there are addresses of both.
    PreferDualStack,
    /// Two, or none.
    RequireDualStack,
}

/// A Service that has addresses, or may have some.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "facts about a Service, independent of each other")]
pub struct ServiceRequest {
    pub namespace: String,
    pub name: String,
    /// `metadata.creationTimestamp`.
    pub created: Option<Time>,
    pub labels: BTreeMap<String, String>,
    /// Whether it is a load balancer of vipgate's.
    pub is_handled: bool,
    /// Whether it is being deleted.
    pub is_deleted: bool,
    /// The addresses of its status.
    pub current: Vec<IpAddr>,
    /// Whether its status has any ingress, be it a host name.
    pub has_ingress: bool,
    /// Whether the policy server has written them.
    pub is_managed: bool,
    /// Addresses that were written without a reply: it may have them.
    pub assumed: Vec<IpAddr>,
    /// `spec.ipFamilies`; empty: any.
    pub families: Vec<Family>,
    /// `spec.ipFamilyPolicy`.
    pub policy: FamilyPolicy,
    /// Addresses that it names, or why they can't be read.
    pub addresses: Result<Vec<IpAddr>, String>,
    /// The pool that it names.
    pub pool: Option<String>,
    /// Key of the Services in its namespace that it may share addresses with.
    pub sharing_key: Option<String>,
    /// Ports at its addresses.
    pub ports: BTreeSet<(u16, Protocol)>,
    /// The announce mode of its annotation.
    pub announce: Option<String>,
}

/// Whether an entry of `metadata.managedFields` says that the policy server has written the status.
pub fn is_own_status(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(FIELD_MANAGER)
        && entry.fields_v1.as_ref().is_some_and(|fields| fields.0.get("f:status").is_some())
}

impl ServiceRequest {
    /// Reads a Service; `None` if it has no address and may have none.
    pub fn read(document: &Document, unclassed: UnclassedServices) -> Option<Self> {
        let metadata = &document.metadata;
        let status = document.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let ingress = status.and_then(|balancer| balancer.ingress.as_deref()).unwrap_or_default();
        let is_handled = is_handled(document, unclassed);
        if !is_handled && ingress.is_empty() {
            return None;
        }
        let annotation = |name| text(metadata, name).map(str::trim).filter(|text| !text.is_empty());
        let spec = document.spec.as_ref();
        Some(Self {
            namespace: metadata.namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
            name: metadata.name.clone().unwrap_or_default(),
            created: metadata.creation_timestamp.clone(),
            labels: metadata.labels.clone().unwrap_or_default(),
            is_handled,
            is_deleted: metadata.deletion_timestamp.is_some(),
            current: ingress.iter().filter_map(|ingress| ingress.ip.as_deref()?.parse().ok()).collect(),
            has_ingress: !ingress.is_empty(),
            is_managed: metadata.managed_fields.iter().flatten().any(is_own_status),
            assumed: Vec::new(),
            families: families(spec),
            policy: family_policy(spec),
            addresses: named_addresses(annotation(ADDRESSES), spec),
            pool: annotation(POOL).map(str::to_owned),
            sharing_key: annotation(SHARING_KEY).map(str::to_owned),
            ports: spec.map(ports).unwrap_or_default(),
            announce: annotation(ANNOUNCE).map(str::to_owned),
        })
    }

    /// Warns of addresses and pools that there can't be: the Service gets no address, and keeps what it has.
    pub(super) fn check(&self, metadata: &ObjectMeta, report: &mut Report<'_>) {
        let mut warn = |field: &str, reason: String| {
            let reason = format!("{reason}; vipgate assigns no address");
            report(Severity::Warning, Code::MalformedValue, field, reason);
        };
        if let Err(reason) = &self.addresses {
            let is_annotated = text(metadata, ADDRESSES).is_some_and(|text| !text.trim().is_empty());
            let field = if is_annotated { field(ADDRESSES) } else { "spec.loadBalancerIP".to_owned() };
            warn(&field, reason.clone());
        }
        if let Some(pool) = self.pool.as_ref().filter(|pool| !is_object_name(pool)) {
            warn(&field(POOL), format!("`{pool}` is no possible name of an AddressPool"));
        }
    }

    /// `namespace/name`.
    pub fn path(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Its identity.
    pub fn id(&self) -> ObjectId {
        ObjectId { kind: Kind::Service, namespace: self.namespace.clone(), name: self.name.clone() }
    }

    /// Its name in claims at cloud providers.
    pub fn owner(&self) -> String {
        format!("Service {}", self.path())
    }

    /// The addresses that it has, as far as is known.
    pub(crate) fn held(&self) -> &[IpAddr] {
        if self.assumed.is_empty() { &self.current } else { &self.assumed }
    }

    /// Whether its status may be written: nobody else has.
    pub(crate) fn is_writable(&self) -> bool {
        !self.has_ingress || self.is_managed
    }

    /// Whether both may have one address.
    pub(crate) fn can_share_with(&self, other: &Self) -> bool {
        let contradict = |(mine, theirs): (&String, &String)| mine != theirs;
        self.namespace == other.namespace
            && self.sharing_key.is_some()
            && self.sharing_key == other.sharing_key
            && self.ports.is_disjoint(&other.ports)
            && !self.announce.as_ref().zip(other.announce.as_ref()).is_some_and(contradict)
    }
}

fn families(spec: Option<&ServiceSpec>) -> Vec<Family> {
    let mut families = Vec::new();
    for text in spec.iter().flat_map(|spec| spec.ip_families.iter().flatten()) {
        let family = Family::ALL.into_iter().find(|family| family.to_string() == *text);
        families.extend(family.filter(|family| !families.contains(family)));
    }
    families
}

fn family_policy(spec: Option<&ServiceSpec>) -> FamilyPolicy {
    match spec.and_then(|spec| spec.ip_family_policy.as_deref()) {
        Some("PreferDualStack") => FamilyPolicy::PreferDualStack,
        Some("RequireDualStack") => FamilyPolicy::RequireDualStack,
        _ => FamilyPolicy::SingleStack,
    }
}

/// The addresses of the annotation, else that of `spec.loadBalancerIP`.
fn named_addresses(annotation: Option<&str>, spec: Option<&ServiceSpec>) -> Result<Vec<IpAddr>, String> {
    let field = spec.and_then(|spec| spec.load_balancer_ip.as_deref()).map(str::trim).filter(|text| !text.is_empty());
    let mut addresses: Vec<IpAddr> = Vec::new();
    for text in annotation.or(field).into_iter().flat_map(|text| text.split(',')).map(str::trim) {
        let address: IpAddr = text.parse().map_err(|_| format!("`{text}` is not an IP address"))?;
        if let Some(other) = addresses.iter().find(|other| Family::of(**other) == Family::of(address)) {
            return Err(format!("{other} and {address} are of one family: name at most one of each"));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

fn ports(spec: &ServiceSpec) -> BTreeSet<(u16, Protocol)> {
    let of_spec = spec.ports.iter().flatten().filter_map(|port| {
        let text = port.protocol.as_deref().unwrap_or("TCP");
        let protocol = Protocol::ALL.into_iter().find(|protocol| protocol.to_string() == text)?;
        Some((u16::try_from(port.port).ok()?, protocol))
    });
    // The health check is answered at the addresses, too.
    let health = spec.health_check_node_port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
    of_spec.chain(health.map(|port| (port, Protocol::Tcp))).collect()
}

#[cfg(test)]
mod tests;
