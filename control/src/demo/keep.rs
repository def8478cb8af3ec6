//! `--keep`: commands for inspecting the topologies from another terminal.

use vipgate_lab::networks::SERVER;

use super::failover::{FailoverTopology, VIPS};
use super::nodes::NodeTopology;
use super::topology::Topology;
use crate::output::progress;

/// Prints commands for inspecting the kept topologies.
pub(super) fn print_commands(topology: &Topology, failover: &FailoverTopology, nodes: &NodeTopology) {
    let socket = topology.socket().display().to_string();
    progress!("\nThe topologies are kept. Commands for another terminal:");
    progress!("\n  # Scenario 1: egress of a pod, a client of the VIP, and the gateway");
    progress!("  ip netns exec {} curl http://{}/", topology.pods[0].host.netns(), SERVER[0]);
    progress!("  ip netns exec {} curl http://{}/", topology.server.netns(), topology.pods[0].vips[0]);
    for command in ["status", "services", "sessions"] {
        progress!("  vipgate {command} --socket {socket}");
    }
    progress!("\n  # Scenario 2: the same, and the group of gateways");
    progress!("  ip netns exec {} curl http://{}/", failover.pods[0].netns(), SERVER[0]);
    progress!("  ip netns exec {} curl http://{}/", failover.group.network.server.netns(), VIPS[0]);
    for (gateway, command) in failover.group.gateways.iter().zip(["peers", "endpoints"]) {
        progress!("  vipgate {command} --socket {}", gateway.socket.display());
    }
    progress!("\n  # Scenario 3: a pod, the agent, and what it has programmed");
    progress!("  ip netns exec {} curl http://{}/", nodes.pods[0].host.netns(), SERVER[0]);
    for command in ["status", "endpoints"] {
        progress!("  vipgate node {command} --socket {}", nodes.socket().display());
    }
    progress!("  ip netns exec {} nft list table inet vipgate", nodes.node.netns());
    progress!("\nPress Enter or Ctrl-C to remove them.");
}

/// Prints commands for inspecting the kept cluster.
pub(super) fn print_cluster_commands(topology: &Topology, kubectl: &str) {
    progress!("\nThe topology is kept. Commands for another terminal:\n");
    for command in ["get services -A", "-n tenant-b describe egresspolicy web", "get events -A"] {
        progress!("  {kubectl} {command}");
    }
    progress!("  ip netns exec {} curl http://{}/", topology.pods[0].host.netns(), SERVER[0]);
    progress!("  vipgate status --socket {}", topology.socket().display());
    progress!("\nPress Enter or Ctrl-C to remove it.");
}
