//! Identity of a gateway's process: a secret that only the policy server sees; all others see its commitment, the
//! SHA-256. The incarnation is a part of the commitment, so an incarnation copied from a view is useless without the
//! secret.

use std::fmt;

use ring::digest::{SHA256, digest};

/// SHA-256 of a secret.
pub type Commitment = [u8; 32];

/// A process's secret: 32 random bytes. It is never logged or shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A secret of these bytes, which must be random.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// A secret from the bytes of a message or a file; `None` if there aren't 32 of them.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The secret bytes, for the policy server and the session state directory only.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its public commitment.
    pub fn commitment(&self) -> Commitment {
        let mut commitment = [0; 32];
        commitment.copy_from_slice(digest(&SHA256, &self.0).as_ref());
        commitment
    }

    /// The incarnation of the process.
    pub fn incarnation(&self) -> u64 {
        incarnation_of(&self.commitment())
    }

    /// Whether it opens this commitment.
    pub fn opens(&self, commitment: &Commitment) -> bool {
        self.commitment() == *commitment
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The incarnation of the process with this commitment: its first 8 bytes, never 0.
pub fn incarnation_of(commitment: &Commitment) -> u64 {
    let first = commitment.iter().take(size_of::<u64>());
    first.fold(0, |number, byte| number << 8 | u64::from(*byte)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_opens_only_its_own_commitment_and_is_not_shown_by_debug() {
        let (one, other) = (Secret::new([1; 32]), Secret::new([2; 32]));
        assert!(one != other && one.incarnation() != other.incarnation() && one.incarnation() != 0);
        assert!(one.opens(&one.commitment()) && !one.opens(&other.commitment()));
        assert_eq!(Secret::from_slice(one.bytes()), Some(one.clone()));
        assert_eq!((Secret::from_slice(&[]), Secret::from_slice(&[0; 33])), (None, None));
        assert_eq!(format!("{one:?}"), "Secret(..)");
        assert_eq!(incarnation_of(&[0; 32]), 1);
    }
}
