//! The admin socket: its file, and errors of the command line when no gateway listens on it.

use std::io::Write;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use tempfile::TempDir;

use crate::gateway::{Gateway, Worker, vipgate};

const COMMANDS: [&[&str]; 6] =
    [&["status"], &["sessions"], &["sessions", "flush", "--all"], &["vips"], &["endpoints"], &["drops"]];

fn bind(path: &Path) -> Result<vipgate::admin::Socket, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(vipgate::admin::bind(path)).map_err(|error| error.to_string())
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn the_socket_is_accessible_to_root_and_its_group_and_removed_on_exit() {
    let mut gateway = Gateway::start(&[Worker::Replies(vec![], 1)]);
    let path = gateway.socket();
    assert!(fs::metadata(&path).unwrap().file_type().is_socket());
    assert_eq!(mode(&path), 0o660);
    assert_eq!(mode(path.parent().unwrap()) & !0o755, 0, "the folder is only writable by its owner");
    gateway.stop();
    assert!(!path.exists());
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0, "no other file is left");
    assert_eq!(gateway.vipgate(&["status"]).0, 1);
}

#[test]
fn the_socket_of_a_dead_gateway_is_replaced() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    // A killed gateway leaves the socket file without a listener.
    drop(UnixListener::bind(&path).unwrap());
    let (code, _, stderr) = vipgate(&["status", "--socket", path.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(stderr.contains("no gateway runs there any more"), "{stderr}");
    let socket = bind(&path).unwrap();
    assert_eq!(mode(&path), 0o660);
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn a_leftover_temporary_socket_is_replaced() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    drop(UnixListener::bind(folder.path().join("gateway.sock~")).unwrap());
    let _socket = bind(&path).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn the_socket_of_a_running_gateway_is_not_replaced() {
    let gateway = Gateway::start(&[Worker::Replies(vec![], 1)]);
    let error = bind(&gateway.socket()).unwrap_err();
    let owner = format!("the gateway gw-a (pid {})", std::process::id());
    assert!(error.contains(&owner) && error.contains(gateway.socket().to_str().unwrap()), "{error}");
    assert_eq!(gateway.json(&["status"])["name"], "gw-a", "it still replies");
}

#[test]
fn the_socket_of_an_unresponsive_process_is_not_replaced() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let start = Instant::now();
    assert!(bind(&path).unwrap_err().contains("another process answers on"));
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(path.exists());
}

#[test]
fn a_file_that_is_no_socket_is_never_removed() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("precious.yaml");
    fs::write(&path, "precious").unwrap();
    let error = bind(&path).unwrap_err();
    assert!(error.contains("precious.yaml exists and is no socket"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    fs::create_dir(folder.path().join("folder")).unwrap();
    assert!(bind(&folder.path().join("folder")).unwrap_err().contains("is no socket"));
}

#[test]
fn a_socket_replaced_by_another_process_is_not_removed() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    let ours = bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let _theirs = UnixListener::bind(&path).unwrap();
    drop(ours);
    assert!(path.exists());
}

#[test]
fn no_gateway_is_exit_code_1_with_the_path() {
    for command in COMMANDS {
        let (code, stdout, stderr) = vipgate(&[command, &["--socket", "/nowhere/gateway.sock"]].concat());
        assert_eq!((code, stdout.as_str()), (1, ""), "{command:?}");
        assert!(stderr.starts_with("vipgate: /nowhere/gateway.sock: there is no such socket"), "{stderr}");
        assert!(stderr.contains("is a gateway running"), "{stderr}");
    }
}

#[test]
fn wrong_usage_is_exit_code_2_with_or_without_a_gateway() {
    let wrong: [&[&str]; 14] = [
        &[],
        &["no-such-command"],
        &["gateway"],
        &["check"],
        &["status", "--socket"],
        &["status", "-o", "yaml"],
        &["sessions", "--proto", "tpc"],
        &["sessions", "--proto", "256"],
        &["sessions", "--state", "open"],
        &["sessions", "--endpoint", "10.0.0"],
        &["sessions", "--limit", "-1"],
        &["sessions", "flush", "--limit", "3"],
        &["sessions", "flush"],
        &["sessions", "flush", "--all", "--proto", "udp"],
    ];
    for arguments in wrong {
        let (code, stdout, stderr) = vipgate(arguments);
        assert_eq!((code, stdout.as_str()), (2, ""), "{arguments:?}");
        assert!(!stderr.is_empty(), "{arguments:?}");
    }
    for arguments in [&["--version"][..], &["--help"], &["sessions", "--help"], &["sessions", "flush", "--help"]] {
        let (code, stdout, stderr) = vipgate(arguments);
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
        assert!(!stdout.is_empty());
    }
}

#[test]
fn help_lists_every_command() {
    let (_, help, _) = vipgate(&["--help"]);
    let commands = [
        "gateway",
        "policyd",
        "policy",
        "detach",
        "check",
        "demo",
        "status",
        "sessions",
        "vips",
        "endpoints",
        "services",
        "peers",
        "drain",
        "undrain",
        "ports",
        "drops",
        "trace",
        "explain",
        "capture",
        "completions",
        "man",
    ];
    for command in commands {
        assert!(help.contains(&format!("\n  {command} ")), "{command}: {help}");
        assert_eq!(vipgate(&[command, "--help"]).0, 0, "{command}");
    }
    // Internal commands are hidden.
    assert!(!help.contains("withdraw"), "{help}");
}

#[test]
fn an_unresponsive_gateway_times_out() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let start = Instant::now();
    let (code, _, stderr) = vipgate(&["status", "--socket", path.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(stderr.contains("gateway.sock: no reply within 10 s"), "{stderr}");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn another_program_on_the_socket_is_reported() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            // Sends a banner of another protocol, and closes.
            let _ = stream.unwrap().write_all(b"220 ready for mail\r\n");
        }
    });
    let (code, _, stderr) = vipgate(&["status", "--socket", path.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(stderr.contains("gateway.sock") && stderr.contains("another program listens there"), "{stderr}");
}
