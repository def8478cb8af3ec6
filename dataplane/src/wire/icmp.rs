//! ICMP echo for IPv4 (RFC 792) and IPv6 (RFC 4443): the only ICMP query that is translated.

/// Length of an echo header.
pub const HEADER: usize = 8;
/// Offset of the checksum.
pub const CHECKSUM: usize = 2;
/// Offset of the identifier.
pub const IDENTIFIER: usize = 4;

/// The kinds of ICMP message that the engine distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// An echo request with this identifier.
    EchoRequest(u16),
    /// An echo reply with this identifier.
    EchoReply(u16),
    /// Anything else.
    Other,
}

/// Parses an ICMPv4 message; `None` if it is truncated.
#[inline]
pub fn parse_v4(payload: &[u8]) -> Option<Message> {
    parse(payload, 8, 0)
}

/// Parses an ICMPv6 message; `None` if it is truncated.
#[inline]
pub fn parse_v6(payload: &[u8]) -> Option<Message> {
    parse(payload, 128, 129)
}

#[inline]
fn parse(payload: &[u8], request: u8, reply: u8) -> Option<Message> {
    let header: &[u8; HEADER] = payload.first_chunk()?;
    let identifier = u16::from_be_bytes([header[4], header[5]]);
    Some(match (header[0], header[1]) {
        (kind, 0) if kind == request => Message::EchoRequest(identifier),
        (kind, 0) if kind == reply => Message::EchoReply(identifier),
        _ => Message::Other,
    })
}
