//! Translation of an ICMP error with its quote (RFC 5508 REQ-4 and REQ-5): addresses, ports and checksums only.

use super::{HEADER, IcmpErrorFamily, Quote, Transport};
use crate::flow::tuple::Tuple;
use crate::wire::checksum::{self, Delta};
use crate::wire::{icmp, set_u16, tcp, u16_at, udp};

/// Translates the ICMP error that [`super::parse`] found at offset `l4` of `packet`.
///
/// The quote gets the addresses and ports (or the identifier) of `new_quoted`; the IP header gets the outer addresses.
/// The checksums of both IPv4 headers and of the quoted transport header are updated incrementally (RFC 1624), so a
/// wrong one stays wrong; that of the message is recomputed. The caller decrements the TTL, before or after.
///
/// A quoted SCTP checksum is not updated: a host finds the association by ports and verification tag (RFC 9260 section
/// 10) and can't verify the checksum of a truncated packet.
pub fn translate<A: IcmpErrorFamily>(
    packet: &mut [u8],
    l4: usize,
    quote: &Quote<A>,
    new_quoted: &Tuple<A>,
    outer_source: A,
    outer_destination: A,
) {
    A::set_addresses(packet, outer_source, outer_destination);
    let Some(quoted) = packet.get_mut(l4..).and_then(|message| message.get_mut(HEADER..)) else { return };
    A::set_addresses(quoted, new_quoted.source, new_quoted.destination);
    if let Some(transport) = quoted.get_mut(usize::from(quote.transport_offset)..usize::from(quote.packet_end)) {
        quote.translate_transport(transport, new_quoted);
    }
    let Some(message) = packet.get_mut(l4..) else { return };
    set_u16(message, icmp::CHECKSUM, 0);
    let length = message.len();
    let pseudo = A::pseudo_header_sum(packet, length);
    let Some(message) = packet.get_mut(l4..) else { return };
    let sum = checksum::checksum(pseudo, message);
    set_u16(message, icmp::CHECKSUM, sum);
}

impl<A: IcmpErrorFamily> Quote<A> {
    fn translate_transport(&self, transport: &mut [u8], new: &Tuple<A>) {
        let checksum_at = match self.transport {
            Transport::Tcp => tcp::CHECKSUM,
            Transport::Udp => udp::CHECKSUM,
            Transport::EchoRequest | Transport::EchoReply => icmp::CHECKSUM,
            Transport::Sctp => usize::MAX,
        };
        match self.transport {
            Transport::Tcp | Transport::Udp | Transport::Sctp => {
                set_u16(transport, 0, new.source_port);
                set_u16(transport, 2, new.destination_port);
            }
            Transport::EchoRequest => set_u16(transport, icmp::IDENTIFIER, new.source_port),
            Transport::EchoReply => set_u16(transport, icmp::IDENTIFIER, new.destination_port),
        }
        // Many quotes end before the TCP checksum. Zero padding may follow (RFC 4884 section 4 pads quotes to 128
        // bytes): then the data offset is zero, too, and the padding stays unchanged.
        let reaches_checksum = checksum_at <= transport.len().saturating_sub(2);
        let is_zero_padding =
            self.transport == Transport::Tcp && transport.get(12).is_none_or(|offset| offset >> 4 < 5);
        if !reaches_checksum || is_zero_padding {
            return;
        }
        let old = u16_at(transport, checksum_at);
        let updated = Delta::of(self.transport.sum(&self.tuple), self.transport.sum(new)).apply(old);
        let updated = match self.transport {
            // Zero means no checksum (RFC 768); a computed zero is written as 0xffff.
            Transport::Udp if old == 0 => 0,
            Transport::Udp if updated == 0 => 0xffff,
            _ => updated,
        };
        set_u16(transport, checksum_at, updated);
    }
}

impl Transport {
    /// The sum of the tuple's fields that the checksum covers, not folded. ICMPv4 covers no addresses.
    fn sum<A: IcmpErrorFamily>(self, tuple: &Tuple<A>) -> u32 {
        let addresses = match self {
            Self::EchoRequest | Self::EchoReply if A::BITS == 32 => 0,
            _ => tuple.source.word_sum() + tuple.destination.word_sum(),
        };
        let ports = match self {
            Self::EchoRequest => tuple.source_port.into(),
            Self::EchoReply => tuple.destination_port.into(),
            _ => u32::from(tuple.source_port) + u32::from(tuple.destination_port),
        };
        addresses + ports
    }
}
