//! The Internet checksum: computed over data (RFC 1071) and updated incrementally (RFC 1624, equation 3).
//!
//! A [`Delta`] is the sum of `~old + new` over every 16-bit word that changes. It depends on the rewrite alone, not on
//! the packet, so a session computes it once and each packet only adds it.

use crate::flow::address::Address;

/// The change that a rewrite makes to a ones' complement sum, in network byte order: sums are byte-order independent
/// (RFC 1071 section 2 B), so no packet's checksum needs to be byte-swapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delta(pub u16);

impl Delta {
    /// Decrement of the IPv4 TTL: its byte is the upper half of a word.
    pub const TTL_DECREMENT: Self = Self(0xfeff_u16.to_be());

    /// The change of replacing words that sum to `old` by words that sum to `new` (sums not folded).
    #[inline]
    pub fn of(old: u32, new: u32) -> Self {
        Self(fold(u32::from(!fold(old)) + u32::from(fold(new))).to_be())
    }

    /// The sum of both changes.
    #[inline]
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(add(self.0, other.0))
    }

    /// The checksum after this change.
    #[inline]
    pub fn apply(self, checksum: u16) -> u16 {
        u16::from_be(self.apply_in_place(checksum.to_be()))
    }

    /// The checksum field after this change, both in network byte order.
    #[inline]
    pub fn apply_in_place(self, field: u16) -> u16 {
        // ~(~field + delta): a subtraction with end-around borrow.
        let (difference, borrow) = field.overflowing_sub(self.0);
        difference.wrapping_sub(borrow.into())
    }
}

/// The ones' complement sum of two words.
#[inline]
fn add(one: u16, other: u16) -> u16 {
    let (sum, carry) = one.overflowing_add(other);
    sum + u16::from(carry)
}

/// Folds the carries of a sum into 16 bits.
#[inline]
pub fn fold(sum: u32) -> u16 {
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    sum as u16
}

/// The sum of the 16-bit words in `bytes` (an odd last byte is padded with zero), not folded. At most 64 KiB of input.
#[inline]
pub fn sum(bytes: &[u8]) -> u32 {
    let mut words = bytes.chunks_exact(2);
    let mut total: u32 = words.by_ref().map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    if let [last] = words.remainder() {
        total += u32::from(*last) << 8;
    }
    total
}

/// The sum of the 16-bit words in `bytes`, folded, eight bytes at a time; for whole packets.
pub fn wide_sum(bytes: &[u8]) -> u16 {
    let (words, rest) = bytes.as_chunks::<8>();
    // Halves of 32 bits never overflow 64. Byte order doesn't matter to the sum (RFC 1071 section 2 B).
    let halves = words
        .iter()
        .map(|word| u64::from_ne_bytes(*word))
        .fold(0, |sum, word| sum + (word & 0xffff_ffff) + (word >> 32));
    let (low, high) = (halves & 0xffff_ffff, halves >> 32);
    let folded = (low & 0xffff) + (low >> 16) + (high & 0xffff) + (high >> 16);
    let swapped = u16::from_be(fold(folded as u32));
    fold(u32::from(swapped) + sum(rest))
}

/// The sum of the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1), not folded.
pub fn pseudo_header_sum<A: Address>(source: A, destination: A, length: u32, protocol: u8) -> u32 {
    source.word_sum() + destination.word_sum() + (length >> 16) + (length & 0xffff) + u32::from(protocol)
}

/// The checksum of `bytes`, whose checksum field must be zero, continuing the partial sum `partial`.
pub fn checksum(partial: u32, bytes: &[u8]) -> u16 {
    !fold(u32::from(fold(partial)) + u32::from(fold(sum(bytes))))
}

/// Whether the checksum of an IPv4 header without options is right: the header sums to all ones. Neither the byte order
/// of the words (RFC 1071 section 2 B) nor their width matters, as long as carries wrap around.
#[inline]
pub fn verifies_header(header: &[u8; 20]) -> bool {
    // The inverse of 0xffff modulo 2^64.
    const INVERSE: u64 = 0xfffe_fffe_fffe_ffff;
    const { assert!(INVERSE.wrapping_mul(0xffff) == 1) };
    let ([first, second], last) = header.as_chunks::<8>() else { return false };
    let (sum, carry) = u64::from_ne_bytes(*first).overflowing_add(u64::from_ne_bytes(*second));
    let last = last.first_chunk().map_or(0, |last| u32::from_ne_bytes(*last));
    let (sum, carry_out) = sum.overflowing_add(u64::from(last) + u64::from(carry));
    let total = sum.wrapping_add(carry_out.into());
    // A ones' complement sum is all ones exactly if it is a nonzero multiple of 0xffff; the version field makes it
    // nonzero. Multiplying by the inverse divides multiples exactly and maps all other numbers above the bound.
    total.wrapping_mul(INVERSE) <= u64::MAX / 0xffff
}

/// Whether the checksum within `bytes` is right: `partial` and `bytes` sum to all ones.
#[inline]
pub fn verifies(partial: u32, bytes: &[u8]) -> bool {
    checksum(partial, bytes) == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_example_of_rfc_1624_section_4_does_not_become_minus_zero() {
        assert_eq!(Delta::of(0x5555, 0x3285).apply(0xdd2f), 0x0000);
    }

    proptest! {
        #[test]
        fn the_fast_header_check_equals_the_general_one(mut header: [u8; 20], right: bool) {
            header[0] = 0x45;
            if right {
                header[10..12].fill(0);
                let sum = checksum(0, &header);
                header[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            prop_assert_eq!(verifies_header(&header), verifies(0, &header));
        }

        #[test]
        fn an_update_equals_a_new_computation(
            mut bytes in prop::collection::vec(any::<u8>(), 24..64),
            new in any::<[u8; 6]>(),
            at in 0_usize..8,
        ) {
            let at = at * 2;
            // A header is never all zeros: its first byte holds the version.
            bytes[20] = 0x45;
            let old = checksum(0, &bytes);
            let delta = Delta::of(sum(&bytes[at..at + 6]), sum(&new));
            bytes[at..at + 6].copy_from_slice(&new);
            prop_assert_eq!(delta.apply(old), checksum(0, &bytes));
        }

        #[test]
        fn applying_a_sum_of_deltas_equals_applying_each(a: u16, b: u16, c: u16, d: u16, base in 1_u16..0xffff) {
            let both = Delta::of(a.into(), b.into()).and(Delta::of(c.into(), d.into()));
            let one_by_one = Delta::of(c.into(), d.into()).apply(Delta::of(a.into(), b.into()).apply(base));
            // Zero has two representations in ones' complement; a receiver accepts both.
            let same = both.apply(base) == one_by_one || [both.apply(base), one_by_one] == [0, 0xffff]
                || [both.apply(base), one_by_one] == [0xffff, 0];
            prop_assert!(same);
        }
    }
}
