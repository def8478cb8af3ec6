//! Version mismatch between gateway and command line: every command reports it and sends no request.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::thread;

use serde_json::{Value, json};
use tempfile::TempDir;
use vipgate::admin::PROTOCOL;

use crate::gateway::vipgate;

const COMMANDS: [&[&str]; 15] = [
    &["status"],
    &["sessions"],
    &["sessions", "flush", "--all"],
    &["vips"],
    &["endpoints"],
    &["services"],
    &["peers"],
    &["drain"],
    &["undrain"],
    &["drops"],
    &["ports"],
    &["trace", "--from", "10.1.0.11", "--to", "198.51.100.10"],
    &["explain", "10.1.0.11"],
    &["capture"],
    &["policy", "accept-empty"],
];

/// Runs every command against a process that sends this greeting; returns their stderr.
fn run_all_commands(greeting: &Value) -> Vec<String> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let greeting = format!("{greeting}\n");
    let server = thread::spawn(move || {
        for _ in COMMANDS {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting.as_bytes()).unwrap();
            let mut request = String::new();
            stream.read_to_string(&mut request).unwrap();
            assert_eq!(request, "", "no request after another greeting");
        }
    });
    let errors = COMMANDS.map(|command| {
        let (code, stdout, stderr) = vipgate(&[command, &["--socket", path.to_str().unwrap()]].concat());
        assert_eq!((code, stdout.as_str()), (1, ""), "{command:?}: {stderr}");
        stderr
    });
    server.join().unwrap();
    errors.into()
}

#[test]
fn a_newer_gateway_is_reported_with_both_versions() {
    // Nothing else of its greeting need have the same meaning.
    for stderr in run_all_commands(&json!({"protocol": PROTOCOL + 1, "version": "9.9.9", "since": 7})) {
        let gateway_version = format!("the gateway is vipgate 9.9.9 with version {} of the admin API", PROTOCOL + 1);
        let own_version = format!("this command is vipgate {} with version {PROTOCOL}", env!("CARGO_PKG_VERSION"));
        assert!(stderr.contains(&gateway_version) && stderr.contains(&own_version), "{stderr}");
        assert!(stderr.contains("gateway.sock"), "{stderr}");
    }
}

#[test]
fn another_service_of_vipgate_is_reported() {
    let greeting = json!({"protocol": PROTOCOL, "service": "agent", "version": "0.1.0", "name": "node-1", "pid": 7});
    for stderr in run_all_commands(&greeting) {
        assert!(stderr.contains("the gateway is one that doesn't support this request"), "{stderr}");
    }
}
