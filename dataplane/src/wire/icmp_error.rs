//! ICMP errors of both families (RFC 792, RFC 4443): parsing, translation, generation.
//!
//! An error quotes the packet that caused it. A NAT must translate the quote as well, or the sender can't attribute the
//! error to its flow (RFC 5508 sections 3 and 4). Extensions after the quote (RFC 4884) are found by its length and
//! stay unchanged. This module has no state: the session lookup and the rate limit are elsewhere.

mod compose;
mod family;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
mod translate;

pub use compose::{IcmpError, MAX_LENGTH_V4, MAX_LENGTH_V6, compose_v4, compose_v6, may_send_error};
pub use family::IcmpErrorFamily;
pub use translate::translate;

use super::icmp::Message;
use super::{checksum, protocol, u16_at};
use crate::flow::tuple::Tuple;

/// Length of the header of an ICMP error; the quote follows it.
pub const HEADER: usize = 8;

/// Minimum length of the quoted transport header (RFC 792, RFC 1812 section 4.3.2.3).
const MIN_TRANSPORT_HEADER: usize = 8;

/// Why a message is rejected as an ICMP error. Each reason is a silent drop, except that a message that is
/// [no error](Self::NotAnError) may be a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// Its type is not an error type.
    NotAnError,
    /// An error that hosts must ignore or border routers must not forward: source quench (RFC 6633), redirect (RFC 1812
    /// section 5.2.7.2), an unassigned ICMPv6 type.
    Filtered,
    /// A version is wrong, or lengths are inconsistent.
    Malformed,
    /// The checksum of the message is wrong (RFC 5508 REQ-3).
    Checksum,
    /// The checksum of the quoted IPv4 header is wrong (RFC 5508 REQ-3 a).
    QuotedChecksum,
    /// It isn't addressed to the source of the quoted packet, the only host that may receive it (RFC 1122 section
    /// 3.2.2). Translating it would let an attacker reach any host with a session.
    Misaddressed,
    /// It quotes an ICMP error, which must not cause another (RFC 1122 section 3.2.2).
    QuotesError,
    /// It quotes a later fragment, which has no ports.
    LaterFragment,
    /// The quote has less than the first 8 bytes of the transport header.
    Truncated,
    /// It quotes a packet of a protocol or an ICMP type that has no sessions.
    UnsupportedProtocol,
}

/// The packet that an ICMP error quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote<A> {
    /// Its tuple as quoted: in the direction of the quoted packet, not of the error.
    pub tuple: Tuple<A>,
    /// The MTU of the next hop, bytes, if the error is "packet too big" or "fragmentation needed". Routers older than
    /// RFC 1191 report 0.
    pub mtu: Option<u32>,
    /// The transport, which determines how its header is translated.
    transport: Transport,
    /// Offset of the transport header from the start of the quote.
    transport_offset: u16,
    /// End of the quoted packet, as an offset from the start of the quote.
    packet_end: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Tcp,
    Udp,
    Sctp,
    EchoRequest,
    EchoReply,
}

/// Parses the ICMP error at offset `l4` of `packet`, which is exactly one IP packet.
///
/// The quoted transport checksum is not verified: most quotes end before the last byte that it covers (RFC 5508 REQ-3
/// c).
///
/// # Errors
/// The reason for which it is rejected.
pub fn parse<A: IcmpErrorFamily>(packet: &[u8], l4: usize) -> Result<Quote<A>, ParseError> {
    let message = packet.get(l4..).filter(|_| l4 >= A::HEADER).ok_or(ParseError::Malformed)?;
    let (header, body) = message.split_first_chunk::<HEADER>().ok_or(ParseError::Malformed)?;
    if packet.len() > usize::from(u16::MAX) {
        return Err(ParseError::Malformed);
    }
    let outline = A::parse_header(header)?;
    if !checksum::verifies(A::pseudo_header_sum(packet, message.len()), message) {
        return Err(ParseError::Checksum);
    }
    // Padding and extensions behind the quote are not part of it (RFC 4884 section 4, RFC 5508 REQ-3 d).
    let body = match outline.quote_length {
        0 => body,
        length => body.get(..length).ok_or(ParseError::Malformed)?,
    };
    let quoted = A::parse_quoted(body)?;
    if quoted.source != A::destination(packet) {
        return Err(ParseError::Misaddressed);
    }
    let payload = body.get(quoted.transport_offset..quoted.end).filter(|bytes| bytes.len() >= MIN_TRANSPORT_HEADER);
    let payload = payload.ok_or(ParseError::Truncated)?;
    let (first, second) = (u16_at(payload, 0), u16_at(payload, 2));
    let (transport, source_port, destination_port) = match quoted.protocol {
        protocol::TCP => (Transport::Tcp, first, second),
        protocol::UDP => (Transport::Udp, first, second),
        protocol::SCTP => (Transport::Sctp, first, second),
        number if number == A::ICMP => match A::parse_echo(payload) {
            Some(Message::EchoRequest(identifier)) => (Transport::EchoRequest, identifier, 0),
            Some(Message::EchoReply(identifier)) => (Transport::EchoReply, 0, identifier),
            _ if A::is_error(payload[0]) => return Err(ParseError::QuotesError),
            _ => return Err(ParseError::UnsupportedProtocol),
        },
        _ => return Err(ParseError::UnsupportedProtocol),
    };
    let tuple = Tuple {
        source: quoted.source,
        destination: quoted.destination,
        source_port,
        destination_port,
        protocol: quoted.protocol,
    };
    let (transport_at, end) = (quoted.transport_offset as u16, quoted.end as u16);
    Ok(Quote { tuple, mtu: outline.mtu, transport, transport_offset: transport_at, packet_end: end })
}

/// Source and destination of the packet that the ICMP error at offset `l4` of `packet` quotes, whatever its type and
/// the quoted protocol are; `None` if it doesn't quote a whole IP header of this family, or if it quotes an error, which
/// has a quote of its own.
pub fn quoted_addresses<A: IcmpErrorFamily>(packet: &[u8], l4: usize) -> Option<(A, A)> {
    let body = packet.get(l4..)?.get(HEADER..)?;
    A::quoted_addresses(body).filter(|_| !A::quotes_error(body))
}
