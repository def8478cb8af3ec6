//! ICMP errors of both families (RFC 792, RFC 4443): read, translated, made.
//!
//! An error quotes the packet that it is about. Whoever translates that packet's flow must translate the quote as well,
//! or the sender can't tell which flow the error means (RFC 5508 sections 3 and 4). What may stand behind the quote
//! (RFC 4884) is found by its length and stays as it is. Bytes in, bytes out: which session an error belongs to, and
//! how many of them may be made, is decided elsewhere.

mod compose;
mod family;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
mod translate;

pub use compose::{Error, LONGEST_V4, LONGEST_V6, compose_v4, compose_v6, may_answer};
pub use family::ErrorFamily;
pub use translate::translate;

use super::icmp::Message;
use super::{checksum, protocol, u16_at};
use crate::session::tuple::Tuple;

/// Length of the header of an ICMP error; the quote follows it.
pub const HEADER: usize = 8;

/// What every quote has of its transport header (RFC 792, RFC 1812 section 4.3.2.3).
const SHORTEST_TRANSPORT: usize = 8;

/// Why a message is not taken for an ICMP error. Each of them ends in a silent drop, except that a message that is
/// [no error](Self::NotAnError) may be a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Its type is not one of an error.
    NotAnError,
    /// An error that nobody may act upon, or that no border lets pass: source quench (RFC 6633), redirect
    /// (RFC 1812 section 5.2.7.2), a type that ICMPv6 has not assigned.
    Refused,
    /// Lengths or versions contradict each other.
    Malformed,
    /// The checksum of the message is wrong (RFC 5508 REQ-3).
    Checksum,
    /// The checksum of the quoted IPv4 header is wrong (RFC 5508 REQ-3 a).
    QuotedChecksum,
    /// It isn't addressed to the sender of the packet that it quotes, who alone may hear of it (RFC 1122 section
    /// 3.2.2). Who lets such a message pass lets strangers reach anybody who has one session open.
    Misaddressed,
    /// It quotes an ICMP error, which nobody may answer with another (RFC 1122 section 3.2.2).
    QuotesError,
    /// It quotes a fragment that isn't the first one: there are no ports in it.
    Fragment,
    /// The quote ends before the ports and the 8 bytes that it must have of the transport header.
    Short,
    /// It quotes a packet of a protocol, or an ICMP message of a kind, that has no session here.
    Protocol,
}

/// The packet that an ICMP error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote<A> {
    /// Its tuple, as it stands in the quote: the way of the packet, not of the error.
    pub tuple: Tuple<A>,
    /// What fits through the hop that the packet was too big for, in bytes, if the error says that it was. 0 comes
    /// from routers older than RFC 1191, which don't know.
    pub mtu: Option<u32>,
    /// How its transport header is to be translated.
    transport: Transport,
    /// Where its transport header stands, from the start of the quote.
    transport_at: u16,
    /// Where it ends, from its own start.
    end: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Tcp,
    Udp,
    Sctp,
    EchoRequest,
    EchoReply,
}

/// Reads the ICMP error that stands at `l4` in `packet`, which is the whole IP packet and nothing behind it.
///
/// The transport checksum in the quote is not looked at: most quotes end before the last byte that it is about
/// (RFC 5508 REQ-3 c).
///
/// # Errors
/// Says what is wrong with it.
pub fn read<A: ErrorFamily>(packet: &[u8], l4: usize) -> Result<Quote<A>, Wrong> {
    let message = packet.get(l4..).filter(|_| l4 >= A::HEADER).ok_or(Wrong::Malformed)?;
    let (header, body) = message.split_first_chunk::<HEADER>().ok_or(Wrong::Malformed)?;
    if packet.len() > usize::from(u16::MAX) {
        return Err(Wrong::Malformed);
    }
    let outline = A::outline(header)?;
    if !checksum::verifies(A::pseudo_header(packet, message.len()), message) {
        return Err(Wrong::Checksum);
    }
    // Padding and extensions behind the quote are not part of it (RFC 4884 section 4, RFC 5508 REQ-3 d).
    let body = match outline.quote_length {
        0 => body,
        length => body.get(..length).ok_or(Wrong::Malformed)?,
    };
    let quoted = A::quoted(body)?;
    if quoted.source != A::destination(packet) {
        return Err(Wrong::Misaddressed);
    }
    let payload = body.get(quoted.transport_at..quoted.end).filter(|bytes| bytes.len() >= SHORTEST_TRANSPORT);
    let payload = payload.ok_or(Wrong::Short)?;
    let (first, second) = (u16_at(payload, 0), u16_at(payload, 2));
    let (transport, source_port, destination_port) = match quoted.protocol {
        protocol::TCP => (Transport::Tcp, first, second),
        protocol::UDP => (Transport::Udp, first, second),
        protocol::SCTP => (Transport::Sctp, first, second),
        number if number == A::ICMP => match A::echo(payload) {
            Some(Message::EchoRequest(identifier)) => (Transport::EchoRequest, identifier, 0),
            Some(Message::EchoReply(identifier)) => (Transport::EchoReply, 0, identifier),
            _ if A::is_error(payload[0]) => return Err(Wrong::QuotesError),
            _ => return Err(Wrong::Protocol),
        },
        _ => return Err(Wrong::Protocol),
    };
    let tuple = Tuple {
        source: quoted.source,
        destination: quoted.destination,
        source_port,
        destination_port,
        protocol: quoted.protocol,
    };
    let (transport_at, end) = (quoted.transport_at as u16, quoted.end as u16);
    Ok(Quote { tuple, mtu: outline.mtu, transport, transport_at, end })
}
