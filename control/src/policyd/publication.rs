//! A published policy version: all resources, and the keys that changed since the previous version. Built and encoded
//! once, shared by all streams.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use prost::bytes::Bytes;
use vipgate_dataplane::policy::spec::EndpointSpec;
use vipgate_policy::compiler::{Placement, shard_groups};

use crate::membership::authority::ShardGroup;
use crate::xds::resource::{CLUSTER, Content, Key, Kind, SETTINGS, encode, settings};

/// Maximum size of the resources in one response, bytes: bounds the memory that a stream needs for a response, and how
/// long it blocks others.
const MAX_RESPONSE_BYTES: usize = 1 << 16;

/// A published policy version with all its resources.
#[derive(Debug, Default)]
pub struct Publication {
    /// Sequence number of the publication in this process; 0: the empty one before the first.
    pub number: u64,
    /// Version of the policy, as shown to users.
    pub version: String,
    /// The placement that the resources were encoded from.
    pub placement: Arc<Placement>,
    /// The distinct groups of gateways that can own a shard.
    pub shard_groups: Arc<BTreeSet<ShardGroup>>,
    /// Keys of added, changed and removed resources since the previous publication.
    pub changed_keys: Vec<Key>,
    /// By kind, in the order of the placement.
    resources: [Vec<PublishedResource>; Kind::ALL.len()],
    full_responses: [OnceLock<Arc<[EncodedResponse]>>; Kind::ALL.len()],
    delta_responses: OnceLock<Arc<[EncodedResponse]>>,
}

/// A resource of a publication.
#[derive(Clone, Debug)]
pub struct PublishedResource {
    /// Kind and name.
    pub key: Key,
    /// The encoded resource and its version.
    pub content: Content,
    /// The number of the publication in which it last changed.
    pub changed_in: u64,
}

/// An encoded response without its nonce.
#[derive(Clone, Debug)]
pub struct EncodedResponse {
    /// The kind of its resources.
    pub kind: Kind,
    /// The encoded `DeltaDiscoveryResponse`.
    pub bytes: Bytes,
}

impl Publication {
    /// The next publication, or `None` if nothing changed. Unchanged resources keep their encoding.
    pub fn next(&self, placement: Arc<Placement>) -> Option<Self> {
        let (number, old) = (self.number + 1, &self.placement);
        let mut changed_keys = Vec::new();
        let mut diff = Diff { number, changed_keys: &mut changed_keys };
        let [policies, shard_maps, vips, endpoints, services, gateways, nodes, cluster, _] = &self.resources;
        let mut resources = [
            diff.resources(&old.policies, policies, &placement.policies, |it| &it.name, encode::egress_policy),
            diff.resources(&old.shard_maps, shard_maps, &placement.shard_maps, |it| &it.name, encode::shard_map),
            diff.resources(&old.vips, vips, &placement.vips, |it| &it.address, encode::vip),
            diff.resources(&old.endpoints, endpoints, &placement.endpoints, |it| &it.address, encode::endpoint),
            diff.resources(&old.services, services, &placement.services, |it| &it.name, encode::service),
            diff.resources(&old.peers, gateways, &placement.peers, |it| &it.name, encode::gateway),
            diff.resources(&old.nodes, nodes, &placement.nodes, |it| &it.name, encode::overlay_node),
            diff.resources(old.cluster.as_slice(), cluster, placement.cluster.as_slice(), |_| &(), encode::cluster),
            Vec::new(),
        ];
        if changed_keys.is_empty() && self.number > 0 {
            return None;
        }
        let sum = resources.iter().flatten().fold(0_u64, |sum, it| sum.wrapping_add(it.content.version));
        let (key, content, version) = settings(placement.counts(), sum);
        changed_keys.push(key.clone());
        resources[Kind::Settings as usize].push(PublishedResource { key, content, changed_in: number });
        let is_same = old.vips == placement.vips && old.shard_maps == placement.shard_maps;
        let shard_groups = if is_same {
            self.shard_groups.clone()
        } else {
            Arc::new(shard_groups(&placement.vips, &placement.shard_maps))
        };
        let (full_responses, delta_responses) = Default::default();
        Some(Self {
            number,
            version,
            placement,
            shard_groups,
            changed_keys,
            resources,
            full_responses,
            delta_responses,
        })
    }

    /// The resource with this key.
    pub fn get(&self, key: &Key) -> Option<&PublishedResource> {
        let (placement, name) = (&self.placement, &*key.name);
        let address = || name.parse::<IpAddr>().ok();
        let index = match key.kind {
            Kind::EgressPolicy => placement.policies.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::ShardMap => placement.shard_maps.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::Vip => address().and_then(|own| placement.vips.binary_search_by_key(&own, |it| it.address).ok()),
            Kind::Endpoint => {
                address().and_then(|own| placement.endpoints.binary_search_by_key(&own, |it| it.address).ok())
            }
            Kind::Service => placement.services.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::Gateway => placement.peers.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::OverlayNode => placement.nodes.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::Cluster => (name == CLUSTER).then_some(0),
            Kind::Settings => (name == SETTINGS).then_some(0),
        };
        // A name that isn't in canonical form doesn't match.
        self.of_kind(key.kind).get(index?).filter(|it| *it.key.name == *name)
    }

    /// The resources of a kind.
    pub fn of_kind(&self, kind: Kind) -> &[PublishedResource] {
        &self.resources[kind as usize]
    }

    /// Responses with all resources of a kind; at least one.
    pub fn full(&self, kind: Kind) -> Arc<[EncodedResponse]> {
        let encode = || encode_responses(&self.version, kind, self.of_kind(kind).iter(), Vec::new()).into();
        self.full_responses[kind as usize].get_or_init(encode).clone()
    }

    /// Responses with the changes since the previous publication.
    pub fn delta(&self) -> Arc<[EncodedResponse]> {
        self.delta_responses.get_or_init(|| self.delta_for(&self.changed_keys, |_| true).into()).clone()
    }

    /// Responses with the current state of those of these keys that `is_subscribed` accepts. Additions and changes come
    /// before removals, the settings last.
    pub fn delta_for(&self, keys: &[Key], is_subscribed: impl Fn(&Key) -> bool) -> Vec<EncodedResponse> {
        let mut keys: Vec<&Key> = keys.iter().filter(|key| is_subscribed(key)).collect();
        keys.sort_unstable();
        keys.dedup();
        let mut out = Vec::new();
        let mut removals = Vec::new();
        for kind in Kind::ALL {
            let of_kind = keys.iter().filter(|key| key.kind == kind);
            let (mut present, mut removed) = (Vec::new(), Vec::new());
            for key in of_kind {
                match self.get(key) {
                    Some(published) => present.push(published),
                    None => removed.push(key.name.to_string()),
                }
            }
            if kind == Kind::Settings {
                // In reverse order: a resource is removed before those that it refers to.
                removals.reverse();
                out.append(&mut removals);
            }
            // Resources that endpoints refer to are removed after the references.
            let (immediate, deferred) =
                if kind == Kind::Endpoint { (removed, Vec::new()) } else { (Vec::new(), removed) };
            if !present.is_empty() || !immediate.is_empty() {
                out.extend(encode_responses(&self.version, kind, present.into_iter(), immediate));
            }
            if !deferred.is_empty() {
                removals.extend(encode_responses(&self.version, kind, [].into_iter(), deferred));
            }
        }
        out
    }

    /// Keys of resources that differ between an earlier publication and this one.
    pub fn changed_since(&self, earlier: &Self) -> Vec<Key> {
        if earlier.number + 1 == self.number {
            return self.changed_keys.clone();
        }
        let mut keys = Vec::new();
        for kind in Kind::ALL {
            let is_changed = |it: &&PublishedResource| {
                earlier.get(&it.key).is_none_or(|old| old.content.version != it.content.version)
            };
            keys.extend(self.of_kind(kind).iter().filter(is_changed).map(|it| it.key.clone()));
            let is_removed = |old: &&PublishedResource| self.get(&old.key).is_none();
            keys.extend(earlier.of_kind(kind).iter().filter(is_removed).map(|old| old.key.clone()));
        }
        keys
    }

    /// The endpoint with this address.
    pub fn endpoint(&self, address: IpAddr) -> Option<&EndpointSpec> {
        let index = self.placement.endpoints.binary_search_by_key(&address, |endpoint| endpoint.address).ok()?;
        self.placement.endpoints.get(index)
    }
}

/// Difference between two publications: encodes changed resources and collects their keys.
struct Diff<'a> {
    number: u64,
    changed_keys: &'a mut Vec<Key>,
}

impl Diff<'_> {
    /// The resources of a kind. `encoded` belongs to the items `old`; both are sorted by key like `new`.
    fn resources<T: PartialEq, K: Ord>(
        &mut self,
        old: &[T],
        encoded: &[PublishedResource],
        new: &[T],
        key: impl Fn(&T) -> &K,
        encode: impl Fn(&T) -> (Key, Content),
    ) -> Vec<PublishedResource> {
        let mut previous = old.iter().zip(encoded).peekable();
        let mut resources = Vec::with_capacity(new.len());
        for item in new {
            while let Some((_, removed)) = previous.next_if(|(old, _)| key(old) < key(item)) {
                self.changed_keys.push(removed.key.clone());
            }
            match previous.next_if(|(old, _)| key(old) == key(item)) {
                Some((old, unchanged)) if old == item => resources.push(unchanged.clone()),
                _ => {
                    let (key, content) = encode(item);
                    self.changed_keys.push(key.clone());
                    resources.push(PublishedResource { key, content, changed_in: self.number });
                }
            }
        }
        self.changed_keys.extend(previous.map(|(_, removed)| removed.key.clone()));
        resources
    }
}

/// Encodes resources and names of removed ones as responses of bounded size; without either, as one empty response.
pub fn encode_responses<'a>(
    version: &str,
    kind: Kind,
    resources: impl Iterator<Item = &'a PublishedResource>,
    removed: Vec<String>,
) -> Vec<EncodedResponse> {
    let response = |resources, removed_resources| DeltaDiscoveryResponse {
        system_version_info: version.to_owned(),
        type_url: kind.type_url().to_owned(),
        resources,
        removed_resources,
        ..DeltaDiscoveryResponse::default()
    };
    let chunk = |response: DeltaDiscoveryResponse| EncodedResponse { kind, bytes: response.encode_to_vec().into() };
    let mut out = Vec::new();
    let (mut collected, mut size) = (Vec::new(), 0);
    for PublishedResource { key, content, .. } in resources {
        collected.push(Resource {
            name: key.name.to_string(),
            version: Content::version_text(content.version),
            resource: Some(Any { type_url: kind.type_url().to_owned(), value: content.body.to_vec() }),
            ..Resource::default()
        });
        size += content.body.len() + 2 * key.name.len() + 128;
        if size >= MAX_RESPONSE_BYTES {
            out.push(chunk(response(std::mem::take(&mut collected), Vec::new())));
            size = 0;
        }
    }
    let mut removed = removed.into_iter().peekable();
    loop {
        let mut names = Vec::new();
        while size < MAX_RESPONSE_BYTES
            && let Some(name) = removed.next()
        {
            size += name.len() + 8;
            names.push(name);
        }
        if !collected.is_empty() || !names.is_empty() || out.is_empty() {
            out.push(chunk(response(std::mem::take(&mut collected), names)));
        }
        size = 0;
        if removed.peek().is_none() {
            return out;
        }
    }
}
