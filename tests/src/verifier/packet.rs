//! A packet, parsed as far as the verifiers need it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IP protocol numbers.
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;
const FRAGMENT: u8 = 44;
/// IPv6 extension headers with a length in units of eight bytes: hop-by-hop options, routing, destination options,
/// mobility, HIP, Shim6 (RFC 8200 section 4, RFC 6564).
const EXTENSIONS: [u8; 6] = [0, 43, 60, 135, 139, 140];
const AUTHENTICATION: u8 = 51;
/// EtherTypes of VLAN tags: 802.1Q, 802.1ad, and the one before it.
const TAGS: [[u8; 2]; 3] = [[0x81, 0x00], [0x88, 0xa8], [0x91, 0x00]];
/// Mask of the fragment offset in IPv4's header, below the MF flag.
const OFFSET_MASK: u16 = 0x1fff;

/// An IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Source and destination.
    pub addresses: [IpAddr; 2],
    /// The protocol after the IP header and IPv6's extension headers.
    pub protocol: u8,
    /// Whether it is a fragment.
    pub is_fragment: bool,
    /// Whether it is a fragment after the first one: what follows its headers is no header.
    pub is_later_fragment: bool,
    /// Source and destination port of TCP and UDP; none in later fragments.
    pub ports: Option<[u16; 2]>,
    /// Payload of TCP or UDP, else everything after the IP header and IPv6's extension headers.
    pub payload: &'a [u8],
    /// The packet from the IP header on.
    pub bytes: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses the packet in an Ethernet frame, behind any VLAN tags.
    pub fn in_frame(frame: &'a [u8]) -> Option<Self> {
        let mut at = 12;
        loop {
            let kind: [u8; 2] = frame.get(at..at + 2)?.try_into().ok()?;
            match kind {
                [0x08, 0x00] | [0x86, 0xdd] => return Self::new(&frame[at + 2..]),
                kind if TAGS.contains(&kind) => at += 4,
                _ => return None,
            }
        }
    }

    /// Parses a packet from its IP header on. What the capture truncated is missing.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let (addresses, protocol, at, fragment) = if bytes.first()? >> 4 == 4 {
            let address =
                |at: usize| Some(IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?)));
            let field: [u8; 2] = bytes.get(6..8)?.try_into().ok()?;
            let fragment = u16::from_be_bytes(field) & 0x3fff;
            ([address(12)?, address(16)?], bytes[9], usize::from(bytes[0] & 15) * 4, fragment)
        } else {
            let address =
                |at: usize| Some(IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(at..at + 16)?).ok()?)));
            let addresses = [address(8)?, address(24)?];
            let (protocol, at, fragment) = after_extensions(bytes);
            (addresses, protocol, at, fragment)
        };
        let rest = bytes.get(at..).unwrap_or_default();
        let (is_fragment, is_later_fragment) = (fragment != 0, fragment & OFFSET_MASK != 0);
        let mut packet =
            Self { addresses, protocol, is_fragment, is_later_fragment, ports: None, payload: rest, bytes };
        let header = match protocol {
            TCP => rest.get(12).map(|offset| usize::from(offset >> 4) * 4),
            UDP => Some(8),
            _ => None,
        };
        if let (Some(header), false, Some(ports)) = (header, is_later_fragment, rest.get(..4)) {
            packet.ports = Some([0, 2].map(|at| u16::from_be_bytes([ports[at], ports[at + 1]])));
            packet.payload = rest.get(header..).unwrap_or_default();
        }
        Some(packet)
    }

    /// The packet that an ICMP error quotes.
    pub fn quoted(&self) -> Option<Self> {
        let kind = *self.payload.first()?;
        let is_error = match self.protocol {
            ICMP => matches!(kind, 3 | 4 | 5 | 11 | 12),
            ICMP_V6 => kind < 128,
            _ => false,
        };
        let quote = self.payload.get(8..).filter(|_| is_error && !self.is_later_fragment);
        quote.and_then(Self::new)
    }

    /// The packet that an ICMP error quotes, what that one quotes if it is an error, too, and so on.
    pub fn quotes(&self) -> impl Iterator<Item = Self> + use<'a> {
        std::iter::successors(self.quoted(), Self::quoted)
    }
}

/// What follows the extension headers of an IPv6 packet: its protocol, its offset, and the fragment field in the layout
/// of IPv4's header. `bytes` has a whole IPv6 header.
fn after_extensions(bytes: &[u8]) -> (u8, usize, u16) {
    let (mut protocol, mut at, mut fragment) = (bytes[6], 40, 0);
    while let Some(header) = bytes.get(at..at + 8) {
        let length = match protocol {
            FRAGMENT => {
                fragment |= ipv4_fragment_field(u16::from_be_bytes([header[2], header[3]]));
                8
            }
            AUTHENTICATION => (usize::from(header[1]) + 2) * 4,
            _ if EXTENSIONS.contains(&protocol) => (usize::from(header[1]) + 1) * 8,
            _ => break,
        };
        (protocol, at) = (header[0], at + length);
        if fragment & OFFSET_MASK != 0 {
            break;
        }
    }
    (protocol, at, fragment)
}

/// Converts offset and M flag of IPv6's fragment header to the layout of IPv4's header.
fn ipv4_fragment_field(field: u16) -> u16 {
    field >> 3 | (field & 1) << 13
}

/// The client's identity at the start of a payload: eight digits and a space.
pub fn client_identity(payload: &[u8]) -> Option<u32> {
    let (digits, rest) = payload.split_at_checked(8)?;
    let is_identity = digits.iter().all(u8::is_ascii_digit) && rest.first() == Some(&b' ');
    is_identity.then(|| digits.iter().fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0')))
}
