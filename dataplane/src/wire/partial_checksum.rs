//! Partial checksums: the kernel leaves the transport checksum of a packet that a host on the same machine has sent to the
//! device, and a virtual device hands it on as it is. TCP and UDP then have the sum of the pseudo-header in its place,
//! SCTP has zero.
//!
//! A complete checksum of that value, one of 65 536, is computed again, with the same result.

use super::checksum::{checksum, fold, pseudo_header_sum, wide_sum};
use super::{ethernet, ipv4, ipv6, protocol, sctp, set_u16, tcp, u16_at, udp};

/// Completes the checksum of a frame's TCP, UDP or SCTP packet if it is partial; returns whether it was. Fragments never
/// have a partial checksum.
pub fn complete(frame: &mut [u8]) -> bool {
    let Some((header, packet)) = frame.split_first_chunk_mut::<{ ethernet::HEADER }>() else { return false };
    let (_, kind) = ethernet::parse(header);
    let Some((pseudo_header, protocol, payload)) = (match kind {
        ethernet::IPV4 => transport_v4(packet),
        ethernet::IPV6 => transport_v6(packet),
        _ => None,
    }) else {
        return false;
    };
    match protocol {
        protocol::TCP => complete_sum(payload, tcp::CHECKSUM, tcp::HEADER, pseudo_header),
        protocol::UDP => complete_sum(payload, udp::CHECKSUM, udp::HEADER, pseudo_header),
        protocol::SCTP => sctp::complete(payload),
        _ => false,
    }
}

/// Sum of the pseudo-header, protocol and payload of an IPv4 packet.
fn transport_v4(packet: &mut [u8]) -> Option<(u32, u8, &mut [u8])> {
    let header = ipv4::Header::parse(packet).ok().filter(|header| !header.fragment)?;
    let payload = packet.get_mut(usize::from(header.length)..usize::from(header.total))?;
    let sum = pseudo_header_sum(header.source, header.destination, payload.len() as u32, header.protocol);
    Some((sum, header.protocol, payload))
}

/// The same of an IPv6 packet (RFC 8200 section 8.1).
fn transport_v6(packet: &mut [u8]) -> Option<(u32, u8, &mut [u8])> {
    let header = ipv6::Header::parse(packet).ok().filter(|header| !header.fragment)?;
    let payload = packet.get_mut(usize::from(header.length)..usize::from(header.total))?;
    let sum = pseudo_header_sum(header.source, header.destination, payload.len() as u32, header.protocol);
    Some((sum, header.protocol, payload))
}

/// Completes the checksum at offset `at` of a TCP or UDP payload with a header of at least `header` bytes.
fn complete_sum(payload: &mut [u8], at: usize, header: usize, pseudo_header: u32) -> bool {
    let partial = fold(pseudo_header);
    if payload.len() < header || u16_at(payload, at) != partial {
        return false;
    }
    set_u16(payload, at, 0);
    let complete = checksum(u32::from(partial) + u32::from(wide_sum(payload)), &[]);
    // Of UDP, zero means that there is none (RFC 768); of TCP, both zeros are the same.
    set_u16(payload, at, if complete == 0 { 0xffff } else { complete });
    true
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;
    use vipgate_coverage::property;

    use super::*;

    /// A packet with a complete checksum; and the offset and the partial form of that field.
    fn packet(v6: bool, protocol: u8, body: &[u8], ends: ([u8; 16], [u8; 16])) -> (Vec<u8>, usize, u16) {
        let link = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let (source, destination) = (*ends.0.first_chunk().unwrap(), *ends.1.first_chunk().unwrap());
        let ip = if v6 { link.ipv6(ends.0, ends.1, 64) } else { link.ipv4(source, destination, 64) };
        let mut frame = Vec::new();
        let (field, header) = if protocol == protocol::TCP {
            ip.tcp(1000, 443, 7, 1024).write(&mut frame, body).unwrap();
            (tcp::CHECKSUM, tcp::HEADER)
        } else {
            ip.udp(1000, 53).write(&mut frame, body).unwrap();
            (udp::CHECKSUM, udp::HEADER)
        };
        let addresses: Vec<u8> = if v6 { [ends.0, ends.1].concat() } else { [source, destination].concat() };
        let words: u32 = addresses.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        let length = (header + body.len()) as u32;
        let at = frame.len() - length as usize + field;
        (frame, at, fold(words + u32::from(protocol) + length))
    }

    #[test]
    fn a_partial_checksum_becomes_what_an_independent_implementation_computes() {
        let classes = ["IPv4", "IPv6", "TCP", "UDP", "odd length", "complete already"];
        let generated = (
            any::<bool>(),
            prop_oneof![Just(protocol::TCP), Just(protocol::UDP)],
            prop::collection::vec(any::<u8>(), 0..1400),
            (any::<[u8; 16]>(), any::<[u8; 16]>()),
            any::<bool>(),
        );
        property(ProptestConfig::default(), &generated, &classes, |(v6, protocol, body, ends, partial), coverage| {
            let (complete_frame, at, sum) = packet(v6, protocol, &body, ends);
            let mut frame = complete_frame.clone();
            if partial {
                set_u16(&mut frame, at, sum);
            }
            let was_partial = complete(&mut frame);
            // In ones' complement both are zero, and only UDP distinguishes them.
            if was_partial && u16_at(&complete_frame, at) == 0 && u16_at(&frame, at) == u16::MAX {
                set_u16(&mut frame, at, 0);
            }
            prop_assert_eq!(&frame, &complete_frame);
            prop_assert_eq!(was_partial, u16_at(&complete_frame, at) == sum || partial);
            coverage.count(if v6 { "IPv6" } else { "IPv4" });
            coverage.count(if protocol == protocol::TCP { "TCP" } else { "UDP" });
            if body.len() % 2 == 1 {
                coverage.count("odd length");
            }
            if !partial {
                coverage.count("complete already");
            }
            Ok(())
        });
    }

    #[test]
    fn a_datagram_without_checksum_a_fragment_and_a_wrong_checksum_stay() {
        let (mut frame, at, sum) = packet(false, protocol::UDP, b"abc", ([10; 16], [20; 16]));
        for value in [0, sum ^ 1] {
            set_u16(&mut frame, at, value);
            assert!(!complete(&mut frame));
            assert_eq!(u16_at(&frame, at), value);
        }
        set_u16(&mut frame, at, sum);
        frame[ethernet::HEADER + ipv4::FRAGMENT] = 0x20;
        let header = ethernet::HEADER..ethernet::HEADER + ipv4::HEADER;
        set_u16(&mut frame[header.clone()], ipv4::CHECKSUM, 0);
        let of_header = checksum(0, &frame[header.clone()]);
        set_u16(&mut frame[header], ipv4::CHECKSUM, of_header);
        assert!(!complete(&mut frame));
        assert!(!complete(&mut [0; 10]) && !complete(&mut [0; 60]));
    }

    #[test]
    fn a_missing_sctp_checksum_is_computed() {
        let link = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [192, 0, 2, 1], 64);
        let mut frame = Vec::new();
        // A DATA chunk of five bytes.
        let body = [
            0x0f, 0xa0, 0, 80, 1, 2, 3, 4, 0, 0, 0, 0, 0, 3, 0, 21, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 9, 8, 7, 6, 5,
            0, 0, 0,
        ];
        link.write(&mut frame, etherparse::IpNumber::SCTP, &body).unwrap();
        assert!(complete(&mut frame));
        assert!(sctp::verify(&frame[ethernet::HEADER + ipv4::HEADER..]));
        assert!(!complete(&mut frame), "complete already");
    }
}
