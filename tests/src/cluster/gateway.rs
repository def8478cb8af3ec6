//! One gateway of a cluster: configuration, process, queries.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use vipgate_lab::{Host, Process, READY};

use super::{PEER_PORT, POLICYD_ADDRESS, unix_time};
use crate::drop_accounting::DropAccounting;
use crate::{METRICS_PORT, binary, policyd, wait_for};

/// A gateway, running or not.
#[derive(Debug)]
pub struct Gateway {
    /// Its name: `gw-1` and so on.
    pub name: String,
    pub host: Host,
    /// Its address in the peer network.
    pub peer_address: String,
    /// Command prefix of its process, such as `env` with variables.
    pub wrapper: Vec<String>,
    drop_accounting: Arc<DropAccounting>,
    process: Option<Process>,
    number: usize,
    folder: PathBuf,
    state: TempDir,
    start_count: u32,
    suspended: bool,
}

impl Gateway {
    pub(super) fn new(host: Host, number: usize, folder: &Path, drop_accounting: Arc<DropAccounting>) -> Self {
        let name = host.name().to_owned();
        let folder = folder.join(&name);
        fs::create_dir(&folder).unwrap();
        Self {
            host,
            name,
            peer_address: format!("10.2.0.{number}"),
            wrapper: Vec::new(),
            drop_accounting,
            process: None,
            number,
            folder,
            state: vipgate_lab::memory_directory().unwrap(),
            start_count: 0,
            suspended: false,
        }
    }

    /// Writes its configuration with `extra` YAML appended, whose fields replace those of the same name; returns its
    /// path.
    pub fn config(&self, extra: &str) -> String {
        let Self { name, number, folder, peer_address, .. } = self;
        let (folder, state) = (folder.display(), self.state.path().display());
        // Gateways are spread over the cores of a small machine.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let fields = [
            format!("name: {name}"),
            "interfaces: [{name: gw-in, role: inside}, {name: gw-out, role: outside}, {name: gw-peer, role: inside}]"
                .into(),
            format!("workers: {{cores: [{}], idle: adaptive}}", (number - 1) % cores),
            format!("policy: {{server: {{url: \"http://{POLICYD_ADDRESS}\", cache: {folder}/policy.cache}}}}"),
            format!("sessions: {{capacity: 65536, state: {state}}}"),
            format!("peer: {{address: {peer_address}, port: {PEER_PORT}}}"),
            format!("admin: {{socket: {folder}/gateway.sock}}"),
            format!("metrics: {{listen: \"127.0.0.1:{METRICS_PORT}\"}}"),
            "log: {format: json}".into(),
        ];
        let replaced = |field: &str| {
            let key = field.split(':').next().unwrap_or_default();
            extra.lines().any(|line| line.starts_with(&format!("{key}:")))
        };
        let kept: Vec<&str> = fields.iter().map(String::as_str).filter(|field| !replaced(field)).collect();
        let path = self.folder.join("gateway.yaml");
        fs::write(&path, format!("{}\n{extra}\n", kept.join("\n"))).unwrap();
        path.display().to_string()
    }

    /// Starts its process without waiting, with `extra` YAML in its configuration.
    pub fn spawn(&mut self, extra: &str) {
        let config = self.config(extra);
        self.start_count += 1;
        self.suspended = false;
        let program = binary().display().to_string();
        let wrapper = self.wrapper.iter().map(String::as_str);
        let command: Vec<&str> = wrapper.chain([program.as_str(), "gateway", "--config", &config]).collect();
        self.process = Some(self.host.spawn(&command, &self.log_path()).unwrap());
    }

    /// Waits until it has logged `ready`.
    pub fn wait_ready(&mut self) {
        let process = self.process.as_mut().expect("the gateway was started");
        process.wait_for_log(READY, Duration::from_secs(20)).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Starts it and waits until it is ready.
    pub fn start(&mut self, extra: &str) {
        self.spawn(extra);
        self.wait_ready();
    }

    /// Sends SIGKILL and waits for its exit; returns the time of the signal.
    pub fn kill(&mut self) -> f64 {
        self.stop("KILL")
    }

    /// Records its counters, sends a signal and waits for its exit; returns the time of the signal.
    #[track_caller]
    pub fn stop(&mut self, signal: &str) -> f64 {
        self.record_counters();
        let mut process = self.process.take().expect("the gateway runs");
        let signal_time = unix_time();
        process.stop(signal, Duration::from_secs(10)).unwrap().expect("the gateway exits");
        signal_time
    }

    /// Records its drop and error counters, if the process can be queried.
    #[track_caller]
    pub(super) fn record_counters(&mut self) {
        let can_be_queried = self.process.as_mut().is_some_and(Process::is_alive) && !self.suspended;
        if can_be_queried && self.log().contains(READY) {
            self.drop_accounting.record(&self.name, &self.host, || self.command(&["drops"]).1);
        }
    }

    /// Suspends its process (SIGSTOP).
    pub fn suspend(&mut self) {
        self.process.as_ref().expect("the gateway runs").signal("STOP").unwrap();
        self.suspended = true;
    }

    /// Resumes its process (SIGCONT).
    pub fn resume(&mut self) {
        self.process.as_ref().expect("the gateway runs").signal("CONT").unwrap();
        self.suspended = false;
    }

    /// Its process ID.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Whether its process is alive.
    pub fn is_alive(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_alive)
    }

    /// Whether its process was started and is not suspended.
    pub fn is_running(&self) -> bool {
        self.process.is_some() && !self.suspended
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join(format!("gateway-{}.log", self.start_count))
    }

    /// Its log since its last start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The last lines of its log, for messages.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Runs `vipgate` on its host: exit code, stdout and stderr.
    pub fn command(&self, arguments: &[&str]) -> (i32, String, String) {
        let [program, socket] = [binary(), self.folder.join("gateway.sock")].map(|path| path.display().to_string());
        self.host.execute(&[&[program.as_str()], arguments, &["--socket", &socket]].concat()).unwrap()
    }

    /// Runs a query command with `-o json`; the parsed output.
    pub fn query(&self, command: &[&str]) -> Value {
        let (code, stdout, stderr) = self.command(&[command, &["-o", "json"]].concat());
        assert_eq!(code, 0, "{} {command:?}: {stderr}", self.name);
        serde_json::from_str(&stdout).unwrap()
    }

    /// GET on its metrics listener; the HTTP status and the body.
    pub fn http_get(&self, page: &str) -> (u16, String) {
        policyd::http_get(&self.host, METRICS_PORT, page).unwrap()
    }

    pub fn metrics(&self) -> String {
        policyd::http_get(&self.host, METRICS_PORT, "/metrics").unwrap().1
    }

    /// The sum of a metric's values over all labels that contain `labels`; 0 without a series.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        policyd::metric_values(&self.metrics(), name, labels).map(|value| value.parse::<f64>().unwrap()).sum()
    }

    /// Number of connected peers.
    pub fn peers_up(&self) -> usize {
        self.metrics().lines().filter(|line| line.starts_with("vipgate_peer_up{") && line.ends_with(" 1")).count()
    }

    /// Whether `/readyz` returns 200: it serves its assigned shards.
    pub fn is_ready(&self) -> bool {
        policyd::http_get(&self.host, METRICS_PORT, "/readyz").is_ok_and(|(status, _)| status == 200)
    }

    /// MAC address of one of its interfaces.
    pub fn mac(&self, interface: &str) -> [u8; 6] {
        let text = self.host.output(&["cat", &format!("/sys/class/net/{interface}/address")]).unwrap();
        let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        bytes.try_into().unwrap()
    }

    /// Number of sessions, standby sessions included.
    pub fn sessions(&self) -> f64 {
        self.metric("vipgate_sessions", "")
    }

    /// Asserts that every UMEM frame is accounted for.
    pub fn check_frames(&self) {
        let conserved = || {
            let place = |name: &str| self.metric("vipgate_frames", &format!("place=\"{name}\""));
            (place("pool") + place("device") + place("held") - place("total")).abs() < 0.5
        };
        assert!(wait_for(Duration::from_secs(3), conserved), "frames of {} are missing", self.name);
    }
}
