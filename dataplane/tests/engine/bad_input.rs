//! Packets that are wrong in one place, and packets that are merely odd: each is dropped by its name or carried, and those
//! who do nothing wrong notice none of it.

use std::net::IpAddr;

use crate::support::*;
use vipgate_dataplane::counters::DropReason;

const POD4: &str = "10.244.1.5:4000";
const FAR4: &str = "198.51.100.10:53";
const POD6: &str = "[fd00:244:1::5]:4000";
const FAR6: &str = "[2001:db8:51::10]:53";

/// An IPv4 frame whose header checksum is made right after `change`.
fn v4(protocol: Protocol, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = packet(protocol, at(POD4), at(FAR4));
    change(&mut frame);
    seal_header(&mut frame);
    frame
}

fn v6(protocol: Protocol, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = packet(protocol, at(POD6), at(FAR6));
    change(&mut frame);
    frame
}

#[track_caller]
fn dropped(frame: &[u8], reason: DropReason) {
    let mut gateway = Gateway::new(&Setup::default());
    assert_eq!(gateway.arrives(0, INSIDE, frame), vec![], "{frame:x?}");
    assert_eq!(gateway.drops(), [(reason, 1)].into(), "{frame:x?}");
    assert_eq!(gateway.sessions(), 0);
    gateway.assert_delta(&format!("drop {} 1", reason.name()));
}

#[test]
fn lengths_that_contradict_each_other() {
    use Protocol::{Echo, Tcp, Udp};
    let malformed = [
        v4(Udp, |f| f[14] = 0x44),
        v4(Udp, |f| f[14] = 0x4f),
        v4(Udp, |f| f[14] = 0x65),
        v4(Udp, |f| f[14] = 0x05),
        // The total length: more than there is, less than its own header, less than a UDP header's.
        v4(Udp, |f| f[17] += 1),
        v4(Udp, |f| f[16] = 0xff),
        v4(Udp, |f| f[17] = 19),
        v4(Udp, |f| f[17] = 27),
        // UDP's own length: less than its header, more than the packet has.
        v4(Udp, |f| f[39] = 7),
        v4(Udp, |f| f[39] = 0),
        v4(Udp, |f| f[39] += 1),
        // Both say the same, and there is less.
        v4(Udp, |f| f.truncate(f.len() - 1)),
        v6(Udp, |f| f.truncate(f.len() - 1)),
        // TCP's data offset: within the fixed header, beyond the packet.
        v4(Tcp, |f| f[46] = 0x40),
        v4(Tcp, |f| f[46] = 0xf0),
        v4(Tcp, |f| f.truncate(34 + 19)),
        v4(Echo, |f| f[17] = 20 + 7),
        v6(Udp, |f| f[14] = 0x45),
        v6(Udp, |f| f[19] += 1),
        v6(Udp, |f| f[18] = 0xff),
        v6(Udp, |f| f[19] = 7),
        // No payload, as a jumbogram would have it (RFC 2675).
        v6(Udp, |f| f[19] = 0),
        v6(Udp, |f| f[59] = 7),
        v6(Udp, |f| f[59] += 1),
        v6(Tcp, |f| f[66] = 0x40),
        v6(Tcp, |f| f[66] = 0xf0),
        v6(Echo, |f| f[19] = 7),
    ];
    for frame in malformed {
        dropped(&frame, DropReason::Malformed);
    }
}

#[test]
fn a_wrong_header_checksum() {
    let mut frame = packet(Protocol::Udp, at(POD4), at(FAR4));
    frame[25] ^= 1;
    dropped(&frame, DropReason::BadChecksum);
}

#[test]
fn a_wrong_checksum_of_the_payload_stays_wrong() {
    // Nobody but the receiver can say whose fault it is (RFC 5508 section 3.1 asks more of ICMP only).
    for (pod, far, checksum) in [(POD4, FAR4, 40..42), (POD6, FAR6, 60..62)] {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.hostile = true;
        let right = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(far)));
        let mut spoiled = packet(Protocol::Udp, at(pod), at(far));
        *spoiled.last_mut().unwrap() ^= 0x55;
        let spoiled = gateway.pod_sends(&spoiled);
        assert_eq!(spoiled[checksum.clone()], right[checksum], "it isn't made right on the way");
        gateway.assert_delta("egress 2, created 1");
    }
}

#[test]
fn udp_without_a_checksum_has_none_afterwards() {
    let mut gateway = Gateway::new(&Setup::default());
    let seen = gateway.pod_sends(&v4(Protocol::Udp, |f| f[40..42].fill(0)));
    assert_eq!(seen[40..42], [0, 0]);
    gateway.assert_delta("egress 1, created 1");
}

#[test]
fn protocols_that_are_not_translated_stay_here() {
    // GRE, ESP, DCCP, and one for experiments.
    for number in [47, 50, 33, 253] {
        dropped(&v4(Protocol::Udp, |f| f[23] = number), DropReason::UnknownProtocol);
        if number != 50 {
            dropped(&v6(Protocol::Udp, |f| f[20] = number), DropReason::UnknownProtocol);
        }
    }
}

#[test]
fn what_is_no_ip_is_not_ours() {
    for kind in [[0x81, 0], [0x88, 0xa8], [0x88, 0x47], [0x88, 0xcc], [0, 38]] {
        let mut frame = packet(Protocol::Udp, at(POD4), at(FAR4));
        frame[12..14].copy_from_slice(&kind);
        dropped(&frame, DropReason::NotOurs);
    }
    for length in [0, 1, 13] {
        dropped(&packet(Protocol::Udp, at(POD4), at(FAR4))[..length], DropReason::Malformed);
    }
}

/// An IPv4 datagram with options before its payload.
fn with_options(options: &[u8]) -> Vec<u8> {
    assert_eq!(options.len() % 4, 0);
    v4(Protocol::Udp, |f| {
        f.splice(34..34, options.iter().copied());
        f[14] = 0x45 + options.len() as u8 / 4;
        f[17] += options.len() as u8;
    })
}

#[test]
fn options_are_carried_but_for_those_that_steer() {
    // Record route, timestamp, router alert, forty bytes of nothing, an unknown one.
    let carried: [&[u8]; 5] =
        [&[7, 7, 4, 0, 0, 0, 0, 0], &[68, 8, 5, 0, 0, 0, 0, 0], &[148, 4, 0, 0], &[1; 40], &[200, 3, 9, 0]];
    for options in carried {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.pod_sends(&with_options(options));
        gateway.assert_delta("egress 1, created 1");
    }
    let steering: [&[u8]; 3] = [&[131, 7, 4, 1, 2, 3, 4, 0], &[137, 7, 4, 1, 2, 3, 4, 0], &[1, 131, 3, 4]];
    for options in steering {
        dropped(&with_options(options), DropReason::Martian);
    }
    let broken: [&[u8]; 3] = [&[7, 1, 0, 0], &[7, 0, 0, 0], &[1, 1, 7, 9]];
    for options in broken {
        dropped(&with_options(options), DropReason::Malformed);
    }
}

/// An IPv6 datagram with extension headers before its payload, the last of which says UDP.
fn with_extensions(first: u8, extensions: &[u8]) -> Vec<u8> {
    v6(Protocol::Udp, |f| {
        f.splice(54..54, extensions.iter().copied());
        f[20] = first;
        f[19] += extensions.len() as u8;
    })
}

#[test]
fn extension_headers_are_walked_but_for_those_that_steer() {
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let chain = |kinds: &[u8]| -> Vec<u8> { kinds.iter().flat_map(|&kind| options(kind)).collect() };
    let mut gateway = Gateway::new(&Setup::default());
    for (first, extensions) in
        [(0, chain(&[17])), (60, chain(&[17])), (0, chain(&[60, 17])), (60, chain(&[60, 60, 17]))]
    {
        let sent = gateway.arrives(0, INSIDE, &with_extensions(first, &extensions));
        assert_eq!(sent.len(), 1, "{first} {extensions:?}: {:?}", gateway.drops());
        assert_eq!(sent[0].1[54..54 + extensions.len()], extensions, "as they were");
    }
    assert_eq!(gateway.sessions(), 1, "all of one flow");
    gateway.assert_delta("egress 4, created 1");
    // A routing header of type 0 (RFC 5095); more headers than anyone uses; one that ends behind the packet; none to follow.
    dropped(
        &with_extensions(43, &[17, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        DropReason::Martian,
    );
    dropped(&with_extensions(60, &chain(&[60, 60, 60, 60, 60, 60, 60, 60, 17])), DropReason::Malformed);
    dropped(&with_extensions(60, &[17, 200, 1, 4, 0, 0, 0, 0]), DropReason::Malformed);
    dropped(&with_extensions(59, &[]), DropReason::UnknownProtocol);
}

#[test]
fn every_port_that_a_packet_can_have() {
    for source in [1, 1023, 1024, 65_535] {
        for destination in [1, 53, 65_535] {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                for (pod, far) in [(POD4, FAR4), (POD6, FAR6)] {
                    let mut gateway = Gateway::new(&Setup::default());
                    let (pod, far) = ((at(pod).ip(), source).into(), (at(far).ip(), destination).into());
                    let seen = gateway.pod_sends(&packet(protocol, pod, far));
                    assert!(ends(&seen).0.port() >= 1024, "{}", ends(&seen).0);
                    assert_eq!(ends(&gateway.far_sends(&answer_to(&seen, protocol))).1, pod);
                    gateway.assert_delta("egress 1, reply 1, created 1");
                }
            }
        }
    }
}

/// Every way to cut a good packet short and every single bit that can be wrong, from both sides: the gateway answers for
/// each of them, nothing with a pod's address leaves, and a flow beside them loses nothing.
#[test]
fn one_wrong_bit_or_one_missing_byte_costs_nobody_else() {
    for (pod, far) in [(POD4, FAR4), (POD6, FAR6)] {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.hostile = true;
        // Each frame is asserted to be answered for; how, is a matter of thousands of bits.
        gateway.counts_vary();
        let neighbour = (at(pod).ip(), 9999).into();
        let other = gateway.pod_sends(&packet(Protocol::Udp, neighbour, at(far)));
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let question = packet(protocol, at(pod), at(far));
            let answer = answer_to(&gateway.pod_sends(&question), protocol);
            for (interface, seed) in [(INSIDE, question), (OUTSIDE, answer)] {
                let cut = (0..seed.len()).map(|length| seed[..length].to_vec());
                let flipped = (0..seed.len() * 8).map(|bit| {
                    let mut frame = seed.clone();
                    frame[bit / 8] ^= 1 << (bit % 8);
                    frame
                });
                for frame in cut.chain(flipped) {
                    let before = gateway.kept();
                    let sent = gateway.arrives(0, interface, &frame);
                    assert!(!sent.is_empty() || gateway.kept() > before, "{frame:x?} is answered for");
                    for (_, bytes) in sent.iter().filter(|(to, _)| *to == OUTSIDE) {
                        assert!(!has_source(bytes, at(pod).ip()), "{bytes:x?} leaks");
                    }
                }
                gateway.far_sends(&answer_to(&other, Protocol::Udp));
                gateway.pod_sends(&packet(Protocol::Udp, neighbour, at(far)));
            }
        }
    }
}

fn has_source(frame: &[u8], address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => frame[12] == 8 && frame[26..30] == v4.octets(),
        IpAddr::V6(v6) => frame[12] == 0x86 && frame[22..38] == v6.octets(),
    }
}
