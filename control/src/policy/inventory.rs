//! The objects, sorted and by kind: what the rest of the compiler looks things up in.

use std::collections::BTreeMap;
use std::sync::Arc;

use foldhash::HashMap;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::complaint::{Complaint, Severity};
use crate::manifest::{
    AddressPool, Body, EgressPolicy, EndpointSlice, Gateway, Object, ObjectId, Origin, OverlayNode, Pod, Service,
};

/// Label that every namespace has, with its name.
const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// An object of a known kind with its name and place.
#[derive(Debug)]
pub(super) struct Located<'a, T> {
    pub(super) id: &'a ObjectId,
    /// The same as text.
    pub(super) name: &'a Arc<str>,
    pub(super) origin: &'a Origin,
    pub(super) body: &'a T,
}

impl<T> Clone for Located<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Located<'_, T> {}

impl<'a, T> Located<'a, T> {
    /// Its namespace and name.
    pub(super) fn key(&self) -> Key<'a> {
        (&self.id.namespace, &self.id.name)
    }

    pub(super) fn error(&self, field: &str, reason: impl Into<String>) -> Complaint {
        self.origin.complaint(Severity::Error, field, reason)
    }

    pub(super) fn warning(&self, field: &str, reason: impl Into<String>) -> Complaint {
        self.origin.complaint(Severity::Warning, field, reason)
    }
}

/// Namespace and name.
pub(super) type Key<'a> = (&'a str, &'a str);

/// The objects by kind, sorted by namespace and name.
#[derive(Debug, Default)]
pub(super) struct Inventory<'a> {
    pub(super) services: Vec<Located<'a, Service>>,
    service_numbers: HashMap<Key<'a>, usize>,
    slices_of: HashMap<Key<'a>, Vec<Located<'a, EndpointSlice>>>,
    pub(super) pods: Vec<Located<'a, Pod>>,
    pub(super) nodes: Vec<Located<'a, Node>>,
    pub(super) gateways: BTreeMap<&'a str, Located<'a, Gateway>>,
    pub(super) overlay: Vec<Located<'a, OverlayNode>>,
    pub(super) pools: Vec<Located<'a, AddressPool>>,
    pub(super) policies: Vec<Located<'a, EgressPolicy>>,
    namespaces: BTreeMap<&'a str, BTreeMap<String, String>>,
}

impl<'a> Inventory<'a> {
    pub(super) fn new(objects: impl IntoIterator<Item = &'a Object>, log: &mut Vec<Complaint>) -> Self {
        let mut sorted: Vec<&Object> = objects.into_iter().collect();
        sorted.sort_by(|a, b| (&a.id, a.origin.place()).cmp(&(&b.id, b.origin.place())));
        let mut inventory = Self::default();
        let mut before: Option<&Object> = None;
        for object in sorted {
            match before {
                Some(first) if first.id == object.id => {
                    let reason = format!("{} is in {} already", object.id, first.origin);
                    log.push(object.origin.complaint(Severity::Error, "metadata.name", reason));
                }
                _ => {
                    inventory.add(object);
                    before = Some(object);
                }
            }
        }
        inventory
    }

    fn add(&mut self, object: &'a Object) {
        let Object { id, name, origin, body } = object;
        let key = (id.namespace.as_str(), id.name.as_str());
        match body {
            Body::AddressPool(body) => self.pools.push(Located { id, name, origin, body }),
            Body::EgressPolicy(body) => self.policies.push(Located { id, name, origin, body }),
            Body::EndpointSlice(body) => {
                if let Some(service) = &body.service {
                    self.slices_of.entry((key.0, service)).or_default().push(Located { id, name, origin, body });
                }
            }
            Body::Gateway(body) => {
                self.gateways.insert(&id.name, Located { id, name, origin, body });
            }
            Body::Namespace(body) => {
                let labels = body.metadata.labels.clone().unwrap_or_default();
                self.namespaces.insert(&id.name, with_name(labels, &id.name));
            }
            Body::Node(body) => self.nodes.push(Located { id, name, origin, body }),
            Body::OverlayNode(body) => self.overlay.push(Located { id, name, origin, body }),
            Body::Pod(body) => self.pods.push(Located { id, name, origin, body }),
            Body::Service(body) => {
                self.service_numbers.insert(key, self.services.len());
                self.services.push(Located { id, name, origin, body });
            }
        }
    }

    /// A Service.
    pub(super) fn service(&self, key: Key<'a>) -> Option<Located<'a, Service>> {
        self.service_numbers.get(&key).map(|&number| self.services[number])
    }

    /// The slices of all Services, in no order.
    pub(super) fn slices(&self) -> impl Iterator<Item = &Located<'a, EndpointSlice>> {
        self.slices_of.values().flatten()
    }

    /// The slices of a Service, known or not.
    pub(super) fn slices_of(&self, service: Key<'a>) -> &[Located<'a, EndpointSlice>] {
        self.slices_of.get(&service).map(Vec::as_slice).unwrap_or_default()
    }

    /// The labels of a namespace; one without a manifest has its name's alone.
    pub(super) fn namespace_labels(&self, name: &str) -> BTreeMap<String, String> {
        self.namespaces.get(name).cloned().unwrap_or_else(|| with_name(BTreeMap::new(), name))
    }
}

fn with_name(mut labels: BTreeMap<String, String>, name: &str) -> BTreeMap<String, String> {
    labels.insert(NAMESPACE_NAME_LABEL.to_owned(), name.to_owned());
    labels
}

/// Orders by age, the oldest first and what has no time of creation last, then by namespace and name.
pub(super) fn seniority<'a>(created: Option<&'a Time>, id: &'a ObjectId) -> impl Ord + use<'a> {
    (created.is_none(), created, &id.namespace, &id.name)
}
