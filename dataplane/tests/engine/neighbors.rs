//! ARP and neighbor discovery for VIPs, announcements, and packets that await neighbor resolution.

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::io::PacketIo;
use vipgate_dataplane::policy::spec::{NeighborSpec, NetworkSpec};
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::ethernet::BROADCAST;
use vipgate_dataplane::worker::command::Command;
use vipgate_testkit::*;

fn arp_request(target: [u8; 4]) -> Vec<u8> {
    let sender = u32::from_be_bytes([192, 0, 2, 254]);
    Arp::request(ROUTER_MAC, sender, u32::from_be_bytes(target)).frame(BROADCAST).to_vec()
}

#[test]
fn arp_requests_are_answered_only_for_vips_and_only_outside() {
    let mut gateway = Gateway::new(&Setup::default());
    let replies = gateway.receive(0, OUTSIDE, &arp_request([192, 0, 2, 10]));
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0].0, OUTSIDE);
    let reply = Arp::parse(&replies[0].1[14..]).unwrap();
    assert_eq!((reply.operation, reply.sender_mac), (Operation::Reply, OUTSIDE_MAC));
    assert_eq!((reply.sender, reply.target_mac), (u32::from_be_bytes([192, 0, 2, 10]), ROUTER_MAC));
    assert_eq!(&replies[0].1[..6], ROUTER_MAC);

    assert_eq!(gateway.receive(0, OUTSIDE, &arp_request([192, 0, 2, 99])), vec![], "no VIP");
    assert_eq!(gateway.receive(0, INSIDE, &arp_request([192, 0, 2, 10])), vec![], "not on this side");
    gateway.assert_delta("drop not_ours 2, replies sent 1");
}

#[test]
fn each_vip_is_announced_three_times_outside() {
    let mut gateway = Gateway::new(&Setup::default());
    let vips = vec![ip("192.0.2.10"), ip("2001:db8::10")];
    gateway.commands[0].send(Command::Announce(vips)).unwrap();
    gateway.advance(4_000);
    let sent = gateway.run();
    assert_eq!(sent.len(), 6);
    assert!(sent.iter().all(|(interface, bytes)| *interface == OUTSIDE && bytes[6..12] == OUTSIDE_MAC));
    let arps = sent.iter().filter_map(|(_, bytes)| Arp::parse(&bytes[14..])).filter(|arp| arp.sender == arp.target);
    assert_eq!(arps.count(), 3, "gratuitous ARP: sender and target are the VIP");
    gateway.assert_delta("replies sent 6");
}

const NEIGHBOR_MAC: [u8; 6] = [2, 0, 0, 0, 9, 9];

/// A network with the MAC address of the neighbor 192.0.2.77.
fn resolved(mut network: NetworkSpec) -> NetworkSpec {
    network.neighbors.push(NeighborSpec { interface: OUTSIDE, address: ip("192.0.2.77"), mac: NEIGHBOR_MAC });
    network
}

#[test]
fn a_packet_awaits_neighbor_resolution() {
    let mut gateway = Gateway::new(&Setup::default());
    let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at("192.0.2.77:53"));
    assert_eq!(gateway.receive(0, INSIDE, &request), vec![]);
    let requested = gateway.resolution_requests.queue.pop().unwrap();
    assert_eq!((requested.interface, requested.address), (OUTSIDE, ip("192.0.2.77")));
    assert!(gateway.drops().is_empty());

    gateway.set_network(resolved(network()));
    let sent = gateway.run();
    assert_eq!(sent.len(), 1);
    assert_eq!(&sent[0].1[..6], NEIGHBOR_MAC);
    assert_eq!(ends(&sent[0].1).0.ip(), ip("192.0.2.10"));
    gateway.assert_delta("egress 1, created 1");
}

/// It was translated under a lease that has expired while the worker was suspended.
#[test]
fn a_packet_that_has_awaited_its_neighbor_during_a_suspension_is_not_sent() {
    let mut gateway = Gateway::new(&Setup::default());
    let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at("192.0.2.77:53"));
    assert_eq!(gateway.receive(0, INSIDE, &request), vec![]);
    gateway.lease.renew(gateway.now.plus(10));
    gateway.now = gateway.now.plus(1_000);
    gateway.set_network(resolved(network()));
    assert_eq!(gateway.run(), vec![]);
    gateway.assert_delta("drop no_lease 1, created 1");
}

#[test]
fn a_packet_to_be_fragmented_awaits_neighbor_resolution_whole() {
    let mut gateway = Gateway::new(&Setup::default());
    let low_mtu = || {
        let mut network = network();
        network.interfaces[1].mtu = 800;
        network
    };
    gateway.set_network(low_mtu());
    let large = on_link(INSIDE, large_reply(at("10.244.1.5:4000"), at("192.0.2.77:53"), true));
    assert_eq!(gateway.receive(0, INSIDE, &large), vec![]);
    let requested = gateway.resolution_requests.queue.pop().map(|it| (it.interface, it.address));
    assert_eq!(requested, Some((OUTSIDE, ip("192.0.2.77"))), "no resolution request: {:?}", gateway.drops());

    gateway.set_network(resolved(low_mtu()));
    let sent = gateway.run();
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().all(|(_, bytes)| bytes[..12] == [NEIGHBOR_MAC, OUTSIDE_MAC].concat() && bytes.len() <= 814));
    assert_eq!(sent.iter().map(|(_, bytes)| bytes.len() - 34).sum::<usize>(), 1480);
    gateway.assert_delta("egress 1, created 1");
}

#[test]
fn an_unresolved_neighbor_does_not_affect_other_packets() {
    let mut gateway = Gateway::new(&Setup::default());
    for n in 0..90 {
        let request = packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), at("192.0.2.77:53"));
        let _ = gateway.receive(0, INSIDE, &request);
    }
    assert_eq!(gateway.drops(), [(DropReason::NoNeighbor, 26)].into(), "at most 64 wait per neighbor");
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:9000"), at("198.51.100.10:53")));
    gateway.advance(3_500);
    gateway.assert_delta("egress 1, drop no_neighbor 90, created 91");
}

#[test]
fn packets_awaiting_neighbors_are_limited_in_total() {
    let mut gateway = Gateway::new(&Setup { frames: 2048, ..Setup::default() });
    for n in 0..1100_u16 {
        let to = (ip(&format!("192.0.2.{}", 40 + n / 64)), 53).into();
        let request = packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), to);
        let _ = gateway.receive(0, INSIDE, &request);
    }
    gateway.assert_delta("drop no_neighbor 76, created 1100");
}

#[test]
fn a_full_transmit_ring_drops_packets_and_loses_no_frame() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.workers[0].io().limit_tx(3);
    for n in 0..10 {
        let request = packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), at("198.51.100.10:53"));
        assert!(gateway.workers[0].io().inject(INSIDE, &request));
    }
    assert_eq!(gateway.run().len(), 3);
    assert_eq!(gateway.drops(), [(DropReason::TxFull, 7)].into());
    let audit = gateway.workers[0].io().audit();
    assert_eq!(audit.sum(), gateway.workers[0].io().total());
    gateway.assert_delta("egress 3, drop tx_full 7, created 10");
}
