//! Ethernet II frames, without VLAN tags.

/// Length of the header.
pub const HEADER: usize = 14;
/// `EtherType` of IPv4.
pub const IPV4: u16 = 0x0800;
/// `EtherType` of ARP.
pub const ARP: u16 = 0x0806;
/// `EtherType` of IPv6.
pub const IPV6: u16 = 0x86dd;
/// The broadcast address.
pub const BROADCAST: Mac = [0xff; 6];

/// A link address.
pub type Mac = [u8; 6];

/// Destination, source and `EtherType` of a frame; `None` if it is too short to have them.
#[inline]
pub fn parse(frame: &[u8]) -> Option<(Mac, Mac, u16)> {
    let header: &[u8; HEADER] = frame.first_chunk()?;
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1] = *header;
    Some(([d0, d1, d2, d3, d4, d5], [s0, s1, s2, s3, s4, s5], u16::from_be_bytes([t0, t1])))
}

/// Writes destination and source; the type stays.
#[inline]
pub fn set_addresses(frame: &mut [u8], destination: Mac, source: Mac) {
    if let Some(header) = frame.first_chunk_mut::<12>() {
        header[..6].copy_from_slice(&destination);
        header[6..].copy_from_slice(&source);
    }
}

/// Whether an address names a group (multicast or broadcast).
#[inline]
pub fn is_group(mac: Mac) -> bool {
    mac[0] & 1 == 1
}

/// The link address of an IPv6 multicast group (RFC 2464 section 7).
pub fn ipv6_multicast(group: u128) -> Mac {
    let [.., a, b, c, d] = group.to_be_bytes();
    [0x33, 0x33, a, b, c, d]
}
