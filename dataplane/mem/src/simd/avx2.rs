//! Vectors in AVX2 registers. Only [`Simd`](super::Simd) creates them, so this CPU has AVX2.

use std::arch::x86_64::{
    __m256i, _mm256_add_epi32, _mm256_and_si256, _mm256_castsi256_ps, _mm256_cmpeq_epi16, _mm256_cmpeq_epi32,
    _mm256_cmpgt_epi32, _mm256_loadu_si256, _mm256_movemask_epi8, _mm256_movemask_ps, _mm256_or_si256,
    _mm256_packs_epi16, _mm256_permute2x128_si256, _mm256_permute4x64_epi64, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_slli_epi32, _mm256_srli_epi32, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32,
    _mm256_unpacklo_epi64,
};
use std::ops::{Add, BitAnd, BitOr};

use super::{Kernel, LANES, ROW, Simd};
use crate::TAGS_PER_LINE;

/// Whether this CPU has all features that [`run`] enables: hypervisors may hide some of them.
pub(super) fn is_supported() -> bool {
    std::is_x86_feature_detected!("avx2")
        && std::is_x86_feature_detected!("bmi1")
        && std::is_x86_feature_detected!("bmi2")
        && std::is_x86_feature_detected!("lzcnt")
        && std::is_x86_feature_detected!("popcnt")
}

/// Runs work that is compiled for AVX2.
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn run<K: Kernel>(kernel: K, simd: Simd) -> K::Output {
    kernel.run(simd)
}

/// Eight 32-bit numbers.
#[derive(Clone, Copy, Debug)]
pub struct U32x8(__m256i);

impl U32x8 {
    #[inline(always)]
    pub(super) fn splat(value: u32) -> Self {
        // SAFETY: this CPU has AVX2 (see the head of this file).
        Self(unsafe { _mm256_set1_epi32(value.cast_signed()) })
    }

    #[inline(always)]
    pub(super) fn load(lanes: &[u32; LANES]) -> Self {
        // SAFETY: as above; the unaligned load reads 32 bytes, the size of the array.
        Self(unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) })
    }

    #[inline(always)]
    pub(super) fn columns(rows: &[&[u8; ROW]; LANES]) -> [Self; LANES] {
        // SAFETY: as above; each unaligned load reads 32 bytes, the size of a row.
        unsafe {
            let [r0, r1, r2, r3, r4, r5, r6, r7] = rows.map(|row| _mm256_loadu_si256(row.as_ptr().cast()));
            // Words of two rows, then of four, then of all; each half of a register is transposed by itself.
            let words = |one, other| (_mm256_unpacklo_epi32(one, other), _mm256_unpackhi_epi32(one, other));
            let ((a0, a1), (b0, b1), (c0, c1), (d0, d1)) = (words(r0, r1), words(r2, r3), words(r4, r5), words(r6, r7));
            let pairs = |one, other| (_mm256_unpacklo_epi64(one, other), _mm256_unpackhi_epi64(one, other));
            let ((e0, e1), (e2, e3)) = (pairs(a0, b0), pairs(a1, b1));
            let ((f0, f1), (f2, f3)) = (pairs(c0, d0), pairs(c1, d1));
            let lower = |one, other| Self(_mm256_permute2x128_si256::<0x20>(one, other));
            let upper = |one, other| Self(_mm256_permute2x128_si256::<0x31>(one, other));
            [
                lower(e0, f0),
                lower(e1, f1),
                lower(e2, f2),
                lower(e3, f3),
                upper(e0, f0),
                upper(e1, f1),
                upper(e2, f2),
                upper(e3, f3),
            ]
        }
    }

    #[inline(always)]
    pub(super) fn equal_tags(tags: &[u16; TAGS_PER_LINE], tag: u16) -> u32 {
        // SAFETY: as above; both unaligned loads read 32 bytes, within the array.
        unsafe {
            let pattern = _mm256_set1_epi16(tag.cast_signed());
            let line: *const __m256i = tags.as_ptr().cast();
            let equal = |at: usize| _mm256_cmpeq_epi16(_mm256_loadu_si256(line.add(at)), pattern);
            // Saturation keeps all ones and all zeros. Packing interleaves the halves of both registers.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(equal(0), equal(1)));
            _mm256_movemask_epi8(packed).cast_unsigned()
        }
    }

    /// The lanes.
    #[inline(always)]
    pub fn to_array(self) -> [u32; LANES] {
        // SAFETY: both are 32 bytes without padding, and any bits are valid.
        unsafe { std::mem::transmute(self.0) }
    }

    /// All ones in lanes that are equal, else zero.
    #[inline(always)]
    #[must_use]
    pub fn equals(self, other: Self) -> Self {
        // SAFETY: this CPU has AVX2 (see the head of this file).
        Self(unsafe { _mm256_cmpeq_epi32(self.0, other.0) })
    }

    /// All ones in lanes that are greater, else zero. The numbers are below 2^31.
    #[inline(always)]
    #[must_use]
    pub fn is_greater(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_cmpgt_epi32(self.0, other.0) })
    }

    /// Lanes whose highest bit is set, as bits.
    #[inline(always)]
    pub fn lanes(self) -> u8 {
        // SAFETY: as above.
        (unsafe { _mm256_movemask_ps(_mm256_castsi256_ps(self.0)) }).cast_unsigned() as u8
    }

    /// Each lane, shifted.
    #[inline(always)]
    #[must_use]
    pub fn shift_right<const BITS: i32>(self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_srli_epi32::<BITS>(self.0) })
    }

    /// Each lane, shifted.
    #[inline(always)]
    #[must_use]
    pub fn shift_left<const BITS: i32>(self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_slli_epi32::<BITS>(self.0) })
    }
}

impl BitAnd for U32x8 {
    type Output = Self;

    #[inline(always)]
    fn bitand(self, other: Self) -> Self {
        // SAFETY: this CPU has AVX2 (see the head of this file).
        Self(unsafe { _mm256_and_si256(self.0, other.0) })
    }
}

impl BitOr for U32x8 {
    type Output = Self;

    #[inline(always)]
    fn bitor(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_or_si256(self.0, other.0) })
    }
}

/// Modulo 2^32.
impl Add for U32x8 {
    type Output = Self;

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_add_epi32(self.0, other.0) })
    }
}
