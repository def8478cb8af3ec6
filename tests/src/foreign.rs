//! Peers of the policy protocol that share no code with ours: Python's gRPC, and classes that protoc makes of Envoy's protos and
//! of the product's. They do what they are told, a line of JSON at a time, and tell what happens.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vipgate::lab::Host;

use crate::World;
use crate::traffic::script;

/// What names of types begin with.
pub const TYPE: &str = "type.googleapis.com/vipgate.policy.v1.";
/// The longest wait for what a peer tells.
const PATIENCE: Duration = Duration::from_secs(15);
/// Python as Debian has it, with Debian's grpcio.
const PYTHON: &str = "/usr/bin/python3";

/// A peer that runs; killed when dropped.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    events: Receiver<Value>,
    log: PathBuf,
}

impl Peer {
    /// A client of the server at `address`, on a host.
    pub fn client(world: &World, host: &Host, address: &str) -> Self {
        Self::start(world, host, "xds_client.py", address)
    }

    /// A server at `address`, on a host.
    pub fn server(world: &World, host: &Host, address: &str) -> Self {
        Self::start(world, host, "xds_server.py", address)
    }

    fn start(world: &World, host: &Host, name: &str, address: &str) -> Self {
        let classes = classes(world.folder.path());
        let log = world.folder.path().join(name).with_extension("log");
        let mut child = Command::new("ip")
            .args(["netns", "exec", host.netns(), PYTHON, &script(name), &classes.display().to_string(), address])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, events) = channel();
        // Ends with the peer, or when nobody listens any more.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        let peer = Self { child, events, log };
        assert_eq!(peer.next(), json!({"listening": true}));
        peer
    }

    /// Tells it what to do.
    pub fn tell(&mut self, command: &Value) {
        let mut line = command.to_string();
        line.push('\n');
        self.child.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    }

    /// What it tells next.
    pub fn next(&self) -> Value {
        let said = || fs::read_to_string(&self.log).unwrap_or_default();
        self.events.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("the peer tells nothing; it said:\n{}", said()))
    }

    /// The next thing of this kind that it tells; what comes before it is passed over.
    pub fn next_of(&self, kind: &str) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut event = self.next();
            if event.get(kind).is_some() {
                return event[kind].take();
            }
            assert!(Instant::now() < until, "nothing of kind {kind}");
        }
    }

    /// It tells nothing for a while.
    pub fn is_silent(&self, patience: Duration) {
        if let Ok(event) = self.events.recv_timeout(patience) {
            panic!("the peer tells {event}");
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes Python classes of the protos in a folder; where they are.
fn classes(folder: &Path) -> PathBuf {
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

/// Notes a file and all that it imports. What Google's own package has is there already.
fn collect(name: &str, roots: &[PathBuf], files: &mut BTreeSet<String>) {
    if name.starts_with("google/protobuf/") || !files.insert(name.to_owned()) {
        return;
    }
    let text = roots.iter().find_map(|root| fs::read_to_string(root.join(name)).ok());
    let text = text.unwrap_or_else(|| panic!("{name} is nowhere below {roots:?}"));
    for line in text.lines().filter(|line| line.starts_with("import ")) {
        collect(line.split('"').nth(1).unwrap(), roots, files);
    }
}

/// Where the crate with Envoy's protos has them.
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
