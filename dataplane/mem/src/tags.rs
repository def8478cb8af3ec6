//! Comparing many bytes at once.

/// Which of 16 bytes are `wanted`: bit i stands for byte i.
#[inline]
pub fn equal_bytes(bytes: &[u8; 16], wanted: u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_set1_epi8};
        // SAFETY: SSE2 is part of every x86-64 processor; the load reads 16 bytes, which are there, at any alignment.
        let bits = unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(wanted.cast_signed())))
        };
        bits.cast_unsigned()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        bytes.iter().enumerate().fold(0, |bits, (i, &byte)| bits | u32::from(byte == wanted) << i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_equal_byte_is_a_bit() {
        let mut bytes = [7; 16];
        assert_eq!(equal_bytes(&bytes, 7), 0xffff);
        bytes[0] = 0x80;
        bytes[15] = 0x80;
        assert_eq!(equal_bytes(&bytes, 0x80), 0x8001);
        assert_eq!(equal_bytes(&bytes, 9), 0);
    }
}
