//! First stage: bytes become headers, or a drop. Reads a packet's first cache line and nothing else; the device has begun to
//! fetch it.

use crate::address::V6;
use crate::batch::{Batch, Head, Kind, Lane, Packets, PlainParts};
use crate::counters::DropReason;
use crate::session::tuple::Tuple;
use crate::snapshot::network::Network;
use crate::snapshot::spec::AROUND;
use crate::verdict::Verdict;
use crate::wire::icmp_error::ErrorFamily;
use crate::wire::plain::PlainFamily;
use crate::wire::sctp::{self, Common};
use crate::wire::tcp::Segment;
use crate::wire::{ethernet, icmp, ipv4, ipv6, ndp, protocol, udp};

/// Reads the headers of every packet.
pub fn run(batch: &mut Batch, network: &Network) {
    let all = batch.open;
    let v4 = read_plain::<u32>(batch, all, network);
    let v6 = read_plain::<V6>(batch, all.without(v4), network);
    batch.families = [v4, v6];
    batch.plain = v4.or(v6);
    for i in all.without(batch.plain) {
        read_any(batch, i, network);
    }
}

/// The short way for what almost every packet is; those that took it. The others are untouched.
fn read_plain<A: Lane + PlainFamily>(batch: &mut Batch, packets: Packets, network: &Network) -> Packets {
    let mut plain = Packets::default();
    for i in packets {
        if try_plain::<A>(batch, i, network).is_some() {
            plain.insert(i);
        }
    }
    plain
}

/// The short way: TCP or UDP, whole and to stay so, without options or extensions, and to us. `None`, with nothing decided, for all
/// others: the long way says what they are. Kinds of addresses are not looked at: whoever has a session has good ones,
/// and who has none is asked by `classify`.
#[inline]
fn try_plain<A: Lane + PlainFamily>(batch: &mut Batch, i: usize, network: &Network) -> Option<()> {
    let PlainParts { frames, heads, segments, keys, .. } = A::plain_parts(batch);
    let received = frames.get_mut(i)?;
    let (key, head) = (&mut keys[i], &mut heads[i]);
    let port = network.port(received.interface);
    let frame = received.frame.bytes();
    if received.is_hairpin() {
        return None;
    }
    let first = frame.first_chunk()?;
    if !port.is_destination(first) {
        return None;
    }
    head.sides = received.sides(port.sides);
    let plain = A::read(first, frame)?;
    // What is read is written down at once, field by field, whether or not it will be used: the processor has few registers.
    key.set(plain.source, plain.destination, plain.ports, plain.protocol);
    head.ttl = plain.ttl;
    head.l4 = A::L4 as u16;
    head.length = plain.total;
    let length = LINK + u32::from(plain.total);
    if frame.len() < length as usize {
        return None;
    }
    if plain.protocol == protocol::UDP {
        let is_exact = u32::from(plain.udp_length) + A::L4 as u32 == length;
        if !is_exact || usize::from(plain.udp_length) < udp::HEADER {
            return None;
        }
        head.kind = Kind::Udp;
    } else {
        let segment = frame.get(A::L4..length as usize).filter(|_| plain.protocol == protocol::TCP)?;
        Segment::parse(segment, &mut segments[i])?;
        head.kind = Kind::Tcp;
    }
    // Padding of short frames is the link's; it doesn't travel on.
    if frame.len() != length as usize {
        received.frame.set_len(length as u16);
    }
    Some(())
}

/// The long way, for whatever can come.
#[cold]
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
    // What comes around comes from no interface, wherever it came in.
    heads[i].sides = if hairpin { AROUND } else { received.sides(network.port(received.interface).sides) };
    // Padding of short frames is the link's; it doesn't travel on.
    received.frame.set_len(LINK as u16 + heads[i].length);
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

const LINK: u32 = ethernet::HEADER as u32;

#[inline]
fn read_v4(packet: &[u8], to_us: bool, tuple: &mut Tuple<u32>, to: &mut Into<'_>) -> Result<(), DropReason> {
    let header = ipv4::Header::parse(packet).map_err(|wrong| match wrong {
        ipv4::Wrong::Malformed => DropReason::Malformed,
        ipv4::Wrong::Checksum => DropReason::BadChecksum,
        ipv4::Wrong::SourceRoute => DropReason::Martian,
    })?;
    // A unicast packet in a group frame is a trick (RFC 1122 section 3.3.6).
    (tuple.source, tuple.destination) = (header.source, header.destination);
    if !to_us || tuple.is_martian(to.hairpin) {
        return Err(DropReason::Martian);
    }
    to.head.ttl = header.ttl;
    to.head.l4 = LINK as u16 + header.length;
    to.head.length = header.total;
    to.renumber = !header.dont_fragment;
    let payload = &packet[usize::from(header.length)..usize::from(header.total)];
    read_payload(payload, header.protocol, header.fragment, icmp::parse_v4, tuple, to)
}

/// Whether it is a packet; else it is a question for a link address, or an answer to one.
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
        let is_about_a_link = matches!(payload[0], ndp::SOLICITATION | ndp::ADVERTISEMENT);
        return if is_about_a_link { Ok(false) } else { Err(DropReason::NotOurs) };
    }
    (tuple.source, tuple.destination) = (header.source, header.destination);
    if !to_us || tuple.is_martian(to.hairpin) {
        return Err(DropReason::Martian);
    }
    to.head.ttl = header.hop_limit;
    to.head.l4 = LINK as u16 + header.length;
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
