//! An etcd member on a host's loopback. Its data directory is removed on drop.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use vipgate::lab::{Host, Process};

use crate::wait_for;

/// Client URL.
pub const ENDPOINT: &str = "http://127.0.0.1:2379";
const PEER: &str = "http://127.0.0.1:2380";

/// An etcd member, running or not.
#[derive(Debug)]
pub struct Etcd {
    host: Host,
    data: TempDir,
    process: Option<Process>,
}

impl Etcd {
    /// Starts a member and waits until it is healthy.
    pub fn start(host: &Host) -> Self {
        let data = TempDir::with_prefix("vipgate-etcd-").unwrap();
        let mut etcd = Self { host: host.clone(), data, process: None };
        etcd.restart();
        etcd
    }

    /// Starts it with its existing data.
    pub fn restart(&mut self) {
        let data = self.data.path().join("data").display().to_string();
        let command = [
            "etcd",
            "--name",
            "test",
            "--data-dir",
            &data,
            "--listen-client-urls",
            ENDPOINT,
            "--advertise-client-urls",
            ENDPOINT,
            "--listen-peer-urls",
            PEER,
            "--initial-advertise-peer-urls",
            PEER,
            "--initial-cluster",
            &format!("test={PEER}"),
            "--logger",
            "zap",
            "--log-level",
            "warn",
        ];
        let log = self.data.path().join("log");
        self.process = Some(self.host.spawn(&command, &log).unwrap());
        let healthy = wait_for(Duration::from_secs(30), || self.try_etcdctl(&["endpoint", "health"]).is_ok());
        assert!(healthy, "etcd is not healthy: {}", fs::read_to_string(log).unwrap());
    }

    /// Sends SIGKILL and waits for its exit.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("etcd runs");
        process.signal("KILL").unwrap();
        process.wait(Duration::from_secs(5)).expect("etcd exits");
    }

    fn try_etcdctl(&self, arguments: &[&str]) -> Result<String, vipgate::lab::Error> {
        self.host.output(&[&["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", ENDPOINT], arguments].concat())
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
