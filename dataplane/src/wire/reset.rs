//! The TCP reset with which the gateway answers a segment that nobody else will (RFC 9293 section 3.10.7.1).

use super::tcp::{self, Flags, Segment};
use super::{checksum, ipv4, ipv6, protocol, set_u16};
use crate::address::Address;

/// The longest packet that [`reset`] writes.
pub const LONGEST: usize = ipv6::HEADER + tcp::HEADER;

/// Writes the IP packet with the reset that answers `original`, an IP packet of either family as it came, and returns
/// its length.
///
/// A segment with an acknowledgement is answered with the sequence number that it expects, so its sender believes the
/// reset; any other by acknowledging all of it.
///
/// `None` if `original` holds no whole TCP segment with a right checksum, one that is itself a reset, or one from or to
/// an address that isn't one node's (RFC 9293 MUST-57, MUST-3), or if the answer doesn't fit.
pub fn reset(into: &mut [u8], original: &[u8]) -> Option<usize> {
    match original.first()? >> 4 {
        4 => reset_v4(into, original),
        6 => reset_v6(into, original),
        _ => None,
    }
}

fn reset_v4(into: &mut [u8], original: &[u8]) -> Option<usize> {
    let asked = ipv4::Header::parse(original).ok()?;
    let payload = original.get(usize::from(asked.length)..usize::from(asked.total))?;
    if asked.protocol != protocol::TCP || asked.fragment || asked.source.is_martian() || asked.destination.is_martian()
    {
        return None;
    }
    let addresses = checksum::sum(original.get(ipv4::ADDRESSES..ipv4::HEADER)?);
    let pseudo = |length: usize| addresses + u32::from(protocol::TCP) + u32::from(length as u16);
    let segment = answer(payload, pseudo)?;
    let header = ipv4::OwnHeader {
        service: 0,
        total: (ipv4::HEADER + tcp::HEADER) as u16,
        identification: 0,
        dont_fragment: true,
        protocol: protocol::TCP,
        source: asked.destination,
        destination: asked.source,
    };
    write(into, &header.bytes(), &segment)
}

fn reset_v6(into: &mut [u8], original: &[u8]) -> Option<usize> {
    let asked = ipv6::Header::parse(original).ok()?;
    let payload = original.get(usize::from(asked.length)..usize::from(asked.total))?;
    if asked.protocol != protocol::TCP || asked.fragment || asked.source.is_martian() || asked.destination.is_martian()
    {
        return None;
    }
    let pseudo = |length: usize| ipv6::pseudo_header(asked.source, asked.destination, length as u32, protocol::TCP);
    let segment = answer(payload, pseudo)?;
    let header = ipv6::own_header(tcp::HEADER as u16, protocol::TCP, asked.destination, asked.source);
    write(into, &header, &segment)
}

/// The segment that answers the one in `payload`. `pseudo` sums up the pseudo-header for a segment of that many bytes,
/// which is the same in both directions.
fn answer(payload: &[u8], pseudo: impl Fn(usize) -> u32) -> Option<[u8; tcp::HEADER]> {
    let mut asked = Segment::default();
    Segment::parse(payload, &mut asked)?;
    if asked.flags.has(Flags::RST) || !checksum::verifies(pseudo(payload.len()), payload) {
        return None;
    }
    let (sequence, acknowledgement, flags) = if asked.flags.has(Flags::ACK) {
        (asked.acknowledgement, 0, Flags::RST.0)
    } else {
        (0, asked.sequence.wrapping_add(asked.space), Flags::RST.0 | Flags::ACK.0)
    };
    let mut segment = [0; tcp::HEADER];
    segment[0..2].copy_from_slice(&asked.destination.to_be_bytes());
    segment[2..4].copy_from_slice(&asked.source.to_be_bytes());
    segment[4..8].copy_from_slice(&sequence.to_be_bytes());
    segment[8..12].copy_from_slice(&acknowledgement.to_be_bytes());
    segment[12] = (tcp::HEADER as u8 / 4) << 4;
    segment[13] = flags;
    let sum = checksum::checksum(pseudo(tcp::HEADER), &segment);
    set_u16(&mut segment, tcp::CHECKSUM, sum);
    Some(segment)
}

fn write(into: &mut [u8], header: &[u8], segment: &[u8; tcp::HEADER]) -> Option<usize> {
    let length = header.len() + segment.len();
    let (ip, tcp) = into.get_mut(..length)?.split_at_mut(header.len());
    ip.copy_from_slice(header);
    tcp.copy_from_slice(segment);
    Some(length)
}

#[cfg(test)]
mod tests {
    use etherparse::{
        IpFragOffset, IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, Ipv6Extensions, Ipv6FragmentHeader, Ipv6Header,
        PacketBuilder, PacketBuilderStep, TcpHeader,
    };
    use proptest::prelude::*;

    use super::*;

    const CLIENT: [u8; 4] = [10, 0, 0, 1];
    const SERVER: [u8; 4] = [198, 51, 100, 7];
    const CLIENT_V6: [u8; 16] = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    const SERVER_V6: [u8; 16] = [0x20, 1, 0x0d, 0xb8, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];

    type Step = PacketBuilderStep<TcpHeader>;

    fn written(step: Step, payload: &[u8]) -> Vec<u8> {
        let mut packet = Vec::new();
        step.write(&mut packet, payload).unwrap();
        packet
    }

    /// What answers the segment that `flags` makes, in both families, for the same bytes of payload.
    fn answers(sequence: u32, payload: &[u8], flags: impl Fn(Step) -> Step) -> [Option<Vec<u8>>; 2] {
        let v4 = PacketBuilder::ipv4(CLIENT, SERVER, 61).tcp(4242, 443, sequence, 1000);
        let v6 = PacketBuilder::ipv6(CLIENT_V6, SERVER_V6, 61).tcp(4242, 443, sequence, 1000);
        let answer = |step| {
            let mut into = [0xaa; LONGEST];
            let length = reset(&mut into, &written(flags(step), payload))?;
            Some(into[..length].to_vec())
        };
        [answer(v4), answer(v6)]
    }

    /// The same answers, made by another implementation.
    fn expected(sequence: u32, flags: impl Fn(Step) -> Step) -> [Option<Vec<u8>>; 2] {
        let v4 = PacketBuilder::ip(IpHeaders::Ipv4(
            Ipv4Header::new(0, 64, IpNumber::TCP, SERVER, CLIENT).unwrap(),
            Ipv4Extensions::default(),
        ));
        let v6 = PacketBuilder::ipv6(SERVER_V6, CLIENT_V6, 64);
        let answer = |ip: PacketBuilderStep<IpHeaders>| Some(written(flags(ip.tcp(443, 4242, sequence, 0).rst()), &[]));
        [answer(v4), answer(v6)]
    }

    #[test]
    fn the_answer_to_each_kind_of_segment_is_the_one_of_rfc_9293() {
        assert_eq!(answers(100, &[], Step::syn), expected(0, |s| s.ack(101)));
        assert_eq!(answers(100, b"early", Step::syn), expected(0, |s| s.ack(106)), "data with the SYN");
        assert_eq!(answers(u32::MAX, b"ab", Step::fin), expected(0, |s| s.ack(2)), "the numbers wrap");
        assert_eq!(answers(100, b"data", |s| s), expected(0, |s| s.ack(104)));
        assert_eq!(answers(100, b"data", |s| s.ack(77)), expected(77, |s| s));
        assert_eq!(answers(100, &[], |s| s.syn().ack(77)), expected(77, |s| s));
        assert_eq!(answers(100, &[], |s| s.fin().ack(77)), expected(77, |s| s));
    }

    #[test]
    fn a_reset_is_never_answered() {
        assert_eq!(answers(100, &[], Step::rst), [None, None]);
        assert_eq!(answers(100, &[], |s| s.rst().ack(7)), [None, None]);
        assert_eq!(answers(100, &[], |s| s.syn().rst()), [None, None]);
    }

    #[test]
    fn only_one_node_to_another_is_answered() {
        let answered = |source, destination| {
            let packet = written(PacketBuilder::ipv4(source, destination, 61).tcp(1, 2, 3, 4).syn(), &[]);
            reset(&mut [0; LONGEST], &packet).is_some()
        };
        assert!(answered(CLIENT, SERVER));
        for other in [[224, 0, 0, 1], [255; 4], [127, 0, 0, 1], [0; 4]] {
            assert!(!answered(CLIENT, other) && !answered(other, SERVER), "{other:?}");
        }
        let mut group = [0; 16];
        group[0] = 0xff;
        let packet = written(PacketBuilder::ipv6(CLIENT_V6, group, 61).tcp(1, 2, 3, 4).syn(), &[]);
        assert_eq!(reset(&mut [0; LONGEST], &packet), None);
    }

    #[test]
    fn what_is_no_whole_segment_is_not_answered() {
        let packet = written(PacketBuilder::ipv4(CLIENT, SERVER, 61).tcp(1, 2, 3, 4).syn(), b"data");
        assert_eq!(reset(&mut [0; LONGEST], &packet), Some(40));
        assert_eq!(reset(&mut [0; 39], &packet), None, "it doesn't fit");
        for length in 0..packet.len() {
            assert_eq!(reset(&mut [0; LONGEST], &packet[..length]), None, "{length}");
        }
        for at in 0..packet.len() {
            let mut broken = packet.clone();
            broken[at] ^= 0x10;
            assert_eq!(reset(&mut [0; LONGEST], &broken), None, "byte {at}");
        }
        let mut udp = Vec::new();
        PacketBuilder::ipv4(CLIENT, SERVER, 61).udp(1, 2).write(&mut udp, &[0; 20]).unwrap();
        assert_eq!(reset(&mut [0; LONGEST], &udp), None);
        let mut header = Ipv4Header::new(20, 61, IpNumber::TCP, CLIENT, SERVER).unwrap();
        header.more_fragments = true;
        let ip = IpHeaders::Ipv4(header, Ipv4Extensions::default());
        let fragment = written(PacketBuilder::ip(ip).tcp(1, 2, 3, 4).syn(), &[]);
        assert_eq!(reset(&mut [0; LONGEST], &fragment), None);
        let extensions = |more| Ipv6Extensions {
            fragment: Some(Ipv6FragmentHeader::new(IpNumber::TCP, IpFragOffset::ZERO, more, 7)),
            ..Ipv6Extensions::default()
        };
        for (more, answer) in [(false, Some(60)), (true, None)] {
            let header = Ipv6Header { source: CLIENT_V6, destination: SERVER_V6, ..Ipv6Header::default() };
            let ip = IpHeaders::Ipv6(header, extensions(more));
            let fragment = written(PacketBuilder::ip(ip).tcp(1, 2, 3, 4).syn(), &[]);
            assert_eq!(reset(&mut [0; LONGEST], &fragment), answer, "a fragment of one is none (RFC 6946)");
        }
    }

    proptest! {
        #[test]
        fn noise_does_no_harm(mut noise in prop::collection::vec(any::<u8>(), 0..120)) {
            for start in [0x45, 0x60] {
                if let Some(first) = noise.first_mut() {
                    *first = start;
                }
                let _ = reset(&mut [0; LONGEST], &noise);
            }
        }
    }
}
