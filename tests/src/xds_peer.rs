//! Independent xDS peers: Python's gRPC with classes that protoc generates from Envoy's and the product's protos.
//! They share no code with the product. Commands and events are one JSON object a line.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::{Value, json};
use vipgate_lab::Host;

use crate::Testbed;
use crate::traffic::script_path;

/// Prefix of the resource type URLs.
pub const TYPE_URL_PREFIX: &str = "type.googleapis.com/vipgate.policy.v1.";
/// Timeout for an event of a peer.
const EVENT_TIMEOUT: Duration = Duration::from_secs(15);
/// Debian's Python, with Debian's grpcio.
const PYTHON: &str = "/usr/bin/python3";

/// A running peer; killed on drop.
#[derive(Debug)]
pub struct XdsPeer {
    child: Child,
    events: Receiver<Value>,
    log: PathBuf,
}

impl XdsPeer {
    /// A client on a host, of the server at `address`.
    pub fn client(testbed: &Testbed, host: &Host, address: &str) -> Self {
        Self::start(testbed, host, "xds_client.py", address)
    }

    /// A server on a host, at `address`.
    pub fn server(testbed: &Testbed, host: &Host, address: &str) -> Self {
        Self::start(testbed, host, "xds_server.py", address)
    }

    fn start(testbed: &Testbed, host: &Host, name: &str, address: &str) -> Self {
        let classes = generate_classes(testbed.folder.path());
        let log = testbed.folder.path().join(name).with_extension("log");
        let mut child = Command::new("ip")
            .args(["netns", "exec", host.netns(), PYTHON, &script_path(name), &classes.display().to_string(), address])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, events) = channel();
        // Ends with the peer, or when the receiver is gone.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        let peer = Self { child, events, log };
        assert_eq!(peer.next_event(), json!({"listening": true}));
        peer
    }

    /// Sends it a command.
    pub fn send_command(&mut self, command: &Value) {
        let mut line = command.to_string();
        line.push('\n');
        self.child.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    }

    pub fn next_event(&self) -> Value {
        let log = || fs::read_to_string(&self.log).unwrap_or_default();
        self.events.recv_timeout(EVENT_TIMEOUT).unwrap_or_else(|_| panic!("no event from the peer; log:\n{}", log()))
    }

    /// Its next event of this kind; skips others.
    pub fn next_event_of(&self, kind: &str) -> Value {
        let deadline = Instant::now() + EVENT_TIMEOUT;
        loop {
            let mut event = self.next_event();
            if event.get(kind).is_some() {
                return event[kind].take();
            }
            assert!(Instant::now() < deadline, "no event of kind {kind}");
        }
    }

    /// Asserts that no event arrives for this long.
    pub fn assert_silent(&self, duration: Duration) {
        if let Ok(event) = self.events.recv_timeout(duration) {
            panic!("unexpected event: {event}");
        }
    }
}

impl Drop for XdsPeer {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Generates Python classes of the protos into a subfolder; returns its path.
fn generate_classes(folder: &Path) -> PathBuf {
    let out = folder.join("classes");
    if out.exists() {
        return out;
    }
    fs::create_dir(&out).unwrap();
    let envoy = envoy_protos();
    let mut roots: Vec<PathBuf> = fs::read_dir(envoy).unwrap().map(|entry| entry.unwrap().path()).collect();
    roots.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../control/proto"));
    let mut files = BTreeSet::new();
    for name in ["envoy/service/discovery/v3/discovery.proto", "vipgate/policy/v1/policy.proto"] {
        collect(name, &roots, &mut files);
    }
    let mut command = Command::new("protoc");
    command.arg(format!("--python_out={}", out.display()));
    command.args(roots.iter().flat_map(|root| ["-I".into(), root.clone()])).args(files);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    out
}

/// Collects a proto file and its imports. `google/protobuf/` comes with Python's package.
fn collect(name: &str, roots: &[PathBuf], files: &mut BTreeSet<String>) {
    if name.starts_with("google/protobuf/") || !files.insert(name.to_owned()) {
        return;
    }
    let text = roots.iter().find_map(|root| fs::read_to_string(root.join(name)).ok());
    let text = text.unwrap_or_else(|| panic!("{name} not found below {roots:?}"));
    for line in text.lines().filter(|line| line.starts_with("import ")) {
        collect(line.split('"').nth(1).unwrap(), roots, files);
    }
}

/// Folder of Envoy's protos in the `envoy-types` crate.
fn envoy_protos() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let package = metadata["packages"].as_array().unwrap().iter().find(|package| package["name"] == "envoy-types");
    let manifest = package.unwrap()["manifest_path"].as_str().unwrap();
    Path::new(manifest).parent().unwrap().join("proto")
}
