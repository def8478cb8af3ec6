//! Malformed and unusual packets: each is dropped with its reason or forwarded, and other flows are unaffected.

use std::net::IpAddr;

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_testkit::*;

const POD4: &str = "10.244.1.5:4000";
const REMOTE4: &str = "198.51.100.10:53";
const POD6: &str = "[fd00:244:1::5]:4000";
const REMOTE6: &str = "[2001:db8:51::10]:53";

/// An IPv4 packet with a valid header checksum after `change`.
fn v4(protocol: Protocol, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = packet(protocol, at(POD4), at(REMOTE4));
    change(&mut frame);
    update_header_checksum(&mut frame);
    frame
}

fn v6(protocol: Protocol, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = packet(protocol, at(POD6), at(REMOTE6));
    change(&mut frame);
    frame
}

#[track_caller]
fn assert_dropped(frame: &[u8], reason: DropReason) {
    let mut gateway = Gateway::new(&Setup::default());
    assert_eq!(gateway.receive(0, INSIDE, frame), vec![], "{frame:x?}");
    assert_eq!(gateway.drops(), [(reason, 1)].into(), "{frame:x?}");
    assert_eq!(gateway.sessions(), 0);
    gateway.assert_delta(&format!("drop {} 1", reason.name()));
}

#[test]
fn inconsistent_lengths_are_malformed() {
    use Protocol::{Echo, Tcp, Udp};
    let malformed = [
        v4(Udp, |f| f[14] = 0x44),
        v4(Udp, |f| f[14] = 0x4f),
        v4(Udp, |f| f[14] = 0x65),
        v4(Udp, |f| f[14] = 0x05),
        // IPv4 total length: more than the frame, less than the IP header, less than a UDP header.
        v4(Udp, |f| f[17] += 1),
        v4(Udp, |f| f[16] = 0xff),
        v4(Udp, |f| f[17] = 19),
        v4(Udp, |f| f[17] = 27),
        // UDP length: less than its header, more than the packet.
        v4(Udp, |f| f[39] = 7),
        v4(Udp, |f| f[39] = 0),
        v4(Udp, |f| f[39] += 1),
        // Consistent lengths in a truncated frame.
        v4(Udp, |f| f.truncate(f.len() - 1)),
        v6(Udp, |f| f.truncate(f.len() - 1)),
        // TCP data offset: within the fixed header, beyond the packet.
        v4(Tcp, |f| f[46] = 0x40),
        v4(Tcp, |f| f[46] = 0xf0),
        v4(Tcp, |f| f.truncate(34 + 19)),
        v4(Echo, |f| f[17] = 20 + 7),
        v6(Udp, |f| f[14] = 0x45),
        v6(Udp, |f| f[19] += 1),
        v6(Udp, |f| f[18] = 0xff),
        v6(Udp, |f| f[19] = 7),
        // Payload length 0, as in a jumbogram (RFC 2675).
        v6(Udp, |f| f[19] = 0),
        v6(Udp, |f| f[59] = 7),
        v6(Udp, |f| f[59] += 1),
        v6(Tcp, |f| f[66] = 0x40),
        v6(Tcp, |f| f[66] = 0xf0),
        v6(Echo, |f| f[19] = 7),
    ];
    for frame in malformed {
        assert_dropped(&frame, DropReason::Malformed);
    }
}

#[test]
fn a_wrong_ip_header_checksum_is_dropped() {
    let mut frame = packet(Protocol::Udp, at(POD4), at(REMOTE4));
    frame[25] ^= 1;
    assert_dropped(&frame, DropReason::BadChecksum);
}

#[test]
fn a_wrong_transport_checksum_stays_wrong() {
    // A wrong transport checksum is left to the receiver; only for ICMP must a NAT check it (RFC 5508 section 3.1).
    for (pod, remote, checksum) in [(POD4, REMOTE4, 40..42), (POD6, REMOTE6, 60..62)] {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.hostile = true;
        let valid = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
        let mut corrupted = packet(Protocol::Udp, at(pod), at(remote));
        *corrupted.last_mut().unwrap() ^= 0x55;
        let corrupted = gateway.pod_sends(&corrupted);
        assert_eq!(corrupted[checksum.clone()], valid[checksum], "the wrong checksum is not corrected");
        gateway.assert_delta("egress 2, created 1");
    }
}

#[test]
fn a_zero_udp_checksum_stays_zero() {
    let mut gateway = Gateway::new(&Setup::default());
    let seen = gateway.pod_sends(&v4(Protocol::Udp, |f| f[40..42].fill(0)));
    assert_eq!(seen[40..42], [0, 0]);
    gateway.assert_delta("egress 1, created 1");
}

#[test]
fn unsupported_protocols_are_dropped() {
    // GRE, ESP, DCCP, and an experimental protocol (RFC 3692).
    for number in [47, 50, 33, 253] {
        assert_dropped(&v4(Protocol::Udp, |f| f[23] = number), DropReason::UnknownProtocol);
        if number != 50 {
            assert_dropped(&v6(Protocol::Udp, |f| f[20] = number), DropReason::UnknownProtocol);
        }
    }
}

#[test]
fn non_ip_frames_are_not_ours() {
    for kind in [[0x81, 0], [0x88, 0xa8], [0x88, 0x47], [0x88, 0xcc], [0, 38]] {
        let mut frame = packet(Protocol::Udp, at(POD4), at(REMOTE4));
        frame[12..14].copy_from_slice(&kind);
        assert_dropped(&frame, DropReason::NotOurs);
    }
    for length in [0, 1, 13] {
        assert_dropped(&packet(Protocol::Udp, at(POD4), at(REMOTE4))[..length], DropReason::Malformed);
    }
}

/// An IPv4 datagram with IP options.
fn with_options(options: &[u8]) -> Vec<u8> {
    assert_eq!(options.len() % 4, 0);
    v4(Protocol::Udp, |f| {
        f.splice(34..34, options.iter().copied());
        f[14] = 0x45 + options.len() as u8 / 4;
        f[17] += options.len() as u8;
    })
}

#[test]
fn ip_options_are_forwarded_except_source_routes() {
    // Record route, timestamp, router alert, forty NOPs, an unknown option.
    let forwarded: [&[u8]; 5] =
        [&[7, 7, 4, 0, 0, 0, 0, 0], &[68, 8, 5, 0, 0, 0, 0, 0], &[148, 4, 0, 0], &[1; 40], &[200, 3, 9, 0]];
    for options in forwarded {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.pod_sends(&with_options(options));
        gateway.assert_delta("egress 1, created 1");
    }
    let source_routes: [&[u8]; 3] = [&[131, 7, 4, 1, 2, 3, 4, 0], &[137, 7, 4, 1, 2, 3, 4, 0], &[1, 131, 3, 4]];
    for options in source_routes {
        assert_dropped(&with_options(options), DropReason::Martian);
    }
    let broken: [&[u8]; 3] = [&[7, 1, 0, 0], &[7, 0, 0, 0], &[1, 1, 7, 9]];
    for options in broken {
        assert_dropped(&with_options(options), DropReason::Malformed);
    }
}

/// An IPv6 datagram with extension headers; the last one's next header is UDP.
fn with_extensions(first: u8, extensions: &[u8]) -> Vec<u8> {
    v6(Protocol::Udp, |f| {
        f.splice(54..54, extensions.iter().copied());
        f[20] = first;
        f[19] += extensions.len() as u8;
    })
}

#[test]
fn extension_headers_are_parsed_except_routing_headers() {
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let chain = |kinds: &[u8]| -> Vec<u8> { kinds.iter().flat_map(|&kind| options(kind)).collect() };
    let mut gateway = Gateway::new(&Setup::default());
    for (first, extensions) in
        [(0, chain(&[17])), (60, chain(&[17])), (0, chain(&[60, 17])), (60, chain(&[60, 60, 17]))]
    {
        let sent = gateway.receive(0, INSIDE, &with_extensions(first, &extensions));
        assert_eq!(sent.len(), 1, "{first} {extensions:?}: {:?}", gateway.drops());
        assert_eq!(sent[0].1[54..54 + extensions.len()], extensions, "unchanged");
    }
    assert_eq!(gateway.sessions(), 1, "all packets belong to one flow");
    gateway.assert_delta("egress 4, created 1");
    // A type 0 routing header (RFC 5095); more headers than the limit; one that ends beyond the packet; no next header.
    assert_dropped(
        &with_extensions(43, &[17, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        DropReason::Martian,
    );
    assert_dropped(&with_extensions(60, &chain(&[60, 60, 60, 60, 60, 60, 60, 60, 17])), DropReason::Malformed);
    assert_dropped(&with_extensions(60, &[17, 200, 1, 4, 0, 0, 0, 0]), DropReason::Malformed);
    assert_dropped(&with_extensions(59, &[]), DropReason::UnknownProtocol);
}

#[test]
fn edge_case_ports_are_translated() {
    for source in [1, 1023, 1024, 65_535] {
        for destination in [1, 53, 65_535] {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                for (pod, remote) in [(POD4, REMOTE4), (POD6, REMOTE6)] {
                    let mut gateway = Gateway::new(&Setup::default());
                    let (pod, remote) = ((at(pod).ip(), source).into(), (at(remote).ip(), destination).into());
                    let seen = gateway.pod_sends(&packet(protocol, pod, remote));
                    assert!(ends(&seen).0.port() >= 1024, "{}", ends(&seen).0);
                    assert_eq!(ends(&gateway.remote_sends(&reply_to(&seen, protocol))).1, pod);
                    gateway.assert_delta("egress 1, reply 1, created 1");
                }
            }
        }
    }
}

/// Every truncation and every single-bit error of a valid packet, from both sides: each frame is accounted for, no pod
/// address leaks, and another flow is unaffected.
#[test]
fn corrupted_and_truncated_packets_do_not_affect_other_flows() {
    for (pod, remote) in [(POD4, REMOTE4), (POD6, REMOTE6)] {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.hostile = true;
        // Each frame is asserted to be accounted for; the reasons vary over thousands of bits.
        gateway.skip_counter_check();
        let other_pod = (at(pod).ip(), 9999).into();
        let other_flow = gateway.pod_sends(&packet(Protocol::Udp, other_pod, at(remote)));
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let request = packet(protocol, at(pod), at(remote));
            let reply = reply_to(&gateway.pod_sends(&request), protocol);
            for (interface, seed) in [(INSIDE, request), (OUTSIDE, reply)] {
                let truncated = (0..seed.len()).map(|length| seed[..length].to_vec());
                let flipped = (0..seed.len() * 8).map(|bit| {
                    let mut frame = seed.clone();
                    frame[bit / 8] ^= 1 << (bit % 8);
                    frame
                });
                for frame in truncated.chain(flipped) {
                    let before = gateway.not_forwarded();
                    let sent = gateway.receive(0, interface, &frame);
                    assert!(!sent.is_empty() || gateway.not_forwarded() > before, "{frame:x?} is accounted for");
                    for (_, bytes) in sent.iter().filter(|(to, _)| *to == OUTSIDE) {
                        assert!(!has_source(bytes, at(pod).ip()), "{bytes:x?} leaks");
                    }
                }
                gateway.remote_sends(&reply_to(&other_flow, Protocol::Udp));
                gateway.pod_sends(&packet(Protocol::Udp, other_pod, at(remote)));
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
