//! Static 1:1 NAT of frames (RFC 3022 section 2.1, without ports): replaces a VIP's private address by its public one, and back.
//!
//! Addresses in ICMP errors' quotes, ARP and neighbor discovery are replaced, too. Checksums are updated by what has changed
//! (RFC 1624), so one that was wrong stays wrong. A frame that can't be parsed is left as it is.

use super::checksum::{Delta, sum};
use super::icmp_error::{self, IcmpErrorFamily};
use super::{arp, ethernet, icmp, ipv4, ipv6, ndp, protocol, set_u16, tcp, u16_at, udp};
use crate::flow::address::V6;

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It was received: its destination is replaced, and the source of what it quotes, which was sent. Its source, too: only a
    /// forged one is a private address, and the VIP is rejected as a source.
    Received,
    /// It is to be sent: its source is replaced, and the destination of what it quotes, which was received.
    Sent,
}

/// The addresses that are replaced.
pub trait AddressMap {
    /// What replaces an IPv4 address.
    fn v4(&self, address: u32) -> Option<u32>;
    /// What replaces an IPv6 address.
    fn v6(&self, address: V6) -> Option<V6>;
    /// What a request for an IPv4 address asks for instead, so that the address isn't answered for.
    fn hidden_v4(&self, address: u32) -> Option<u32>;
    /// The same for IPv6.
    fn hidden_v6(&self, address: V6) -> Option<V6>;
}

/// Translates a frame.
pub fn translate(frame: &mut [u8], side: Side, map: &impl AddressMap) {
    let Some((header, packet)) = frame.split_first_chunk_mut::<{ ethernet::HEADER }>() else { return };
    let (_, kind) = ethernet::parse(header);
    // A packet without a valid length is left to the parser.
    let _ = match kind {
        ethernet::IPV4 => translate_v4(packet, side, map),
        ethernet::IPV6 => translate_v6(packet, side, map),
        ethernet::ARP => translate_arp(packet, side, map),
        _ => None,
    };
}

/// Offsets of addresses in an IPv4 header.
const V4_SOURCE: usize = ipv4::ADDRESSES;
const V4_DESTINATION: usize = ipv4::ADDRESSES + 4;
/// Offsets of addresses in an IPv6 header.
const V6_SOURCE: usize = ipv6::ADDRESSES;
const V6_DESTINATION: usize = ipv6::ADDRESSES + 16;
/// Offsets of addresses in an ARP packet.
const ARP_SENDER: usize = 14;
const ARP_TARGET: usize = 24;
/// Offset of the target in a neighbor solicitation or advertisement.
const ND_TARGET: usize = 8;

/// Replaces the bytes at an offset.
fn replace<const N: usize>(bytes: &mut [u8], at: usize, new: [u8; N]) -> Option<Delta> {
    let field = bytes.get_mut(at..at + N)?;
    let delta = Delta::of(sum(field), sum(&new));
    field.copy_from_slice(&new);
    Some(delta)
}

/// Updates the checksum field at an offset; returns its own change.
fn update(bytes: &mut [u8], at: usize, delta: Delta) -> Option<Delta> {
    let old = bytes.get(at..at + 2).map(|_| u16_at(bytes, at))?;
    let new = delta.apply(old);
    set_u16(bytes, at, new);
    Some(Delta::of(old.into(), new.into()))
}

/// Updates the checksum of a transport header whose pseudo header has changed; returns the field's own change.
fn update_transport(bytes: &mut [u8], number: u8, delta: Delta) -> Option<Delta> {
    match number {
        protocol::TCP => update(bytes, tcp::CHECKSUM, delta),
        protocol::UDP => {
            let old = bytes.get(udp::CHECKSUM..udp::CHECKSUM + 2).map(|_| u16_at(bytes, udp::CHECKSUM))?;
            // None was computed (RFC 768).
            if old == 0 {
                return None;
            }
            let new = Some(delta.apply(old)).filter(|sum| *sum != 0).unwrap_or(u16::MAX);
            set_u16(bytes, udp::CHECKSUM, new);
            Some(Delta::of(old.into(), new.into()))
        }
        protocol::ICMPV6 => update(bytes, icmp::CHECKSUM, delta),
        // ICMP and SCTP have no pseudo header.
        _ => None,
    }
}

/// Replaces the IPv4 address at an offset of a header, with the header's checksum; returns the change of the address.
fn replace_v4(header: &mut [u8], at: usize, map: &impl AddressMap) -> Option<Delta> {
    let bytes = header.get(at..at + 4)?.first_chunk::<4>()?;
    let new = map.v4(u32::from_be_bytes(*bytes))?;
    let delta = replace(header, at, new.to_be_bytes())?;
    update(header, ipv4::CHECKSUM, delta);
    Some(delta)
}

fn replace_v6(header: &mut [u8], at: usize, map: &impl AddressMap) -> Option<Delta> {
    let bytes = header.get(at..at + 16)?.first_chunk::<16>()?;
    let new = map.v6(V6::from_bits(u128::from_be_bytes(*bytes)))?;
    replace(header, at, new.to_bits().to_be_bytes())
}

/// The changes of one or both addresses.
fn both(one: Option<Delta>, other: Option<Delta>) -> Option<Delta> {
    one.zip(other).map(|(one, other)| one.and(other)).or(one).or(other)
}

/// Length of an IPv4 header with options, and whether it is of a later fragment, which has no transport header.
fn header_v4(packet: &[u8]) -> Option<(usize, bool)> {
    let length = usize::from(packet.first()? & 0xf) * 4;
    let is_later = u16_at(packet, 6) & 0x1fff != 0;
    (packet[0] >> 4 == 4 && length >= 20 && packet.len() >= length).then_some((length, is_later))
}

fn translate_v4(packet: &mut [u8], side: Side, map: &impl AddressMap) -> Option<()> {
    let (length, is_later) = header_v4(packet)?;
    // Without Ethernet padding.
    let end = Some(usize::from(u16_at(packet, 2))).filter(|end| (length..=packet.len()).contains(end))?;
    let (outer_at, quoted_at) = match side {
        Side::Received => (V4_DESTINATION, V4_SOURCE),
        Side::Sent => (V4_SOURCE, V4_DESTINATION),
    };
    let number = packet[9];
    let outer = replace_v4(packet, outer_at, map);
    let forged = if side == Side::Received { replace_v4(packet, V4_SOURCE, map) } else { None };
    if is_later {
        return Some(());
    }
    let payload = packet.get_mut(length..end)?;
    if let Some(delta) = both(outer, forged) {
        update_transport(payload, number, delta);
    }
    let may_quote = outer.is_some() || side == Side::Sent;
    if number == protocol::ICMP && may_quote && u32::is_error(*payload.first()?) {
        let (icmp, quoted) = payload.split_at_mut_checked(icmp_error::HEADER)?;
        let change = translate_quoted_v4(quoted, quoted_at, map)?;
        update(icmp, icmp::CHECKSUM, change);
    }
    Some(())
}

/// Translates a quoted packet; returns its change.
fn translate_quoted_v4(quoted: &mut [u8], at: usize, map: &impl AddressMap) -> Option<Delta> {
    let (length, is_later) = header_v4(quoted)?;
    let number = quoted[9];
    let before = u16_at(quoted, ipv4::CHECKSUM);
    let address = replace_v4(quoted, at, map)?;
    let change = address.and(Delta::of(before.into(), u16_at(quoted, ipv4::CHECKSUM).into()));
    let transport = quoted.get_mut(length..).filter(|_| !is_later);
    let transport = transport.and_then(|transport| update_transport(transport, number, address));
    Some(transport.map_or(change, |transport| change.and(transport)))
}

fn translate_v6(packet: &mut [u8], side: Side, map: &impl AddressMap) -> Option<()> {
    let header = ipv6::Header::parse(packet).ok()?;
    let (outer_at, quoted_at) = match side {
        Side::Received => (V6_DESTINATION, V6_SOURCE),
        Side::Sent => (V6_SOURCE, V6_DESTINATION),
    };
    let outer = replace_v6(packet, outer_at, map);
    let forged = if side == Side::Received { replace_v6(packet, V6_SOURCE, map) } else { None };
    let is_later = header.fragment_header.is_some_and(|fragment| fragment.offset_units > 0);
    let payload = packet.get_mut(header.length.into()..header.total.into()).filter(|_| !is_later)?;
    if let Some(delta) = both(outer, forged) {
        update_transport(payload, header.protocol, delta);
    }
    if header.protocol != protocol::ICMPV6 {
        return Some(());
    }
    let kind = *payload.first()?;
    let change = if matches!(kind, ndp::SOLICITATION | ndp::ADVERTISEMENT) {
        replace_nd_target(payload, side, map)?
    } else if V6::is_error(kind) && (outer.is_some() || side == Side::Sent) {
        translate_quoted_v6(payload.get_mut(icmp_error::HEADER..)?, quoted_at, map)?
    } else {
        return Some(());
    };
    update(payload, icmp::CHECKSUM, change);
    Some(())
}

/// Replaces the target of a solicitation or advertisement; returns the change.
fn replace_nd_target(message: &mut [u8], side: Side, map: &impl AddressMap) -> Option<Delta> {
    let target = message.get(ND_TARGET..ND_TARGET + 16)?.first_chunk::<16>()?;
    let target = V6::from_bits(u128::from_be_bytes(*target));
    let hidden = || map.hidden_v6(target).filter(|_| side == Side::Received);
    let new = map.v6(target).or_else(hidden)?;
    replace(message, ND_TARGET, new.to_bits().to_be_bytes())
}

/// Translates a quoted packet; returns its change. A transport header behind extension headers keeps its checksum: whoever
/// receives the error finds its connection by ports.
fn translate_quoted_v6(quoted: &mut [u8], at: usize, map: &impl AddressMap) -> Option<Delta> {
    let number = *quoted.get(6)?;
    let address = replace_v6(quoted, at, map)?;
    let transport = quoted.get_mut(ipv6::HEADER..);
    let transport = transport.and_then(|transport| update_transport(transport, number, address));
    Some(transport.map_or(address, |transport| address.and(transport)))
}

fn translate_arp(packet: &mut [u8], side: Side, map: &impl AddressMap) -> Option<()> {
    arp::Arp::parse(packet)?;
    for at in [ARP_SENDER, ARP_TARGET] {
        let address = u32::from_be_bytes(*packet.get(at..at + 4)?.first_chunk::<4>()?);
        let hidden = || map.hidden_v4(address).filter(|_| side == Side::Received);
        if let Some(new) = map.v4(address).or_else(hidden) {
            replace(packet, at, new.to_be_bytes());
        }
    }
    Some(())
}

#[cfg(test)]
mod tests;
