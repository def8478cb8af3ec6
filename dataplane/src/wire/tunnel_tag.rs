//! Authentication of packets between gateways: a keyed tag (SipHash-2-4) in the inner link addresses, which are of no use in a tunnel
//! that carries IP packets.
//!
//! ```text
//!   inner Ethernet header, 14 bytes
//!   0            2                      6            8                      12
//!   | 0x02 0x76  | tag, upper 32 bits   | 0x02 0x76  | tag, lower 32 bits   | EtherType |
//!
//!   what the tag is computed over, big-endian
//!   0         4                 6           8
//!   | VNI     | inner length    | EtherType | the inner packet's first 40 bytes of IPv4, or 64 of IPv6, or all |
//! ```
//! So a tunnel packet is as long as without, and whatever reads VXLAN reads it: its inner link addresses are local unicast ones. A gateway
//! that knows no tags neither looks at them nor minds. So many bytes hold the IP header, the ports and, of TCP, the numbers; what is behind
//! them is not protected, and neither is the order of packets, nor one that is sent twice.

use std::fmt;

use siphasher::sip::SipHasher24;

use super::ethernet;

/// Bytes of the inner packet that a tag is computed over at most, by family: both headers of TCP, in whole words.
const COVERED_V4: usize = 40;
const COVERED_V6: usize = 64;
/// What stands before them.
const BEFORE: usize = 8;
/// How both link addresses begin: local unicast.
const PREFIX: [u8; 2] = [0x02, 0x76];

/// The key of one direction of the tunnel between two gateways.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TagKey(u64, u64);

impl TagKey {
    /// From 16 secret bytes.
    pub fn new(bytes: &[u8; 16]) -> Self {
        let (first, second) = SipHasher24::new_with_key(bytes).keys();
        Self(first, second)
    }

    /// Writes the tag into an inner frame of a tunnel with this VNI.
    #[inline]
    pub fn seal(&self, inner: &mut [u8], vni: u32) {
        let length = inner.len() as u16;
        let Some((headers, packet)) = inner.split_first_chunk_mut::<{ ethernet::HEADER }>() else { return };
        let kind = [headers[12], headers[13]];
        write(headers, self.tag(vni, length, kind, packet, &[]));
    }

    /// The same into the link header of a frame that stands in two places.
    pub fn seal_parts(&self, headers: &mut [u8; ethernet::HEADER], packet: [&[u8]; 2], vni: u32) {
        let length = ethernet::HEADER + packet[0].len() + packet[1].len();
        let tag = self.tag(vni, length as u16, [headers[12], headers[13]], packet[0], packet[1]);
        write(headers, tag);
    }

    /// Whether an inner frame has the tag that it must have.
    #[inline]
    pub fn verifies(&self, inner: &[u8], vni: u32) -> bool {
        let Some((headers, packet)) = inner.split_first_chunk::<{ ethernet::HEADER }>() else { return false };
        read(headers) == self.tag(vni, inner.len() as u16, [headers[12], headers[13]], packet, &[])
    }

    #[inline]
    fn tag(&self, vni: u32, length: u16, kind: [u8; 2], first: &[u8], more: &[u8]) -> u64 {
        if kind == ethernet::IPV4.to_be_bytes() {
            self.over::<COVERED_V4, { BEFORE + COVERED_V4 }>(vni, length, kind, first, more)
        } else {
            self.over::<COVERED_V6, { BEFORE + COVERED_V6 }>(vni, length, kind, first, more)
        }
    }

    #[inline]
    fn over<const COVERED: usize, const INPUT: usize>(
        &self,
        vni: u32,
        length: u16,
        kind: [u8; 2],
        first: &[u8],
        more: &[u8],
    ) -> u64 {
        let mut input = [0; INPUT];
        input[..4].copy_from_slice(&vni.to_be_bytes());
        input[4..6].copy_from_slice(&length.to_be_bytes());
        input[6..BEFORE].copy_from_slice(&kind);
        // Most packets have that many, and then nobody counts.
        if let Some(first) = first.first_chunk::<COVERED>() {
            input[BEFORE..].copy_from_slice(first);
            return self.hash(&input);
        }
        let more = &more[..more.len().min(COVERED - first.len())];
        let middle = BEFORE + first.len();
        let end = middle + more.len();
        input[BEFORE..middle].copy_from_slice(first);
        input[middle..end].copy_from_slice(more);
        self.hash(&input[..end])
    }

    #[inline]
    fn hash(&self, input: &[u8]) -> u64 {
        SipHasher24::new_with_keys(self.0, self.1).hash(input)
    }
}

#[inline]
fn write(headers: &mut [u8; ethernet::HEADER], tag: u64) {
    let (upper, lower) = ((tag >> 32) as u32, tag as u32);
    headers[..2].copy_from_slice(&PREFIX);
    headers[2..6].copy_from_slice(&upper.to_be_bytes());
    headers[6..8].copy_from_slice(&PREFIX);
    headers[8..12].copy_from_slice(&lower.to_be_bytes());
}

#[inline]
fn read(headers: &[u8; ethernet::HEADER]) -> u64 {
    let half = |at: usize| headers[at..].first_chunk().map_or(0, |bytes| u64::from(u32::from_be_bytes(*bytes)));
    half(2) << 32 | half(8)
}

/// Secret: never shown.
impl fmt::Debug for TagKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TagKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(first: u8) -> TagKey {
        TagKey::new(&std::array::from_fn(|n| n as u8 ^ first))
    }

    const KINDS: [([u8; 2], usize); 2] = [([8, 0], COVERED_V4), ([0x86, 0xdd], COVERED_V6)];

    fn frame(length: usize, kind: [u8; 2]) -> Vec<u8> {
        let mut frame: Vec<u8> = (0..length).map(|n| n as u8).collect();
        frame[12..14].copy_from_slice(&kind);
        frame
    }

    /// The last of the test vectors of the paper (appendix A): 15 bytes under the key 00 01 .. 0f.
    #[test]
    fn it_is_siphash_2_4() {
        let message: [u8; 15] = std::array::from_fn(|n| n as u8);
        assert_eq!(key(0).hash(&message), 0xa129_ca61_49be_45e5);
    }

    #[test]
    fn what_is_sealed_verifies_under_its_own_key_and_network_only() {
        for (length, (kind, _)) in (14..120).flat_map(|length| KINDS.map(|kind| (length, kind))) {
            let mut sealed = frame(length, kind);
            key(0).seal(&mut sealed, 0x76_7009);
            assert_eq!((&sealed[..2], &sealed[6..8]), (&PREFIX[..], &PREFIX[..]));
            assert_eq!(sealed[12..], frame(length, kind)[12..], "only link addresses change");
            assert!(key(0).verifies(&sealed, 0x76_7009), "{length}");
            assert!(!key(1).verifies(&sealed, 0x76_7009) && !key(0).verifies(&sealed, 0x76_700a));
            assert!(!key(0).verifies(&sealed[..length - 1], 0x76_7009), "its length is part of it");
            assert!(!key(0).verifies(&frame(length, kind), 0x76_7009));
        }
    }

    #[test]
    fn no_covered_bit_can_change() {
        for (kind, covered) in KINDS {
            let mut sealed = frame(100, kind);
            key(0).seal(&mut sealed, 7);
            let prefixes = [0, 1, 6, 7];
            for bit in (0..8 * (14 + covered)).filter(|bit| !prefixes.contains(&(bit / 8))) {
                let mut bent = sealed.clone();
                bent[bit / 8] ^= 1 << (bit % 8);
                assert!(!key(0).verifies(&bent, 7), "bit {bit}");
            }
        }
    }

    #[test]
    fn in_two_places_it_is_the_same() {
        let lengths = [14, 20, 34, 53, 54, 55, 60, 77, 78, 79, 300];
        for (length, (kind, _)) in lengths.into_iter().flat_map(|length| KINDS.map(|kind| (length, kind))) {
            let mut whole = frame(length, kind);
            key(3).seal(&mut whole, 9);
            for at in (14..=length).filter(|at| at - 14 < 70 || *at == length) {
                let parts = frame(length, kind);
                let mut headers: [u8; 14] = *parts.first_chunk().unwrap();
                key(3).seal_parts(&mut headers, [&parts[14..at], &parts[at..]], 9);
                assert_eq!(headers[..], whole[..14], "{length} at {at}");
            }
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", key(9)), "TagKey(..)");
        assert!(key(1) == key(1) && key(1) != key(2));
    }
}
