//! Comparing many tags at once.

/// Tags that are compared at once: a cache line of them.
pub const TAGS: usize = 32;

/// Which of the tags are `wanted`: bit i stands for tag i.
#[inline]
pub fn equal_tags(tags: &[u16; TAGS], wanted: u16) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            __m128i, _mm_cmpeq_epi16, _mm_loadu_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set1_epi16,
        };
        // SAFETY: SSE2 is part of every x86-64 processor; the four loads read 16 bytes each, which are there, at any alignment.
        unsafe {
            let wanted = _mm_set1_epi16(wanted.cast_signed());
            let line: *const __m128i = tags.as_ptr().cast();
            let equal = |at: usize| _mm_cmpeq_epi16(_mm_loadu_si128(line.add(at)), wanted);
            // All ones or all zeros stay so when words become bytes.
            let lower = _mm_movemask_epi8(_mm_packs_epi16(equal(0), equal(1))).cast_unsigned();
            let upper = _mm_movemask_epi8(_mm_packs_epi16(equal(2), equal(3))).cast_unsigned();
            lower | upper << 16
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        tags.iter().enumerate().fold(0, |bits, (i, &tag)| bits | u32::from(tag == wanted) << i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_equal_tag_is_a_bit() {
        let mut tags = [7; TAGS];
        assert_eq!(equal_tags(&tags, 7), u32::MAX);
        for at in 0..TAGS {
            tags[at] = 0x8007;
            assert_eq!(equal_tags(&tags, 0x8007), 1 << at);
            assert_eq!(equal_tags(&tags, 7), !(1 << at));
            tags[at] = 7;
        }
        assert_eq!(equal_tags(&tags, 0x0707), 0);
    }
}
