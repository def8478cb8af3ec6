//! Encoding of probes and decoding of replies: ARP (RFC 826) and neighbor discovery (RFC 4861) in Ethernet frames.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const BROADCAST: [u8; 6] = [0xff; 6];

/// A request for the MAC address of `target`: unicast to `mac`, or else broadcast or multicast. `None` if the interface
/// has no source address for it.
pub(super) fn encode_probe(
    own: [u8; 6],
    addresses: &[IpAddr],
    target: IpAddr,
    mac: Option<[u8; 6]>,
) -> Option<Vec<u8>> {
    match target {
        IpAddr::V4(target) => {
            let sources = addresses.iter().filter_map(|it| if let IpAddr::V4(it) = it { Some(*it) } else { None });
            // Without one it is an ARP probe (RFC 5227), which is answered too.
            let source = sources.max_by_key(|it| (it.to_bits() ^ target.to_bits()).leading_zeros());
            Some(arp(own, source.unwrap_or(Ipv4Addr::UNSPECIFIED), target, mac.unwrap_or(BROADCAST)))
        }
        IpAddr::V6(target) => {
            let sources = addresses.iter().filter_map(|it| if let IpAddr::V6(it) = it { Some(*it) } else { None });
            // Prefers link-local: the reply to it never leaves the link.
            let best = |it: &Ipv6Addr| (it.is_unicast_link_local(), (it.to_bits() ^ target.to_bits()).leading_zeros());
            Some(solicitation(own, sources.max_by_key(best)?, target, mac))
        }
    }
}

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16) -> Vec<u8> {
    [&to[..], &from, &kind.to_be_bytes()].concat()
}

fn arp(own: [u8; 6], source: Ipv4Addr, target: Ipv4Addr, to: [u8; 6]) -> Vec<u8> {
    // Hardware and protocol type, their address lengths, opcode request.
    const HEAD: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let mut frame = ethernet(to, own, ARP);
    for part in [&HEAD[..], &own, &source.octets(), &[0; 6], &target.octets()] {
        frame.extend_from_slice(part);
    }
    frame
}

fn solicitation(own: [u8; 6], source: Ipv6Addr, target: Ipv6Addr, mac: Option<[u8; 6]>) -> Vec<u8> {
    let [.., a, b, c] = target.octets();
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]));
    let (destination, to) = match mac {
        Some(mac) => (target, mac),
        None => (group, [0x33, 0x33, 0xff, a, b, c]),
    };
    let mut message = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
    message.extend_from_slice(&target.octets());
    // Source link-layer address option, eight bytes.
    message.extend_from_slice(&[1, 1]);
    message.extend_from_slice(&own);
    let length = message.len() as u16;
    let sum = checksum(&[
        &source.octets(),
        &destination.octets(),
        &u32::from(length).to_be_bytes(),
        &[0, 0, 0, ICMPV6],
        &message,
    ]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = ethernet(to, own, IPV6);
    frame.extend_from_slice(&[0x60, 0, 0, 0]);
    frame.extend_from_slice(&length.to_be_bytes());
    // A hop limit of 255 proves that it is from the link (RFC 4861 section 7.1).
    frame.extend_from_slice(&[ICMPV6, 255]);
    for part in [&source.octets()[..], &destination.octets(), &message] {
        frame.extend_from_slice(part);
    }
    frame
}

/// The Internet checksum (RFC 1071) of parts of even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts
        .iter()
        .flat_map(|part| part.chunks_exact(2))
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The sender's address of an ARP reply, or the target of a neighbor advertisement.
pub(super) fn decode_reply(frame: &[u8]) -> Option<IpAddr> {
    let kind = u16::from_be_bytes([*frame.get(12)?, *frame.get(13)?]);
    match kind {
        ARP if frame.get(14..22)? == [0, 1, 8, 0, 6, 4, 0, 2] => {
            let sender: [u8; 4] = frame.get(28..32)?.try_into().ok()?;
            Some(sender.into())
        }
        // The hop limit must be 255 (RFC 4861 section 7.1.2).
        IPV6 if *frame.get(20)? == ICMPV6 && *frame.get(21)? == 255 && *frame.get(54)? == ADVERTISEMENT => {
            let target: [u8; 16] = frame.get(62..78)?.try_into().ok()?;
            Some(target.into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{Icmpv6Type, NetSlice, SlicedPacket, TransportSlice};

    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const REMOTE: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_arp_request_has_the_source_with_the_longest_common_prefix() {
        let own = [address("10.0.0.1"), address("203.0.113.7"), address("2001:db8::1")];
        let frame = encode_probe(OWN, &own, address("203.0.113.254"), Some(REMOTE)).unwrap();
        let expected = [
            &REMOTE[..],
            &OWN,
            &[8, 6],
            &[0, 1, 8, 0, 6, 4, 0, 1],
            &OWN,
            &[203, 0, 113, 7],
            &[0; 6],
            &[203, 0, 113, 254],
        ];
        assert_eq!(frame, expected.concat());
        let frame = encode_probe(OWN, &[], address("203.0.113.254"), None).unwrap();
        assert_eq!((&frame[..6], &frame[28..32]), (&BROADCAST[..], &[0; 4][..]));
        // A request isn't a reply.
        assert_eq!(decode_reply(&frame), None);
        let mut reply = frame;
        reply[21] = 2;
        reply[28..32].copy_from_slice(&[203, 0, 113, 254]);
        assert_eq!(decode_reply(&reply), Some(address("203.0.113.254")));
    }

    #[test]
    fn a_solicitation_is_valid_and_has_a_link_local_source() {
        let own = [address("2001:db8::1"), address("fe80::1"), address("10.0.0.1")];
        for (mac, destination) in [(Some(REMOTE), "2001:db8::12:fe"), (None, "ff02::1:ff12:fe")] {
            let frame = encode_probe(OWN, &own, address("2001:db8::12:fe"), mac).unwrap();
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(NetSlice::Ipv6(ip)) = &packet.net else { panic!("{packet:?}") };
            let header = ip.header();
            assert_eq!(IpAddr::from(header.source()), address("fe80::1"));
            assert_eq!(IpAddr::from(header.destination()), address(destination));
            assert_eq!(header.hop_limit(), 255);
            let Some(TransportSlice::Icmpv6(icmp)) = packet.transport else { panic!("{frame:?}") };
            assert!(icmp.is_checksum_valid(header.source(), header.destination()));
            assert!(!matches!(icmp.icmp_type(), Icmpv6Type::Unknown { type_u8: 136, .. }));
            assert_eq!(icmp.slice()[0], SOLICITATION);
            assert_eq!(decode_reply(&frame), None);
            let mut reply = frame.clone();
            reply[54] = ADVERTISEMENT;
            assert_eq!(decode_reply(&reply), Some(address("2001:db8::12:fe")));
            reply[21] = 254;
            assert_eq!(decode_reply(&reply), None, "a router has forwarded it");
        }
        assert_eq!(encode_probe(OWN, &[address("10.0.0.1")], address("2001:db8::1"), None), None);
        for length in 0..78 {
            let _ = decode_reply(&encode_probe(OWN, &own, address("fe80::2"), None).unwrap()[..length]);
        }
    }
}
