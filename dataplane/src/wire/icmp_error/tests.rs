//! Parsing and translation of ICMP errors, against packets of an independent implementation.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::fixtures::{ErrorCase, QuotedTransport, datagram, message, tuples, v4, v6, with_valid_checksums};
use super::*;
use crate::flow::address::V6;

const CLIENT: u32 = 0x0a00_0001;
const SERVER: u32 = 0xc633_6407;
const ROUTER: u32 = 0xc000_0209;

fn tuple_v4() -> Tuple<u32> {
    Tuple { source: CLIENT, destination: SERVER, source_port: 4242, destination_port: 443, protocol: protocol::TCP }
}

fn tuple_v6() -> Tuple<V6> {
    let address = |text: &str| V6::from_bits(text.parse::<std::net::Ipv6Addr>().unwrap().to_bits());
    let (source, destination) = (address("2001:db8::1"), address("2001:db8:1::2"));
    Tuple { source, destination, source_port: 4242, destination_port: 443, protocol: protocol::TCP }
}

/// Parses an IPv4 error that quotes `quote`.
fn parse_v4(header: [u8; 6], quote: &[u8]) -> Result<Quote<u32>, ParseError> {
    parse(&message(header, ROUTER, CLIENT, quote), 20)
}

fn parse_v6(header: [u8; 6], quote: &[u8]) -> Result<Quote<V6>, ParseError> {
    let tuple = tuple_v6();
    parse(&message(header, tuple.destination, tuple.source, quote), 40)
}

/// A quoted IPv4 packet modified by `change`, with a valid header checksum.
fn modified_quote(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut packet = datagram(&tuple_v4(), QuotedTransport::Tcp, false, &[]);
    change(&mut packet);
    packet[10..12].fill(0);
    let sum = checksum::checksum(0, &packet[..20]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet
}

const UNREACHABLE: [u8; 6] = [3, 3, 0, 0, 0, 0];
const UNREACHABLE_V6: [u8; 6] = [1, 4, 0, 0, 0, 0];

#[test]
fn only_translatable_error_types_are_accepted() {
    let quote = datagram(&tuple_v4(), QuotedTransport::Tcp, false, &[]);
    for (kind, expected) in [(0, ParseError::NotAnError), (8, ParseError::NotAnError), (13, ParseError::NotAnError)] {
        assert_eq!(parse_v4([kind, 0, 0, 0, 0, 0], &quote), Err(expected), "{kind}");
    }
    for kind in [4, 5] {
        assert_eq!(parse_v4([kind, 0, 0, 0, 0, 0], &quote), Err(ParseError::Filtered), "{kind}");
    }
    for kind in [3, 11, 12] {
        assert_eq!(parse_v4([kind, 0, 0, 0, 0, 0], &quote).map(|q| (q.tuple, q.mtu)), Ok((tuple_v4(), None)), "{kind}");
    }
    let quote = datagram(&tuple_v6(), QuotedTransport::Tcp, false, &[]);
    for kind in 0..=255 {
        let result = parse_v6([kind, 0, 0, 0, 0, 0], &quote);
        match kind {
            1..=4 => assert_eq!(result.map(|quote| quote.tuple), Ok(tuple_v6()), "{kind}"),
            0..128 | 137 => assert_eq!(result, Err(ParseError::Filtered), "{kind}"),
            _ => assert_eq!(result, Err(ParseError::NotAnError), "{kind}"),
        }
    }
}

#[test]
fn the_mtu_is_parsed_from_the_types_that_have_one() {
    let quote = datagram(&tuple_v4(), QuotedTransport::Udp, false, &[]);
    assert_eq!(parse_v4([3, 4, 0, 0, 0x05, 0xdc], &quote).unwrap().mtu, Some(1500));
    assert_eq!(parse_v4([3, 4, 0, 0, 0, 0], &quote).unwrap().mtu, Some(0), "older than RFC 1191");
    assert_eq!(parse_v4([3, 3, 0, 0, 0x05, 0xdc], &quote).unwrap().mtu, None);
    let quote = datagram(&tuple_v6(), QuotedTransport::Udp, false, &[]);
    assert_eq!(parse_v6([2, 0, 0x40, 0, 0x05, 0], &quote).unwrap().mtu, Some(0x4000_0500), "no length field");
    assert_eq!(parse_v6([4, 0, 0, 0, 0, 40], &quote).unwrap().mtu, None);
}

#[test]
fn quotes_that_have_no_session_are_rejected_with_their_reason() {
    let quote = |change: fn(&mut [u8])| parse_v4(UNREACHABLE, &modified_quote(change)).map(|quote| quote.tuple);
    assert_eq!(quote(|_| ()), Ok(tuple_v4()));
    assert_eq!(quote(|p| p[6] = 0x20), Ok(tuple_v4()), "a first fragment has ports");
    for (high, low) in [(0, 1), (0x10, 0), (0x3f, 0xff)] {
        let later = modified_quote(|p| p[6..8].copy_from_slice(&[high, low]));
        assert_eq!(parse_v4(UNREACHABLE, &later), Err(ParseError::LaterFragment));
    }
    assert_eq!(quote(|p| p[9] = 47), Err(ParseError::UnsupportedProtocol));
    assert_eq!(quote(|p| p[9] = 58), Err(ParseError::UnsupportedProtocol), "ICMPv6 in IPv4");
    assert_eq!(quote(|p| p[0] = 0x65), Err(ParseError::Malformed));
    assert_eq!(quote(|p| p[0] = 0x44), Err(ParseError::Malformed));
    assert_eq!(quote(|p| p[2..4].copy_from_slice(&[0, 19])), Err(ParseError::Malformed));
    assert_eq!(
        quote(|p| p[2..4].copy_from_slice(&[0, 27])),
        Err(ParseError::Truncated),
        "bytes after the packet don't count"
    );
    assert_eq!(quote(|p| p[15] ^= 1), Err(ParseError::Misaddressed));
    for (kind, expected) in
        [(3, ParseError::QuotesError), (5, ParseError::QuotesError), (13, ParseError::UnsupportedProtocol)]
    {
        let inner = message([kind, 0, 0, 0, 0, 0], CLIENT, SERVER, &[0; 28]);
        assert_eq!(parse_v4(UNREACHABLE, &inner), Err(expected), "{kind}");
    }
    let (source, destination) = (tuple_v6().source, tuple_v6().destination);
    for (kind, expected) in
        [(1, ParseError::QuotesError), (137, ParseError::QuotesError), (135, ParseError::UnsupportedProtocol)]
    {
        let inner = message([kind, 0, 0, 0, 0, 0], source, destination, &[0; 28]);
        assert_eq!(parse_v6(UNREACHABLE_V6, &inner), Err(expected), "{kind}");
    }
    let mut short = datagram(&tuple_v6(), QuotedTransport::Udp, false, &[]);
    short[5] = 7;
    assert_eq!(parse_v6(UNREACHABLE_V6, &short), Err(ParseError::Truncated), "bytes after the packet don't count");
    let mut later = datagram(&tuple_v6(), QuotedTransport::Udp, true, &[]);
    assert!(parse_v6(UNREACHABLE_V6, &later).is_ok());
    // The fragment header follows both option headers.
    assert_eq!(later[40 + 32 + 3], 1, "more fragments");
    later[40 + 32 + 3] = 8;
    assert_eq!(parse_v6(UNREACHABLE_V6, &later), Err(ParseError::LaterFragment));
}

#[test]
fn the_quoted_addresses_are_found_whatever_is_quoted_by_which_type() {
    let (v4, v6) = (tuple_v4(), tuple_v6());
    let changes: [fn(&mut [u8]); 4] = [|p| p[9] = 47, |p| p[6] = 0x3f, |p| p[10] ^= 1, |p| p[2..4].fill(0)];
    for kind in [3, 4, 5, 11, 12] {
        for change in changes {
            let mut quote = datagram(&v4, QuotedTransport::Tcp, false, &[]);
            change(&mut quote);
            let error = message([kind, 0, 0, 0, 0, 0], ROUTER, CLIENT, &quote[..20]);
            assert_eq!(quoted_addresses::<u32>(&error, 20), Some((v4.source, v4.destination)), "{kind}");
        }
    }
    for kind in [1, 4, 100] {
        let mut quote = datagram(&v6, QuotedTransport::Udp, true, &[]);
        quote[6] = 51;
        let error = message([kind, 0, 0, 0, 0, 0], v6.destination, v6.source, &quote[..40]);
        assert_eq!(quoted_addresses::<V6>(&error, 40), Some((v6.source, v6.destination)), "{kind}");
    }
    let error = message(UNREACHABLE, ROUTER, CLIENT, &datagram(&v4, QuotedTransport::Tcp, false, &[]));
    for length in 0..=error.len() {
        assert_eq!(quoted_addresses::<u32>(&error[..length], 20).is_some(), length >= 20 + 8 + 20, "{length} bytes");
    }
    let error = message(UNREACHABLE_V6, v6.destination, v6.source, &datagram(&v6, QuotedTransport::Udp, false, &[]));
    for length in 0..=error.len() {
        assert_eq!(quoted_addresses::<V6>(&error[..length], 40).is_some(), length >= 40 + 8 + 40, "{length} bytes");
    }
    let other_version = message(UNREACHABLE, ROUTER, CLIENT, &datagram(&v6, QuotedTransport::Udp, false, &[]));
    assert_eq!(quoted_addresses::<u32>(&other_version, 20), None);
    assert_eq!(quoted_addresses::<u32>(&other_version, usize::MAX), None);
}

#[test]
fn an_error_about_an_error_has_no_quoted_addresses() {
    let (v4, v6) = (tuple_v4(), tuple_v6());
    let inner = message(UNREACHABLE, ROUTER, CLIENT, &datagram(&v4, QuotedTransport::Tcp, false, &[]));
    let mut later = inner.clone();
    later[7] = 1;
    for kind in [3, 4, 5, 11, 12] {
        let quoted = |quote: &[u8]| {
            let error = message([kind, 0, 0, 0, 0, 0], ROUTER, CLIENT, quote);
            quoted_addresses::<u32>(&error, 20)
        };
        assert!(quoted(&inner).is_none() && quoted(&later).is_some() && quoted(&inner[..20]).is_some(), "{kind}");
    }
    let inner = message(UNREACHABLE_V6, v6.destination, v6.source, &datagram(&v6, QuotedTransport::Udp, false, &[]));
    for next in [0, 43, 60] {
        // The ICMP header behind an extension header of eight bytes.
        let mut extended = [&inner[..40], &[58, 0, 0, 0, 0, 0, 0, 0], &inner[40..]].concat();
        extended[6] = next;
        for quote in [&inner, &extended] {
            let error = message([1, 0, 0, 0, 0, 0], v6.destination, v6.source, quote);
            assert_eq!(quoted_addresses::<V6>(&error, 40), None, "{next}");
        }
    }
}

#[test]
fn a_quote_truncated_before_its_first_8_transport_bytes_is_rejected() {
    for (inner, extended) in QuotedTransport::ALL.into_iter().flat_map(|inner| [(inner, false), (inner, true)]) {
        let quote = datagram(&tuple_v4(), inner, extended, &[]);
        let needed = if extended { 32 + 8 } else { 20 + 8 };
        for length in 0..=quote.len() {
            let result = parse_v4(UNREACHABLE, &quote[..length]).err();
            assert_eq!(result, (length < needed).then_some(ParseError::Truncated), "{inner:?}, {length} bytes");
        }
        let quote = datagram(&tuple_v6(), inner, extended, &[]);
        let needed = if extended { 40 + 40 + 8 } else { 40 + 8 };
        for length in 0..=quote.len() {
            let result = parse_v6(UNREACHABLE_V6, &quote[..length]).err();
            assert_eq!(result, (length < needed).then_some(ParseError::Truncated), "{inner:?}, {length} bytes");
        }
    }
}

#[test]
fn the_rfc_4884_length_is_in_words_of_the_family() {
    let quote = datagram(&tuple_v4(), QuotedTransport::Udp, false, &[0; 100]);
    assert_eq!(quote.len(), 128);
    let kinds: [fn(u8) -> [u8; 6]; 3] = [|n| [3, 1, 0, n, 0, 0], |n| [11, 0, 0, n, 0, 0], |n| [12, 0, 0, n, 0, 0]];
    for header in kinds {
        assert!(parse_v4(header(32), &quote).is_ok());
        assert_eq!(parse_v4(header(33), &quote), Err(ParseError::Malformed), "longer than the message");
        assert!(parse_v4(header(7), &quote).is_ok(), "the ports are in 28 bytes");
        assert_eq!(parse_v4(header(6), &quote), Err(ParseError::Truncated));
    }
    let quote = datagram(&tuple_v6(), QuotedTransport::Udp, false, &[0; 80]);
    for header in [|n| [1, 0, n, 0, 0, 0], |n| [3, 0, n, 0, 0, 0]] as [fn(u8) -> [u8; 6]; 2] {
        assert!(parse_v6(header(16), &quote).is_ok());
        assert_eq!(parse_v6(header(17), &quote), Err(ParseError::Malformed));
        assert!(parse_v6(header(6), &quote).is_ok());
        assert_eq!(parse_v6(header(5), &quote), Err(ParseError::Truncated));
    }
}

#[test]
fn a_wrong_offset_never_panics() {
    let packet = message(UNREACHABLE, ROUTER, CLIENT, &datagram(&tuple_v4(), QuotedTransport::Tcp, false, &[]));
    let quote = parse::<u32>(&packet, 20).unwrap();
    for l4 in (0..packet.len() + 9).filter(|l4| *l4 != 20).chain([usize::MAX - 7, usize::MAX]) {
        assert!(parse::<u32>(&packet, l4).is_err(), "{l4}");
        translate(&mut packet.clone(), l4, &quote, &tuple_v4(), 1, 2);
    }
    assert_eq!(parse::<u32>(&vec![0; 1 << 18], 20), Err(ParseError::Malformed), "longer than an IP packet");
}

/// The translated error of `old` equals, byte by byte, the error that `router` would send for `new`; and the reverse.
fn check_translation<A: IcmpErrorFamily>(
    case: &ErrorCase,
    (old, new): (Tuple<A>, Tuple<A>),
    (old_router, router): (A, A),
) -> Result<(), TestCaseError> {
    let original = case.error(&old, old_router);
    let mut packet = original.clone();
    let quote = parse::<A>(&packet, A::HEADER);
    prop_assert_eq!(quote.map(|quote| quote.tuple), Ok(case.visible_tuple(old)));
    prop_assert_eq!(quote.unwrap().mtu, (case.kind == 1).then_some(1500));
    translate(&mut packet, A::HEADER, &quote.unwrap(), &new, router, new.source);
    prop_assert_eq!(&packet, &case.error(&new, router));
    let back = parse::<A>(&packet, A::HEADER);
    prop_assert_eq!(back.map(|quote| quote.tuple), Ok(case.visible_tuple(new)));
    translate(&mut packet, A::HEADER, &back.unwrap(), &old, old_router, old.source);
    prop_assert_eq!(&packet, &original);
    Ok(())
}

#[test]
fn the_quoted_checksum_is_right_for_every_port() {
    // One of the ports makes the checksum zero, which UDP writes as 0xffff.
    for inner in
        [QuotedTransport::Tcp, QuotedTransport::Udp, QuotedTransport::UdpWithoutChecksum, QuotedTransport::EchoRequest]
    {
        let cut = 0;
        let case = ErrorCase { inner, extended: false, payload: vec![1, 2, 3], cut, extensions: false, kind: 0 };
        let original = case.error(&tuple_v4(), ROUTER);
        let quote = parse::<u32>(&original, 20).unwrap();
        for port in 0..=u16::MAX {
            let new = Tuple { source_port: port, ..tuple_v4() };
            let mut packet = original.clone();
            translate(&mut packet, 20, &quote, &new, ROUTER, new.source);
            assert_eq!(packet, case.error(&new, ROUTER), "{inner:?} {port}");
        }
    }
}

/// A corrupt error is rejected, or parsed and translated into one with a valid checksum. Never a panic.
fn check_corrupt<A: IcmpErrorFamily>(
    case: &ErrorCase,
    (old, new): (Tuple<A>, Tuple<A>),
    router: A,
    changes: &[(usize, u8)],
    length: usize,
) -> Result<(), TestCaseError> {
    let mut packet = case.error(&old, router);
    for (at, value) in changes {
        let at = at % packet.len();
        packet[at] ^= value;
    }
    packet.truncate(length.max(A::HEADER));
    let mut packet = with_valid_checksums::<A>(packet, A::HEADER);
    if let Ok(quote) = parse::<A>(&packet, A::HEADER) {
        let before = packet.len();
        translate(&mut packet, A::HEADER, &quote, &new, router, new.source);
        prop_assert_eq!(packet.len(), before);
        let pseudo = A::pseudo_header_sum(&packet, before - A::HEADER);
        prop_assert!(checksum::verifies(pseudo, &packet[A::HEADER..]));
        let again = parse::<A>(&packet, A::HEADER).map(|quote| (quote.tuple.source, quote.tuple.destination));
        prop_assert_eq!(again, Ok((new.source, new.destination)));
        translate(&mut packet[..before / 2], A::HEADER, &quote, &old, router, old.source);
    }
    Ok(())
}

/// One flipped bit in the ICMP message is detected.
fn check_flipped_bit<A: IcmpErrorFamily>(
    case: &ErrorCase,
    tuple: Tuple<A>,
    router: A,
    bit: usize,
) -> Result<(), TestCaseError> {
    let mut packet = case.error(&tuple, router);
    let bit = bit % ((packet.len() - A::HEADER) * 8);
    packet[A::HEADER + bit / 8] ^= 1 << (bit % 8);
    let result = parse::<A>(&packet, A::HEADER);
    let is_type = bit < 8;
    prop_assert!(result == Err(ParseError::Checksum) || (is_type && result.is_err()), "{result:?}");
    Ok(())
}

fn changes() -> impl Strategy<Value = Vec<(usize, u8)>> {
    prop::collection::vec((0..400_usize, 1..=255_u8), 0..5)
}

proptest! {
    #[test]
    fn a_translated_v4_error_equals_the_error_for_the_new_tuple(
        case in ErrorCase::any(), old in tuples(v4()), new in tuples(v4()), routers in (v4(), v4()),
    ) {
        check_translation(&case, (old, new), routers)?;
    }

    #[test]
    fn a_translated_v6_error_equals_the_error_for_the_new_tuple(
        case in ErrorCase::any(), old in tuples(v6()), new in tuples(v6()), routers in (v6(), v6()),
    ) {
        check_translation(&case, (old, new), routers)?;
    }

    #[test]
    fn a_flipped_bit_is_detected(
        case in ErrorCase::any(), old in tuples(v4()), old_v6 in tuples(v6()), bit: usize,
    ) {
        check_flipped_bit(&case, old, ROUTER, bit)?;
        check_flipped_bit(&case, old_v6, tuple_v6().destination, bit)?;
    }

    #[test]
    fn a_flipped_bit_in_the_quoted_header_is_detected(
        case in ErrorCase::any(), old in tuples(v4()), bit in 32..160_usize,
    ) {
        let mut packet = case.error(&old, ROUTER);
        packet[28 + bit / 8] ^= 1 << (bit % 8);
        // The checksum of the message is made valid again.
        packet[22..24].fill(0);
        let sum = checksum::checksum(0, &packet[20..]);
        packet[22..24].copy_from_slice(&sum.to_be_bytes());
        prop_assert_eq!(parse::<u32>(&packet, 20), Err(ParseError::QuotedChecksum));
    }

    #[test]
    fn corrupt_v4_errors_are_rejected_or_translated_consistently(
        case in ErrorCase::any(), old in tuples(v4()), new in tuples(v4()), changes in changes(),
        length in 0..400_usize,
    ) {
        check_corrupt(&case, (old, new), ROUTER, &changes, length)?;
    }

    #[test]
    fn corrupt_v6_errors_are_rejected_or_translated_consistently(
        case in ErrorCase::any(), old in tuples(v6()), new in tuples(v6()), changes in changes(),
        length in 0..400_usize,
    ) {
        check_corrupt(&case, (old, new), tuple_v6().destination, &changes, length)?;
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut noise in prop::collection::vec(any::<u8>(), 0..200), l4 in 0..220_usize) {
        let _ = parse::<u32>(&noise, l4);
        let _ = parse::<V6>(&noise, l4);
        for start in [0x45, 0x46, 0x60] {
            if let Some(first) = noise.first_mut() {
                *first = start;
            }
            let mut into = [0; MAX_LENGTH_V6];
            let _ = may_send_error(&noise);
            let _ = compose_v4(&mut into, &noise, IcmpError::NoRoute, ROUTER);
            let _ = compose_v6(&mut into, &noise, IcmpError::NoRoute, tuple_v6().source);
        }
        if let Ok(quote) = parse_v4(UNREACHABLE, &datagram(&tuple_v4(), QuotedTransport::Tcp, false, &[])) {
            translate(&mut noise, l4, &quote, &tuple_v4(), 1, 2);
        }
    }
}
