//! Resource store: the resources in force at a gateway, and the staged ones of an incomplete update. No I/O: responses
//! of a server, or what the gateway publishes itself, go in, policy updates come out.
//!
//! ```text
//!   response -> stage -> ... -> stage -> is_complete -> update_for -> commit    (staged resources are in force)
//!                  \-> StageError --------------------------------> discard   (nothing has changed)
//! ```

mod services;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use prost::bytes::Bytes;
use thiserror::Error;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::spec::ClusterSpec;
use vipgate_policy::compiler::{Cluster, GatewayLocality, Peer};
use vipgate_policy::fingerprint::{Fingerprint, mix};

use super::proto;
use super::resource::{CLUSTER, Content, Decoded, Key, Kind, ResourceError, SETTINGS, decode, printable};

/// Maximum number of resources in the store: protects against a faulty or malicious server.
pub const MAX_RESOURCES: usize = 1 << 20;

/// Why a response can't be staged.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StageError {
    /// The response's type is none of those subscribed to.
    #[error("type_url `{0}` is unknown to this gateway")]
    UnknownType(String),
    /// A resource can't be decoded.
    #[error("resource {key}: {error}")]
    InvalidResource {
        /// The resource.
        key: Key,
        /// The decoding error.
        #[source]
        error: ResourceError,
    },
    /// A resource has no body, or a body of another type than its response.
    #[error("resource {key}: {reason}")]
    InvalidEnvelope {
        /// The resource.
        key: Key,
        reason: String,
    },
    /// A resource lacks others of the same policy, or is too many.
    #[error("resource {key}: {reason}")]
    Inconsistent {
        /// The resource.
        key: Key,
        reason: String,
    },
    /// [`MAX_RESOURCES`] exceeded.
    #[error("more than {MAX_RESOURCES} resources")]
    TooManyResources,
}

/// A resource in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredResource {
    /// The server's version of the resource.
    pub version: String,
    /// The encoded message.
    pub body: Bytes,
}

/// A received resource that isn't in force yet.
#[derive(Clone, Debug)]
struct Staged {
    version: String,
    body: Bytes,
    decoded: Decoded,
}

/// The resources in force, and the staged changes.
#[derive(Debug, Default)]
pub struct ResourceStore {
    resources: BTreeMap<Key, StoredResource>,
    /// `None`: a removal.
    staged: BTreeMap<Key, Option<Staged>>,
    /// Number of staged keys that aren't in `resources`.
    new_keys: usize,
    counts: [usize; Kind::ALL.len()],
    peers: BTreeMap<Arc<str>, Peer>,
    cluster: Option<Cluster>,
    version: String,
}

/// A policy update for one gateway.
#[derive(Clone, Debug, Default)]
pub struct PolicyUpdate {
    /// Number of updates coalesced in it. If the gateway rejects a coalesced update, its parts follow one by one.
    pub update_count: u64,
    /// The change to the gateway's policy.
    pub change: PolicyChange,
    /// All gateways after the update.
    pub peers: Vec<Peer>,
}

impl ResourceStore {
    /// The resources in force.
    pub fn resources(&self) -> &BTreeMap<Key, StoredResource> {
        &self.resources
    }

    /// The version of the policy in force.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Names and versions of the resources of a kind, for `initial_resource_versions`.
    pub fn versions(&self, kind: Kind) -> impl Iterator<Item = (String, String)> {
        let from = Key { kind, name: "".into() };
        let resources = self.resources.range(from..).take_while(move |(key, _)| key.kind == kind);
        resources.map(|(key, resource)| (key.name.to_string(), resource.version.clone()))
    }

    /// Stages the resources of a response. They take effect with [`Self::commit`].
    ///
    /// # Errors
    /// If the response is invalid; nothing of it is staged then.
    pub fn stage(&mut self, response: DeltaDiscoveryResponse) -> Result<(), StageError> {
        let kind = Kind::from_type_url(&response.type_url)
            .ok_or_else(|| StageError::UnknownType(printable(&response.type_url)))?;
        if self.resources.len() + self.new_keys + response.resources.len() > MAX_RESOURCES {
            return Err(StageError::TooManyResources);
        }
        let mut changes = Vec::with_capacity(response.resources.len());
        for resource in response.resources {
            let key = Key { kind, name: resource.name.as_str().into() };
            let invalid = |reason: &str| StageError::InvalidEnvelope { key: key.clone(), reason: reason.to_owned() };
            let body = resource.resource.ok_or_else(|| invalid("has no body"))?;
            if body.type_url != kind.type_url() {
                return Err(invalid(&format!("has a body of type {}", printable(&body.type_url))));
            }
            let decoded = decode(kind, &resource.name, &body.value)
                .map_err(|error| StageError::InvalidResource { key: key.clone(), error })?;
            changes.push((key, Some(Staged { version: resource.version, body: body.value.into(), decoded })));
        }
        let names = response.removed_resource_names.into_iter().map(|name| name.name);
        let removed = response.removed_resources.into_iter().chain(names);
        changes.extend(removed.map(|name| (Key { kind, name: name.into() }, None)));
        for (key, staged) in changes {
            self.stage_resource(key, staged);
        }
        Ok(())
    }

    /// Stages the resources of a cache.
    ///
    /// # Errors
    /// If a resource can't be decoded.
    pub fn stage_cached(&mut self, resources: BTreeMap<Key, StoredResource>) -> Result<(), StageError> {
        self.stage_resources(resources.into_iter().map(|(key, resource)| (key, Some(resource))))
    }

    /// Stages resources without a response; `None`: a removal.
    ///
    /// # Errors
    /// If a resource can't be decoded.
    pub fn stage_resources(
        &mut self,
        resources: impl Iterator<Item = (Key, Option<StoredResource>)>,
    ) -> Result<(), StageError> {
        for (key, resource) in resources {
            let staged = match resource {
                None => None,
                Some(StoredResource { version, body }) => {
                    let decoded = decode(key.kind, &key.name, &body);
                    let decoded = decoded.map_err(|error| StageError::InvalidResource { key: key.clone(), error })?;
                    Some(Staged { version, body, decoded })
                }
            };
            self.stage_resource(key, staged);
        }
        Ok(())
    }

    fn stage_resource(&mut self, key: Key, staged: Option<Staged>) {
        let is_known = self.resources.contains_key(&key);
        if self.staged.insert(key, staged).is_none() && !is_known {
            self.new_keys += 1;
        }
    }

    /// Whether there are staged changes.
    pub fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Whether the staged update is complete: it has Settings, and their counts match.
    pub fn is_complete(&self) -> bool {
        self.staged_settings().is_some() && self.count_mismatch().is_none()
    }

    /// The first count in the staged Settings that differs from the number of resources after the update, as a message.
    pub fn count_mismatch(&self) -> Option<String> {
        let proto::Settings {
            version: _,
            egress_policies,
            vips,
            endpoints,
            gateways,
            services,
            overlay_nodes,
            clusters,
            shard_maps,
            backend_slices,
        } = self.staged_settings()?;
        let expected: [u64; Kind::COUNTED] = [
            *egress_policies,
            *shard_maps,
            *vips,
            *endpoints,
            *backend_slices,
            *services,
            *gateways,
            *overlay_nodes,
            *clusters,
        ];
        let mut counts = Kind::ALL.into_iter().zip(expected).zip(self.counts_after());
        let ((kind, expected), actual) = counts.find(|((_, expected), actual)| *expected != *actual as u64)?;
        Some(format!("expects {expected} {} resources, got {actual}", kind.name()))
    }

    /// Whether Settings are still expected: the server has sent some before, but none in the staged update.
    pub fn expects_settings(&self) -> bool {
        let key = settings_key();
        self.resources.contains_key(&key) && !self.staged.contains_key(&key)
    }

    fn staged_settings(&self) -> Option<&proto::Settings> {
        match self.staged.get(&settings_key()) {
            Some(Some(Staged { decoded: Decoded::Settings(settings), .. })) => Some(settings),
            _ => None,
        }
    }

    fn counts_after(&self) -> [usize; Kind::ALL.len()] {
        let mut counts = self.counts;
        for (key, staged) in &self.staged {
            let count = &mut counts[key.kind as usize];
            match (self.resources.contains_key(key), staged.is_some()) {
                (false, true) => *count += 1,
                (true, false) => *count -= 1,
                _ => {}
            }
        }
        counts
    }

    /// The staged update for a gateway, without unchanged resources.
    pub fn update_for(&self, gateway: &GatewayLocality) -> PolicyUpdate {
        let mut change = PolicyChange { version: self.version_after(), ..PolicyChange::default() };
        let name = &*gateway.name;
        let peers = self.peers_after();
        let (before, after) = (gateway.resolve_zone(self.peers.get(name)), gateway.resolve_zone(peers.get(name)));
        for (key, staged) in self.differing() {
            match staged.map(|staged| &staged.decoded) {
                Some(Decoded::EgressPolicy(policy)) => change.policies.insert(policy.clone()),
                Some(Decoded::ShardMap(map)) => change.shard_maps.insert(map.clone()),
                Some(Decoded::Vip(vip)) => change.vips.insert(gateway.vip(vip)),
                Some(Decoded::Endpoint(endpoint)) => change.endpoints.insert(endpoint.clone()),
                Some(Decoded::OverlayNode(node)) => change.nodes.insert(node.clone()),
                // What follows from them depends on other resources, too.
                Some(
                    Decoded::BackendSlice(_)
                    | Decoded::Service(_)
                    | Decoded::Gateway(_)
                    | Decoded::Cluster(_)
                    | Decoded::Settings(_),
                ) => {}
                None => remove(key, &mut change),
            }
        }
        let services = self.staged_services();
        for service in services.iter().filter_map(|name| self.service_after(name)) {
            change.services.insert(service.for_gateway(&after));
        }
        change.cluster = self.cluster_after(gateway, peers.get(name));
        if before != after {
            // The node and zone decide which backends the gateway may choose.
            self.reevaluate_services(&before, &after, &services, &mut change);
        }
        PolicyUpdate { update_count: 1, change, peers: peers.into_values().collect() }
    }

    /// The staged resources whose content isn't the one in force; `None`: a removal.
    fn differing(&self) -> impl Iterator<Item = (&Key, Option<&Staged>)> {
        let staged = self.staged.iter().map(|(key, staged)| (key, staged.as_ref()));
        staged.filter(|(key, staged)| {
            self.resources.get(key).map(|current| &current.body) != staged.map(|staged| &staged.body)
        })
    }

    /// The cluster's own prefixes for a gateway after the update; `None`: unchanged. `peer` is the gateway's resource.
    /// Before the first update the set is empty: even prefixes of the gateway's configuration take effect with it.
    fn cluster_after(&self, gateway: &GatewayLocality, peer: Option<&Peer>) -> Option<ClusterSpec> {
        let staged = match self.staged.get(&Key { kind: Kind::Cluster, name: CLUSTER.into() }) {
            None => self.cluster.clone(),
            Some(Some(Staged { decoded: Decoded::Cluster(cluster), .. })) => Some(cluster.clone()),
            Some(_) => None,
        };
        let effective = |cluster: Option<Cluster>, peer| cluster.unwrap_or_default().for_gateway(gateway, peer);
        let before = if self.resources.is_empty() {
            ClusterSpec::default()
        } else {
            effective(self.cluster.clone(), self.peers.get(&gateway.name))
        };
        let after = effective(staged, peer);
        (before != after).then_some(after)
    }

    /// All gateways after the update.
    fn peers_after(&self) -> BTreeMap<Arc<str>, Peer> {
        let mut peers = self.peers.clone();
        for (key, staged) in self.staged.iter().filter(|(key, _)| key.kind == Kind::Gateway) {
            peers.remove(&key.name);
            if let Some(Staged { decoded: Decoded::Gateway(peer), .. }) = staged {
                peers.insert(peer.name.clone(), peer.clone());
            }
        }
        peers
    }

    /// Adds the unchanged Services whose eligible backends change with the gateway's node or zone.
    fn reevaluate_services(
        &self,
        before: &GatewayLocality,
        after: &GatewayLocality,
        staged: &BTreeSet<Arc<str>>,
        change: &mut PolicyChange,
    ) {
        let from = Key { kind: Kind::Service, name: "".into() };
        let all = self.resources.range(from..).take_while(|(key, _)| key.kind == Kind::Service);
        for (key, _) in all.filter(|(key, _)| !staged.contains(&key.name)) {
            if let Some(service) = self.service_after(&key.name) {
                let (old, new) = (service.for_gateway(before), service.for_gateway(after));
                if old != new {
                    change.services.insert(new);
                }
            }
        }
    }

    /// The version in the staged Settings; without Settings, a hash over all resources.
    fn version_after(&self) -> String {
        if let Some(settings) = self.staged_settings() {
            return settings.version.clone();
        }
        let unchanged = self.resources.iter().filter(|(key, _)| !self.staged.contains_key(key));
        let staged = self.staged.iter().filter_map(|(key, staged)| Some((key, &staged.as_ref()?.version)));
        let hash = |(key, version): (&Key, &String)| {
            let mut fingerprint = Fingerprint::default();
            fingerprint.add(&[key.kind.number()]);
            fingerprint.add(key.name.as_bytes());
            fingerprint.add(&[0]);
            fingerprint.add(version.as_bytes());
            fingerprint.finish()
        };
        // A sum: independent of the order in which the resources arrived.
        let all = unchanged.map(|(key, resource)| (key, &resource.version)).chain(staged);
        Content::version_text(mix(all.map(hash).fold(0, u64::wrapping_add)))
    }

    /// Applies the staged changes. Returns the keys that changed, with their new resources, for the cache.
    pub fn commit(&mut self) -> Vec<(Key, Option<StoredResource>)> {
        self.version = self.version_after();
        self.counts = self.counts_after();
        self.new_keys = 0;
        let mut changed = Vec::with_capacity(self.staged.len());
        for (key, staged) in std::mem::take(&mut self.staged) {
            let Some(Staged { version, body, decoded }) = staged else {
                if self.resources.remove(&key).is_some() {
                    match key.kind {
                        Kind::Gateway => drop(self.peers.remove(&key.name)),
                        Kind::Cluster => self.cluster = None,
                        _ => {}
                    }
                    changed.push((key, None));
                }
                continue;
            };
            match decoded {
                Decoded::Gateway(peer) => drop(self.peers.insert(peer.name.clone(), peer)),
                Decoded::Cluster(cluster) => self.cluster = Some(cluster),
                _ => {}
            }
            let resource = StoredResource { version, body };
            if self.resources.get(&key) != Some(&resource) {
                self.resources.insert(key.clone(), resource.clone());
                changed.push((key, Some(resource)));
            }
        }
        changed
    }

    /// Drops the staged changes.
    pub fn discard(&mut self) {
        self.staged.clear();
        self.new_keys = 0;
    }
}

/// Removes the object of a resource.
fn remove(Key { kind, name }: &Key, change: &mut PolicyChange) {
    match kind {
        Kind::EgressPolicy => change.policies.remove(name.clone()),
        Kind::ShardMap => change.shard_maps.remove(name.clone()),
        Kind::Vip => name.parse().into_iter().for_each(|address| change.vips.remove(address)),
        Kind::Endpoint => name.parse().into_iter().for_each(|address| change.endpoints.remove(address)),
        Kind::Service => change.services.remove(name.clone()),
        Kind::OverlayNode => change.nodes.remove(name.clone()),
        Kind::BackendSlice | Kind::Gateway | Kind::Cluster | Kind::Settings | Kind::NodePolicy | Kind::View => {}
    }
}

fn settings_key() -> Key {
    Key { kind: Kind::Settings, name: SETTINGS.into() }
}

#[cfg(test)]
pub(crate) mod tests;
