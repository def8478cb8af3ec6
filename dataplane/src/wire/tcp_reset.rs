//! TCP resets that the gateway sends in reply to a rejected segment (RFC 9293 section 3.10.7.1).

use super::ipv6;
use super::tcp::{self, Flags, Segment};
use crate::wire::tcp_reply;
use crate::wire::tcp_reply::ReplySegment;

/// Maximum length of a packet that [`reset`] writes, bytes.
pub const MAX_LENGTH: usize = ipv6::HEADER + tcp::HEADER;

/// Writes the IP packet with the reset that replies to `original`, an unmodified IP packet of either family, and
/// returns its length.
///
/// The reset of a segment with ACK has the sequence number that its sender expects, so the sender accepts it; the reset
/// of any other segment acknowledges all of it.
///
/// `None` if `tcp_reply::reply` doesn't reply to `original`, or if it is a reset itself.
pub fn reset(into: &mut [u8], original: &[u8]) -> Option<usize> {
    tcp_reply::reply(into, original, decide)
}

fn decide(received: &Segment) -> Option<ReplySegment<'static>> {
    if received.flags.has(Flags::RST) {
        return None;
    }
    let (sequence, acknowledgement, flags) = if received.flags.has(Flags::ACK) {
        (received.acknowledgment, 0, Flags::RST.0)
    } else {
        (0, received.sequence.wrapping_add(received.sequence_length), Flags::RST.0 | Flags::ACK.0)
    };
    Some(ReplySegment { sequence, acknowledgment: acknowledgement, flags, window: 0, data: &[] })
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

    /// The resets for a segment with the flags that `flags` sets and this payload, in both families.
    fn resets(sequence: u32, payload: &[u8], flags: impl Fn(Step) -> Step) -> [Option<Vec<u8>>; 2] {
        let v4 = PacketBuilder::ipv4(CLIENT, SERVER, 61).tcp(4242, 443, sequence, 1000);
        let v6 = PacketBuilder::ipv6(CLIENT_V6, SERVER_V6, 61).tcp(4242, 443, sequence, 1000);
        let reset_of = |step| {
            let mut into = [0xaa; MAX_LENGTH];
            let length = reset(&mut into, &written(flags(step), payload))?;
            Some(into[..length].to_vec())
        };
        [reset_of(v4), reset_of(v6)]
    }

    /// The expected resets, built by an independent implementation.
    fn expected(sequence: u32, flags: impl Fn(Step) -> Step) -> [Option<Vec<u8>>; 2] {
        let v4 = PacketBuilder::ip(IpHeaders::Ipv4(
            Ipv4Header::new(0, 64, IpNumber::TCP, SERVER, CLIENT).unwrap(),
            Ipv4Extensions::default(),
        ));
        let v6 = PacketBuilder::ipv6(SERVER_V6, CLIENT_V6, 64);
        let reset_of =
            |ip: PacketBuilderStep<IpHeaders>| Some(written(flags(ip.tcp(443, 4242, sequence, 0).rst()), &[]));
        [reset_of(v4), reset_of(v6)]
    }

    #[test]
    fn the_reset_for_each_kind_of_segment_is_that_of_rfc_9293() {
        assert_eq!(resets(100, &[], Step::syn), expected(0, |s| s.ack(101)));
        assert_eq!(resets(100, b"early", Step::syn), expected(0, |s| s.ack(106)), "data with the SYN");
        assert_eq!(resets(u32::MAX, b"ab", Step::fin), expected(0, |s| s.ack(2)), "the sequence number wraps");
        assert_eq!(resets(100, b"data", |s| s), expected(0, |s| s.ack(104)));
        assert_eq!(resets(100, b"data", |s| s.ack(77)), expected(77, |s| s));
        assert_eq!(resets(100, &[], |s| s.syn().ack(77)), expected(77, |s| s));
        assert_eq!(resets(100, &[], |s| s.fin().ack(77)), expected(77, |s| s));
    }

    #[test]
    fn a_reset_is_never_replied_to() {
        assert_eq!(resets(100, &[], Step::rst), [None, None]);
        assert_eq!(resets(100, &[], |s| s.rst().ack(7)), [None, None]);
        assert_eq!(resets(100, &[], |s| s.syn().rst()), [None, None]);
    }

    #[test]
    fn only_unicast_packets_are_replied_to() {
        let gets_reply = |source, destination| {
            let packet = written(PacketBuilder::ipv4(source, destination, 61).tcp(1, 2, 3, 4).syn(), &[]);
            reset(&mut [0; MAX_LENGTH], &packet).is_some()
        };
        assert!(gets_reply(CLIENT, SERVER));
        for other in [[224, 0, 0, 1], [255; 4], [127, 0, 0, 1], [0; 4]] {
            assert!(!gets_reply(CLIENT, other) && !gets_reply(other, SERVER), "{other:?}");
        }
        let mut group = [0; 16];
        group[0] = 0xff;
        let packet = written(PacketBuilder::ipv6(CLIENT_V6, group, 61).tcp(1, 2, 3, 4).syn(), &[]);
        assert_eq!(reset(&mut [0; MAX_LENGTH], &packet), None);
    }

    #[test]
    fn truncated_or_corrupt_segments_are_not_replied_to() {
        let packet = written(PacketBuilder::ipv4(CLIENT, SERVER, 61).tcp(1, 2, 3, 4).syn(), b"data");
        assert_eq!(reset(&mut [0; MAX_LENGTH], &packet), Some(40));
        assert_eq!(reset(&mut [0; 39], &packet), None, "buffer too small");
        for length in 0..packet.len() {
            assert_eq!(reset(&mut [0; MAX_LENGTH], &packet[..length]), None, "{length}");
        }
        for at in 0..packet.len() {
            let mut broken = packet.clone();
            broken[at] ^= 0x10;
            assert_eq!(reset(&mut [0; MAX_LENGTH], &broken), None, "byte {at}");
        }
        let mut udp = Vec::new();
        PacketBuilder::ipv4(CLIENT, SERVER, 61).udp(1, 2).write(&mut udp, &[0; 20]).unwrap();
        assert_eq!(reset(&mut [0; MAX_LENGTH], &udp), None);
        let mut header = Ipv4Header::new(20, 61, IpNumber::TCP, CLIENT, SERVER).unwrap();
        header.more_fragments = true;
        let ip = IpHeaders::Ipv4(header, Ipv4Extensions::default());
        let fragment = written(PacketBuilder::ip(ip).tcp(1, 2, 3, 4).syn(), &[]);
        assert_eq!(reset(&mut [0; MAX_LENGTH], &fragment), None);
        let extensions = |more| Ipv6Extensions {
            fragment: Some(Ipv6FragmentHeader::new(IpNumber::TCP, IpFragOffset::ZERO, more, 7)),
            ..Ipv6Extensions::default()
        };
        for (more, length) in [(false, Some(60)), (true, None)] {
            let header = Ipv6Header { source: CLIENT_V6, destination: SERVER_V6, ..Ipv6Header::default() };
            let ip = IpHeaders::Ipv6(header, extensions(more));
            let fragment = written(PacketBuilder::ip(ip).tcp(1, 2, 3, 4).syn(), &[]);
            assert_eq!(
                reset(&mut [0; MAX_LENGTH], &fragment),
                length,
                "an atomic fragment is a whole packet (RFC 6946)"
            );
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(mut noise in prop::collection::vec(any::<u8>(), 0..120)) {
            for start in [0x45, 0x60] {
                if let Some(first) = noise.first_mut() {
                    *first = start;
                }
                let _ = reset(&mut [0; MAX_LENGTH], &noise);
            }
        }
    }
}
