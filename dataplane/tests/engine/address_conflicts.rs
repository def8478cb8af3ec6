//! Address conflicts: other hosts that claim a VIP are reported, get no reply, and are countered on command (RFC 5227).

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::observe::address_conflict::AddressConflict;
use vipgate_dataplane::policy::spec::Announce;
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::{ethernet, ndp};
use vipgate_dataplane::worker::command::Command;
use vipgate_testkit::*;

const IMPOSTOR: [u8; 6] = [2, 0, 0, 0, 9, 9];
const VIP: u32 = u32::from_be_bytes([192, 0, 2, 10]);

fn arp(operation: Operation, sender_mac: [u8; 6], sender: u32, target: u32) -> Vec<u8> {
    Arp { operation, sender_mac, sender, target_mac: [0; 6], target }.frame(ethernet::BROADCAST).to_vec()
}

fn claim(mac: [u8; 6]) -> Vec<u8> {
    Arp::announcement(mac, VIP).frame(ethernet::BROADCAST).to_vec()
}

fn advertised(address: &str, mac: [u8; 6]) -> Vec<u8> {
    ndp::Advertisement::unsolicited(V6::from_ip(ip(address)).unwrap(), mac).frame().to_vec()
}

/// Conflicts reported to the control plane.
fn reported(gateway: &Gateway) -> Vec<AddressConflict> {
    std::iter::from_fn(|| gateway.workers[0].counters().conflicts.pop()).collect()
}

fn conflict_counters(gateway: &Gateway) -> (u64, u64, u64) {
    let counters = gateway.workers[0].counters();
    (counters.vip_conflicts.get(), counters.consumed.get(), counters.replies_sent.get())
}

#[test]
fn a_vip_claim_is_reported_and_gets_no_reply() {
    let mut gateway = Gateway::new(&Setup::default());
    let router = u32::from_be_bytes([192, 0, 2, 254]);
    let claims = [
        claim(IMPOSTOR),
        arp(Operation::Reply, IMPOSTOR, VIP, router),
        arp(Operation::Request, IMPOSTOR, VIP, router),
        // A request for another of our VIPs.
        arp(Operation::Request, IMPOSTOR, VIP, VIP + 1),
    ];
    for claim in &claims {
        assert_eq!(gateway.receive(0, OUTSIDE, claim), vec![]);
        assert_eq!(reported(&gateway), [AddressConflict { vip: ip("192.0.2.10"), mac: IMPOSTOR }]);
    }
    assert_eq!(gateway.receive(0, OUTSIDE, &advertised("2001:db8::10", IMPOSTOR)), vec![]);
    assert_eq!(reported(&gateway), [AddressConflict { vip: ip("2001:db8::10"), mac: IMPOSTOR }]);
    assert_eq!(conflict_counters(&gateway), (5, 5, 0));
    gateway.assert_delta("consumed 5, vip conflicts 5");
}

#[test]
fn claims_of_other_addresses_are_not_reported() {
    let mut gateway = Gateway::new(&Setup::default());
    // A probe (RFC 5227 section 2.1.1) is no claim yet, and is replied to: the address is in use.
    assert_eq!(gateway.receive(0, OUTSIDE, &arp(Operation::Request, IMPOSTOR, 0, VIP)).len(), 1);
    let dropped = [
        (OUTSIDE, arp(Operation::Request, IMPOSTOR, VIP + 80, VIP + 80)),
        (OUTSIDE, advertised("2001:db8::99", IMPOSTOR)),
        // The gateway's own MAC addresses, via another interface or a loop.
        (OUTSIDE, claim(OUTSIDE_MAC)),
        (OUTSIDE, claim(INSIDE_MAC)),
        (OUTSIDE, advertised("2001:db8::10", OUTSIDE_MAC)),
        // Not on the interface of the VIPs.
        (INSIDE, claim(IMPOSTOR)),
        // From the broadcast address.
        (OUTSIDE, claim(ethernet::BROADCAST)),
    ];
    for (interface, message) in &dropped {
        assert_eq!(gateway.receive(0, *interface, message), vec![]);
    }
    assert_eq!(reported(&gateway), []);
    assert_eq!(conflict_counters(&gateway), (0, 0, 1));
    gateway.assert_delta("drop not_ours 7, replies sent 1");
}

#[test]
fn a_bgp_vip_has_no_address_conflicts() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut policy = policy();
    policy.vips[0].announce = Announce::Bgp;
    gateway.set_policy(&policy);
    assert_eq!(gateway.receive(0, OUTSIDE, &claim(IMPOSTOR)), vec![]);
    assert_eq!((reported(&gateway), conflict_counters(&gateway)), (vec![], (0, 0, 0)));
    gateway.assert_delta("drop not_ours 1");
}

#[test]
fn a_flood_of_claims_is_counted_and_reported_up_to_the_queue_limit() {
    let mut gateway = Gateway::new(&Setup::default());
    for _ in 0..1000 {
        assert_eq!(gateway.receive(0, OUTSIDE, &claim(IMPOSTOR)), vec![]);
    }
    assert_eq!(conflict_counters(&gateway), (1000, 1000, 0));
    assert_eq!(reported(&gateway).len(), 64);
    assert_eq!(gateway.receive(0, OUTSIDE, &claim(IMPOSTOR)), vec![]);
    assert_eq!(reported(&gateway).len(), 1, "reported again");
    gateway.assert_delta("consumed 1001, vip conflicts 1001");
}

#[test]
fn a_defence_is_a_single_announcement() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.commands[0].send(Command::Defend(ip("192.0.2.10"))).unwrap();
    gateway.advance(4_000);
    let sent = gateway.run();
    assert_eq!(sent, [(OUTSIDE, claim(OUTSIDE_MAC))]);
    gateway.assert_delta("replies sent 1");
}
