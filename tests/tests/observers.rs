//! No observer ends or holds up a process: a log on a full disk, in a closed pipe, or whose reader has stopped. Nor does
//! what other users of the host leave in place of the session state.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read as _, Write as _, pipe};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use vipgate_tests::{SERVER, Testbed, VIP_A, binary, wait_for};

/// Far more than any step takes on a slow machine.
const TIMEOUT: Duration = Duration::from_secs(20);
/// What a pipe holds.
const PIPE_SIZE: usize = 1 << 16;
const LOST: &str = "vipgate_log_lines_lost_total";

/// Starts a gateway with its stderr in a file, and waits until it is ready by its own word: the testbed has no log.
fn start_with_stderr(tag: &str, stderr: &Path) -> Testbed {
    let mut testbed = Testbed::new(tag);
    let script = format!("exec \"$@\" 2>{}", stderr.display());
    testbed.wrapper = ["sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
    if testbed.uses_policy_server {
        testbed.start_policyd("");
    }
    testbed.spawn_gateway("");
    let socket = testbed.socket();
    let is_ready = || {
        let (code, stdout, _) = testbed.command(&["status", "--socket", &socket, "-o", "json"]);
        code == 0 && serde_json::from_str::<Value>(&stdout).unwrap()["ready"] == true
    };
    assert!(wait_for(TIMEOUT, is_ready), "the gateway is not ready");
    testbed
}

/// Traffic passes, lines are lost, and SIGHUP, which is logged, changes nothing of that.
#[track_caller]
fn check_gateway(testbed: &mut Testbed) {
    for _ in 0..2 {
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
        testbed.process().signal("HUP").unwrap();
        assert!(wait_for(TIMEOUT, || testbed.metric(LOST, "") > 0.5), "no line is lost");
    }
    assert!(testbed.is_running());
}

/// A named pipe, open for both ends.
fn named_pipe(path: &Path) -> File {
    vipgate_lab::run(&["mkfifo", &path.display().to_string()]).unwrap();
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[test]
fn a_gateway_runs_with_its_log_on_a_full_disk() {
    let mut testbed = start_with_stderr("logfull", Path::new("/dev/full"));
    check_gateway(&mut testbed);
    assert!(testbed.stop("TERM").success());
}

#[test]
fn a_gateway_runs_with_its_log_in_a_closed_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let reader = named_pipe(&path);
    let mut testbed = start_with_stderr("logpipe", &path);
    drop(reader);
    check_gateway(&mut testbed);
    assert!(testbed.stop("TERM").success());
}

#[test]
fn a_gateway_runs_while_the_reader_of_its_log_has_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let mut pipe = named_pipe(&path);
    pipe.write_all(&vec![b'x'; PIPE_SIZE]).unwrap();
    let mut testbed = start_with_stderr("logstop", &path);
    check_gateway(&mut testbed);
    // It reads again.
    let mut reader = File::open(&path).unwrap();
    drop(pipe);
    let reading = thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).map(|_| text)
    });
    assert!(testbed.stop("TERM").success());
    let text = reading.join().unwrap().unwrap();
    assert!(text.contains("\"event\":\"stopped\""), "the last lines come out: {}", text.trim_start_matches('x'));
}

/// A policy server in a separate process.
struct Policyd {
    process: Child,
    metrics: SocketAddr,
    _folder: TempDir,
}

impl Policyd {
    fn start(stderr: impl Into<Stdio>) -> Self {
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let (folder, listen, metrics) = (tempfile::tempdir().unwrap(), free(), free());
        let (config, policy) = (folder.path().join("policyd.yaml"), folder.path().join("policy.yaml"));
        fs::write(&policy, "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {name: gw-a}\nspec: {}\n")
            .unwrap();
        let text = format!(
            "listen: \"{listen}\"\nmetrics: {{listen: \"{metrics}\"}}\nlog: {{format: json}}\n\
             source: {{files: [{}]}}\nstate: {}\n",
            policy.display(),
            folder.path().join("state").display()
        );
        fs::write(&config, text).unwrap();
        let process = Command::new(binary()).args(["policyd", "--config"]).arg(config).stderr(stderr).spawn().unwrap();
        let policyd = Self { process, metrics, _folder: folder };
        let is_ready = || policyd.page("/readyz").is_some_and(|page| page.starts_with("HTTP/1.1 200"));
        assert!(wait_for(TIMEOUT, is_ready), "the policy server is not ready");
        policyd
    }

    fn page(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.metrics).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    }

    fn lost_lines(&self) -> u64 {
        let page = self.page("/metrics").unwrap();
        page.lines().find_map(|line| line.strip_prefix(LOST)).unwrap().trim().parse().unwrap()
    }

    /// Stops it with SIGTERM; returns whether it ended without an error.
    fn stop(mut self) -> bool {
        vipgate_lab::run(&["kill", "-TERM", &self.process.id().to_string()]).unwrap();
        wait_for(TIMEOUT, || matches!(self.process.try_wait(), Ok(Some(_)))) && self.process.wait().unwrap().success()
    }
}

impl Drop for Policyd {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_policy_server_runs_without_anybody_who_takes_its_log() {
    let full = Policyd::start(OpenOptions::new().write(true).open("/dev/full").unwrap());
    assert!(full.lost_lines() > 0);
    assert!(full.stop(), "on a full disk");

    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let closed = Policyd::start(writer);
    assert!(closed.lost_lines() > 0);
    assert!(closed.stop(), "in a closed pipe");

    let (mut reader, mut writer) = pipe().unwrap();
    writer.write_all(&vec![b'x'; PIPE_SIZE]).unwrap();
    let stopped = Policyd::start(writer);
    assert!(stopped.lost_lines() > 0);
    let (drained, is_drained) = mpsc::channel();
    let reading = thread::spawn(move || {
        let mut text = String::new();
        reader.read_exact(&mut vec![0; PIPE_SIZE]).unwrap();
        drained.send(()).unwrap();
        reader.read_to_string(&mut text).map(|_| text)
    });
    is_drained.recv().unwrap();
    assert!(stopped.stop(), "with a reader that has stopped");
    let text = reading.join().unwrap().unwrap();
    assert!(text.contains("\"event\":\"stopped\""), "the last lines come out: {text}");
}

/// Puts something in the place of the directory.
type Obstacle<'a> = &'a dyn Fn(&Path);

#[test]
fn a_gateway_serves_whatever_is_in_place_of_its_session_state() {
    let shared = TempDir::with_prefix_in("vipgate-test-", "/dev/shm").unwrap();
    fs::set_permissions(shared.path(), Permissions::from_mode(0o1777)).unwrap();
    let (state, target) = (shared.path().join("vipgate"), shared.path().join("of-root"));
    let precious = target.join("worker-0");
    fs::create_dir(&target).unwrap();
    fs::write(&precious, "precious").unwrap();
    let link = |state: &Path| symlink(&target, state).unwrap();
    let foreign = |state: &Path| {
        fs::create_dir_all(state.join("gw-test")).unwrap();
        symlink(&precious, state.join("gw-test/worker-0")).unwrap();
        chown(state.join("gw-test"), Some(65_534), None).unwrap();
    };
    let file = |state: &Path| fs::write(state, "in the way").unwrap();
    let cases: [(&str, Obstacle<'_>); 3] = [("a link", &link), ("a foreign directory", &foreign), ("a file", &file)];
    let mut testbed = Testbed::new("squatter");
    let more = format!("sessions: {{capacity: 65536, state: {}}}", state.display());
    for (what, make) in cases {
        make(&state);
        testbed.start(&more);
        let log = testbed.log();
        assert!(log.contains("state_set_aside") && log.contains("state_new"), "{what}: {log}");
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
        // The next process finds the sessions.
        testbed.stop("KILL");
        testbed.start(&more);
        let log = testbed.log();
        assert!(log.contains("state_restored") && !log.contains("state_set_aside"), "{what}: {log}");
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
        testbed.stop("KILL");
        for directory in [&state, &state.join("gw-test")] {
            assert_eq!(fs::metadata(directory).unwrap().permissions().mode() & 0o777, 0o700, "{what}");
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious", "{what}");
        fs::remove_dir_all(&state).unwrap();
    }
    // What only an operator can have made is neither used nor renamed.
    fs::set_permissions(shared.path(), Permissions::from_mode(0o755)).unwrap();
    symlink(&target, &state).unwrap();
    testbed.start(&more);
    let log = testbed.log();
    assert!(log.contains("state_lost") && log.contains("it is a symbolic link"), "{log}");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.stop("KILL");
    assert!(state.is_symlink() && fs::read_to_string(&precious).unwrap() == "precious");
}
