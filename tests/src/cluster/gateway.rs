//! One gateway of a cluster: its configuration, its process, and what it says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use vipgate::lab::{Host, Lab, Process};

use super::{PEER, POLICYD, moment};
use crate::ledger::Ledger;
use crate::{METRICS, binary, policyd, wait_for};

/// A gateway, running or not.
#[derive(Debug)]
pub struct Gateway {
    /// Its name: `gw-1` and so on.
    pub name: String,
    /// Its host.
    pub host: Host,
    /// Where other gateways reach it.
    pub peer: String,
    /// A command that its process is started by, such as `env` with variables.
    pub wrapper: Vec<String>,
    ledger: Arc<Ledger>,
    process: Option<Process>,
    number: usize,
    folder: PathBuf,
    state: TempDir,
    runs: u32,
    suspended: bool,
}

impl Gateway {
    pub(super) fn new(lab: &Lab, number: usize, folder: &Path, ledger: Arc<Ledger>) -> Self {
        let name = format!("gw-{number}");
        let folder = folder.join(&name);
        fs::create_dir(&folder).unwrap();
        Self {
            host: lab.host(&name, true).unwrap(),
            name,
            peer: format!("10.2.0.{number}"),
            wrapper: Vec::new(),
            ledger,
            process: None,
            number,
            folder,
            state: TempDir::with_prefix_in("vipgate-test-", "/dev/shm").unwrap(),
            runs: 0,
            suspended: false,
        }
    }

    /// Gives its interfaces addresses, and the kernel its routes.
    pub(super) fn connect(&self) {
        let Self { host, number, .. } = self;
        host.addresses("gw-in", &[&format!("10.4.{number}.1/24"), &format!("fd00:4:{number}::1/64")]).unwrap();
        host.addresses("gw-out", &[&format!("203.0.113.{number}/24"), &format!("2001:db8:113::{number}/64")]).unwrap();
        host.addresses("gw-peer", &[&format!("{}/24", self.peer)]).unwrap();
        host.addresses("gw-mgmt", &[&format!("10.3.0.{number}/24")]).unwrap();
        host.route("10.1.0.0/16", &format!("10.4.{number}.254")).unwrap();
        host.route("fd00:1::/48", &format!("fd00:4:{number}::fe")).unwrap();
        host.route("default", "203.0.113.254").unwrap();
        host.route("default", "2001:db8:113::fe").unwrap();
    }

    /// Writes its configuration, with more lines of YAML, which replace fields of the same name.
    pub fn config(&self, more: &str) -> String {
        let Self { name, number, folder, peer, .. } = self;
        let (folder, state) = (folder.display(), self.state.path().display());
        // Gateways share the cores of a small machine, one after the other.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let fields = [
            format!("name: {name}"),
            "interfaces: [{name: gw-in, role: inside}, {name: gw-out, role: outside}, {name: gw-peer, role: inside}]"
                .into(),
            format!("workers: {{cores: [{}], idle: adaptive}}", (number - 1) % cores),
            format!("policy: {{server: {{url: \"http://{POLICYD}\", cache: {folder}/policy.cache}}}}"),
            format!("sessions: {{capacity: 65536, state: {state}}}"),
            format!("peer: {{address: {peer}, port: {PEER}}}"),
            format!("admin: {{socket: {folder}/gateway.sock}}"),
            format!("metrics: {{listen: \"127.0.0.1:{METRICS}\"}}"),
            "log: {format: json}".into(),
        ];
        let replaced = |field: &str| {
            let key = field.split(':').next().unwrap_or_default();
            more.lines().any(|line| line.starts_with(&format!("{key}:")))
        };
        let kept: Vec<&str> = fields.iter().map(String::as_str).filter(|field| !replaced(field)).collect();
        let path = self.folder.join("gateway.yaml");
        fs::write(&path, format!("{}\n{more}\n", kept.join("\n"))).unwrap();
        path.display().to_string()
    }

    /// Starts its process, with more lines of YAML in its configuration.
    pub fn launch(&mut self, more: &str) {
        let config = self.config(more);
        self.runs += 1;
        self.suspended = false;
        let program = binary().display().to_string();
        let wrapper = self.wrapper.iter().map(String::as_str);
        let command: Vec<&str> = wrapper.chain([program.as_str(), "gateway", "--config", &config]).collect();
        self.process = Some(self.host.spawn(&command, &self.log_path()).unwrap());
    }

    /// Waits until it says that it is ready.
    pub fn wait_ready(&mut self) {
        let ready = |gateway: &Self| gateway.log().contains("\"event\":\"ready\"");
        let ended = |gateway: &mut Self| !gateway.process.as_mut().is_some_and(Process::is_alive);
        wait_for(Duration::from_secs(20), || ready(self) || ended(self));
        assert!(ready(self) && !ended(self), "{} is not ready; it said:\n{}", self.name, self.log());
    }

    /// Starts it, and waits until it is ready.
    pub fn start(&mut self, more: &str) {
        self.launch(more);
        self.wait_ready();
    }

    /// Kills it at once; when that was.
    pub fn kill(&mut self) -> f64 {
        self.end("KILL")
    }

    /// Ends it by a signal, and waits for its end. The moment of the signal, which comes after what it is asked.
    #[track_caller]
    pub fn end(&mut self, signal: &str) -> f64 {
        self.settle();
        let mut process = self.process.take().expect("it runs");
        let signalled = moment();
        process.signal(signal).unwrap();
        process.wait(Duration::from_secs(10)).expect("it ends");
        signalled
    }

    /// Enters into the ledger what its process has counted, if that can be asked.
    #[track_caller]
    pub(super) fn settle(&mut self) {
        let answers = self.process.as_mut().is_some_and(Process::is_alive) && !self.suspended;
        if answers && self.log().contains("\"event\":\"ready\"") {
            self.ledger.enter(&self.name, &self.host, || self.command(&["drops"]).1);
        }
    }

    /// Lets it do nothing more, without its knowing.
    pub fn suspend(&mut self) {
        self.process.as_ref().expect("it runs").signal("STOP").unwrap();
        self.suspended = true;
    }

    /// Lets it go on as if nothing had been.
    pub fn resume(&mut self) {
        self.process.as_ref().expect("it runs").signal("CONT").unwrap();
        self.suspended = false;
    }

    /// The number of its process.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Whether its process is there.
    pub fn is_alive(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_alive)
    }

    /// Whether it runs, and answers.
    pub fn runs(&self) -> bool {
        self.process.is_some() && !self.suspended
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join(format!("gateway-{}.log", self.runs))
    }

    /// What it has logged since it was last started.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The end of that: for messages.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Runs `vipgate` on its host to its end: exit code, stdout and stderr.
    pub fn command(&self, arguments: &[&str]) -> (i32, String, String) {
        let socket = self.folder.join("gateway.sock");
        let output = Command::new("ip")
            .args(["netns", "exec", self.host.netns(), "timeout", "20"])
            .arg(binary())
            .args(arguments)
            .arg("--socket")
            .arg(socket)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    /// Asks it by its command line; the answer as JSON.
    pub fn ask(&self, command: &[&str]) -> Value {
        let (code, stdout, stderr) = self.command(&[command, &["-o", "json"]].concat());
        assert_eq!(code, 0, "{} {command:?}: {stderr}", self.name);
        serde_json::from_str(&stdout).unwrap()
    }

    /// What a page beside its metrics answers: the status of HTTP, and the text.
    pub fn page(&self, page: &str) -> (u16, String) {
        policyd::get(&self.host, METRICS, page).unwrap()
    }

    /// All lines of its metrics.
    pub fn metrics(&self) -> String {
        policyd::get(&self.host, METRICS, "/metrics").unwrap().1
    }

    /// The sum of a metric's values over all labels that contain `labels`; 0 where there is none yet.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        policyd::values(&self.metrics(), name, labels).map(|value| value.parse::<f64>().unwrap()).sum()
    }

    /// How many peers it is connected to.
    pub fn peers_up(&self) -> usize {
        self.metrics().lines().filter(|line| line.starts_with("vipgate_peer_up{") && line.ends_with(" 1")).count()
    }

    /// Whether it serves what policy has dealt to it.
    pub fn serves(&self) -> bool {
        policyd::get(&self.host, METRICS, "/readyz").is_ok_and(|(status, _)| status == 200)
    }

    /// The link address of one of its interfaces.
    pub fn link(&self, interface: &str) -> [u8; 6] {
        let text = self.host.output(&["cat", &format!("/sys/class/net/{interface}/address")]).unwrap();
        let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        bytes.try_into().unwrap()
    }

    /// Sessions that it has, copies included.
    pub fn sessions(&self) -> f64 {
        self.metric("vipgate_sessions", "")
    }

    /// Every packet buffer is accounted for.
    pub fn check_frames(&self) {
        let conserved = || {
            let place = |name: &str| self.metric("vipgate_frames", &format!("place=\"{name}\""));
            (place("pool") + place("device") + place("held") - place("total")).abs() < 0.5
        };
        assert!(wait_for(Duration::from_secs(3), conserved), "packet buffers of {} are missing", self.name);
    }
}
