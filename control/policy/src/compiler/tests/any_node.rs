//! Random Node manifests, and what follows from them.

use proptest::prelude::*;
use vipgate_coverage::Coverage;

use super::*;

/// A node, with prefixes that have pods or haven't, some of which flannel has annotated.
pub(super) fn any_node() -> impl Strategy<Value = String> {
    let select = prop::sample::select;
    let addresses = vec![
        "{type: InternalIP, address: 10.0.0.1}",
        "{type: InternalIP, address: 10.0.0.5}",
        "{type: InternalIP, address: 192.0.2.1}",
        "{type: InternalIP, address: 192.0.2.8}, {type: ExternalIP, address: 198.51.100.8}",
        "{type: Hostname, address: n}",
    ];
    let prefixes =
        vec!["", "podCIDR: 10.0.0.0/30", "podCIDRs: [10.0.0.2/31, \"fd00::/64\"]", "podCIDRs: [10.1.0.0/24]"];
    let flannel = vec![
        "",
        "",
        r#"{"VNI": 1, "VtepMAC": "02:00:00:00:00:01"}"#,
        r#"{"VtepMAC": "02:00:00:00:00:02"}"#,
        r#"{"VNI": 1}"#,
    ];
    let all = (
        select(vec!["n1", "n2", "o1"]),
        select(vec!["z1", "z2"]),
        select(addresses),
        select(prefixes),
        select(flannel),
    );
    all.prop_map(|(name, zone, addresses, prefixes, flannel)| {
        let backend = format!(
            ", annotations: {{flannel.alpha.coreos.com/backend-type: vxlan, flannel.alpha.coreos.com/backend-data: '{flannel}'}}"
        );
        let annotations = if flannel.is_empty() { "" } else { &backend };
        format!(
            "apiVersion: v1\nkind: Node\n\
             metadata: {{name: {name}, labels: {{topology.kubernetes.io/zone: {zone}}}{annotations}}}\n\
             spec: {{{prefixes}}}\nstatus: {{addresses: [{addresses}]}}\n"
        )
    })
}

/// Counts the overlay nodes of flannel, and the nodes that run the agent with their pods.
pub(super) fn count_nodes(coverage: &Coverage, before: &Placement, after: &Placement) {
    let of_flannel = after.nodes.iter().filter(|node| node.name.starts_with('n') && node.address.port() == 8472);
    coverage.add("node of flannel", of_flannel.count() as u64);
    for agent in &*after.agents {
        coverage.count(if agent.pods.is_empty() { "agent without pods" } else { "agent with pods" });
        let is_host = |net: &&ipnet::IpNet| net.prefix_len() == net.max_prefix_len();
        coverage.add("pod as a prefix", agent.tunnel.prefixes.iter().filter(is_host).count() as u64);
        let covered = agent.pods.iter().filter(|(address, _)| after.endpoints.get(address).is_some());
        coverage.add("covered pod of an agent", covered.count() as u64);
        let stays = before.agents.iter().any(|old| Arc::ptr_eq(old, agent)) && before.agents != after.agents;
        coverage.add("agent stays", u64::from(stays));
    }
}
