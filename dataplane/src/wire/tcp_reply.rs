//! TCP segments that the gateway originates: each replies to a received segment and is derived from it alone.

use super::tcp::{self, Segment};
use super::{checksum, ipv4, ipv6, protocol, set_u16};
use crate::flow::address::Address;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplySegment<'a> {
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgment number; meaningless without ACK.
    pub acknowledgment: u32,
    pub flags: u8,
    pub window: u16,
    pub data: &'a [u8],
}

/// Writes the IP packet that replies to `original`, an unmodified IP packet of either family, and returns its length.
/// `decide` gets the segment and returns the reply.
///
/// `None` if `original` holds no complete TCP segment with a valid checksum, or one from or to an address that isn't
/// unicast (RFC 9293 MUST-57, MUST-3), if `decide` returns no reply, or if it doesn't fit.
pub fn reply<'a>(
    into: &mut [u8],
    original: &[u8],
    decide: impl FnOnce(&Segment) -> Option<ReplySegment<'a>>,
) -> Option<usize> {
    match original.first()? >> 4 {
        4 => reply_v4(into, original, decide),
        6 => reply_v6(into, original, decide),
        _ => None,
    }
}

/// Whether segments from an address get a reply: also from a link-local one, which no router forwards, but whose host
/// is on the link.
fn is_host<A: Address>(source: A) -> bool {
    !source.is_martian() || source.is_link_local()
}

fn reply_v4<'a>(
    into: &mut [u8],
    original: &[u8],
    decide: impl FnOnce(&Segment) -> Option<ReplySegment<'a>>,
) -> Option<usize> {
    let received = ipv4::Header::parse(original).ok()?;
    let payload = original.get(usize::from(received.length)..usize::from(received.total))?;
    if received.protocol != protocol::TCP
        || received.fragment
        || !is_host(received.source)
        || received.destination.is_martian()
    {
        return None;
    }
    let addresses = checksum::sum(original.get(ipv4::ADDRESSES..ipv4::HEADER)?);
    let pseudo = |length: usize| addresses + u32::from(protocol::TCP) + u32::from(length as u16);
    let (ports, reply) = decide_reply(payload, pseudo, decide)?;
    let header = ipv4::LocalHeader {
        tos: 0,
        total: (ipv4::HEADER + tcp::HEADER + reply.data.len()) as u16,
        identification: 0,
        dont_fragment: true,
        protocol: protocol::TCP,
        source: received.destination,
        destination: received.source,
    };
    write(into, &header.bytes(), ports, &reply, pseudo)
}

fn reply_v6<'a>(
    into: &mut [u8],
    original: &[u8],
    decide: impl FnOnce(&Segment) -> Option<ReplySegment<'a>>,
) -> Option<usize> {
    let received = ipv6::Header::parse(original).ok()?;
    let payload = original.get(usize::from(received.length)..usize::from(received.total))?;
    if received.protocol != protocol::TCP
        || received.fragment
        || !is_host(received.source)
        || received.destination.is_martian()
    {
        return None;
    }
    let pseudo = |length: usize| {
        checksum::pseudo_header_sum(received.source, received.destination, length as u32, protocol::TCP)
    };
    let (ports, reply) = decide_reply(payload, pseudo, decide)?;
    let length = (tcp::HEADER + reply.data.len()) as u16;
    let header = ipv6::local_header(length, protocol::TCP, received.destination, received.source);
    write(into, &header, ports, &reply, pseudo)
}

/// The ports of the reply, and the reply. `pseudo` returns the sum of the pseudo-header for a segment of that length,
/// which is the same in both directions.
fn decide_reply<'a>(
    payload: &[u8],
    pseudo: impl Fn(usize) -> u32,
    decide: impl FnOnce(&Segment) -> Option<ReplySegment<'a>>,
) -> Option<((u16, u16), ReplySegment<'a>)> {
    let mut received = Segment::default();
    Segment::parse(payload, &mut received)?;
    if !checksum::verifies(pseudo(payload.len()), payload) {
        return None;
    }
    Some(((received.destination, received.source), decide(&received)?))
}

fn write(
    into: &mut [u8],
    header: &[u8],
    (source, destination): (u16, u16),
    reply: &ReplySegment<'_>,
    pseudo: impl Fn(usize) -> u32,
) -> Option<usize> {
    let length = header.len() + tcp::HEADER + reply.data.len();
    let (ip, segment) = into.get_mut(..length)?.split_at_mut(header.len());
    ip.copy_from_slice(header);
    let (tcp, data) = segment.split_at_mut(tcp::HEADER);
    data.copy_from_slice(reply.data);
    tcp.fill(0);
    tcp[0..2].copy_from_slice(&source.to_be_bytes());
    tcp[2..4].copy_from_slice(&destination.to_be_bytes());
    tcp[4..8].copy_from_slice(&reply.sequence.to_be_bytes());
    tcp[8..12].copy_from_slice(&reply.acknowledgment.to_be_bytes());
    tcp[12] = (tcp::HEADER as u8 / 4) << 4;
    tcp[13] = reply.flags;
    tcp[14..16].copy_from_slice(&reply.window.to_be_bytes());
    let sum = checksum::checksum(pseudo(segment.len()), segment);
    set_u16(segment, tcp::CHECKSUM, sum);
    Some(length)
}
