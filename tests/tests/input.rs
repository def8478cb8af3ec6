//! Bad input: one clear message, the right exit code, and the host as it was.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_tests::{SERVER, VIP_A, World, wait_for};

/// The gateway refuses to start: exit code, and words that its message must have.
fn refuses(world: &World, wrapper: &[&str], more: &str, code: i32, words: &[&str]) {
    let config = world.config(more);
    let (got, _, stderr) = world.command_under(wrapper, &["gateway", "--config", &config]);
    assert_eq!(got, code, "{more}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{more}: no \"{word}\" in: {stderr}");
    }
    assert!(!stderr.contains("panicked") && !stderr.contains("RUST_BACKTRACE"), "{stderr}");
    let link = vipgate::lab::output(&["ip", "-n", world.gateway.netns(), "-d", "link", "show", "gw-in"]).unwrap();
    assert!(!link.contains("xdp"), "the host is as it was: {link}");
    assert!(!world.folder.path().join("gateway.sock").exists(), "no socket is left");
}

#[test]
fn what_cannot_work_is_refused_by_name() {
    let world = World::new("refuse");
    refuses(&world, &[], "nmae: x", 2, &["gateway.yaml:", "nmae"]);
    refuses(&world, &[], "sessions: {capacity: many}", 2, &["gateway.yaml:", "sessions.capacity"]);
    refuses(&world, &[], "workers: {cores: [0, 99]}", 2, &["workers.cores", "99"]);
    refuses(&world, &["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"], "", 1, &["CAP_BPF"]);
    let without = |capability| ["setpriv", "--bounding-set", capability, "--inh-caps", capability];
    refuses(&world, &without("-net_raw"), "", 1, &["this process lacks CAP_NET_RAW: vipgate needs root, or"]);
    let little = ["prlimit", "--memlock=65536"];
    refuses(&world, &[&little[..], &without("-ipc_lock")].concat(), "", 1, &["this process lacks CAP_IPC_LOCK"]);
    world.gateway.output(&["ethtool", "-L", "gw-out", "rx", "1", "tx", "1"]).unwrap();
    refuses(&world, &[], "", 2, &["workers.cores", "gw-out", "ethtool -L"]);
    world.gateway.ip(&["link", "set", "gw-out", "name", "other"]).unwrap();
    refuses(&world, &[], "", 1, &["gw-out", "none of this name"]);
}

#[test]
fn bad_policy_is_named_with_file_line_and_field_and_left_out_alone() {
    let mut world = World::new("policy");
    world.served = false;
    let original = world.policy("tenant-b.yaml");
    world.write_policy("tenant-b.yaml", &original.replace("excludedCIDRs: [10.0.0.0/8", "excludedCIDRs: [10.0.0.0/33"));
    let policy = world.folder.path().join("policy").display().to_string();
    let (code, _, stderr) = world.command(&["check", &policy]);
    assert_eq!(code, 2);
    assert!(stderr.contains("tenant-b.yaml:") && stderr.contains("excludedCIDRs"), "{stderr}");
    // The gateway starts all the same, without this one.
    world.start("");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    let manifests = &world.ask(&["status"])["policy"]["manifests"];
    let faulty = &manifests["faulty"][0];
    assert!(manifests["rejected"] == 1 && faulty["name"] == "EgressPolicy tenant-b/web", "{manifests}");
    let reason = faulty["reasons"][0].as_str().unwrap();
    assert!(reason.contains("tenant-b.yaml:") && reason.contains("excludedCIDRs"), "{reason}");
    let log = world.log();
    assert!(log.contains("object_refused") && log.contains("it is left out"), "{log}");
    world.write_policy("tenant-b.yaml", &original);
    assert_eq!(world.command(&["check", &policy]).0, 0);
}

#[test]
fn commands_say_whom_they_did_not_reach() {
    let world = World::new("nobody");
    let (code, _, stderr) = world.command(&["status", "--socket", "/nowhere/gateway.sock"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("/nowhere/gateway.sock"), "{stderr}");
    assert_eq!(world.command(&["sessions", "--proto"]).0, 2);
    assert_eq!(world.command(&["no-such-command"]).0, 2);
    assert_eq!(world.command(&["--version"]).0, 0);
}

/// Sends frames that no kernel would: cut short, contradictory, random.
const HOSTILE: &str = r#"
import random, socket, sys, time
random.seed(int(sys.argv[2]))
mac = bytes.fromhex(sys.argv[1].replace(":", ""))
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
link.bind(("eth0", 0))
own = link.getsockname()[4]
v4 = bytes([0x45, 0, 0, 60, 0, 1, 0, 0, 64, 6, 0, 0, 10, 1, 0, 11, 198, 51, 100, 10]) + bytes(40)
v6 = bytes([0x60, 0, 0, 0, 0, 20, 6, 64]) + socket.inet_pton(socket.AF_INET6, "fd00:1::11") \
    + socket.inet_pton(socket.AF_INET6, "2001:db8:51::10") + bytes(20)
arp = bytes([0, 1, 8, 0, 6, 4, 0, 1]) + own + bytes([10, 1, 0, 11]) + bytes(6) + bytes([203, 0, 113, 10])
for kind, packet in ((0x0800, v4), (0x86DD, v6), (0x0806, arp)):
    for round in range(700):
        frame = bytearray(mac + own + kind.to_bytes(2, "big") + packet)
        for _ in range(random.randrange(4)):
            frame[random.randrange(14, len(frame))] = random.randrange(256)
        link.send(frame[:random.randrange(14, len(frame) + 1)])
        if round % 32 == 0:
            time.sleep(0.002)  # a veth holds 256 packets
"#;

#[test]
fn hostile_frames_are_counted_drops_and_stop_nobody() {
    let world = World::with_gateway("hostile");
    let mac = world.ask(&["status"])["interfaces"][0]["mac"].as_str().unwrap().to_owned();
    let script = world.folder.path().join("hostile.py");
    std::fs::write(&script, HOSTILE).unwrap();
    // How many of each is left to the seeds, and to the pod's MAC address.
    world.ledger.expect(["malformed", "bad_checksum", "not_ours"]);
    for seed in ["1", "2", "3"] {
        world.pods[0].output(&["python3", &script.display().to_string(), &mac, seed]).unwrap();
        world.check_identity(&world.pods[1], SERVER, VIP_A);
    }
    let drops = world.ask(&["drops"]);
    assert!(drops["malformed"].as_u64().unwrap() + drops["bad_checksum"].as_u64().unwrap() > 100, "{drops}");
    // What came in went out, was answered, or was dropped by name.
    let settled = || {
        let counted: f64 = ["egress", "reply", "unchanged"].iter().map(|direction| world.forwarded(direction)).sum();
        let dropped = world.metric("vipgate_drops_total", "");
        let answered = world.metric("vipgate_answered_total", "");
        let received = world.metric("vipgate_received_total", "");
        // Announcements are answers that nobody asked for: three rounds for four VIPs.
        (received - (counted + dropped + answered - 12.0)).abs() < 0.5
    };
    assert!(wait_for(Duration::from_secs(5), settled), "a packet is unaccounted for: {drops}");
    world.check_frames();
}
