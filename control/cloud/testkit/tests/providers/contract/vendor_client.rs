//! Runs the clients of providers.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// The interpreter with the clients.
fn python() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../target/cloud-clients/bin/python");
    let python = std::env::var_os("VIPGATE_CLOUD_PYTHON").map_or_else(default, PathBuf::from);
    assert!(python.exists(), "{} is missing: run `make cloud-clients`", python.display());
    python
}

fn script(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(python());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/providers/contract").join(name);
    command.arg(script).args(arguments).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Runs a script to its end; what it prints is JSON.
pub(crate) async fn run(name: &str, arguments: &[&str]) -> Value {
    let mut command = tokio::process::Command::from(script(name, arguments));
    let output = command.kill_on_drop(true).output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A script that goes on until it is dropped.
pub(crate) struct Service(Child);

impl Service {
    /// Starts a script; returns the line of JSON that it prints when it is ready.
    pub(crate) fn start(name: &str, arguments: &[&str]) -> (Self, Value) {
        let mut child = script(name, arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        (Self(child), ready)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Compares what a client sent with what is written down of it, or writes it down.
pub(crate) fn assert_golden(provider: &str, sent: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/providers/contract/golden/{provider}.json"));
    let text = format!("{sent:#}\n");
    if std::env::var("VIPGATE_GOLDEN").is_ok_and(|value| value == "write") {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(written, text, "{} differs: `make cloud-contract` writes it anew", path.display());
}
