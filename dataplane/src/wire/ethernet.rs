//! Ethernet II frames, without VLAN tags.

/// Length of the header.
pub const HEADER: usize = 14;
/// Offset of the `EtherType`.
pub const ETHERTYPE: usize = 12;
/// `EtherType` of IPv4.
pub const IPV4: u16 = 0x0800;
/// `EtherType` of ARP.
pub const ARP: u16 = 0x0806;
/// `EtherType` of IPv6.
pub const IPV6: u16 = 0x86dd;
/// The broadcast address.
pub const BROADCAST: Mac = [0xff; 6];

/// A MAC address.
pub type Mac = [u8; 6];

/// Destination and `EtherType` of a frame.
#[inline]
pub fn parse(header: &[u8; HEADER]) -> (Mac, u16) {
    let [d0, d1, d2, d3, d4, d5, .., t0, t1] = *header;
    ([d0, d1, d2, d3, d4, d5], u16::from_be_bytes([t0, t1]))
}

/// The source MAC address of a frame; `None` if the frame is too short.
pub fn source(frame: &[u8]) -> Option<Mac> {
    frame.get(6..).and_then(|rest| rest.first_chunk()).copied()
}

/// Destination and source MAC address, as they are stored in a frame.
pub type MacPair = [u8; 12];

/// The MAC addresses of a frame from `source` to `destination`.
pub fn mac_pair(destination: Mac, source: Mac) -> MacPair {
    let mut macs = [0; 12];
    macs[..6].copy_from_slice(&destination);
    macs[6..].copy_from_slice(&source);
    macs
}

/// Writes the destination and source MAC address; the `EtherType` stays.
#[inline]
pub fn set_macs(frame: &mut [u8], macs: &MacPair) {
    if let Some(header) = frame.first_chunk_mut() {
        *header = *macs;
    }
}

/// Whether a MAC address is a group address: multicast or broadcast.
#[inline]
pub fn is_group(mac: Mac) -> bool {
    mac[0] & 1 == 1
}

/// The MAC address of an IPv6 multicast group (RFC 2464 section 7).
pub fn ipv6_multicast(group: u128) -> Mac {
    let [.., a, b, c, d] = group.to_be_bytes();
    [0x33, 0x33, a, b, c, d]
}
