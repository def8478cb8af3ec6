//! Other hosts that claim a VIP: told of once each, answered by nobody, defended when control says so.

use crate::support::*;
use vipgate_dataplane::address::{Address, V6};
use vipgate_dataplane::command::Command;
use vipgate_dataplane::conflicts::Conflict;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::snapshot::spec::Announce;
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::{ethernet, ndp};

const IMPOSTOR: [u8; 6] = [2, 0, 0, 0, 9, 9];
const VIP: u32 = u32::from_be_bytes([192, 0, 2, 10]);

fn arp(operation: Operation, sender_mac: [u8; 6], sender: u32, target: u32) -> Vec<u8> {
    Arp { operation, sender_mac, sender, target_mac: [0; 6], target }.frame(ethernet::BROADCAST).to_vec()
}

fn announced(mac: [u8; 6]) -> Vec<u8> {
    arp(Operation::Request, mac, VIP, VIP)
}

fn advertised(address: &str, mac: [u8; 6]) -> Vec<u8> {
    let advertisement = ndp::Advertisement {
        target: V6::from_ip(ip(address)).unwrap(),
        mac,
        destination: V6::from_bits(ndp::ALL_NODES),
        destination_mac: ethernet::ipv6_multicast(ndp::ALL_NODES),
        solicited: false,
    };
    advertisement.frame().to_vec()
}

/// What control hears of.
fn told(gateway: &Gateway) -> Vec<Conflict> {
    std::iter::from_fn(|| gateway.workers[0].counters().conflicts.take()).collect()
}

fn counted(gateway: &Gateway) -> (u64, u64, u64) {
    let counters = gateway.workers[0].counters();
    (counters.vip_conflicts.get(), counters.heard.get(), counters.answered.get())
}

#[test]
fn whoever_claims_a_vip_is_told_of_and_not_answered() {
    let mut gateway = Gateway::new(&Setup::default());
    let router = u32::from_be_bytes([192, 0, 2, 254]);
    let claims = [
        announced(IMPOSTOR),
        arp(Operation::Reply, IMPOSTOR, VIP, router),
        arp(Operation::Request, IMPOSTOR, VIP, router),
        // For another VIP of ours, which an impostor needn't know.
        arp(Operation::Request, IMPOSTOR, VIP, VIP + 1),
    ];
    for claim in &claims {
        assert_eq!(gateway.arrives(0, OUTSIDE, claim), vec![]);
        assert_eq!(told(&gateway), [Conflict { vip: ip("192.0.2.10"), mac: IMPOSTOR }]);
    }
    assert_eq!(gateway.arrives(0, OUTSIDE, &advertised("2001:db8::10", IMPOSTOR)), vec![]);
    assert_eq!(told(&gateway), [Conflict { vip: ip("2001:db8::10"), mac: IMPOSTOR }]);
    assert_eq!(counted(&gateway), (5, 5, 0));
    assert_eq!(gateway.drops(), [].into());
    gateway.assert_delta("heard 5, vip conflicts 5");
}

#[test]
fn nobody_is_told_of_who_claims_nothing_of_ours() {
    let mut gateway = Gateway::new(&Setup::default());
    // A probe (RFC 5227 section 2.1.1) claims nothing yet, and hears that the address is taken.
    assert_eq!(gateway.arrives(0, OUTSIDE, &arp(Operation::Request, IMPOSTOR, 0, VIP)).len(), 1);
    let dropped = [
        (OUTSIDE, arp(Operation::Request, IMPOSTOR, VIP + 80, VIP + 80)),
        (OUTSIDE, advertised("2001:db8::99", IMPOSTOR)),
        // Our own, by another interface or around a loop.
        (OUTSIDE, announced(OUTSIDE_MAC)),
        (OUTSIDE, announced(INSIDE_MAC)),
        (OUTSIDE, advertised("2001:db8::10", OUTSIDE_MAC)),
        // Not where VIPs are.
        (INSIDE, announced(IMPOSTOR)),
        // From no station.
        (OUTSIDE, announced(ethernet::BROADCAST)),
    ];
    for (interface, message) in &dropped {
        assert_eq!(gateway.arrives(0, *interface, message), vec![]);
    }
    assert_eq!(told(&gateway), []);
    assert_eq!(counted(&gateway), (0, 0, 1));
    assert_eq!(gateway.drops(), [(DropReason::NotOurs, dropped.len() as u64)].into());
    gateway.assert_delta("drop not_ours 7, answered 1");
}

#[test]
fn gateways_that_share_a_vip_by_bgp_may_all_have_it() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut policy = policy();
    policy.vips[0].announce = Announce::Bgp;
    gateway.set_policy(&policy);
    assert_eq!(gateway.arrives(0, OUTSIDE, &announced(IMPOSTOR)), vec![]);
    assert_eq!((told(&gateway), counted(&gateway)), (vec![], (0, 0, 0)));
    gateway.assert_delta("drop not_ours 1");
}

#[test]
fn a_flood_of_claims_is_counted_and_told_of_in_part() {
    let mut gateway = Gateway::new(&Setup::default());
    for _ in 0..1000 {
        assert_eq!(gateway.arrives(0, OUTSIDE, &announced(IMPOSTOR)), vec![]);
    }
    assert_eq!(counted(&gateway), (1000, 1000, 0));
    assert_eq!(told(&gateway).len(), 64);
    assert_eq!(gateway.arrives(0, OUTSIDE, &announced(IMPOSTOR)), vec![]);
    assert_eq!(told(&gateway).len(), 1, "heard again");
    gateway.assert_delta("heard 1001, vip conflicts 1001");
}

#[test]
fn a_defence_is_one_announcement() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.commands[0].send(Command::Defend(ip("192.0.2.10"))).unwrap();
    gateway.pass(4_000);
    let sent = gateway.run();
    assert_eq!(sent, [(OUTSIDE, announced(OUTSIDE_MAC))]);
    gateway.assert_delta("answered 1");
}
