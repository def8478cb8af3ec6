//! Links with a larger MTU than a packet buffer can receive.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_lab::Host;
use vipgate_tests::mtu::set_mtu;
use vipgate_tests::{SERVER, Testbed, VIP_A, wait_for};

/// The largest MTU of packet buffers of 2 KiB, of a page, and of several pages.
const STANDARD_MTU: u32 = 1778;
const PAGE_MTU: u32 = 3450;
const MAX_MTU: u32 = 9970;

/// Whether a ping with this length of the IP packet gets a reply.
fn pings(from: &Host, length: u32, fragment: &str, to: &str) -> bool {
    let headers = if to.contains(':') { 48 } else { 28 };
    let payload = (length - headers).to_string();
    from.output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", "-M", fragment, "-s", &payload, to]).is_ok()
}

/// Whether a pod's ping of this length, with DF set, gets a reply.
fn passes(testbed: &Testbed, length: u32) -> bool {
    pings(&testbed.pods[0], length, "do", SERVER[0])
}

/// Waits until `status` contains the words: the log precedes it, when the event has arrived but the workers don't
/// have it yet.
#[track_caller]
fn wait_for_status(testbed: &Testbed, words: &str) {
    let socket = testbed.folder.path().join("gateway.sock").display().to_string();
    let status = || testbed.command(&["status", "--socket", &socket]);
    let contains = || {
        let (code, text, _) = status();
        code == 0 && text.contains(words)
    };
    assert!(wait_for(Duration::from_secs(5), contains), "{:?}", status());
}

#[test]
fn an_oversized_mtu_is_rejected_at_startup_and_reported_at_runtime() {
    let mut testbed = Testbed::new("mtu");
    set_mtu(&testbed.router, "to-gw", 10_000);
    set_mtu(&testbed.gateway, "gw-out", 10_000);
    testbed.spawn_gateway("");
    let status = testbed.wait_exit();
    let log = testbed.log();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("interface gw-out has an MTU of 10000"), "{log}");
    assert!(log.contains(&format!("ip link set dev gw-out mtu {MAX_MTU}")), "{log}");

    testbed.set_path_mtu(0, STANDARD_MTU);
    testbed.start("");
    assert!(passes(&testbed, STANDARD_MTU), "{}", testbed.log());

    set_mtu(&testbed.gateway, "gw-out", 3000);
    let warned = || testbed.log().contains("\"event\":\"mtu_too_long\"");
    assert!(wait_for(Duration::from_secs(5), warned), "{}", testbed.log());
    assert!(testbed.log().contains("or restart the gateway, whose packet buffers adapt to the MTU"));
    wait_for_status(&testbed, "3000 TOO LARGE, 1778 at most");
    assert!((testbed.metric("vipgate_interface_mtu_excess_bytes", "interface=\"gw-out\"") - 1222.0).abs() < 0.5);
    assert!(passes(&testbed, STANDARD_MTU), "packets of the supported size pass");
    // The server sends packets of 2500 bytes: they are lost, and counted.
    let set_server_mtu = |mtu| {
        for (host, interface) in [(&testbed.server, "eth0"), (&testbed.router, "to-server"), (&testbed.router, "to-gw")]
        {
            set_mtu(host, interface, mtu);
        }
    };
    set_server_mtu(3000);
    let _ = testbed.server.output(&["ping", "-c", "3", "-i", "0.2", "-W", "1", "-M", "do", "-s", "2472", VIP_A[0]]);
    assert_eq!(testbed.query(&["drops"])["rx_too_long"], 3);
    set_server_mtu(STANDARD_MTU);
    set_mtu(&testbed.gateway, "gw-out", 1500);
    assert!(wait_for(Duration::from_secs(5), || testbed.log().contains("\"event\":\"mtu_fits\"")));
    wait_for_status(&testbed, " 1500  203.0.113.1 ");
    // The sender's kernel has cached the path MTU and sends no second one.
    testbed.accounting.expect_exactly([("too_big", 1), ("rx_too_long", 3), ("ring_dropped", 3)]);
    assert!(
        !passes(&testbed, STANDARD_MTU) && passes(&testbed, 1500),
        "a pod receives an ICMP error for packets that are too big"
    );
}

#[test]
fn packets_of_a_page_pass() {
    let mut testbed = Testbed::new("pages");
    testbed.set_path_mtu(0, PAGE_MTU);
    testbed.start("");
    check_long_packets(&testbed, PAGE_MTU);
}

#[test]
fn jumbo_packets_pass() {
    let mut testbed = Testbed::new("jumbo");
    testbed.set_path_mtu(0, 9000);
    testbed.start("");
    check_long_packets(&testbed, 9000);

    // A router beyond the gateway, then the gateway itself, with a smaller MTU.
    set_mtu(&testbed.router, "to-server", 1500);
    set_mtu(&testbed.server, "eth0", 1500);
    assert!(!passes(&testbed, 9000) && passes(&testbed, 1500), "the pod learns the path MTU from the router");
    testbed.set_path_mtu(0, 9000);
    set_mtu(&testbed.gateway, "gw-out", 4000);
    set_mtu(&testbed.router, "to-gw", 4000);
    wait_for_status(&testbed, " 4000  203.0.113.1 ");
    testbed.pods[0].ip(&["route", "flush", "cache"]).unwrap();
    assert!(pings(&testbed.pods[0], 9000, "dont", SERVER[0]), "without DF, the gateway fragments");
    assert!(!passes(&testbed, 9000) && passes(&testbed, 4000), "with DF, the pod learns the path MTU from the gateway");
    testbed.set_path_mtu(0, MAX_MTU);
    wait_for_status(&testbed, &format!(" {MAX_MTU}  203.0.113.1 "));
    testbed.pods[0].ip(&["route", "flush", "cache"]).unwrap();
    assert!(passes(&testbed, MAX_MTU), "{}", testbed.log());

    // The server sends packets that exceed any packet buffer.
    for (host, interface) in [(&testbed.server, "eth0"), (&testbed.router, "to-server"), (&testbed.router, "to-gw")] {
        set_mtu(host, interface, 12_000);
    }
    assert!(!pings(&testbed.server, MAX_MTU + 1, "do", VIP_A[0]));
    assert_eq!(testbed.query(&["drops"])["rx_too_long"], 2);
    assert!(passes(&testbed, MAX_MTU), "the next packets pass");
    testbed.accounting.expect(["too_big", "rx_too_long", "ring_dropped"]);
    testbed.check_frames();
}

#[test]
fn jumbo_packets_pass_in_generic_mode() {
    let mut testbed = Testbed::new("jumbo-generic");
    testbed.set_path_mtu(0, 9000);
    testbed.start("xdp: {mode: generic}\n");
    for server in SERVER {
        assert!(pings(&testbed.pods[0], 9000, "do", server), "{server}: {}", testbed.log());
        assert!(pings(&testbed.pods[0], 20_000, "dont", server), "{server} in fragments");
    }
    testbed.check_frames();
}

/// Packets of the largest size, of one family after the other, with and without fragments, and TCP streams pass.
fn check_long_packets(testbed: &Testbed, mtu: u32) {
    let status = testbed.query(&["status"]);
    for socket in status["sockets"].as_array().unwrap() {
        assert_eq!(socket["mode"], "native", "{socket}");
    }
    for server in SERVER {
        assert!(pings(&testbed.pods[0], mtu, "do", server), "{server}: {}", testbed.log());
        for length in [mtu + 1, 3 * mtu, 20_000] {
            assert!(pings(&testbed.pods[0], length, "dont", server), "{server} in fragments: {length}");
        }
    }
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let length = mtu.to_string();
    let trace = testbed.query(&["trace", "--from", "10.1.0.11", "--to", SERVER[0], "--length", &length]);
    assert!(trace["verdict"] == "forward" && trace["source"].as_str().unwrap().contains(VIP_A[0]), "{trace}");
    testbed.run_iperf3();
    testbed.check_frames();
}
