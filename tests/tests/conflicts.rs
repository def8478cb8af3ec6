//! Another host on the link claims a VIP: the gateway says so and defends it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::Host;
use vipgate_dataplane::address::{Address, V6};
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::{ethernet, ndp};
use vipgate_tests::{SERVER, VIP_A, World, wait_for};

const IMPOSTOR: [u8; 6] = [2, 0, 0, 0, 9, 9];
const PATIENCE: Duration = Duration::from_secs(10);

/// Puts a frame on the link between the router and the gateway.
fn send(host: &Host, frame: &[u8]) {
    let bytes = format!("{frame:?}");
    let program = "import socket, sys\n\
                   link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\n\
                   link.bind((\"to-gw\", 0))\n\
                   link.send(bytes(eval(sys.argv[1])))\n";
    host.output(&["python3", "-c", program, &bytes]).unwrap();
}

#[test]
fn a_host_that_claims_a_vip_is_named_and_the_vip_defended() {
    let world = World::with_gateway("conflict");
    // After the announcements of the start.
    std::thread::sleep(Duration::from_secs(4));
    let own: String = world.gateway.output(&["cat", "/sys/class/net/gw-out/address"]).unwrap().trim().to_owned();
    let capture = world.capture(&format!("ether src {own} and (arp or icmp6)"));
    let v4: std::net::Ipv4Addr = VIP_A[0].parse().unwrap();
    let claim = Arp {
        operation: Operation::Request,
        sender_mac: IMPOSTOR,
        sender: v4.to_bits(),
        target_mac: [0; 6],
        target: v4.to_bits(),
    };
    let v6 = ndp::Advertisement {
        target: V6::from_ip(VIP_A[1].parse().unwrap()).unwrap(),
        mac: IMPOSTOR,
        destination: V6::from_bits(ndp::ALL_NODES),
        destination_mac: ethernet::ipv6_multicast(ndp::ALL_NODES),
        solicited: false,
    };
    world.ledger.expect_exactly([("vip_conflicts", 10)]);
    for _ in 0..5 {
        send(&world.router, &claim.frame(ethernet::BROADCAST));
        send(&world.router, &v6.frame());
    }
    let shown = || {
        let vips = world.ask(&["vips"]);
        let of = |vip: &str| {
            let all = vips["vips"].as_array().unwrap().clone();
            all.into_iter().find(|it| it["address"] == vip).unwrap()["conflict"]["mac"].clone()
        };
        VIP_A.map(of)
    };
    assert!(wait_for(PATIENCE, || shown().iter().all(|mac| mac == "02:00:00:00:09:09")), "{:?}", shown());
    assert!((world.metric("vipgate_vip_conflicts_total", "") - 10.0).abs() < 0.5);
    std::thread::sleep(Duration::from_secs(2));
    let said = world.log().lines().filter(|line| line.contains("\"event\":\"vip_conflict\"")).count();
    assert_eq!(said, 2, "once for each VIP: {}", world.log());
    let defence = capture.end();
    let announcing =
        |vip: &str, what: &str| defence.iter().filter(|line| line.contains(what) && line.contains(vip)).count();
    assert_eq!(announcing(VIP_A[0], "Request who-has"), 1, "{defence:#?}");
    assert_eq!(announcing(VIP_A[1], "neighbor advertisement, tgt is"), 1, "{defence:#?}");
    // Neighbours heard the defence last.
    world.check_identity(&world.pods[0], SERVER, VIP_A);
}
