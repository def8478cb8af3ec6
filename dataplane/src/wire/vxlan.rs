//! VXLAN (RFC 7348): Ethernet frames in UDP, from the outer Ethernet header to the inner frame.
//!
//! ```text
//!   outer Ethernet | IPv4 or IPv6 | UDP | flags 0x08, 24 bits | VNI 24 bits, 8 bits | inner Ethernet ...
//!   14               20 or 40       8     8                                           14
//! ```
//! The UDP checksum is zero (RFC 7348 section 5, RFC 6936), and DF is set: tunnel endpoints don't reassemble.

use std::net::{IpAddr, SocketAddr};

use super::ethernet::MacPair;
use super::{checksum, ethernet, ipv4, ipv6, protocol, set_u16, u16_at, udp};

/// Length of the VXLAN header.
const HEADER: usize = 8;
/// Flags byte with the I flag: the VNI is valid.
const FLAG_VNI: u8 = 0x08;
/// TTL or hop limit of the outer packet.
const TTL: u8 = 64;
/// Maximum length of the headers before an inner frame, over IPv6.
pub const MAX_HEADERS: usize = ethernet::HEADER + ipv6::HEADER + udp::HEADER + HEADER;

/// Length of the headers before an inner frame over IPv4.
const LENGTH_V4: usize = MAX_HEADERS - ipv6::HEADER + ipv4::HEADER;

/// The headers before an inner frame in a tunnel from one address to another. Lengths and source port are written per
/// packet.
#[derive(Clone, Copy, Debug)]
pub struct OuterHeaders {
    bytes: [u8; MAX_HEADERS],
    length: usize,
    /// Partial checksum of the constant words of the IPv4 header.
    sum: u32,
}

impl OuterHeaders {
    /// The headers from one address to another; `None` if they are of different families.
    pub fn new(from: IpAddr, to: SocketAddr) -> Option<Self> {
        let mut bytes = [0; MAX_HEADERS];
        let (ip, length) = match (from, to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                set_u16(&mut bytes, ethernet::ETHERTYPE, ethernet::IPV4);
                let header = &mut bytes[ethernet::HEADER..];
                header[0] = 0x45;
                set_u16(header, ipv4::FRAGMENT, ipv4::DONT_FRAGMENT);
                header[ipv4::TTL] = TTL;
                header[ipv4::PROTOCOL] = protocol::UDP;
                header[ipv4::ADDRESSES..ipv4::ADDRESSES + 4].copy_from_slice(&from.octets());
                header[ipv4::ADDRESSES + 4..ipv4::HEADER].copy_from_slice(&to.octets());
                (ipv4::HEADER, LENGTH_V4)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                set_u16(&mut bytes, ethernet::ETHERTYPE, ethernet::IPV6);
                let header = &mut bytes[ethernet::HEADER..];
                header[0] = 0x60;
                header[ipv6::NEXT_HEADER] = protocol::UDP;
                header[ipv6::HOP_LIMIT] = TTL;
                header[ipv6::ADDRESSES..ipv6::ADDRESSES + 16].copy_from_slice(&from.octets());
                header[ipv6::ADDRESSES + 16..ipv6::HEADER].copy_from_slice(&to.octets());
                (ipv6::HEADER, MAX_HEADERS)
            }
            _ => return None,
        };
        let udp = ethernet::HEADER + ip;
        set_u16(&mut bytes, udp + 2, to.port());
        bytes[udp + udp::HEADER] = FLAG_VNI;
        let sum = checksum::sum(&bytes[ethernet::HEADER..ethernet::HEADER + ipv4::HEADER]);
        Some(Self { bytes, length, sum })
    }

    /// The same headers with MAC addresses.
    #[must_use]
    pub fn with_macs(mut self, macs: &MacPair) -> Self {
        ethernet::set_macs(&mut self.bytes, macs);
        self
    }

    /// Length of the headers before the inner frame, bytes.
    #[inline]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes by which the tunnel's MTU for inner IP packets is smaller than the link's: all headers, with the inner
    /// Ethernet header and without the outer one.
    #[inline]
    pub fn overhead(&self) -> u16 {
        self.length as u16
    }

    /// Writes the headers before an inner frame of `inner` bytes. `entropy` becomes the source port, which spreads
    /// flows over queues and ECMP paths (RFC 7348 section 5); `traffic_class` is that of the inner packet (RFC 6040
    /// section 4.1).
    #[inline]
    pub fn write(&self, into: &mut [u8], inner: u16, vni: u32, entropy: u16, traffic_class: u8) {
        let payload = inner + (udp::HEADER + HEADER) as u16;
        // A dynamic port (RFC 6335 section 6).
        let source = 0xc000 | entropy;
        if self.length == MAX_HEADERS {
            let Some(into) = into.first_chunk_mut::<MAX_HEADERS>() else { return };
            *into = self.bytes;
            let header = &mut into[ethernet::HEADER..];
            header[0] = 0x60 | traffic_class >> 4;
            header[1] = traffic_class << 4;
            set_u16(header, ipv6::PAYLOAD_LENGTH, payload);
            write_variable_fields::<{ MAX_HEADERS - HEADER - udp::HEADER }>(into, source, payload, vni);
        } else {
            let (Some(into), Some(bytes)) = (into.first_chunk_mut::<LENGTH_V4>(), self.bytes.first_chunk()) else {
                return;
            };
            *into = *bytes;
            let total = payload + ipv4::HEADER as u16;
            let header = &mut into[ethernet::HEADER..];
            header[1] = traffic_class;
            set_u16(header, ipv4::TOTAL_LENGTH, total);
            let sum = self.sum + u32::from(traffic_class) + u32::from(total);
            set_u16(header, ipv4::CHECKSUM, !checksum::fold(sum));
            write_variable_fields::<{ LENGTH_V4 - HEADER - udp::HEADER }>(into, source, payload, vni);
        }
    }
}

/// Writes the variable fields of UDP, which begins at byte `UDP`, and of VXLAN.
#[inline]
fn write_variable_fields<const UDP: usize>(into: &mut [u8], source: u16, payload: u16, vni: u32) {
    set_u16(into, UDP, source);
    set_u16(into, UDP + udp::LENGTH, payload);
    let at = UDP + udp::HEADER + 4;
    into[at..at + 4].copy_from_slice(&(vni << 8).to_be_bytes());
}

/// The inner frame of a tunnel packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InnerFrame {
    /// Offset of the inner frame from the start of the outer one.
    pub offset: usize,
    /// Length of the inner frame, bytes.
    pub length: usize,
    /// VXLAN network identifier.
    pub vni: u32,
}

/// Length of the headers of a tunnel packet over IPv4, its inner Ethernet header included.
pub const PLAIN_HEADERS: usize = LENGTH_V4 + ethernet::HEADER;

/// The fields of a tunnel packet over IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainHeaders {
    pub inner: InnerFrame,
    /// Outer source address.
    pub sender: u32,
    /// Outer traffic class.
    pub traffic_class: u8,
}

/// Parses a frame of `length` bytes that is known to be a UDP packet over IPv4 and begins with `first`. `None` for the
/// same frames as with [`parse`].
#[inline]
pub fn parse_plain(first: &[u8; PLAIN_HEADERS], length: usize) -> Option<PlainHeaders> {
    const UDP: usize = ethernet::HEADER + ipv4::HEADER;
    const VXLAN: usize = UDP + udp::HEADER;
    let header: &[u8; ipv4::HEADER] = first[ethernet::HEADER..].first_chunk()?;
    let is_fragment = u16_at(header, ipv4::FRAGMENT) & (ipv4::MORE_FRAGMENTS | ipv4::FRAGMENT_OFFSET) != 0;
    if header[0] != 0x45 || is_fragment || header[ipv4::PROTOCOL] != protocol::UDP || first[VXLAN] & FLAG_VNI == 0 {
        return None;
    }
    let total = u16_at(header, ipv4::TOTAL_LENGTH);
    let payload = usize::from(total).checked_sub(ipv4::HEADER)?;
    let inner = payload.checked_sub(udp::HEADER + HEADER)?;
    let is_complete = inner >= ethernet::HEADER && length >= ethernet::HEADER + usize::from(total);
    if !is_complete || usize::from(u16_at(first, UDP + udp::LENGTH)) != payload || !checksum::verifies_header(header) {
        return None;
    }
    let vni = u32::from_be_bytes([0, first[VXLAN + 4], first[VXLAN + 5], first[VXLAN + 6]]);
    Some(PlainHeaders {
        inner: InnerFrame { offset: LENGTH_V4, length: inner, vni },
        sender: u32::from_be_bytes(*header[ipv4::ADDRESSES..].first_chunk()?),
        traffic_class: header[1],
    })
}

/// Parses a frame that is known to be a UDP packet; `None` if it isn't complete VXLAN without IP options.
#[inline]
pub fn parse(frame: &[u8]) -> Option<InnerFrame> {
    let (ip, payload) = if u16_at(frame, ethernet::ETHERTYPE) == ethernet::IPV4 {
        let header = frame.get(ethernet::HEADER..)?.first_chunk::<{ ipv4::HEADER }>()?;
        let is_plain = header[0] == 0x45
            && u16_at(header, ipv4::FRAGMENT) & (ipv4::MORE_FRAGMENTS | ipv4::FRAGMENT_OFFSET) == 0
            && header[ipv4::PROTOCOL] == protocol::UDP
            && checksum::verifies_header(header);
        (ipv4::HEADER, u16_at(header, ipv4::TOTAL_LENGTH).checked_sub(ipv4::HEADER as u16).filter(|_| is_plain)?)
    } else {
        let header = frame.get(ethernet::HEADER..)?.first_chunk::<{ ipv6::HEADER }>()?;
        let is_plain = header[0] >> 4 == 6 && header[ipv6::NEXT_HEADER] == protocol::UDP;
        (ipv6::HEADER, is_plain.then_some(u16_at(header, ipv6::PAYLOAD_LENGTH))?)
    };
    let udp = ethernet::HEADER + ip;
    let datagram = frame.get(udp..udp + usize::from(payload))?;
    let header: &[u8; udp::HEADER + HEADER] = datagram.first_chunk()?;
    let vxlan = &header[udp::HEADER..];
    let length = usize::from(payload).checked_sub(udp::HEADER + HEADER)?;
    if u16_at(header, udp::LENGTH) != payload || vxlan[0] & FLAG_VNI == 0 || length < ethernet::HEADER {
        return None;
    }
    let vni = u32::from_be_bytes([0, vxlan[4], vxlan[5], vxlan[6]]);
    Some(InnerFrame { offset: udp + udp::HEADER + HEADER, length, vni })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tunnel(from: &str, to: &str) -> Vec<u8> {
        let outer = OuterHeaders::new(from.parse().unwrap(), to.parse().unwrap()).unwrap();
        let inner = [7; 100];
        let mut frame = vec![0; outer.length()];
        outer.write(&mut frame, 100, 0x00ab_cdef, 0x1234, 0xb9);
        frame.extend(inner);
        frame
    }

    #[test]
    fn tunnel_headers_are_parsed_as_written_also_by_an_independent_parser() {
        for (from, to, at) in [("10.0.0.1", "10.0.0.2:4790", 50), ("2001:db8::1", "[2001:db8::2]:4790", 70)] {
            let frame = tunnel(from, to);
            assert_eq!(parse(&frame), Some(InnerFrame { offset: at, length: 100, vni: 0x00ab_cdef }));
            let sliced = etherparse::SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(etherparse::TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
            assert_eq!((udp.source_port(), udp.destination_port(), udp.checksum()), (0xd234, 4790, 0));
            assert_eq!(usize::from(udp.length()), frame.len() - at + 16);
            match sliced.net {
                Some(etherparse::NetSlice::Ipv4(ip)) => {
                    assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
                    assert!(ip.header().dont_fragment());
                    assert_eq!(ip.header().dcp().value() << 2 | ip.header().ecn().value(), 0xb9);
                }
                Some(etherparse::NetSlice::Ipv6(ip)) => assert_eq!(ip.header().traffic_class(), 0xb9),
                _ => panic!("no IP"),
            }
        }
        assert!(OuterHeaders::new("10.0.0.1".parse().unwrap(), "[::1]:1".parse().unwrap()).is_none());
    }

    #[test]
    fn truncated_or_corrupt_tunnel_packets_are_rejected() {
        for (from, to) in [("10.0.0.1", "10.0.0.2:4790"), ("2001:db8::1", "[2001:db8::2]:4790")] {
            let frame = tunnel(from, to);
            assert!((0..frame.len()).all(|length| parse(&frame[..length]).is_none()));
            let at = parse(&frame).unwrap().offset;
            for (offset, value) in [(at - 8, 0), (at - 11, 0x90), (at - 12, 0xff), (14, 0x46)] {
                let mut corrupt = frame.clone();
                corrupt[offset] = value;
                assert_eq!(parse(&corrupt), None, "byte {offset}");
            }
        }
    }

    #[test]
    fn both_parsers_accept_the_same_packets_over_ipv4() {
        let plain = |frame: &[u8], length| parse_plain(frame.first_chunk().unwrap(), length);
        let frame = tunnel("10.0.0.1", "10.0.0.2:4790");
        let parsed = plain(&frame, frame.len()).unwrap();
        assert_eq!((Some(parsed.inner), parsed.sender, parsed.traffic_class), (parse(&frame), 0x0a00_0001, 0xb9));
        assert!((0..frame.len()).all(|length| plain(&frame, length).is_none()));
        // Any bit, with a checksum that fits it or not.
        for bit in 8 * 14..8 * PLAIN_HEADERS {
            for fits in [false, true] {
                let mut other = frame.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                if fits {
                    other[24..26].fill(0);
                    let sum = checksum::checksum(0, &other[14..34]);
                    other[24..26].copy_from_slice(&sum.to_be_bytes());
                }
                assert_eq!(plain(&other, other.len()).map(|it| it.inner), parse(&other), "bit {bit}, {fits}");
            }
        }
    }
}
