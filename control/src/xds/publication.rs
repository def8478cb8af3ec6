//! A published policy version: all resources, and the keys that changed since the previous version. Built and encoded
//! once, shared by all streams. A gateway with manifests in files publishes for itself.

mod resources;
pub mod selection;
mod variant;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use prost::bytes::Bytes;
use vipgate_dataplane::policy::spec::EndpointSpec;
use vipgate_policy::compiler::{Placement, SetAside, differences, shard_groups};

use self::resources::{Next, Resources};
use self::variant::Variant;
pub use self::variant::without_mark;
use crate::membership::authority::ShardGroup;
use crate::xds::resource::{Content, Key, Kind, settings};
use crate::xds::store::StoredResource;

/// Maximum size of the resources in one response, bytes: bounds the memory that a stream needs for a response, and how
/// long it blocks others.
pub const MAX_RESPONSE_BYTES: usize = 1 << 16;

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
    /// Keys of added, changed and removed resources of gateways since the previous publication; of a variant none.
    pub changed_keys: Vec<Key>,
    /// Resources that gateways can't decode, with the reasons. They are left out for all, as far as that is possible.
    pub left_out: BTreeMap<Key, String>,
    /// Whether it is for one gateway, without what that refuses.
    variant: Option<Variant>,
    resources: Resources,
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

/// Of the same content, whenever it changed.
impl PartialEq for PublishedResource {
    fn eq(&self, other: &Self) -> bool {
        let Self { key, content, changed_in: _ } = self;
        (key, content) == (&other.key, &other.content)
    }
}

impl Publication {
    /// The next publication, or `None` if nothing changed. Unchanged resources keep their encoding. If nothing but policies
    /// of nodes changed, gateways have it in force already, Settings included.
    pub fn next(&self, placement: Arc<Placement>) -> Option<Self> {
        let (placement, next, left_out) = self.decodable(placement, self.number + 1);
        self.followed_by(placement, next, left_out)
    }

    /// The next publication, with resources that gateways can't decode.
    #[cfg(test)]
    pub fn next_unchecked(&self, placement: Arc<Placement>) -> Option<Self> {
        let next = self.resources.next((&self.placement, &placement), self.number + 1);
        self.followed_by(placement, next, BTreeMap::new())
    }

    fn followed_by(&self, placement: Arc<Placement>, next: Next, left_out: BTreeMap<Key, String>) -> Option<Self> {
        let number = self.number + 1;
        let Next { mut resources, mut changed_keys, changes_nodes, invalid: _ } = next;
        let changes_gateways = !changed_keys.is_empty() || self.number == 0;
        if !changes_gateways && !changes_nodes && left_out == self.left_out {
            return None;
        }
        let mut version = self.version.clone();
        if changes_gateways {
            let (key, content, new_version) = settings(resources.counts(), resources.version_sum);
            version = new_version;
            changed_keys.push(key.clone());
            resources.set_settings(PublishedResource { key, content, changed_in: number });
        }
        let old = &self.placement;
        let has_same_maps =
            Arc::ptr_eq(&old.shard_maps, &placement.shard_maps) || old.shard_maps == placement.shard_maps;
        let shard_groups = if has_same_maps && old.vips == placement.vips {
            self.shard_groups.clone()
        } else {
            Arc::new(shard_groups(&placement.vips, &placement.shard_maps))
        };
        // What was encoded of the gateways' policy is the same, and so is its version.
        let full_responses = if changes_gateways { Default::default() } else { self.full_responses.clone() };
        Some(Self {
            number,
            version,
            placement,
            shard_groups,
            changed_keys,
            left_out,
            variant: None,
            resources,
            full_responses,
            delta_responses: OnceLock::new(),
        })
    }

    /// The next resources, without those that gateways can't decode: one would have them reject the whole policy. What
    /// can't be set aside stays.
    fn decodable(&self, mut placement: Arc<Placement>, number: u64) -> (Arc<Placement>, Next, BTreeMap<Key, String>) {
        let (mut without, mut left_out) = (SetAside::default(), BTreeMap::new());
        let original = placement.clone();
        loop {
            let next = self.resources.next((&self.placement, &placement), number);
            let mut differs = false;
            for (key, error) in &next.invalid {
                differs |= selection::add(&mut without, key);
                left_out.entry(key.clone()).or_insert_with(|| error.to_string());
            }
            // It ends: each round leaves out more.
            if !differs {
                let is_unchanged = |key: &Key| next.resources.get(key).is_some() && !next.changed_keys.contains(key);
                for (key, reason) in self.left_out.iter().filter(|(key, _)| is_unchanged(key)) {
                    left_out.entry(key.clone()).or_insert_with(|| reason.clone());
                }
                return (placement, next, left_out);
            }
            placement = Arc::new(original.without(&without));
        }
    }

    /// How many policies of nodes were encoded for this publication.
    pub fn encoded_nodes(&self) -> usize {
        self.resources.encoded_nodes()
    }

    /// The resource with this key.
    pub fn get(&self, key: &Key) -> Option<&PublishedResource> {
        self.resources.get(key)
    }

    /// The version of the resource with this key.
    pub fn version_of(&self, key: &Key) -> Option<u64> {
        self.get(key).map(|it| it.content.version)
    }

    /// The backend slices of a Service.
    pub fn slices_of<'a>(&'a self, service: &Key) -> impl Iterator<Item = &'a PublishedResource> + use<'a> {
        let slices = (service.kind == Kind::Service).then(|| self.resources.slices_of(&service.name));
        slices.into_iter().flatten()
    }

    /// The resources of a kind, by name.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &PublishedResource> + Clone {
        self.resources.of_kind(kind)
    }

    /// Number of resources of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        self.resources.count(kind)
    }

    /// Responses with all resources of a kind; at least one.
    pub fn full(&self, kind: Kind) -> Arc<[EncodedResponse]> {
        let encode = || encode_responses(&self.version, kind, self.of_kind(kind), Vec::new()).into();
        self.full_responses[kind as usize].get_or_init(encode).clone()
    }

    /// Responses with the changes since the previous publication.
    pub fn delta(&self) -> Arc<[EncodedResponse]> {
        let encode = || {
            let keys = self.sending_order(self.changed_keys.clone());
            let response =
                |(kind, range): (Kind, Range<usize>)| EncodedResponse { kind, bytes: self.encode(kind, &keys[range]) };
            self.responses_of(&keys).into_iter().map(response).collect()
        };
        self.delta_responses.get_or_init(encode).clone()
    }

    /// Keys in the order in which they are sent: additions and changes before removals, the settings last. Removals come
    /// in reverse order of kinds, a resource before those that it refers to; removed endpoints come with the additions.
    pub fn sending_order(&self, mut keys: Vec<Key>) -> Vec<Key> {
        keys.sort_unstable();
        keys.dedup();
        let is_early = |key: &Key| key.kind == Kind::Endpoint || self.get(key).is_some();
        let (early, mut removed): (Vec<Key>, Vec<Key>) = keys.into_iter().partition(is_early);
        let (mut keys, settings): (Vec<Key>, Vec<Key>) = early.into_iter().partition(|key| key.kind != Kind::Settings);
        removed.sort_by_key(|key| Reverse(key.kind));
        keys.extend(removed);
        keys.extend(settings);
        keys
    }

    /// The parts of a list of keys that are a response each: of one kind, and of limited size.
    pub fn responses_of(&self, keys: &[Key]) -> Vec<(Kind, Range<usize>)> {
        let mut parts = Vec::new();
        let (mut begin, mut size) = (0, 0);
        for (i, key) in keys.iter().enumerate() {
            let (end, name) = (i + 1, key.name.len());
            size += self.get(key).map_or(name + 8, |it| it.content.body.len() + 2 * name + 128);
            if size >= MAX_RESPONSE_BYTES || keys.get(end).is_none_or(|next| next.kind != key.kind) {
                parts.push((key.kind, begin..end));
                (begin, size) = (end, 0);
            }
        }
        parts
    }

    /// A response with the current state of the resources with these keys, all of one kind.
    pub fn encode(&self, kind: Kind, keys: &[Key]) -> Bytes {
        let (mut present, mut removed) = (Vec::new(), Vec::new());
        for key in keys {
            match self.get(key) {
                Some(it) => present.push(it),
                None => removed.push(key.name.to_string()),
            }
        }
        // By its size it is one response. Several could be concatenated: protobuf merges concatenated messages.
        let responses = encode_responses(&self.version, kind, present.into_iter(), removed);
        responses.iter().map(|response| &*response.bytes).collect::<Vec<&[u8]>>().concat().into()
    }

    /// Keys of resources of gateways that differ between an earlier publication and this one.
    pub fn changed_since(&self, earlier: &Self) -> Vec<Key> {
        if self.follows(earlier) {
            return self.changed_keys.clone();
        }
        let mut keys = Vec::new();
        differences(&earlier.resources.table, &self.resources.table, |key, _| keys.push(key.clone()));
        keys
    }

    /// The resources with these keys as a gateway stores them, `None` if there is none, and the Settings, which complete an
    /// update.
    pub fn stored(&self, keys: Vec<Key>) -> impl Iterator<Item = (Key, Option<StoredResource>)> {
        let settings = self.of_kind(Kind::Settings).map(|it| it.key.clone());
        keys.into_iter().chain(settings).map(move |key| {
            let resource = self.get(&key).map(|PublishedResource { content: Content { version, body }, .. }| {
                StoredResource { version: Content::version_text(*version), body: body.clone() }
            });
            (key, resource)
        })
    }

    /// Logs what is left out for all gateways from here on: what the compiler lets pass, gateways must be able to decode, so
    /// this is an error of this program.
    pub fn log_left_out(&self, before: &Self) {
        for (resource, reason) in &self.left_out {
            if before.left_out.get(resource) != Some(reason) {
                tracing::error!(
                    event = "left_out",
                    %resource,
                    reason,
                    "gateways can't decode it: left out for all of them"
                );
            }
        }
    }

    /// The endpoint with this address.
    pub fn endpoint(&self, address: IpAddr) -> Option<&EndpointSpec> {
        self.placement.endpoints.get(&address)
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
