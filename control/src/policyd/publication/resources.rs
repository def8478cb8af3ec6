//! The encoded resources of a placement, in chunks like its tables: what two placements share is neither compared nor
//! encoded again.

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_policy::compiler::{Difference, Keyed, Placement, Table, differences};

use super::PublishedResource;
use crate::xds::resource::{CLUSTER, Content, Key, Kind, SETTINGS, encode};

/// All resources of a publication.
#[derive(Clone, Debug, Default)]
pub(super) struct Resources {
    policies: Chunks,
    shard_maps: Vec<PublishedResource>,
    vips: Chunks,
    endpoints: Chunks,
    services: Chunks,
    gateways: Vec<PublishedResource>,
    nodes: Vec<PublishedResource>,
    cluster: Option<PublishedResource>,
    pub(super) settings: Option<PublishedResource>,
    /// The wrapping sum of the versions of all resources but the settings.
    pub(super) version_sum: u64,
}

/// The resources of a table, in chunks of the same sizes.
#[derive(Clone, Debug, Default)]
struct Chunks {
    chunks: Vec<Arc<Vec<PublishedResource>>>,
    count: usize,
}

impl Resources {
    /// The resources of the second placement, and the keys of those that differ from the first one, whose resources these
    /// are. Without settings.
    pub(super) fn next(&self, (old, new): (&Placement, &Placement), number: u64) -> (Self, Vec<Key>) {
        let mut diff = Diff { number, changed_keys: Vec::new(), version_sum: self.version_sum };
        let resources = Self {
            policies: diff.table(&self.policies, (&old.policies, &new.policies), encode::egress_policy),
            shard_maps: diff.list(&self.shard_maps, (&old.shard_maps, &new.shard_maps), encode::shard_map),
            vips: diff.table(&self.vips, (&old.vips, &new.vips), encode::vip),
            endpoints: diff.table(&self.endpoints, (&old.endpoints, &new.endpoints), encode::endpoint),
            services: diff.table(&self.services, (&old.services, &new.services), encode::service),
            gateways: diff.list(&self.gateways, (&old.peers, &new.peers), encode::gateway),
            nodes: diff.list(&self.nodes, (&old.nodes, &new.nodes), encode::overlay_node),
            cluster: diff
                .list(self.cluster.as_slice(), (old.cluster.as_slice(), new.cluster.as_slice()), encode::cluster)
                .pop(),
            settings: None,
            version_sum: 0,
        };
        (Self { version_sum: diff.version_sum, ..resources }, diff.changed_keys)
    }

    /// Numbers of resources of the kinds that Settings count.
    pub(super) fn counts(&self) -> [usize; Kind::COUNTED] {
        std::array::from_fn(|i| self.count(Kind::ALL[i]))
    }

    pub(super) fn count(&self, kind: Kind) -> usize {
        match self.parts(kind) {
            Parts::Chunks(chunks) => chunks.count,
            Parts::List(list) => list.len(),
        }
    }

    /// The resources of a kind.
    pub(super) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &PublishedResource> + Clone {
        let (chunks, list) = match self.parts(kind) {
            Parts::Chunks(chunks) => (chunks.chunks.as_slice(), [].as_slice()),
            Parts::List(list) => ([].as_slice(), list),
        };
        chunks.iter().flat_map(|chunk| chunk.iter()).chain(list)
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
            Kind::Service => self.services.at(placement.services.find(name)?),
            Kind::Gateway => self.gateways.get(placement.peers.binary_search_by(|it| (*it.name).cmp(name)).ok()?),
            Kind::OverlayNode => self.nodes.get(placement.nodes.binary_search_by(|it| (*it.name).cmp(name)).ok()?),
            Kind::Cluster => self.cluster.as_ref().filter(|_| name == CLUSTER),
            Kind::Settings => self.settings.as_ref().filter(|_| name == SETTINGS),
        }
    }

    fn parts(&self, kind: Kind) -> Parts<'_> {
        match kind {
            Kind::EgressPolicy => Parts::Chunks(&self.policies),
            Kind::ShardMap => Parts::List(&self.shard_maps),
            Kind::Vip => Parts::Chunks(&self.vips),
            Kind::Endpoint => Parts::Chunks(&self.endpoints),
            Kind::Service => Parts::Chunks(&self.services),
            Kind::Gateway => Parts::List(&self.gateways),
            Kind::OverlayNode => Parts::List(&self.nodes),
            Kind::Cluster => Parts::List(self.cluster.as_slice()),
            Kind::Settings => Parts::List(self.settings.as_slice()),
        }
    }
}

/// The resources of a kind.
enum Parts<'a> {
    Chunks(&'a Chunks),
    List(&'a [PublishedResource]),
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
                    encoded.at(at).into_iter().for_each(|replaced| self.remove(replaced, false));
                    let resource = self.encode(item, &encode);
                    open.push(self.add(resource));
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
            match before.next_if(|it| it.key == resource.key) {
                Some(same) if same.content == resource.content => {
                    resources.push(same.clone());
                    continue;
                }
                Some(changed) => self.remove(changed, false),
                None => {}
            }
            resources.push(self.add(resource));
        }
        before.for_each(|removed| self.remove(removed, true));
        resources
    }

    fn encode<T>(&self, item: &T, encode: impl Fn(&T) -> (Key, Content)) -> PublishedResource {
        let (key, content) = encode(item);
        PublishedResource { key, content, changed_in: self.number }
    }

    fn add(&mut self, resource: PublishedResource) -> PublishedResource {
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
