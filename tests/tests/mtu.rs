//! Links with a larger MTU than a packet buffer can receive.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::Host;
use vipgate_tests::{SERVER, Testbed, VIP_A, wait_for};

/// The largest supported MTU.
const MAX_MTU: u32 = 1778;

fn set_mtu(host: &Host, interface: &str, mtu: u32) {
    host.ip(&["link", "set", "dev", interface, "mtu", &mtu.to_string()]).unwrap();
}

/// Whether a pod's ping of this length, with DF set, gets a reply.
fn passes(testbed: &Testbed, length: u32) -> bool {
    let payload = (length - 28).to_string();
    testbed.pods[0].output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", "-M", "do", "-s", &payload, SERVER[0]]).is_ok()
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
    set_mtu(&testbed.router, "to-gw", 3000);
    set_mtu(&testbed.gateway, "gw-out", 3000);
    testbed.spawn_gateway("");
    let status = testbed.wait_exit();
    let log = testbed.log();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("interface gw-out has an MTU of 3000"), "{log}");
    assert!(log.contains("ip link set dev gw-out mtu 1778"), "{log}");

    set_mtu(&testbed.gateway, "gw-out", MAX_MTU);
    set_mtu(&testbed.gateway, "gw-in", MAX_MTU);
    let path = [
        (&testbed.pods[0], "eth0"),
        (&testbed.switch, "p1"),
        (&testbed.switch, "to-gw"),
        (&testbed.switch, "pods"),
        (&testbed.router, "to-gw"),
        (&testbed.router, "to-server"),
        (&testbed.server, "eth0"),
    ];
    for (host, interface) in path {
        set_mtu(host, interface, MAX_MTU);
    }
    testbed.start("");
    assert!(passes(&testbed, MAX_MTU), "{}", testbed.log());

    set_mtu(&testbed.gateway, "gw-out", 3000);
    let warned = || testbed.log().contains("\"event\":\"mtu_too_long\"");
    assert!(wait_for(Duration::from_secs(5), warned), "{}", testbed.log());
    wait_for_status(&testbed, "3000 TOO LARGE, 1778 at most");
    assert!((testbed.metric("vipgate_interface_mtu_excess_bytes", "interface=\"gw-out\"") - 1222.0).abs() < 0.5);
    assert!(passes(&testbed, MAX_MTU), "packets of the supported size pass");
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
    set_server_mtu(MAX_MTU);
    set_mtu(&testbed.gateway, "gw-out", 1500);
    assert!(wait_for(Duration::from_secs(5), || testbed.log().contains("\"event\":\"mtu_fits\"")));
    wait_for_status(&testbed, " 1500  203.0.113.1 ");
    // The sender's kernel has cached the path MTU and sends no second one.
    testbed.accounting.expect_exactly([("too_big", 1), ("rx_too_long", 3), ("ring_dropped", 3)]);
    assert!(
        !passes(&testbed, MAX_MTU) && passes(&testbed, 1500),
        "a pod receives an ICMP error for packets that are too big"
    );
}
