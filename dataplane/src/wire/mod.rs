//! Wire formats, one file per protocol. A parser takes a slice and returns validated values or an error; no caller
//! checks lengths again. Network byte order exists only here. No policy.

pub mod arp;
pub mod checksum;
pub mod ethernet;
pub mod fast_parse;
pub mod fragmentation;
pub mod health_responder;
pub mod icmp;
pub mod icmp_error;
pub mod ip_id;
pub mod ipv4;
pub mod ipv6;
pub mod mss;
pub mod ndp;
pub mod partial_checksum;
pub mod sctp;
pub mod static_nat;
pub mod tcp;
pub mod tcp_reply;
pub mod tcp_reset;
pub mod tunnel_auth;
pub mod tunnel_echo;
pub mod udp;
pub mod vxlan;

/// IP protocol numbers that the engine handles.
pub mod protocol {
    /// ICMP for IPv4.
    pub const ICMP: u8 = 1;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    /// ICMP for IPv6.
    pub const ICMPV6: u8 = 58;
    pub const SCTP: u8 = 132;
}

/// The big-endian 16-bit number at `offset`; 0 if out of range, which no caller requests.
#[inline]
pub(crate) fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    bytes.get(offset..offset + 2).and_then(|field| field.first_chunk()).map_or(0, |field| u16::from_be_bytes(*field))
}

/// Writes a big-endian 16-bit number at `offset`; does nothing if out of range.
#[inline]
pub(crate) fn set_u16(bytes: &mut [u8], offset: usize, value: u16) {
    if let Some(field) = bytes.get_mut(offset..offset + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}
