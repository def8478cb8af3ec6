//! Ethernet II frames, without VLAN tags.

/// Length of the header.
pub const HEADER: usize = 14;
/// Where the `EtherType` is.
pub const TYPE: usize = 12;
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

/// Destination and `EtherType` of a frame.
#[inline]
pub fn parse(header: &[u8; HEADER]) -> (Mac, u16) {
    let [d0, d1, d2, d3, d4, d5, .., t0, t1] = *header;
    ([d0, d1, d2, d3, d4, d5], u16::from_be_bytes([t0, t1]))
}

/// The sender of a frame; `None` if it is too short to have one.
pub fn source(frame: &[u8]) -> Option<Mac> {
    frame.get(6..).and_then(|rest| rest.first_chunk()).copied()
}

/// Destination and source as they stand in a frame.
pub type Link = [u8; 12];

/// The addresses of a frame from `source` to `destination`.
pub fn link(destination: Mac, source: Mac) -> Link {
    let mut link = [0; 12];
    link[..6].copy_from_slice(&destination);
    link[6..].copy_from_slice(&source);
    link
}

/// Writes destination and source; the type stays.
#[inline]
pub fn set_link(frame: &mut [u8], link: &Link) {
    if let Some(header) = frame.first_chunk_mut() {
        *header = *link;
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
