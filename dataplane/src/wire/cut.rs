//! Cutting IPv4 packets that the next link doesn't carry and that may be cut (RFC 791 section 3.2, RFC 4787 REQ-13). IPv6
//! packets are only ever cut by their sender.

use super::{checksum, ethernet, ipv4, set_u16, u16_at};

/// Where the fragment's offset and flags are.
const FLAGS: usize = 6;

/// Whether the packet in a frame may be cut: IPv4, without "don't fragment", and with a header that every piece can have.
pub fn may_cut(frame: &[u8]) -> bool {
    let packet = frame.get(ethernet::HEADER..).unwrap_or_default();
    packet.len() > ipv4::HEADER && packet[0] == 0x45 && u16_at(packet, FLAGS) & ipv4::DONT_FRAGMENT == 0
}

/// Hands out the pieces of a frame, in order, each a whole frame of at most `mtu` bytes of IP, until `take` has no use for more.
pub fn cut(frame: &[u8], mtu: u16, mut take: impl FnMut(&[u8], &[u8]) -> bool) {
    const HEADERS: usize = ethernet::HEADER + ipv4::HEADER;
    let Some((headers, payload)) = frame.split_first_chunk::<HEADERS>() else { return };
    let most = usize::from(mtu).saturating_sub(ipv4::HEADER) & !7;
    if most == 0 {
        return;
    }
    let flags = u16_at(&headers[ethernet::HEADER..], FLAGS);
    let count = payload.chunks(most).count();
    for (n, piece) in payload.chunks(most).enumerate() {
        let mut headers = *headers;
        let header = &mut headers[ethernet::HEADER..];
        // What is cut again goes on where it stood, and its last piece is the last one only if it was.
        let more = if n + 1 < count { ipv4::MORE_FRAGMENTS } else { 0 };
        set_u16(header, FLAGS, (flags + (n * most / 8) as u16) | more);
        set_u16(header, 2, (ipv4::HEADER + piece.len()) as u16);
        set_u16(header, ipv4::CHECKSUM, 0);
        let sum = checksum::checksum(0, header);
        set_u16(header, ipv4::CHECKSUM, sum);
        if !take(&headers, piece) {
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

    fn pieces(frame: &[u8], mtu: u16) -> Vec<(u16, usize)> {
        let mut all = Vec::new();
        cut(frame, mtu, |headers, payload| {
            let header = &headers[14..];
            assert!(checksum::verifies(0, header) && usize::from(u16_at(header, 2)) == 20 + payload.len());
            all.push((u16_at(header, FLAGS), payload.len()));
            true
        });
        all
    }

    #[test]
    fn pieces_add_up_and_a_piece_is_cut_in_its_place() {
        assert_eq!(pieces(&frame(0, 100), 68), [(0x2000, 48), (0x2006, 48), (0x000c, 4)]);
        assert_eq!(pieces(&frame(0x2064, 96), 68), [(0x2064, 48), (0x206a, 48)], "more was to come, and still is");
        assert_eq!(pieces(&frame(0, 40), 68), [(0, 40)]);
        assert_eq!(pieces(&frame(0, 40), 20), []);
    }

    #[test]
    fn who_forbids_it_is_not_cut() {
        assert!(may_cut(&frame(0, 10)) && may_cut(&frame(0x2000, 10)));
        assert!(!may_cut(&frame(0x4000, 10)) && !may_cut(&[0; 20]));
        let mut options = frame(0, 10);
        options[14] = 0x46;
        assert!(!may_cut(&options));
    }
}
