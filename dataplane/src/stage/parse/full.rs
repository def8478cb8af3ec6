//! Full parser: every kind of packet, with a reason for those that are dropped.

use crate::flow::address::{Address, V6};
use crate::flow::drop_reason::DropReason;
use crate::flow::tunnel_metadata::HAIRPIN_SIDE;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, BatchFamily, PacketKind, ParsedHeader};
use crate::policy::network::Network;
use crate::wire::icmp_error::IcmpErrorFamily;
use crate::wire::sctp::{self, CommonHeader};
use crate::wire::tcp::Segment;
use crate::wire::{ethernet, icmp, ipv4, ipv6, ndp, protocol, udp};

/// Parses a packet, or drops it.
#[cold]
pub(super) fn parse(batch: &mut Batch, i: usize, network: &Network) {
    if let Err(reason) = try_parse(batch, i, network) {
        batch.decide(i, Verdict::Drop(reason));
    }
}

fn try_parse(batch: &mut Batch, i: usize, network: &Network) -> Result<(), DropReason> {
    let Batch { frames, headers, segments, sctp_headers, tuples_v4, tuples_v6, families, arp_nd, .. } = &mut *batch;
    let received = &mut frames[i];
    let (link, packet) = received.frame.bytes().split_first_chunk().ok_or(DropReason::Malformed)?;
    let (destination, kind) = ethernet::parse(link);
    let is_to_our_mac = destination == network.interface(received.interface).mac;
    if !is_to_our_mac && !ethernet::is_group(destination) {
        return Err(DropReason::NotOurs);
    }
    let hairpin = received.is_hairpin();
    let to = &mut ParsedFields {
        head: &mut headers[i],
        segment: &mut segments[i],
        association: &mut sctp_headers[i],
        hairpin,
        fragment: false,
        needs_new_ip_id: false,
    };
    match kind {
        ethernet::IPV4 => {
            parse_v4(packet, is_to_our_mac, &mut tuples_v4[i], to)?;
            families[<u32 as BatchFamily>::INDEX].insert(i);
        }
        ethernet::IPV6 if parse_v6(packet, is_to_our_mac, &mut tuples_v6[i], to)? => {
            families[<V6 as BatchFamily>::INDEX].insert(i);
        }
        ethernet::IPV6 | ethernet::ARP => {
            headers[i].kind = if kind == ethernet::ARP { PacketKind::Arp } else { PacketKind::NeighborDiscovery };
            arp_nd.insert(i);
            return Ok(());
        }
        _ => return Err(DropReason::NotOurs),
    }
    let (fragment, needs_new_ip_id) = (to.fragment, to.needs_new_ip_id);
    // A hairpinned packet has no side, whichever interface it arrived on.
    headers[i].sides =
        if hairpin { HAIRPIN_SIDE } else { received.sides(network.interface_entry(received.interface).sides) };
    // Removes Ethernet padding.
    received.frame.set_len(ETHERNET_HEADER as u16 + headers[i].ip_length);
    if !headers[i].kind.has_session() {
        batch.sessionless.insert(i);
    }
    if fragment {
        batch.fragments.insert(i);
    }
    if batch.headers[i].kind == PacketKind::IcmpError {
        batch.icmp_errors.insert(i);
    }
    if needs_new_ip_id {
        batch.new_ip_id.insert(i);
    }
    Ok(())
}

/// Where the parsed fields are stored.
struct ParsedFields<'a> {
    head: &'a mut ParsedHeader,
    segment: &'a mut Segment,
    association: &'a mut CommonHeader,
    /// The packet is hairpinned through a VIP: its source and destination may be the same.
    hairpin: bool,
    fragment: bool,
    /// The packet is, or may become, a fragment: its identification must be unique per VIP.
    needs_new_ip_id: bool,
}

const ETHERNET_HEADER: u32 = ethernet::HEADER as u32;

#[inline]
fn parse_v4(
    packet: &[u8],
    is_to_our_mac: bool,
    tuple: &mut Tuple<u32>,
    to: &mut ParsedFields<'_>,
) -> Result<(), DropReason> {
    let header = ipv4::Header::parse(packet).map_err(|error| match error {
        ipv4::ParseError::Malformed => DropReason::Malformed,
        ipv4::ParseError::Checksum => DropReason::BadChecksum,
        ipv4::ParseError::SourceRoute => DropReason::Martian,
    })?;
    // A unicast packet in a multicast or broadcast frame is dropped (RFC 1122 section 3.3.6).
    (tuple.source, tuple.destination) = (header.source, header.destination);
    let may_be_health_check = is_segment_from_link(tuple, header.protocol, header.fragment);
    if !is_to_our_mac || (tuple.is_martian(to.hairpin) && !may_be_health_check) {
        return Err(DropReason::Martian);
    }
    to.head.ttl = header.ttl;
    to.head.l4_offset = ETHERNET_HEADER as u16 + header.length;
    to.head.ip_length = header.total;
    to.needs_new_ip_id = !header.dont_fragment;
    let payload = &packet[usize::from(header.length)..usize::from(header.total)];
    parse_transport(payload, header.protocol, header.fragment, icmp::parse_v4, tuple, to)
}

/// Returns false for neighbor discovery, which `arp_nd` handles; true for any other packet.
#[inline]
fn parse_v6(
    packet: &[u8],
    is_to_our_mac: bool,
    tuple: &mut Tuple<V6>,
    to: &mut ParsedFields<'_>,
) -> Result<bool, DropReason> {
    let header = ipv6::Header::parse(packet).map_err(|error| match error {
        ipv6::ParseError::Malformed => DropReason::Malformed,
        ipv6::ParseError::SourceRoute => DropReason::Martian,
    })?;
    let payload = &packet[usize::from(header.length)..usize::from(header.total)];
    if header.protocol == protocol::ICMPV6
        && !header.fragment
        && payload.first().is_some_and(|kind| (133..=137).contains(kind))
    {
        let is_neighbor_discovery = matches!(payload[0], ndp::SOLICITATION | ndp::ADVERTISEMENT);
        return if is_neighbor_discovery { Ok(false) } else { Err(DropReason::NotOurs) };
    }
    (tuple.source, tuple.destination) = (header.source, header.destination);
    let may_be_health_check = is_segment_from_link(tuple, header.protocol, header.fragment);
    if !is_to_our_mac || (tuple.is_martian(to.hairpin) && !may_be_health_check) {
        return Err(DropReason::Martian);
    }
    to.head.ttl = header.hop_limit;
    to.head.l4_offset = ETHERNET_HEADER as u16 + header.length;
    to.head.ip_length = header.total;
    parse_transport(payload, header.protocol, header.fragment, icmp::parse_v6, tuple, to).map(|()| true)
}

/// Whether a packet is a TCP segment of a host on the link. `classify` decides on it: only a health check, to which the
/// gateway itself replies, isn't dropped as a martian.
fn is_segment_from_link<A: Address>(tuple: &Tuple<A>, protocol_number: u8, is_fragment: bool) -> bool {
    protocol_number == protocol::TCP && !is_fragment && tuple.is_from_link()
}

#[inline]
fn parse_transport<A: IcmpErrorFamily>(
    payload: &[u8],
    protocol_number: u8,
    fragment: bool,
    icmp: impl Fn(&[u8]) -> Option<icmp::Message>,
    tuple: &mut Tuple<A>,
    to: &mut ParsedFields<'_>,
) -> Result<(), DropReason> {
    let (kind, source_port, destination_port) = match protocol_number {
        _ if fragment => {
            to.fragment = true;
            (PacketKind::Fragment, 0, 0)
        }
        protocol::TCP => {
            Segment::parse(payload, to.segment).ok_or(DropReason::Malformed)?;
            (PacketKind::Tcp, to.segment.source, to.segment.destination)
        }
        protocol::UDP => {
            let (source, destination) = udp::parse(payload).ok_or(DropReason::Malformed)?;
            (PacketKind::Udp, source, destination)
        }
        protocol::ICMP | protocol::ICMPV6 => match icmp(payload).ok_or(DropReason::Malformed)? {
            icmp::Message::EchoRequest(id) => (PacketKind::EchoRequest, id, 0),
            icmp::Message::EchoReply(id) => (PacketKind::EchoReply, 0, id),
            icmp::Message::Other if A::is_error(payload[0]) => (PacketKind::IcmpError, 0, 0),
            icmp::Message::Other => (PacketKind::Other, 0, 0),
        },
        protocol::SCTP => {
            *to.association = sctp::parse(payload).ok_or(DropReason::Malformed)?;
            (PacketKind::Sctp, to.association.source, to.association.destination)
        }
        _ => (PacketKind::Other, 0, 0),
    };
    to.head.kind = kind;
    tuple.protocol = protocol_number;
    tuple.source_port = source_port;
    tuple.destination_port = destination_port;
    Ok(())
}
