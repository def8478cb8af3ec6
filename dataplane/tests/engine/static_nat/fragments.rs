//! Fragments: every one has the private address outside, and the datagram's checksum is right for it.

use proptest::prelude::*;
use vipgate_testkit::services::{CLIENTS, both_pods, service, with_services};
use vipgate_testkit::*;

use super::{PODS, PRIVATE, REMOTES, gateway, in_cloud};
use crate::fragments::{reassemble, receive_batch, udp_fragments};

fn shuffled() -> impl Strategy<Value = Vec<usize>> {
    Just((0..4).collect::<Vec<usize>>()).prop_shuffle()
}

fn in_order<'a>(all: &'a [Vec<u8>], order: &[usize]) -> Vec<&'a [u8]> {
    order.iter().map(|&fragment| &all[fragment][..]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn datagrams_in_fragments_pass_both_ways_in_any_order(v6: bool, out in shuffled(), back in shuffled(), at_once: bool) {
        let i = usize::from(v6);
        let mut gateway = gateway();
        let mut pass = |interface, all: &[&[u8]]| {
            if at_once {
                return receive_batch(&mut gateway, interface, all);
            }
            all.iter().flat_map(|it| gateway.receive(0, interface, it)).map(|(_, bytes)| bytes).collect()
        };
        let sent = pass(INSIDE, &in_order(&udp_fragments(at(PODS[i]), at(REMOTES[i]), 1400, 77), &out));
        let (source, destination, _) = reassemble(&sent, 1400);
        prop_assert_eq!((source.ip(), destination), (ip(PRIVATE[i]), at(REMOTES[i])));
        let received = pass(OUTSIDE, &in_order(&udp_fragments(at(REMOTES[i]), source, 1400, 78), &back));
        prop_assert_eq!(reassemble(&received, 1400).1, at(PODS[i]));
        gateway.assert_delta("egress 4, reply 4, created 1");
    }
}

#[test]
fn fragments_without_a_checksum_stay_without_one() {
    let mut gateway = gateway();
    let mut all = udp_fragments(at(PODS[0]), at(REMOTES[0]), 700, 77);
    all[0][40..42].fill(0);
    let sent: Vec<_> = all.iter().flat_map(|it| gateway.receive(0, INSIDE, it)).map(|(_, bytes)| bytes).collect();
    assert_eq!(sent[0][40..42], [0, 0]);
    assert!(sent.iter().all(|fragment| fragment[26..30] == [172, 31, 0, 10]));
    let private = (ip(PRIVATE[0]), u16::from_be_bytes([sent[0][34], sent[0][35]])).into();
    let mut replies = udp_fragments(at(REMOTES[0]), private, 700, 78);
    replies[0][40..42].fill(0);
    let received: Vec<_> =
        replies.iter().flat_map(|it| gateway.receive(0, OUTSIDE, it)).map(|(_, bytes)| bytes).collect();
    assert_eq!(received[0][40..42], [0, 0]);
    gateway.assert_delta("egress 2, reply 2, created 1");
}

#[test]
fn what_the_gateway_itself_fragments_has_the_private_address() {
    let mut gateway = gateway();
    let mut small = network();
    small.interfaces[1].mtu = 600;
    gateway.set_network(small);
    let large = on_link(INSIDE, large_reply(at(PODS[0]), at(REMOTES[0]), true));
    let sent = gateway.receive(0, INSIDE, &large);
    assert_eq!(sent.len(), 3);
    let bytes: Vec<u8> = sent.iter().flat_map(|(_, fragment)| fragment[34..].to_vec()).collect();
    assert!(sent.iter().all(|(_, fragment)| fragment[26..30] == [172, 31, 0, 10]));
    let pseudo = vipgate_dataplane::wire::checksum::sum(&sent[0].1[26..34]) + 17 + bytes.len() as u32;
    assert!(vipgate_dataplane::wire::checksum::verifies(pseudo, &bytes), "the checksum of the whole datagram");
    gateway.assert_delta("egress 1, created 1");
}

#[test]
fn a_clients_fragments_reach_a_service_in_any_order() {
    for (client, private) in CLIENTS.map(at).into_iter().zip(PRIVATE.map(ip)) {
        let mut gateway = in_cloud(with_services(&[service(&both_pods())]));
        let mut all = udp_fragments(client, (private, 53).into(), 1000, 5);
        all.reverse();
        let received: Vec<_> =
            all.iter().flat_map(|it| gateway.receive(0, OUTSIDE, it)).map(|(_, bytes)| bytes).collect();
        let (source, backend, _) = reassemble(&received, 1000);
        assert_eq!((source, backend.port()), (client, 5353));
        let mut all = udp_fragments(backend, client, 1000, 6);
        all.reverse();
        let sent: Vec<_> = all.iter().flat_map(|it| gateway.receive(0, INSIDE, it)).map(|(_, bytes)| bytes).collect();
        let (source, destination, _) = reassemble(&sent, 1000);
        assert_eq!((source, destination), ((private, 53).into(), client));
        gateway.assert_delta("inbound 3, service_reply 3, created 1");
    }
}
