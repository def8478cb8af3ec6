//! The fast parser of eight IPv4 frames at once, one per lane of a vector. [`FastParse::parse_frame`] and the checks of
//! lengths behind it are its specification: it accepts the same frames, except those too short for a row.

use vipgate_mem::simd::{LANES, ROW, Simd, U32x8};

#[cfg(doc)]
use super::FastParse;
use super::{L4_V4, ipv4};
use crate::wire::{ethernet, protocol, udp};

/// Offset of a row in its frame: it begins with the EtherType.
pub const ROW_OFFSET: usize = ethernet::ETHERTYPE;
/// Length of the shortest frame with a whole row.
pub const MIN_LENGTH: usize = ROW_OFFSET + ROW;
/// Offsets in a row: of the addresses, and of the ports.
const ADDRESSES: usize = ethernet::HEADER + ipv4::ADDRESSES - ROW_OFFSET;
const PORTS: usize = L4_V4 - ROW_OFFSET;
/// A row that is not accepted.
pub static NO_ROW: [u8; ROW] = [0; ROW];

/// The parsed headers of eight frames.
#[derive(Clone, Copy, Debug)]
pub struct PlainLanes {
    /// Lanes of UDP datagrams that are accepted, as bits.
    pub udp: u8,
    /// Lanes of TCP segments that are accepted as IPv4 packets, as bits. Their TCP headers are still to be parsed.
    pub tcp: u8,
    /// Lanes of frames that are longer than their packets, as bits.
    pub padded: u8,
    /// TTLs in the lower half, lengths of the IP packets in the upper one, bytes.
    pub ttls_and_totals: [u32; LANES],
    /// Protocols.
    pub protocols: [u32; LANES],
}

/// Parses frames; `rows` are their bytes from [`ROW_OFFSET`] on, `lengths` their lengths.
#[inline(always)]
pub fn parse(simd: Simd, rows: &[&[u8; ROW]; LANES], lengths: &[u32; LANES]) -> PlainLanes {
    // EtherType, version and header length, TOS | total length, identification | flags and fragment offset, TTL, protocol
    // | checksum, half of the source | .. | .. | destination port, length field of UDP | ..
    let columns = simd.columns(rows);
    let [first, second, third, _, _, _, seventh, _] = columns;
    let low = simd.splat(0xffff);
    let is_ipv4 = (first & simd.splat(0x00ff_ffff)).equals(simd.splat(0x0045_0008));
    let is_atomic = (third & low).equals(simd.splat(ipv4::DONT_FRAGMENT.to_be().into()));
    let total = swap_bytes(second & low, simd);
    let length = total + simd.splat(ethernet::HEADER as u32);
    let frame_length = simd.load(lengths);
    let is_accepted =
        (is_ipv4 & is_atomic & has_valid_checksum(&columns, simd)).lanes() & !length.is_greater(frame_length).lanes();
    let protocol = third.shift_right::<24>();
    let udp_length = swap_bytes(seventh.shift_right::<16>(), simd);
    let is_udp = protocol.equals(simd.splat(protocol::UDP.into()))
        & (udp_length + simd.splat(L4_V4 as u32)).equals(length)
        & udp_length.is_greater(simd.splat(udp::HEADER as u32 - 1));
    let ttl = third.shift_right::<16>() & simd.splat(0xff);
    PlainLanes {
        udp: is_accepted & is_udp.lanes(),
        tcp: is_accepted & protocol.equals(simd.splat(protocol::TCP.into())).lanes(),
        padded: !length.equals(frame_length).lanes(),
        ttls_and_totals: (ttl | total.shift_left::<16>()).to_array(),
        protocols: protocol.to_array(),
    }
}

/// Whether the words of the IPv4 header sum to all ones.
#[inline(always)]
fn has_valid_checksum(columns: &[U32x8; LANES], simd: Simd) -> U32x8 {
    let low = simd.splat(0xffff);
    let [first, second, third, fourth, fifth, sixth, ..] = *columns;
    let mut sum = first.shift_right::<16>() + (sixth & low);
    for column in [second, third, fourth, fifth] {
        sum = sum + (column & low) + column.shift_right::<16>();
    }
    // Ten words leave a carry of at most nine, and the second fold none.
    let sum = (sum & low) + sum.shift_right::<16>();
    ((sum & low) + sum.shift_right::<16>()).equals(low)
}

/// Swaps the lower two bytes of each lane; the others are zero.
#[inline(always)]
fn swap_bytes(word: U32x8, simd: Simd) -> U32x8 {
    (word.shift_left::<8>() & simd.splat(0xff00)) | word.shift_right::<8>()
}

/// The EtherType of a frame that starts with `start`.
#[inline(always)]
pub fn ethertype(start: &[u8; MIN_LENGTH]) -> u16 {
    u16::from_be_bytes([start[ethernet::ETHERTYPE], start[ethernet::ETHERTYPE + 1]])
}

/// The row of a frame that starts with `start`.
#[inline(always)]
pub fn row(start: &[u8; MIN_LENGTH]) -> &[u8; ROW] {
    start[ROW_OFFSET..].first_chunk().unwrap_or(&NO_ROW)
}

/// Source and destination address, and the ports, of a row, in network byte order.
#[inline(always)]
pub fn addresses_and_ports(row: &[u8; ROW]) -> (u32, u32, [u8; 4]) {
    let addresses = u64::from_le_bytes(chunk(row, ADDRESSES));
    ((addresses as u32).to_le(), ((addresses >> 32) as u32).to_le(), chunk(row, PORTS))
}

#[inline(always)]
fn chunk<const LENGTH: usize>(row: &[u8; ROW], at: usize) -> [u8; LENGTH] {
    row[at..].first_chunk().copied().unwrap_or([0; LENGTH])
}
