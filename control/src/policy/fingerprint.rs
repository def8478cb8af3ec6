//! Short names for content: the same on every machine and in every run, unlike the hashes of `std`.

use std::fmt::{self, Write};

use vipgate_dataplane::snapshot::spec::PolicySet;

/// FNV-1a, 64 bits. Not against attackers: whoever writes policy has no use for two policies of one version.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fingerprint(u64);

impl Fingerprint {
    pub(super) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The value with all bits mixed: FNV alone leaves the high bits of short inputs alike.
    pub(super) fn finish(self) -> u64 {
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

impl Write for Fingerprint {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}

/// The version of a policy, from all of it but its version.
pub(super) fn version(set: &PolicySet) -> String {
    let PolicySet { version: _, policies, vips, endpoints } = set;
    let mut print = Fingerprint::new();
    for policy in policies {
        // Debug is as stable as the types are, and says every field; writing into a fingerprint can't fail.
        let _ = writeln!(print, "{policy:?}");
    }
    for vip in vips {
        let _ = writeln!(print, "{vip:?}");
    }
    for endpoint in endpoints {
        let _ = writeln!(print, "{endpoint:?}");
    }
    format!("{:016x}", print.finish())
}
