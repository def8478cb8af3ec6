//! One fragment as a range of its datagram's bytes, and all that can be wrong with it on its own.

use crate::wire::{ipv4, ipv6, protocol};

const SCTP: u8 = 132;
/// Offsets on the wire count these; every piece but the last is a multiple of it.
const UNIT: u16 = 8;
/// The highest offset that its 13 bits hold.
const HIGHEST_OFFSET: u16 = 0x1fff;

/// Why a fragment is refused. All are the drop reason `fragment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its offset and length can't be those of a fragment, or lead beyond what a datagram may have.
    Malformed,
    /// It cuts through the header that decides about the datagram (RFC 1858, RFC 3128).
    Tiny,
    /// It contradicts what has been seen of its datagram, which ends with that (RFC 5722).
    Overlap,
    /// Its datagram comes in more separate parts than are kept track of, and ends with that.
    Scattered,
    /// A repetition of what has been seen, once too often.
    Repeated,
    /// There is no room for one more datagram, or none for this source.
    TooMany,
    /// Its datagram has ended because of an earlier fragment.
    Poisoned,
}

/// A fragment's place in its datagram. It isn't empty, isn't the whole and doesn't reach beyond what any datagram has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub(super) offset: u16,
    pub(super) length: u16,
    pub(super) more: bool,
}

impl Piece {
    /// The piece of `length` bytes from `offset_units` times 8. The first `header` bytes of the datagram decide about
    /// it ([`deciding_bytes`], behind what stands before them) and must be in one piece.
    ///
    /// # Errors
    /// [`Refusal::Malformed`] or [`Refusal::Tiny`].
    #[inline]
    pub fn new(offset_units: u16, length: u16, more: bool, header: u16) -> Result<Self, Refusal> {
        let whole = offset_units == 0 && !more;
        let cut_amid_a_unit = more && !length.is_multiple_of(UNIT);
        if offset_units > HIGHEST_OFFSET || length == 0 || whole || cut_amid_a_unit {
            return Err(Refusal::Malformed);
        }
        let offset = offset_units * UNIT;
        offset.checked_add(length).ok_or(Refusal::Malformed)?;
        let inside_the_header = if offset == 0 { length < header } else { offset < header };
        if inside_the_header { Err(Refusal::Tiny) } else { Ok(Self { offset, length, more }) }
    }

    /// The piece that an IPv4 fragment carries. The datagram's header has its share of the 65535 bytes (RFC 791 section
    /// 3.1).
    ///
    /// # Errors
    /// As [`Piece::new`].
    #[inline]
    pub fn of_v4(header: &ipv4::Header) -> Result<Self, Refusal> {
        let length = header.total - header.length;
        let decides = deciding_bytes(header.protocol);
        Self::new(header.fragment_offset, length, header.more_fragments, decides)?.behind(header.length)
    }

    /// The piece that an IPv6 fragment carries: all that follows the fragment header. What stands between the fixed
    /// header and the fragment header has its share of the 65535 bytes of payload (RFC 8200 section 4.5).
    ///
    /// # Errors
    /// As [`Piece::new`].
    #[inline]
    pub fn of_v6(header: &ipv6::Header) -> Result<Self, Refusal> {
        let fragment = header.fragment_header.ok_or(Refusal::Malformed)?;
        let begin = fragment.header_at + ipv6::FragmentHeader::LENGTH;
        let decides = header.length - begin + deciding_bytes(header.protocol);
        let piece = Self::new(fragment.offset_units, header.total - begin, fragment.more, decides)?;
        piece.behind(fragment.header_at - ipv6::HEADER as u16)
    }

    /// The same piece, if the datagram has room for it behind `before` bytes.
    fn behind(self, before: u16) -> Result<Self, Refusal> {
        self.end().checked_add(before).map(|_| self).ok_or(Refusal::Malformed)
    }

    /// Whether the datagram begins with it.
    #[inline]
    pub fn is_first(self) -> bool {
        self.offset == 0
    }

    /// Where the next piece begins.
    #[inline]
    pub(super) fn end(self) -> u16 {
        self.offset + self.length
    }
}

/// How much of a transport header the first fragment must have: ports, identifier, and TCP's flags (RFC 1858 section
/// 3).
#[inline]
pub fn deciding_bytes(number: u8) -> u16 {
    match number {
        protocol::TCP => 20,
        SCTP => 12,
        protocol::UDP | protocol::ICMP | protocol::ICMPV6 => 8,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::V6;

    fn tcp(offset_units: u16, length: u16, more: bool) -> Result<Piece, Refusal> {
        Piece::new(offset_units, length, more, deciding_bytes(protocol::TCP))
    }

    #[test]
    fn a_piece_is_a_range_of_bytes() {
        assert_eq!(tcp(0, 24, true), Ok(Piece { offset: 0, length: 24, more: true }));
        assert_eq!(tcp(3, 1, false), Ok(Piece { offset: 24, length: 1, more: false }));
        assert_eq!(tcp(3, 1, false).unwrap().end(), 25);
        assert!(tcp(0, 24, true).unwrap().is_first() && !tcp(3, 1, false).unwrap().is_first());
    }

    #[test]
    fn what_no_sender_cuts_is_malformed() {
        assert_eq!(tcp(0, 24, false), Err(Refusal::Malformed), "the whole datagram");
        assert_eq!(tcp(3, 0, true), Err(Refusal::Malformed), "nothing");
        assert_eq!(tcp(3, 0, false), Err(Refusal::Malformed), "nothing, at the end");
        assert_eq!(tcp(3, 12, true), Err(Refusal::Malformed), "not a multiple of 8");
        assert_eq!(tcp(0x2000, 8, true), Err(Refusal::Malformed), "more than 13 bits");
    }

    #[test]
    fn no_datagram_has_more_than_65535_bytes() {
        assert!(tcp(8191, 7, false).is_ok());
        assert_eq!(tcp(8191, 8, true), Err(Refusal::Malformed));
        assert_eq!(tcp(1, u16::MAX, false), Err(Refusal::Malformed));
    }

    #[test]
    fn nobody_cuts_through_the_header_that_decides() {
        for (number, decides) in [(protocol::TCP, 20), (SCTP, 12), (protocol::UDP, 8), (protocol::ICMPV6, 8)] {
            let piece = |units, length, more| Piece::new(units, length, more, deciding_bytes(number));
            for length in (8..=32).step_by(8) {
                assert_eq!(piece(0, length, true).is_ok(), length >= decides, "{number}: first {length} bytes");
                assert_eq!(piece(length / 8, 8, true).is_ok(), length >= decides, "{number}: from {length}");
            }
        }
        assert_eq!(tcp(0, 8, true), Err(Refusal::Tiny), "RFC 1858 section 3");
        assert_eq!(tcp(1, 64, true), Err(Refusal::Tiny), "RFC 3128 section 2");
        assert!(Piece::new(1, 8, false, deciding_bytes(47)).is_ok(), "nothing is read of other protocols");
    }

    #[test]
    fn an_ipv4_piece_leaves_the_datagram_room_for_its_header() {
        let header = |units, payload: u16| ipv4::Header {
            source: 1,
            destination: 2,
            protocol: protocol::UDP,
            ttl: 64,
            length: 24,
            total: 24 + payload,
            fragment: true,
            identification: 9,
            fragment_offset: units,
            more_fragments: false,
            dont_fragment: false,
        };
        assert_eq!(Piece::of_v4(&header(185, 100)), Ok(Piece { offset: 1480, length: 100, more: false }));
        assert!(Piece::of_v4(&header(8188, 7)).is_ok(), "65511 bytes behind a header of 24");
        assert_eq!(Piece::of_v4(&header(8188, 8)), Err(Refusal::Malformed), "one more");
    }

    #[test]
    fn an_ipv6_piece_begins_behind_the_fragment_header() {
        let fragment =
            |offset_units, more| ipv6::FragmentHeader { identification: 9, header_at: 48, offset_units, more };
        // A header of 40 bytes, 8 of options, 8 of fragment header, then `options` and the rest of the payload.
        let header = |options: u16, payload: u16, fragment| ipv6::Header {
            source: V6::default(),
            destination: V6::default(),
            protocol: protocol::TCP,
            hop_limit: 64,
            length: 56 + options,
            total: 56 + payload,
            fragment: true,
            fragment_header: Some(fragment),
        };
        let piece = |options, payload, offset, more| Piece::of_v6(&header(options, payload, fragment(offset, more)));
        assert_eq!(piece(16, 40, 0, true), Ok(Piece { offset: 0, length: 40, more: true }));
        assert_eq!(piece(16, 32, 0, true), Err(Refusal::Tiny), "16 bytes of TCP behind the options");
        assert_eq!(piece(0, 100, 5, false), Ok(Piece { offset: 40, length: 100, more: false }));
        assert_eq!(piece(0, 12, 5, true), Err(Refusal::Malformed), "RFC 8200: not a multiple of 8");
        assert!(piece(0, 7, 8190, false).is_ok(), "65527 bytes behind 8 of options; the fragment header doesn't count");
        assert_eq!(piece(0, 8, 8190, false), Err(Refusal::Malformed), "one more");
    }
}
