//! The encoded resources of a placement, in a table by key. What two placements share is neither compared nor encoded
//! again: what differs becomes keys with new content, and an edit of the table.

mod node_policies;

use std::collections::BTreeSet;
use std::fmt::Display;

use vipgate_dataplane::policy::spec::Keyed;
use vipgate_policy::compiler::{PlacedService, Placement, Table, differences};

use self::node_policies::NodePolicies;
use super::PublishedResource;
use crate::xds::resource::slices::parse_name;
use crate::xds::resource::{Content, Key, Kind, ResourceError, decode, encode};

/// All resources of a publication.
#[derive(Clone, Debug, Default)]
pub(super) struct Resources {
    /// The policy of gateways.
    pub(super) table: Table<PublishedResource>,
    /// Their numbers by kind.
    counts: [usize; Kind::ALL.len()],
    /// The wrapping sum of their versions, but that of the settings.
    pub(super) version_sum: u64,
    node_policies: NodePolicies,
}

/// The resources of a placement, and what differs from those of the previous one.
pub(super) struct Next {
    /// With the settings of the previous one.
    pub(super) resources: Resources,
    /// The resources of gateways that differ.
    pub(super) changed_keys: Vec<Key>,
    /// Whether the policy of any node differs.
    pub(super) changes_nodes: bool,
    /// Those of the changed ones that gateways can't decode, with the reasons.
    pub(super) invalid: Vec<(Key, ResourceError)>,
}

impl Keyed for PublishedResource {
    type Key = Key;

    fn key(&self) -> &Key {
        &self.key
    }
}

impl Resources {
    /// The resources of the second placement. These are those of the first one.
    pub(super) fn next(&self, (old, new): (&Placement, &Placement), number: u64) -> Next {
        let mut diff = Diff { before: self, changes: Vec::new(), invalid: Vec::new() };
        diff.table(Kind::EgressPolicy, (&old.policies, &new.policies), encode::egress_policy);
        diff.list(Kind::ShardMap, (&old.shard_maps, &new.shard_maps), encode::shard_map);
        diff.table(Kind::Vip, (&old.vips, &new.vips), encode::vip);
        diff.table(Kind::Endpoint, (&old.endpoints, &new.endpoints), encode::endpoint);
        diff.services(&old.services, &new.services);
        diff.list(Kind::Gateway, (&old.peers, &new.peers), encode::gateway);
        diff.list(Kind::OverlayNode, (&old.nodes, &new.nodes), encode::overlay_node);
        diff.list(Kind::Cluster, (old.cluster.as_slice(), new.cluster.as_slice()), encode::cluster);
        let Diff { mut changes, invalid, .. } = diff;
        changes.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut resources = self.with(&changes, number);
        let changed_keys: Vec<Key> = changes.into_iter().map(|(key, _)| key).collect();
        let (node_policies, changes_nodes) = self.node_policies.next((old, new), &changed_keys, number);
        resources.node_policies = node_policies;
        Next { resources, changed_keys, changes_nodes, invalid }
    }

    /// The resources with these changes, which are sorted by key; `None`: it is gone.
    fn with(&self, changes: &[(Key, Option<Content>)], number: u64) -> Self {
        let mut next = self.clone();
        let (mut removed, mut added) = (Vec::new(), Vec::new());
        for (key, content) in changes {
            let count = &mut next.counts[key.kind as usize];
            if let Some(before) = self.table.get(key) {
                next.version_sum = next.version_sum.wrapping_sub(before.content.version);
                *count -= 1;
            }
            match content {
                Some(content) => {
                    next.version_sum = next.version_sum.wrapping_add(content.version);
                    *count += 1;
                    let (key, content) = (key.clone(), content.clone());
                    added.push(PublishedResource { key, content, changed_in: number });
                }
                None => removed.push(key),
            }
        }
        next.table = self.table.edit(&removed, added);
        next
    }

    /// Sets the settings, which complete the others.
    pub(super) fn set_settings(&mut self, settings: PublishedResource) {
        self.counts[Kind::Settings as usize] = 1;
        self.table = self.table.edit(&[], vec![settings]);
    }

    /// How many policies of nodes were encoded for this publication.
    pub(super) fn encoded_nodes(&self) -> usize {
        self.node_policies.encoded
    }

    /// Numbers of resources of the kinds that Settings count.
    pub(super) fn counts(&self) -> [usize; Kind::COUNTED] {
        std::array::from_fn(|i| self.counts[i])
    }

    pub(super) fn count(&self, kind: Kind) -> usize {
        if kind == Kind::NodePolicy { self.node_policies.len() } else { self.counts[kind as usize] }
    }

    /// The resources of a kind, by name.
    pub(super) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &PublishedResource> + Clone {
        let of_gateways = self.table.skip_before(move |key| key.kind < kind).take_while(move |it| it.key.kind == kind);
        let nodes = (kind == Kind::NodePolicy).then_some(&self.node_policies);
        of_gateways.chain(nodes.into_iter().flat_map(NodePolicies::iter))
    }

    /// The resource with this key.
    pub(super) fn get(&self, key: &Key) -> Option<&PublishedResource> {
        if key.kind == Kind::NodePolicy { self.node_policies.get(&key.name) } else { self.table.get(key) }
    }

    /// The backend slices of a Service.
    pub(super) fn slices_of<'a>(&'a self, service: &str) -> impl Iterator<Item = &'a PublishedResource> + use<'a> {
        let (service, prefix) = (service.to_owned(), format!("{service}#"));
        let first = Key { kind: Kind::BackendSlice, name: prefix.as_str().into() };
        let from_first = self.table.skip_before(move |key| *key < first);
        let is_near =
            move |it: &&PublishedResource| it.key.kind == Kind::BackendSlice && it.key.name.starts_with(&*prefix);
        // The name of another Service may begin like that of a slice.
        let is_its = move |it: &&PublishedResource| parse_name(&it.key.name).is_some_and(|(of, _)| of == service);
        from_first.take_while(is_near).filter(is_its)
    }
}

/// The difference between two placements: the resources that differ, each with its new content.
struct Diff<'a> {
    /// The resources of the first one.
    before: &'a Resources,
    /// `None`: it is gone.
    changes: Vec<(Key, Option<Content>)>,
    invalid: Vec<(Key, ResourceError)>,
}

impl Diff<'_> {
    fn table<T: Keyed<Key: Display> + PartialEq>(
        &mut self,
        kind: Kind,
        (old, new): (&Table<T>, &Table<T>),
        encode: impl Fn(&T) -> (Key, Content),
    ) {
        differences(old, new, |key, item| match item {
            Some(item) => self.put(encode(item)),
            None => self.changes.push((Key { kind, name: key.to_string().into() }, None)),
        });
    }

    /// Both are sorted by name.
    fn list<T: PartialEq>(&mut self, kind: Kind, (old, new): (&[T], &[T]), encode: impl Fn(&T) -> (Key, Content)) {
        if std::ptr::eq(old, new) || old == new {
            return;
        }
        let before = self.before.of_kind(kind).map(|it| it.key.clone()).collect();
        self.replace(before, new.iter().map(encode));
    }

    /// Services with their backend slices.
    fn services(&mut self, old: &Table<PlacedService>, new: &Table<PlacedService>) {
        differences(old, new, |name, service| {
            let key = Key { kind: Kind::Service, name: name.clone() };
            let before = self.before.slices_of(name).map(|it| it.key.clone()).chain([key]).collect();
            let encoded = |service| encode::slices(service).into_iter().chain([encode::service(service)]);
            self.replace(before, service.into_iter().flat_map(encoded));
        });
    }

    /// Puts resources in the place of others.
    fn replace(&mut self, mut before: BTreeSet<Key>, after: impl Iterator<Item = (Key, Content)>) {
        for (key, content) in after {
            before.remove(&key);
            self.put((key, content));
        }
        self.changes.extend(before.into_iter().map(|key| (key, None)));
    }

    /// Puts a resource that was encoded anew, so this is where it is decoded once.
    fn put(&mut self, (key, content): (Key, Content)) {
        if self.before.table.get(&key).is_some_and(|before| before.content == content) {
            return;
        }
        if let Err(error) = decode(key.kind, &key.name, &content.body) {
            self.invalid.push((key.clone(), error));
        }
        self.changes.push((key, Some(content)));
    }
}

#[cfg(test)]
mod tests;
