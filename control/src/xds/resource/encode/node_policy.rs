//! Encodes the policy of a node: what its agent needs to send the packets of the node's pods to gateways.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::policy::spec::EndpointSpec;
use vipgate_policy::compiler::{AgentNode, Placement};

use super::{Content, Key, Kind, egress_policy_message, proto, resource};

/// What the policy of a node follows from besides the node, its endpoints and the names of gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// The policies of its pods.
    pub policies: BTreeSet<Arc<str>>,
    /// The VIPs of its endpoints.
    pub vips: BTreeSet<IpAddr>,
    /// The shard maps that its endpoints name.
    pub shard_maps: BTreeSet<Arc<str>>,
}

impl References {
    fn add(&mut self, placement: &Placement, endpoint: &EndpointSpec) {
        if !self.policies.contains(&endpoint.policy) {
            self.policies.insert(endpoint.policy.clone());
        }
        self.vips.extend(&endpoint.vips);
        let of_vip = |vip: &IpAddr| Some(&placement.vips.get(vip)?.shard_map.as_ref()?.map);
        let own = endpoint.slot.as_ref().and_then(|slot| slot.map.as_ref());
        for name in endpoint.vips.iter().filter_map(of_vip).chain(own) {
            if !self.shard_maps.contains(name) {
                self.shard_maps.insert(name.clone());
            }
        }
    }
}

/// Encodes the policy of a node that runs the agent.
pub fn node_policy(placement: &Placement, agent: &AgentNode) -> ((Key, Content), References) {
    let endpoints: Vec<Option<&EndpointSpec>> =
        agent.pods.iter().map(|(address, _)| placement.endpoints.get(address)).collect();
    let mut references = References::default();
    endpoints.iter().flatten().for_each(|endpoint| references.add(placement, endpoint));
    let policies: Vec<_> = references.policies.iter().filter_map(|name| placement.policies.get(name)).collect();
    let policy_numbers: BTreeMap<&str, u32> = policies.iter().map(|policy| &*policy.name).zip(1..).collect();
    let orders: Vec<Option<Vec<&str>>> = endpoints.iter().map(|endpoint| order(placement, (*endpoint)?)).collect();
    let gateways = placement.peers.iter().map(|peer| &*peer.name);
    let gateways: BTreeSet<&str> = gateways.chain(orders.iter().flatten().flatten().copied()).collect();
    let gateway_indices: BTreeMap<&str, u32> = gateways.iter().copied().zip(0..).collect();
    // Numbered in the order of their first pods.
    let mut order_numbers: BTreeMap<&[&str], u32> = BTreeMap::new();
    let mut distinct = Vec::new();
    let mut pods = Vec::with_capacity(agent.pods.len());
    for (((address, name), endpoint), order) in agent.pods.iter().zip(&endpoints).zip(&orders) {
        let number = order.as_deref().map_or(0, |order| {
            *order_numbers.entry(order).or_insert_with(|| {
                let gateways = order.iter().map(|name| gateway_indices[name]).collect();
                distinct.push(proto::GatewayOrder { gateways });
                distinct.len() as u32
            })
        });
        pods.push(proto::NodePod {
            address: address.to_string(),
            name: name.to_string(),
            policy: endpoint.and_then(|endpoint| policy_numbers.get(&*endpoint.policy).copied()).unwrap_or(0),
            order: number,
            has_vip: endpoint.is_some_and(|endpoint| !endpoint.vips.is_empty()),
        });
    }
    let tunnel = &agent.tunnel;
    let message = proto::NodePolicy {
        node: tunnel.name.to_string(),
        address: tunnel.address.ip().to_string(),
        port: tunnel.address.port().into(),
        vni: tunnel.vni,
        mac: tunnel.mac.to_vec(),
        pod_cidrs: tunnel.prefixes.iter().map(ToString::to_string).collect(),
        policies: policies.into_iter().map(egress_policy_message).collect(),
        gateways: gateways.into_iter().map(str::to_owned).collect(),
        orders: distinct,
        pods,
    };
    (resource(Kind::NodePolicy, tunnel.name.clone(), &message), references)
}

/// The gateways of an endpoint, home first; `None`: any.
fn order<'a>(placement: &'a Placement, endpoint: &'a EndpointSpec) -> Option<Vec<&'a str>> {
    Some(placement.order_of(endpoint)?.into_iter().map(|name| &**name).collect())
}
