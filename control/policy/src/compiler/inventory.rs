//! Object index: the input objects by kind, sorted by namespace and name.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use crate::diagnostic::{Code, Diagnostic, Severity};
use crate::manifest::{
    AddressPool, Body, EgressPolicy, EndpointSlice, Gateway, NAMESPACE_NAME_LABEL, Object, ObjectId, Origin,
    OverlayNode, Pod, Service,
};

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
    slices: Vec<ObjectRef<'a, EndpointSlice>>,
    pub(super) pods: Vec<ObjectRef<'a, Pod>>,
    pub(super) nodes: Vec<ObjectRef<'a, Node>>,
    pub(super) service_cidrs: Vec<ObjectRef<'a, ServiceCIDR>>,
    pub(super) gateways: BTreeMap<&'a str, ObjectRef<'a, Gateway>>,
    pub(super) overlay_nodes: Vec<ObjectRef<'a, OverlayNode>>,
    pub(super) pools: Vec<ObjectRef<'a, AddressPool>>,
    pub(super) policies: Vec<ObjectRef<'a, EgressPolicy>>,
    namespaces: BTreeMap<&'a str, BTreeMap<String, String>>,
    order: Order,
}

/// What is the same for all inventories of objects with the same identities and, of slices, Services.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    /// Whether two objects have the same identity.
    has_duplicates: bool,
    /// The indices of the slices by Service, then by name.
    slices: Vec<usize>,
}

impl<'a> Inventory<'a> {
    /// The inventory of objects that are sorted by [`order`]; `known`: what another one has in common with it.
    pub(super) fn new(
        sorted: impl IntoIterator<Item = &'a Object>,
        known: Option<Order>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Self {
        let mut inventory = Self::default();
        if let Some(order) = known.as_ref().filter(|order| !order.has_duplicates) {
            inventory.slices.reserve(order.slices.len());
            sorted.into_iter().for_each(|object| inventory.add(object));
        } else {
            inventory.order.has_duplicates = inventory.add_unique(sorted, diagnostics);
        }
        match known {
            Some(order) => inventory.order = order,
            None => inventory.sort_slices(),
        }
        inventory
    }

    /// What it has in common with others.
    pub(super) fn into_order(self) -> Order {
        self.order
    }

    /// Adds the first object of each identity; returns whether there are others.
    fn add_unique(&mut self, sorted: impl IntoIterator<Item = &'a Object>, diagnostics: &mut Vec<Diagnostic>) -> bool {
        let before = diagnostics.len();
        let mut previous: Option<&Object> = None;
        for object in sorted {
            match previous {
                Some(first) if first.id == object.id => {
                    let reason = format!("{} is already defined in {}", object.id, first.origin);
                    let (severity, code) = (Severity::Error, Code::DuplicateObject);
                    diagnostics.push(object.origin.diagnostic(severity, code, "metadata.name", reason));
                }
                _ => {
                    self.add(object);
                    previous = Some(object);
                }
            }
        }
        diagnostics.len() > before
    }

    /// Sorts the slices by Service. They are sorted by namespace and name, and names mostly begin with the Service's.
    fn sort_slices(&mut self) {
        let mut order: Vec<usize> = (0..self.slices.len()).collect();
        order.sort_by_key(|at| self.sliced(*at));
        self.order.slices = order;
    }

    /// The Service of the slice with this index.
    fn sliced(&self, at: usize) -> NamespacedName<'a> {
        let ObjectRef { id, body, .. } = self.slices[at];
        (&id.namespace, body.service.as_deref().unwrap_or_default())
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
            Body::Service(body) => self.services.push(ObjectRef { id, name, origin, body }),
            Body::ServiceCidr(body) => self.service_cidrs.push(ObjectRef { id, name, origin, body }),
        }
    }

    /// A Service by namespace and name.
    pub(super) fn service(&self, key: NamespacedName<'a>) -> Option<ObjectRef<'a, Service>> {
        let at = self.services.binary_search_by_key(&key, ObjectRef::namespaced_name).ok()?;
        Some(self.services[at])
    }

    /// The Services of a namespace.
    pub(super) fn services_of(&self, namespace: &str) -> &[ObjectRef<'a, Service>] {
        let first = self.services.partition_point(|service| *service.id.namespace < *namespace);
        let count = self.services[first..].partition_point(|service| service.id.namespace == namespace);
        &self.services[first..first + count]
    }

    /// Whether there is a pod of this namespace and name.
    pub(super) fn has_pod(&self, key: NamespacedName<'_>) -> bool {
        self.pods.binary_search_by(|pod| pod.namespaced_name().cmp(&key)).is_ok()
    }

    /// Whether there is any endpoint slice.
    pub(super) fn has_slices(&self) -> bool {
        !self.slices.is_empty()
    }

    /// The endpoint slices of all Services, by namespace and name.
    pub(super) fn slices(&self) -> impl Iterator<Item = &ObjectRef<'a, EndpointSlice>> {
        self.slices.iter()
    }

    /// The endpoint slices of a Service, even if there is no such Service.
    pub(super) fn slices_of(
        &self,
        service: NamespacedName<'a>,
    ) -> impl Iterator<Item = &ObjectRef<'a, EndpointSlice>> + Clone {
        let order = &self.order.slices;
        let first = order.partition_point(|at| self.sliced(*at) < service);
        let count = order[first..].partition_point(|at| self.sliced(*at) == service);
        order[first..first + count].iter().map(|at| &self.slices[*at])
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
pub(super) type AgeKey<'a> = (bool, Option<&'a Time>, &'a str, &'a str);

pub(super) fn age_key<'a>(created: Option<&'a Time>, id: &'a ObjectId) -> AgeKey<'a> {
    (created.is_none(), created, &id.namespace, &id.name)
}
