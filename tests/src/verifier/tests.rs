//! Verifiers on handmade captures: valid traffic passes, each violation is found.

use std::net::{IpAddr, Ipv4Addr};

use super::*;

const VIP: &str = "192.0.2.10";
const REMOTE: [u8; 4] = [198, 51, 100, 10];
const POD: [u8; 4] = [10, 1, 0, 11];

fn frame(time: u64, packet: &[u8]) -> Frame {
    let mut bytes = vec![2; 12];
    bytes.extend([8, 0]);
    bytes.extend(packet);
    Frame { time, capture: 0, length: bytes.len(), bytes }
}

fn ip(protocol: u8, from: [u8; 4], to: [u8; 4], rest: &[u8]) -> Vec<u8> {
    let length = (20 + rest.len()) as u16;
    let mut bytes = vec![0x45, 0];
    bytes.extend(length.to_be_bytes());
    bytes.extend([0, 1, 0x40, 0, 64, protocol, 0, 0]);
    bytes.extend([from, to].concat());
    bytes.extend(rest);
    bytes
}

fn udp(from: ([u8; 4], u16), to: ([u8; 4], u16), payload: &[u8]) -> Vec<u8> {
    let mut bytes = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
    bytes.extend((8 + payload.len() as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    ip(17, from.0, to.0, &bytes)
}

fn request(time: u64, port: u16, payload: &str) -> Frame {
    frame(time, &udp(([192, 0, 2, 10], port), (REMOTE, 7700), payload.as_bytes()))
}

fn reply(time: u64, port: u16, payload: &str) -> Frame {
    frame(time, &udp((REMOTE, 7700), ([192, 0, 2, 10], port), payload.as_bytes()))
}

#[test]
fn sequential_tuple_reuse_passes_and_concurrent_reuse_is_found() {
    let valid = [
        request(1, 5000, "00000001 000000\n"),
        request(2, 5001, "00000002 000000\n"),
        reply(3, 5000, "00000001 000000\n"),
        request(9, 5000, "00000003 000000\n"),
    ];
    assert_eq!(concurrent_tuple_reuse(&valid, &[VIP]), Vec::<String>::new());
    let mut invalid = valid.to_vec();
    // A reply to the first client, after the tuple was reused.
    invalid.push(reply(10, 5000, "00000001 000001\n"));
    let found = concurrent_tuple_reuse(&invalid, &[VIP]);
    assert!(found.len() == 1 && found[0].contains("client 3 overlaps with 1"), "{found:?}");
    assert_eq!(concurrent_tuple_reuse(&invalid, &["192.0.2.11"]), Vec::<String>::new(), "another VIP");
}

#[test]
fn tuples_shared_in_server_records_are_found() {
    let first = (false, VIP, 5000, "198.51.100.10", "00000001");
    assert!(shared_tuples([first, first, (true, VIP, 5000, "198.51.100.10", "00000002")]).is_empty());
    assert_eq!(shared_tuples([first, (false, VIP, 5000, "198.51.100.10", "00000002")]).len(), 1);
}

#[test]
fn a_pod_address_is_found_in_headers_and_quoted_packets() {
    let valid = request(1, 5000, "00000001 000000\n");
    let bare = frame(2, &udp((POD, 5000), (REMOTE, 7700), b"x"));
    let mut error = vec![3, 4, 0, 0, 0, 0, 5, 0];
    error.extend(udp((REMOTE, 7700), (POD, 5000), b"x"));
    let quoting = frame(3, &ip(1, [192, 0, 2, 10], REMOTE, &error));
    assert_eq!(leaked_pod_addresses(&[valid, bare, quoting]).len(), 2);
}

const REMOTE_V6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0x51, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10];
const POD_V6: [u8; 16] = [0xfd, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x11];

fn ipv6(next: u8, from: [u8; 16], to: [u8; 16], rest: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x60, 0, 0, 0, 0, rest.len() as u8, next, 64];
    bytes.extend([from, to].concat());
    bytes.extend(rest);
    bytes
}

/// An ICMP error.
fn error(kind: u8, quote: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0, 0, 0, 0, 0][..], quote].concat()
}

#[test]
fn a_pod_address_is_found_behind_tags_and_ip_options() {
    let bare = udp((POD, 5000), (REMOTE, 7700), b"x");
    let mut options = ip(1, [192, 0, 2, 10], REMOTE, &[&[1; 40][..], &error(11, &bare)].concat());
    options[0] = 0x4f;
    assert_eq!(leaked_pod_addresses(&[frame(1, &options)]).len(), 1);
    let tags: [&[u8]; 5] = [
        &[0x81, 0, 0, 0],
        &[0x88, 0xa8, 0, 5],
        &[0x91, 0, 0, 0],
        &[0x88, 0xa8, 0, 0, 0x81, 0, 0xa0, 0, 0x81, 0, 0, 7],
        &[0x88, 0xcc, 0, 0],
    ];
    for (tags, found) in tags.into_iter().zip([1, 1, 1, 1, 0]) {
        let mut tagged = frame(1, &bare);
        tagged.bytes.splice(12..12, tags.iter().copied());
        assert_eq!(leaked_pod_addresses(&[tagged]).len(), found, "{tags:x?}");
    }
}

#[test]
fn a_quoted_pod_address_is_found_behind_extension_headers() {
    let message = error(3, &ipv6(17, REMOTE_V6, POD_V6, &[0; 8]));
    let chains: [(u8, &[u8]); 7] = [
        (0, &[58, 0, 1, 4, 0, 0, 0, 0]),
        (60, &[58, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (43, &[44, 0, 4, 0, 0, 0, 0, 0, 58, 0, 0, 1, 0, 0, 0, 7]),
        (51, &[58, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]),
        (0, &[135, 0, 1, 4, 0, 0, 0, 0, 140, 0, 0, 0, 0, 0, 0, 0, 58, 0, 0, 0, 0, 0, 0, 0]),
        // Behind an unknown header, and in a later fragment.
        (50, &[58, 0, 0, 0, 0, 0, 0, 0]),
        (44, &[58, 0, 0, 8, 0, 0, 0, 7]),
    ];
    for ((first, headers), found) in chains.into_iter().zip([1, 1, 1, 1, 1, 0, 0]) {
        let packet = ipv6(first, REMOTE_V6, REMOTE_V6, &[headers, &message].concat());
        let mut captured = frame(1, &packet);
        captured.bytes[12..14].copy_from_slice(&[0x86, 0xdd]);
        assert_eq!(leaked_pod_addresses(&[captured]).len(), found, "behind {first}");
    }
}

#[test]
fn a_pod_address_is_found_in_nested_and_truncated_quotes() {
    let bare = udp((REMOTE, 7700), (POD, 5000), b"x");
    let nested = ip(1, REMOTE, REMOTE, &error(3, &ip(1, REMOTE, REMOTE, &error(12, &bare))));
    let mut cut_options = bare[..20].to_vec();
    cut_options[0] = 0x4f;
    let truncated = ip(1, REMOTE, REMOTE, &error(3, &cut_options));
    let incomplete = ip(1, REMOTE, REMOTE, &error(3, &bare[..19]));
    let mut later_fragment = ip(1, REMOTE, REMOTE, &error(3, &bare));
    later_fragment[7] = 3;
    let captured = [nested, truncated, incomplete, later_fragment].map(|packet| frame(1, &packet));
    let found = captured.map(|frame| leaked_pod_addresses(&[frame]).len());
    assert_eq!(found, [1, 1, 0, 0]);
}

#[test]
fn tunnel_packets_are_counted_once_at_their_sender() {
    let tunnelled = |time: u64, place: usize, from: u8, to: u8, number: &str| {
        let mut payload = vec![8, 0, 0, 0, 0x76, 0x70, 1, 0];
        payload.extend([2; 12]);
        payload.extend([8, 0]);
        payload.extend(udp((POD, 5000), (REMOTE, 7700), number.as_bytes()));
        let outer = udp(([10, 2, 0, from], 4790), ([10, 2, 0, to], 4790), &payload);
        Frame { capture: place, ..frame(time, &outer) }
    };
    let by_place = |place: usize, sender: IpAddr| sender == IpAddr::from(Ipv4Addr::new(10, 2, 0, place as u8 + 1));
    // Captured at both gateways, it counts once.
    let mut frames = vec![tunnelled(1, 0, 1, 2, "00000001 000000\n"), tunnelled(2, 1, 1, 2, "00000001 000000\n")];
    let none = |_: usize, _: &[u8]| false;
    let inner = tunnel_packets(&frames, 4790, by_place);
    assert_eq!((inner.len(), inner[0].1.vni), (1, 0x0076_7001));
    assert_eq!(most_traversed(&inner, &[], none, false).0, 1);
    assert!(tunnel_packets(&frames, 4789, by_place).is_empty(), "another port");
    frames.push(tunnelled(3, 1, 2, 1, "00000001 000000\n"));
    assert_eq!(most_traversed(&tunnel_packets(&frames, 4790, by_place), &[], none, false).0, 2, "it was sent back");
    // Two arrivals explain two tunnel packets, but not three.
    let arrivals = vec![frame(0, &udp((POD, 5000), (REMOTE, 7700), b"00000001 000000\n")); 2];
    let to_gateway = |place: usize, to: &[u8]| place == 0 && to == [2; 6];
    assert_eq!(
        most_traversed(&tunnel_packets(&frames, 4790, by_place), &arrivals, none, false).0,
        2,
        "to another MAC address"
    );
    assert_eq!(most_traversed(&tunnel_packets(&frames, 4790, by_place), &arrivals, to_gateway, false).0, 1);
    frames.push(tunnelled(4, 0, 1, 2, "00000001 000000\n"));
    assert_eq!(most_traversed(&tunnel_packets(&frames, 4790, by_place), &arrivals, to_gateway, false).0, 2);
}

#[test]
fn claims_are_distinguished_from_requests_and_counted_where_they_entered() {
    let mac = [2, 0, 0, 0, 0, 1];
    let arp = |operation: u8, sender: [u8; 4], target: [u8; 4]| {
        let mut bytes = vec![255; 6];
        bytes.extend(mac);
        bytes.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, operation]);
        bytes.extend(mac);
        bytes.extend(sender);
        bytes.extend([0; 6]);
        bytes.extend(target);
        Frame { time: 1, capture: 0, length: bytes.len(), bytes }
    };
    let (vip, router) = ([203, 0, 113, 20], [203, 0, 113, 254]);
    let mut frames = vec![arp(1, vip, router), arp(2, vip, router), arp(1, vip, vip), arp(1, router, vip)];
    let found: Vec<ClaimKind> =
        address_claims(&frames, "203.0.113.20", &[mac]).iter().map(|claim| claim.kind).collect();
    assert_eq!(found, [ClaimKind::Reply, ClaimKind::Announcement]);
    for frame in &mut frames {
        frame.capture = 1;
    }
    assert!(address_claims(&frames, "203.0.113.20", &[mac, [9; 6]]).is_empty(), "captured at another gateway");
}

#[test]
fn a_pcap_file_with_an_incomplete_end_is_read() {
    let mut file = 0xa1b2_3c4d_u32.to_ne_bytes().to_vec();
    file.resize(24, 0);
    for word in [7_u32, 5, 3, 60] {
        file.extend(word.to_ne_bytes());
    }
    file.extend([1, 2, 3]);
    let whole = vec![Frame { time: 7_000_000_005, capture: 4, bytes: vec![1, 2, 3], length: 60 }];
    assert_eq!(read_pcap(&file, 4), whole);
    file.extend([0; 17]);
    file.truncate(24 + 16 + 3 + 10);
    assert_eq!(read_pcap(&file, 4), whole);
}
