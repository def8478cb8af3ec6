//! An etcd member on a host's loopback. Its data directory is removed on drop.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use vipgate_lab::{Host, Process};

/// Client URL.
pub const ENDPOINT: &str = "http://127.0.0.1:2379";
/// Port of `ENDPOINT`.
const PORT: u16 = 2379;

/// An etcd member, running or not.
#[derive(Debug)]
pub struct Etcd {
    host: Host,
    endpoint: String,
    peer: String,
    flags: Vec<String>,
    data: TempDir,
    process: Option<Process>,
}

impl Etcd {
    /// Starts a member and waits until it is healthy.
    pub fn start(host: &Host) -> Self {
        Self::start_at(host, PORT, &[])
    }

    /// The same with another client port, its peer port behind it, and with additional flags.
    pub fn start_at(host: &Host, port: u16, flags: &[&str]) -> Self {
        let mut etcd = Self {
            host: host.clone(),
            endpoint: format!("http://127.0.0.1:{port}"),
            peer: format!("http://127.0.0.1:{}", port + 1),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            data: vipgate_lab::directory().unwrap(),
            process: None,
        };
        etcd.restart();
        etcd
    }

    /// Client URL.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Starts it with its existing data.
    pub fn restart(&mut self) {
        let data = self.data().display().to_string();
        let cluster = format!("test={}", self.peer);
        let mut command = vec![
            "etcd",
            "--name",
            "test",
            "--data-dir",
            &data,
            "--listen-client-urls",
            &self.endpoint,
            "--advertise-client-urls",
            &self.endpoint,
            "--listen-peer-urls",
            &self.peer,
            "--initial-advertise-peer-urls",
            &self.peer,
            "--initial-cluster",
            &cluster,
            "--logger",
            "zap",
            "--log-level",
            "warn",
        ];
        command.extend(self.flags.iter().map(String::as_str));
        let mut process = self.host.spawn(&command, &self.data.path().join("log")).unwrap();
        let is_healthy = || self.try_etcdctl(&["endpoint", "health"]).is_ok();
        process.wait_ready(Duration::from_secs(30), is_healthy).unwrap_or_else(|error| panic!("{error}"));
        self.process = Some(process);
    }

    /// Sends SIGKILL and waits for its exit.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("etcd runs");
        process.stop("KILL", Duration::from_secs(5)).unwrap().expect("etcd exits");
    }

    fn try_etcdctl(&self, arguments: &[&str]) -> Result<String, vipgate_lab::Error> {
        self.host.output(&[&["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", &self.endpoint], arguments].concat())
    }

    /// Runs `etcdctl`; its stdout.
    pub fn etcdctl(&self, arguments: &[&str]) -> String {
        self.try_etcdctl(arguments).unwrap()
    }

    /// Puts each document of a manifest under its key; returns the keys.
    pub fn put(&self, manifest: &str) -> Vec<String> {
        let documents = manifest.split("\n---\n").filter(|document| document.contains("kind:"));
        let put = |document: &str| {
            let key = key(document);
            self.etcdctl(&["put", &key, document]);
            key
        };
        documents.map(put).collect()
    }

    /// Deletes a key.
    pub fn delete(&self, key: &str) {
        assert_eq!(self.etcdctl(&["del", key]).trim(), "1", "{key} was there");
    }

    /// Compacts the history up to the current revision.
    pub fn compact(&self) {
        let status = self.etcdctl(&["endpoint", "status", "-w", "json"]);
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let revision = status[0]["Status"]["header"]["revision"].as_u64().unwrap();
        self.etcdctl(&["compact", &revision.to_string()]);
    }

    /// Saves a snapshot of all keys, with their revisions.
    pub fn save_snapshot(&self, file: &Path) {
        self.etcdctl(&["snapshot", "save", &file.display().to_string()]);
    }

    /// Replaces all data by a snapshot: keys and the revision go back. The member is killed and started again.
    pub fn restore_snapshot(&mut self, file: &Path) {
        self.kill();
        fs::remove_dir_all(self.data()).unwrap();
        let (file, data) = (file.display().to_string(), self.data().display().to_string());
        let cluster = format!("test={}", self.peer);
        let command = ["snapshot", "restore", &file, "--name", "test", "--data-dir", &data, "--initial-cluster"];
        self.etcdctl(&[&command[..], &[&cluster, "--initial-advertise-peer-urls", &self.peer]].concat());
        self.restart();
    }

    /// Its data directory.
    pub fn data(&self) -> PathBuf {
        self.data.path().join("data")
    }
}

/// The etcd key of a document: kind, namespace and name.
fn key(document: &str) -> String {
    // `namespace: x` on a line of its own, or inside of braces.
    let field = |name: &str| {
        let words = document.lines().filter(|line| !line.starts_with('#')).flat_map(|line| line.split([',', '{', '}']));
        let mut values = words.filter_map(|word| word.trim().strip_prefix(name)?.strip_prefix(": "));
        values.next().unwrap_or_default().trim().to_owned()
    };
    let (kind, namespace, name) = (field("kind"), field("namespace"), field("name"));
    let path = if namespace.is_empty() { name } else { format!("{namespace}/{name}") };
    format!("/vipgate/{kind}/{path}")
}
