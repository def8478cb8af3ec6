//! A member of etcd on a host's loopback, with data that vanish with it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use vipgate::lab::{Host, Process};

use crate::wait_for;

/// Where it listens for clients.
pub const ENDPOINT: &str = "http://127.0.0.1:2379";
const PEER: &str = "http://127.0.0.1:2380";

/// etcd, running or not.
#[derive(Debug)]
pub struct Etcd {
    host: Host,
    data: TempDir,
    process: Option<Process>,
}

impl Etcd {
    /// One that answers.
    pub fn start(host: &Host) -> Self {
        let data = TempDir::with_prefix("vipgate-etcd-").unwrap();
        let mut etcd = Self { host: host.clone(), data, process: None };
        etcd.start_again();
        etcd
    }

    /// Starts it with the data that it had.
    pub fn start_again(&mut self) {
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
        let healthy = wait_for(Duration::from_secs(30), || self.try_ctl(&["endpoint", "health"]).is_ok());
        assert!(healthy, "etcd doesn't answer: {}", fs::read_to_string(log).unwrap());
    }

    /// Kills it at once.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("etcd runs");
        process.signal("KILL").unwrap();
        process.wait(Duration::from_secs(5)).expect("it is dead");
    }

    fn try_ctl(&self, arguments: &[&str]) -> Result<String, vipgate::lab::Error> {
        self.host.output(&[&["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", ENDPOINT], arguments].concat())
    }

    /// `etcdctl`; what it says.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.try_ctl(arguments).unwrap()
    }

    /// Puts each document of a manifest under its key; the keys.
    pub fn put(&self, manifest: &str) -> Vec<String> {
        let documents = manifest.split("\n---\n").filter(|document| document.contains("kind:"));
        let put = |document: &str| {
            let key = key(document);
            self.ctl(&["put", &key, document]);
            key
        };
        documents.map(put).collect()
    }

    /// Deletes a key.
    pub fn delete(&self, key: &str) {
        assert_eq!(self.ctl(&["del", key]).trim(), "1", "{key} was there");
    }

    /// Forgets all that is past.
    pub fn compact(&self) {
        let status = self.ctl(&["endpoint", "status", "-w", "json"]);
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let revision = status[0]["Status"]["header"]["revision"].as_u64().unwrap();
        self.ctl(&["compact", &revision.to_string()]);
    }

    /// Where its data are.
    pub fn data(&self) -> PathBuf {
        self.data.path().join("data")
    }
}

/// The key of a document: its kind, namespace and name.
fn key(document: &str) -> String {
    // `namespace: x` on a line of its own, or in braces with others.
    let field = |name: &str| {
        let words = document.lines().filter(|line| !line.starts_with('#')).flat_map(|line| line.split([',', '{', '}']));
        let mut values = words.filter_map(|word| word.trim().strip_prefix(name)?.strip_prefix(": "));
        values.next().unwrap_or_default().trim().to_owned()
    };
    let (kind, namespace, name) = (field("kind"), field("namespace"), field("name"));
    let place = if namespace.is_empty() { name } else { format!("{namespace}/{name}") };
    format!("/vipgate/{kind}/{place}")
}
