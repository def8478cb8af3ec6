//! Short names for content: the same on every machine and in every run, unlike the hashes of `std`.

use std::fmt::{self, Write};

/// FNV-1a, 64 bits. Not against attackers: whoever writes policy has no use for two policies of one version.
#[derive(Clone, Copy, Debug)]
pub struct Fingerprint(u64);

impl Default for Fingerprint {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fingerprint {
    /// That of some bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut print = Self::default();
        print.add(bytes);
        print.finish()
    }

    /// Adds bytes to the content.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The value with all bits mixed: FNV alone leaves the high bits of short inputs alike.
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

/// Each bit of the result depends on every bit of the number (the finalizer of SplitMix64).
pub fn mix(number: u64) -> u64 {
    let mut mixed = number;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gateways of other versions and other machines come to the same: these are what the algorithms' authors publish.
    #[test]
    fn names_are_the_same_everywhere() {
        let mut print = Fingerprint::default();
        print.add(b"foo");
        print.write_str("bar").unwrap();
        assert_eq!(print.0, 0x8594_4171_f739_67e8, "FNV-1a");
        assert_eq!(print.finish(), mix(0x8594_4171_f739_67e8));
        assert_eq!(Fingerprint::of(b"foobar"), print.finish());
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf, "SplitMix64, the first number of seed 0");
    }
}
