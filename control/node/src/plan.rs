//! What the kernel of this node is to be programmed with: nftables table, tunnels by gateway, routing rules. Pure.
//!
//! ```text
//!   a pod's packet   raw      the address isn't known yet: marked `hold`, untracked
//!                    steer    after destination NAT, in `prerouting`, and in `output` what IPVS has translated:
//!                             reply to a client behind a gateway: that gateway (connection mark)
//!                             reply to anybody else, excluded destination, pod without a policy: no mark
//!                             known pod: marked with its gateway
//!                             unknown pod, by a Service to the outside: dropped
//!                    rules    mark -> routing table of the gateway -> tunnel
//!                    guard    marked with a gateway, but not on the way into the tunnel: dropped
//! ```

mod chains;
mod steering;
pub mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

pub use self::chains::label as counter_label;
pub use self::steering::{Steering, Target};
use crate::destinations::AddressRange;
use crate::indices::Indices;
use crate::marks::{GatewayIndex, MarkMask};
use crate::nft::table::Table;
use crate::policy::{Cluster, NodePolicy, TunnelEndpoint};
use crate::selection::{Fault, GatewayState};

/// Settings that don't change while the agent runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's name.
    pub node: Arc<str>,
    /// Bits of marks.
    pub mask: MarkMask,
    /// Pod prefixes of the configuration, in addition to those of the policy: held back before the first policy.
    pub pod_prefixes: Vec<IpNet>,
    /// Name of the tunnel device.
    pub tunnel_device: String,
    /// Name of the device that held packets are routed to.
    pub hold_device: String,
}

/// A gateway's end of a tunnel, and its state as far as it isn't known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    pub name: Arc<str>,
    /// Whether it is active by the view; `None`: there is no view.
    pub is_active: Option<bool>,
    /// Whether it answers echoes.
    pub is_reachable: bool,
    /// Its tunnel endpoint.
    pub endpoint: Option<SocketAddr>,
}

/// All that a plan follows from.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub settings: &'a Settings,
    /// The node's policy; `None`: none yet.
    pub policy: Option<&'a NodePolicy>,
    /// What is inside the cluster, besides the node's pods.
    pub cluster: &'a Cluster,
    /// The gateways, by name.
    pub gateways: &'a [Gateway],
    /// Addresses of this node.
    pub local_addresses: &'a BTreeSet<IpAddr>,
    /// MTU inside the tunnel, bytes.
    pub mtu: u32,
}

/// What the kernel is to be programmed with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlan {
    /// The nftables table.
    pub table: Table,
    /// This node's end of the tunnels; `None`: no policy yet, so no tunnels.
    pub tunnel: Option<TunnelEndpoint>,
    /// The gateways' tunnel addresses, by index.
    pub tunnels: BTreeMap<GatewayIndex, IpAddr>,
    /// Prefixes of pods, also of other nodes where the configuration has them.
    pub pod_prefixes: Vec<IpNet>,
    /// Prefixes of this node's pods.
    pub own_prefixes: Vec<IpNet>,
    /// What is inside the cluster: prefixes, and the addresses of nodes.
    pub inside: Vec<IpNet>,
    /// The gateways as the selection sees them, with their indices.
    pub gateways: Vec<(GatewayState, Option<GatewayIndex>)>,
    /// How the packets of each pod are steered.
    pub endpoints: BTreeMap<IpAddr, Steering>,
    /// By policy, the destinations that are routed unchanged.
    pub unchanged: Vec<Vec<AddressRange>>,
}

impl NodePlan {
    /// The plan of these inputs. Indices of new gateways are allocated; those of gateways that are gone are freed.
    pub fn new(inputs: &Inputs<'_>, indices: &mut Indices) -> Self {
        indices.retain(inputs.gateways.iter().map(|gateway| &*gateway.name));
        let tunnel = inputs.policy.map(|policy| policy.tunnel);
        let with_index = |gateway: &Gateway| {
            let index = indices.allocate(&gateway.name, inputs.settings.mask.max_gateways());
            let fault = match (gateway.endpoint, tunnel) {
                (None, _) => Some(Fault::NoTunnelEndpoint),
                (Some(endpoint), _) if inputs.local_addresses.contains(&endpoint.ip()) => Some(Fault::LocalEndpoint),
                (Some(endpoint), Some(own))
                    if endpoint.port() != own.address.port() || endpoint.is_ipv4() != own.address.is_ipv4() =>
                {
                    Some(Fault::IncompatibleEndpoint)
                }
                _ if index.is_none() => Some(Fault::NoMark),
                _ => None,
            };
            let Gateway { name, is_active, is_reachable, .. } = gateway;
            let state = GatewayState { name: name.clone(), is_active: *is_active, is_reachable: *is_reachable, fault };
            (state, index)
        };
        let gateways: Vec<(GatewayState, Option<GatewayIndex>)> = inputs.gateways.iter().map(with_index).collect();
        let tunnels = inputs.gateways.iter().zip(&gateways).filter(|(_, (state, _))| state.fault.is_none());
        let tunnels = tunnels.filter_map(|(gateway, (_, index))| Some(((*index)?, gateway.endpoint?.ip()))).collect();
        let mut own_prefixes = Vec::new();
        if let Some(policy) = inputs.policy {
            own_prefixes.extend(&policy.pod_prefixes);
            own_prefixes.extend(policy.pods.keys().map(|address| IpNet::from(*address)));
        }
        let own_prefixes = IpNet::aggregate(&own_prefixes);
        let pod_prefixes = IpNet::aggregate(&[&inputs.settings.pod_prefixes[..], &own_prefixes].concat());
        let cluster_prefixes = IpNet::aggregate(&[&inputs.cluster.prefixes[..], &pod_prefixes].concat());
        let nodes = inputs.cluster.nodes.iter().map(|node| IpNet::from(*node));
        let inside: Vec<IpNet> = cluster_prefixes.into_iter().chain(nodes).collect();
        let endpoints = steering::of_pods(inputs, &gateways);
        let unchanged = chains::unchanged(inputs, &inside);
        let table = Table::default();
        let mut plan =
            Self { table, tunnel, tunnels, pod_prefixes, own_prefixes, inside, gateways, endpoints, unchanged };
        plan.table = chains::table(inputs, &plan);
        plan
    }

    /// Whether a policy leaves packets to this destination unchanged.
    pub fn is_unchanged(&self, policy: usize, destination: IpAddr) -> bool {
        let ranges = self.unchanged.get(policy).map(Vec::as_slice).unwrap_or_default();
        let is_in = |range: &AddressRange| range.first <= destination && destination <= range.last;
        ranges.iter().any(|range| range.first.is_ipv4() == destination.is_ipv4() && is_in(range))
    }

    /// How the pods differ from those of another plan, besides the gateways that they are steered to.
    fn has_same_coverage(&self, other: &Self) -> bool {
        let coverage = |plan: &Self| -> Vec<(IpAddr, Option<usize>)> {
            let policy = |steering: &Steering| match *steering {
                Steering::Pass => None,
                Steering::Covered { policy, .. } | Steering::NoVip { policy } => Some(policy),
            };
            plan.endpoints.iter().map(|(address, steering)| (*address, policy(steering))).collect()
        };
        self.unchanged == other.unchanged && coverage(self) == coverage(other)
    }

    /// Whether connections may have been decided on under another plan, see
    /// [`crate::kernel::Kernel::delete_stale_connections`].
    pub fn changes_connections(&self, before: Option<&Self>) -> bool {
        before.is_none_or(|before| !self.has_same_coverage(before))
    }

    /// The gateway with this index.
    pub fn gateway(&self, index: GatewayIndex) -> Option<&GatewayState> {
        self.gateways.iter().find(|(_, other)| *other == Some(index)).map(|(state, _)| state)
    }
}

#[cfg(test)]
mod tests;
