use etherparse::icmpv4::DestUnreachableHeader;
use etherparse::{Icmpv4Type, Icmpv6Type, PacketBuilder, icmpv6};
use proptest::prelude::*;
use vipgate_testkit::check_packet;

use super::*;

const VIP: u32 = 0xcb00_7101;
const PRIVATE: u32 = 0x0a00_0005;
const VIP6: u128 = 0x2001_0db8_0000_0000_0000_0000_0000_0001;
const PRIVATE6: u128 = 0xfd00_0000_0000_0000_0000_0000_0000_0005;

/// Public to private when sent, private to public when received.
struct Map(Side);

impl AddressMap for Map {
    fn v4(&self, address: u32) -> Option<u32> {
        let (from, to) = if self.0 == Side::Sent { (VIP, PRIVATE) } else { (PRIVATE, VIP) };
        (address == from).then_some(to)
    }

    fn v6(&self, address: V6) -> Option<V6> {
        let (from, to) = if self.0 == Side::Sent { (VIP6, PRIVATE6) } else { (PRIVATE6, VIP6) };
        (address.to_bits() == from).then(|| V6::from_bits(to))
    }

    fn hidden_v4(&self, address: u32) -> Option<u32> {
        (address == VIP).then_some(PRIVATE)
    }

    fn hidden_v6(&self, address: V6) -> Option<V6> {
        (address.to_bits() == VIP6).then(|| V6::from_bits(PRIVATE6))
    }
}

fn run(frame: &mut [u8], side: Side) {
    translate(frame, side, &Map(side));
}

const REMOTE: u32 = 0xc633_6407;
const REMOTE6: u128 = 0x2001_0db8_0000_0000_0000_0000_0000_0099;

/// What is in a packet.
#[derive(Clone, Copy, Debug)]
enum Content {
    Tcp,
    Udp,
    UdpWithoutChecksum,
    Echo,
    /// An error that quotes a TCP or UDP packet in the other direction, of which this many bytes.
    Error(bool, usize),
}

/// A frame from one address to another; of IPv6 if `v6`.
fn frame(v6: bool, from: (u32, u128), to: (u32, u128), content: Content, payload: &[u8]) -> Vec<u8> {
    let quoted;
    let payload = if let Content::Error(is_tcp, length) = content {
        let inner = if is_tcp { Content::Tcp } else { Content::Udp };
        quoted = frame(v6, to, from, inner, payload);
        &quoted[14..(14 + length).min(quoted.len())]
    } else {
        payload
    };
    let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let mut bytes = Vec::new();
    let builder = if v6 {
        ethernet.ipv6(from.1.to_be_bytes(), to.1.to_be_bytes(), 60)
    } else {
        ethernet.ipv4(from.0.to_be_bytes(), to.0.to_be_bytes(), 60)
    };
    match content {
        Content::Tcp => builder.tcp(4000, 443, 17, 1000).write(&mut bytes, payload),
        Content::Udp | Content::UdpWithoutChecksum => builder.udp(4000, 53).write(&mut bytes, payload),
        Content::Echo if v6 => builder.icmpv6_echo_request(7, 1).write(&mut bytes, payload),
        Content::Echo => builder.icmpv4_echo_request(7, 1).write(&mut bytes, payload),
        Content::Error(..) if v6 => {
            let kind = Icmpv6Type::DestinationUnreachable(icmpv6::DestUnreachableCode::Port);
            builder.icmpv6(kind).write(&mut bytes, payload)
        }
        Content::Error(..) => {
            let kind = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port);
            builder.icmpv4(kind).write(&mut bytes, payload)
        }
    }
    .unwrap();
    if matches!(content, Content::UdpWithoutChecksum) && !v6 {
        bytes[40..42].fill(0);
    }
    bytes
}

fn content() -> impl Strategy<Value = Content> {
    prop_oneof![
        Just(Content::Tcp),
        Just(Content::Udp),
        Just(Content::UdpWithoutChecksum),
        Just(Content::Echo),
        (any::<bool>(), 28_usize..120).prop_map(|(is_tcp, length)| Content::Error(is_tcp, length)),
    ]
}

const OWN: (u32, u128) = (VIP, VIP6);
const OUTSIDE: (u32, u128) = (REMOTE, REMOTE6);
const OWN_PRIVATE: (u32, u128) = (PRIVATE, PRIVATE6);

proptest! {
    #[test]
    fn what_is_sent_is_what_a_host_with_the_private_address_would_send(
        v6: bool,
        content in content(),
        payload in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let mut sent = frame(v6, OWN, OUTSIDE, content, &payload);
        let before = sent.clone();
        run(&mut sent, Side::Sent);
        check_packet(&sent);
        // A quote's own checksum may be cut off, and is 0xffff for 0 then.
        if !matches!(content, Content::Error(..)) {
            prop_assert_eq!(&sent, &frame(v6, OWN_PRIVATE, OUTSIDE, content, &payload));
        }
        run_back(&mut sent);
        prop_assert_eq!(sent, before);
    }

    #[test]
    fn what_is_received_is_what_a_host_with_the_vip_would_receive(
        v6: bool,
        content in content(),
        payload in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let mut received = frame(v6, OUTSIDE, OWN_PRIVATE, content, &payload);
        run(&mut received, Side::Received);
        check_packet(&received);
        if !matches!(content, Content::Error(..)) {
            prop_assert_eq!(&received, &frame(v6, OUTSIDE, OWN, content, &payload));
        }
    }

    #[test]
    fn a_forged_private_source_is_received_as_the_vip(v6: bool, content in content(), to_private: bool) {
        let (to, vip) = if to_private { (OWN_PRIVATE, OWN) } else { (OUTSIDE, OUTSIDE) };
        let mut received = frame(v6, OWN_PRIVATE, to, content, &[3; 20]);
        run(&mut received, Side::Received);
        check_packet(&received);
        if !matches!(content, Content::Error(..)) {
            prop_assert_eq!(&received, &frame(v6, OWN, vip, content, &[3; 20]));
        }
    }

    #[test]
    fn a_packet_that_is_cut_short_or_broken_is_translated_without_a_panic(
        v6: bool,
        content in content(),
        length in 0_usize..200,
        at in 0_usize..200,
        byte: u8,
    ) {
        for side in [Side::Sent, Side::Received] {
            let (from, to) = if side == Side::Sent { (OWN, OUTSIDE) } else { (OUTSIDE, OWN_PRIVATE) };
            let mut bytes = frame(v6, from, to, content, &[7; 30]);
            bytes.truncate(length);
            if let Some(broken) = bytes.get_mut(at) {
                *broken = byte;
            }
            run(&mut bytes, side);
        }
    }

    #[test]
    fn other_packets_stay_as_they_are(v6: bool, content in content(), sent: bool) {
        let side = if sent { Side::Sent } else { Side::Received };
        let mut other = frame(v6, OUTSIDE, (REMOTE + 1, REMOTE6 + 1), content, &[1, 2, 3]);
        let before = other.clone();
        run(&mut other, side);
        prop_assert_eq!(other, before);
    }

    #[test]
    fn any_bytes_are_translated_without_a_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..120), kind in 0..3_usize) {
        if let Some(field) = bytes.get_mut(12..14) {
            field.copy_from_slice(&[[8, 0], [0x86, 0xdd], [8, 6]][kind]);
        }
        run(&mut bytes, Side::Sent);
        run(&mut bytes, Side::Received);
    }
}

/// Undoes the translation of a frame that was sent: the private addresses become public ones.
fn run_back(frame: &mut [u8]) {
    translate(frame, Side::Sent, &Map(Side::Received));
}

#[test]
fn a_quote_names_the_private_address_as_its_own_side_had_it() {
    // An error that is sent quotes what was received, to the private address.
    let mut sent = frame(false, OWN, OUTSIDE, Content::Error(true, 60), &[]);
    run(&mut sent, Side::Sent);
    let quoted = &sent[14 + 20 + 8..];
    assert_eq!((&quoted[12..16], &quoted[16..20]), (&REMOTE.to_be_bytes()[..], &PRIVATE.to_be_bytes()[..]));
    // One that is received quotes what was sent, from the private address.
    let mut received = frame(false, OUTSIDE, OWN_PRIVATE, Content::Error(false, 60), &[]);
    run(&mut received, Side::Received);
    let quoted = &received[14 + 20 + 8..];
    assert_eq!((&quoted[12..16], &quoted[16..20]), (&VIP.to_be_bytes()[..], &REMOTE.to_be_bytes()[..]));
}

#[test]
fn an_error_of_a_router_quotes_the_private_address_too() {
    // As a gateway sends it, with an address of its own.
    let router = (0xc633_6401, 0x2001_0db8_0000_0000_0000_0000_0000_0053);
    for v6 in [false, true] {
        let quoted = frame(v6, OUTSIDE, OWN, Content::Udp, &[9; 20]);
        let mut error = Vec::new();
        let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
        if v6 {
            let kind = Icmpv6Type::DestinationUnreachable(icmpv6::DestUnreachableCode::Port);
            let builder = ethernet.ipv6(u128::to_be_bytes(router.1), OUTSIDE.1.to_be_bytes(), 60).icmpv6(kind);
            builder.write(&mut error, &quoted[14..]).unwrap();
        } else {
            let kind = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port);
            let builder = ethernet.ipv4(u32::to_be_bytes(router.0), OUTSIDE.0.to_be_bytes(), 60).icmpv4(kind);
            builder.write(&mut error, &quoted[14..]).unwrap();
        }
        run(&mut error, Side::Sent);
        check_packet(&error);
        let at = if v6 { 14 + 40 + 8 + 24 } else { 14 + 20 + 8 + 16 };
        let expected = if v6 { PRIVATE6.to_be_bytes().to_vec() } else { PRIVATE.to_be_bytes().to_vec() };
        assert_eq!(error[at..at + expected.len()], expected);
    }
}

#[test]
fn later_fragments_have_no_transport_header() {
    let mut first = frame(false, OWN, OUTSIDE, Content::Udp, &[1; 40]);
    let mut later = first.clone();
    // Offset 8 bytes: what looks like a header is payload.
    later[20..22].copy_from_slice(&1_u16.to_be_bytes());
    let payload = later[34..].to_vec();
    run(&mut first, Side::Sent);
    run(&mut later, Side::Sent);
    assert_eq!(later[26..30], PRIVATE.to_be_bytes());
    assert_eq!(later[34..], payload);
    assert_ne!(first[40..42], payload[6..8]);
}

#[test]
fn requests_replies_and_announcements_of_arp_and_neighbor_discovery_have_the_private_address() {
    let mac = [6; 6];
    let request = arp::Arp::request(mac, REMOTE, PRIVATE);
    let mut received = request.frame(ethernet::BROADCAST);
    run(&mut received, Side::Received);
    assert_eq!(received, arp::Arp { target: VIP, ..request }.frame(ethernet::BROADCAST));
    let announcement = arp::Arp { sender: VIP, target: VIP, ..request };
    let mut sent = announcement.frame(ethernet::BROADCAST);
    run(&mut sent, Side::Sent);
    assert_eq!(sent, arp::Arp { sender: PRIVATE, target: PRIVATE, ..request }.frame(ethernet::BROADCAST));

    let advertisement = ndp::Advertisement {
        target: V6::from_bits(VIP6),
        mac,
        destination: V6::from_bits(REMOTE6),
        destination_mac: [8; 6],
        solicited: true,
    };
    let mut sent = advertisement.frame();
    run(&mut sent, Side::Sent);
    assert_eq!(sent, ndp::Advertisement { target: V6::from_bits(PRIVATE6), ..advertisement }.frame());
}

#[test]
fn a_wrong_checksum_stays_wrong() {
    let mut sent = frame(false, OWN, OUTSIDE, Content::Tcp, b"data");
    sent[50] ^= 1;
    run(&mut sent, Side::Sent);
    let right = frame(false, OWN_PRIVATE, OUTSIDE, Content::Tcp, b"data");
    assert_ne!(sent[50..52], right[50..52]);
    assert_eq!((&sent[..50], &sent[52..]), (&right[..50], &right[52..]));
}
