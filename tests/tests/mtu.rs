//! Links that carry longer packets than a packet buffer receives.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::Host;
use vipgate_tests::{SERVER, VIP_A, World, wait_for};

/// The longest packet that is received.
const MOST: u32 = 1778;

fn set_mtu(host: &Host, interface: &str, mtu: u32) {
    host.ip(&["link", "set", "dev", interface, "mtu", &mtu.to_string()]).unwrap();
}

/// A pod's ping of so many bytes, which nobody may cut, is answered.
fn passes(world: &World, length: u32) -> bool {
    let payload = (length - 28).to_string();
    world.pods[0].output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", "-M", "do", "-s", &payload, SERVER[0]]).is_ok()
}

/// Waits until `status` says so: the log does a moment before, when the event has come and the workers don't know it yet.
#[track_caller]
fn wait_for_status(world: &World, words: &str) {
    let socket = world.folder.path().join("gateway.sock").display().to_string();
    let status = || world.command(&["status", "--socket", &socket]);
    let says = || {
        let (code, text, _) = status();
        code == 0 && text.contains(words)
    };
    assert!(wait_for(Duration::from_secs(5), says), "{:?}", status());
}

#[test]
fn a_link_whose_packets_would_be_lost_is_refused_at_start_and_named_later() {
    let mut world = World::new("mtu");
    set_mtu(&world.router, "to-gw", 3000);
    set_mtu(&world.gateway, "gw-out", 3000);
    world.launch("");
    let status = world.wait_end();
    let said = world.log();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("interface gw-out has an MTU of 3000"), "{said}");
    assert!(said.contains("ip link set dev gw-out mtu 1778"), "{said}");

    set_mtu(&world.gateway, "gw-out", MOST);
    set_mtu(&world.gateway, "gw-in", MOST);
    let way = [
        (&world.pods[0], "eth0"),
        (&world.switch, "p1"),
        (&world.switch, "to-gw"),
        (&world.switch, "pods"),
        (&world.router, "to-gw"),
        (&world.router, "to-server"),
        (&world.server, "eth0"),
    ];
    for (host, interface) in way {
        set_mtu(host, interface, MOST);
    }
    world.start("");
    assert!(passes(&world, MOST), "{}", world.log());

    set_mtu(&world.gateway, "gw-out", 3000);
    let warned = || world.log().contains("\"event\":\"mtu_too_long\"");
    assert!(wait_for(Duration::from_secs(5), warned), "{}", world.log());
    wait_for_status(&world, "3000 TOO LONG, 1778 at most");
    assert!((world.metric("vipgate_interface_mtu_excess_bytes", "interface=\"gw-out\"") - 1222.0).abs() < 0.5);
    assert!(passes(&world, MOST), "what isn't longer passes");
    // A far side that sends packets of 2500 bytes: they are lost, and counted.
    let set_far_side = |mtu| {
        for (host, interface) in [(&world.server, "eth0"), (&world.router, "to-server"), (&world.router, "to-gw")] {
            set_mtu(host, interface, mtu);
        }
    };
    set_far_side(3000);
    let _ = world.server.output(&["ping", "-c", "3", "-i", "0.2", "-W", "1", "-M", "do", "-s", "2472", VIP_A[0]]);
    assert_eq!(world.ask(&["drops"])["rx_too_long"], 3);
    set_far_side(MOST);
    set_mtu(&world.gateway, "gw-out", 1500);
    assert!(wait_for(Duration::from_secs(5), || world.log().contains("\"event\":\"mtu_fits\"")));
    wait_for_status(&world, " 1500  203.0.113.1 ");
    // Its kernel sends no second one.
    world.ledger.expect_exactly([("too_big", 1), ("rx_too_long", 3), ("ring_dropped", 3)]);
    assert!(!passes(&world, MOST) && passes(&world, 1500), "a pod hears what is too big");
}
