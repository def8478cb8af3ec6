//! Neighbor discovery for IPv6 (RFC 4861): neighbor solicitations and advertisements.

use super::ethernet::{self, Mac, MacPair};
use super::{checksum, ipv6, protocol};
use crate::flow::address::V6;

/// ICMPv6 type of a neighbor solicitation.
pub const SOLICITATION: u8 = 135;
/// ICMPv6 type of a neighbor advertisement.
pub const ADVERTISEMENT: u8 = 136;

/// The link-local all-nodes multicast address.
pub const ALL_NODES: u128 = 0xff02_0000_0000_0000_0000_0000_0000_0001;

/// The solicited-node multicast addresses (RFC 4291 section 2.7.1): this prefix, and the last 24 bits of the target.
const SOLICITED_NODE: u128 = 0xff02_0000_0000_0000_0000_0001_ff00_0000;

const OPTION_SOURCE_LINK_LAYER_ADDRESS: u8 = 1;
const OPTION_TARGET_LINK_LAYER_ADDRESS: u8 = 2;
/// Length of a message without options, bytes.
const FIXED: usize = 24;
/// Length of a message with one link-layer address option, bytes.
const MESSAGE: usize = FIXED + 8;
/// Length of an Ethernet frame with a solicitation or an advertisement, bytes.
pub const FRAME: usize = ethernet::HEADER + ipv6::HEADER + MESSAGE;

/// The fixed part and the options of a message of this type; `None` if RFC 4861 section 7.1 has receivers ignore it.
fn checked<'a>(header: &ipv6::Header, packet: &'a [u8], kind: u8) -> Option<(&'a [u8; FIXED], &'a [u8])> {
    let message = packet.get(usize::from(header.length)..usize::from(header.total))?;
    let (fixed, options) = message.split_first_chunk::<FIXED>()?;
    let length = u32::from(header.total - header.length);
    let pseudo = checksum::pseudo_header_sum(header.source, header.destination, length, protocol::ICMPV6);
    let is_kind = header.protocol == protocol::ICMPV6 && fixed[0] == kind && fixed[1] == 0;
    (is_kind && header.hop_limit == 255 && checksum::verifies(pseudo, message)).then_some((fixed, options))
}

/// The target of a solicitation; `None` if the message is not valid by RFC 4861 section 7.1.1.
///
/// `packet` starts at the IPv6 header that `header` was read from.
pub fn parse_solicitation(header: &ipv6::Header, packet: &[u8]) -> Option<V6> {
    let (fixed, mut options) = checked(header, packet, SOLICITATION)?;
    // Duplicate address detection: no source link-layer address option, and sent to the solicited-node multicast
    // address.
    let unspecified = header.source == V6::default();
    while let [kind, length, ..] = options {
        if *length == 0 || (unspecified && *kind == OPTION_SOURCE_LINK_LAYER_ADDRESS) {
            return None;
        }
        options = options.get(usize::from(*length) * 8..)?;
    }
    let target = V6 { high: u64_at(fixed, 8), low: u64_at(fixed, 16) };
    let solicited_node = header.destination.high == 0xff02 << 48 && header.destination.low >> 24 == 0x01ff;
    (target.high >> 56 != 0xff && (!unspecified || solicited_node)).then_some(target)
}

/// The target of an advertisement and its target link-layer address; `None` if the message is not valid by RFC 4861
/// section 7.1.2.
///
/// `packet` starts at the IPv6 header that `header` was read from.
pub fn parse_advertisement(header: &ipv6::Header, packet: &[u8]) -> Option<(V6, Option<Mac>)> {
    let (fixed, mut options) = checked(header, packet, ADVERTISEMENT)?;
    // A multicast advertisement must not be solicited.
    let (to_group, solicited) = (header.destination.high >> 56 == 0xff, fixed[4] & 0x40 != 0);
    let mut mac = None;
    while let [kind, length, rest @ ..] = options {
        if *length == 0 {
            return None;
        }
        if *kind == OPTION_TARGET_LINK_LAYER_ADDRESS && *length == 1 {
            mac = rest.first_chunk().copied();
        }
        options = options.get(usize::from(*length) * 8..)?;
    }
    let target = V6 { high: u64_at(fixed, 8), low: u64_at(fixed, 16) };
    (target.high >> 56 != 0xff && !(to_group && solicited)).then_some((target, mac))
}

fn u64_at(bytes: &[u8; FIXED], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(field)
}

/// Builds the Ethernet frame of a message with at most one link-layer address option, given as its type and value; without
/// one, padding takes its place.
fn frame(
    macs: &MacPair,
    [source, destination]: [V6; 2],
    kind: u8,
    flags: u8,
    target: V6,
    option: Option<(u8, Mac)>,
) -> [u8; FRAME] {
    let length = if option.is_some() { MESSAGE } else { FIXED };
    let mut frame = [0; FRAME];
    ethernet::set_macs(&mut frame, macs);
    frame[12..14].copy_from_slice(&ethernet::IPV6.to_be_bytes());
    let (header, message) = frame[ethernet::HEADER..].split_at_mut(ipv6::HEADER);
    header[0] = 0x60;
    header[5] = length as u8;
    header[6] = protocol::ICMPV6;
    header[ipv6::HOP_LIMIT] = 255;
    header[8..24].copy_from_slice(&source.to_bits().to_be_bytes());
    header[24..40].copy_from_slice(&destination.to_bits().to_be_bytes());
    message[0] = kind;
    message[4] = flags;
    message[8..24].copy_from_slice(&target.to_bits().to_be_bytes());
    if let Some((kind, mac)) = option {
        message[24] = kind;
        message[25] = 1;
        message[26..32].copy_from_slice(&mac);
    }
    let pseudo = checksum::pseudo_header_sum(source, destination, length as u32, protocol::ICMPV6);
    let sum = checksum::checksum(pseudo, &message[..length]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// A neighbor solicitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation {
    /// Source address; unspecified in duplicate address detection (RFC 4862 section 5.4.2).
    pub source: V6,
    /// The MAC address of the sender.
    pub mac: Mac,
    /// The address to resolve.
    pub target: V6,
    /// Its MAC address, to probe it by unicast; `None`: sent to its solicited-node multicast address.
    pub target_mac: Option<Mac>,
}

impl Solicitation {
    /// Builds the Ethernet frame.
    pub fn frame(&self) -> [u8; FRAME] {
        let group = SOLICITED_NODE | self.target.to_bits() & 0xff_ffff;
        let (destination, destination_mac) = match self.target_mac {
            Some(mac) => (self.target, mac),
            None => (V6::from_bits(group), ethernet::ipv6_multicast(group)),
        };
        // A MAC address belongs to a source address (RFC 4861 section 4.3).
        let option = (self.source != V6::default()).then_some((OPTION_SOURCE_LINK_LAYER_ADDRESS, self.mac));
        let macs = ethernet::mac_pair(destination_mac, self.mac);
        frame(&macs, [self.source, destination], SOLICITATION, 0, self.target, option)
    }
}

/// A neighbor advertisement with the override flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advertisement {
    /// The announced address; also the source address of the packet.
    pub target: V6,
    /// The MAC address of the target.
    pub mac: Mac,
    /// Destination address.
    pub destination: V6,
    /// Destination MAC address.
    pub destination_mac: Mac,
    /// Whether it replies to a solicitation.
    pub solicited: bool,
}

impl Advertisement {
    /// An announcement of an address to all nodes (RFC 4861 section 7.2.6).
    pub fn unsolicited(target: V6, mac: Mac) -> Self {
        let destination_mac = ethernet::ipv6_multicast(ALL_NODES);
        Self { target, mac, destination: V6::from_bits(ALL_NODES), destination_mac, solicited: false }
    }

    /// Builds the Ethernet frame.
    pub fn frame(&self) -> [u8; FRAME] {
        let flags = 0x20 | if self.solicited { 0x40 } else { 0 };
        let macs = ethernet::mac_pair(self.destination_mac, self.mac);
        let option = Some((OPTION_TARGET_LINK_LAYER_ADDRESS, self.mac));
        frame(&macs, [self.target, self.destination], ADVERTISEMENT, flags, self.target, option)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v6(text: &str) -> V6 {
        V6::from_bits(text.parse::<std::net::Ipv6Addr>().unwrap().to_bits())
    }

    /// Parses a solicitation for 2001:db8::a from `source`, built as a kernel sends it and modified by `change`.
    fn solicitation(source: &str, hop_limit: u8, change: impl FnOnce(&mut Vec<u8>)) -> Option<V6> {
        let (source, destination) = (v6(source), v6("ff02::1:ff00:a"));
        let mut message = vec![135, 0, 0, 0, 0, 0, 0, 0];
        message.extend(v6("2001:db8::a").to_bits().to_be_bytes());
        if source != V6::default() {
            message.extend([1, 1, 2, 0, 0, 0, 0, 1]);
        }
        change(&mut message);
        let length = u32::try_from(message.len()).unwrap();
        let sum = checksum::checksum(checksum::pseudo_header_sum(source, destination, length, 58), &message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut packet = vec![0x60, 0, 0, 0, 0, u8::try_from(length).unwrap(), 58, hop_limit];
        packet.extend(source.to_bits().to_be_bytes());
        packet.extend(destination.to_bits().to_be_bytes());
        packet.extend(message);
        parse_solicitation(&ipv6::Header::parse(&packet).unwrap(), &packet)
    }

    #[test]
    fn only_valid_solicitations_are_accepted() {
        let target = Some(v6("2001:db8::a"));
        assert_eq!(solicitation("2001:db8::1", 255, |_| ()), target);
        assert_eq!(solicitation("::", 255, |_| ()), target, "duplicate address detection");
        assert_eq!(solicitation("2001:db8::1", 64, |_| ()), None, "forwarded by a router");
        assert_eq!(solicitation("2001:db8::1", 255, |m| m[1] = 1), None);
        assert_eq!(solicitation("2001:db8::1", 255, |m| m[25] = 0), None, "option of length 0");
        assert_eq!(solicitation("::", 255, |m| m.extend([1, 1, 2, 0, 0, 0, 0, 1])), None);
    }

    #[test]
    fn a_solicitation_is_written_as_receivers_accept_it() {
        for source in ["2001:db8::1", "::"] {
            let target = v6("2001:db8::12:fe");
            let solicitation = Solicitation { source: v6(source), mac: [2, 0, 0, 0, 0, 1], target, target_mac: None };
            let frame = solicitation.frame();
            assert_eq!(frame[..6], [0x33, 0x33, 0xff, 0x12, 0, 0xfe]);
            let header = ipv6::Header::parse(&frame[14..]).unwrap();
            assert_eq!((header.source, header.destination), (v6(source), v6("ff02::1:ff12:fe")));
            assert_eq!(parse_solicitation(&header, &frame[14..]), Some(target), "{source}");
            let mut other = header;
            other.protocol = protocol::UDP;
            assert_eq!(parse_solicitation(&other, &frame[14..]), None);
            let frame = Solicitation { target_mac: Some([2, 0, 0, 0, 0, 9]), ..solicitation }.frame();
            assert_eq!(frame[..6], [2, 0, 0, 0, 0, 9]);
            assert_eq!(ipv6::Header::parse(&frame[14..]).unwrap().destination, target);
        }
    }

    #[test]
    fn an_advertisement_is_written_with_a_valid_checksum() {
        let advertisement = Advertisement {
            target: v6("2001:db8::a"),
            mac: [2, 0, 0, 0, 0, 9],
            destination: v6("2001:db8::1"),
            destination_mac: [2, 0, 0, 0, 0, 1],
            solicited: true,
        };
        let frame = advertisement.frame();
        let packet = &frame[14..];
        let header = ipv6::Header::parse(packet).unwrap();
        assert_eq!((header.source, header.hop_limit), (advertisement.target, 255));
        let pseudo = checksum::pseudo_header_sum(header.source, header.destination, 32, 58);
        assert!(checksum::verifies(pseudo, &packet[40..]));
        assert_eq!(frame[14 + 40 + 4], 0x60, "solicited, override");
        assert_eq!(parse_advertisement(&header, packet), Some((advertisement.target, Some(advertisement.mac))));
    }

    #[test]
    fn only_valid_advertisements_are_accepted() {
        let advertisement = Advertisement::unsolicited(v6("2001:db8::a"), [2, 0, 0, 0, 0, 9]);
        let parse = |frame: &[u8]| parse_advertisement(&ipv6::Header::parse(&frame[14..]).unwrap(), &frame[14..]);
        assert_eq!(parse(&advertisement.frame()), Some((advertisement.target, Some(advertisement.mac))));
        assert_eq!(parse(&Advertisement { solicited: true, ..advertisement }.frame()), None, "solicited and multicast");
        for (at, what) in
            [(14 + 7, "forwarded by a router"), (14 + 41, "nonzero code"), (14 + 40 + 25, "option of length 0")]
        {
            let mut frame = advertisement.frame();
            frame[at] ^= 1;
            assert_eq!(parse(&frame), None, "{what}");
        }
    }
}
