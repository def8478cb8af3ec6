//! What a gateway holds of a server's resources, and what of an update has come so far. No I/O: responses go in, what to put
//! in force comes out.
//!
//! ```text
//!   response -> stage -> ... -> stage -> is_whole -> offer -> commit    (in force: now it is held)
//!                  \-> Refusal -----------------------------> discard   (nothing has changed)
//! ```

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use prost::bytes::Bytes;
use thiserror::Error;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::spec::{ClusterSpec, NodeSpec};

use super::proto;
use super::resource::{CLUSTER, Content, Decoded, Fault, Key, Kind, SETTINGS, decode, shown};
use crate::policy::{Cluster, Fingerprint, Peer, Viewer, mix};

/// Resources that a gateway holds at most; more is a mistake, or an attack.
pub const MOST_RESOURCES: usize = 1 << 20;

/// What can't be held.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// A response of a type that nobody asked for.
    #[error("type_url `{0}` is unknown to this gateway")]
    Type(String),
    /// A resource in it means nothing.
    #[error("resource {key}: {fault}")]
    Resource {
        /// Which.
        key: Key,
        /// What is wrong with it.
        fault: Fault,
    },
    /// A resource without a body, or of another type than its response.
    #[error("resource {key}: {reason}")]
    Shape {
        /// Which.
        key: Key,
        /// What is wrong with it.
        reason: String,
    },
    /// More than a gateway holds.
    #[error("more than {MOST_RESOURCES} resources")]
    TooMany,
}

/// A resource as it is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// As the server named this state of it.
    pub version: String,
    /// The encoded message.
    pub body: Bytes,
}

/// A resource that has come, or is no more.
#[derive(Clone, Debug)]
struct Staged {
    version: String,
    body: Bytes,
    meaning: Decoded,
}

/// What is held, and what is on its way.
#[derive(Debug, Default)]
pub struct Book {
    held: BTreeMap<Key, Held>,
    staged: BTreeMap<Key, Option<Staged>>,
    /// How much of what is staged isn't held.
    fresh: usize,
    counts: [usize; Kind::ALL.len()],
    peers: BTreeMap<Arc<str>, Peer>,
    cluster: Option<Cluster>,
    version: String,
}

/// What an update comes to for one gateway.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Updates that it is made of. Several that can't be in force together are offered again, one by one.
    pub updates: u64,
    /// What changes in its policy.
    pub change: PolicyChange,
    /// All gateways, once it is in force.
    pub peers: Vec<Peer>,
}

impl Book {
    /// What is held, for a cache.
    pub fn held(&self) -> &BTreeMap<Key, Held> {
        &self.held
    }

    /// What people call the policy that is held.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Names and versions of what is held of a kind, to go on from there.
    pub fn versions(&self, kind: Kind) -> impl Iterator<Item = (String, String)> {
        let from = Key { kind, name: "".into() };
        let held = self.held.range(from..).take_while(move |(key, _)| key.kind == kind);
        held.map(|(key, held)| (key.name.to_string(), held.version.clone()))
    }

    /// Takes in a response. What it says counts when the update is whole.
    ///
    /// # Errors
    /// When it can't be held; nothing of it is taken in then.
    pub fn stage(&mut self, response: DeltaDiscoveryResponse) -> Result<(), Refusal> {
        let kind = Kind::of_url(&response.type_url).ok_or_else(|| Refusal::Type(shown(&response.type_url)))?;
        if self.held.len() + self.fresh + response.resources.len() > MOST_RESOURCES {
            return Err(Refusal::TooMany);
        }
        let mut taken = Vec::with_capacity(response.resources.len());
        for resource in response.resources {
            let key = Key { kind, name: resource.name.as_str().into() };
            let refused = |reason: &str| Refusal::Shape { key: key.clone(), reason: reason.to_owned() };
            let body = resource.resource.ok_or_else(|| refused("has no body"))?;
            if body.type_url != kind.type_url() {
                return Err(refused(&format!("is a {}", shown(&body.type_url))));
            }
            let meaning = decode(kind, &resource.name, &body.value)
                .map_err(|fault| Refusal::Resource { key: key.clone(), fault })?;
            taken.push((key, Some(Staged { version: resource.version, body: body.value.into(), meaning })));
        }
        let names = response.removed_resource_names.into_iter().map(|name| name.name);
        let removed = response.removed_resources.into_iter().chain(names);
        taken.extend(removed.map(|name| (Key { kind, name: name.into() }, None)));
        for (key, staged) in taken {
            self.put(key, staged);
        }
        Ok(())
    }

    /// Takes in what was held before, from a cache.
    ///
    /// # Errors
    /// When a resource means nothing.
    pub fn stage_held(&mut self, held: BTreeMap<Key, Held>) -> Result<(), Refusal> {
        for (key, Held { version, body }) in held {
            let meaning = decode(key.kind, &key.name, &body);
            let meaning = meaning.map_err(|fault| Refusal::Resource { key: key.clone(), fault })?;
            self.put(key, Some(Staged { version, body, meaning }));
        }
        Ok(())
    }

    fn put(&mut self, key: Key, staged: Option<Staged>) {
        let is_held = self.held.contains_key(&key);
        if self.staged.insert(key, staged).is_none() && !is_held {
            self.fresh += 1;
        }
    }

    /// Whether anything has come that isn't in force.
    pub fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Whether what has come is a whole: settings came, and all that they count is there.
    pub fn is_whole(&self) -> bool {
        self.staged_settings().is_some() && self.miscount().is_none()
    }

    /// What settings that have come count otherwise than it is there.
    pub fn miscount(&self) -> Option<String> {
        let proto::Settings {
            version: _,
            egress_policies,
            vips,
            endpoints,
            gateways,
            services,
            overlay_nodes,
            clusters,
        } = self.staged_settings()?;
        let wanted: [u64; Kind::COUNTED] =
            [*egress_policies, *vips, *endpoints, *services, *gateways, *overlay_nodes, *clusters];
        let mut counts = Kind::ALL.into_iter().zip(wanted).zip(self.counts_after());
        let ((kind, want), have) = counts.find(|((_, want), have)| *want != *have as u64)?;
        Some(format!("counts {want} of {}, but there are {have}", kind.name()))
    }

    /// Whether settings are still to come: the server has sent some before, and none with what has come.
    pub fn expects_settings(&self) -> bool {
        let key = settings_key();
        self.held.contains_key(&key) && !self.staged.contains_key(&key)
    }

    fn staged_settings(&self) -> Option<&proto::Settings> {
        match self.staged.get(&settings_key()) {
            Some(Some(Staged { meaning: Decoded::Settings(settings), .. })) => Some(settings),
            _ => None,
        }
    }

    fn counts_after(&self) -> [usize; Kind::ALL.len()] {
        let mut counts = self.counts;
        for (key, staged) in &self.staged {
            let count = &mut counts[key.kind as usize];
            match (self.held.contains_key(key), staged.is_some()) {
                (false, true) => *count += 1,
                (true, false) => *count -= 1,
                _ => {}
            }
        }
        counts
    }

    /// What has come, as a gateway sees it. What is the same as before is left out.
    pub fn offer(&self, viewer: &Viewer) -> Offer {
        let mut change = PolicyChange { version: self.version_after(), ..PolicyChange::default() };
        let name = &*viewer.name;
        let peers = self.peers_after();
        let (before, placed) = (viewer.placed(self.peers.get(name)), viewer.placed(peers.get(name)));
        for (key, staged) in &self.staged {
            let held = self.held.get(key);
            match staged {
                Some(staged) if held.is_some_and(|held| held.body == staged.body) => {}
                Some(staged) => match &staged.meaning {
                    Decoded::EgressPolicy(spec) => change.policies.push(spec.clone()),
                    Decoded::Vip(vip) => change.vips.push(vip.clone()),
                    Decoded::Endpoint(endpoint) => change.endpoints.push(endpoint.clone()),
                    Decoded::Service(service) => change.services.push(service.seen_by(&placed)),
                    Decoded::Gateway(_) | Decoded::OverlayNode(_) | Decoded::Cluster(_) | Decoded::Settings(_) => {}
                },
                None if held.is_none() => {}
                None => match key.kind {
                    Kind::EgressPolicy => change.gone.policies.push(key.name.clone()),
                    Kind::Vip => change.gone.vips.extend(key.name.parse::<IpAddr>()),
                    Kind::Endpoint => change.gone.endpoints.extend(key.name.parse::<IpAddr>()),
                    Kind::Service => change.gone.services.push(key.name.clone()),
                    Kind::Gateway | Kind::OverlayNode | Kind::Cluster | Kind::Settings => {}
                },
            }
        }
        change.nodes = self.nodes_after();
        change.cluster = self.cluster_after(viewer, peers.get(name));
        if before != placed {
            // Whoever it may choose is another matter where it is now.
            self.offer_services_anew(&before, &placed, &mut change);
        }
        Offer { updates: 1, change, peers: peers.into_values().collect() }
    }

    /// All nodes of the overlay network, once what has come is in force; `None` if they are the same.
    fn nodes_after(&self) -> Option<Vec<NodeSpec>> {
        let first = Key { kind: Kind::OverlayNode, name: "".into() };
        let staged = || self.staged.range(first.clone()..).take_while(|(key, _)| key.kind == Kind::OverlayNode);
        let differs = |(key, staged): (&Key, &Option<Staged>)| {
            self.held.get(key).map(|held| &held.body) != staged.as_ref().map(|staged| &staged.body)
        };
        if !staged().any(differs) {
            return None;
        }
        let held = self.held.range(first.clone()..).take_while(|(key, _)| key.kind == Kind::OverlayNode);
        // What is held was read before: it is a node.
        let mut nodes: BTreeMap<&Key, NodeSpec> = held
            .filter_map(|(key, held)| match decode(key.kind, &key.name, &held.body) {
                Ok(Decoded::OverlayNode(node)) => Some((key, node)),
                _ => None,
            })
            .collect();
        for (key, staged) in staged() {
            nodes.remove(key);
            if let Some(Staged { meaning: Decoded::OverlayNode(node), .. }) = staged {
                nodes.insert(key, node.clone());
            }
        }
        Some(nodes.into_values().collect())
    }

    /// What the gateway goes by of the cluster's own addresses, once what has come is in force, `peer` being its own resource; `None` if it
    /// is the same. Before anything was in force, nothing was, not even what its own configuration says.
    fn cluster_after(&self, viewer: &Viewer, peer: Option<&Peer>) -> Option<ClusterSpec> {
        let staged = match self.staged.get(&Key { kind: Kind::Cluster, name: CLUSTER.into() }) {
            None => self.cluster.clone(),
            Some(Some(Staged { meaning: Decoded::Cluster(cluster), .. })) => Some(cluster.clone()),
            Some(_) => None,
        };
        let seen = |cluster: Option<Cluster>, peer| cluster.unwrap_or_default().seen_by(viewer, peer);
        let before = if self.held.is_empty() {
            ClusterSpec::default()
        } else {
            seen(self.cluster.clone(), self.peers.get(&viewer.name))
        };
        let after = seen(staged, peer);
        (before != after).then_some(after)
    }

    /// All gateways, once what has come is in force.
    fn peers_after(&self) -> BTreeMap<Arc<str>, Peer> {
        let mut peers = self.peers.clone();
        for (key, staged) in self.staged.iter().filter(|(key, _)| key.kind == Kind::Gateway) {
            peers.remove(&key.name);
            if let Some(Staged { meaning: Decoded::Gateway(peer), .. }) = staged {
                peers.insert(peer.name.clone(), peer.clone());
            }
        }
        peers
    }

    /// The Services that stay as they are, but are seen from somewhere else.
    fn offer_services_anew(&self, before: &Viewer, after: &Viewer, change: &mut PolicyChange) {
        let from = Key { kind: Kind::Service, name: "".into() };
        for (key, held) in self.held.range(from..).take_while(|(key, _)| key.kind == Kind::Service) {
            let stays = match self.staged.get(key) {
                None => true,
                Some(staged) => staged.as_ref().is_some_and(|staged| staged.body == held.body),
            };
            // What is held was read before: it is a Service.
            if stays && let Ok(Decoded::Service(service)) = decode(key.kind, &key.name, &held.body) {
                let (was, is) = (service.seen_by(before), service.seen_by(after));
                change.services.extend((was != is).then_some(is));
            }
        }
    }

    /// What the settings say, or, without them, a name made of what is there.
    fn version_after(&self) -> String {
        if let Some(settings) = self.staged_settings() {
            return settings.version.clone();
        }
        let stays = self.held.iter().filter(|(key, _)| !self.staged.contains_key(key));
        let staged = self.staged.iter().filter_map(|(key, staged)| Some((key, &staged.as_ref()?.version)));
        let print = |(key, version): (&Key, &String)| {
            let mut print = Fingerprint::default();
            print.add(&[key.kind.number()]);
            print.add(key.name.as_bytes());
            print.add(&[0]);
            print.add(version.as_bytes());
            print.finish()
        };
        // A sum: what is there has one name, whichever part of it came last.
        let all = stays.map(|(key, held)| (key, &held.version)).chain(staged);
        Content::version_text(mix(all.map(print).fold(0, u64::wrapping_add)))
    }

    /// What has come is in force: now it is held. Returns what a cache must know of it.
    pub fn commit(&mut self) -> Vec<(Key, Option<Held>)> {
        self.version = self.version_after();
        self.counts = self.counts_after();
        self.fresh = 0;
        let mut changed = Vec::with_capacity(self.staged.len());
        for (key, staged) in std::mem::take(&mut self.staged) {
            let Some(Staged { version, body, meaning }) = staged else {
                if self.held.remove(&key).is_some() {
                    match key.kind {
                        Kind::Gateway => drop(self.peers.remove(&key.name)),
                        Kind::Cluster => self.cluster = None,
                        _ => {}
                    }
                    changed.push((key, None));
                }
                continue;
            };
            match meaning {
                Decoded::Gateway(peer) => drop(self.peers.insert(peer.name.clone(), peer)),
                Decoded::Cluster(cluster) => self.cluster = Some(cluster),
                _ => {}
            }
            let held = Held { version, body };
            if self.held.get(&key) != Some(&held) {
                self.held.insert(key.clone(), held.clone());
                changed.push((key, Some(held)));
            }
        }
        changed
    }

    /// Forgets what has come but isn't in force.
    pub fn discard(&mut self) {
        self.staged.clear();
        self.fresh = 0;
    }
}

fn settings_key() -> Key {
    Key { kind: Kind::Settings, name: SETTINGS.into() }
}

#[cfg(test)]
pub(crate) mod tests;
