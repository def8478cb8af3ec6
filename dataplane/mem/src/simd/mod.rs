//! SIMD: vectors of eight 32-bit lanes, for work on eight packets at a time. AVX2 where an x86-64 CPU has it; on other
//! architectures arrays, of which the compiler makes vectors. Both give the same results.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(any(test, not(target_arch = "x86_64")))]
#[allow(unreachable_pub, reason = "on x86-64 only tests use it")]
mod portable;

#[cfg(target_arch = "x86_64")]
pub use avx2::U32x8;
#[cfg(not(target_arch = "x86_64"))]
pub use portable::U32x8;

use crate::TAGS_PER_LINE;

/// Lanes of a vector.
pub const LANES: usize = 8;
/// Bytes of a lane in each of [`LANES`] vectors.
pub const ROW: usize = 32;

/// Proof that this CPU has the instructions of this module.
#[derive(Clone, Copy, Debug)]
pub struct Simd(());

/// Work that uses [`Simd`]. `run` must be `#[inline(always)]`, and so must be what it calls: only what is inlined into
/// [`Simd::run`] is compiled for AVX2.
pub trait Kernel {
    /// The result.
    type Output;
    /// Does the work.
    fn run(self, simd: Simd) -> Self::Output;
}

impl Simd {
    /// `None` on an x86-64 CPU without AVX2.
    #[inline]
    pub fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        let is_supported = avx2::is_supported();
        #[cfg(not(target_arch = "x86_64"))]
        let is_supported = true;
        is_supported.then_some(Self(()))
    }

    /// Runs work that is compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        {
            // SAFETY: `detect`, which alone creates a `Simd`, has found all features that `avx2::run` enables.
            unsafe { avx2::run(kernel, self) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        kernel.run(self)
    }

    /// All lanes `value`.
    #[inline(always)]
    pub fn splat(self, value: u32) -> U32x8 {
        U32x8::splat(value)
    }

    /// One number a lane.
    #[inline(always)]
    pub fn load(self, lanes: &[u32; LANES]) -> U32x8 {
        U32x8::load(lanes)
    }

    /// Column c has the little-endian word c of each row.
    #[inline(always)]
    pub fn columns(self, rows: &[&[u8; ROW]; LANES]) -> [U32x8; LANES] {
        U32x8::columns(rows)
    }

    /// As [`crate::equal_tags`].
    #[inline(always)]
    pub fn equal_tags(self, tags: &[u16; TAGS_PER_LINE], tag: u16) -> u32 {
        U32x8::equal_tags(tags, tag)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// Random numbers (xorshift).
    fn random(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    #[test]
    fn avx2_and_arrays_give_the_same_results() {
        // Without AVX2 there is nothing to compare.
        if Simd::detect().is_none() {
            return;
        }
        let mut state = 0x9e37_79b9_7f4a_7c15;
        for _ in 0..1_000 {
            let rows: [[u8; ROW]; LANES] = std::array::from_fn(|_| std::array::from_fn(|_| random(&mut state) as u8));
            let (fast, slow) = (U32x8::columns(&rows.each_ref()), portable::U32x8::columns(&rows.each_ref()));
            for column in 0..LANES {
                let (a, b) = (fast[column], fast[(column + 1) % LANES]);
                let (c, d) = (slow[column], slow[(column + 1) % LANES]);
                assert_eq!(a.to_array(), c.to_array());
                let lanes = c.to_array();
                assert_eq!(U32x8::load(&lanes).to_array(), portable::U32x8::load(&lanes).to_array());
                assert_eq!((a & b).to_array(), (c & d).to_array());
                assert_eq!((a | b).to_array(), (c | d).to_array());
                assert_eq!((a + b).to_array(), (c + d).to_array());
                assert_eq!(a.shift_right::<5>().to_array(), c.shift_right::<5>().to_array());
                assert_eq!(a.shift_left::<7>().to_array(), c.shift_left::<7>().to_array());
                let bits = (random(&mut state) as u32) & 3;
                let equal = (a & U32x8::splat(3)).equals(U32x8::splat(bits));
                let same = (c & portable::U32x8::splat(3)).equals(portable::U32x8::splat(bits));
                assert_eq!((equal.to_array(), equal.lanes()), (same.to_array(), same.lanes()));
                let (low, high) = (a.shift_right::<16>(), b.shift_right::<16>());
                let (low_array, high_array) = (c.shift_right::<16>(), d.shift_right::<16>());
                assert_eq!(low.is_greater(high).lanes(), low_array.is_greater(high_array).lanes());
            }
            let mut tags: [u16; TAGS_PER_LINE] = std::array::from_fn(|_| random(&mut state) as u16 & 7);
            tags[0] = 3;
            assert_eq!(U32x8::equal_tags(&tags, 3), portable::U32x8::equal_tags(&tags, 3));
            assert_eq!(U32x8::equal_tags(&tags, 3), crate::equal_tags(&tags, 3));
        }
    }
}
