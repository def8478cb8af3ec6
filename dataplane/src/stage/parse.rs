//! First stage: bytes become headers, or a drop. Reads a packet's first cache line and nothing else.

use crate::address::V6;
use crate::batch::{Batch, Head, Kind, Lane, Packets};
use crate::counters::DropReason;
use crate::session::tuple::Tuple;
use crate::snapshot::network::Network;
use crate::snapshot::spec::Role;
use crate::verdict::Verdict;
use crate::wire::icmp_error::ErrorFamily;
use crate::wire::sctp::{self, Common};
use crate::wire::tcp::Segment;
use crate::wire::{ethernet, icmp, ipv4, ipv6, ndp, protocol, udp};

/// Frames are fetched this many packets ahead: far enough to hide memory, near enough not to crowd the first-level cache.
const AHEAD: usize = 8;

/// Reads the headers of every packet.
pub fn run(batch: &mut Batch, network: &Network) {
    let mut ordinary = [Packets::default(); 2];
    for i in 0..batch.len() {
        if let Some(ahead) = batch.frames.get(i + AHEAD) {
            ahead.frame.prefetch();
        }
        match read_ordinary(batch, i, network) {
            Some(family) => ordinary[family].insert(i),
            None => read_any(batch, i, network),
        }
    }
    for (all, ordinary) in batch.families.iter_mut().zip(ordinary) {
        *all = all.or(ordinary);
    }
}

/// The short way for what almost every packet is: TCP or UDP, whole and to stay so, without options or extensions, to us, and
/// with nothing wrong about it; its family. `None`, with nothing decided, for all others: the long way says what they are.
#[inline]
fn read_ordinary(batch: &mut Batch, i: usize, network: &Network) -> Option<usize> {
    let Batch { frames, heads, segments, v4, v6, .. } = batch;
    let received = frames.get_mut(i)?;
    if received.is_hairpin() {
        return None;
    }
    let port = network.port(received.interface);
    let frame = received.frame.bytes();
    let first: &[u8; SHORTEST] = frame.first_chunk()?;
    if !port.is_destination(first) {
        return None;
    }
    let (head, segment) = (&mut heads[i], &mut segments[i]);
    head.sides = port.sides;
    let family = match first[ETHERTYPE..ETHERTYPE + 3] {
        [0x08, 0x00, 0x45] => read_ordinary_v4(frame, first, head, &mut v4[i], segment)?,
        [0x86, 0xdd, version] if version >> 4 == 6 => read_ordinary_v6(frame, head, &mut v6[i], segment)?,
        _ => return None,
    };
    // Padding of short frames is the link's; it doesn't travel on.
    let length = LINK + head.length;
    if received.frame.len() != length {
        received.frame.set_len(length);
    }
    Some(family)
}

/// Where the type of an Ethernet frame is; the version of IP follows it.
const ETHERTYPE: usize = 12;
/// Where the payload of a plain packet begins in its frame.
const L4: usize = ethernet::HEADER + ipv4::HEADER;
const L4_V6: usize = ethernet::HEADER + ipv6::HEADER;
/// Bytes that a plain packet with ports has at least.
const SHORTEST: usize = L4 + udp::HEADER;
const SHORTEST_V6: usize = L4_V6 + udp::HEADER;

#[inline]
fn read_ordinary_v4(
    frame: &[u8],
    first: &[u8; SHORTEST],
    head: &mut Head,
    tuple: &mut Tuple<u32>,
    segment: &mut Segment,
) -> Option<usize> {
    let (header, ports) = ipv4::read_plain(first)?;
    let length = LINK + header.total;
    let fits = usize::from(length) <= frame.len() && usize::from(length) >= SHORTEST;
    let odd = is_martian(header.source, header.destination) || header.source == header.destination;
    if !fits || odd {
        return None;
    }
    head.kind = read_ordinary_payload(frame, first, L4, length, header.protocol, segment)?;
    head.ttl = header.ttl;
    head.l4 = L4 as u16;
    head.length = header.total;
    tuple.source = header.source;
    tuple.destination = header.destination;
    tuple.source_port = (ports >> 16) as u16;
    tuple.destination_port = ports as u16;
    tuple.protocol = header.protocol;
    Some(<u32 as Lane>::FAMILY)
}

#[inline]
fn read_ordinary_v6(frame: &[u8], head: &mut Head, tuple: &mut Tuple<V6>, segment: &mut Segment) -> Option<usize> {
    let first: &[u8; SHORTEST_V6] = frame.first_chunk()?;
    let (header, ports) = ipv6::read_plain(first)?;
    let length = LINK + header.total;
    let odd = ipv6::is_martian_source(header.source)
        || ipv6::is_martian_destination(header.destination)
        || header.source == header.destination;
    if odd || usize::from(length) > frame.len() || usize::from(length) < SHORTEST_V6 {
        return None;
    }
    head.kind = read_ordinary_payload(frame, first, L4_V6, length, header.protocol, segment)?;
    head.ttl = header.hop_limit;
    head.l4 = L4_V6 as u16;
    head.length = header.total;
    tuple.source = header.source;
    tuple.destination = header.destination;
    tuple.source_port = (ports >> 16) as u16;
    tuple.destination_port = ports as u16;
    tuple.protocol = header.protocol;
    Some(<V6 as Lane>::FAMILY)
}

#[inline]
fn read_ordinary_payload<const FIRST: usize>(
    frame: &[u8],
    first: &[u8; FIRST],
    at: usize,
    length: u16,
    number: u8,
    segment: &mut Segment,
) -> Option<Kind> {
    match number {
        protocol::UDP => udp::read_plain(first, at, length).map(|()| Kind::Udp),
        protocol::TCP => Segment::parse(frame.get(at..usize::from(length))?, segment).map(|()| Kind::Tcp),
        _ => None,
    }
}

#[inline]
fn is_martian(source: u32, destination: u32) -> bool {
    ipv4::is_martian_source(source) || ipv4::is_martian_destination(destination)
}

/// The long way, for whatever can come.
#[cold]
#[inline(never)]
fn read_any(batch: &mut Batch, i: usize, network: &Network) {
    if let Err(reason) = try_read(batch, i, network) {
        batch.decide(i, Verdict::Drop(reason));
    }
}

fn try_read(batch: &mut Batch, i: usize, network: &Network) -> Result<(), DropReason> {
    let Batch { frames, heads, segments, associations, v4, v6, families, questions, .. } = &mut *batch;
    let received = &mut frames[i];
    let (link, packet) = received.frame.bytes().split_first_chunk().ok_or(DropReason::Malformed)?;
    let (destination, kind) = ethernet::parse(link);
    let to_us = destination == network.interface(received.interface).mac;
    if !to_us && !ethernet::is_group(destination) {
        return Err(DropReason::NotOurs);
    }
    // Written in place, field by field: a value that is put together on the stack and then moved stalls the processor.
    let hairpin = received.is_hairpin();
    let to = &mut Into {
        head: &mut heads[i],
        segment: &mut segments[i],
        association: &mut associations[i],
        hairpin,
        fragment: false,
        renumber: false,
    };
    match kind {
        ethernet::IPV4 => {
            read_v4(packet, to_us, &mut v4[i], to)?;
            families[<u32 as Lane>::FAMILY].insert(i);
        }
        ethernet::IPV6 if read_v6(packet, to_us, &mut v6[i], to)? => families[<V6 as Lane>::FAMILY].insert(i),
        ethernet::IPV6 | ethernet::ARP => {
            heads[i].kind = if kind == ethernet::ARP { Kind::Arp } else { Kind::Neighbour };
            questions.insert(i);
            return Ok(());
        }
        _ => return Err(DropReason::NotOurs),
    }
    let (fragment, renumber) = (to.fragment, to.renumber);
    // What comes around by way of a VIP comes from outside, wherever it came in.
    heads[i].sides = if hairpin { Role::Outside.sides() } else { network.port(received.interface).sides };
    // Padding of short frames is the link's; it doesn't travel on.
    received.frame.set_len(LINK + heads[i].length);
    if !heads[i].kind.has_session() {
        batch.sessionless.insert(i);
    }
    if fragment {
        batch.fragments.insert(i);
    }
    if batch.heads[i].kind == Kind::Error {
        batch.errors.insert(i);
    }
    if renumber {
        batch.renumber.insert(i);
    }
    Ok(())
}

/// Where the findings go.
struct Into<'a> {
    head: &'a mut Head,
    segment: &'a mut Segment,
    association: &'a mut Common,
    /// The packet comes around by way of a VIP: then it may go to where it comes from.
    hairpin: bool,
    fragment: bool,
    renumber: bool,
}

const LINK: u16 = ethernet::HEADER as u16;

#[inline]
fn read_v4(packet: &[u8], to_us: bool, tuple: &mut Tuple<u32>, to: &mut Into<'_>) -> Result<(), DropReason> {
    let header = ipv4::Header::parse(packet).map_err(|wrong| match wrong {
        ipv4::Wrong::Malformed => DropReason::Malformed,
        ipv4::Wrong::Checksum => DropReason::BadChecksum,
        ipv4::Wrong::SourceRoute => DropReason::Martian,
    })?;
    // A unicast packet in a group frame is a trick (RFC 1122 section 3.3.6).
    let loops = header.source == header.destination && !to.hairpin;
    if !to_us || is_martian(header.source, header.destination) || loops {
        return Err(DropReason::Martian);
    }
    tuple.source = header.source;
    tuple.destination = header.destination;
    to.head.ttl = header.ttl;
    to.head.l4 = LINK + header.length;
    to.head.length = header.total;
    to.renumber = !header.dont_fragment;
    let payload = &packet[usize::from(header.length)..usize::from(header.total)];
    read_payload(payload, header.protocol, header.fragment, icmp::parse_v4, tuple, to)
}

/// Whether it is a packet; else it is a question for a link address.
#[inline]
fn read_v6(packet: &[u8], to_us: bool, tuple: &mut Tuple<V6>, to: &mut Into<'_>) -> Result<bool, DropReason> {
    let header = ipv6::Header::parse(packet).map_err(|wrong| match wrong {
        ipv6::Wrong::Malformed => DropReason::Malformed,
        ipv6::Wrong::SourceRoute => DropReason::Martian,
    })?;
    let payload = &packet[usize::from(header.length)..usize::from(header.total)];
    if header.protocol == protocol::ICMPV6
        && !header.fragment
        && payload.first().is_some_and(|kind| (133..=137).contains(kind))
    {
        return if payload[0] == ndp::SOLICITATION { Ok(false) } else { Err(DropReason::NotOurs) };
    }
    let loops = header.source == header.destination && !to.hairpin;
    if !to_us || ipv6::is_martian_source(header.source) || ipv6::is_martian_destination(header.destination) || loops {
        return Err(DropReason::Martian);
    }
    tuple.source = header.source;
    tuple.destination = header.destination;
    to.head.ttl = header.hop_limit;
    to.head.l4 = LINK + header.length;
    to.head.length = header.total;
    read_payload(payload, header.protocol, header.fragment, icmp::parse_v6, tuple, to).map(|()| true)
}

#[inline]
fn read_payload<A: ErrorFamily>(
    payload: &[u8],
    number: u8,
    fragment: bool,
    icmp: impl Fn(&[u8]) -> Option<icmp::Message>,
    tuple: &mut Tuple<A>,
    to: &mut Into<'_>,
) -> Result<(), DropReason> {
    let (kind, source_port, destination_port) = match number {
        _ if fragment => {
            to.fragment = true;
            (Kind::Fragment, 0, 0)
        }
        protocol::TCP => {
            Segment::parse(payload, to.segment).ok_or(DropReason::Malformed)?;
            (Kind::Tcp, to.segment.source, to.segment.destination)
        }
        protocol::UDP => {
            let (source, destination) = udp::parse(payload).ok_or(DropReason::Malformed)?;
            (Kind::Udp, source, destination)
        }
        protocol::ICMP | protocol::ICMPV6 => match icmp(payload).ok_or(DropReason::Malformed)? {
            icmp::Message::EchoRequest(id) => (Kind::EchoRequest, id, 0),
            icmp::Message::EchoReply(id) => (Kind::EchoReply, 0, id),
            icmp::Message::Other if A::is_error(payload[0]) => (Kind::Error, 0, 0),
            icmp::Message::Other => (Kind::Other, 0, 0),
        },
        protocol::SCTP => {
            *to.association = sctp::parse(payload).ok_or(DropReason::Malformed)?;
            (Kind::Sctp, to.association.source, to.association.destination)
        }
        _ => (Kind::Other, 0, 0),
    };
    to.head.kind = kind;
    tuple.protocol = number;
    tuple.source_port = source_port;
    tuple.destination_port = destination_port;
    Ok(())
}
