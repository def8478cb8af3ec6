//! Invariants of every packet that a gateway sends, checked with an independent parser (etherparse).

use etherparse::{SlicedPacket, TransportHeader, TransportSlice};

/// Every packet sent has correct checksums and lengths.
pub fn check_packet(bytes: &[u8]) {
    let parsed = SlicedPacket::from_ethernet(bytes).unwrap_or_else(|error| panic!("{error}: {bytes:02x?}"));
    let Some(net) = &parsed.net else { return };
    if let Some(v4) = net.ipv4_ref() {
        let header = v4.header().to_header();
        assert_eq!(header.calc_header_checksum(), header.header_checksum, "IPv4 header checksum");
        assert_eq!(usize::from(header.total_len) + 14, bytes.len(), "length");
    }
    let check = |header: TransportHeader, payload: &[u8], name: &str| {
        let mut right = header.clone();
        match (net.ipv4_ref(), net.ipv6_ref()) {
            (Some(v4), _) => right.update_checksum_ipv4(&v4.header().to_header(), payload).unwrap(),
            (_, Some(v6)) => right.update_checksum_ipv6(&v6.header().to_header(), payload).unwrap(),
            _ => panic!("no IP packet"),
        }
        assert_eq!(header, right, "{name} checksum");
    };
    match &parsed.transport {
        Some(TransportSlice::Tcp(tcp)) => check(TransportHeader::Tcp(tcp.to_header()), tcp.payload(), "TCP"),
        // Tunnels over IPv6 use a zero UDP checksum, too (RFC 6936).
        Some(TransportSlice::Udp(udp))
            if udp.checksum() == 0 && (net.ipv4_ref().is_some() || matches!(udp.destination_port(), 4789 | 4790)) => {}
        Some(TransportSlice::Udp(udp)) => check(TransportHeader::Udp(udp.to_header()), udp.payload(), "UDP"),
        Some(TransportSlice::Icmpv4(icmp)) => {
            assert_eq!(icmp.icmp_type().calc_checksum(icmp.payload()), icmp.checksum(), "ICMP checksum");
        }
        Some(TransportSlice::Icmpv6(icmp)) => {
            let header = net.ipv6_ref().unwrap().header();
            assert!(icmp.is_checksum_valid(header.source(), header.destination()), "ICMPv6 checksum");
        }
        _ => {}
    }
}

/// A forwarded packet differs from the received one only in what translation changes: MAC addresses, TTL (one less),
/// addresses, ports, checksums, and the identification unless DF is set. DSCP, ECN, flow label, options and payload are
/// unchanged.
pub fn check_only_translated(received: &[u8], sent: &[u8]) {
    let (received, sent) = (mask_translated(received), mask_translated(sent));
    assert_eq!(received.1.wrapping_sub(1), sent.1, "TTL");
    assert_eq!(received.0, sent.0, "more than addresses and ports has changed");
}

/// A packet with the fields that translation changes zeroed and Ethernet padding removed, and its TTL or hop limit.
fn mask_translated(frame: &[u8]) -> (Vec<u8>, u8) {
    let mut frame = frame.to_vec();
    frame[..12].fill(0);
    let (ttl_at, l4, protocol, is_first) = if frame[12] == 8 {
        let total = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
        frame.truncate(14 + total);
        let fragmentation = u16::from_be_bytes([frame[20], frame[21]]);
        if fragmentation & 0x4000 == 0 {
            frame[18..20].fill(0);
        }
        frame[24..34].fill(0);
        (22, 14 + usize::from(frame[14] & 15) * 4, frame[23], fragmentation << 3 == 0)
    } else {
        let payload = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
        frame.truncate(14 + 40 + payload);
        frame[22..54].fill(0);
        (21, 54, frame[20], true)
    };
    let translated: &[(usize, usize)] = match protocol {
        6 if is_first => &[(0, 4), (16, 18)],
        17 if is_first => &[(0, 4), (6, 8)],
        1 | 58 if is_first => &[(2, 6)],
        132 if is_first => &[(0, 4), (8, 12)],
        _ => &[],
    };
    for &(from, to) in translated {
        frame[l4 + from..l4 + to].fill(0);
    }
    let ttl = std::mem::take(&mut frame[ttl_at]);
    (frame, ttl)
}
