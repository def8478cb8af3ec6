//! Differences between ICMPv4 and ICMPv6 errors: types, lengths, the quoted IP header, the pseudo-header.

use super::ParseError;
use crate::flow::address::{Address, V6};
use crate::wire::checksum::{self, Delta};
use crate::wire::{icmp, ipv4, ipv6, protocol, set_u16, u16_at};

/// The fields of an ICMP error's header that translation needs.
#[derive(Clone, Copy, Debug)]
pub struct ErrorHeader {
    /// Length of the quote with its padding (RFC 4884 section 4), bytes; 0 if the quote extends to the end of the
    /// message.
    pub quote_length: usize,
    /// See [`super::Quote::mtu`].
    pub mtu: Option<u32>,
}

/// A quoted IP header.
#[derive(Clone, Copy, Debug)]
pub struct QuotedHeader<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// Protocol after options or extension headers.
    pub protocol: u8,
    /// Offset of the transport header in the quote.
    pub transport_offset: usize,
    /// End of the quoted packet, which may be truncated.
    pub end: usize,
}

/// An address family with ICMP errors.
pub trait IcmpErrorFamily: Address {
    /// Minimum MTU of the family, bytes.
    const MIN_MTU: u32;
    /// Length of the fixed IP header, bytes.
    const HEADER: usize;
    /// Protocol number of the family's ICMP.
    const ICMP: u8;

    /// Whether a message of this type is or may be an error: no error may be sent for it.
    fn is_error(kind: u8) -> bool;
    /// Parses the header of an error.
    ///
    /// # Errors
    /// If it is no error, or one that is not translated.
    fn parse_header(header: &[u8; super::HEADER]) -> Result<ErrorHeader, ParseError>;
    /// Parses the IP header at the start of a quote, which may be truncated.
    ///
    /// # Errors
    /// The reason for which it is rejected.
    fn parse_quoted(body: &[u8]) -> Result<QuotedHeader<Self>, ParseError>;
    /// Source and destination of the IP header at the start of a quote; `None` if truncated or of another version.
    fn quoted_addresses(body: &[u8]) -> Option<(Self, Self)>;
    /// Whether a quote is of an ICMP error, or has too many extension headers to tell. No host reports on an error
    /// (RFC 1122 section 3.2.2, RFC 4443 section 2.4 e).
    fn quotes_error(body: &[u8]) -> bool;
    /// Parses an ICMP message; `None` if it is truncated.
    fn parse_echo(payload: &[u8]) -> Option<icmp::Message>;
    /// The destination address of a packet whose header has been validated.
    fn destination(packet: &[u8]) -> Self;
    /// The sum of the pseudo-header of an ICMP message of `length` bytes in `packet`, not folded; 0 for IPv4.
    fn pseudo_header_sum(packet: &[u8], length: usize) -> u32;
    /// Writes both addresses of the IP header at the start of `packet`, and updates its checksum if it has one.
    fn set_addresses(packet: &mut [u8], source: Self, destination: Self);
}

impl IcmpErrorFamily for u32 {
    const MIN_MTU: u32 = 68;
    const HEADER: usize = ipv4::HEADER;
    const ICMP: u8 = protocol::ICMP;

    fn is_error(kind: u8) -> bool {
        // Destination unreachable, source quench, redirect, time exceeded, parameter problem.
        matches!(kind, 3 | 4 | 5 | 11 | 12)
    }

    fn parse_header(header: &[u8; super::HEADER]) -> Result<ErrorHeader, ParseError> {
        match header[0] {
            3 | 11 | 12 => Ok(ErrorHeader {
                quote_length: usize::from(header[5]) * 4,
                mtu: (header[..2] == [3, 4]).then(|| u16_at(header, 6).into()),
            }),
            4 | 5 => Err(ParseError::Filtered),
            _ => Err(ParseError::NotAnError),
        }
    }

    fn parse_quoted(body: &[u8]) -> Result<QuotedHeader<Self>, ParseError> {
        let fixed: &[u8; ipv4::HEADER] = body.first_chunk().ok_or(ParseError::Truncated)?;
        let length = usize::from(fixed[0] & 0x0f) * 4;
        let total = usize::from(u16_at(fixed, 2));
        if fixed[0] >> 4 != 4 || length < ipv4::HEADER || total < length {
            return Err(ParseError::Malformed);
        }
        // Options are skipped unchecked (RFC 5508 REQ-3 b): the packet was forwarded before.
        let header = body.get(..length).ok_or(ParseError::Truncated)?;
        if !checksum::verifies(0, header) {
            return Err(ParseError::QuotedChecksum);
        }
        if is_later_fragment_v4(fixed) {
            return Err(ParseError::LaterFragment);
        }
        let (source, destination) = addresses_v4(fixed);
        let (protocol, end) = (fixed[9], total.min(body.len()));
        Ok(QuotedHeader { source, destination, protocol, transport_offset: length, end })
    }

    fn quoted_addresses(body: &[u8]) -> Option<(Self, Self)> {
        body.first_chunk::<{ ipv4::HEADER }>().filter(|fixed| fixed[0] >> 4 == 4).map(addresses_v4)
    }

    fn quotes_error(body: &[u8]) -> bool {
        let Some(fixed) = body.first_chunk::<{ ipv4::HEADER }>() else { return false };
        let kind = body.get(usize::from(fixed[0] & 0x0f) * 4);
        fixed[9] == Self::ICMP && !is_later_fragment_v4(fixed) && kind.is_some_and(|&kind| Self::is_error(kind))
    }

    fn parse_echo(payload: &[u8]) -> Option<icmp::Message> {
        icmp::parse_v4(payload)
    }

    fn destination(packet: &[u8]) -> Self {
        ipv4::destination(packet)
    }

    fn pseudo_header_sum(_: &[u8], _: usize) -> u32 {
        0
    }

    fn set_addresses(packet: &mut [u8], source: Self, destination: Self) {
        let Some(header) = packet.first_chunk_mut::<{ ipv4::HEADER }>() else { return };
        let old = checksum::sum(&header[ipv4::ADDRESSES..]);
        let delta = Delta::of(old, source.word_sum() + destination.word_sum());
        let checksum = u16_at(header, ipv4::CHECKSUM);
        set_u16(header, ipv4::CHECKSUM, delta.apply(checksum));
        header[ipv4::ADDRESSES..ipv4::ADDRESSES + 4].copy_from_slice(&source.to_be_bytes());
        header[ipv4::ADDRESSES + 4..].copy_from_slice(&destination.to_be_bytes());
    }
}

impl IcmpErrorFamily for V6 {
    const MIN_MTU: u32 = 1280;
    const HEADER: usize = ipv6::HEADER;
    const ICMP: u8 = protocol::ICMPV6;

    fn is_error(kind: u8) -> bool {
        // The upper half of the types are queries (RFC 4443 section 2.1); a redirect counts as an error (2.4 e.2).
        kind < 128 || kind == 137
    }

    fn parse_header(header: &[u8; super::HEADER]) -> Result<ErrorHeader, ParseError> {
        let quote_length = usize::from(header[4]) * 8;
        let rest = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        match header[0] {
            // Destination unreachable, time exceeded.
            1 | 3 => Ok(ErrorHeader { quote_length, mtu: None }),
            // Packet too big, parameter problem: no length, all four bytes have a meaning.
            2 => Ok(ErrorHeader { quote_length: 0, mtu: Some(rest) }),
            4 => Ok(ErrorHeader { quote_length: 0, mtu: None }),
            kind if Self::is_error(kind) => Err(ParseError::Filtered),
            _ => Err(ParseError::NotAnError),
        }
    }

    fn parse_quoted(body: &[u8]) -> Result<QuotedHeader<Self>, ParseError> {
        let fixed: &[u8; ipv6::HEADER] = body.first_chunk().ok_or(ParseError::Truncated)?;
        if fixed[0] >> 4 != 6 {
            return Err(ParseError::Malformed);
        }
        let end = (ipv6::HEADER + usize::from(u16_at(fixed, 4))).min(body.len());
        let (protocol, transport_at) = skip_extensions(&body[..end])?;
        let (source, destination) = addresses_v6(fixed);
        Ok(QuotedHeader { source, destination, protocol, transport_offset: transport_at, end })
    }

    fn quoted_addresses(body: &[u8]) -> Option<(Self, Self)> {
        body.first_chunk::<{ ipv6::HEADER }>().filter(|fixed| fixed[0] >> 4 == 6).map(addresses_v6)
    }

    fn quotes_error(body: &[u8]) -> bool {
        match skip_extensions(body) {
            Ok((Self::ICMP, at)) => body.get(at).is_some_and(|&kind| Self::is_error(kind)),
            Err(ParseError::Malformed) => true,
            // Of another protocol; it ends before, or is a fragment other than the first.
            Ok(_) | Err(_) => false,
        }
    }

    fn parse_echo(payload: &[u8]) -> Option<icmp::Message> {
        icmp::parse_v6(payload)
    }

    fn destination(packet: &[u8]) -> Self {
        ipv6::destination(packet)
    }

    fn pseudo_header_sum(packet: &[u8], length: usize) -> u32 {
        let addresses = packet.get(ipv6::ADDRESSES..ipv6::HEADER).map_or(0, checksum::sum);
        addresses + u32::from(length as u16) + u32::from(protocol::ICMPV6)
    }

    fn set_addresses(packet: &mut [u8], source: Self, destination: Self) {
        let Some(header) = packet.first_chunk_mut::<{ ipv6::HEADER }>() else { return };
        header[ipv6::ADDRESSES..ipv6::ADDRESSES + 16].copy_from_slice(&source.to_bits().to_be_bytes());
        header[ipv6::ADDRESSES + 16..].copy_from_slice(&destination.to_bits().to_be_bytes());
    }
}

/// Source and destination in a fixed IPv4 header.
fn addresses_v4(header: &[u8; ipv4::HEADER]) -> (u32, u32) {
    let [.., s0, s1, s2, s3, d0, d1, d2, d3] = *header;
    (u32::from_be_bytes([s0, s1, s2, s3]), u32::from_be_bytes([d0, d1, d2, d3]))
}

/// Source and destination in a fixed IPv6 header.
fn addresses_v6(header: &[u8; ipv6::HEADER]) -> (V6, V6) {
    let address = |at: usize| V6::from_bits(header[at..].first_chunk().map_or(0, |b| u128::from_be_bytes(*b)));
    (address(ipv6::ADDRESSES), address(ipv6::ADDRESSES + 16))
}

/// Whether an IPv4 packet is a fragment other than the first: it has an offset.
pub(super) fn is_later_fragment_v4(packet: &[u8]) -> bool {
    let offset = u16_at(packet, 6) & 0x1fff;
    offset != 0
}

/// The protocol after all extension headers of `packet`, and the offset of its header. Unlike [`ipv6::Header::parse`],
/// it accepts a truncated packet and doesn't check rules for forwarding: the packet was forwarded before.
pub(super) fn skip_extensions(packet: &[u8]) -> Result<(u8, usize), ParseError> {
    let mut next = *packet.get(6).ok_or(ParseError::Truncated)?;
    let mut at = ipv6::HEADER;
    for _ in 0..ipv6::MAX_EXTENSION_HEADERS {
        let length = match next {
            ipv6::HOP_BY_HOP | ipv6::ROUTING | ipv6::DESTINATION_OPTIONS => {
                8 + usize::from(*packet.get(at + 1).ok_or(ParseError::Truncated)?) * 8
            }
            ipv6::FRAGMENT => 8,
            _ => return Ok((next, at)),
        };
        let extension = packet.get(at..at + length).ok_or(ParseError::Truncated)?;
        if next == ipv6::FRAGMENT && u16_at(extension, 2) & 0xfff8 != 0 {
            return Err(ParseError::LaterFragment);
        }
        next = extension[0];
        at += length;
    }
    Err(ParseError::Malformed)
}
