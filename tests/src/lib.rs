//! The world around a gateway under test: pods, router and server in network namespaces, and the binary `vipgate` driven
//! from outside, by its command line, signals, files and ports.
//!
//! ```text
//!   p1 10.1.0.11, p2 .12 (tenant A)  --+
//!   p3 10.1.0.21 (tenant B)          --+-- switch -- gw-in [gw] gw-out -- router -- server 198.51.100.10
//!   p4 10.1.0.31 (no policy)         --+                                                  10.9.0.200 (excluded by B)
//! ```
//! Everything has its IPv6 twin. The manifests are those of `conf/demo/policy`.
#![allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod bgp;
mod capture;
pub mod cluster;
pub mod etcd;
pub mod flood;
pub mod foreign;
pub mod judge;
pub mod ledger;
pub mod policyd;
pub mod services;
pub mod tls;
pub mod traffic;

// The soak has no harness of its own: what it decides is tested here.
#[cfg(test)]
extern crate self as vipgate_tests;
#[cfg(test)]
#[path = "../soak/evidence.rs"]
mod evidence;
#[cfg(test)]
#[path = "../soak/plan.rs"]
mod plan;
#[cfg(test)]
mod soak_evidence;
#[cfg(test)]
mod soak_order;

use std::fmt::Write as _;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use vipgate::lab::{Host, Lab, Process, peers};

pub use crate::capture::Capture;
use crate::ledger::Ledger;
use crate::policyd::{Plan, Policyd};

/// The server's addresses.
pub const SERVER: [&str; 2] = ["198.51.100.10", "2001:db8:51::10"];
/// Addresses of the server that tenant B's policy excludes.
pub const EXCLUDED: [&str; 2] = ["10.9.0.200", "fd00:9::200"];
/// VIPs of tenant A.
pub const VIP_A: [&str; 2] = ["203.0.113.10", "2001:db8:113::10"];
/// VIPs of tenant B.
pub const VIP_B: [&str; 2] = ["203.0.113.20", "2001:db8:113::20"];
/// One more endpoint for tenant B: p4.
pub const MORE: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: more, namespace: tenant-b, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: https, port: 8443}]
endpoints: [{addresses: [10.1.0.31], conditions: {ready: true}}]
";
/// What tcpdump calls a pod's packet.
pub const POD_PACKETS: &str = "(net 10.1.0.0/24 or net fd00:1::/64)";

/// Where the policy server of a world listens.
pub const POLICYD: &str = "http://127.0.0.1:18000";
/// Port of the gateway's metrics.
const METRICS: u16 = 9469;

/// Whether worlds have a policy server unless a test says otherwise: so that all tests run both ways.
fn served_by_default() -> bool {
    match std::env::var("VIPGATE_POLICY").as_deref() {
        Ok("server") => true,
        Ok("files") | Err(_) => false,
        Ok(other) => panic!("VIPGATE_POLICY is `{other}`, expected `files` or `server`"),
    }
}

/// A gateway and its world. Everything is gone when it is dropped.
#[derive(Debug)]
pub struct World {
    /// Pods: p1, p2 of tenant A, p3 of tenant B, p4 of nobody.
    pub pods: [Host; 4],
    /// The switch between pods and gateway.
    pub switch: Host,
    /// The gateway's host.
    pub gateway: Host,
    /// The router between gateway and server.
    pub router: Host,
    /// The far side.
    pub server: Host,
    /// Configuration, policy, logs.
    pub folder: TempDir,
    /// What the gateway has dropped and refused, and may.
    pub ledger: Ledger,
    /// The policy server on the gateway's host, when it runs.
    pub policyd: Option<Policyd>,
    /// Whether policy comes to the gateway by way of a policy server.
    pub served: bool,
    /// What the gateway is started by, such as `setpriv`.
    pub wrapper: Vec<String>,
    process: Option<Process>,
    runs: u32,
    _lab: Lab,
}

/// The binary under test: `VIPGATE_BIN`, or that beside this program, or beside the folder that a test's program is in.
pub fn binary() -> PathBuf {
    let built = || {
        let program = std::env::current_exe().unwrap();
        let mut places = program.ancestors().skip(1).take(2).map(|folder| folder.join("vipgate"));
        let first = places.next().unwrap();
        if first.is_file() { first } else { places.next().unwrap() }
    };
    let path = std::env::var_os("VIPGATE_BIN").map_or_else(built, PathBuf::from);
    assert!(path.exists(), "{} is missing: build it first (`make e2e` does), or set VIPGATE_BIN", path.display());
    path
}

impl World {
    /// The world, with two queues between gateway and network, and no gateway running yet.
    pub fn new(tag: &str) -> Self {
        let lab = Lab::new(tag).unwrap();
        let switch = lab.host("switch", false).unwrap();
        let gateway = lab.host("gw", true).unwrap();
        let router = lab.host("router", true).unwrap();
        let server = lab.host("server", false).unwrap();
        switch.ip(&["link", "add", "pods", "type", "bridge"]).unwrap();
        switch.ip(&["link", "set", "pods", "up"]).unwrap();
        // Where the kernel has it, the bridge would look into packets and drop broken ones before the gateway sees them.
        let _ = switch.sysctl("net.bridge.bridge-nf-call-iptables", 0);
        let _ = switch.sysctl("net.bridge.bridge-nf-call-ip6tables", 0);
        let _ = switch.sysctl("net.bridge.bridge-nf-call-arptables", 0);
        lab.link((&switch, "to-gw"), (&gateway, "gw-in"), 2).unwrap();
        switch.ip(&["link", "set", "to-gw", "master", "pods"]).unwrap();
        gateway.addresses("gw-in", &["10.1.0.1/24", "fd00:1::1/64"]).unwrap();
        let pods = [("p1", 11), ("p2", 12), ("p3", 21), ("p4", 31)].map(|(name, number)| {
            let pod = lab.host(name, false).unwrap();
            lab.link((&switch, name), (&pod, "eth0"), 1).unwrap();
            switch.ip(&["link", "set", name, "master", "pods"]).unwrap();
            pod.addresses("eth0", &[&format!("10.1.0.{number}/24"), &format!("fd00:1::{number}/64")]).unwrap();
            pod.route("default", "10.1.0.1").unwrap();
            pod.route("default", "fd00:1::1").unwrap();
            pod
        });
        lab.link((&gateway, "gw-out"), (&router, "to-gw"), 2).unwrap();
        gateway.addresses("gw-out", &["203.0.113.1/24", "2001:db8:113::1/64"]).unwrap();
        router.addresses("to-gw", &["203.0.113.254/24", "2001:db8:113::fe/64"]).unwrap();
        gateway.route("default", "203.0.113.254").unwrap();
        gateway.route("default", "2001:db8:113::fe").unwrap();
        router.route("10.1.0.0/24", "203.0.113.1").unwrap();
        router.route("fd00:1::/64", "2001:db8:113::1").unwrap();
        lab.link((&router, "to-server"), (&server, "eth0"), 1).unwrap();
        let routers = ["198.51.100.254/24", "2001:db8:51::fe/64", "10.9.0.254/24", "fd00:9::fe/64"];
        router.addresses("to-server", &routers).unwrap();
        let servers = ["198.51.100.10/24", "2001:db8:51::10/64", "10.9.0.200/24", "fd00:9::200/64"];
        server.addresses("eth0", &servers).unwrap();
        server.route("default", "198.51.100.254").unwrap();
        server.route("default", "2001:db8:51::fe").unwrap();
        peers::start(&server, &[SERVER, EXCLUDED].concat());
        traffic::start_echo(&server);

        let folder = TempDir::with_prefix("vipgate-test-").unwrap();
        fs::create_dir(folder.path().join("policy")).unwrap();
        let world = Self {
            pods,
            switch,
            gateway,
            router,
            server,
            folder,
            ledger: Ledger::default(),
            policyd: None,
            served: served_by_default(),
            wrapper: Vec::new(),
            process: None,
            runs: 0,
            _lab: lab,
        };
        for name in ["tenant-a.yaml", "tenant-b.yaml"] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf/demo/policy").join(name);
            world.write_policy(name, &fs::read_to_string(source).unwrap());
        }
        world
    }

    /// The same with a gateway running.
    pub fn with_gateway(tag: &str) -> Self {
        let mut world = Self::new(tag);
        world.start("");
        world
    }

    /// Replaces a policy file in one step.
    pub fn write_policy(&self, name: &str, text: &str) {
        let path = self.folder.path().join("policy").join(name);
        let draft = self.folder.path().join("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(draft, path).unwrap();
    }

    /// A policy file as it is.
    pub fn policy(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join("policy").join(name)).unwrap()
    }

    /// The configuration file, with more lines of YAML at its end.
    pub fn config(&self, more: &str) -> String {
        let folder = self.folder.path().display();
        let text = format!(
            "name: gw-test\n\
             interfaces:\n  - {{name: gw-in, role: inside}}\n  - {{name: gw-out, role: outside}}\n\
             admin: {{socket: {folder}/gateway.sock}}\n\
             log: {{format: json}}\n"
        );
        let has = |field: &str| more.lines().any(|line| line.starts_with(field));
        let mut text = text + more + "\n";
        if !has("policy:") && self.served {
            writeln!(text, "policy: {{server: {{url: \"{POLICYD}\", cache: {folder}/policy.cache}}}}").unwrap();
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

    /// Starts a policy server with the policy's files on the gateway's host, with more lines of YAML in its configuration, and
    /// waits until it is ready.
    pub fn start_policyd(&mut self, more: &str) {
        let plan = Plan { more, ..Plan::default() };
        self.policyd = Some(Policyd::start(&self.gateway, self.folder.path(), plan));
    }

    /// The policy server that runs.
    pub fn policyd(&self) -> &Policyd {
        self.policyd.as_ref().expect("a policy server runs")
    }

    /// Starts the gateway, with a policy server where it needs one, and waits until it is ready.
    pub fn start(&mut self, more: &str) {
        if self.served && self.policyd.is_none() {
            self.start_policyd("");
        }
        self.start_alone(more);
    }

    /// Starts the gateway and waits until it is ready.
    pub fn start_alone(&mut self, more: &str) {
        self.launch(more);
        let came_up = wait_for(Duration::from_secs(20), || self.is_ready() || !self.is_running());
        assert!(came_up && self.is_running(), "the gateway is not ready; it said:\n{}", self.log());
    }

    /// Starts the gateway's process.
    pub fn launch(&mut self, more: &str) {
        let config = self.config(more);
        self.runs += 1;
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

    /// Whether the gateway's process is there.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_alive)
    }

    /// Whether the gateway has said that it is ready since it was last started.
    pub fn is_ready(&self) -> bool {
        self.log().contains("\"event\":\"ready\"")
    }

    /// Ends the gateway by a signal, and waits for its end.
    #[track_caller]
    pub fn end(&mut self, signal: &str) -> ExitStatus {
        self.settle();
        self.process().signal(signal).unwrap();
        self.wait_end()
    }

    /// Waits until the gateway ends by itself.
    pub fn wait_end(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("a gateway runs");
        process.wait(Duration::from_secs(5)).expect("it ends")
    }

    /// Enters into the ledger what the gateway's process has counted, if that can be asked.
    #[track_caller]
    fn settle(&mut self) {
        if self.is_running() && self.is_ready() {
            let socket = self.folder.path().join("gateway.sock").display().to_string();
            self.ledger.enter("gw-test", &self.gateway, || self.command(&["drops", "--socket", &socket]).1);
        }
    }

    /// Runs `vipgate` on the gateway's host to its end: exit code, stdout and stderr.
    pub fn command(&self, arguments: &[&str]) -> (i32, String, String) {
        self.command_under(&[], arguments)
    }

    /// The same behind another command, such as `setpriv`.
    pub fn command_under(&self, wrapper: &[&str], arguments: &[&str]) -> (i32, String, String) {
        let output = Command::new("ip")
            .args(["netns", "exec", self.gateway.netns(), "timeout", "20"])
            .args(wrapper)
            .arg(binary())
            .args(arguments)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join(format!("gateway-{}.log", self.runs))
    }

    /// What the gateway has logged since it was last started.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Asks the gateway by its command line; the answer as JSON.
    pub fn ask(&self, command: &[&str]) -> Value {
        let socket = self.folder.path().join("gateway.sock").display().to_string();
        let (code, stdout, stderr) = self.command(&[command, &["--socket", &socket, "-o", "json"]].concat());
        assert_eq!(code, 0, "{command:?}: {stderr}");
        serde_json::from_str(&stdout).unwrap()
    }

    /// The VIPs in force, without how many sessions each has at the moment, and may have.
    pub fn vips(&self) -> Value {
        let mut vips = self.ask(&["vips"]);
        vips["session_fair_share"] = Value::Null;
        for vip in vips["vips"].as_array_mut().unwrap() {
            vip["sessions"] = Value::Null;
            vip["table_sessions"] = Value::Null;
        }
        vips
    }

    /// The sum of a metric's values over all labels that contain `labels`.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        policyd::metric(&self.gateway, METRICS, name, labels)
    }

    /// What a page beside the gateway's metrics answers: the status of HTTP.
    pub fn answer(&self, page: &str) -> u16 {
        policyd::get(&self.gateway, METRICS, page).unwrap().0
    }

    /// The same, and what it says.
    pub fn page(&self, page: &str) -> (u16, String) {
        policyd::get(&self.gateway, METRICS, page).unwrap()
    }

    /// The gateway's admin socket.
    pub fn socket(&self) -> String {
        self.folder.path().join("gateway.sock").display().to_string()
    }

    /// How things stand with the policy server, as the gateway says.
    pub fn server_status(&self) -> Value {
        self.ask(&["status"])["policy"]["server"].clone()
    }

    /// Waits until the gateway says that it is connected to its policy server, or that it isn't.
    pub fn wait_connected(&self, connected: bool, patience: Duration) {
        let so = || self.server_status()["connected"] == connected;
        assert!(wait_for(patience, so), "{}\n{}", self.server_status(), self.log());
    }

    /// `vipgate policy status` with these arguments, on the gateway's host: exit code, stdout and stderr.
    pub fn policy_status(&self, arguments: &[&str]) -> (i32, String, String) {
        self.command(&[&["policy", "status"], arguments].concat())
    }

    /// Waits until the policy server says that all is in force.
    pub fn wait_in_force(&self) {
        let (code, stdout, stderr) = self.policy_status(&["--wait", "15"]);
        assert_eq!(code, 0, "{stdout}{stderr}\n{}", self.log());
    }

    /// Packets of a direction that all workers have forwarded.
    pub fn forwarded(&self, direction: &str) -> f64 {
        self.metric("vipgate_packets_total", &format!("direction=\"{direction}\""))
    }

    /// Every packet buffer is accounted for.
    pub fn check_frames(&self) {
        let conserved = || {
            let place = |name: &str| self.metric("vipgate_frames", &format!("place=\"{name}\""));
            (place("pool") + place("device") + place("held") - place("total")).abs() < 0.5
        };
        assert!(wait_for(Duration::from_secs(3), conserved), "packet buffers are missing");
    }

    /// Asks a server over UDP until it sees a pod by its own address, which leaves the policy.
    #[track_caller]
    pub fn wait_uncovered(&self, pod: &Host, server: &str, own: &str) {
        // Between a question and its answer the policy may end the session; workers know that before the steering program does.
        self.ledger.allow(["no_policy", "no_service"]);
        let is_uncovered = || peers::ask_udp(pod, server.parse().unwrap()).is_ok_and(|seen| seen == own);
        assert!(wait_for(Duration::from_secs(15), is_uncovered), "{}: {}", pod.name(), self.log());
    }

    /// The far side sees a pod by TCP and UDP as `expected`, in both families, and answers its pings.
    pub fn check_identity(&self, pod: &Host, servers: [&str; 2], expected: [&str; 2]) {
        for (server, expected) in servers.into_iter().zip(expected) {
            let address: IpAddr = server.parse().unwrap();
            assert_eq!(peers::ask_http(pod, address).unwrap(), expected, "TCP from {} to {server}", pod.name());
            assert_eq!(peers::ask_udp(pod, address).unwrap(), expected, "UDP from {} to {server}", pod.name());
            pod.output(&["ping", "-c", "1", "-W", "2", server]).unwrap();
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.settle();
            self.ledger.check();
        }
    }
}

/// Asks again and again until it is so; false if it isn't in time.
pub fn wait_for(patience: Duration, mut so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + patience;
    loop {
        if so() {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// A folder for sessions in memory, gone at the end of the test, and the lines of configuration that name it.
pub fn state() -> (TempDir, String) {
    let folder = TempDir::with_prefix_in("vipgate-test-", "/dev/shm").unwrap();
    let more = format!("sessions: {{capacity: 65536, state: {}}}", folder.path().display());
    (folder, more)
}
