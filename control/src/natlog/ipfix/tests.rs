//! Byte-exact IPFIX messages, and properties of all messages.

use super::*;

const AT: u64 = 1_700_000_000_123;

fn block(tenant: &str, v6: bool) -> NatEvent<'_> {
    let (endpoint, vip) = if v6 { ("fd00::21", "2001:db8:113::10") } else { ("10.1.0.21", "203.0.113.10") };
    NatEvent::Block {
        allocated: true,
        endpoint: endpoint.parse().unwrap(),
        vip: vip.parse().unwrap(),
        first: 1024,
        last: 1087,
        ports: 64,
        tenant,
    }
}

fn session(tenant: &str, v6: bool) -> NatEvent<'_> {
    let text = if v6 {
        ["[fd00::21]:40000", "[2001:db8:51::10]:443", "[2001:db8:113::10]:1030", "[2001:db8:51::10]:443"]
    } else {
        ["10.1.0.21:40000", "198.51.100.10:443", "203.0.113.10:1030", "198.51.100.10:443"]
    };
    let [from, to, as_from, as_to] = text.map(|it| it.parse().unwrap());
    NatEvent::Session {
        created: false,
        inbound: false,
        protocol: 6,
        original: (from, to),
        translated: (as_from, as_to),
        tenant,
    }
}

fn number(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]))
}

/// The sequence number of a message.
fn sequence(message: &[u8]) -> u32 {
    u32::from_be_bytes(message[8..12].try_into().unwrap())
}

/// Decodes a message by the templates only: template and name of each record.
fn read(message: &[u8]) -> Vec<(Template, String)> {
    assert_eq!((number(message, 0), number(message, 2)), (10, message.len()));
    let (mut at, mut records) = (HEADER, Vec::new());
    while at < message.len() {
        let template = Template::ALL.into_iter().find(|it| *it as usize == number(message, at)).unwrap();
        let end = at + number(message, at + 2);
        at += SET_HEADER;
        while at < end {
            let from = at + fixed_length(template) + 1;
            let to = from + usize::from(message[from - 1]);
            records.push((template, String::from_utf8(message[from..to].to_vec()).unwrap()));
            at = to;
        }
        assert_eq!(at, end);
    }
    records
}

#[test]
fn a_block_and_a_session_are_encoded_byte_exactly() {
    let mut encoder = Encoder::new(7, 1400);
    assert_eq!(encoder.push(AT, &block("shop", false)), None);
    assert_eq!(encoder.push(AT, &session("", false)), None);
    let expected: &[&[u8]] = &[
        // Version, length, export time, sequence number, domain.
        &[0, 10, 0, 90, 0x65, 0x53, 0xf1, 0x01, 0, 0, 0, 0, 0, 0, 0, 7],
        &[1, 0, 0, 34],                              // a set of blocks over IPv4
        &[0, 0, 0x01, 0x8b, 0xcf, 0xe5, 0x68, 0x7b], // the time
        &[16, 10, 1, 0, 21, 203, 0, 113, 10],        // allocated: endpoint, VIP
        &[4, 0, 4, 63, 0, 1, 0, 64],                 // first, last, step, ports
        &[4, b's', b'h', b'o', b'p'],
        &[1, 2, 0, 40], // a set of sessions over IPv4
        &[0, 0, 0x01, 0x8b, 0xcf, 0xe5, 0x68, 0x7b],
        &[5, 1, 6],                                             // deleted, opened from inside, TCP
        &[10, 1, 0, 21, 0x9c, 0x40, 198, 51, 100, 10, 1, 0xbb], // before translation
        &[203, 0, 113, 10, 4, 6, 198, 51, 100, 10, 1, 0xbb],    // after translation
        &[0],
    ];
    assert_eq!(encoder.finish(1_700_000_001), Some(expected.concat()));
    assert_eq!(encoder.finish(1_700_000_001), None);
}

#[test]
fn the_templates_are_encoded_in_one_set() {
    let message = Encoder::new(7, 0).templates(1_700_000_001);
    assert_eq!(message.len(), 16 + 4 + 2 * (4 + 9 * 4) + 2 * (4 + 13 * 4));
    assert_eq!(message[..16], [0, 10, 0, 212, 0x65, 0x53, 0xf1, 0x01, 0, 0, 0, 0, 0, 0, 0, 7]);
    assert_eq!(message[16..24], [0, 2, 0, 196, 1, 0, 0, 9]);
    let fields = [[323, 8], [230, 1], [8, 4], [225, 4], [361, 2], [362, 2], [363, 2], [364, 2], [371, 0xffff]];
    assert_eq!(message[24..60], fields.concat().into_iter().flat_map(u16::to_be_bytes).collect::<Vec<_>>());
    assert_eq!(message[60..64], [1, 1, 0, 9]);
}

#[test]
fn sequence_numbers_count_the_records_of_earlier_messages() {
    let mut encoder = Encoder::new(1, 1400);
    for _ in 0..3 {
        assert_eq!(encoder.push(AT, &block("a", true)), None);
    }
    assert_eq!(sequence(&encoder.templates(1)), 0);
    assert_eq!(sequence(&encoder.finish(1).unwrap()), 0);
    assert_eq!(sequence(&encoder.templates(1)), 3);
    encoder.sequence = u32::MAX;
    for expected in [u32::MAX, 0] {
        encoder.push(AT, &session("a", true));
        assert_eq!(sequence(&encoder.finish(1).unwrap()), expected);
    }
}

#[test]
fn no_message_exceeds_its_limit_and_no_record_is_lost() {
    for limit in [0, 358, 512, 1400, 1_000_000] {
        let mut encoder = Encoder::new(1, limit);
        let (mut pushed, mut messages) = (Vec::new(), Vec::new());
        for round in 0..2000_usize {
            let tenant = "t".repeat(round * 37 % 300);
            let event = if round % 3 == 0 { block(&tenant, round % 5 == 0) } else { session(&tenant, round % 7 < 3) };
            pushed.push((event.template(), tenant[..tenant.len().min(254)].to_owned()));
            messages.extend(encoder.push(AT, &event));
        }
        messages.extend(encoder.finish(1));
        let mut records = Vec::new();
        for message in &messages {
            assert!(message.len() <= limit.clamp(358, 65535), "{} of {limit}", message.len());
            assert_eq!(sequence(message) as usize, records.len());
            records.extend(read(message));
        }
        assert_eq!(records, pushed, "limit {limit}");
    }
}

#[test]
fn a_long_name_is_truncated_at_a_character_boundary() {
    for (name, expected) in
        [("x".repeat(255), "x".repeat(254)), ("é".repeat(200), "é".repeat(127)), ("€".repeat(85), "€".repeat(84))]
    {
        let mut encoder = Encoder::new(1, 0);
        encoder.push(AT, &session(&name, true));
        assert_eq!(read(&encoder.finish(1).unwrap()), [(Template::SessionV6, expected)]);
    }
}

#[test]
fn each_event_has_its_nat_event_value() {
    let numbers = |event: NatEvent<'_>| {
        let other = match event {
            NatEvent::Block { endpoint, vip, first, last, ports, tenant, allocated } => {
                NatEvent::Block { endpoint, vip, first, last, ports, tenant, allocated: !allocated }
            }
            NatEvent::Session { inbound, protocol, original: before, translated: after, tenant, created } => {
                NatEvent::Session { inbound, protocol, original: before, translated: after, tenant, created: !created }
            }
        };
        [event.number(), other.number()]
    };
    assert_eq!(numbers(block("a", false)), [16, 17]);
    assert_eq!(numbers(block("a", true)), [16, 17]);
    assert_eq!(numbers(session("a", false)), [5, 4]);
    assert_eq!(numbers(session("a", true)), [2, 1]);
}

#[test]
fn mixed_families_are_encoded_as_ipv6() {
    let NatEvent::Session { created, inbound, protocol, original, tenant, .. } = session("a", true) else {
        unreachable!()
    };
    let after = ("203.0.113.10:1".parse().unwrap(), original.1);
    let event = NatEvent::Session { created, inbound, protocol, original, translated: after, tenant };
    let mut encoder = Encoder::new(1, 1400);
    encoder.push(AT, &event);
    let message = encoder.finish(1).unwrap();
    assert_eq!(read(&message), [(Template::SessionV6, "a".into())]);
    assert!(message.windows(16).any(|it| it == "::ffff:203.0.113.10".parse::<std::net::Ipv6Addr>().unwrap().octets()));
}
