//! ARP and neighbor discovery: outside, the private address alone is answered for, announced, and defended. Packets that wait for a MAC
//! address leave with the private address of that time.

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::observe::address_conflict::AddressConflict;
use vipgate_dataplane::policy::spec::NeighborSpec;
use vipgate_dataplane::wire::arp::Arp;
use vipgate_dataplane::wire::{ethernet, ipv6, ndp};
use vipgate_dataplane::worker::command::Command;
use vipgate_testkit::*;

use super::{PODS, PRIVATE, VIP, gateway, with_private};

const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 9, 9];

fn v6(address: &str) -> V6 {
    V6::from_ip(ip(address)).unwrap()
}

fn v4(address: &str) -> u32 {
    u32::from_ip(ip(address)).unwrap()
}

/// A neighbor solicitation for an address, to its solicited-node group.
fn solicitation(source: &str, target: &str) -> Vec<u8> {
    let message = ndp::Solicitation { source: v6(source), mac: HOST_MAC, target: v6(target), target_mac: None };
    message.frame().to_vec()
}

/// The target of an advertisement, its MAC address, and the source of the packet.
fn advertised(frame: &[u8]) -> (V6, Option<[u8; 6]>, V6) {
    let header = ipv6::Header::parse(&frame[14..]).unwrap();
    let (target, mac) = ndp::parse_advertisement(&header, &frame[14..]).unwrap();
    (target, mac, header.source)
}

#[test]
fn solicitations_for_the_private_address_are_answered_and_for_the_vip_are_not() {
    let mut gateway = gateway();
    for host in ["2001:db8::fe", "::"] {
        let sent = gateway.receive(0, OUTSIDE, &solicitation(host, PRIVATE[1]));
        assert_eq!(sent.len(), 1, "{host}: {:?}", gateway.drops());
        assert_eq!(advertised(&sent[0].1), (v6(PRIVATE[1]), Some(OUTSIDE_MAC), v6(PRIVATE[1])), "{host}");
        assert_eq!(gateway.receive(0, OUTSIDE, &solicitation(host, VIP[1])), []);
    }
    assert_eq!(gateway.receive(0, INSIDE, &solicitation("fe80::1", PRIVATE[1])), [], "not inside");
    gateway.assert_delta("drop not_ours 3, replies sent 2");
}

#[test]
fn announcements_are_of_private_addresses() {
    let mut gateway = gateway();
    gateway.commands[0].send(Command::Announce(VIP.map(ip).to_vec())).unwrap();
    gateway.advance(4_000);
    let mut sent = gateway.run();
    for vip in VIP {
        gateway.commands[0].send(Command::Defend(ip(vip))).unwrap();
        sent.extend(gateway.run());
    }
    assert_eq!(sent.len(), 8);
    for (interface, bytes) in sent {
        assert_eq!(interface, OUTSIDE);
        match Arp::parse(&bytes[14..]) {
            Some(arp) => assert_eq!((arp.sender, arp.target), (v4(PRIVATE[0]), v4(PRIVATE[0]))),
            None => assert_eq!(advertised(&bytes), (v6(PRIVATE[1]), Some(OUTSIDE_MAC), v6(PRIVATE[1]))),
        }
    }
    gateway.assert_delta("replies sent 8");
}

#[test]
fn another_hosts_claim_to_the_private_address_is_a_conflict_and_one_to_the_vip_is_not() {
    let mut gateway = gateway();
    let claims = |v4_address: &str, v6_address: &str| {
        let arp = Arp::announcement(HOST_MAC, v4(v4_address));
        let advertisement = ndp::Advertisement::unsolicited(v6(v6_address), HOST_MAC);
        [arp.frame(ethernet::BROADCAST).to_vec(), advertisement.frame().to_vec()]
    };
    for claim in claims(PRIVATE[0], PRIVATE[1]) {
        assert_eq!(gateway.receive(0, OUTSIDE, &claim), []);
    }
    let conflicts = &gateway.workers[0].counters().conflicts;
    for vip in VIP {
        assert_eq!(conflicts.pop(), Some(AddressConflict { vip: ip(vip), mac: HOST_MAC }));
    }
    for claim in claims(VIP[0], VIP[1]) {
        assert_eq!(gateway.receive(0, OUTSIDE, &claim), []);
    }
    gateway.assert_delta("drop not_ours 2, consumed 2, vip conflicts 2");
}

/// A packet waits for the MAC address of its neighbor, and the policy changes meanwhile.
#[test]
fn a_packet_that_waits_leaves_with_the_private_address_of_the_policy_in_force() {
    let set = with_private(policy(), "gw-a", PRIVATE);
    let moved = with_private(policy(), "gw-a", ["172.31.0.99", "fd31::99"]);
    let mut removed = set.clone();
    removed.vips.retain(|vip| vip.address != ip(VIP[0]));
    removed.endpoints.retain(|endpoint| endpoint.vips != [ip(VIP[0])]);
    for (after, expected) in [(&set, PRIVATE[0]), (&moved, "172.31.0.99"), (&policy(), VIP[0]), (&removed, PRIVATE[0])]
    {
        let mut gateway = gateway();
        assert_eq!(gateway.receive(0, INSIDE, &packet(Protocol::Udp, at(PODS[0]), at("192.0.2.77:53"))), []);
        gateway.set_policy(after);
        assert_eq!(gateway.run(), []);
        let mut resolved = network();
        let mac = HOST_MAC;
        resolved.neighbors.push(NeighborSpec { interface: OUTSIDE, address: ip("192.0.2.77"), mac });
        gateway.set_network(resolved);
        let sent = gateway.run();
        assert_eq!(sent.len(), 1);
        assert_eq!((ends(&sent[0].1).0.ip(), &sent[0].1[..6]), (ip(expected), &mac[..]));
        gateway.assert_delta("egress 1, created 1");
    }
}
