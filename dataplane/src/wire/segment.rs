//! TCP segments that the gateway itself says: each answers one that came, and is made from it alone.

use super::tcp::{self, Segment};
use super::{checksum, ipv4, ipv6, protocol, set_u16};
use crate::address::Address;

/// What a segment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said<'a> {
    /// Number of its first byte.
    pub sequence: u32,
    /// The number that it expects; of no meaning without ACK among the flags.
    pub acknowledgement: u32,
    /// Its flags.
    pub flags: u8,
    /// Bytes that the sender may send.
    pub window: u16,
    /// Its data.
    pub data: &'a [u8],
}

/// Writes the IP packet that answers `original`, an IP packet of either family as it came, with what `decide` says to its segment
/// and data, and returns its length.
///
/// `None` if `original` holds no whole TCP segment with a right checksum, or one from or to an address that isn't one node's
/// (RFC 9293 MUST-57, MUST-3), if `decide` says nothing, or if the answer doesn't fit.
pub fn answer<'a>(
    into: &mut [u8],
    original: &[u8],
    decide: impl FnOnce(&Segment, &[u8]) -> Option<Said<'a>>,
) -> Option<usize> {
    match original.first()? >> 4 {
        4 => answer_v4(into, original, decide),
        6 => answer_v6(into, original, decide),
        _ => None,
    }
}

fn answer_v4<'a>(
    into: &mut [u8],
    original: &[u8],
    decide: impl FnOnce(&Segment, &[u8]) -> Option<Said<'a>>,
) -> Option<usize> {
    let asked = ipv4::Header::parse(original).ok()?;
    let payload = original.get(usize::from(asked.length)..usize::from(asked.total))?;
    if asked.protocol != protocol::TCP || asked.fragment || asked.source.is_martian() || asked.destination.is_martian()
    {
        return None;
    }
    let addresses = checksum::sum(original.get(ipv4::ADDRESSES..ipv4::HEADER)?);
    let pseudo = |length: usize| addresses + u32::from(protocol::TCP) + u32::from(length as u16);
    let (ports, said) = heard(payload, pseudo, decide)?;
    let header = ipv4::OwnHeader {
        service: 0,
        total: (ipv4::HEADER + tcp::HEADER + said.data.len()) as u16,
        identification: 0,
        dont_fragment: true,
        protocol: protocol::TCP,
        source: asked.destination,
        destination: asked.source,
    };
    write(into, &header.bytes(), ports, &said, pseudo)
}

fn answer_v6<'a>(
    into: &mut [u8],
    original: &[u8],
    decide: impl FnOnce(&Segment, &[u8]) -> Option<Said<'a>>,
) -> Option<usize> {
    let asked = ipv6::Header::parse(original).ok()?;
    let payload = original.get(usize::from(asked.length)..usize::from(asked.total))?;
    if asked.protocol != protocol::TCP || asked.fragment || asked.source.is_martian() || asked.destination.is_martian()
    {
        return None;
    }
    let pseudo = |length: usize| ipv6::pseudo_header(asked.source, asked.destination, length as u32, protocol::TCP);
    let (ports, said) = heard(payload, pseudo, decide)?;
    let length = (tcp::HEADER + said.data.len()) as u16;
    let header = ipv6::own_header(length, protocol::TCP, asked.destination, asked.source);
    write(into, &header, ports, &said, pseudo)
}

/// The ports of the answer, and what it says. `pseudo` sums up the pseudo-header for a segment of that many bytes, which is the
/// same in both directions.
fn heard<'a>(
    payload: &[u8],
    pseudo: impl Fn(usize) -> u32,
    decide: impl FnOnce(&Segment, &[u8]) -> Option<Said<'a>>,
) -> Option<((u16, u16), Said<'a>)> {
    let mut asked = Segment::default();
    Segment::parse(payload, &mut asked)?;
    if !checksum::verifies(pseudo(payload.len()), payload) {
        return None;
    }
    let data = payload.get(usize::from(payload[12] >> 4) * 4..)?;
    Some(((asked.destination, asked.source), decide(&asked, data)?))
}

fn write(
    into: &mut [u8],
    header: &[u8],
    (source, destination): (u16, u16),
    said: &Said<'_>,
    pseudo: impl Fn(usize) -> u32,
) -> Option<usize> {
    let length = header.len() + tcp::HEADER + said.data.len();
    let (ip, segment) = into.get_mut(..length)?.split_at_mut(header.len());
    ip.copy_from_slice(header);
    let (tcp, data) = segment.split_at_mut(tcp::HEADER);
    data.copy_from_slice(said.data);
    tcp.fill(0);
    tcp[0..2].copy_from_slice(&source.to_be_bytes());
    tcp[2..4].copy_from_slice(&destination.to_be_bytes());
    tcp[4..8].copy_from_slice(&said.sequence.to_be_bytes());
    tcp[8..12].copy_from_slice(&said.acknowledgement.to_be_bytes());
    tcp[12] = (tcp::HEADER as u8 / 4) << 4;
    tcp[13] = said.flags;
    tcp[14..16].copy_from_slice(&said.window.to_be_bytes());
    let sum = checksum::checksum(pseudo(segment.len()), segment);
    set_u16(segment, tcp::CHECKSUM, sum);
    Some(length)
}
