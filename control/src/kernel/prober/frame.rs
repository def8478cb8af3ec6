//! Probes and their answers as bytes: ARP (RFC 826) and neighbour discovery (RFC 4861), whole Ethernet frames.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const BROADCAST: [u8; 6] = [0xff; 6];

/// A question for the MAC address of `target`: sent to `mac` alone, or else to whoever may know. `None` where the interface has no address to
/// ask from.
pub(super) fn request(own: [u8; 6], addresses: &[IpAddr], target: IpAddr, mac: Option<[u8; 6]>) -> Option<Vec<u8>> {
    match target {
        IpAddr::V4(target) => {
            let sources = addresses.iter().filter_map(|it| if let IpAddr::V4(it) = it { Some(*it) } else { None });
            // Without one it is a probe as of RFC 5227, which is answered, too.
            let source = sources.max_by_key(|it| (it.to_bits() ^ target.to_bits()).leading_zeros());
            Some(arp(own, source.unwrap_or(Ipv4Addr::UNSPECIFIED), target, mac.unwrap_or(BROADCAST)))
        }
        IpAddr::V6(target) => {
            let sources = addresses.iter().filter_map(|it| if let IpAddr::V6(it) = it { Some(*it) } else { None });
            // The answer to a link-local address never leaves the link.
            let best = |it: &Ipv6Addr| (it.is_unicast_link_local(), (it.to_bits() ^ target.to_bits()).leading_zeros());
            Some(solicitation(own, sources.max_by_key(best)?, target, mac))
        }
    }
}

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16) -> Vec<u8> {
    [&to[..], &from, &kind.to_be_bytes()].concat()
}

fn arp(own: [u8; 6], source: Ipv4Addr, target: Ipv4Addr, to: [u8; 6]) -> Vec<u8> {
    // Ethernet, IPv4, their lengths, request.
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
    // Source link-layer address, eight bytes.
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
    // A hop limit of 255 shows that it comes from the link itself.
    frame.extend_from_slice(&[ICMPV6, 255]);
    for part in [&source.octets()[..], &destination.octets(), &message] {
        frame.extend_from_slice(part);
    }
    frame
}

/// The internet checksum of parts of even length (RFC 1071).
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

/// Who says by this frame that it is there.
pub(super) fn answered(frame: &[u8]) -> Option<IpAddr> {
    let kind = u16::from_be_bytes([*frame.get(12)?, *frame.get(13)?]);
    match kind {
        ARP if frame.get(14..22)? == [0, 1, 8, 0, 6, 4, 0, 2] => {
            let sender: [u8; 4] = frame.get(28..32)?.try_into().ok()?;
            Some(sender.into())
        }
        // Only from the link itself (RFC 4861 section 7.1.2).
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
    const THERE: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_arp_request_asks_from_the_address_that_is_nearest() {
        let own = [address("10.0.0.1"), address("203.0.113.7"), address("2001:db8::1")];
        let frame = request(OWN, &own, address("203.0.113.254"), Some(THERE)).unwrap();
        let expected = [
            &THERE[..],
            &OWN,
            &[8, 6],
            &[0, 1, 8, 0, 6, 4, 0, 1],
            &OWN,
            &[203, 0, 113, 7],
            &[0; 6],
            &[203, 0, 113, 254],
        ];
        assert_eq!(frame, expected.concat());
        let frame = request(OWN, &[], address("203.0.113.254"), None).unwrap();
        assert_eq!((&frame[..6], &frame[28..32]), (&BROADCAST[..], &[0; 4][..]));
        // Nobody answers by asking.
        assert_eq!(answered(&frame), None);
        let mut reply = frame;
        reply[21] = 2;
        reply[28..32].copy_from_slice(&[203, 0, 113, 254]);
        assert_eq!(answered(&reply), Some(address("203.0.113.254")));
    }

    #[test]
    fn a_solicitation_is_sound_and_asks_from_the_link() {
        let own = [address("2001:db8::1"), address("fe80::1"), address("10.0.0.1")];
        for (mac, destination) in [(Some(THERE), "2001:db8::12:fe"), (None, "ff02::1:ff12:fe")] {
            let frame = request(OWN, &own, address("2001:db8::12:fe"), mac).unwrap();
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
            assert_eq!(answered(&frame), None);
            let mut reply = frame.clone();
            reply[54] = ADVERTISEMENT;
            assert_eq!(answered(&reply), Some(address("2001:db8::12:fe")));
            reply[21] = 254;
            assert_eq!(answered(&reply), None, "it has come from elsewhere");
        }
        assert_eq!(request(OWN, &[address("10.0.0.1")], address("2001:db8::1"), None), None);
        for length in 0..78 {
            let _ = answered(&request(OWN, &own, address("fe80::2"), None).unwrap()[..length]);
        }
    }
}
