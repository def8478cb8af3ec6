//! Placement: the compiled policy of all gateways, with the owners of each VIP shard and the gateway of each endpoint.

mod locality;
mod order;
mod service;
mod set_aside;
mod table;

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use vipgate_dataplane::policy::spec::{EgressSpec, EndpointSpec, NodeSpec, ShardMapSpec, SlotRef, VipSpec};

pub use self::locality::GatewayLocality;
pub use self::service::{PlacedBackend, PlacedService};
pub(super) use self::service::{local_states, preference};
pub use self::set_aside::SetAside;
pub use self::table::{Iter, Table, differences};
use super::cluster::Cluster;
use crate::manifest::UncoveredAction;

/// The policy of all gateways. Sorted by key and deterministic: the same objects give the same placement on every
/// server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The egress policies, by name.
    pub policies: Table<EgressSpec>,
    /// The shard maps that VIPs and endpoints refer to, by name.
    pub shard_maps: Arc<[ShardMapSpec]>,
    /// The assigned VIPs with their shards, by address.
    pub vips: Table<VipSpec>,
    /// Every covered pod address, once, with its gateway.
    pub endpoints: Table<EndpointSpec>,
    /// The Services with VIPs, by name.
    pub services: Table<PlacedService>,
    /// The nodes of the overlay network, by name.
    pub nodes: Vec<NodeSpec>,
    /// The nodes that run the agent, by name.
    pub agents: Arc<[Arc<AgentNode>]>,
    /// The gateways, by name. Empty: each gateway is standalone and owns everything.
    pub peers: Vec<Peer>,
    /// Prefixes inside the cluster, if configured.
    pub cluster: Option<Cluster>,
}

/// A node that runs the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentNode {
    /// Its tunnel endpoint and its pod prefixes.
    pub tunnel: NodeSpec,
    /// The addresses of its pods, ascending, with `namespace/pod`; empty if unknown.
    pub pods: Arc<[(IpAddr, Arc<str>)]>,
}

/// A gateway as published to other gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub name: Arc<str>,
    /// Its Kubernetes node.
    pub node: Arc<str>,
    /// Its zone; empty if it has none.
    pub zone: Arc<str>,
    /// Its address for other gateways.
    pub address: Option<IpAddr>,
    /// Pod prefixes behind it, in addition to the cluster's.
    pub pods: Arc<[IpNet]>,
    /// Action for uncovered pod traffic, if its manifest sets one.
    pub uncovered: Option<UncoveredAction>,
}

impl Placement {
    /// The gateway that an endpoint is placed on; `None`: any gateway.
    pub fn gateway_of<'a>(&'a self, endpoint: &'a EndpointSpec) -> Option<&'a Arc<str>> {
        let Some(SlotRef { map, slot }) = &endpoint.slot else { return endpoint.gateway.as_ref() };
        let of_vip = |vip: &IpAddr| self.vips.get(vip)?.shard_map.as_ref().map(|reference| &reference.map);
        let name = map.as_ref().or_else(|| endpoint.vips.iter().find_map(of_vip))?;
        let at = self.shard_maps.binary_search_by(|map| map.name.cmp(name)).ok()?;
        self.shard_maps[at].order(*slot).first()
    }

    /// The node with this name that runs the agent, as its index.
    pub fn agent(&self, name: &str) -> Option<usize> {
        self.agents.binary_search_by(|agent| (*agent.tunnel.name).cmp(name)).ok()
    }

    /// The gateway with this name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        let at = self.peers.binary_search_by(|peer| (*peer.name).cmp(name)).ok()?;
        self.peers.get(at)
    }
}

#[cfg(test)]
mod tests;
