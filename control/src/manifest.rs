//! Manifests as `kubectl get -o yaml` prints them: files and directories to objects that know where they stand.
//!
//! Here only what one document can say about itself is checked; what objects mean together is the policy compiler's.

mod address;
mod annotation;
pub mod crd;
pub mod files;
mod labels;
mod overlay;
mod pod;
mod port;
mod read;
pub mod schema;
mod service;
mod slice;
mod values;
mod vipgate;

pub use self::address::{Family, unusable as unusable_address};
pub(crate) use self::annotation::{ANNOUNCE_FIELD, EGRESS_FIELD, TABLE_SIZE_FIELD};
pub use self::labels::{LabelSelector, Requirement};
pub use self::overlay::{MacAddress, OverlayNode, OverlayNodeSpec};
pub use self::pod::{DEFAULT_WEIGHT, MOST_WEIGHT, Pod};
pub use self::port::Protocol;
pub use self::read::{Foreign, Manifests, load, read};
pub use self::service::{DEFAULT_TABLE_SIZE, Service, ServicePort};
pub use self::slice::{EndpointSlice, Hints, SliceEndpoint, SlicePort};
pub use self::values::{AddressRange, Cidr};
pub use self::vipgate::{
    AddressPool, AddressPoolSpec, AddressSelection, Announce, Distribution, EgressPolicy, EgressPolicySpec, Gateway,
    GatewayRef, GatewaySpec, Limits, OnExhaustion, PodSelector, PoolRef, ServiceRef, Uncovered, ZoneAffinity,
};

use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Node};

use crate::complaint::{Complaint, Place, Severity};
use crate::yaml::{Source, join};

/// The namespace of objects that name none.
pub(crate) const DEFAULT_NAMESPACE: &str = "default";

/// One object and where it came from.
#[derive(Clone, Debug)]
pub struct Object {
    /// Kind, namespace and name.
    pub id: ObjectId,
    /// These as text, shared by all that name it.
    pub name: Arc<str>,
    /// Where it stands.
    pub origin: Origin,
    /// What it says.
    pub body: Body,
}

/// What an object says, by kind: of Kubernetes' large kinds what counts here.
#[derive(Clone, Debug)]
pub enum Body {
    /// `vipgate.io/v1alpha1` `AddressPool`.
    AddressPool(Box<AddressPool>),
    /// `vipgate.io/v1alpha1` `EgressPolicy`.
    EgressPolicy(Box<EgressPolicy>),
    /// `discovery.k8s.io/v1` `EndpointSlice`.
    EndpointSlice(Box<EndpointSlice>),
    /// `vipgate.io/v1alpha1` `Gateway`.
    Gateway(Box<Gateway>),
    /// `v1` `Namespace`.
    Namespace(Box<Namespace>),
    /// `v1` `Node`.
    Node(Box<Node>),
    /// `vipgate.io/v1alpha1` `OverlayNode`.
    OverlayNode(Box<OverlayNode>),
    /// `v1` `Pod`.
    Pod(Box<Pod>),
    /// `v1` `Service`.
    Service(Box<Service>),
}

/// The kinds that mean something to vipgate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Addresses to take VIPs from.
    AddressPool,
    /// Which pods leave with which VIPs.
    EgressPolicy,
    /// Addresses behind a Service.
    EndpointSlice,
    /// A gateway and what it may hold.
    Gateway,
    /// Labels of a namespace.
    Namespace,
    /// Addresses of a machine of the cluster.
    Node,
    /// A node whose pods' packets come and go in VXLAN.
    OverlayNode,
    /// Labels and addresses of a pod.
    Pod,
    /// A VIP and its ports.
    Service,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::AddressPool,
        Self::EgressPolicy,
        Self::EndpointSlice,
        Self::Gateway,
        Self::Namespace,
        Self::Node,
        Self::OverlayNode,
        Self::Pod,
        Self::Service,
    ];

    /// As `kind:` spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AddressPool => "AddressPool",
            Self::EgressPolicy => "EgressPolicy",
            Self::EndpointSlice => "EndpointSlice",
            Self::Gateway => "Gateway",
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::OverlayNode => "OverlayNode",
            Self::Pod => "Pod",
            Self::Service => "Service",
        }
    }

    /// The `apiVersion:` that it is read in.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::AddressPool | Self::EgressPolicy | Self::Gateway | Self::OverlayNode => "vipgate.io/v1alpha1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::Namespace | Self::Node | Self::Pod | Self::Service => "v1",
        }
    }

    /// Whether its objects are in a namespace.
    pub fn is_namespaced(self) -> bool {
        match self {
            Self::EgressPolicy | Self::EndpointSlice | Self::Pod | Self::Service => true,
            Self::AddressPool | Self::Gateway | Self::Namespace | Self::Node | Self::OverlayNode => false,
        }
    }
}

/// What names an object. Displays as `Kind namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace; empty for kinds without one.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl ObjectId {
    /// `namespace/name`, or the name alone for kinds without a namespace.
    pub fn path(&self) -> String {
        join_path(&self.namespace, &self.name)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.path())
    }
}

fn join_path(namespace: &str, name: &str) -> String {
    if namespace.is_empty() { name.to_owned() } else { format!("{namespace}/{name}") }
}

/// Where an object stands.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The text that it is in.
    pub source: Arc<Source>,
    /// Which of the text's documents, from 0, empty and unreadable ones not counted.
    pub document: usize,
    /// Which item, from 0, when the document is a list.
    pub item: Option<usize>,
    /// Line that it begins on.
    pub line: u32,
}

impl Origin {
    /// A complaint about a field of the object, whose path starts at the object itself.
    pub fn complaint(&self, severity: Severity, field: &str, reason: impl Into<String>) -> Complaint {
        let field = self.item.map_or_else(|| field.to_owned(), |item| join(&format!("items[{item}]"), field));
        let at = self.source.locate(self.document, &field);
        Complaint {
            file: self.source.name().clone(),
            line: at.line,
            column: at.column,
            field,
            severity,
            reason: reason.into(),
            object: Some(self.object()),
        }
    }

    /// Its place, which no other object has.
    pub fn object(&self) -> Place {
        Place { source: self.source.id(), document: self.document, item: self.item }
    }

    /// The part of it that orders origins: file, then place.
    pub fn place(&self) -> (&str, usize, Option<usize>) {
        (self.source.name(), self.document, self.item)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.source.name(), self.line)
    }
}

#[cfg(test)]
mod tests;
