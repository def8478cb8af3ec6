//! VXLAN (RFC 7348): Ethernet frames in UDP, from the outer IP header to the inner frame.
//!
//! ```text
//!   outer Ethernet | IPv4 or IPv6 | UDP | flags 0x08, 24 bits | VNI 24 bits, 8 bits | inner Ethernet ...
//!   14               20 or 40       8     8                                           14
//! ```
//! Senders leave out the UDP checksum (RFC 7348 section 5, RFC 6936), and forbid cutting: nobody could put the pieces together.

use std::net::{IpAddr, SocketAddr};

use super::{checksum, ethernet, ipv4, ipv6, protocol, set_u16, u16_at, udp};

/// Length of the VXLAN header.
const HEADER: usize = 8;
/// What stands in its first byte when the VNI is valid.
const VALID: u8 = 0x08;
/// Hops that the outer packet may take.
const TTL: u8 = 64;
/// The longest that comes before an inner frame.
pub const LONGEST: usize = ethernet::HEADER + ipv6::HEADER + udp::HEADER + HEADER;

/// The same over IPv4.
const SHORTEST: usize = LONGEST - ipv6::HEADER + ipv4::HEADER;

/// What comes before the inner frame in a tunnel from one address to another; lengths, link and source port are written for each
/// packet.
#[derive(Clone, Copy, Debug)]
pub struct Outer {
    bytes: [u8; LONGEST],
    length: usize,
    /// Of the words of the IPv4 header that are the same in every packet.
    sum: u32,
}

impl Outer {
    /// The headers from one address to another of the same family; `None` if they are of different ones.
    pub fn new(from: IpAddr, to: SocketAddr) -> Option<Self> {
        let mut bytes = [0; LONGEST];
        let (ip, length) = match (from, to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                set_u16(&mut bytes, ethernet::TYPE, ethernet::IPV4);
                let header = &mut bytes[ethernet::HEADER..];
                header[0] = 0x45;
                set_u16(header, ipv4::FRAGMENT, ipv4::DONT_FRAGMENT);
                header[ipv4::TTL] = TTL;
                header[ipv4::PROTOCOL] = protocol::UDP;
                header[ipv4::ADDRESSES..ipv4::ADDRESSES + 4].copy_from_slice(&from.octets());
                header[ipv4::ADDRESSES + 4..ipv4::HEADER].copy_from_slice(&to.octets());
                (ipv4::HEADER, SHORTEST)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                set_u16(&mut bytes, ethernet::TYPE, ethernet::IPV6);
                let header = &mut bytes[ethernet::HEADER..];
                header[0] = 0x60;
                header[ipv6::NEXT_HEADER] = protocol::UDP;
                header[ipv6::HOP_LIMIT] = TTL;
                header[ipv6::ADDRESSES..ipv6::ADDRESSES + 16].copy_from_slice(&from.octets());
                header[ipv6::ADDRESSES + 16..ipv6::HEADER].copy_from_slice(&to.octets());
                (ipv6::HEADER, LONGEST)
            }
            _ => return None,
        };
        let udp = ethernet::HEADER + ip;
        set_u16(&mut bytes, udp + 2, to.port());
        bytes[udp + udp::HEADER] = VALID;
        let sum = checksum::sum(&bytes[ethernet::HEADER..ethernet::HEADER + ipv4::HEADER]);
        Some(Self { bytes, length, sum })
    }

    /// Bytes before the inner frame.
    #[inline]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes that an inner IP packet grows by, its own Ethernet header included and the outer one not: what it lacks of the link's MTU.
    #[inline]
    pub fn overhead(&self) -> u16 {
        self.length as u16
    }

    /// Writes the headers before an inner frame of `inner` bytes. `entropy` becomes the source port, so that different flows take
    /// different queues and ways (RFC 7348 section 5); `traffic_class` is that of the inner packet (RFC 6040 section 4.1).
    #[inline]
    pub fn write(&self, into: &mut [u8], inner: u16, vni: u32, entropy: u16, traffic_class: u8) {
        let payload = inner + (udp::HEADER + HEADER) as u16;
        // Ports from which nothing is served (RFC 6335 section 6).
        let source = 0xc000 | entropy;
        if self.length == LONGEST {
            let Some(into) = into.first_chunk_mut::<LONGEST>() else { return };
            *into = self.bytes;
            let header = &mut into[ethernet::HEADER..];
            header[0] = 0x60 | traffic_class >> 4;
            header[1] = traffic_class << 4;
            set_u16(header, ipv6::PAYLOAD_LENGTH, payload);
            end::<{ LONGEST - HEADER - udp::HEADER }>(into, source, payload, vni);
        } else {
            let (Some(into), Some(bytes)) = (into.first_chunk_mut::<SHORTEST>(), self.bytes.first_chunk()) else {
                return;
            };
            *into = *bytes;
            let total = payload + ipv4::HEADER as u16;
            let header = &mut into[ethernet::HEADER..];
            header[1] = traffic_class;
            set_u16(header, ipv4::TOTAL, total);
            let sum = self.sum + u32::from(traffic_class) + u32::from(total);
            set_u16(header, ipv4::CHECKSUM, !checksum::fold(sum));
            end::<{ SHORTEST - HEADER - udp::HEADER }>(into, source, payload, vni);
        }
    }
}

/// Writes what differs from packet to packet of UDP, which begins at byte `UDP`, and VXLAN.
#[inline]
fn end<const UDP: usize>(into: &mut [u8], source: u16, payload: u16, vni: u32) {
    set_u16(into, UDP, source);
    set_u16(into, UDP + udp::LENGTH, payload);
    let at = UDP + udp::HEADER + 4;
    into[at..at + 4].copy_from_slice(&(vni << 8).to_be_bytes());
}

/// What is in a tunnel packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inner {
    /// Where the inner frame begins, from the start of the outer one.
    pub at: usize,
    /// Its bytes.
    pub length: usize,
    /// The network that it is of.
    pub vni: u32,
}

/// Reads a frame that is known to be an IP packet of UDP; `None` if it isn't VXLAN, whole, and without IP options.
#[inline]
pub fn parse(frame: &[u8]) -> Option<Inner> {
    let (ip, payload) = if u16_at(frame, ethernet::TYPE) == ethernet::IPV4 {
        let header = ipv4::Header::parse(frame.get(ethernet::HEADER..)?).ok()?;
        let plain = header.length == ipv4::HEADER as u16 && !header.fragment && header.protocol == protocol::UDP;
        (ipv4::HEADER, plain.then_some(header.total - header.length)?)
    } else {
        let header = frame.get(ethernet::HEADER..)?.first_chunk::<{ ipv6::HEADER }>()?;
        let plain = header[0] >> 4 == 6 && header[ipv6::NEXT_HEADER] == protocol::UDP;
        (ipv6::HEADER, plain.then_some(u16_at(header, ipv6::PAYLOAD_LENGTH))?)
    };
    let udp = ethernet::HEADER + ip;
    let datagram = frame.get(udp..udp + usize::from(payload))?;
    let header: &[u8; udp::HEADER + HEADER] = datagram.first_chunk()?;
    let vxlan = &header[udp::HEADER..];
    let length = usize::from(payload).checked_sub(udp::HEADER + HEADER)?;
    if u16_at(header, udp::LENGTH) != payload || vxlan[0] & VALID == 0 || length < ethernet::HEADER {
        return None;
    }
    let vni = u32::from_be_bytes([0, vxlan[4], vxlan[5], vxlan[6]]);
    Some(Inner { at: udp + udp::HEADER + HEADER, length, vni })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tunnel(from: &str, to: &str) -> Vec<u8> {
        let outer = Outer::new(from.parse().unwrap(), to.parse().unwrap()).unwrap();
        let inner = [7; 100];
        let mut frame = vec![0; outer.length()];
        outer.write(&mut frame, 100, 0x00ab_cdef, 0x1234, 0xb9);
        frame.extend(inner);
        frame
    }

    #[test]
    fn what_is_written_is_read_and_others_read_it_too() {
        for (from, to, at) in [("10.0.0.1", "10.0.0.2:4790", 50), ("2001:db8::1", "[2001:db8::2]:4790", 70)] {
            let frame = tunnel(from, to);
            assert_eq!(parse(&frame), Some(Inner { at, length: 100, vni: 0x00ab_cdef }));
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
        assert!(Outer::new("10.0.0.1".parse().unwrap(), "[::1]:1".parse().unwrap()).is_none());
    }

    #[test]
    fn what_is_cut_or_bent_is_refused() {
        for (from, to) in [("10.0.0.1", "10.0.0.2:4790"), ("2001:db8::1", "[2001:db8::2]:4790")] {
            let frame = tunnel(from, to);
            assert!((0..frame.len()).all(|length| parse(&frame[..length]).is_none()));
            let at = parse(&frame).unwrap().at;
            for (place, value) in [(at - 8, 0), (at - 11, 0x90), (at - 12, 0xff), (14, 0x46)] {
                let mut bent = frame.clone();
                bent[place] = value;
                assert_eq!(parse(&bent), None, "byte {place}");
            }
        }
    }
}
