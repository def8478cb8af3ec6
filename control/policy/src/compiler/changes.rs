//! What differs between the objects of two compilations.

use std::cmp::Ordering;
use std::sync::Arc;

use foldhash::HashSet;

use super::inventory::NamespacedName;
use super::pods::API_SERVER;
use crate::manifest::{Body, EndpointSlice, Kind, Object};

/// The differences between two lists of objects.
#[derive(Debug, Default)]
pub(super) struct Changes<'a> {
    /// Services whose manifests or endpoint slices differ.
    pub(super) services: HashSet<NamespacedName<'a>>,
    /// `EgressPolicy` and `ClusterEgressPolicy` manifests that differ, as the names of their policies.
    pub(super) policies: HashSet<&'a str>,
    /// Endpoint slices that differ, before and after.
    pub(super) slices: Vec<&'a EndpointSlice>,
    /// Whether pods, nodes, namespaces or prefixes of the cluster differ: they decide about the addresses, names and localities
    /// of others.
    pub(super) has_pods: bool,
    /// Whether gateways, or the zones of their nodes, differ.
    pub(super) has_gateways: bool,
    /// Number of `OverlayNode` manifests that differ.
    pub(super) overlay_nodes: usize,
    /// Whether anything differs but endpoint slices, overlay nodes and Service prefixes.
    pub(super) concerns_vips: bool,
    /// Number of objects that replace none with the same identity, or aren't replaced by one. So are slices by those of
    /// another Service.
    displaced: usize,
}

impl<'a> Changes<'a> {
    /// What a compilation without a memory goes by.
    pub(super) fn all() -> Self {
        Self { concerns_vips: true, ..Self::default() }
    }

    /// The differences between two lists of objects, both in the order of the inventory.
    pub(super) fn between(old: &'a [Arc<Object>], new: &'a [Arc<Object>]) -> Self {
        let mut changes = Self::default();
        let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
        loop {
            let ordering = match (old.peek(), new.peek()) {
                (None, None) => return changes,
                (Some(a), Some(b)) if Arc::ptr_eq(a, b) => {
                    old.next();
                    new.next();
                    continue;
                }
                (Some(a), Some(b)) => a.id.cmp(&b.id),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
            };
            let replaced = old.peek().zip(new.peek()).filter(|_| ordering == Ordering::Equal);
            changes.displaced += usize::from(replaced.is_none_or(|(a, b)| sliced(a) != sliced(b)));
            if ordering != Ordering::Greater {
                old.next().into_iter().for_each(|object| changes.add(object));
            }
            if ordering != Ordering::Less {
                new.next().into_iter().for_each(|object| changes.add(object));
            }
        }
    }

    /// Whether objects only replace those with the same identity, and slices those of the same Service.
    pub(super) fn are_in_place(&self) -> bool {
        self.displaced == 0
    }

    fn add(&mut self, object: &'a Object) {
        let key = (object.id.namespace.as_str(), object.id.name.as_str());
        self.concerns_vips |= !matches!(object.id.kind, Kind::EndpointSlice | Kind::OverlayNode | Kind::ServiceCidr);
        match &object.body {
            Body::Service(_) => drop(self.services.insert(key)),
            Body::EndpointSlice(slice) => {
                // Its endpoints are hosts for others.
                self.has_pods |= (key.0, slice.service.as_deref()) == (API_SERVER.0, Some(API_SERVER.1));
                self.services.extend(slice.service.as_deref().map(|service| (key.0, service)));
                self.slices.push(slice);
            }
            Body::EgressPolicy(_) | Body::ClusterEgressPolicy(_) => drop(self.policies.insert(&object.name)),
            Body::Gateway(_) => self.has_gateways = true,
            Body::Node(_) => (self.has_pods, self.has_gateways) = (true, true),
            Body::Pod(_) | Body::Namespace(_) | Body::ServiceCidr(_) => self.has_pods = true,
            Body::OverlayNode(_) => self.overlay_nodes += 1,
            Body::AddressPool(_) => {}
        }
    }
}

/// The Service of a slice.
fn sliced(object: &Object) -> Option<&str> {
    if let Body::EndpointSlice(slice) = &object.body { slice.service.as_deref() } else { None }
}
