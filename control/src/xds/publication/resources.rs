//! The encoded resources of a placement, in chunks like its tables: what two placements share is neither compared nor
//! encoded again.

mod node_policies;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_policy::compiler::{Difference, Keyed, PlacedService, Placement, Table, differences};

use self::node_policies::NodePolicies;
use super::PublishedResource;
use crate::xds::resource::slices::parse_name;
use crate::xds::resource::{CLUSTER, Content, Key, Kind, ResourceError, SETTINGS, decode, encode};

/// All resources of a publication.
#[derive(Clone, Debug, Default)]
pub(super) struct Resources {
    policies: Chunks,
    shard_maps: Vec<PublishedResource>,
    vips: Chunks,
    endpoints: Chunks,
    services: Chunks,
    /// The backend slices by Service, in the order of their numbers.
    slices: Slices,
    gateways: Vec<PublishedResource>,
    nodes: Vec<PublishedResource>,
    cluster: Option<PublishedResource>,
    pub(super) settings: Option<PublishedResource>,
    /// Apart from the others, which are the policy of gateways.
    node_policies: NodePolicies,
    /// The wrapping sum of the versions of all resources but the settings.
    pub(super) version_sum: u64,
}

type Slices = BTreeMap<Arc<str>, Arc<[PublishedResource]>>;

/// The resources of a table, in chunks of the same sizes.
#[derive(Clone, Debug, Default)]
struct Chunks {
    chunks: Vec<Arc<Vec<PublishedResource>>>,
    count: usize,
}

/// The resources of a placement, and what differs from those of the previous one.
pub(super) struct Next {
    pub(super) resources: Resources,
    /// The resources of gateways that differ.
    pub(super) changed_keys: Vec<Key>,
    /// Whether the policy of any node differs.
    pub(super) changes_nodes: bool,
    /// Those of the changed ones that gateways can't decode, with the reasons.
    pub(super) invalid: Vec<(Key, ResourceError)>,
}

impl Resources {
    /// The resources of the second placement. These are those of the first one. Without settings.
    pub(super) fn next(&self, (old, new): (&Placement, &Placement), number: u64) -> Next {
        let mut diff = Diff { number, changed_keys: Vec::new(), version_sum: self.version_sum, invalid: Vec::new() };
        let resources = Self {
            policies: diff.table(&self.policies, (&old.policies, &new.policies), encode::egress_policy),
            shard_maps: diff.list(&self.shard_maps, (&old.shard_maps, &new.shard_maps), encode::shard_map),
            vips: diff.table(&self.vips, (&old.vips, &new.vips), encode::vip),
            endpoints: diff.table(&self.endpoints, (&old.endpoints, &new.endpoints), encode::endpoint),
            slices: diff.slices(&self.slices, &old.services, &new.services),
            services: diff.table(&self.services, (&old.services, &new.services), encode::service),
            gateways: diff.list(&self.gateways, (&old.peers, &new.peers), encode::gateway),
            nodes: diff.list(&self.nodes, (&old.nodes, &new.nodes), encode::overlay_node),
            cluster: diff
                .list(self.cluster.as_slice(), (old.cluster.as_slice(), new.cluster.as_slice()), encode::cluster)
                .pop(),
            settings: None,
            node_policies: NodePolicies::default(),
            version_sum: 0,
        };
        let (node_policies, changes_nodes) = self.node_policies.next((old, new), &diff.changed_keys, number);
        let resources = Self { node_policies, version_sum: diff.version_sum, ..resources };
        Next { resources, changed_keys: diff.changed_keys, changes_nodes, invalid: diff.invalid }
    }

    /// How many policies of nodes were encoded for this publication.
    pub(super) fn encoded_nodes(&self) -> usize {
        self.node_policies.encoded
    }

    /// Numbers of resources of the kinds that Settings count.
    pub(super) fn counts(&self) -> [usize; Kind::COUNTED] {
        std::array::from_fn(|i| self.count(Kind::ALL[i]))
    }

    pub(super) fn count(&self, kind: Kind) -> usize {
        match self.parts(kind) {
            Parts::Chunks(chunks) => chunks.count,
            Parts::List(list) => list.len(),
            Parts::Slices(slices) => slices.values().map(|slices| slices.len()).sum(),
            Parts::Nodes(nodes) => nodes.len(),
        }
    }

    /// The resources of a kind.
    pub(super) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &PublishedResource> + Clone {
        let (mut chunks, mut list, mut slices, mut nodes) = Default::default();
        match self.parts(kind) {
            Parts::Chunks(of_kind) => chunks = of_kind.chunks.as_slice(),
            Parts::List(of_kind) => list = of_kind,
            Parts::Slices(of_kind) => slices = Some(of_kind),
            Parts::Nodes(of_kind) => nodes = Some(of_kind),
        }
        let slices = slices.into_iter().flat_map(|slices: &Slices| slices.values().flat_map(|slices| slices.iter()));
        let nodes = nodes.into_iter().flat_map(NodePolicies::iter);
        chunks.iter().flat_map(|chunk| chunk.iter()).chain::<&[_]>(list).chain(slices).chain(nodes)
    }

    /// The resource with this key, or one with another spelling of its name. `placement` is that of the resources.
    pub(super) fn get(&self, placement: &Placement, key: &Key) -> Option<&PublishedResource> {
        let name = &*key.name;
        let address = || name.parse::<IpAddr>().ok();
        match key.kind {
            Kind::EgressPolicy => self.policies.at(placement.policies.find(name)?),
            Kind::ShardMap => {
                self.shard_maps.get(placement.shard_maps.binary_search_by(|it| (*it.name).cmp(name)).ok()?)
            }
            Kind::Vip => self.vips.at(placement.vips.find(&address()?)?),
            Kind::Endpoint => self.endpoints.at(placement.endpoints.find(&address()?)?),
            Kind::BackendSlice => {
                let (service, number) = parse_name(name)?;
                self.slices.get(service)?.get(number as usize)
            }
            Kind::Service => self.services.at(placement.services.find(name)?),
            Kind::Gateway => self.gateways.get(placement.peers.binary_search_by(|it| (*it.name).cmp(name)).ok()?),
            Kind::OverlayNode => self.nodes.get(placement.nodes.binary_search_by(|it| (*it.name).cmp(name)).ok()?),
            Kind::Cluster => self.cluster.as_ref().filter(|_| name == CLUSTER),
            Kind::Settings => self.settings.as_ref().filter(|_| name == SETTINGS),
            Kind::NodePolicy => self.node_policies.get(placement.agent(name)?),
            // Beside publications.
            Kind::View => None,
        }
    }

    /// The backend slices of a Service.
    pub(super) fn slices_of(&self, service: &str) -> &[PublishedResource] {
        self.slices.get(service).map_or(&[], |slices| slices)
    }

    fn parts(&self, kind: Kind) -> Parts<'_> {
        match kind {
            Kind::EgressPolicy => Parts::Chunks(&self.policies),
            Kind::ShardMap => Parts::List(&self.shard_maps),
            Kind::Vip => Parts::Chunks(&self.vips),
            Kind::Endpoint => Parts::Chunks(&self.endpoints),
            Kind::BackendSlice => Parts::Slices(&self.slices),
            Kind::Service => Parts::Chunks(&self.services),
            Kind::Gateway => Parts::List(&self.gateways),
            Kind::OverlayNode => Parts::List(&self.nodes),
            Kind::Cluster => Parts::List(self.cluster.as_slice()),
            Kind::Settings => Parts::List(self.settings.as_slice()),
            Kind::NodePolicy => Parts::Nodes(&self.node_policies),
            Kind::View => Parts::List(&[]),
        }
    }
}

/// The resources of a kind.
enum Parts<'a> {
    Chunks(&'a Chunks),
    List(&'a [PublishedResource]),
    Slices(&'a Slices),
    Nodes(&'a NodePolicies),
}

impl Chunks {
    fn at(&self, (chunk, index): (usize, usize)) -> Option<&PublishedResource> {
        self.chunks.get(chunk)?.get(index)
    }
}

/// Difference between two publications: encodes changed resources and collects their keys.
struct Diff {
    number: u64,
    changed_keys: Vec<Key>,
    version_sum: u64,
    invalid: Vec<(Key, ResourceError)>,
}

impl Diff {
    /// The resources of the second table; `encoded` are those of the first one.
    fn table<T: Keyed + PartialEq>(
        &mut self,
        encoded: &Chunks,
        (old, new): (&Table<T>, &Table<T>),
        encode: impl Fn(&T) -> (Key, Content),
    ) -> Chunks {
        let mut chunks: Vec<Arc<Vec<PublishedResource>>> = Vec::with_capacity(new.chunks().len());
        let mut open: Vec<PublishedResource> = Vec::new();
        differences(old, new, |chunk, difference| {
            match difference {
                Difference::Shared(before) => chunks.extend(encoded.chunks.get(before).cloned()),
                Difference::Kept(at) => open.extend(encoded.at(at).cloned()),
                Difference::Changed(item, at) => {
                    let resource = self.encode(item, &encode);
                    open.push(self.replace(encoded.at(at), resource));
                }
                Difference::Added(item) => {
                    let resource = self.encode(item, &encode);
                    open.push(self.add(resource));
                }
                Difference::Removed(at) => {
                    encoded.at(at).into_iter().for_each(|removed| self.remove(removed, true));
                }
            }
            if new.chunks().get(chunk).is_some_and(|items| items.len() == open.len()) {
                chunks.push(Arc::new(std::mem::take(&mut open)));
            }
        });
        Chunks { chunks, count: new.len() }
    }

    /// The resources of the second list; `encoded` are those of the first one. Both are sorted by name.
    fn list<T: PartialEq>(
        &mut self,
        encoded: &[PublishedResource],
        (old, new): (&[T], &[T]),
        encode: impl Fn(&T) -> (Key, Content),
    ) -> Vec<PublishedResource> {
        if std::ptr::eq(old, new) || old == new {
            return encoded.to_vec();
        }
        let mut before = encoded.iter().peekable();
        let mut resources = Vec::with_capacity(new.len());
        for item in new {
            let resource = self.encode(item, &encode);
            while let Some(removed) = before.next_if(|it| it.key < resource.key) {
                self.remove(removed, true);
            }
            resources.push(self.replace(before.next_if(|it| it.key == resource.key), resource));
        }
        before.for_each(|removed| self.remove(removed, true));
        resources
    }

    fn encode<T>(&self, item: &T, encode: impl Fn(&T) -> (Key, Content)) -> PublishedResource {
        let (key, content) = encode(item);
        PublishedResource { key, content, changed_in: self.number }
    }

    /// The backend slices of the second table's Services; `encoded` are those of the first one.
    fn slices(&mut self, encoded: &Slices, old: &Table<PlacedService>, new: &Table<PlacedService>) -> Slices {
        let mut slices = encoded.clone();
        differences(old, new, |_, difference| match difference {
            Difference::Shared(_) | Difference::Kept(_) => {}
            Difference::Changed(service, _) | Difference::Added(service) => {
                let before = slices.remove(&service.name).unwrap_or_default();
                let encoded = encode::slices(service);
                before.iter().skip(encoded.len()).for_each(|removed| self.remove(removed, true));
                let each = encoded.into_iter().enumerate().map(|(number, (key, content))| {
                    let resource = PublishedResource { key, content, changed_in: self.number };
                    self.replace(before.get(number), resource)
                });
                let after: Arc<[PublishedResource]> = each.collect();
                if !after.is_empty() {
                    slices.insert(service.name.clone(), after);
                }
            }
            Difference::Removed((chunk, at)) => {
                let removed = slices.remove(&old.chunks()[chunk][at].name);
                removed.iter().flat_map(|slices| slices.iter()).for_each(|removed| self.remove(removed, true));
            }
        });
        slices
    }

    /// The resource in place of the previous one, which stays if it has the same content.
    fn replace(&mut self, before: Option<&PublishedResource>, resource: PublishedResource) -> PublishedResource {
        if let Some(before) = before {
            if before.content == resource.content {
                return before.clone();
            }
            self.remove(before, false);
        }
        self.add(resource)
    }

    /// Adds a resource that was encoded anew, so this is where it is decoded once.
    fn add(&mut self, resource: PublishedResource) -> PublishedResource {
        let PublishedResource { key, content, .. } = &resource;
        if let Err(error) = decode(key.kind, &key.name, &content.body) {
            self.invalid.push((key.clone(), error));
        }
        self.version_sum = self.version_sum.wrapping_add(resource.content.version);
        self.changed_keys.push(resource.key.clone());
        resource
    }

    /// Removes a resource, whose key is among the changed ones unless it is replaced.
    fn remove(&mut self, resource: &PublishedResource, is_gone: bool) {
        self.version_sum = self.version_sum.wrapping_sub(resource.content.version);
        self.changed_keys.extend(is_gone.then(|| resource.key.clone()));
    }
}

#[cfg(test)]
mod tests;
