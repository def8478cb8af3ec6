//! A fragment as a byte range of its datagram, and the checks that need no other fragment.

use crate::wire::{ipv4, ipv6, protocol};

const SCTP: u8 = 132;
/// Unit of fragment offsets, bytes; the length of every fragment but the last is a multiple of it.
const UNIT: u16 = 8;
/// The largest fragment offset: 13 bits.
const MAX_OFFSET: u16 = 0x1fff;

/// Why a fragment is dropped. All map to the drop reason `fragment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FragmentError {
    /// Invalid offset or length, or an end beyond the longest datagram.
    Malformed,
    /// It splits the transport header (RFC 1858, RFC 3128).
    Tiny,
    /// It overlaps received bytes; the whole datagram is dropped (RFC 5722).
    Overlap,
    /// The datagram has too many separate byte ranges; all of it is dropped.
    TooManyRanges,
    /// A duplicate, beyond the limit.
    TooManyDuplicates,
    /// The limit of datagrams is reached: in total or for this source.
    LimitReached,
    /// The datagram is dropped because of an earlier fragment.
    Poisoned,
}

/// A fragment: not empty, not a whole datagram, and within the maximum datagram length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    pub(super) offset: u16,
    pub(super) length: u16,
    pub(super) more: bool,
}

impl Fragment {
    /// The fragment of `length` bytes at `offset_units` times 8. The first `header` bytes of the datagram
    /// ([`min_header_bytes`] and what precedes the transport header) must not be split.
    ///
    /// # Errors
    /// [`FragmentError::Malformed`] or [`FragmentError::Tiny`].
    #[inline]
    pub fn new(offset_units: u16, length: u16, more: bool, header: u16) -> Result<Self, FragmentError> {
        let whole = offset_units == 0 && !more;
        let unaligned = more && !length.is_multiple_of(UNIT);
        if offset_units > MAX_OFFSET || length == 0 || whole || unaligned {
            return Err(FragmentError::Malformed);
        }
        let offset = offset_units * UNIT;
        offset.checked_add(length).ok_or(FragmentError::Malformed)?;
        let splits_header = if offset == 0 { length < header } else { offset < header };
        if splits_header { Err(FragmentError::Tiny) } else { Ok(Self { offset, length, more }) }
    }

    /// The range of an IPv4 fragment. The 65535 bytes include the datagram's header (RFC 791 section 3.1).
    ///
    /// # Errors
    /// As [`Fragment::new`].
    #[inline]
    pub fn of_v4(header: &ipv4::Header) -> Result<Self, FragmentError> {
        let length = header.total - header.length;
        let min_header = min_header_bytes(header.protocol);
        Self::new(header.fragment_offset, length, header.more_fragments, min_header)?.after(header.length)
    }

    /// The range of an IPv6 fragment: all that follows the fragment header. Extension headers before the fragment
    /// header count toward the 65535 bytes of payload (RFC 8200 section 4.5).
    ///
    /// # Errors
    /// As [`Fragment::new`].
    #[inline]
    pub fn of_v6(header: &ipv6::Header) -> Result<Self, FragmentError> {
        let fragment = header.fragment_header.ok_or(FragmentError::Malformed)?;
        let begin = fragment.header_offset + ipv6::FragmentHeader::LENGTH;
        let min_header = header.length - begin + min_header_bytes(header.protocol);
        Self::new(fragment.offset_units, header.total - begin, fragment.more_fragments, min_header)?
            .after(fragment.header_offset - ipv6::HEADER as u16)
    }

    /// The same fragment, if the datagram has space for it after `before` bytes.
    fn after(self, before: u16) -> Result<Self, FragmentError> {
        self.end().checked_add(before).map(|_| self).ok_or(FragmentError::Malformed)
    }

    /// Whether it is the first fragment.
    #[inline]
    pub fn is_first(self) -> bool {
        self.offset == 0
    }

    /// The end offset, exclusive.
    #[inline]
    pub(super) fn end(self) -> u16 {
        self.offset + self.length
    }
}

/// Transport header bytes that the first fragment must contain: ports or identifier, and TCP's flags (RFC 1858 section
/// 3).
#[inline]
pub fn min_header_bytes(number: u8) -> u16 {
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
    use crate::flow::address::V6;

    fn tcp(offset_units: u16, length: u16, more: bool) -> Result<Fragment, FragmentError> {
        Fragment::new(offset_units, length, more, min_header_bytes(protocol::TCP))
    }

    #[test]
    fn a_fragment_is_a_byte_range() {
        assert_eq!(tcp(0, 24, true), Ok(Fragment { offset: 0, length: 24, more: true }));
        assert_eq!(tcp(3, 1, false), Ok(Fragment { offset: 24, length: 1, more: false }));
        assert_eq!(tcp(3, 1, false).unwrap().end(), 25);
        assert!(tcp(0, 24, true).unwrap().is_first() && !tcp(3, 1, false).unwrap().is_first());
    }

    #[test]
    fn impossible_offsets_and_lengths_are_malformed() {
        assert_eq!(tcp(0, 24, false), Err(FragmentError::Malformed), "the whole datagram");
        assert_eq!(tcp(3, 0, true), Err(FragmentError::Malformed), "empty");
        assert_eq!(tcp(3, 0, false), Err(FragmentError::Malformed), "empty, last");
        assert_eq!(tcp(3, 12, true), Err(FragmentError::Malformed), "not a multiple of 8");
        assert_eq!(tcp(0x2000, 8, true), Err(FragmentError::Malformed), "more than 13 bits");
    }

    #[test]
    fn no_datagram_has_more_than_65535_bytes() {
        assert!(tcp(8191, 7, false).is_ok());
        assert_eq!(tcp(8191, 8, true), Err(FragmentError::Malformed));
        assert_eq!(tcp(1, u16::MAX, false), Err(FragmentError::Malformed));
    }

    #[test]
    fn a_split_transport_header_is_rejected() {
        for (number, min_header) in [(protocol::TCP, 20), (SCTP, 12), (protocol::UDP, 8), (protocol::ICMPV6, 8)] {
            let fragment = |units, length, more| Fragment::new(units, length, more, min_header_bytes(number));
            for length in (8..=32).step_by(8) {
                assert_eq!(fragment(0, length, true).is_ok(), length >= min_header, "{number}: first {length} bytes");
                assert_eq!(fragment(length / 8, 8, true).is_ok(), length >= min_header, "{number}: from {length}");
            }
        }
        assert_eq!(tcp(0, 8, true), Err(FragmentError::Tiny), "RFC 1858 section 3");
        assert_eq!(tcp(1, 64, true), Err(FragmentError::Tiny), "RFC 3128 section 2");
        assert!(Fragment::new(1, 8, false, min_header_bytes(47)).is_ok(), "no header of other protocols is parsed");
    }

    #[test]
    fn the_ipv4_header_counts_toward_the_maximum_length() {
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
        assert_eq!(Fragment::of_v4(&header(185, 100)), Ok(Fragment { offset: 1480, length: 100, more: false }));
        assert!(Fragment::of_v4(&header(8188, 7)).is_ok(), "65511 bytes after a header of 24");
        assert_eq!(Fragment::of_v4(&header(8188, 8)), Err(FragmentError::Malformed), "one more");
    }

    #[test]
    fn an_ipv6_fragment_starts_after_the_fragment_header() {
        let fragment_header = |offset_units, more| ipv6::FragmentHeader {
            identification: 9,
            header_offset: 48,
            offset_units,
            more_fragments: more,
        };
        // A header of 40 bytes, 8 of options, 8 of fragment header, then `options` and the rest of the payload.
        let header = |options: u16, payload: u16, fragment_header| ipv6::Header {
            source: V6::default(),
            destination: V6::default(),
            protocol: protocol::TCP,
            hop_limit: 64,
            length: 56 + options,
            total: 56 + payload,
            fragment: true,
            fragment_header: Some(fragment_header),
        };
        let parse =
            |options, payload, offset, more| Fragment::of_v6(&header(options, payload, fragment_header(offset, more)));
        assert_eq!(parse(16, 40, 0, true), Ok(Fragment { offset: 0, length: 40, more: true }));
        assert_eq!(parse(16, 32, 0, true), Err(FragmentError::Tiny), "16 bytes of TCP after the options");
        assert_eq!(parse(0, 100, 5, false), Ok(Fragment { offset: 40, length: 100, more: false }));
        assert_eq!(parse(0, 12, 5, true), Err(FragmentError::Malformed), "RFC 8200: not a multiple of 8");
        assert!(parse(0, 7, 8190, false).is_ok(), "65527 bytes after 8 of options; the fragment header doesn't count");
        assert_eq!(parse(0, 8, 8190, false), Err(FragmentError::Malformed), "one more");
    }
}
