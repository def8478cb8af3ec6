//! Fragmentation of IPv4 packets without DF that exceed the MTU (RFC 791 section 3.2, RFC 4787 REQ-13). Routers never
//! fragment IPv6 packets.

use super::{checksum, ethernet, ipv4, set_u16, u16_at};

/// Offset of the flags and fragment offset field.
const FLAGS: usize = 6;
/// Fragment offsets count in units of so many bytes, so all fragments but the last have a multiple of it.
const UNIT: usize = 8;

/// Whether the packet in a frame may be fragmented to this MTU: IPv4, without DF, and without options.
pub fn may_fragment(frame: &[u8], mtu: u16) -> bool {
    let packet = frame.get(ethernet::HEADER..).unwrap_or_default();
    let has_room = usize::from(mtu) >= ipv4::HEADER + UNIT;
    has_room && packet.len() > ipv4::HEADER && packet[0] == 0x45 && u16_at(packet, FLAGS) & ipv4::DONT_FRAGMENT == 0
}

/// Splits a frame into fragments of at most `mtu` bytes of IP packet and passes the headers and the payload of each to
/// `emit`, in order, until that returns false. The frame may be fragmented to this MTU (see [`may_fragment`]).
pub fn split(frame: &[u8], mtu: u16, mut emit: impl FnMut(&[u8], &[u8]) -> bool) {
    const HEADERS: usize = ethernet::HEADER + ipv4::HEADER;
    let Some((headers, payload)) = frame.split_first_chunk::<HEADERS>() else { return };
    let max_payload = usize::from(mtu).saturating_sub(ipv4::HEADER) / UNIT * UNIT;
    if max_payload == 0 {
        return;
    }
    let flags = u16_at(&headers[ethernet::HEADER..], FLAGS);
    let count = payload.chunks(max_payload).count();
    for (n, fragment) in payload.chunks(max_payload).enumerate() {
        let mut headers = *headers;
        let header = &mut headers[ethernet::HEADER..];
        // A fragment that is fragmented again keeps its offset, and its last piece has "more fragments" set if the
        // fragment had.
        let more = if n + 1 < count { ipv4::MORE_FRAGMENTS } else { 0 };
        set_u16(header, FLAGS, (flags + (n * max_payload / UNIT) as u16) | more);
        set_u16(header, 2, (ipv4::HEADER + fragment.len()) as u16);
        set_u16(header, ipv4::CHECKSUM, 0);
        let sum = checksum::checksum(0, header);
        set_u16(header, ipv4::CHECKSUM, sum);
        if !emit(&headers, fragment) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(flags: u16, payload: usize) -> Vec<u8> {
        let mut frame = vec![0; 14 + 20];
        frame[14] = 0x45;
        frame[14 + FLAGS..14 + FLAGS + 2].copy_from_slice(&flags.to_be_bytes());
        frame.extend((0..payload).map(|n| n as u8));
        frame
    }

    fn fragments(frame: &[u8], mtu: u16) -> Vec<(u16, usize)> {
        let mut all = Vec::new();
        split(frame, mtu, |headers, payload| {
            let header = &headers[14..];
            assert!(checksum::verifies(0, header) && usize::from(u16_at(header, 2)) == 20 + payload.len());
            all.push((u16_at(header, FLAGS), payload.len()));
            true
        });
        all
    }

    #[test]
    fn fragments_cover_the_datagram_and_a_fragment_is_split_at_its_own_offset() {
        assert_eq!(fragments(&frame(0, 100), 68), [(0x2000, 48), (0x2006, 48), (0x000c, 4)]);
        assert_eq!(fragments(&frame(0x2064, 96), 68), [(0x2064, 48), (0x206a, 48)], "more fragments stays set");
        assert_eq!(fragments(&frame(0, 40), 68), [(0, 40)]);
        assert_eq!(fragments(&frame(0, 40), 20), []);
    }

    #[test]
    fn packets_with_dont_fragment_or_options_are_not_fragmented() {
        assert!(may_fragment(&frame(0, 10), 28) && may_fragment(&frame(0x2000, 10), 28));
        assert!(!may_fragment(&frame(0x4000, 10), 28) && !may_fragment(&[0; 20], 28));
        let mut options = frame(0, 10);
        options[14] = 0x46;
        assert!(!may_fragment(&options, 28));
    }

    #[test]
    fn a_packet_may_be_fragmented_to_every_mtu_that_holds_a_fragment() {
        for mtu in 0..100 {
            let frame = frame(0, 100);
            let payload: usize = fragments(&frame, mtu).iter().map(|(_, length)| length).sum();
            assert_eq!(payload, if may_fragment(&frame, mtu) { 100 } else { 0 }, "{mtu}");
            assert_eq!(may_fragment(&frame, mtu), mtu >= 28, "{mtu}");
        }
    }
}
