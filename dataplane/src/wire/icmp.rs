//! ICMP echo for IPv4 (RFC 792) and IPv6 (RFC 4443): the one query that pods send.

/// Length of an echo header.
pub const HEADER: usize = 8;
/// Where the checksum is.
pub const CHECKSUM: usize = 2;
/// Where the identifier is.
pub const IDENTIFIER: usize = 4;

/// What an ICMP message is to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A question with this identifier.
    EchoRequest(u16),
    /// The answer to the question with this identifier.
    EchoReply(u16),
    /// Anything else.
    Other,
}

/// Reads a message of IPv4's ICMP; `None` if it is cut short.
#[inline]
pub fn parse_v4(payload: &[u8]) -> Option<Message> {
    parse(payload, 8, 0)
}

/// Reads a message of IPv6's ICMP; `None` if it is cut short.
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
