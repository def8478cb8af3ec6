//! SIMD comparison of hash tags.

/// Tags compared at once: one cache line.
pub const TAGS_PER_LINE: usize = 32;

/// Bitmap of the tags that equal `tag`: bit i is tag i.
#[inline]
pub fn equal_tags(tags: &[u16; TAGS_PER_LINE], tag: u16) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            __m128i, _mm_cmpeq_epi16, _mm_loadu_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set1_epi16,
        };
        // SAFETY: every x86-64 CPU has SSE2; the four unaligned loads read 16 bytes each, within the array.
        unsafe {
            let pattern = _mm_set1_epi16(tag.cast_signed());
            let line: *const __m128i = tags.as_ptr().cast();
            let equal = |at: usize| _mm_cmpeq_epi16(_mm_loadu_si128(line.add(at)), pattern);
            // Saturation keeps all ones and all zeros when words are packed into bytes.
            let lower = _mm_movemask_epi8(_mm_packs_epi16(equal(0), equal(1))).cast_unsigned();
            let upper = _mm_movemask_epi8(_mm_packs_epi16(equal(2), equal(3))).cast_unsigned();
            lower | upper << 16
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        tags.iter().enumerate().fold(0, |bits, (i, &it)| bits | u32::from(it == tag) << i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_equal_tag_sets_its_bit() {
        let mut tags = [7; TAGS_PER_LINE];
        assert_eq!(equal_tags(&tags, 7), u32::MAX);
        for at in 0..TAGS_PER_LINE {
            tags[at] = 0x8007;
            assert_eq!(equal_tags(&tags, 0x8007), 1 << at);
            assert_eq!(equal_tags(&tags, 7), !(1 << at));
            tags[at] = 7;
        }
        assert_eq!(equal_tags(&tags, 0x0707), 0);
    }
}
