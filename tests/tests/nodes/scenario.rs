//! A cluster with two gateways and a node: a covered pod, one without a policy, and one that no manifest names.

use std::fmt::Write as _;
use std::fs;
use std::net::IpAddr;
use std::time::Duration;

use vipgate_lab::{Host, reflector};
use vipgate_tests::cluster::{Captures, Cluster, LINE_PORT, Node, NodePod, SERVER};
use vipgate_tests::wait_for;

/// A host on the network of nodes: reached without a gateway.
pub(crate) const NEIGHBOR: [&str; 2] = ["10.6.0.10", "fd00:6::10"];
/// The node's address, which masquerading uses.
pub(crate) const NODE_ADDRESS: &str = "10.5.1.1";
/// The rest of policyd.yaml: the cluster is known.
const CLUSTER: &str = "pod_cidrs: [10.244.0.0/16, \"fd00:244::/32\"]\n\
                       service_cidrs: [10.96.0.0/12, \"fd00:96::/108\"]\nuncovered: pass";

/// A running scenario.
pub(crate) struct Scenario {
    pub(crate) cluster: Cluster,
    pub(crate) node: Node,
    pub(crate) neighbor_host: Host,
}

impl Scenario {
    /// Starts policy server, gateways and agent.
    pub(crate) fn start(tag: &str) -> Self {
        let mut scenario = Self::without_agent(tag);
        scenario.node.start("");
        scenario.node.wait_for_pods(4);
        scenario
    }

    /// The same, but the agent doesn't run yet.
    pub(crate) fn without_agent(tag: &str) -> Self {
        let mut cluster = Cluster::new(tag, 2);
        // Pods have IPv6 link-local neighbors of their own, and gateways die.
        cluster.accounting.allow(["malformed", "no_session", "no_owner", "no_service", "peer_unknown", "no_policy"]);
        let mut node = cluster.add_node(1);
        for _ in 0..3 {
            cluster.add_pod(&mut node);
        }
        add_masquerading(&node);
        let neighbor_host = cluster.add_node_network_host("neighbor", NEIGHBOR);
        reflector::start(&neighbor_host, &NEIGHBOR);
        let text = manifests(&node, &[(&node.pods[0], "tenant-b"), (&node.pods[1], "other")]);
        cluster.write_policy("node-1.yaml", &text);
        let secret = cluster.folder.path().join("tunnel.secret");
        fs::write(&secret, format!("{tag}: only the servers know this\n")).unwrap();
        cluster.start_policyd(&format!("node_agents: {{tunnel_secret: {}}}\n{CLUSTER}", secret.display()));
        for (index, gateway) in cluster.gateways.iter_mut().enumerate() {
            gateway.spawn(&Cluster::overlay_config(index + 1));
        }
        for gateway in &mut cluster.gateways {
            gateway.wait_ready();
        }
        cluster.wait_converged();
        Self { cluster, node, neighbor_host }
    }

    pub(crate) fn covered(&self) -> &NodePod {
        &self.node.pods[0]
    }

    pub(crate) fn uncovered(&self) -> &NodePod {
        &self.node.pods[1]
    }

    /// The pod that no manifest names.
    pub(crate) fn unknown(&self) -> &NodePod {
        &self.node.pods[2]
    }

    /// Names the unknown pod as one of tenant B.
    pub(crate) fn name_unknown(&self) {
        let pods = &self.node.pods;
        let all = [(&pods[0], "tenant-b"), (&pods[1], "other"), (&pods[2], "tenant-b")];
        self.cluster.write_policy("node-1.yaml", &manifests(&self.node, &all));
    }

    /// Captures what leaves the node toward the servers outside of a tunnel, or with a pod's address: nothing may.
    pub(crate) fn capture_leaks(&self) -> Captures {
        let servers = SERVER.map(|server| format!("dst host {server}")).join(" or ");
        let filter = format!("({servers} or src net 10.244.0.0/16 or src net fd00:244::/32) and not icmp6");
        self.cluster.capture_uplink(&self.node, &filter)
    }

    pub(crate) fn check_kernel_agrees(&self) {
        let agrees = || self.node.query(&["status"])["kernel"]["agrees"] == true;
        assert!(wait_for(Duration::from_secs(5), agrees), "{}", self.node.run(&["status"]));
    }

    /// For messages.
    pub(crate) fn evidence(&self) -> String {
        let counters = self.node.host.output(&["nft", "list", "counters", "table", "inet", "vipgate"]);
        let drops = self.cluster.drop_summary();
        format!("{}\n{}\n{drops}\n{}", self.node.run(&["status"]), counters.unwrap_or_default(), self.node.log())
    }
}

/// The address of the host that nodes reach without a gateway.
pub(crate) fn neighbor() -> IpAddr {
    NEIGHBOR[0].parse().unwrap()
}

/// Masquerading of all that leaves the pods' range, as flannel's and the bridge plugin's.
fn add_masquerading(node: &Node) {
    for (family, prefix) in [("ip", "10.244.0.0/16"), ("ip6", "fd00:244::/32")] {
        for command in [
            format!("add table {family} cni"),
            format!("add chain {family} cni postrouting {{ type nat hook postrouting priority 100; }}"),
            format!("add rule {family} cni postrouting {family} saddr {prefix} {family} daddr != {prefix} masquerade"),
        ] {
            node.host.output(&["nft", &command]).unwrap();
        }
    }
}

/// Manifests of a node, and of its pods in a namespace each; those of tenant B are backends of its Service, which makes
/// their egress traffic leave with its VIPs.
pub(crate) fn manifests(node: &Node, pods: &[(&NodePod, &str)]) -> String {
    let mut text = node.manifest();
    for (pod, namespace) in pods {
        text += &node.pod_manifest(pod, namespace);
    }
    for (family, name) in ["IPv4", "IPv6"].into_iter().enumerate() {
        let covered = pods.iter().filter(|(_, namespace)| *namespace == "tenant-b");
        let endpoint = |(pod, _): &(&NodePod, &str)| {
            let (address, node) = (&pod.addresses[family], &node.name);
            format!("{{addresses: [\"{address}\"], nodeName: {node}, conditions: {{ready: true}}}}")
        };
        let endpoints: Vec<String> = covered.map(endpoint).collect();
        let _ = write!(
            text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: {}-{}, namespace: tenant-b, labels: {{kubernetes.io/service-name: web}}}}\n\
             addressType: {name}\n\
             ports: [{{name: tcp, port: {LINE_PORT}}}, {{name: udp, port: {LINE_PORT}, protocol: UDP}}]\n\
             endpoints: [{}]\n",
            node.name,
            name.to_lowercase(),
            endpoints.join(", ")
        );
    }
    text
}
