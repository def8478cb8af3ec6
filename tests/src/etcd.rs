//! An etcd member on a host's loopback, with manifests. Its data directory is removed on drop.

use tempfile::TempDir;
use vipgate_lab::{Host, etcd};

/// Client URL.
pub const ENDPOINT: &str = "http://127.0.0.1:2379";
/// Port of `ENDPOINT`.
const PORT: u16 = 2379;

/// An etcd member, running or not.
#[derive(Debug)]
pub struct Etcd {
    member: etcd::Etcd,
    _directory: TempDir,
}

impl Etcd {
    /// Starts a member and waits until it is healthy.
    pub fn start(host: &Host) -> Self {
        let directory = vipgate_lab::directory().unwrap();
        let member = etcd::Etcd::start(host, PORT, directory.path(), &[]).unwrap_or_else(|error| panic!("{error}"));
        Self { member, _directory: directory }
    }

    /// Starts it with its existing data.
    pub fn restart(&mut self) {
        self.member.restart().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Sends SIGKILL and waits for its exit.
    pub fn kill(&mut self) {
        self.member.kill().unwrap();
    }

    /// Runs `etcdctl`; its stdout.
    pub fn etcdctl(&self, arguments: &[&str]) -> String {
        self.member.etcdctl(arguments).unwrap()
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
