//! Testbed of one gateway: pods, router and server in network namespaces. Tests drive the binary `vipgate` through
//! its command line, signals, files and ports.
//!
//! ```text
//!   p1 10.1.0.11, p2 .12 (tenant A)  --+
//!   p3 10.1.0.21 (tenant B)          --+-- switch -- gw-in [gw] gw-out -- router -- server 198.51.100.10
//!   p4 10.1.0.31 (no policy)         --+                                                  10.9.0.200 (excluded by B)
//! ```
//! Every link has IPv4 and IPv6. The manifests are those of `conf/demo/policy`.
#![forbid(unsafe_code)]
#![allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod bgp;
mod capture;
pub mod cluster;
pub mod drop_accounting;
pub mod etcd;
#[cfg(target_arch = "x86_64")]
pub mod failing_calls;
pub mod fake_cloud;
pub mod flood;
pub mod frames;
pub mod iperf3;
pub mod kubernetes;
pub mod lines;
pub mod mtu;
pub mod policyd;
pub mod services;
pub mod soak;
pub mod tls;
pub mod traffic;
pub mod verifier;
pub mod xds_peer;

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, SystemTime};
use std::{fs, thread};

use serde_json::Value;
use tempfile::TempDir;
pub use vipgate_lab::networks::{EXCLUDED, SERVER};
use vipgate_lab::networks::{SingleGateway, add_pod};
pub use vipgate_lab::{Capture, wait_for};
use vipgate_lab::{Host, Lab, Process, READY, reflector};

use crate::drop_accounting::DropAccounting;
use crate::policyd::{Policyd, PolicydConfig};

/// VIPs of tenant A.
pub const VIP_A: [&str; 2] = ["203.0.113.10", "2001:db8:113::10"];
/// VIPs of tenant B.
pub const VIP_B: [&str; 2] = ["203.0.113.20", "2001:db8:113::20"];
/// Manifest of an additional endpoint of tenant B: p4.
pub const EXTRA_ENDPOINT: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: more, namespace: tenant-b, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: https, port: 8443}]
endpoints: [{addresses: [10.1.0.31], conditions: {ready: true}}]
";
/// Manifests of a third tenant: a pool of two addresses, EgressPolicies with these names that ask for one of it, and p4
/// as the pod of the policy `b`.
pub fn tenant_with_pool(policies: &[&str]) -> String {
    let mut text = "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: pair}\n\
                    spec: {ranges: [203.0.113.40/31]}\n---\n\
                    apiVersion: v1\nkind: Pod\nmetadata: {name: p4, namespace: tenant-c, labels: {app: b}}\n\
                    spec: {containers: []}\nstatus: {phase: Running, podIPs: [{ip: 10.1.0.31}]}\n"
        .to_owned();
    for name in policies {
        let policy = format!(
            "---\napiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\n\
             metadata: {{name: {name}, namespace: tenant-c}}\n\
             spec:\n  selectors: [{{podSelector: {{matchLabels: {{app: {name}}}}}}}]\n  pools: [{{name: pair, count: 1}}]\n"
        );
        text += &policy;
    }
    text
}

/// pcap filter that matches packets with a pod's address.
pub const POD_FILTER: &str = "(net 10.1.0.0/24 or net fd00:1::/64)";

/// URL of the testbed's policy server.
pub const POLICYD_URL: &str = "http://127.0.0.1:18000";
/// Port of the gateway's metrics listener.
const METRICS_PORT: u16 = 9469;

/// Whether testbeds use a policy server by default (`VIPGATE_POLICY`): some tests run with both policy sources.
fn uses_policy_server_by_default() -> bool {
    match std::env::var("VIPGATE_POLICY").as_deref() {
        Ok("server") => true,
        Ok("files") | Err(_) => false,
        Ok(other) => panic!("VIPGATE_POLICY is `{other}`, expected `files` or `server`"),
    }
}

/// One gateway with its network. Everything is removed on drop.
#[derive(Debug)]
pub struct Testbed {
    /// p1 and p2 of tenant A, p3 of tenant B, p4 without a policy.
    pub pods: [Host; 4],
    /// The switch between pods and gateway.
    pub switch: Host,
    /// The gateway's host.
    pub gateway: Host,
    /// The router between gateway and server.
    pub router: Host,
    /// The server outside.
    pub server: Host,
    /// Configuration, policy, logs.
    pub folder: TempDir,
    /// Expected and counted drops and errors of the gateway.
    pub accounting: DropAccounting,
    /// The policy server on the gateway's host, when it runs.
    pub policyd: Option<Policyd>,
    /// Whether the gateway gets its policy from a policy server.
    pub uses_policy_server: bool,
    /// Command prefix of the gateway, such as `setpriv`.
    pub wrapper: Vec<String>,
    process: Option<Process>,
    start_count: u32,
    _lab: Lab,
}

/// The binary under test: `VIPGATE_BIN`, or `vipgate` in the directory of the test program or in its parent.
pub fn binary() -> PathBuf {
    let path = std::env::var_os("VIPGATE_BIN").map_or_else(|| built_program("vipgate"), PathBuf::from);
    assert!(path.exists(), "{} is missing: build it first (`make e2e` does), or set VIPGATE_BIN", path.display());
    path
}

/// A program of the workspace, in the directory of the test program or in its parent.
fn built_program(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let mut candidates = program.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let first = candidates.next().unwrap();
    if first.is_file() { first } else { candidates.next().unwrap() }
}

impl Testbed {
    /// Builds the network, with two queues on each of the gateway's interfaces. No gateway runs yet.
    pub fn new(tag: &str) -> Self {
        let lab = Lab::new(tag).unwrap();
        let network = SingleGateway::build(&lab, 2).unwrap();
        let pods = [("p1", 11), ("p2", 12), ("p3", 21), ("p4", 31)].map(|(name, number)| {
            add_pod(&lab, &network.switch, name, [&format!("10.1.0.{number}"), &format!("fd00:1::{number}")]).unwrap()
        });
        let SingleGateway { switch, gateway, router, server } = network;
        traffic::start_udp_echo(&server);

        let folder = vipgate_lab::directory().unwrap();
        fs::create_dir(folder.path().join("policy")).unwrap();
        let testbed = Self {
            pods,
            switch,
            gateway,
            router,
            server,
            folder,
            accounting: DropAccounting::default(),
            policyd: None,
            uses_policy_server: uses_policy_server_by_default(),
            wrapper: Vec::new(),
            process: None,
            start_count: 0,
            _lab: lab,
        };
        for name in ["tenant-a.yaml", "tenant-b.yaml"] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf/demo/policy").join(name);
            testbed.write_policy(name, &fs::read_to_string(source).unwrap());
        }
        testbed
    }

    /// Builds the testbed and starts a gateway.
    pub fn with_gateway(tag: &str) -> Self {
        let mut testbed = Self::new(tag);
        testbed.start("");
        testbed
    }

    /// Replaces a policy file atomically.
    pub fn write_policy(&self, name: &str, text: &str) {
        let path = self.folder.path().join("policy").join(name);
        let draft = self.folder.path().join("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(draft, path).unwrap();
    }

    /// Reads a policy file.
    pub fn read_policy(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join("policy").join(name)).unwrap()
    }

    /// Writes the configuration file with `extra` YAML appended; returns its path.
    pub fn write_config(&self, extra: &str) -> String {
        let folder = self.folder.path().display();
        let text = format!(
            "name: gw-test\n\
             interfaces:\n  - {{name: gw-in, role: inside}}\n  - {{name: gw-out, role: outside}}\n\
             admin: {{socket: {folder}/gateway.sock}}\n\
             log: {{format: json}}\n"
        );
        let has = |field: &str| extra.lines().any(|line| line.starts_with(field));
        let mut text = text + extra + "\n";
        if !has("policy:") && self.uses_policy_server {
            writeln!(text, "policy: {{server: {{url: \"{POLICYD_URL}\", cache: {folder}/policy.cache}}}}").unwrap();
        } else if !has("policy:") {
            writeln!(text, "policy: {{files: [{folder}/policy]}}").unwrap();
        }
        if !has("workers:") {
            text += "workers: {cores: [0, 1]}\n";
        }
        if !has("sessions:") {
            text += "sessions: {capacity: 65536, state: null}\n";
        }
        let path = self.folder.path().join("gateway.yaml");
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// Starts a policy server on the gateway's host that reads the testbed's policy files, with `extra` YAML in its
    /// configuration, and waits until it is ready.
    pub fn start_policyd(&mut self, extra: &str) {
        let config = PolicydConfig { extra, ..PolicydConfig::default() };
        self.policyd = Some(Policyd::start(&self.gateway, self.folder.path(), config));
    }

    /// The running policy server.
    pub fn policyd(&self) -> &Policyd {
        self.policyd.as_ref().expect("a policy server runs")
    }

    /// Starts the gateway, and the policy server if it is needed, and waits until the gateway is ready.
    pub fn start(&mut self, extra: &str) {
        if self.uses_policy_server && self.policyd.is_none() {
            self.start_policyd("");
        }
        self.start_gateway(extra);
    }

    /// Starts only the gateway and waits until it is ready.
    pub fn start_gateway(&mut self, extra: &str) {
        self.spawn_gateway(extra);
        let process = self.process.as_mut().expect("it was started");
        process.wait_for_log(READY, Duration::from_secs(20)).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Starts the gateway's process without waiting.
    pub fn spawn_gateway(&mut self, extra: &str) {
        let config = self.write_config(extra);
        self.start_count += 1;
        let program = binary().display().to_string();
        let command = [&program, "gateway", "--config", &config];
        let wrapped: Vec<&str> = self.wrapper.iter().map(String::as_str).chain(command).collect();
        let process = self.gateway.spawn(&wrapped, &self.log_path()).unwrap();
        self.process = Some(process);
    }

    /// The gateway's process.
    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("a gateway runs")
    }

    /// Whether the gateway's process is alive.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_alive)
    }

    /// Whether the gateway has logged `ready` since its last start.
    pub fn is_ready(&self) -> bool {
        self.log().contains(READY)
    }

    /// Sends a signal to the gateway and waits for its exit.
    #[track_caller]
    pub fn stop(&mut self, signal: &str) -> ExitStatus {
        self.record_counters();
        self.process().signal(signal).unwrap();
        self.wait_exit()
    }

    /// Waits until the gateway exits on its own.
    pub fn wait_exit(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("a gateway runs");
        process.wait(Duration::from_secs(5)).expect("the gateway exits")
    }

    /// Records the gateway's drop and error counters, if the process can be queried.
    #[track_caller]
    fn record_counters(&mut self) {
        if self.is_running() && self.is_ready() {
            let socket = self.folder.path().join("gateway.sock").display().to_string();
            self.accounting.record("gw-test", &self.gateway, || self.command(&["drops", "--socket", &socket]).1);
        }
    }

    /// Runs `vipgate` on the gateway's host: exit code, stdout and stderr.
    pub fn command(&self, arguments: &[&str]) -> (i32, String, String) {
        self.command_with_wrapper(&[], arguments)
    }

    /// The same with a command prefix, such as `setpriv`.
    pub fn command_with_wrapper(&self, wrapper: &[&str], arguments: &[&str]) -> (i32, String, String) {
        let program = binary().display().to_string();
        self.gateway.execute(&[wrapper, &[program.as_str()], arguments].concat()).unwrap()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join(format!("gateway-{}.log", self.start_count))
    }

    /// The gateway's log since its last start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Runs a query command with `-o json`; the parsed output.
    pub fn query(&self, command: &[&str]) -> Value {
        let socket = self.folder.path().join("gateway.sock").display().to_string();
        let (code, stdout, stderr) = self.command(&[command, &["--socket", &socket, "-o", "json"]].concat());
        assert_eq!(code, 0, "{command:?}: {stderr}");
        serde_json::from_str(&stdout).unwrap()
    }

    /// The VIPs of the active policy, without their session counts and limits, which change with traffic.
    pub fn vips(&self) -> Value {
        let mut vips = self.query(&["vips"]);
        vips["session_fair_share"] = Value::Null;
        for vip in vips["vips"].as_array_mut().unwrap() {
            vip["sessions"] = Value::Null;
            vip["table_sessions"] = Value::Null;
        }
        vips
    }

    /// The sum of a metric's values over all labels that contain `labels`.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        policyd::metric(&self.gateway, METRICS_PORT, name, labels)
    }

    /// GET on the gateway's metrics listener; the HTTP status.
    pub fn http_status(&self, page: &str) -> u16 {
        policyd::http_get(&self.gateway, METRICS_PORT, page).unwrap().0
    }

    /// GET on the gateway's metrics listener; the HTTP status and the body.
    pub fn http_get(&self, page: &str) -> (u16, String) {
        policyd::http_get(&self.gateway, METRICS_PORT, page).unwrap()
    }

    /// Path of the gateway's admin socket.
    pub fn socket(&self) -> String {
        self.folder.path().join("gateway.sock").display().to_string()
    }

    /// The gateway's view of its policy server: `policy.server` of `status`.
    pub fn policy_server_status(&self) -> Value {
        self.query(&["status"])["policy"]["server"].clone()
    }

    /// Waits until the gateway reports that it is connected to its policy server, or disconnected.
    pub fn wait_connected(&self, connected: bool, timeout: Duration) {
        let matches = || self.policy_server_status()["connected"] == connected;
        assert!(wait_for(timeout, matches), "{}\n{}", self.policy_server_status(), self.log());
    }

    /// Runs `vipgate policy status` on the gateway's host: exit code, stdout and stderr.
    pub fn policy_status(&self, arguments: &[&str]) -> (i32, String, String) {
        self.command(&[&["policy", "status"], arguments].concat())
    }

    /// Waits until the policy server reports that every gateway has its policy in force.
    pub fn wait_in_force(&self) {
        let (code, stdout, stderr) = self.policy_status(&["--wait", "15"]);
        assert_eq!(code, 0, "{stdout}{stderr}\n{}", self.log());
    }

    /// Waits until the gateway's cache has the policy in force. It is written at most once a second, and confirmed every
    /// 5 s if it is current.
    pub fn wait_cached(&self) {
        let (file, now) = (self.folder.path().join("policy.cache"), SystemTime::now());
        let is_confirmed = || fs::metadata(&file).is_ok_and(|metadata| metadata.modified().unwrap() >= now);
        assert!(wait_for(Duration::from_secs(15), is_confirmed), "{}", self.log());
    }

    /// Packets of one direction, forwarded by all workers.
    pub fn forwarded(&self, direction: &str) -> f64 {
        self.metric("vipgate_packets_total", &format!("direction=\"{direction}\""))
    }

    /// Asserts that every UMEM frame is accounted for.
    pub fn check_frames(&self) {
        let conserved = || {
            let place = |name: &str| self.metric("vipgate_frames", &format!("place=\"{name}\""));
            (place("pool") + place("device") + place("held") - place("total")).abs() < 0.5
        };
        assert!(wait_for(Duration::from_secs(3), conserved), "frames are missing");
    }

    /// Sends UDP requests until the server sees the pod's own address `own`: the pod has left the policy.
    #[track_caller]
    pub fn wait_uncovered(&self, pod: &Host, server: &str, own: &str) {
        // Workers apply the new policy before the steering program does, so a reply that is under way may be dropped.
        self.accounting.allow(["no_policy", "no_service"]);
        let is_uncovered = || reflector::query_udp(pod, server.parse().unwrap()).is_ok_and(|observed| observed == own);
        assert!(wait_for(Duration::from_secs(15), is_uncovered), "{}: {}", pod.name(), self.log());
    }

    /// Asserts that the servers see a pod as `expected` over TCP and UDP, in both families, and answer its pings.
    pub fn check_source_addresses(&self, pod: &Host, servers: [&str; 2], expected: [&str; 2]) {
        for (server, expected) in servers.into_iter().zip(expected) {
            let address: IpAddr = server.parse().unwrap();
            assert_eq!(reflector::query_http(pod, address).unwrap(), expected, "TCP from {} to {server}", pod.name());
            assert_eq!(reflector::query_udp(pod, address).unwrap(), expected, "UDP from {} to {server}", pod.name());
            pod.output(&["ping", "-c", "1", "-W", "2", server]).unwrap();
        }
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.record_counters();
            self.accounting.check();
        }
    }
}

/// Temporary directory for session state in shared memory, and the configuration that names it.
pub fn session_state() -> (TempDir, String) {
    let folder = vipgate_lab::memory_directory().unwrap();
    let extra = format!("sessions: {{capacity: 65536, state: {}}}", folder.path().display());
    (folder, extra)
}
