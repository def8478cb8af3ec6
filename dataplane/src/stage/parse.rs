//! First stage: bytes become headers, or a drop. Reads a packet's first cache line and nothing else.

use crate::address::V6;
use crate::batch::{Batch, Head, IpVersion, Kind};
use crate::counters::DropReason;
use crate::session::tuple::Tuple;
use crate::snapshot::network::Network;
use crate::verdict::Verdict;
use crate::wire::{ethernet, icmp, ipv4, ipv6, ndp, protocol, tcp, udp};

/// Reads the headers of every packet.
pub fn run(batch: &mut Batch, network: &Network) {
    for i in 0..batch.len() {
        if let Err(reason) = read(batch, i, network) {
            batch.decide(i, Verdict::Drop(reason));
        }
    }
}

#[inline]
fn read(batch: &mut Batch, i: usize, network: &Network) -> Result<(), DropReason> {
    let interface = batch.frames[i].interface;
    let frame = batch.frames[i].frame.bytes();
    let (destination, _, kind) = ethernet::parse(frame).ok_or(DropReason::Malformed)?;
    let to_us = destination == network.interface(interface).mac;
    if !to_us && !ethernet::is_group(destination) {
        return Err(DropReason::NotOurs);
    }
    let packet = &frame[ethernet::HEADER..];
    let (head, length) = match kind {
        ethernet::IPV4 => {
            let header = ipv4::Header::parse(packet).map_err(|wrong| match wrong {
                ipv4::Wrong::Malformed => DropReason::Malformed,
                ipv4::Wrong::Checksum => DropReason::BadChecksum,
                ipv4::Wrong::SourceRoute => DropReason::Martian,
            })?;
            // A unicast packet in a group frame is a trick (RFC 1122 section 3.3.6).
            if !to_us
                || ipv4::is_martian_source(header.source)
                || ipv4::is_martian_destination(header.destination)
                || header.source == header.destination
            {
                return Err(DropReason::Martian);
            }
            let payload = &packet[usize::from(header.length)..usize::from(header.total)];
            let l4 = if header.fragment {
                Payload::without_ports(Kind::Fragment)
            } else {
                read_payload(payload, header.protocol, icmp::parse_v4)?
            };
            batch.v4[i] = Tuple {
                source: header.source,
                destination: header.destination,
                source_port: l4.source_port,
                destination_port: l4.destination_port,
                protocol: header.protocol,
            };
            if let Some(segment) = l4.segment {
                batch.segments[i] = segment;
            }
            (
                Head { kind: l4.kind, version: IpVersion::V4, ttl: header.ttl, l4: header.length, ..batch.heads[i] },
                header.total,
            )
        }
        ethernet::IPV6 => {
            let header = ipv6::Header::parse(packet).map_err(|wrong| match wrong {
                ipv6::Wrong::Malformed => DropReason::Malformed,
                ipv6::Wrong::SourceRoute => DropReason::Martian,
            })?;
            let payload = &packet[usize::from(header.length)..usize::from(header.total)];
            if header.protocol == protocol::ICMPV6 && payload.first().is_some_and(|kind| (133..=137).contains(kind)) {
                let is_question = payload[0] == ndp::SOLICITATION;
                let head = Head { kind: Kind::Neighbour, version: IpVersion::V6, ..batch.heads[i] };
                batch.heads[i] = head;
                return if is_question { Ok(()) } else { Err(DropReason::NotOurs) };
            }
            if !to_us
                || ipv6::is_martian_source(header.source)
                || ipv6::is_martian_destination(header.destination)
                || header.source == header.destination
            {
                return Err(DropReason::Martian);
            }
            let l4 = if header.fragment {
                Payload::without_ports(Kind::Fragment)
            } else {
                read_payload(payload, header.protocol, icmp::parse_v6)?
            };
            batch.v6[i] = Tuple::<V6> {
                source: header.source,
                destination: header.destination,
                source_port: l4.source_port,
                destination_port: l4.destination_port,
                protocol: header.protocol,
            };
            if let Some(segment) = l4.segment {
                batch.segments[i] = segment;
            }
            (
                Head {
                    kind: l4.kind,
                    version: IpVersion::V6,
                    ttl: header.hop_limit,
                    l4: header.length,
                    ..batch.heads[i]
                },
                header.total,
            )
        }
        ethernet::ARP => {
            batch.heads[i].kind = Kind::Arp;
            return Ok(());
        }
        _ => return Err(DropReason::NotOurs),
    };
    let link = ethernet::HEADER as u16;
    batch.heads[i] = Head { l4: link + head.l4, length, ..head };
    // Padding of short frames is the link's; it doesn't travel on.
    batch.frames[i].frame.set_len(link + length);
    Ok(())
}

struct Payload {
    kind: Kind,
    source_port: u16,
    destination_port: u16,
    segment: Option<tcp::Segment>,
}

impl Payload {
    fn without_ports(kind: Kind) -> Self {
        Self { kind, source_port: 0, destination_port: 0, segment: None }
    }
}

#[inline]
fn read_payload(
    payload: &[u8],
    number: u8,
    icmp: impl Fn(&[u8]) -> Option<icmp::Message>,
) -> Result<Payload, DropReason> {
    Ok(match number {
        protocol::TCP => {
            let segment = tcp::Segment::parse(payload).ok_or(DropReason::Malformed)?;
            let (source_port, destination_port) = (segment.source, segment.destination);
            Payload { kind: Kind::Tcp, source_port, destination_port, segment: Some(segment) }
        }
        protocol::UDP => {
            let (source_port, destination_port) = udp::parse(payload).ok_or(DropReason::Malformed)?;
            Payload { kind: Kind::Udp, source_port, destination_port, segment: None }
        }
        protocol::ICMP | protocol::ICMPV6 => match icmp(payload).ok_or(DropReason::Malformed)? {
            icmp::Message::EchoRequest(id) => {
                Payload { kind: Kind::EchoRequest, source_port: id, destination_port: 0, segment: None }
            }
            icmp::Message::EchoReply(id) => {
                Payload { kind: Kind::EchoReply, source_port: 0, destination_port: id, segment: None }
            }
            icmp::Message::Other => Payload::without_ports(Kind::Other),
        },
        _ => Payload::without_ports(Kind::Other),
    })
}
