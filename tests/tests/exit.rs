//! State after a gateway exits: closed by default, open with `on_exit: pass`, nothing after `detach`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_lab::reflector::query_udp;
use vipgate_tests::{POD_FILTER, SERVER, Testbed, VIP_A, wait_for};

fn has_program(testbed: &Testbed) -> bool {
    vipgate_lab::output(&["ip", "-n", testbed.gateway.netns(), "-d", "link", "show", "gw-in"])
        .unwrap()
        .contains("vipgate_steer")
}

/// Sends packets that a kernel would forward: of neighbor discovery to others than neighbors, to a link-local address, to
/// a reserved one, and one that may be forwarded.
const ESCAPES: &str = r#"
import socket
for kind in (133, 134, 135, 136, 137):
    link = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    payload = bytes([kind, 0, 0, 0]) + bytes(4) + socket.inet_pton(socket.AF_INET6, "2001:db8:51::10")
    link.sendto(payload, ("2001:db8:51::10", 0))
for address in ("169.254.169.254", "240.0.0.1", "198.51.100.10"):
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.sendto(b"out?", (address, 9))
"#;

#[test]
fn link_local_lookalikes_do_not_leak() {
    let testbed = Testbed::with_gateway("escape");
    let capture = testbed.capture(POD_FILTER);
    let script = testbed.folder.path().join("escapes.py");
    std::fs::write(&script, ESCAPES).unwrap();
    testbed.accounting.expect_exactly([("not_ours", 5), ("martian", 2)]);
    testbed.pods[0].output(&["python3", &script.display().to_string()]).unwrap();
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    assert!(testbed.forwarded("egress") >= 1.0, "permitted packets are forwarded");
}

#[test]
fn after_sigkill_traffic_is_dropped_until_the_next_start() {
    let mut testbed = Testbed::with_gateway("kill");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let capture = testbed.capture(POD_FILTER);
    for _ in 0..2 {
        let pids = vipgate_lab::output(&["pgrep", "-f", &testbed.folder.path().display().to_string()]).unwrap();
        for pid in pids.split_whitespace() {
            // tcpdump uses the same directory, and keeps running.
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if name.trim() == "vipgate" {
                vipgate_lab::run(&["kill", "-9", pid]).unwrap();
            }
        }
        assert!(wait_for(Duration::from_secs(3), || !testbed.is_running()));
        for server in SERVER {
            assert!(query_udp(&testbed.pods[0], server.parse().unwrap()).is_err(), "closed without a gateway");
        }
        assert!(has_program(&testbed));
        testbed.start("");
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    }
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
}

#[test]
fn sigterm_stops_cleanly_and_detach_removes_the_program() {
    let mut testbed = Testbed::with_gateway("term");
    let status = testbed.stop("TERM");
    assert!(status.success(), "{status}: {}", testbed.log());
    assert!(!testbed.folder.path().join("gateway.sock").exists(), "the socket is removed");
    assert!(has_program(&testbed), "captured traffic stays dropped");
    assert!(query_udp(&testbed.pods[0], SERVER[0].parse().unwrap()).is_err());
    let config = testbed.write_config("");
    assert_eq!(testbed.command(&["detach", "--config", &config]).0, 0);
    assert!(!has_program(&testbed));
    assert_eq!(
        query_udp(&testbed.pods[0], SERVER[0].parse().unwrap()).unwrap(),
        "10.1.0.11",
        "the kernel forwards again"
    );
    let (code, stdout, _) = testbed.command(&["detach", "--config", &config]);
    assert_eq!(code, 0, "detach is idempotent");
    assert!(stdout.contains("nothing to remove"), "{stdout}");
}

#[test]
fn on_exit_pass_detaches_on_any_exit() {
    for signal in ["TERM", "KILL"] {
        let mut testbed = Testbed::new("pass");
        testbed.start("xdp: {on_exit: pass}");
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
        testbed.stop(signal);
        assert!(wait_for(Duration::from_secs(3), || !has_program(&testbed)), "{signal}");
        assert_eq!(query_udp(&testbed.pods[0], SERVER[0].parse().unwrap()).unwrap(), "10.1.0.11");
    }
}

#[test]
fn on_exit_can_change_between_starts() {
    let mut testbed = Testbed::with_gateway("change");
    for extra in ["xdp: {on_exit: pass}", "xdp: {on_exit: drop, mode: generic}", "xdp: {on_exit: drop}"] {
        testbed.stop("TERM");
        testbed.start(extra);
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    }
}
