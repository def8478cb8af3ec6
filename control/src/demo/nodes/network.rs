//! Topology of the third scenario: a node with pods and an agent behind the inside router of a group of gateways. The
//! routers are linked to each other, too: what the agent doesn't steer reaches the server without a gateway.

use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;
use vipgate_lab::networks::{self, GroupNetwork};
use vipgate_lab::{self as lab, Host, Lab, reflector};

use crate::command_error::CommandError;
use crate::demo::daemon::{Daemon, query, query_text};
use crate::demo::group::{GATEWAYS, GatewayGroup, GroupConfig, POD_PORT, POLICYD};
use crate::demo::topology::Pod;

/// Tenant D's VIPs, which both gateways announce.
pub(in crate::demo) const VIPS: [&str; 2] = ["192.0.2.20", "2001:db8:2:1::20"];
/// The node's pods: of tenant D, which has the VIPs, and of tenant E without a policy, whose packets the node
/// masquerades.
const PODS: [(&str, &str, [&str; 2], [&str; 2]); 3] = [
    ("pod-d1", "D", ["10.244.1.5", "fd00:244:1::5"], VIPS),
    ("pod-d2", "D", ["10.244.1.6", "fd00:244:1::6"], VIPS),
    ("pod-e1", "E", ["10.244.1.7", "fd00:244:1::7"], NODE),
];
/// The networks of all pods.
pub(super) const POD_NETWORKS: [&str; 2] = ["10.244.0.0/16", "fd00:244::/32"];
/// Addresses of the node, and its network.
const NODE: [&str; 2] = ["10.5.1.1", "fd00:5:1::1"];
const NODE_NETWORK: [&str; 2] = ["10.5.1.0/24", "fd00:5:1::/64"];
/// The inside router's interface to the node.
pub(super) const UPLINK: &str = "to-node1";

const CONFIG: GroupConfig = GroupConfig {
    policy: &[GATEWAYS, ("tenants.yaml", include_str!("tenants.yaml")), ("node-1.yaml", include_str!("node-1.yaml"))],
    policyd: "node_agents: {}\n\
              pod_cidrs: [10.244.0.0/16, \"fd00:244::/32\"]\n\
              service_cidrs: [10.96.0.0/12]\n\
              uncovered: pass\n",
    inside_networks: NODE_NETWORK,
    has_nodes: true,
};

/// Hosts and processes of the third scenario.
#[derive(Debug)]
pub(in crate::demo) struct NodeTopology {
    pub(in crate::demo) pods: Vec<Pod>,
    pub(in crate::demo) group: GatewayGroup,
    pub(in crate::demo) node: Host,
    agent: Option<Daemon>,
}

impl NodeTopology {
    /// Creates hosts, links, addresses, routes, servers.
    pub(in crate::demo) fn build(lab: &Lab) -> Result<Self, CommandError> {
        let folder = lab::directory().map_err(CommandError::runtime)?;
        Self::network(lab, folder).map_err(CommandError::runtime)
    }

    fn network(lab: &Lab, folder: TempDir) -> Result<Self, lab::Error> {
        let group = GatewayGroup::build(lab, CONFIG, folder)?;
        let GroupNetwork { inside, outside, management, .. } = &group.network;
        lab.link((inside, "to-outside"), (outside, "to-inside"), 1)?;
        inside.addresses("to-outside", &["10.7.0.1/24", "fd00:7::1/64"])?;
        outside.addresses("to-inside", &["10.7.0.2/24", "fd00:7::2/64"])?;

        let node = networks::add_node(lab, inside, management, 1)?;
        for (router, prefixes, next_hops) in
            [(inside, ["default"; 2], ["10.7.0.2", "fd00:7::2"]), (outside, NODE_NETWORK, ["10.7.0.1", "fd00:7::1"])]
        {
            for (prefix, next_hop) in prefixes.iter().zip(next_hops) {
                router.route(prefix, next_hop)?;
            }
        }
        add_masquerading(&node)?;
        let pods = PODS.into_iter().map(|pod| add_pod(lab, &node, pod)).collect::<Result<_, _>>()?;
        Ok(Self { pods, group, node, agent: None })
    }

    /// Starts the policy server and both gateways.
    pub(super) fn start_group(&mut self) -> Result<(), CommandError> {
        self.group.start()?;
        self.route_replies_via(&[0, 1])
    }

    /// Starts the node's agent, and waits until it steers the pods' packets.
    pub(super) fn start_agent(&mut self) -> Result<(), CommandError> {
        let folder = self.group.directory.path();
        let [pods4, pods6] = POD_NETWORKS;
        let config = format!(
            "name: node-1\n\
             server: {{url: \"http://{POLICYD}\", cache: {folder}/node.cache}}\n\
             pod_cidrs: [{pods4}, \"{pods6}\"]\n\
             state: {folder}/node.marks\n\
             admin: {{socket: {socket}}}\n\
             metrics: {{listen: \"127.0.0.1:9471\"}}\n\
             log: {{format: json}}\n",
            folder = folder.display(),
            socket = self.socket().display(),
        );
        let agent = Daemon::start(&self.node, "node", &config, folder)?;
        self.agent.insert(agent).wait_ready()
    }

    /// Sets ECMP routes to these gateways on the outside router.
    pub(super) fn route_replies_via(&self, gateways: &[usize]) -> Result<(), CommandError> {
        self.group.route_outside_via(VIPS, gateways)
    }

    /// The agent's admin socket.
    pub(in crate::demo) fn socket(&self) -> PathBuf {
        self.group.directory.path().join("node.sock")
    }

    /// Runs `vipgate node COMMAND`; returns its JSON.
    pub(super) fn query(&self, command: &[&str]) -> Result<Value, CommandError> {
        query(&self.socket(), &[&["node"], command].concat())
    }

    /// Runs `vipgate node COMMAND`; returns its text.
    pub(super) fn text(&self, command: &[&str]) -> Result<String, CommandError> {
        query_text(&self.socket(), &[&["node"], command].concat())
    }

    /// The gateway to which the agent steers a pod's packets.
    pub(super) fn target(&self, pod: &str) -> Result<String, CommandError> {
        let reply = self.query(&["endpoints"])?;
        let mut endpoints = reply["endpoints"].as_array().into_iter().flatten();
        let target = endpoints.find(|endpoint| endpoint["address"] == pod).map(|endpoint| &endpoint["target"]);
        Ok(target.and_then(Value::as_str).unwrap_or_default().to_owned())
    }

    /// Stops all processes with SIGTERM; false unless all exit with code 0 in time.
    pub(super) fn stop(&mut self) -> Result<bool, CommandError> {
        let agent = self.agent.take().map_or(Ok(true), Daemon::stop)?;
        Ok(self.group.stop()? && agent)
    }
}

/// Masquerading of all that leaves the pods' networks, as flannel's and the bridge plugin's.
fn add_masquerading(node: &Host) -> Result<(), lab::Error> {
    for (family, prefix) in ["ip", "ip6"].into_iter().zip(POD_NETWORKS) {
        let rules = format!(
            "table {family} cni {{ chain postrouting {{ type nat hook postrouting priority 100; \
             {family} saddr {prefix} {family} daddr != {prefix} masquerade; }}; }}"
        );
        node.output(&["nft", &rules])?;
    }
    Ok(())
}

/// Adds a pod to the node.
fn add_pod(
    lab: &Lab,
    node: &Host,
    (name, tenant, addresses, vips): (&'static str, &'static str, [&'static str; 2], [&'static str; 2]),
) -> Result<Pod, lab::Error> {
    let host = lab.routed_pod(name, (node, name), addresses)?;
    reflector::start_at(&host, &addresses, POD_PORT);
    Ok(Pod { host, tenant, addresses, vips })
}
