//! The TCP reset with which the gateway answers a segment that nobody else will (RFC 9293 section 3.10.7.1).

use super::ipv6;
use super::segment::{self, Said};
use super::tcp::{self, Flags, Segment};

/// The longest packet that [`reset`] writes.
pub const LONGEST: usize = ipv6::HEADER + tcp::HEADER;

/// Writes the IP packet with the reset that answers `original`, an IP packet of either family as it came, and returns
/// its length.
///
/// A segment with an acknowledgement is answered with the sequence number that it expects, so its sender believes the
/// reset; any other by acknowledging all of it.
///
/// `None` if `original` is nothing that [`segment::answer`] answers, or itself a reset.
pub fn reset(into: &mut [u8], original: &[u8]) -> Option<usize> {
    segment::answer(into, original, |asked, _| decide(asked))
}

fn decide(asked: &Segment) -> Option<Said<'static>> {
    if asked.flags.has(Flags::RST) {
        return None;
    }
    let (sequence, acknowledgement, flags) = if asked.flags.has(Flags::ACK) {
        (asked.acknowledgement, 0, Flags::RST.0)
    } else {
        (0, asked.sequence.wrapping_add(asked.space), Flags::RST.0 | Flags::ACK.0)
    };
    Some(Said { sequence, acknowledgement, flags, window: 0, data: &[] })
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
