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
        let [v0, v1, v2, v3] = vni.to_be_bytes();
        let [l0, l1] = length.to_be_bytes();
        let preamble = [v0, v1, v2, v3, l0, l1, kind[0], kind[1]];
        // The common case: the first slice holds all covered bytes.
        if let Some(first) = first.first_chunk::<COVERED>() {
            let mut state = SipState::new(self);
            state.absorb(u64::from_le_bytes(preamble));
            first.as_chunks().0.iter().for_each(|word| state.absorb(u64::from_le_bytes(*word)));
            return state.finish(INPUT);
        }
        let mut input = [0; INPUT];
        input[..PREAMBLE].copy_from_slice(&preamble);
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

/// SipHash-2-4 over whole words, which never leave the registers: collected in memory first, bytes that were written
/// one by one would stall the processor when it reads them as words.
struct SipState(u64, u64, u64, u64);

impl SipState {
    #[inline]
    fn new(key: &TagKey) -> Self {
        let TagKey(k0, k1) = *key;
        Self(
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        )
    }

    #[inline]
    fn absorb(&mut self, word: u64) {
        self.3 ^= word;
        self.round();
        self.round();
        self.0 ^= word;
    }

    /// The hash of what was absorbed, `length` bytes.
    #[inline]
    fn finish(mut self, length: usize) -> u64 {
        self.absorb((length as u64) << 56);
        self.2 ^= 0xff;
        (0..4).for_each(|_| self.round());
        self.0 ^ self.1 ^ self.2 ^ self.3
    }

    #[inline]
    fn round(&mut self) {
        self.0 = self.0.wrapping_add(self.1);
        self.2 = self.2.wrapping_add(self.3);
        self.1 = self.1.rotate_left(13) ^ self.0;
        self.3 = self.3.rotate_left(16) ^ self.2;
        self.0 = self.0.rotate_left(32);
        self.2 = self.2.wrapping_add(self.1);
        self.0 = self.0.wrapping_add(self.3);
        self.1 = self.1.rotate_left(17) ^ self.2;
        self.3 = self.3.rotate_left(21) ^ self.0;
        self.2 = self.2.rotate_left(32);
    }
}

#[inline]
fn write(headers: &mut [u8; ethernet::HEADER], tag: u64) {
    let [u0, u1, u2, u3, l0, l1, l2, l3] = tag.to_be_bytes();
    let [p0, p1] = PREFIX;
    if let Some(macs) = headers.first_chunk_mut() {
        *macs = [p0, p1, u0, u1, u2, u3, p0, p1, l0, l1, l2, l3];
    }
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
    fn the_hash_of_whole_words_is_that_of_the_library() {
        for words in 0..12_usize {
            let message: Vec<u8> = (0..8 * words).map(|n| (n * 37) as u8).collect();
            let mut state = SipState::new(&key(5));
            message.as_chunks().0.iter().for_each(|word| state.absorb(u64::from_le_bytes(*word)));
            assert_eq!(state.finish(message.len()), key(5).hash(&message), "{words} words");
        }
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
