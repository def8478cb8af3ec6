//! What is left when a gateway ends: closed by default, open where asked, nothing where detached.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::peers::ask_udp;
use vipgate_tests::{POD_PACKETS, SERVER, VIP_A, World, wait_for};

fn has_program(world: &World) -> bool {
    vipgate::lab::output(&["ip", "-n", world.gateway.netns(), "-d", "link", "show", "gw-in"])
        .unwrap()
        .contains("vipgate_steer")
}

/// Packets that look as if they stayed on the link, but that a kernel forwards.
const ESCAPES: &str = r#"
import socket
for kind in (133, 134, 135, 136, 137):
    link = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    link.sendto(bytes([kind, 0, 0, 0]) + bytes(4) + socket.inet_pton(socket.AF_INET6, "2001:db8:51::10"), ("2001:db8:51::10", 0))
for address in ("169.254.169.254", "240.0.0.1", "198.51.100.10"):
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.sendto(b"out?", (address, 9))
"#;

#[test]
fn nothing_escapes_by_looking_like_a_link_local_packet() {
    let world = World::with_gateway("escape");
    let capture = world.capture(POD_PACKETS);
    let script = world.folder.path().join("escapes.py");
    std::fs::write(&script, ESCAPES).unwrap();
    // Of the others, the gateway routes the two to addresses that are somewhere.
    world.ledger.expect_exactly([("not_ours", 5), ("martian", 1)]);
    world.pods[0].output(&["python3", &script.display().to_string()]).unwrap();
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    assert!(world.forwarded("egress") >= 1.0, "what may leave did");
}

#[test]
fn after_kill_9_nothing_leaves_until_the_next_gateway_takes_over() {
    let mut world = World::with_gateway("kill");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    let capture = world.capture(POD_PACKETS);
    for _ in 0..2 {
        let pids = vipgate::lab::output(&["pgrep", "-f", &world.folder.path().display().to_string()]).unwrap();
        for pid in pids.split_whitespace() {
            // tcpdump writes to the same folder, and goes on.
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if name.trim() == "vipgate" {
                vipgate::lab::run(&["kill", "-9", pid]).unwrap();
            }
        }
        assert!(wait_for(Duration::from_secs(3), || !world.is_running()));
        for server in SERVER {
            assert!(ask_udp(&world.pods[0], server.parse().unwrap()).is_err(), "closed while nobody is there");
        }
        assert!(has_program(&world));
        world.start("");
        world.check_identity(&world.pods[0], SERVER, VIP_A);
    }
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
}

#[test]
fn sigterm_stops_cleanly_and_detach_removes_what_stays() {
    let mut world = World::with_gateway("term");
    let status = world.end("TERM");
    assert!(status.success(), "{status}: {}", world.log());
    assert!(!world.folder.path().join("gateway.sock").exists(), "the socket is gone");
    assert!(has_program(&world), "what it captures stays closed");
    assert!(ask_udp(&world.pods[0], SERVER[0].parse().unwrap()).is_err());
    let config = world.config("");
    assert_eq!(world.command(&["detach", "--config", &config]).0, 0);
    assert!(!has_program(&world));
    assert_eq!(ask_udp(&world.pods[0], SERVER[0].parse().unwrap()).unwrap(), "10.1.0.11", "the kernel routes again");
    let (code, stdout, _) = world.command(&["detach", "--config", &config]);
    assert_eq!(code, 0, "twice is fine");
    assert!(stdout.contains("nothing was left"), "{stdout}");
}

#[test]
fn on_exit_pass_leaves_nothing_behind_whatever_ends_it() {
    for signal in ["TERM", "KILL"] {
        let mut world = World::new("pass");
        world.start("xdp: {on_exit: pass}");
        world.check_identity(&world.pods[0], SERVER, VIP_A);
        world.end(signal);
        assert!(wait_for(Duration::from_secs(3), || !has_program(&world)), "{signal}");
        assert_eq!(ask_udp(&world.pods[0], SERVER[0].parse().unwrap()).unwrap(), "10.1.0.11");
    }
}

#[test]
fn drop_and_pass_can_follow_each_other() {
    let mut world = World::with_gateway("change");
    for more in ["xdp: {on_exit: pass}", "xdp: {on_exit: drop, mode: generic}", "xdp: {on_exit: drop}"] {
        world.end("TERM");
        world.start(more);
        world.check_identity(&world.pods[0], SERVER, VIP_A);
    }
}
