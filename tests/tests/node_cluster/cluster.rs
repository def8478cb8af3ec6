//! A Kubernetes cluster: API server, policy server, gateways, and three nodes with different networks.
//!
//! | node | pods' network | masquerading | Services | NetworkPolicy |
//! |---|---|---|---|---|
//! | node-1 | bridge | flannel's rules | kube-proxy, iptables | |
//! | node-2 | ptp | the plugin's | kube-proxy, iptables | in Calico's form |
//! | node-3 | bridge | the plugin's | ruleset of kube-proxy's nftables mode | |
//!
//! There is no kubelet and there are no controllers: tests write pods' addresses and EndpointSlices.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use vipgate_lab::reflector::{self, query_http, query_udp};
use vipgate_lab::{Host, Process};
use vipgate_tests::cluster::{Cluster, L2_VIPS, LINE_PORT, Node, SERVER};
use vipgate_tests::kubernetes::{ADMIN, ApiServer};
use vipgate_tests::{kubernetes, wait_for};

use crate::api_objects::{
    COVERED, UNCOVERED, create_node, create_pod, create_policy, delete_pod, request, serve_beta_slices,
    write_addresses, write_slices,
};
use crate::cni::{Network, Plugin};
use crate::{kube_proxy, masquerading, network_policy};

/// A host on the network of nodes, which the policy of covered pods excludes.
pub(crate) const NEIGHBOR: [&str; 2] = ["10.6.0.10", "fd00:6::10"];
/// Address of the API server and the policy server, as nodes reach them.
const MANAGEMENT: &str = "10.3.0.254";

/// Of policyd.yaml. Gateways pass what no policy covers, so a pod that a gateway doesn't know yet could leak there, too.
const POLICYD: &str = "pod_cidrs: [10.244.0.0/16, \"fd00:244::/32\"]\n\
                       service_cidrs: [10.96.0.0/16, \"fd96::/112\"]\nuncovered: pass";

/// The networks of the nodes.
const PLUGINS: [Plugin; 3] =
    [Plugin::Bridge { masquerades: false }, Plugin::PointToPoint, Plugin::Bridge { masquerades: true }];
/// The node with NetworkPolicy.
pub(crate) const POLICY_NODE: usize = 1;
/// The node whose Services are a ruleset.
pub(crate) const NFTABLES_NODE: usize = 2;

/// A node with what its pods' network is made of.
pub(crate) struct ClusterNode {
    pub(crate) node: Node,
    pub(crate) network: Network,
    proxy: Option<Process>,
}

/// A pod with its namespace.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) namespace: String,
    /// Index of its node.
    pub(crate) node: usize,
    pub(crate) host: Host,
    pub(crate) addresses: [String; 2],
}

/// The cluster. Everything ends on drop.
pub(crate) struct NodeCluster {
    pub(crate) nodes: Vec<ClusterNode>,
    /// A covered pod on each node, then an uncovered one on each; others behind them.
    pub(crate) pods: Vec<Pod>,
    pub(crate) neighbor: Host,
    pub(crate) cluster: Cluster,
    pub(crate) api: ApiServer,
    leases: &'static str,
}

impl NodeCluster {
    /// Starts a cluster with two gateways. Their leases are longer than by default: a gateway that this machine has no time
    /// for must not lose its own.
    pub(crate) fn start(tag: &str) -> Self {
        Self::new(tag, 2, 2, "leases: {ttl: 3s}")
    }

    /// Builds a cluster for `count` gateways, and starts the first `running` ones. Their leases are those of the default.
    pub(crate) fn with_gateways(tag: &str, count: usize, running: usize) -> Self {
        Self::new(tag, count, running, "")
    }

    fn new(tag: &str, count: usize, running: usize, leases: &'static str) -> Self {
        let cluster = Cluster::new(tag, count);
        // Without it, packets to a gateway whose link is down would take the default route, through another one.
        for (family, prefix) in [("-4", "10.4.0.0/16"), ("-6", "fd00:4::/32")] {
            cluster.inside.ip(&[family, "route", "add", "unreachable", prefix]).unwrap();
        }
        let api = ApiServer::with_flags(&cluster.management, &["--bind-address=0.0.0.0"]);
        serve_beta_slices(&api);
        cluster.define_gateways(&(0..running).collect::<Vec<_>>());
        let neighbor = cluster.add_node_network_host("neighbor", NEIGHBOR);
        reflector::start(&neighbor, &NEIGHBOR);
        let mut started = Self { nodes: Vec::new(), pods: Vec::new(), neighbor, cluster, api, leases };
        started.apply_gateways();
        create_policy(&started.api);
        started.start_policyd();
        for number in 0..running {
            started.cluster.gateways[number].spawn(&Cluster::overlay_config(number + 1));
        }
        for gateway in &mut started.cluster.gateways[..running] {
            gateway.wait_ready();
        }
        started.cluster.wait_converged();
        for (index, plugin) in PLUGINS.into_iter().enumerate() {
            let node = started.cluster.add_node(index + 1);
            create_node(&started.api, &node, index + 1);
            let network = Network { plugin, number: index + 1, folder: node.folder().to_owned() };
            started.nodes.push(ClusterNode { node, network, proxy: None });
            started.boot(index);
        }
        for namespace in [COVERED, UNCOVERED] {
            for index in 0..PLUGINS.len() {
                started.add_pod(index, namespace, &format!("{namespace}-{}", index + 1));
            }
        }
        started.write_slices();
        for index in 0..PLUGINS.len() {
            started.wait_translated(index);
        }
        started
    }

    /// Starts what a node runs before its pods.
    pub(crate) fn boot(&mut self, index: usize) {
        let kubeconfig = self.kubeconfig();
        let ClusterNode { node, network, proxy } = &mut self.nodes[index];
        node.start("");
        if network.plugin == (Plugin::Bridge { masquerades: false }) {
            masquerading::add_flannel_rules(&node.host, network.number);
        }
        if index != NFTABLES_NODE {
            let log = node.folder().join("kube-proxy.log");
            *proxy = Some(kube_proxy::start(&node.host, &node.name, &kubeconfig, &log));
        }
    }

    /// Reboots a node: its pods are gone, and it has booted again.
    pub(crate) fn reboot(&mut self, index: usize) {
        for pod in self.pods.extract_if(.., |pod| pod.node == index) {
            delete_pod(&self.api, &pod.namespace, &pod.name);
            self.cluster.remove_host(&pod.host);
        }
        self.nodes[index].proxy = None;
        self.cluster.reboot_node(&mut self.nodes[index].node);
        self.nodes[index].network.forget_addresses();
        self.write_slices();
        self.boot(index);
    }

    /// Starts the policy server, which reads the API.
    pub(crate) fn start_policyd(&mut self) {
        let (kubeconfig, secret) = (self.api.kubeconfig(ADMIN), self.cluster.folder.path().join("tunnel.secret"));
        fs::write(&secret, "known to the policy server alone\n").unwrap();
        let source = format!("source: {{kubernetes: {{kubeconfig: {}}}}}", kubeconfig.display());
        let agents = format!("node_agents: {{tunnel_secret: {}}}", secret.display());
        self.cluster.start_policyd(&format!("{source}\n{agents}\n{POLICYD}\n{}", self.leases));
    }

    /// Writes the gateways and pools of the cluster's manifests to the API.
    pub(crate) fn apply_gateways(&self) {
        let file = self.cluster.folder.path().join("policy/gateways.yaml");
        self.api.apply_unvalidated(&fs::read_to_string(file).unwrap());
    }

    /// The kubeconfig of kube-proxy.
    fn kubeconfig(&self) -> PathBuf {
        let text = fs::read_to_string(self.api.kubeconfig(ADMIN)).unwrap();
        // The certificate is that of the loopback.
        let server = format!("https://{MANAGEMENT}:6443\", tls-server-name: \"localhost");
        let path = self.cluster.folder.path().join("nodes.kubeconfig");
        fs::write(&path, text.replace(kubernetes::URL, &server)).unwrap();
        path
    }

    /// Adds a pod whose reflectors run, as scheduler, runtime and kubelet do.
    pub(crate) fn add_pod(&mut self, node: usize, namespace: &str, name: &str) -> Pod {
        let ClusterNode { node: host, network, .. } = &self.nodes[node];
        create_pod(&self.api, namespace, name, &host.name);
        let pod_host = self.cluster.add_host(name);
        let addresses = network.add(&host.host, &pod_host);
        write_addresses(&self.api, namespace, name, &addresses);
        reflector::start_at(&pod_host, &addresses.each_ref().map(String::as_str), LINE_PORT);
        let pod = Pod { name: name.to_owned(), namespace: namespace.to_owned(), node, host: pod_host, addresses };
        self.pods.push(pod.clone());
        pod
    }

    /// Writes the EndpointSlices of all pods, and what nodes derive from them.
    pub(crate) fn write_slices(&self) {
        write_slices(&self.api, &self.pods);
        let of_node = |index| self.pods.iter().filter(move |pod| pod.node == index).map(|pod| pod.addresses.clone());
        network_policy::load_policy(&self.nodes[POLICY_NODE].node.host, &of_node(POLICY_NODE).collect::<Vec<_>>());
        let services = request(&self.api, "GET", "/api/v1/services", None);
        let slices = request(&self.api, "GET", "/apis/discovery.k8s.io/v1/endpointslices", None);
        kube_proxy::load_nftables(&self.nodes[NFTABLES_NODE].node.host, &services, &slices);
    }

    /// The pod on a node that a policy covers.
    pub(crate) fn covered(&self, node: usize) -> &Pod {
        self.find(node, COVERED)
    }

    /// The pod on a node that no policy covers.
    pub(crate) fn uncovered(&self, node: usize) -> &Pod {
        self.find(node, UNCOVERED)
    }

    fn find(&self, node: usize, namespace: &str) -> &Pod {
        self.pods.iter().find(|pod| pod.node == node && pod.namespace == namespace).expect("a pod")
    }

    /// Waits until the covered pod of a node reaches the servers with its VIPs.
    #[track_caller]
    pub(crate) fn wait_translated(&self, node: usize) {
        let pod = &self.covered(node).host;
        for (server, vip) in SERVER.into_iter().zip(L2_VIPS) {
            let server = server.parse().unwrap();
            let works = || query_udp(pod, server).is_ok_and(|source| source == vip);
            assert!(wait_for(Duration::from_secs(30), works), "{} {server}: {}", pod.name(), self.evidence(node));
            assert_eq!(query_http(pod, server).unwrap(), vip, "{}", self.evidence(node));
        }
    }

    /// The ClusterIPs of a Service.
    pub(crate) fn cluster_ips(&self, namespace: &str, name: &str) -> [IpAddr; 2] {
        let service = request(&self.api, "GET", &format!("/api/v1/namespaces/{namespace}/services/{name}"), None);
        [0, 1].map(|n| service["spec"]["clusterIPs"][n].as_str().unwrap().parse().unwrap())
    }

    /// The sum over all nodes of what their agents have counted for a reason.
    pub(crate) fn node_drops(&self, reason: &str) -> u64 {
        let of_node = |node: &ClusterNode| {
            let status = node.node.query(&["status"]);
            let drops = status["drops"].as_array().into_iter().flatten();
            drops.filter(|drop| drop["reason"] == reason).filter_map(|drop| drop["packets"].as_u64()).sum::<u64>()
        };
        self.nodes.iter().map(of_node).sum()
    }

    /// Asserts that the kernel of each node agrees with its agent.
    #[track_caller]
    pub(crate) fn check_kernels_agree(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            let agrees = || node.node.query(&["status"])["kernel"]["agrees"] == true;
            assert!(wait_for(Duration::from_secs(5), agrees), "{}", self.evidence(index));
        }
    }

    /// For messages.
    pub(crate) fn evidence(&self, node: usize) -> String {
        let ClusterNode { node, .. } = &self.nodes[node];
        let tail = |text: String| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(20)..].join("\n")
        };
        let output = |command: &[&str]| node.host.output(command).unwrap_or_else(|error| error.to_string());
        let proxy = fs::read_to_string(node.folder().join("kube-proxy.log")).unwrap_or_default();
        let policyd = self.cluster.policyd.as_ref().map(|policyd| tail(policyd.log())).unwrap_or_default();
        format!(
            "{}\n{}\n{}\nagent: {}\nkube-proxy: {}\npolicy server: {policyd}",
            output(&["nft", "list", "counters", "table", "inet", "vipgate"]),
            node.run(&["endpoints"]),
            self.cluster.drop_summary(),
            tail(node.log()),
            tail(proxy)
        )
    }
}
