//! Content fingerprints: 64-bit hashes that are the same on every machine and in every run, unlike `std`'s.

use std::fmt::{self, Write};

/// FNV-1a, 64 bits. Not collision resistant: the author of a policy gains nothing from two policies with one version.
#[derive(Clone, Copy, Debug)]
pub struct Fingerprint(u64);

impl Default for Fingerprint {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fingerprint {
    /// Fingerprint of bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut fingerprint = Self::default();
        fingerprint.add(bytes);
        fingerprint.finish()
    }

    /// Appends bytes to the content.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The final value, mixed: with FNV alone, short inputs differ little in the high bits.
    pub fn finish(self) -> u64 {
        mix(self.0)
    }
}

impl Write for Fingerprint {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}

/// The finalizer of SplitMix64: each bit of the result depends on every bit of the number.
pub fn mix(number: u64) -> u64 {
    let mut mixed = number;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other versions and other machines must compute the same values: these are the published test vectors.
    #[test]
    fn fingerprints_match_the_published_test_vectors() {
        let mut fingerprint = Fingerprint::default();
        fingerprint.add(b"foo");
        fingerprint.write_str("bar").unwrap();
        assert_eq!(fingerprint.0, 0x8594_4171_f739_67e8, "FNV-1a");
        assert_eq!(fingerprint.finish(), mix(0x8594_4171_f739_67e8));
        assert_eq!(Fingerprint::of(b"foobar"), fingerprint.finish());
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf, "SplitMix64, the first number of seed 0");
    }
}
