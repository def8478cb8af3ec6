//! Manifests as printed by `kubectl get -o yaml`: files and directories to objects with their origin.
//!
//! Each document is validated by itself; the policy compiler checks objects against each other.

mod address;
mod address_pool;
mod address_record;
mod annotation;
mod cloud_pool;
pub mod crd;
mod custom_resources;
mod label_selector;
mod overlay;
mod pod;
mod port;
mod provider;
mod read;
pub mod schema;
mod service;
mod service_request;
mod slice;
mod values;

use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::ServiceCIDR;

pub use self::address::{Family, unusable as unusable_address};
pub use self::address_pool::{AddressPool, AddressPoolSpec, Announce};
pub(crate) use self::address_record::end_of_quarantine;
pub use self::address_record::{AddressRecord, Holding, InvalidLine};
pub(crate) use self::annotation::{ANNOUNCE_FIELD, EGRESS_FIELD, TABLE_SIZE_FIELD};
pub use self::cloud_pool::{CloudAddress, CloudNic, CloudPool, claim_owner};
pub use self::custom_resources::{
    AddressSelection, ClusterEgressPolicySpec, Distribution, EgressPolicy, EgressPolicySpec, Gateway, GatewayRef,
    GatewaySpec, Limits, OnExhaustion, PodSelector, PoolRef, ServiceRef, UncoveredAction, ZoneAffinity,
};
pub(crate) use self::label_selector::NAMESPACE_NAME_LABEL;
pub use self::label_selector::{LabelSelector, Requirement};
pub use self::overlay::{MacAddress, OverlayNode, OverlayNodeSpec};
pub use self::pod::{DEFAULT_WEIGHT, Life, MAX_WEIGHT, Pod};
pub use self::port::Protocol;
pub use self::provider::{Associate, AwsSpec, AzureSpec, GcpSpec, Ownership, PrivateAddresses, ProviderSpec};
pub use self::read::{Manifests, ReadOptions, UnsupportedKinds, read, read_object};
pub use self::service::{DEFAULT_TABLE_SIZE, Service, ServicePort, UnclassedServices};
pub use self::service_request::{FIELD_MANAGER, FamilyPolicy, ServiceRequest, is_own_status};
pub use self::slice::{EndpointSlice, Hints, SliceEndpoint, SlicePort};
pub use self::values::{AddressRange, Cidr, ReuseAfter};
use crate::diagnostic::{Code, Diagnostic, ObjectLocation, Severity};
use crate::yaml::{Source, join};

/// Namespace of namespaced objects without `metadata.namespace`.
pub const DEFAULT_NAMESPACE: &str = "default";

/// One object and its origin.
#[derive(Clone, Debug)]
pub struct Object {
    /// Kind, namespace and name.
    pub id: ObjectId,
    /// `id` as text, shared.
    pub name: Arc<str>,
    /// File, document and line.
    pub origin: Origin,
    /// Content.
    pub body: Body,
}

/// Content of an object, by kind; of Kubernetes' large kinds only the fields used here.
#[derive(Clone, Debug)]
pub enum Body {
    /// `vipgate.io/v1alpha1` `AddressPool`.
    AddressPool(Box<AddressPool>),
    /// `vipgate.io/v1alpha1` `ClusterEgressPolicy`.
    ClusterEgressPolicy(Box<EgressPolicy>),
    /// `vipgate.io/v1alpha1` `EgressPolicy`.
    EgressPolicy(Box<EgressPolicy>),
    /// `discovery.k8s.io/v1` `EndpointSlice`.
    EndpointSlice(Box<EndpointSlice>),
    /// `vipgate.io/v1alpha1` `VipGateway`.
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
    /// `networking.k8s.io/v1` `ServiceCIDR`.
    ServiceCidr(Box<ServiceCIDR>),
}

/// Supported kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Address ranges that VIPs are allocated from.
    AddressPool,
    /// SNAT policy of the platform: the VIPs of selected pods in any namespace.
    ClusterEgressPolicy,
    /// SNAT policy: the VIPs of selected pods.
    EgressPolicy,
    /// Endpoints of a Service.
    EndpointSlice,
    /// `VipGateway`, a gateway: locality, peer address and capacity for VIPs.
    Gateway,
    /// Labels of a namespace.
    Namespace,
    /// Addresses, zone and pod prefixes of a Kubernetes node.
    Node,
    /// A node whose pod traffic is encapsulated in VXLAN.
    OverlayNode,
    /// Labels and addresses of a pod.
    Pod,
    /// VIPs and their ports.
    Service,
    /// Prefixes of the cluster's Service addresses.
    ServiceCidr,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 11] = [
        Self::AddressPool,
        Self::ClusterEgressPolicy,
        Self::EgressPolicy,
        Self::EndpointSlice,
        Self::Gateway,
        Self::Namespace,
        Self::Node,
        Self::OverlayNode,
        Self::Pod,
        Self::Service,
        Self::ServiceCidr,
    ];

    /// Value of `kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AddressPool => "AddressPool",
            Self::ClusterEgressPolicy => "ClusterEgressPolicy",
            Self::EgressPolicy => "EgressPolicy",
            Self::EndpointSlice => "EndpointSlice",
            Self::Gateway => "VipGateway",
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::OverlayNode => "OverlayNode",
            Self::Pod => "Pod",
            Self::Service => "Service",
            Self::ServiceCidr => "ServiceCIDR",
        }
    }

    /// An earlier value of `kind`, which is still read.
    pub fn former_name(self) -> Option<&'static str> {
        // Also a kind of Gateway API and of Istio, so that `kubectl get gateway` was ambiguous.
        (self == Self::Gateway).then_some("Gateway")
    }

    /// The kind with this name, current or former.
    pub fn named(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text || kind.former_name() == Some(text))
    }

    /// Its name in URLs of the Kubernetes API.
    pub fn plural(self) -> &'static str {
        match self {
            Self::AddressPool => "addresspools",
            Self::ClusterEgressPolicy => "clusteregresspolicies",
            Self::EgressPolicy => "egresspolicies",
            Self::EndpointSlice => "endpointslices",
            Self::Gateway => "vipgateways",
            Self::Namespace => "namespaces",
            Self::Node => "nodes",
            Self::OverlayNode => "overlaynodes",
            Self::Pod => "pods",
            Self::Service => "services",
            Self::ServiceCidr => "servicecidrs",
        }
    }

    /// The supported `apiVersion`.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::AddressPool | Self::ClusterEgressPolicy | Self::EgressPolicy | Self::Gateway | Self::OverlayNode => {
                "vipgate.io/v1alpha1"
            }
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::ServiceCidr => "networking.k8s.io/v1",
            Self::Namespace | Self::Node | Self::Pod | Self::Service => "v1",
        }
    }

    /// Whether it is one of vipgate's own, which a cluster has by a CustomResourceDefinition.
    pub fn is_custom(self) -> bool {
        schema::KINDS.contains(&self)
    }

    /// Whether its objects are in a namespace.
    pub fn is_namespaced(self) -> bool {
        match self {
            Self::EgressPolicy | Self::EndpointSlice | Self::Pod | Self::Service => true,
            Self::AddressPool
            | Self::ClusterEgressPolicy
            | Self::Gateway
            | Self::Namespace
            | Self::Node
            | Self::OverlayNode
            | Self::ServiceCidr => false,
        }
    }
}

/// Identity of an object. Displays as `Kind namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    pub kind: Kind,
    /// Its namespace; empty for kinds without one.
    pub namespace: String,
    pub name: String,
}

impl ObjectId {
    /// `namespace/name`, or the name alone for kinds without a namespace.
    pub fn path(&self) -> String {
        namespaced_path(&self.namespace, &self.name)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.path())
    }
}

fn namespaced_path(namespace: &str, name: &str) -> String {
    if namespace.is_empty() { name.to_owned() } else { format!("{namespace}/{name}") }
}

/// Longest name of an object, bytes.
const MAX_OBJECT_NAME: usize = 253;

/// Whether an object may have this name: a DNS name (RFC 1123 section 2.1) in lower case. Kubernetes limits its length,
/// but not that of its labels.
pub fn is_object_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = |label: &str| {
        label.bytes().all(is_inner) && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= MAX_OBJECT_NAME && name.split('.').all(is_label)
}

/// Origin of an object. Displays as `file:line`, without a text as `file`.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The text.
    pub source: Arc<Source>,
    /// Index of the document in the text, without empty and unreadable documents.
    pub document: usize,
    /// Index of the item, if the document is a List.
    pub item: Option<usize>,
    /// First line; 0: it has no text.
    pub line: u32,
}

impl Origin {
    /// A diagnostic about a field of the object; `field` is relative to the object.
    pub fn diagnostic(&self, severity: Severity, code: Code, field: &str, reason: impl Into<String>) -> Diagnostic {
        let field = self.item.map_or_else(|| field.to_owned(), |item| join(&format!("items[{item}]"), field));
        let at = self.source.locate(self.document, &field);
        Diagnostic {
            file: self.source.name().clone(),
            line: at.line,
            column: at.column,
            field,
            severity,
            reason: reason.into(),
            code,
            object: Some(self.location()),
        }
    }

    /// Location of the object, unique in the process.
    pub fn location(&self) -> ObjectLocation {
        ObjectLocation { source: self.source.id(), document: self.document, item: self.item }
    }

    /// Sort key of origins: file, document, item.
    pub fn sort_key(&self) -> (&str, usize, Option<usize>) {
        (self.source.name(), self.document, self.item)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(self.source.name()),
            line => write!(f, "{}:{line}", self.source.name()),
        }
    }
}

#[cfg(test)]
mod tests;
