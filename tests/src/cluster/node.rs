//! Nodes of a cluster: hosts with pods and a node agent, behind the inside router. No route on a node leads to a gateway;
//! its own uplink leads to the servers, too, so what isn't steered leaves by the node.
//!
//! ```text
//!   pod 10.244.n.p, fd00:244:n::p -- [node n] -- 10.5.n.0/24 -- [inside]
//!                                       +------- 10.3.0.(100+n) [management]
//! ```

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::{Host, Process, READY, networks};

use super::{Cluster, POLICYD_ADDRESS};
use crate::cluster::Captures;
use crate::{binary, policyd, wait_for};

/// UDP port of the tunnels.
pub const TUNNEL_PORT: u16 = 8473;
/// Port of an agent's metrics, on its node's loopback.
const METRICS_PORT: u16 = 9471;

/// A node, whose agent runs or not.
#[derive(Debug)]
pub struct Node {
    /// Its name: `node-1` and so on.
    pub name: String,
    pub host: Host,
    pub pods: Vec<NodePod>,
    number: usize,
    folder: PathBuf,
    agent: Option<Process>,
    start_count: u32,
}

/// A pod on a node.
#[derive(Clone, Debug)]
pub struct NodePod {
    pub host: Host,
    /// Its addresses: IPv4, IPv6.
    pub addresses: [String; 2],
}

impl Cluster {
    /// Adds a node without pods; its agent doesn't run.
    pub fn add_node(&self, number: usize) -> Node {
        let name = format!("node-{number}");
        let folder = self.folder.path().join(&name);
        fs::create_dir(&folder).unwrap();
        for gateway in &self.gateways {
            let gateway_number = gateway.name.trim_start_matches("gw-");
            gateway.host.route(&format!("10.5.{number}.0/24"), &format!("10.4.{gateway_number}.254")).unwrap();
            gateway.host.route(&format!("fd00:5:{number}::/64"), &format!("fd00:4:{gateway_number}::fe")).unwrap();
        }
        let host = self.connect_node(number);
        Node { name, host, pods: Vec::new(), number, folder, agent: None, start_count: 0 }
    }

    /// Adds a node's host with its links and routes.
    fn connect_node(&self, number: usize) -> Host {
        let host = networks::add_node(&self.lab, &self.inside, &self.management, number).unwrap();
        // The strictest setting that a distribution has.
        host.sysctl("net.ipv4.conf.all.rp_filter", 1).unwrap();
        host.sysctl("net.ipv4.conf.default.rp_filter", 1).unwrap();
        for family in [0, 1] {
            let prefix = [format!("10.244.{number}.0/24"), format!("fd00:244:{number}::/64")];
            self.inside
                .route(&prefix[family], [&format!("10.5.{number}.1"), &format!("fd00:5:{number}::1")][family])
                .unwrap();
        }
        host
    }

    /// Reboots a node: all that its kernel has is gone, and what isn't on its disk; its pods and its agent don't run.
    pub fn reboot_node(&self, node: &mut Node) {
        node.agent = None;
        node.pods.clear();
        self.remove_host(&node.host);
        // On a tmpfs. The cache stays.
        let _ = fs::remove_file(node.folder.join("node.marks"));
        let uplink = format!("to-node{}", node.number);
        // The kernel removes a namespace's links in the background.
        let is_gone = || {
            self.inside.ip(&["link", "show", &uplink]).is_err()
                && self.management.ip(&["link", "show", &node.name]).is_err()
        };
        assert!(wait_for(Duration::from_secs(10), is_gone), "the links of {} are still there", node.name);
        node.host = self.connect_node(node.number);
    }

    /// Adds a host without links, such as a pod's namespace.
    pub fn add_host(&self, name: &str) -> Host {
        self.lab.host(name, false).unwrap()
    }

    /// Kills the processes of a host and removes it.
    pub fn remove_host(&self, host: &Host) {
        self.lab.remove_host(host);
    }

    /// Adds a pod to a node, as the runtime and a CNI plugin like Calico's would; no manifest names it yet.
    pub fn add_pod(&self, node: &mut Node) -> NodePod {
        let number = node.pods.len() + 5;
        let addresses = [format!("10.244.{}.{number}", node.number), format!("fd00:244:{}::{number}", node.number)];
        let (name, port) = (format!("{}-p{number}", node.name), format!("cali{number}"));
        let both = addresses.each_ref().map(String::as_str);
        let host = self.lab.routed_pod(&name, (&node.host, &port), both).unwrap();
        let pod = NodePod { host, addresses };
        node.pods.push(pod.clone());
        pod
    }

    /// Gateways' configuration with tunnels for nodes, to be passed to `start_gateways`; each needs its own address.
    pub fn overlay_config(number: usize) -> String {
        format!("overlay: {{address: 10.4.{number}.1, port: {TUNNEL_PORT}}}")
    }

    /// Adds a host behind the inside router, which nodes reach without a gateway.
    pub fn add_node_network_host(&self, name: &str, [v4, v6]: [&str; 2]) -> Host {
        let host = self.lab.host(name, false).unwrap();
        let uplink = format!("to-{name}");
        self.lab.link((&self.inside, &uplink), (&host, "eth0"), 1).unwrap();
        self.inside.addresses(&uplink, &["10.6.0.254/24", "fd00:6::fe/64"]).unwrap();
        host.addresses("eth0", &[&format!("{v4}/24"), &format!("{v6}/64")]).unwrap();
        host.route("default", "10.6.0.254").unwrap();
        host.route("default", "fd00:6::fe").unwrap();
        host
    }

    /// Captures on a node's uplink.
    pub fn capture_uplink(&self, node: &Node, filter: &str) -> Captures {
        let place = self.uplink(node);
        Captures::start(self.folder.path(), &format!("uplink-{}", node.name), &[place], filter)
    }

    /// Host and interface at the other end of a node's uplink.
    pub fn uplink(&self, node: &Node) -> (&Host, String) {
        (&self.inside, format!("to-node{}", node.number))
    }
}

impl Node {
    /// Its Node manifest.
    pub fn manifest(&self) -> String {
        let Self { name, number, .. } = self;
        format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n\
             spec: {{podCIDRs: [10.244.{number}.0/24, \"fd00:244:{number}::/64\"]}}\n\
             status: {{addresses: [{{type: InternalIP, address: 10.5.{number}.1}}, \
             {{type: InternalIP, address: \"fd00:5:{number}::1\"}}]}}\n"
        )
    }

    /// The Pod manifest of one of its pods in a namespace.
    pub fn pod_manifest(&self, pod: &NodePod, namespace: &str) -> String {
        let [v4, v6] = &pod.addresses;
        let name = v4.replace('.', "-");
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: pod-{name}, namespace: {namespace}, labels: {{app: web}}}}\n\
             spec: {{nodeName: {}, containers: []}}\n\
             status: {{phase: Running, podIP: {v4}, podIPs: [{{ip: {v4}}}, {{ip: \"{v6}\"}}]}}\n",
            self.name
        )
    }

    /// Starts its agent, with `extra` YAML in its configuration, and waits until it is ready.
    pub fn start(&mut self, extra: &str) {
        self.spawn(extra);
        self.wait_ready();
    }

    /// Starts its agent without waiting.
    pub fn spawn(&mut self, extra: &str) {
        let folder = self.folder.display();
        let mut text = format!(
            "name: {}\nserver: {{url: \"http://{POLICYD_ADDRESS}\", cache: {folder}/node.cache}}\n\
             pod_cidrs: [10.244.0.0/16, \"fd00:244::/32\"]\nstate: {folder}/node.marks\n\
             admin: {{socket: {folder}/node.sock}}\nmetrics: {{listen: \"127.0.0.1:{METRICS_PORT}\"}}\n\
             log: {{format: json}}\n",
            self.name
        );
        let _ = writeln!(text, "{extra}");
        let config = self.folder.join("node.yaml");
        fs::write(&config, text).unwrap();
        self.start_count += 1;
        let (program, config) = (binary().display().to_string(), config.display().to_string());
        self.agent = Some(self.host.spawn(&[&program, "node", "--config", &config], &self.log_path()).unwrap());
    }

    /// Waits until its agent has steered the pods.
    pub fn wait_ready(&mut self) {
        let agent = self.agent.as_mut().expect("the agent was started");
        agent.wait_for_log(READY, Duration::from_secs(20)).unwrap_or_else(|error| panic!("{error}"));
    }

    /// `vipgate node detach`.
    ///
    /// # Errors
    /// It fails.
    pub fn detach(&self) -> Result<String, vipgate_lab::Error> {
        let (program, config) = (binary().display().to_string(), self.folder.join("node.yaml").display().to_string());
        self.host.output(&[&program, "node", "detach", "--config", &config])
    }

    /// Loads the output of `vipgate node boot-table`, as a unit does at boot.
    pub fn load_boot_table(&self) {
        let (program, config) = (binary().display().to_string(), self.folder.join("node.yaml").display().to_string());
        let table = self.host.output(&[&program, "node", "boot-table", "--config", &config]).unwrap();
        let file = self.folder.join("boot.nft");
        fs::write(&file, table).unwrap();
        self.host.output(&["nft", "-f", &file.display().to_string()]).unwrap();
    }

    /// Sends a signal to its agent and waits for its exit.
    pub fn stop(&mut self, signal: &str) {
        let mut agent = self.agent.take().expect("the agent runs");
        agent.stop(signal, Duration::from_secs(10)).unwrap().expect("the agent exits");
    }

    /// The log of its agent's last start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join(format!("node-{}.log", self.start_count))
    }

    /// The JSON output of `vipgate node COMMAND`.
    pub fn query(&self, command: &[&str]) -> Value {
        let text = self.run(&[command, &["-o", "json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{command:?}: {error}: {text}"))
    }

    /// The output of `vipgate node COMMAND`.
    pub fn run(&self, command: &[&str]) -> String {
        let (program, socket) = (binary().display().to_string(), self.folder.join("node.sock"));
        let socket = socket.display().to_string();
        let (action, rest) = command.split_first().unwrap();
        let command = [&[program.as_str(), "node", *action, "--socket", socket.as_str()], rest].concat();
        self.host.output(&command).unwrap()
    }

    /// The sum of a metric's values over all labels that contain `labels`.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        policyd::metric(&self.host, METRICS_PORT, name, labels)
    }

    /// Waits until its agent steers this many addresses of pods.
    pub fn wait_for_pods(&self, count: usize) {
        let steered = || self.query(&["endpoints"])["endpoints"].as_array().map_or(0, Vec::len) == count;
        assert!(wait_for(Duration::from_secs(10), steered), "{}\n{}", self.run(&["endpoints"]), self.log());
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }
}
