//! Datagrams in fragments: in any order, on any queue, in both directions, and never more of them than there is room for.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use crate::support::*;
use crate::tally::property;
use etherparse::{NetSlice, PacketBuilder, SlicedPacket};
use proptest::prelude::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::wire::checksum;

/// A datagram of `payload` bytes, cut into pieces of 400.
pub(crate) fn pieces(source: SocketAddr, destination: SocketAddr, payload: usize, id: u32) -> Vec<Vec<u8>> {
    let body: Vec<u8> = (0..payload).map(|n| (n * 7 % 251) as u8).collect();
    let mut whole = Vec::new();
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64)
            .udp(source.port(), destination.port())
            .write(&mut whole, &body)
            .unwrap(),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64)
            .udp(source.port(), destination.port())
            .write(&mut whole, &body)
            .unwrap(),
        _ => panic!("mixed families"),
    }
    let v4 = source.is_ipv4();
    let (header, rest) = whole.split_at(if v4 { 20 } else { 40 });
    let from_pod = source.ip().to_string().starts_with("10.") || source.ip().to_string().starts_with("fd00:244");
    let link = if from_pod { (INSIDE_MAC, POD_MAC) } else { (OUTSIDE_MAC, ROUTER_MAC) };
    let count = rest.chunks(400).count();
    rest.chunks(400)
        .enumerate()
        .map(|(n, piece)| {
            let more = n + 1 < count;
            let mut bytes = [&link.0[..], &link.1[..], if v4 { &[8, 0] } else { &[0x86, 0xdd] }, header].concat();
            let ip = &mut bytes[14..];
            if v4 {
                ip[2..4].copy_from_slice(&(20 + piece.len() as u16).to_be_bytes());
                ip[4..6].copy_from_slice(&(id as u16).to_be_bytes());
                ip[6..8].copy_from_slice(&(u16::from(more) << 13 | (n * 50) as u16).to_be_bytes());
                seal_header(&mut bytes);
            } else {
                ip[4..6].copy_from_slice(&(8 + piece.len() as u16).to_be_bytes());
                ip[6] = 44;
                bytes.extend([17, 0]);
                bytes.extend((((n * 50) as u16) << 3 | u16::from(more)).to_be_bytes());
                bytes.extend(id.to_be_bytes());
            }
            bytes.extend(piece);
            bytes
        })
        .collect()
}

/// What a host makes of the fragments that it gets: source, destination, ports, identification. Panics unless the datagram is whole and
/// right. A repetition of a datagram that is complete already is one of its own.
fn put_together(fragments: &[Vec<u8>], payload: usize) -> (SocketAddr, SocketAddr, u32) {
    let mut bytes = vec![None; payload + 8];
    let mut all = Vec::new();
    let complete = |id: u32| {
        let offsets: HashSet<usize> = fragments.iter().map(|f| read(f)).filter(|f| f.1 == id).map(|f| f.2).collect();
        offsets.len() * 400 >= payload + 8
    };
    for fragment in fragments.iter().filter(|fragment| complete(read(fragment).1)) {
        let (ends, id, offset, piece) = read(fragment);
        all.push((ends, id));
        for (at, &byte) in piece.iter().enumerate() {
            assert!(bytes[offset + at].is_none_or(|other| other == byte));
            bytes[offset + at] = Some(byte);
        }
    }
    assert!(all.iter().all(|one| *one == all[0]), "all fragments leave alike: {all:?}");
    let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte.expect("nothing is missing")).collect();
    let ((source, destination), id) = all[0];
    let sum = |address: IpAddr| match address {
        IpAddr::V4(v4) => checksum::sum(&v4.octets()),
        IpAddr::V6(v6) => checksum::sum(&v6.octets()),
    };
    let pseudo = sum(source) + sum(destination) + 17 + bytes.len() as u32;
    assert!(checksum::verifies(pseudo, &bytes), "the checksum of the whole is right");
    let port = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    ((source, port(0)).into(), (destination, port(2)).into(), id)
}

type Read = ((IpAddr, IpAddr), u32, usize, Vec<u8>);

fn read(fragment: &[u8]) -> Read {
    match SlicedPacket::from_ethernet(fragment).unwrap().net.unwrap() {
        NetSlice::Ipv4(v4) => {
            let header = v4.header();
            let ends = (header.source_addr().into(), header.destination_addr().into());
            let offset = usize::from(header.fragments_offset().value()) * 8;
            (ends, header.identification().into(), offset, v4.payload().payload.to_vec())
        }
        NetSlice::Ipv6(v6) => {
            let ends = (v6.header().source_addr().into(), v6.header().destination_addr().into());
            let extension = &fragment[54..62];
            let offset = usize::from(u16::from_be_bytes([extension[2], extension[3]]) & 0xfff8);
            let id = u32::from_be_bytes(extension[4..8].try_into().unwrap());
            (ends, id, offset, fragment[62..].to_vec())
        }
        NetSlice::Arp(_) => panic!("ARP"),
    }
}

const ENDS: [(&str, &str, &str); 2] = [
    ("10.244.1.5:4000", "198.51.100.10:53", "192.0.2.10"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53", "2001:db8::10"),
];

#[test]
fn both_directions_and_both_families_in_order() {
    let mut gateway = Gateway::new(&Setup::default());
    for (pod, far, vip) in ENDS {
        let mut sent = Vec::new();
        for piece in pieces(at(pod), at(far), 1400, 77) {
            sent.extend(gateway.arrives(0, INSIDE, &piece));
        }
        let fragments: Vec<_> =
            sent.into_iter().map(|(interface, bytes)| (assert_eq!(interface, OUTSIDE), bytes).1).collect();
        let (source, destination, id) = put_together(&fragments, 1400);
        assert_eq!((source.ip(), destination), (ip(vip), at(far)));
        assert_ne!(id, 77, "pods behind one VIP share its identifications");
        let mut back = Vec::new();
        for piece in pieces(at(far), source, 900, 78) {
            back.extend(gateway.arrives(0, OUTSIDE, &piece));
        }
        let fragments: Vec<_> =
            back.into_iter().map(|(interface, bytes)| (assert_eq!(interface, INSIDE), bytes).1).collect();
        assert_eq!(put_together(&fragments, 900).1, at(pod));
    }
    assert_eq!(gateway.sessions(), 2);
    gateway.assert_delta("egress 8, reply 6, created 2");
}

#[test]
fn a_missing_first_one_frees_everything_after_its_time() {
    let mut gateway = Gateway::new(&Setup::default());
    for piece in &pieces(at(ENDS[0].0), at(ENDS[0].1), 1400, 5)[1..] {
        assert!(gateway.arrives(0, INSIDE, piece).is_empty(), "nothing without its ports");
    }
    assert_eq!(gateway.workers[0].tables().fragments.parked(), 3);
    gateway.pass(2_100);
    assert_eq!(gateway.workers[0].tables().fragments.parked(), 0);
    assert_eq!(gateway.drops(), HashMap::from([(DropReason::Fragment, 3)]));
    gateway.check_frames();
    gateway.assert_delta("drop fragment 3");
}

#[test]
fn what_overlaps_poisons_its_datagram() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut all = pieces(at(ENDS[0].0), at(ENDS[0].1), 1400, 5);
    let mut overlapping = all[1].clone();
    overlapping[14 + 6..14 + 8].copy_from_slice(&(0x2000_u16 + 40).to_be_bytes());
    overlapping[14 + 10..14 + 12].fill(0);
    let sum = checksum::checksum(0, &overlapping[14..34]);
    overlapping[24..26].copy_from_slice(&sum.to_be_bytes());
    all.insert(1, overlapping);
    let sent: usize = all.iter().map(|piece| gateway.arrives(0, INSIDE, piece).len()).sum();
    assert_eq!(sent, 1, "what came before is gone; nothing follows");
    assert_eq!(gateway.drops(), HashMap::from([(DropReason::Fragment, 4)]));
    gateway.assert_delta("egress 1, drop fragment 4, created 1");
}

#[test]
fn a_flood_of_fragments_costs_nobody_else() {
    let mut gateway = Gateway::new(&Setup::default());
    for id in 0..2000 {
        gateway.arrives(0, INSIDE, &pieces(at("10.244.1.6:9"), at("198.51.100.77:9"), 1400, id)[1]);
    }
    let mut sent = Vec::new();
    for piece in pieces(at(ENDS[0].0), at(ENDS[0].1), 1400, 5).into_iter().rev() {
        sent.extend(gateway.arrives(0, INSIDE, &piece).into_iter().map(|(_, bytes)| bytes));
    }
    put_together(&sent, 1400);
    gateway.assert_delta("egress 4, drop fragment 1992, created 1");
}

#[test]
fn pods_with_one_identification_leave_with_two() {
    let mut gateway = Gateway::new(&Setup::default());
    let ids = ["10.244.1.5:4000", "10.244.1.6:4000"].map(|pod| {
        let all = pieces(at(pod), at(ENDS[0].1), 1400, 5);
        let sent: Vec<_> =
            all.iter().flat_map(|piece| gateway.arrives(0, INSIDE, piece)).map(|(_, bytes)| bytes).collect();
        put_together(&sent, 1400).2
    });
    assert_ne!(ids[0], ids[1]);
    gateway.assert_delta("egress 8, created 2");
}

#[test]
fn what_policy_excludes_passes_as_it_is() {
    let mut gateway = Gateway::new(&Setup::default());
    for piece in pieces(at("10.244.1.21:4000"), at("198.51.100.200:53"), 1400, 5).into_iter().rev() {
        let sent = gateway.arrives(0, INSIDE, &piece);
        let ((source, _), id, ..) = read(&sent[0].1);
        assert_eq!((source, id), (ip("10.244.1.21"), 5));
    }
    gateway.assert_delta("unchanged 4");
}

#[test]
fn what_may_be_cut_is_cut_in_order_where_the_link_is_narrow() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut network = network();
    network.interfaces[1].mtu = 300;
    gateway.set_network(network);
    let sent: Vec<_> = pieces(at(ENDS[0].0), at(ENDS[0].1), 392, 5)
        .iter()
        .flat_map(|piece| gateway.arrives(0, INSIDE, piece))
        .map(|(_, bytes)| bytes)
        .collect();
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().all(|piece| piece.len() <= 314) && read(&sent[0]).2 == 0, "the first comes first");
    let mut bytes = [0_u8; 400];
    for piece in &sent {
        let (_, _, offset, payload) = read(piece);
        bytes[offset..offset + payload.len()].copy_from_slice(&payload);
    }
    assert_eq!(bytes[399], (391 * 7 % 251) as u8);
    gateway.check_frames();
    gateway.assert_delta("egress 1, created 1");
}

/// What leaves when all these arrive on one queue before the next turn.
fn arrive_at_once(gateway: &mut Gateway, from: InterfaceId, packets: &[&[u8]]) -> Vec<Vec<u8>> {
    for packet in packets {
        assert!(gateway.workers[0].io().inject(from, packet));
    }
    gateway.run().into_iter().map(|(_, bytes)| bytes).collect()
}

#[test]
fn those_that_come_in_one_batch_before_their_first_one_follow_it() {
    for (pod, far, vip) in ENDS {
        for workers in [1, 2] {
            let mut gateway = Gateway::new(&Setup { workers, ..Setup::default() });
            let mut all = pieces(at(pod), at(far), 1000, 5);
            all.reverse();
            let sent = arrive_at_once(&mut gateway, INSIDE, &all.each());
            let (source, destination, _) = put_together(&sent, 1000);
            assert_eq!((source.ip(), destination), (ip(vip), at(far)));
            assert_eq!(offsets(&sent), [0, 800, 400], "the first one first, then as they came");
            let mut back = pieces(at(far), source, 1000, 6);
            back.reverse();
            let came = arrive_at_once(&mut gateway, OUTSIDE, &back.each());
            assert_eq!(put_together(&came, 1000).1, at(pod));
            assert_eq!(offsets(&came), [0, 800, 400]);
            let by_workers = ["egress 3, reply 3, created 1", "egress 3, reply 3, created 1, handed over 6"];
            gateway.assert_delta(by_workers[usize::from(workers) - 1]);
        }
    }
}

trait Each {
    fn each(&self) -> Vec<&[u8]>;
}

impl Each for Vec<Vec<u8>> {
    fn each(&self) -> Vec<&[u8]> {
        self.iter().map(Vec::as_slice).collect()
    }
}

fn offsets(sent: &[Vec<u8>]) -> Vec<usize> {
    sent.iter().map(|fragment| read(fragment).2).collect()
}

#[test]
fn nothing_of_a_flow_overtakes_what_waited_for_its_first_fragment() {
    let mut gateway = Gateway::new(&Setup::default());
    let [a, b, c] = [5, 6, 7].map(|id| pieces(at(ENDS[0].0), at(ENDS[0].1), 1000, id));
    let whole = packet(Protocol::Udp, at(ENDS[0].0), at(ENDS[0].1));
    assert!(gateway.arrives(0, INSIDE, &a[2]).is_empty());
    let sent = arrive_at_once(
        &mut gateway,
        INSIDE,
        &[&c[2], &c[1], &a[1], &a[0], &b[1], &whole, &b[0], &b[2], &a[0], &whole, &c[0]],
    );
    let ids: Vec<u32> = sent.iter().map(|packet| read(packet).1).collect();
    // A whole one has none; what repeats the first fragment of a complete one begins another.
    let one_by_one = [ids[0], ids[0], ids[0], 0, ids[4], ids[4], ids[4], ids[7], 0, ids[9], ids[9], ids[9]];
    assert_eq!(ids, one_by_one);
    assert_eq!(offsets(&sent), [0, 800, 400, 0, 0, 400, 800, 0, 0, 0, 800, 400]);
    assert_eq!(gateway.drops(), HashMap::new());
    gateway.assert_delta("egress 12, created 1");
}

#[test]
fn a_seventeenth_early_fragment_ends_its_datagram_although_the_first_one_is_in_its_batch() {
    for at_once in [1, 64] {
        let mut gateway = Gateway::new(&Setup::default());
        // The frames that may wait are one worker's 32, and a quarter of them one source's.
        let mut all = pieces(at(ENDS[0].0), at(ENDS[0].1), 400 * 9, 5);
        all.rotate_left(1);
        let sent: usize =
            all.each().chunks(at_once).map(|packets| arrive_at_once(&mut gateway, INSIDE, packets).len()).sum();
        assert_eq!((sent, gateway.drops()), (0, HashMap::from([(DropReason::Fragment, 10)])), "{at_once} at once");
        gateway.check_frames();
        gateway.assert_delta("drop fragment 10");
    }
}

#[test]
fn an_overlap_in_the_batch_of_the_first_one_changes_nothing_for_those_before() {
    for at_once in [1, 64] {
        let mut gateway = Gateway::new(&Setup::default());
        let all = pieces(at(ENDS[0].0), at(ENDS[0].1), 1400, 5);
        let mut overlapping = all[3].clone();
        overlapping[14 + 6..14 + 8].copy_from_slice(&(0x2000_u16 + 40).to_be_bytes());
        seal_header(&mut overlapping);
        let order: [&[u8]; 6] = [&all[3], &all[2], &all[0], &overlapping, &all[1], &all[0]];
        let sent: Vec<_> =
            order.chunks(at_once).flat_map(|packets| arrive_at_once(&mut gateway, INSIDE, packets)).collect();
        assert_eq!(offsets(&sent), [0, 1200, 800], "{at_once} at once");
        assert_eq!(gateway.drops(), HashMap::from([(DropReason::Fragment, 3)]));
        let order: [&[u8]; 4] = [&all[3], &overlapping, &all[0], &all[2]];
        let other: Vec<Vec<u8>> = order
            .iter()
            .map(|packet| {
                let mut packet = packet.to_vec();
                packet[18..20].fill(7);
                seal_header(&mut packet);
                packet
            })
            .collect();
        let sent: usize =
            other.each().chunks(at_once).map(|packets| arrive_at_once(&mut gateway, INSIDE, packets).len()).sum();
        assert_eq!((sent, gateway.drops()), (0, HashMap::from([(DropReason::Fragment, 7)])), "{at_once} at once");
        gateway.check_frames();
        gateway.assert_delta("egress 3, drop fragment 7, created 1");
    }
}

/// Whatever the order, the queues and the repetitions, the far side can put the datagram together.
#[test]
fn any_order_on_any_queue_arrives_whole() {
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() };
    let order = Just((0..4).chain(0..2).collect::<Vec<usize>>()).prop_shuffle();
    let strategy = (0_usize..2, order, prop::collection::vec(0_usize..2, 6));
    let classes = ["v4", "v6", "first one first", "first one later", "handed over", "repeated after all"];
    property(config, &strategy, &classes, |(family, order, queues), tally| {
        let (pod, far, vip) = ENDS[family];
        let mut gateway = Gateway::new(&Setup { workers: 2, ..Setup::default() });
        gateway.counts_vary();
        tally.count(["v4", "v6"][family]);
        tally.count(if order[0] == 0 { "first one first" } else { "first one later" });
        let all_at = (0..4).map(|piece| order.iter().position(|it| *it == piece).unwrap()).max().unwrap();
        tally.add("repeated after all", u64::from(all_at < 5));
        let all = pieces(at(pod), at(far), 1400, 9);
        let mut sent = Vec::new();
        for (&piece, &queue) in order.iter().zip(&queues) {
            sent.extend(gateway.arrives(queue, INSIDE, &all[piece]).into_iter().map(|(_, bytes)| bytes));
        }
        let (source, ..) = put_together(&sent, 1400);
        prop_assert_eq!(source.ip(), ip(vip));
        let back = pieces(at(far), source, 1400, 10);
        let mut received = Vec::new();
        for (&piece, &queue) in order.iter().zip(&queues) {
            received.extend(gateway.arrives(1 - queue, OUTSIDE, &back[piece]).into_iter().map(|(_, bytes)| bytes));
        }
        prop_assert_eq!(put_together(&received, 1400).1, at(pod));
        prop_assert_eq!(gateway.drops(), HashMap::new());
        tally.add("handed over", gateway.handoffs());
        Ok(())
    });
}
