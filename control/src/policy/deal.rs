//! A compiled policy for all gateways together: what there is, and who of them has which part of it.

mod service;
mod viewer;

pub use self::service::{DealtBackend, DealtService};
pub use self::viewer::Viewer;

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::ports::BLOCKS;
use vipgate_dataplane::snapshot::spec::{EgressSpec, EndpointSpec, PolicySet, VipSpec};

/// The policy of all gateways. Sorted by key; the same objects give the same deal, wherever it is compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deal {
    /// The egress policies, by name.
    pub policies: Vec<EgressSpec>,
    /// The VIPs that somebody holds, by address.
    pub vips: Vec<DealtVip>,
    /// Every covered pod address, each once.
    pub endpoints: Vec<DealtEndpoint>,
    /// The Services that are reached at VIPs, by name.
    pub services: Vec<DealtService>,
    /// The gateways, by name. None: each gateway is alone and owns everything.
    pub peers: Vec<Peer>,
}

/// A VIP and who holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DealtVip {
    /// The VIP.
    pub spec: VipSpec,
    /// Who holds which part of it; empty: whoever asks holds all of it.
    pub shares: Vec<Share>,
}

/// What one gateway has of a VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The gateway's name.
    pub gateway: Arc<str>,
    /// Its blocks of ports; `None`: all.
    pub blocks: Option<Blocks>,
}

/// Blocks of 64 ports, as bits: block 0 is the lowest bit of the first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks(Box<[u8; Self::COUNT / 8]>);

impl Default for Blocks {
    fn default() -> Self {
        Self(Box::new([0; Self::COUNT / 8]))
    }
}

impl Blocks {
    /// Blocks that there are.
    pub const COUNT: usize = BLOCKS;

    /// As bytes.
    pub fn bytes(&self) -> &[u8] {
        &*self.0
    }

    /// From bytes, if there are as many as there must be.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(Box::new(bytes.try_into().ok()?)))
    }

    /// Adds a block below [`Self::COUNT`].
    pub fn insert(&mut self, block: usize) {
        self.0[block / 8] |= 1 << (block % 8);
    }

    /// Whether a block is one of them.
    pub fn contains(&self, block: usize) -> bool {
        self.0.get(block / 8).is_some_and(|byte| byte >> (block % 8) & 1 == 1)
    }
}

/// A covered pod address and who translates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DealtEndpoint {
    /// The endpoint, with the VIPs that it may leave with at its gateway.
    pub spec: EndpointSpec,
    /// Its gateway; `None`: whoever gets its packets.
    pub gateway: Option<Arc<str>>,
}

/// A gateway as others need to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: Arc<str>,
    /// The Kubernetes node that it is on.
    pub node: Arc<str>,
    /// Its zone; empty if it has none.
    pub zone: Arc<str>,
    /// Where other gateways reach it.
    pub address: Option<IpAddr>,
}

impl DealtVip {
    /// Whether this gateway holds a part of it.
    pub fn is_held_by(&self, gateway: &str) -> bool {
        self.shares.is_empty() || self.shares.iter().any(|share| *share.gateway == *gateway)
    }
}

impl DealtEndpoint {
    /// The endpoint as this gateway sees it: closed where another one translates it.
    pub fn seen_by(&self, gateway: &str) -> EndpointSpec {
        let is_ours = self.gateway.as_ref().is_none_or(|own| **own == *gateway);
        let vips = if is_ours { self.spec.vips.clone() } else { Vec::new() };
        EndpointSpec { vips, ..self.spec.clone() }
    }
}

impl Deal {
    /// How many policies, VIPs, endpoints, Services and gateways there are.
    pub fn counts(&self) -> [usize; 5] {
        [self.policies.len(), self.vips.len(), self.endpoints.len(), self.services.len(), self.peers.len()]
    }

    /// The gateway of this name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        let at = self.peers.binary_search_by(|peer| (*peer.name).cmp(name)).ok()?;
        self.peers.get(at)
    }

    /// What one gateway does of it; without one, all of it, as seen from nowhere in particular.
    pub fn part_of(&self, viewer: Option<&Viewer>, version: &str) -> PolicySet {
        let gateway = viewer.map(|viewer| &*viewer.name);
        let vips = self.vips.iter().filter(|vip| gateway.is_none_or(|name| vip.is_held_by(name)));
        let endpoints = self.endpoints.iter().map(|endpoint| match gateway {
            Some(name) => endpoint.seen_by(name),
            None => endpoint.spec.clone(),
        });
        let placed = viewer.map(|viewer| viewer.placed(self.peer(&viewer.name))).unwrap_or_default();
        PolicySet {
            version: version.to_owned(),
            policies: self.policies.clone(),
            vips: vips.map(|vip| vip.spec.clone()).collect(),
            endpoints: endpoints.collect(),
            services: self.services.iter().map(|service| service.seen_by(&placed)).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
