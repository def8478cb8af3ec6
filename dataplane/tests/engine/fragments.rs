//! Virtual reassembly: fragments in any order, on any queue, in both directions, within limits.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use etherparse::{NetSlice, SlicedPacket};
use proptest::prelude::*;
use vipgate_coverage::property;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::wire::checksum;
use vipgate_testkit::*;

/// The fragments of a UDP datagram with `payload` bytes, 400 bytes each.
pub(crate) fn udp_fragments(source: SocketAddr, destination: SocketAddr, payload: usize, id: u32) -> Vec<Vec<u8>> {
    let body: Vec<u8> = (0..payload).map(|n| (n * 7 % 251) as u8).collect();
    let mut whole = Vec::new();
    on_ip(source, destination).udp(source.port(), destination.port()).write(&mut whole, &body).unwrap();
    ip_fragments(&whole, 400, id)
}

/// Reassembles fragments as a host does: source, destination, identification. Panics unless the datagram is complete
/// and valid. Repeated fragments of a complete datagram count as another datagram.
pub(crate) fn reassemble(fragments: &[Vec<u8>], payload: usize) -> (SocketAddr, SocketAddr, u32) {
    let mut bytes = vec![None; payload + 8];
    let mut all = Vec::new();
    let complete = |id: u32| {
        let offsets: HashSet<usize> = fragments.iter().map(|f| read(f)).filter(|f| f.1 == id).map(|f| f.2).collect();
        offsets.len() * 400 >= payload + 8
    };
    for fragment in fragments.iter().filter(|fragment| complete(read(fragment).1)) {
        let (ends, id, offset, data) = read(fragment);
        all.push((ends, id));
        for (at, &byte) in data.iter().enumerate() {
            assert!(bytes[offset + at].is_none_or(|other| other == byte));
            bytes[offset + at] = Some(byte);
        }
    }
    assert!(all.iter().all(|one| *one == all[0]), "all fragments have the same header: {all:?}");
    let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte.expect("the datagram is complete")).collect();
    let ((source, destination), id) = all[0];
    let sum = |address: IpAddr| match address {
        IpAddr::V4(v4) => checksum::sum(&v4.octets()),
        IpAddr::V6(v6) => checksum::sum(&v6.octets()),
    };
    let pseudo = sum(source) + sum(destination) + 17 + bytes.len() as u32;
    assert!(checksum::verifies(pseudo, &bytes), "the UDP checksum is valid");
    let port = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    ((source, port(0)).into(), (destination, port(2)).into(), id)
}

type FragmentParts = ((IpAddr, IpAddr), u32, usize, Vec<u8>);

fn read(fragment: &[u8]) -> FragmentParts {
    let net = SlicedPacket::from_ethernet(fragment).unwrap().net.unwrap();
    let ends = addresses(&net);
    if let NetSlice::Ipv4(v4) = net {
        let header = v4.header();
        let offset = usize::from(header.fragments_offset().value()) * 8;
        (ends, header.identification().into(), offset, v4.payload().payload.to_vec())
    } else {
        let extension = &fragment[54..62];
        let offset = usize::from(u16::from_be_bytes([extension[2], extension[3]]) & 0xfff8);
        let id = u32::from_be_bytes(extension[4..8].try_into().unwrap());
        (ends, id, offset, fragment[62..].to_vec())
    }
}

const ENDS: [(&str, &str, &str); 2] = [
    ("10.244.1.5:4000", "198.51.100.10:53", "192.0.2.10"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53", "2001:db8::10"),
];

#[test]
fn fragments_in_order_are_translated_in_both_directions() {
    let mut gateway = Gateway::new(&Setup::default());
    for (pod, remote, vip) in ENDS {
        let mut sent = Vec::new();
        for fragment in udp_fragments(at(pod), at(remote), 1400, 77) {
            sent.extend(gateway.receive(0, INSIDE, &fragment));
        }
        let fragments: Vec<_> =
            sent.into_iter().map(|(interface, bytes)| (assert_eq!(interface, OUTSIDE), bytes).1).collect();
        let (source, destination, id) = reassemble(&fragments, 1400);
        assert_eq!((source.ip(), destination), (ip(vip), at(remote)));
        assert_ne!(id, 77, "identifications are allocated per VIP");
        let mut replies = Vec::new();
        for fragment in udp_fragments(at(remote), source, 900, 78) {
            replies.extend(gateway.receive(0, OUTSIDE, &fragment));
        }
        let fragments: Vec<_> =
            replies.into_iter().map(|(interface, bytes)| (assert_eq!(interface, INSIDE), bytes).1).collect();
        assert_eq!(reassemble(&fragments, 900).1, at(pod));
    }
    assert_eq!(gateway.sessions(), 2);
    gateway.assert_delta("egress 8, reply 6, created 2");
}

#[test]
fn fragments_without_a_first_one_are_dropped_after_the_timeout() {
    let mut gateway = Gateway::new(&Setup::default());
    for fragment in &udp_fragments(at(ENDS[0].0), at(ENDS[0].1), 1400, 5)[1..] {
        assert!(gateway.receive(0, INSIDE, fragment).is_empty(), "not forwarded without the first fragment");
    }
    assert_eq!(gateway.workers[0].tables().reassembly.buffered(), 3);
    gateway.advance(2_100);
    assert_eq!(gateway.workers[0].tables().reassembly.buffered(), 0);
    assert_eq!(gateway.drops(), HashMap::from([(DropReason::Fragment, 3)]));
    gateway.check_frames();
    gateway.assert_delta("drop fragment 3");
}

#[test]
fn an_overlap_drops_the_rest_of_the_datagram() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut all = udp_fragments(at(ENDS[0].0), at(ENDS[0].1), 1400, 5);
    let mut overlapping = all[1].clone();
    overlapping[14 + 6..14 + 8].copy_from_slice(&(0x2000_u16 + 40).to_be_bytes());
    update_header_checksum(&mut overlapping);
    all.insert(1, overlapping);
    let sent: usize = all.iter().map(|fragment| gateway.receive(0, INSIDE, fragment).len()).sum();
    assert_eq!(sent, 1, "fragments before the overlap were sent, none after it");
    gateway.assert_delta("egress 1, drop fragment 4, created 1");
}

#[test]
fn a_fragment_flood_does_not_affect_other_sources() {
    let mut gateway = Gateway::new(&Setup::default());
    for id in 0..2000 {
        gateway.receive(0, INSIDE, &udp_fragments(at("10.244.1.6:9"), at("198.51.100.77:9"), 1400, id)[1]);
    }
    let mut sent = Vec::new();
    for fragment in udp_fragments(at(ENDS[0].0), at(ENDS[0].1), 1400, 5).into_iter().rev() {
        sent.extend(gateway.receive(0, INSIDE, &fragment).into_iter().map(|(_, bytes)| bytes));
    }
    reassemble(&sent, 1400);
    gateway.assert_delta("egress 4, drop fragment 1992, created 1");
}

#[test]
fn equal_identifications_of_two_pods_are_made_distinct() {
    let mut gateway = Gateway::new(&Setup::default());
    let ids = ["10.244.1.5:4000", "10.244.1.6:4000"].map(|pod| {
        let all = udp_fragments(at(pod), at(ENDS[0].1), 1400, 5);
        let sent: Vec<_> =
            all.iter().flat_map(|fragment| gateway.receive(0, INSIDE, fragment)).map(|(_, bytes)| bytes).collect();
        reassemble(&sent, 1400).2
    });
    assert_ne!(ids[0], ids[1]);
    gateway.assert_delta("egress 8, created 2");
}

#[test]
fn fragments_to_excluded_destinations_are_unchanged() {
    let mut gateway = Gateway::new(&Setup::default());
    for fragment in udp_fragments(at("10.244.1.21:4000"), at("198.51.100.200:53"), 1400, 5).into_iter().rev() {
        let sent = gateway.receive(0, INSIDE, &fragment);
        let ((source, _), id, ..) = read(&sent[0].1);
        assert_eq!((source, id), (ip("10.244.1.21"), 5));
    }
    gateway.assert_delta("unchanged 4");
}

#[test]
fn fragments_larger_than_the_mtu_are_fragmented_in_order() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut network = network();
    network.interfaces[1].mtu = 300;
    gateway.set_network(network);
    let sent: Vec<_> = udp_fragments(at(ENDS[0].0), at(ENDS[0].1), 392, 5)
        .iter()
        .flat_map(|fragment| gateway.receive(0, INSIDE, fragment))
        .map(|(_, bytes)| bytes)
        .collect();
    assert_eq!(sent.len(), 2);
    assert!(
        sent.iter().all(|fragment| fragment.len() <= 314) && read(&sent[0]).2 == 0,
        "the first fragment is sent first"
    );
    let mut bytes = [0_u8; 400];
    for fragment in &sent {
        let (_, _, offset, payload) = read(fragment);
        bytes[offset..offset + payload.len()].copy_from_slice(&payload);
    }
    assert_eq!(bytes[399], (391 * 7 % 251) as u8);
    gateway.check_frames();
    gateway.assert_delta("egress 1, created 1");
}

/// A fragment has at least eight bytes of data behind its header.
#[test]
fn packets_for_a_link_whose_mtu_holds_no_fragment_are_too_big() {
    for mtu in [0, 20, 27] {
        let mut gateway = Gateway::new(&Setup::default());
        let (pod, remote) = (at(ENDS[0].0), at(ENDS[0].1));
        let seen = gateway.pod_sends(&udp_fragments(pod, remote, 392, 5)[0]);
        let reply = udp_fragments(remote, ends(&seen).0, 392, 6);
        let mut network = network();
        network.interfaces.iter_mut().for_each(|interface| interface.mtu = mtu);
        gateway.set_network(network);
        for (interface, packet) in [(INSIDE, &udp_fragments(pod, remote, 392, 7)[0]), (OUTSIDE, &reply[0])] {
            let sent = gateway.receive(0, interface, packet);
            assert!(sent.iter().all(|(out, _)| *out == interface), "only an error to the sender");
        }
        assert_eq!(gateway.drops(), HashMap::from([(DropReason::TooBig, 2)]), "{mtu}");
        gateway.check_frames();
        gateway.assert_delta("egress 1, drop too_big 2, created 1, replies sent 2");
        let mut network = self::network();
        network.interfaces[1].mtu = 28;
        gateway.set_network(network);
        let sent = gateway.receive(0, INSIDE, &udp_fragments(pod, remote, 392, 8)[0]);
        assert_eq!(sent.len(), 50, "eight bytes each");
        gateway.assert_delta("egress 1");
    }
}

/// Packets sent when these are received on one queue in one turn.
pub(crate) fn receive_batch(gateway: &mut Gateway, from: InterfaceId, packets: &[&[u8]]) -> Vec<Vec<u8>> {
    for packet in packets {
        assert!(gateway.workers[0].io().inject(from, packet));
    }
    gateway.run().into_iter().map(|(_, bytes)| bytes).collect()
}

#[test]
fn fragments_before_the_first_one_in_a_batch_are_sent_after_it() {
    for (pod, remote, vip) in ENDS {
        for workers in [1, 2] {
            let mut gateway = Gateway::new(&Setup { workers, ..Setup::default() });
            let mut all = udp_fragments(at(pod), at(remote), 1000, 5);
            all.reverse();
            let sent = receive_batch(&mut gateway, INSIDE, &all.as_slices());
            let (source, destination, _) = reassemble(&sent, 1000);
            assert_eq!((source.ip(), destination), (ip(vip), at(remote)));
            assert_eq!(offsets(&sent), [0, 800, 400], "the first fragment first, then in order of arrival");
            let mut replies = udp_fragments(at(remote), source, 1000, 6);
            replies.reverse();
            let received = receive_batch(&mut gateway, OUTSIDE, &replies.as_slices());
            assert_eq!(reassemble(&received, 1000).1, at(pod));
            assert_eq!(offsets(&received), [0, 800, 400]);
            let expected = ["egress 3, reply 3, created 1", "egress 3, reply 3, created 1, handed off 6"];
            gateway.assert_delta(expected[usize::from(workers) - 1]);
        }
    }
}

trait AsSlices {
    fn as_slices(&self) -> Vec<&[u8]>;
}

impl AsSlices for Vec<Vec<u8>> {
    fn as_slices(&self) -> Vec<&[u8]> {
        self.iter().map(Vec::as_slice).collect()
    }
}

fn offsets(sent: &[Vec<u8>]) -> Vec<usize> {
    sent.iter().map(|fragment| read(fragment).2).collect()
}

#[test]
fn a_flow_keeps_its_order_behind_buffered_fragments() {
    let mut gateway = Gateway::new(&Setup::default());
    let [a, b, c] = [5, 6, 7].map(|id| udp_fragments(at(ENDS[0].0), at(ENDS[0].1), 1000, id));
    let whole = packet(Protocol::Udp, at(ENDS[0].0), at(ENDS[0].1));
    assert!(gateway.receive(0, INSIDE, &a[2]).is_empty());
    let sent = receive_batch(
        &mut gateway,
        INSIDE,
        &[&c[2], &c[1], &a[1], &a[0], &b[1], &whole, &b[0], &b[2], &a[0], &whole, &c[0]],
    );
    let ids: Vec<u32> = sent.iter().map(|packet| read(packet).1).collect();
    // A whole packet has no identification; a repeated first fragment of a complete datagram begins another one.
    let expected = [ids[0], ids[0], ids[0], 0, ids[4], ids[4], ids[4], ids[7], 0, ids[9], ids[9], ids[9]];
    assert_eq!(ids, expected);
    assert_eq!(offsets(&sent), [0, 800, 400, 0, 0, 400, 800, 0, 0, 0, 800, 400]);
    gateway.assert_delta("egress 12, created 1");
}

#[test]
fn exceeding_the_buffer_limit_drops_the_datagram_within_a_batch() {
    for at_once in [1, 64] {
        let mut gateway = Gateway::new(&Setup::default());
        // A worker buffers 32 frames, a quarter of them for one source.
        let mut all = udp_fragments(at(ENDS[0].0), at(ENDS[0].1), 400 * 9, 5);
        all.rotate_left(1);
        let sent: usize =
            all.as_slices().chunks(at_once).map(|packets| receive_batch(&mut gateway, INSIDE, packets).len()).sum();
        assert_eq!((sent, gateway.drops()), (0, HashMap::from([(DropReason::Fragment, 10)])), "{at_once} at once");
        gateway.check_frames();
        gateway.assert_delta("drop fragment 10");
    }
}

#[test]
fn an_overlap_does_not_affect_earlier_fragments_of_its_batch() {
    for at_once in [1, 64] {
        let mut gateway = Gateway::new(&Setup::default());
        let all = udp_fragments(at(ENDS[0].0), at(ENDS[0].1), 1400, 5);
        let mut overlapping = all[3].clone();
        overlapping[14 + 6..14 + 8].copy_from_slice(&(0x2000_u16 + 40).to_be_bytes());
        update_header_checksum(&mut overlapping);
        let order: [&[u8]; 6] = [&all[3], &all[2], &all[0], &overlapping, &all[1], &all[0]];
        let sent: Vec<_> =
            order.chunks(at_once).flat_map(|packets| receive_batch(&mut gateway, INSIDE, packets)).collect();
        assert_eq!(offsets(&sent), [0, 1200, 800], "{at_once} at once");
        assert_eq!(gateway.drops(), HashMap::from([(DropReason::Fragment, 3)]));
        let order: [&[u8]; 4] = [&all[3], &overlapping, &all[0], &all[2]];
        let other: Vec<Vec<u8>> = order
            .iter()
            .map(|packet| {
                let mut packet = packet.to_vec();
                packet[18..20].fill(7);
                update_header_checksum(&mut packet);
                packet
            })
            .collect();
        let sent: usize =
            other.as_slices().chunks(at_once).map(|packets| receive_batch(&mut gateway, INSIDE, packets).len()).sum();
        assert_eq!((sent, gateway.drops()), (0, HashMap::from([(DropReason::Fragment, 7)])), "{at_once} at once");
        gateway.check_frames();
        gateway.assert_delta("egress 3, drop fragment 7, created 1");
    }
}

/// In any order, on any queue and with repetitions, the remote can reassemble the datagram.
#[test]
fn datagrams_are_reassembled_from_any_order_and_queue() {
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() };
    let order = Just((0..4).chain(0..2).collect::<Vec<usize>>()).prop_shuffle();
    let strategy = (0_usize..2, order, prop::collection::vec(0_usize..2, 6));
    let classes =
        ["v4", "v6", "first fragment first", "first fragment later", "handed off", "repeated after completion"];
    property(config, &strategy, &classes, |(family, order, queues), coverage| {
        let (pod, remote, vip) = ENDS[family];
        let mut gateway = Gateway::new(&Setup { workers: 2, ..Setup::default() });
        gateway.skip_counter_check();
        coverage.count(["v4", "v6"][family]);
        coverage.count(if order[0] == 0 { "first fragment first" } else { "first fragment later" });
        let complete_at = (0..4).map(|fragment| order.iter().position(|it| *it == fragment).unwrap()).max().unwrap();
        coverage.add("repeated after completion", u64::from(complete_at < 5));
        let all = udp_fragments(at(pod), at(remote), 1400, 9);
        let mut sent = Vec::new();
        for (&fragment, &queue) in order.iter().zip(&queues) {
            sent.extend(gateway.receive(queue, INSIDE, &all[fragment]).into_iter().map(|(_, bytes)| bytes));
        }
        let (source, ..) = reassemble(&sent, 1400);
        prop_assert_eq!(source.ip(), ip(vip));
        let replies = udp_fragments(at(remote), source, 1400, 10);
        let mut received = Vec::new();
        for (&fragment, &queue) in order.iter().zip(&queues) {
            received
                .extend(gateway.receive(1 - queue, OUTSIDE, &replies[fragment]).into_iter().map(|(_, bytes)| bytes));
        }
        prop_assert_eq!(reassemble(&received, 1400).1, at(pod));
        prop_assert_eq!(gateway.drops(), HashMap::new());
        coverage.add("handed off", gateway.handoffs());
        Ok(())
    });
}
