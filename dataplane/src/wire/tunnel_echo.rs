//! Echo in VXLAN tunnels: agents of nodes see by it which gateways' packet paths work. A reply is the request with
//! another magic, back to the port of an ordinary UDP socket.
//!
//! ```text
//!   outer headers (vxlan) | inner Ethernet, 0x88b5 | "vgecho" 0, 1 or 2 | nonce | padding
//!   50 or 70                14                       8                    16
//! ```
//! The `EtherType` is one for local experiments (IEEE 802). Nonce and padding are returned as they are, so a reply is
//! never longer than its request.

use super::ethernet::{self, Mac};
use super::vxlan::{self, InnerFrame, OuterHeaders};
use super::{checksum, ipv6, protocol, set_u16, u16_at, udp};

/// `EtherType` of inner frames: IEEE 802 Local Experimental `EtherType` 1.
pub const ETHERTYPE: u16 = 0x88b5;
/// First bytes of a request.
pub const REQUEST: [u8; 8] = *b"vgecho\x00\x01";
/// First bytes of a reply.
pub const REPLY: [u8; 8] = *b"vgecho\x00\x02";
/// Length of the nonce.
pub const NONCE: usize = 16;

/// Length of the shortest inner frame, without padding.
const MIN_FRAME: usize = ethernet::HEADER + REQUEST.len() + NONCE;
/// Length of the UDP and VXLAN headers before the inner frame.
const UDP_AND_VXLAN: usize = udp::HEADER + 8;

/// A tunnel packet with an echo request.
#[derive(Debug)]
pub struct EchoRequest<'a> {
    packet: &'a mut [u8],
    inner: InnerFrame,
}

impl<'a> EchoRequest<'a> {
    /// Parses a frame that is known to be a UDP packet; `None` if it isn't VXLAN with a complete echo request. Bytes
    /// after the packet are ignored.
    pub fn new_checked(frame: &'a mut [u8]) -> Option<Self> {
        let inner = vxlan::parse(frame)?;
        let packet = frame.get_mut(..inner.offset + inner.length)?;
        let content = packet.get(inner.offset..).filter(|content| content.len() >= MIN_FRAME)?;
        let is_request =
            u16_at(content, ethernet::ETHERTYPE) == ETHERTYPE && content[ethernet::HEADER..].starts_with(&REQUEST);
        is_request.then_some(Self { packet, inner })
    }

    /// Length of the packet without what follows it, bytes.
    pub fn length(&self) -> usize {
        self.packet.len()
    }

    /// Turns the request into its reply, from `own_mac` in the tunnel with these outer headers, whose MAC addresses and
    /// UDP ports are not used: the first ones are missing afterwards, the others are the request's. `None`, with
    /// nothing done, if the request has come over the other IP version.
    pub fn into_reply(self, outer: &OuterHeaders, own_mac: Mac) -> Option<()> {
        let Self { packet, inner } = self;
        if outer.length() != inner.offset {
            return None;
        }
        let udp = inner.offset - UDP_AND_VXLAN;
        let (source, destination) = (u16_at(packet, udp), u16_at(packet, udp + 2));
        let sender = ethernet::source(packet.get(inner.offset..)?)?;
        outer.write(packet, inner.length as u16, inner.vni, 0, 0);
        set_u16(packet, udp, destination);
        set_u16(packet, udp + 2, source);
        let content = packet.get_mut(inner.offset..)?;
        ethernet::set_macs(content, &ethernet::mac_pair(sender, own_mac));
        content.get_mut(ethernet::HEADER..)?.first_chunk_mut().map(|magic| *magic = REPLY)?;
        if udp == ethernet::HEADER + ipv6::HEADER {
            write_udp_checksum(packet, udp);
        }
        Some(())
    }
}

/// Writes the UDP checksum over IPv6: ordinary sockets accept no zero (RFC 8200 section 8.1). `udp` is the offset of
/// the UDP header, whose checksum is zero so far.
fn write_udp_checksum(packet: &mut [u8], udp: usize) {
    let (headers, datagram) = packet.split_at(udp);
    let addresses = headers.get(ethernet::HEADER + ipv6::ADDRESSES..).unwrap_or_default();
    let pseudo_header = checksum::sum(addresses) + datagram.len() as u32 + u32::from(protocol::UDP);
    let sum = checksum::checksum(pseudo_header, datagram);
    // Zero would mean none (RFC 768).
    set_u16(packet, udp + udp::CHECKSUM, if sum == 0 { u16::MAX } else { sum });
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use etherparse::{SlicedPacket, TransportSlice};

    use super::*;

    const GATEWAY_MAC: Mac = [0x0a, 0x76, 192, 0, 2, 11];
    const NODE_MAC: Mac = [0x0a, 0x58, 10, 244, 1, 0];
    const VNI: u32 = 0x00_1234;

    /// Node and gateway: as the kernel of the node sends it, from port 50000 of a socket.
    const ENDS: [(&str, &str); 2] =
        [("192.0.2.101:50000", "192.0.2.11:8472"), ("[2001:db8::65]:50000", "[2001:db8::b]:8472")];

    /// A request of 60 bytes over IPv4.
    const REQUEST_V4: [u8; 110] = {
        let mut packet = [0; 110];
        let head = *b"\x02\x00\x00\x00\x00\x01\x02\x00\x00\x00\x00\x02\x08\x00\
            \x45\x00\x00\x60\xab\xcd\x40\x00\x3f\x11\x0b\x4f\xc0\x00\x02\x65\xc0\x00\x02\x0b\
            \xc3\x50\x21\x18\x00\x4c\x12\x34\x08\x00\x00\x00\x00\x12\x34\x00\
            \x0a\x76\xc0\x00\x02\x0b\x0a\x58\x0a\xf4\x01\x00\x88\xb5vgecho\x00\x01\
            0123456789abcdef";
        packet.split_at_mut(head.len()).0.copy_from_slice(&head);
        packet
    };
    /// Its reply, without outer MAC addresses.
    const REPLY_V4: [u8; 110] = {
        let mut packet = [0; 110];
        let head = *b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x08\x00\
            \x45\x00\x00\x60\x00\x00\x40\x00\x40\x11\xb6\x1c\xc0\x00\x02\x0b\xc0\x00\x02\x65\
            \x21\x18\xc3\x50\x00\x4c\x00\x00\x08\x00\x00\x00\x00\x12\x34\x00\
            \x0a\x58\x0a\xf4\x01\x00\x0a\x76\xc0\x00\x02\x0b\x88\xb5vgecho\x00\x02\
            0123456789abcdef";
        packet.split_at_mut(head.len()).0.copy_from_slice(&head);
        packet
    };

    fn addresses((node, gateway): (&str, &str)) -> (IpAddr, SocketAddr) {
        (node.parse::<SocketAddr>().unwrap().ip(), gateway.parse().unwrap())
    }

    /// A request with this nonce and padding.
    fn request(ends: (&str, &str), nonce: &[u8], padding: &[u8]) -> Vec<u8> {
        let ((node, gateway), length) = (addresses(ends), MIN_FRAME - NONCE + nonce.len() + padding.len());
        let outer = OuterHeaders::new(node, gateway).unwrap();
        let mut packet = vec![0; outer.length()];
        outer.write(&mut packet, length as u16, VNI, 0, 0);
        set_u16(&mut packet, outer.length() - UDP_AND_VXLAN, 50_000);
        packet.extend(ethernet::mac_pair(GATEWAY_MAC, NODE_MAC));
        packet.extend(ETHERTYPE.to_be_bytes());
        packet.extend([&REQUEST[..], nonce, padding].concat());
        packet
    }

    /// The headers of the gateway's tunnel to the node.
    fn outer(ends: (&str, &str)) -> OuterHeaders {
        let (node, gateway) = addresses(ends);
        OuterHeaders::new(gateway.ip(), (node, 8473).into()).unwrap()
    }

    #[test]
    fn the_reply_to_a_request_has_these_bytes() {
        // Ethernet padding stays as it is.
        let mut frame = [&REQUEST_V4[..], &[9; 4]].concat();
        let parsed = EchoRequest::new_checked(&mut frame).unwrap();
        assert_eq!(parsed.length(), 110);
        parsed.into_reply(&outer(ENDS[0]), GATEWAY_MAC).unwrap();
        assert_eq!(frame, [&REPLY_V4[..], &[9; 4]].concat());
        assert!(EchoRequest::new_checked(&mut frame).is_none(), "no reply to a reply");
    }

    #[test]
    fn a_reply_over_each_ip_version_is_valid_for_an_independent_parser() {
        for ends in ENDS {
            for padding in [&[][..], &[7; 22], &[0xff; 23]] {
                let mut packet = request(ends, &[0xee; NONCE], padding);
                let length = packet.len();
                EchoRequest::new_checked(&mut packet).unwrap().into_reply(&outer(ends), GATEWAY_MAC).unwrap();
                assert_eq!(packet.len(), length);
                let sliced = SlicedPacket::from_ethernet(&packet).unwrap();
                let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
                assert_eq!((udp.source_port(), udp.destination_port()), (8472, 50_000));
                match sliced.net {
                    Some(etherparse::NetSlice::Ipv4(ip)) => {
                        let header = ip.header().to_header();
                        assert_eq!((udp.checksum(), header.time_to_live), (0, 64));
                        assert_eq!(header.header_checksum, header.calc_header_checksum());
                    }
                    Some(etherparse::NetSlice::Ipv6(ip)) => {
                        let header = ip.header().to_header();
                        let right = udp.to_header().calc_checksum_ipv6(&header, udp.payload()).unwrap();
                        assert_eq!((udp.checksum(), header.hop_limit), (right, 64));
                    }
                    _ => panic!("no IP"),
                }
                let inner = vxlan::parse(&packet).unwrap();
                assert_eq!((inner.vni, inner.length), (VNI, MIN_FRAME + padding.len()));
                let content = &packet[inner.offset + ethernet::HEADER..];
                assert_eq!(content, [&REPLY[..], &[0xee; NONCE], padding].concat());
            }
        }
    }

    /// Some nonce makes the checksum zero, which is sent as all ones.
    #[test]
    fn the_checksum_over_ipv6_is_never_zero() {
        let reply = |word: u16| {
            let mut packet = request(ENDS[1], &[&word.to_be_bytes()[..], &[0; 14]].concat(), &[]);
            EchoRequest::new_checked(&mut packet).unwrap().into_reply(&outer(ENDS[1]), GATEWAY_MAC).unwrap();
            u16_at(&packet, ethernet::HEADER + ipv6::HEADER + udp::CHECKSUM)
        };
        // The checksum of a nonce of zeros is what the other words lack.
        assert_eq!(reply(reply(0)), u16::MAX);
    }

    #[test]
    fn what_is_truncated_or_no_request_is_rejected() {
        for ends in ENDS {
            let whole = request(ends, &[0xee; NONCE], &[]);
            assert!((0..whole.len()).all(|length| EchoRequest::new_checked(&mut whole[..length].to_vec()).is_none()));
            let short = request(ends, &[0xee; NONCE - 1], &[]);
            assert!(EchoRequest::new_checked(&mut short.clone()).is_none(), "without its last byte");
            let at = vxlan::parse(&whole).unwrap().offset + ethernet::ETHERTYPE;
            for byte in at..at + 2 + REQUEST.len() {
                let mut other = whole.clone();
                other[byte] ^= 1;
                assert!(EchoRequest::new_checked(&mut other).is_none(), "byte {byte}");
            }
        }
        let mut packet = request(ENDS[0], &[0xee; NONCE], &[]);
        let other_version = EchoRequest::new_checked(&mut packet).unwrap().into_reply(&outer(ENDS[1]), GATEWAY_MAC);
        assert_eq!(other_version, None);
        assert_eq!(packet, request(ENDS[0], &[0xee; NONCE], &[]), "nothing done");
    }
}
