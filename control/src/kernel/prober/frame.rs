//! Probes and replies as Ethernet frames: ARP (RFC 826) and neighbor discovery (RFC 4861).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::ethernet::{self, Mac};
use vipgate_dataplane::wire::{ipv6, ndp};

/// A request for the MAC address of `target`: unicast to `mac`, or else broadcast or multicast. `None` if the interface
/// has no source address for it.
pub(super) fn encode_probe(own: Mac, addresses: &[IpAddr], target: IpAddr, mac: Option<Mac>) -> Option<Vec<u8>> {
    match target {
        IpAddr::V4(target) => {
            let sources = addresses.iter().filter_map(|it| if let IpAddr::V4(it) = it { Some(*it) } else { None });
            // Without one it is an ARP probe (RFC 5227), which is answered too.
            let source = sources.max_by_key(|it| (it.to_bits() ^ target.to_bits()).leading_zeros());
            let request = Arp::request(own, source.unwrap_or(Ipv4Addr::UNSPECIFIED).to_bits(), target.to_bits());
            Some(request.frame(mac.unwrap_or(ethernet::BROADCAST)).to_vec())
        }
        IpAddr::V6(target) => {
            let sources = addresses.iter().filter_map(|it| if let IpAddr::V6(it) = it { Some(*it) } else { None });
            // Prefers link-local: the reply to it never leaves the link.
            let best = |it: &Ipv6Addr| (it.is_unicast_link_local(), (it.to_bits() ^ target.to_bits()).leading_zeros());
            let [source, target] = [sources.max_by_key(best)?, target].map(|it| V6::from_bits(it.to_bits()));
            Some(ndp::Solicitation { source, mac: own, target, target_mac: mac }.frame().to_vec())
        }
    }
}

/// The sender's address of an ARP reply, or the target of a neighbor advertisement.
pub(super) fn decode_reply(frame: &[u8]) -> Option<IpAddr> {
    let (header, payload) = frame.split_first_chunk()?;
    match ethernet::parse(header).1 {
        ethernet::ARP => {
            let arp = Arp::parse(payload)?;
            (arp.operation == Operation::Reply).then(|| arp.sender.to_ip())
        }
        ethernet::IPV6 => {
            let (target, _) = ndp::parse_advertisement(&ipv6::Header::parse(payload).ok()?, payload)?;
            Some(target.to_ip())
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
        assert_eq!((&frame[..6], &frame[28..32]), (&ethernet::BROADCAST[..], &[0; 4][..]));
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
            assert_eq!(icmp.slice()[0], ndp::SOLICITATION);
            assert_eq!(decode_reply(&frame), None);
        }
        assert_eq!(encode_probe(OWN, &[address("10.0.0.1")], address("2001:db8::1"), None), None);
    }

    #[test]
    fn only_a_valid_advertisement_is_a_reply() {
        let target = address("2001:db8::12:fe");
        let advertisement = ndp::Advertisement {
            destination: V6::from_ip(address("fe80::1")).unwrap(),
            destination_mac: OWN,
            solicited: true,
            ..ndp::Advertisement::unsolicited(V6::from_ip(target).unwrap(), REMOTE)
        };
        let reply = advertisement.frame();
        assert_eq!(decode_reply(&reply), Some(target));
        for (offset, reason) in [(21, "a router has forwarded it"), (54, "it is of another type"), (56, "corrupt")] {
            let mut other = reply;
            other[offset] ^= 1;
            assert_eq!(decode_reply(&other), None, "{reason}");
        }
        for length in 0..reply.len() {
            assert_eq!(decode_reply(&reply[..length]), None);
        }
    }
}
