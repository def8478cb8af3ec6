//! Authentication of tunnel packets between gateways: a keyed tag (SipHash-2-4) in the inner MAC addresses, which have
//! no use in a tunnel that carries IP packets.
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
//! The tag doesn't make a tunnel packet longer, and every VXLAN decoder can parse it: the inner MAC addresses are
//! locally administered unicast ones. A gateway without tags ignores them. The covered bytes hold the IP header, the
//! ports and the TCP header; the payload after them is not protected, and there is no protection against reordering and
//! replay.

use std::fmt;

use siphasher::sip::SipHasher24;

use super::ethernet;

/// Maximum number of bytes of the inner packet that the tag covers, by family: the IP header and, in whole words, the
/// TCP header.
const COVERED_V4: usize = 40;
const COVERED_V6: usize = 64;
/// Length of the tag input before the packet: VNI, length, `EtherType`.
const PREAMBLE: usize = 8;
/// Prefix of both MAC addresses: locally administered, unicast.
const PREFIX: [u8; 2] = [0x02, 0x76];

/// The key of one direction of the tunnel between two gateways.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TagKey(u64, u64);

impl TagKey {
    /// A key of 16 secret bytes.
    pub fn new(bytes: &[u8; 16]) -> Self {
        let (first, second) = SipHasher24::new_with_key(bytes).keys();
        Self(first, second)
    }

    /// Writes the tag into an inner frame of a tunnel with this VNI.
    #[inline]
    pub fn write_tag(&self, inner: &mut [u8], vni: u32) {
        let length = inner.len() as u16;
        let Some((headers, packet)) = inner.split_first_chunk_mut::<{ ethernet::HEADER }>() else { return };
        let kind = [headers[12], headers[13]];
        write(headers, self.tag(vni, length, kind, packet, &[]));
    }

    /// Like [`Self::write_tag`], into the Ethernet header of a frame whose packet is in two slices.
    pub fn write_tag_parts(&self, headers: &mut [u8; ethernet::HEADER], packet: [&[u8]; 2], vni: u32) {
        let length = ethernet::HEADER + packet[0].len() + packet[1].len();
        let tag = self.tag(vni, length as u16, [headers[12], headers[13]], packet[0], packet[1]);
        write(headers, tag);
    }

    /// Whether an inner frame has a valid tag.
    #[inline]
    pub fn verify_tag(&self, inner: &[u8], vni: u32) -> bool {
        let Some((headers, packet)) = inner.split_first_chunk::<{ ethernet::HEADER }>() else { return false };
        read(headers) == self.tag(vni, inner.len() as u16, [headers[12], headers[13]], packet, &[])
    }

    #[inline]
    fn tag(&self, vni: u32, length: u16, kind: [u8; 2], first: &[u8], second: &[u8]) -> u64 {
        if kind == ethernet::IPV4.to_be_bytes() {
            self.tag_over::<COVERED_V4, { PREAMBLE + COVERED_V4 }>(vni, length, kind, first, second)
        } else {
            self.tag_over::<COVERED_V6, { PREAMBLE + COVERED_V6 }>(vni, length, kind, first, second)
        }
    }

    #[inline]
    fn tag_over<const COVERED: usize, const INPUT: usize>(
        &self,
        vni: u32,
        length: u16,
        kind: [u8; 2],
        first: &[u8],
        second: &[u8],
    ) -> u64 {
        let mut input = [0; INPUT];
        input[..4].copy_from_slice(&vni.to_be_bytes());
        input[4..6].copy_from_slice(&length.to_be_bytes());
        input[6..PREAMBLE].copy_from_slice(&kind);
        // The common case: the first slice holds all covered bytes.
        if let Some(first) = first.first_chunk::<COVERED>() {
            input[PREAMBLE..].copy_from_slice(first);
            return self.hash(&input);
        }
        let second = &second[..second.len().min(COVERED - first.len())];
        let middle = PREAMBLE + first.len();
        let end = middle + second.len();
        input[PREAMBLE..middle].copy_from_slice(first);
        input[middle..end].copy_from_slice(second);
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

/// Redacted: the key is secret.
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

    /// The test vector of the SipHash paper (appendix A): 15 bytes under the key 00 01 .. 0f.
    #[test]
    fn the_hash_is_siphash_2_4() {
        let message: [u8; 15] = std::array::from_fn(|n| n as u8);
        assert_eq!(key(0).hash(&message), 0xa129_ca61_49be_45e5);
    }

    #[test]
    fn a_tag_verifies_only_with_its_key_vni_and_length() {
        for (length, (kind, _)) in (14..120).flat_map(|length| KINDS.map(|kind| (length, kind))) {
            let mut tagged = frame(length, kind);
            key(0).write_tag(&mut tagged, 0x76_7009);
            assert_eq!((&tagged[..2], &tagged[6..8]), (&PREFIX[..], &PREFIX[..]));
            assert_eq!(tagged[12..], frame(length, kind)[12..], "only the MAC addresses change");
            assert!(key(0).verify_tag(&tagged, 0x76_7009), "{length}");
            assert!(!key(1).verify_tag(&tagged, 0x76_7009) && !key(0).verify_tag(&tagged, 0x76_700a));
            assert!(!key(0).verify_tag(&tagged[..length - 1], 0x76_7009), "the tag covers the length");
            assert!(!key(0).verify_tag(&frame(length, kind), 0x76_7009));
        }
    }

    #[test]
    fn any_flipped_covered_bit_is_detected() {
        for (kind, covered) in KINDS {
            let mut tagged = frame(100, kind);
            key(0).write_tag(&mut tagged, 7);
            let prefixes = [0, 1, 6, 7];
            for bit in (0..8 * (14 + covered)).filter(|bit| !prefixes.contains(&(bit / 8))) {
                let mut corrupt = tagged.clone();
                corrupt[bit / 8] ^= 1 << (bit % 8);
                assert!(!key(0).verify_tag(&corrupt, 7), "bit {bit}");
            }
        }
    }

    #[test]
    fn the_tag_of_two_slices_is_that_of_the_whole_packet() {
        let lengths = [14, 20, 34, 53, 54, 55, 60, 77, 78, 79, 300];
        for (length, (kind, _)) in lengths.into_iter().flat_map(|length| KINDS.map(|kind| (length, kind))) {
            let mut whole = frame(length, kind);
            key(3).write_tag(&mut whole, 9);
            for at in (14..=length).filter(|at| at - 14 < 70 || *at == length) {
                let parts = frame(length, kind);
                let mut headers: [u8; 14] = *parts.first_chunk().unwrap();
                key(3).write_tag_parts(&mut headers, [&parts[14..at], &parts[at..]], 9);
                assert_eq!(headers[..], whole[..14], "{length} at {at}");
            }
        }
    }

    #[test]
    fn debug_output_does_not_show_the_key() {
        assert_eq!(format!("{:?}", key(9)), "TagKey(..)");
        assert!(key(1) == key(1) && key(1) != key(2));
    }
}
