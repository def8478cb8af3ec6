//! Object index: the input objects by kind, sorted by namespace and name.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use foldhash::HashMap;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use crate::diagnostic::{Code, Diagnostic, Severity};
use crate::manifest::{
    AddressPool, Body, EgressPolicy, EndpointSlice, Gateway, Object, ObjectId, Origin, OverlayNode, Pod, Service,
};

/// Label with the namespace's name; Kubernetes sets it on every namespace.
const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// An object of one kind with its identity and origin.
#[derive(Debug)]
pub(super) struct ObjectRef<'a, T> {
    pub(super) id: &'a ObjectId,
    /// `id` as text.
    pub(super) name: &'a Arc<str>,
    pub(super) origin: &'a Origin,
    pub(super) body: &'a T,
}

impl<T> Clone for ObjectRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for ObjectRef<'_, T> {}

impl<'a, T> ObjectRef<'a, T> {
    /// Its namespace and name.
    pub(super) fn namespaced_name(&self) -> NamespacedName<'a> {
        (&self.id.namespace, &self.id.name)
    }

    pub(super) fn error(&self, code: Code, field: &str, reason: impl Into<String>) -> Diagnostic {
        self.origin.diagnostic(Severity::Error, code, field, reason)
    }

    pub(super) fn warning(&self, code: Code, field: &str, reason: impl Into<String>) -> Diagnostic {
        self.origin.diagnostic(Severity::Warning, code, field, reason)
    }
}

/// The order of the objects that an inventory is made of.
pub(super) fn order(a: &Object, b: &Object) -> Ordering {
    a.id.cmp(&b.id).then_with(|| a.origin.sort_key().cmp(&b.origin.sort_key()))
}

/// Namespace and name.
pub(super) type NamespacedName<'a> = (&'a str, &'a str);

/// The objects by kind, sorted by namespace and name.
#[derive(Debug, Default)]
pub(super) struct Inventory<'a> {
    pub(super) services: Vec<ObjectRef<'a, Service>>,
    /// Indices of the Services.
    service_indices: HashMap<NamespacedName<'a>, usize>,
    /// The endpoint slices by Service, then by name, and the Service of each.
    slices: Vec<ObjectRef<'a, EndpointSlice>>,
    sliced: Vec<NamespacedName<'a>>,
    pub(super) pods: Vec<ObjectRef<'a, Pod>>,
    pub(super) nodes: Vec<ObjectRef<'a, Node>>,
    pub(super) service_cidrs: Vec<ObjectRef<'a, ServiceCIDR>>,
    pub(super) gateways: BTreeMap<&'a str, ObjectRef<'a, Gateway>>,
    pub(super) overlay_nodes: Vec<ObjectRef<'a, OverlayNode>>,
    pub(super) pools: Vec<ObjectRef<'a, AddressPool>>,
    pub(super) policies: Vec<ObjectRef<'a, EgressPolicy>>,
    namespaces: BTreeMap<&'a str, BTreeMap<String, String>>,
}

impl<'a> Inventory<'a> {
    /// The inventory of objects that are sorted by [`order`].
    pub(super) fn new(sorted: impl IntoIterator<Item = &'a Object>, diagnostics: &mut Vec<Diagnostic>) -> Self {
        let mut inventory = Self::default();
        let mut previous: Option<&Object> = None;
        for object in sorted {
            match previous {
                Some(first) if first.id == object.id => {
                    let reason = format!("{} is already defined in {}", object.id, first.origin);
                    let (severity, code) = (Severity::Error, Code::DuplicateObject);
                    diagnostics.push(object.origin.diagnostic(severity, code, "metadata.name", reason));
                }
                _ => {
                    inventory.add(object);
                    previous = Some(object);
                }
            }
        }
        inventory.sort_slices();
        inventory
    }

    /// Sorts the slices by Service. They are sorted by namespace and name, and names mostly begin with the Service's.
    fn sort_slices(&mut self) {
        let key = |slice: &ObjectRef<'a, EndpointSlice>| -> NamespacedName<'a> {
            (&slice.id.namespace, slice.body.service.as_deref().unwrap_or_default())
        };
        self.slices.sort_by_key(key);
        self.sliced = self.slices.iter().map(key).collect();
    }

    fn add(&mut self, object: &'a Object) {
        let Object { id, name, origin, body } = object;
        match body {
            Body::AddressPool(body) => self.pools.push(ObjectRef { id, name, origin, body }),
            Body::EgressPolicy(body) | Body::ClusterEgressPolicy(body) => {
                self.policies.push(ObjectRef { id, name, origin, body });
            }
            Body::EndpointSlice(body) => {
                if body.service.is_some() {
                    self.slices.push(ObjectRef { id, name, origin, body });
                }
            }
            Body::Gateway(body) => {
                self.gateways.insert(&id.name, ObjectRef { id, name, origin, body });
            }
            Body::Namespace(body) => {
                self.namespaces.insert(&id.name, namespace_labels(&body.metadata, &id.name));
            }
            Body::Node(body) => self.nodes.push(ObjectRef { id, name, origin, body }),
            Body::OverlayNode(body) => self.overlay_nodes.push(ObjectRef { id, name, origin, body }),
            Body::Pod(body) => self.pods.push(ObjectRef { id, name, origin, body }),
            Body::Service(body) => {
                self.service_indices.insert((&id.namespace, &id.name), self.services.len());
                self.services.push(ObjectRef { id, name, origin, body });
            }
            Body::ServiceCidr(body) => self.service_cidrs.push(ObjectRef { id, name, origin, body }),
        }
    }

    /// A Service by namespace and name.
    pub(super) fn service(&self, key: NamespacedName<'a>) -> Option<ObjectRef<'a, Service>> {
        self.services.get(*self.service_indices.get(&key)?).copied()
    }

    /// The Services of a namespace.
    pub(super) fn services_of(&self, namespace: &str) -> &[ObjectRef<'a, Service>] {
        let first = self.services.partition_point(|service| *service.id.namespace < *namespace);
        let count = self.services[first..].partition_point(|service| service.id.namespace == namespace);
        &self.services[first..first + count]
    }

    /// The endpoint slices of all Services.
    pub(super) fn slices(&self) -> impl Iterator<Item = &ObjectRef<'a, EndpointSlice>> {
        self.slices.iter()
    }

    /// The endpoint slices of a Service, even if there is no such Service.
    pub(super) fn slices_of(&self, service: NamespacedName<'a>) -> &[ObjectRef<'a, EndpointSlice>] {
        let first = self.sliced.partition_point(|key| *key < service);
        let count = self.sliced[first..].partition_point(|key| *key == service);
        &self.slices[first..first + count]
    }

    /// The labels of a namespace; without a manifest, only the name label.
    pub(super) fn namespace_labels(&self, name: &str) -> Cow<'_, BTreeMap<String, String>> {
        let known = self.namespaces.get(name).map(Cow::Borrowed);
        known.unwrap_or_else(|| Cow::Owned(with_name(BTreeMap::new(), name)))
    }
}

/// The labels of a namespace, with that of its name.
pub(crate) fn namespace_labels(metadata: &ObjectMeta, name: &str) -> BTreeMap<String, String> {
    with_name(metadata.labels.clone().unwrap_or_default(), name)
}

fn with_name(mut labels: BTreeMap<String, String>, name: &str) -> BTreeMap<String, String> {
    labels.insert(NAMESPACE_NAME_LABEL.to_owned(), name.to_owned());
    labels
}

/// Sort key: oldest first, objects without `creationTimestamp` last, then namespace and name.
pub(super) fn age_key<'a>(created: Option<&'a Time>, id: &'a ObjectId) -> impl Ord + use<'a> {
    (created.is_none(), created, &id.namespace, &id.name)
}
