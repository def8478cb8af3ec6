//! Links that carry longer packets than a packet buffer receives.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::Host;
use vipgate_tests::{SERVER, World, wait_for};

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

#[test]
fn a_link_whose_packets_would_be_lost_is_refused_at_start_and_named_later() {
    let mut world = World::new("mtu");
    set_mtu(&world.router, "to-gw", 3000);
    set_mtu(&world.gateway, "gw-out", 3000);
    world.launch("");
    let process = world.process.as_mut().unwrap();
    let status = process.wait(Duration::from_secs(10)).expect("it doesn't start");
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
    let socket = world.folder.path().join("gateway.sock").display().to_string();
    let (code, text, _) = world.command(&["status", "--socket", &socket]);
    assert!(code == 0 && text.contains("3000 TOO LONG, 1778 at most"), "{text}");
    assert!((world.metric("vipgate_interface_mtu_excess_bytes", "interface=\"gw-out\"") - 1222.0).abs() < 0.5);
    assert!(passes(&world, MOST), "what isn't longer passes");
    set_mtu(&world.gateway, "gw-out", 1500);
    assert!(wait_for(Duration::from_secs(5), || world.log().contains("\"event\":\"mtu_fits\"")));
    assert!(!passes(&world, MOST) && passes(&world, 1500), "a pod hears what is too big");
}
