//! Invalid input: one clear message, the right exit code, and an unchanged host.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_tests::{SERVER, Testbed, VIP_A, wait_for};

/// Asserts that the gateway rejects its configuration with this exit code and a message that contains these words.
fn rejects(testbed: &Testbed, wrapper: &[&str], extra: &str, code: i32, words: &[&str]) {
    let config = testbed.write_config(extra);
    let (actual, _, stderr) = testbed.command_with_wrapper(wrapper, &["gateway", "--config", &config]);
    assert_eq!(actual, code, "{extra}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{extra}: no \"{word}\" in: {stderr}");
    }
    assert!(!stderr.contains("panicked") && !stderr.contains("RUST_BACKTRACE"), "{stderr}");
    let link = vipgate_lab::output(&["ip", "-n", testbed.gateway.netns(), "-d", "link", "show", "gw-in"]).unwrap();
    assert!(!link.contains("xdp"), "the host is unchanged: {link}");
    assert!(!testbed.folder.path().join("gateway.sock").exists(), "no socket is left");
}

#[test]
fn invalid_configuration_is_rejected_by_field() {
    let testbed = Testbed::new("refuse");
    rejects(&testbed, &[], "nmae: x", 2, &["gateway.yaml:", "nmae"]);
    rejects(&testbed, &[], "sessions: {capacity: many}", 2, &["gateway.yaml:", "sessions.capacity"]);
    rejects(&testbed, &[], "workers: {cores: [0, 99]}", 2, &["workers.cores", "99"]);
    rejects(&testbed, &["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"], "", 1, &["CAP_BPF"]);
    let without = |capability| ["setpriv", "--bounding-set", capability, "--inh-caps", capability];
    rejects(&testbed, &without("-net_raw"), "", 1, &["this process lacks CAP_NET_RAW: vipgate needs root, or"]);
    let low_memlock = ["prlimit", "--memlock=65536"];
    rejects(&testbed, &[&low_memlock[..], &without("-ipc_lock")].concat(), "", 1, &["this process lacks CAP_IPC_LOCK"]);
    testbed.gateway.output(&["ethtool", "-L", "gw-out", "rx", "1", "tx", "1"]).unwrap();
    rejects(&testbed, &[], "", 2, &["workers.cores", "gw-out", "ethtool -L"]);
    testbed.gateway.ip(&["link", "set", "gw-out", "name", "other"]).unwrap();
    rejects(&testbed, &[], "", 1, &["gw-out", "no such interface"]);
}

#[test]
fn an_invalid_manifest_is_reported_and_skipped_alone() {
    let mut testbed = Testbed::new("policy");
    testbed.uses_policy_server = false;
    let original = testbed.read_policy("tenant-b.yaml");
    testbed
        .write_policy("tenant-b.yaml", &original.replace("excludedCIDRs: [10.0.0.0/8", "excludedCIDRs: [10.0.0.0/33"));
    let policy = testbed.folder.path().join("policy").display().to_string();
    let (code, _, stderr) = testbed.command(&["check", &policy]);
    assert_eq!(code, 2);
    assert!(stderr.contains("tenant-b.yaml:") && stderr.contains("excludedCIDRs"), "{stderr}");
    // The gateway starts without this manifest.
    testbed.start("");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let manifests = &testbed.query(&["status"])["policy"]["manifests"];
    let faulty = &manifests["faulty"][0];
    assert!(manifests["rejected"] == 1 && faulty["name"] == "EgressPolicy tenant-b/web", "{manifests}");
    let reason = faulty["reasons"][0].as_str().unwrap();
    assert!(reason.contains("tenant-b.yaml:") && reason.contains("excludedCIDRs"), "{reason}");
    let log = testbed.log();
    assert!(log.contains("object_refused") && log.contains("it is set aside"), "{log}");
    testbed.write_policy("tenant-b.yaml", &original);
    assert_eq!(testbed.command(&["check", &policy]).0, 0);
}

#[test]
fn commands_report_an_unreachable_socket() {
    let testbed = Testbed::new("unreachable");
    let (code, _, stderr) = testbed.command(&["status", "--socket", "/nowhere/gateway.sock"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("/nowhere/gateway.sock"), "{stderr}");
    assert_eq!(testbed.command(&["sessions", "--proto"]).0, 2);
    assert_eq!(testbed.command(&["no-such-command"]).0, 2);
    assert_eq!(testbed.command(&["--version"]).0, 0);
}

/// Sends frames that no kernel sends: truncated, contradictory, random.
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
fn hostile_frames_are_counted_drops_and_traffic_continues() {
    let testbed = Testbed::with_gateway("hostile");
    let mac = testbed.query(&["status"])["interfaces"][0]["mac"].as_str().unwrap().to_owned();
    let script = testbed.folder.path().join("hostile.py");
    std::fs::write(&script, HOSTILE).unwrap();
    // The count of each depends on the seeds and on the pod's MAC address.
    testbed.accounting.expect(["malformed", "bad_checksum", "not_ours"]);
    for seed in ["1", "2", "3"] {
        testbed.pods[0].output(&["python3", &script.display().to_string(), &mac, seed]).unwrap();
        testbed.check_source_addresses(&testbed.pods[1], SERVER, VIP_A);
    }
    let drops = testbed.query(&["drops"]);
    assert!(drops["malformed"].as_u64().unwrap() + drops["bad_checksum"].as_u64().unwrap() > 100, "{drops}");
    // Every received packet was forwarded, answered or dropped for a reason.
    let accounted = || {
        let forwarded: f64 =
            ["egress", "reply", "unchanged"].iter().map(|direction| testbed.forwarded(direction)).sum();
        let dropped = testbed.metric("vipgate_drops_total", "");
        let answered = testbed.metric("vipgate_answered_total", "");
        let received = testbed.metric("vipgate_received_total", "");
        // Announcements count as answered without a request: three rounds for four VIPs.
        (received - (forwarded + dropped + answered - 12.0)).abs() < 0.5
    };
    assert!(wait_for(Duration::from_secs(5), accounted), "a packet is unaccounted for: {drops}");
    testbed.check_frames();
}
