//! ARP and NDP for VIPs, announcements, and packets that wait for a neighbour.

use crate::support::*;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::io::PacketIo;
use vipgate_dataplane::snapshot::spec::NeighbourSpec;
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::ethernet::BROADCAST;

fn who_has(target: [u8; 4]) -> Vec<u8> {
    let sender = u32::from_be_bytes([192, 0, 2, 254]);
    let target = u32::from_be_bytes(target);
    let question = Arp { operation: Operation::Request, sender_mac: ROUTER_MAC, sender, target_mac: [0; 6], target };
    question.frame(BROADCAST).to_vec()
}

#[test]
fn the_gateway_answers_arp_for_its_vips_outside_and_for_nothing_else() {
    let mut gateway = Gateway::new(&Setup::default());
    let answers = gateway.arrives(0, OUTSIDE, &who_has([192, 0, 2, 10]));
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[0].0, OUTSIDE);
    let answer = Arp::parse(&answers[0].1[14..]).unwrap();
    assert_eq!((answer.operation, answer.sender_mac), (Operation::Reply, OUTSIDE_MAC));
    assert_eq!((answer.sender, answer.target_mac), (u32::from_be_bytes([192, 0, 2, 10]), ROUTER_MAC));
    assert_eq!(&answers[0].1[..6], ROUTER_MAC);

    assert_eq!(gateway.arrives(0, OUTSIDE, &who_has([192, 0, 2, 99])), vec![], "no VIP");
    assert_eq!(gateway.arrives(0, INSIDE, &who_has([192, 0, 2, 10])), vec![], "not this side");
    assert_eq!(gateway.drops(), [(DropReason::NotOurs, 2)].into());
    gateway.assert_delta("drop not_ours 2, answered 1");
}

#[test]
fn each_vip_is_announced_three_times_on_the_outside() {
    let mut gateway = Gateway::new(&Setup::default());
    let vips = vec![ip("192.0.2.10"), ip("2001:db8::10")];
    gateway.commands[0].send(Command::Announce(vips)).unwrap();
    gateway.pass(4_000);
    let sent = gateway.run();
    assert_eq!(sent.len(), 6);
    assert!(sent.iter().all(|(interface, bytes)| *interface == OUTSIDE && bytes[6..12] == OUTSIDE_MAC));
    let arps = sent.iter().filter_map(|(_, bytes)| Arp::parse(&bytes[14..])).filter(|arp| arp.sender == arp.target);
    assert_eq!(arps.count(), 3, "gratuitous: sender and target are the VIP");
    gateway.assert_delta("answered 6");
}

#[test]
fn a_packet_waits_for_its_neighbour_and_leaves_when_it_is_found() {
    let mut gateway = Gateway::new(&Setup::default());
    let question = packet(Protocol::Udp, at("10.244.1.5:4000"), at("192.0.2.77:53"));
    assert_eq!(gateway.arrives(0, INSIDE, &question), vec![]);
    let wanted = gateway.questions.queue.pop().unwrap();
    assert_eq!((wanted.interface, wanted.address), (OUTSIDE, ip("192.0.2.77")));
    assert!(gateway.drops().is_empty());

    let mut found = network();
    let mac = [2, 0, 0, 0, 9, 9];
    found.neighbours.push(NeighbourSpec { interface: OUTSIDE, address: ip("192.0.2.77"), mac });
    gateway.set_network(found);
    let sent = gateway.run();
    assert_eq!(sent.len(), 1);
    assert_eq!(&sent[0].1[..6], mac);
    assert_eq!(ends(&sent[0].1).0.ip(), ip("192.0.2.10"));
    gateway.assert_delta("egress 1, created 1");
}

#[test]
fn what_must_be_cut_for_a_neighbour_that_is_not_known_yet_asks_for_it_and_waits_whole() {
    let mut gateway = Gateway::new(&Setup::default());
    let narrow = || {
        let mut network = network();
        network.interfaces[1].mtu = 800;
        network
    };
    gateway.set_network(narrow());
    let mut large = large_reply(at("10.244.1.5:4000"), at("192.0.2.77:53"), true);
    large[..6].copy_from_slice(&INSIDE_MAC);
    assert_eq!(gateway.arrives(0, INSIDE, &large), vec![]);
    let wanted = gateway.questions.queue.pop().map(|it| (it.interface, it.address));
    assert_eq!(wanted, Some((OUTSIDE, ip("192.0.2.77"))), "nobody is asked: {:?}", gateway.drops());

    let mut found = narrow();
    let mac = [2, 0, 0, 0, 9, 9];
    found.neighbours.push(NeighbourSpec { interface: OUTSIDE, address: ip("192.0.2.77"), mac });
    gateway.set_network(found);
    let sent = gateway.run();
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().all(|(_, bytes)| bytes[..12] == [mac, OUTSIDE_MAC].concat() && bytes.len() <= 814));
    assert_eq!(sent.iter().map(|(_, bytes)| bytes.len() - 34).sum::<usize>(), 1480);
    gateway.assert_delta("egress 1, created 1");
}

#[test]
fn a_silent_neighbour_costs_its_packets_and_nobody_elses() {
    let mut gateway = Gateway::new(&Setup::default());
    for n in 0..90 {
        let question = packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), at("192.0.2.77:53"));
        let _ = gateway.arrives(0, INSIDE, &question);
    }
    assert_eq!(gateway.drops(), [(DropReason::NoNeighbor, 26)].into(), "64 wait, no more");
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:9000"), at("198.51.100.10:53")));
    gateway.pass(3_500);
    assert_eq!(gateway.drops(), [(DropReason::NoNeighbor, 90)].into());
    gateway.assert_delta("egress 1, drop no_neighbor 90, created 91");
}

#[test]
fn packets_wait_for_many_neighbours_but_for_all_together_no_more_than_a_bound() {
    let mut gateway = Gateway::new(&Setup { frames: 2048, ..Setup::default() });
    for n in 0..1100_u16 {
        let to = (ip(&format!("192.0.2.{}", 40 + n / 64)), 53).into();
        let question = packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), to);
        let _ = gateway.arrives(0, INSIDE, &question);
    }
    assert_eq!(gateway.drops(), [(DropReason::NoNeighbor, 1100 - 1024)].into());
    gateway.assert_delta("drop no_neighbor 76, created 1100");
}

#[test]
fn a_full_transmit_ring_drops_by_name_and_loses_no_frame() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.workers[0].io().limit_transmit(3);
    for n in 0..10 {
        let question = packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), at("198.51.100.10:53"));
        assert!(gateway.workers[0].io().inject(INSIDE, &question));
    }
    assert_eq!(gateway.run().len(), 3);
    assert_eq!(gateway.drops(), [(DropReason::TxFull, 7)].into());
    let audit = gateway.workers[0].io().audit();
    assert_eq!(audit.sum(), gateway.workers[0].io().total());
    gateway.assert_delta("egress 3, drop tx_full 7, created 10");
}
