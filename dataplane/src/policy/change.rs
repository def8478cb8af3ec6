//! Policy changes: what differs between two policies, by key. Every update of a running policy is applied as a change.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use super::spec::{ClusterSpec, EgressSpec, EndpointSpec, Keyed, NodeSpec, ServiceSpec, ShardMapSpec, VipSpec};

/// A policy change. What it doesn't name stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyChange {
    /// Version of the policy after the change.
    pub version: String,
    pub policies: Entries<EgressSpec>,
    pub shard_maps: Entries<ShardMapSpec>,
    pub vips: Entries<VipSpec>,
    pub endpoints: Entries<EndpointSpec>,
    pub services: Entries<ServiceSpec>,
    /// Overlay nodes.
    pub nodes: Entries<NodeSpec>,
    /// Cluster addresses, if they have changed.
    pub cluster: Option<ClusterSpec>,
}

impl PolicyChange {
    /// This change and the next one as a single change.
    #[must_use]
    pub fn then(mut self, next: Self) -> Self {
        let Self { version, policies, shard_maps, vips, endpoints, services, nodes, cluster } = next;
        self.policies.extend(policies);
        self.shard_maps.extend(shard_maps);
        self.vips.extend(vips);
        self.endpoints.extend(endpoints);
        self.services.extend(services);
        self.nodes.extend(nodes);
        Self { version, cluster: cluster.or(self.cluster), ..self }
    }

    /// Whether nothing changes, except the version.
    pub fn is_empty(&self) -> bool {
        let Self { version: _, policies, shard_maps, vips, endpoints, services, nodes, cluster } = self;
        let is_empty = policies.is_empty() && shard_maps.is_empty() && vips.is_empty() && endpoints.is_empty();
        is_empty && services.is_empty() && nodes.is_empty() && cluster.is_none()
    }
}

/// The changes of one kind of object: by key the new or changed object; `None`: it is removed. Ordered, so that numbers
/// are assigned in the same order everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entries<T: Keyed>(BTreeMap<T::Key, Option<Arc<T>>>);

impl<T: Keyed> Entries<T> {
    /// Adds or replaces an object.
    pub fn insert(&mut self, object: impl Into<Arc<T>>) {
        let object = object.into();
        self.0.insert(object.key().clone(), Some(object));
    }

    /// Removes an object.
    pub fn remove(&mut self, key: T::Key) {
        self.0.insert(key, None);
    }

    /// The same, and without the objects of these keys.
    #[must_use]
    pub fn without(mut self, keys: impl IntoIterator<Item = T::Key>) -> Self {
        self.0.extend(keys.into_iter().map(|key| (key, None)));
        self
    }

    /// Adds the changes that follow on these.
    pub fn extend(&mut self, next: Self) {
        self.0.extend(next.0);
    }

    /// The new and changed objects.
    pub fn changed(&self) -> impl Iterator<Item = &Arc<T>> + Clone {
        self.0.values().flatten()
    }

    /// Keys of the removed objects.
    pub fn removed(&self) -> impl Iterator<Item = &T::Key> + Clone {
        self.0.iter().filter(|(_, object)| object.is_none()).map(|(key, _)| key)
    }

    /// Applies the changes to all objects of this kind.
    pub fn apply_to(&self, objects: &mut BTreeMap<T::Key, Arc<T>>) {
        for (key, object) in &self.0 {
            match object {
                Some(object) => drop(objects.insert(key.clone(), object.clone())),
                None => drop(objects.remove(key)),
            }
        }
    }

    /// Whether an object is there after the change. `before`: whether it was.
    pub fn is_present<Q: Ord + ?Sized>(&self, key: &Q, before: impl FnOnce() -> bool) -> bool
    where
        T::Key: Borrow<Q>,
    {
        self.0.get(key).map_or_else(before, Option::is_some)
    }
}

impl<T: Keyed> Default for Entries<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

/// To read alone: an object has no other key than its own.
impl<T: Keyed> Deref for Entries<T> {
    type Target = BTreeMap<T::Key, Option<Arc<T>>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// New or changed objects; of those with the same key the last one.
impl<T: Keyed, O: Into<Arc<T>>> FromIterator<O> for Entries<T> {
    fn from_iter<I: IntoIterator<Item = O>>(objects: I) -> Self {
        let objects = objects.into_iter().map(Into::into);
        Self(objects.map(|object: Arc<T>| (object.key().clone(), Some(object))).collect())
    }
}

impl<T: Keyed> From<Vec<T>> for Entries<T> {
    fn from(objects: Vec<T>) -> Self {
        objects.into_iter().collect()
    }
}
