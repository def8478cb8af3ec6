//! Key agreement for tunnels between gateways: each process generates an X25519 key (RFC 7748) and reports its public
//! key to the policy server; the membership view distributes it. HKDF (RFC 5869) derives one tag key per direction from
//! the shared secret.
//!
//! The HKDF info contains the names and public keys of sender and receiver, so no two directions, pairs or processes
//! share a key. Keys are as trustworthy as the connection to the policy server. A process leaves its private key to the
//! next one on its host, as that of its certificate.

use std::fmt;

use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use vipgate_dataplane::wire::tunnel_auth::TagKey;
use x25519_dalek::{PublicKey, StaticSecret};

/// HKDF salt: names the protocol and its version.
const SALT: &[u8] = b"vipgate tunnel tag 1";

/// A gateway's X25519 public key.
pub type TunnelKey = [u8; 32];

/// The X25519 private key of this process.
pub struct TunnelSecret {
    secret: StaticSecret,
    public: TunnelKey,
}

/// The secret is never printed.
impl fmt::Debug for TunnelSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TunnelSecret(..)")
    }
}

/// One end of a tunnel.
#[derive(Clone, Copy, Debug)]
pub struct TunnelEnd<'a> {
    /// The gateway's name.
    pub name: &'a str,
    /// The public key of its process.
    pub key: &'a TunnelKey,
}

/// Tag keys of both directions of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagKeys {
    /// For packets that this gateway sends.
    pub transmit_key: TagKey,
    /// For packets that it receives.
    pub receive_key: TagKey,
}

impl TunnelSecret {
    /// Generates a key.
    ///
    /// # Errors
    /// When no random numbers are available.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        Ok(Self::new(bytes))
    }

    /// The private key with these bytes, which [`TunnelSecret::to_bytes`] has returned.
    pub fn new(bytes: [u8; 32]) -> Self {
        let secret = StaticSecret::from(bytes);
        let public = PublicKey::from(&secret).to_bytes();
        Self { secret, public }
    }

    /// The bytes of the private key, for the session state directory only.
    pub fn to_bytes(&self) -> [u8; 32] {
        self.secret.to_bytes()
    }

    /// The public key.
    pub fn public(&self) -> &TunnelKey {
        &self.public
    }

    /// Derives the tag keys that the gateway of this name shares with another one. `None` if the peer's public key is a
    /// low-order point, for which the shared secret is predictable (RFC 7748, section 6.1).
    pub fn derive_tag_keys(&self, name: &str, other: TunnelEnd<'_>) -> Option<TagKeys> {
        let shared = self.secret.diffie_hellman(&PublicKey::from(*other.key));
        if !shared.was_contributory() {
            return None;
        }
        let own = TunnelEnd { name, key: &self.public };
        let derive = |from: TunnelEnd<'_>, to: TunnelEnd<'_>| {
            let lengths = [from.name, to.name].map(|name| (name.len() as u64).to_be_bytes());
            let info =
                [&lengths[0][..], from.name.as_bytes(), &lengths[1], to.name.as_bytes(), &from.key[..], &to.key[..]];
            let secret = Salt::new(HKDF_SHA256, SALT).extract(shared.as_bytes());
            let mut bytes = [0; TAG_KEY_BYTES];
            secret.expand(&info, TagKeyLength).and_then(|okm| okm.fill(&mut bytes)).ok()?;
            Some(TagKey::new(&bytes))
        };
        Some(TagKeys { transmit_key: derive(own, other)?, receive_key: derive(other, own)? })
    }
}

const TAG_KEY_BYTES: usize = 16;

/// Output length for HKDF.
struct TagKeyLength;

impl KeyType for TagKeyLength {
    fn len(&self) -> usize {
        TAG_KEY_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(own: (&str, &TunnelSecret), other: (&str, &TunnelSecret)) -> TagKeys {
        own.1.derive_tag_keys(own.0, TunnelEnd { name: other.0, key: other.1.public() }).unwrap()
    }

    #[test]
    fn both_ends_derive_the_same_keys_and_no_other_pair_does() {
        let [a, b, c] = [(); 3].map(|()| TunnelSecret::generate().unwrap());
        let (at_a, at_b) = (keys(("a", &a), ("b", &b)), keys(("b", &b), ("a", &a)));
        assert!(at_a.transmit_key == at_b.receive_key && at_a.receive_key == at_b.transmit_key);
        let others = [
            keys(("a", &a), ("c", &c)),
            keys(("c", &c), ("b", &b)),
            // Other names with the same keys, and names whose concatenation is the same.
            keys(("a", &a), ("bb", &b)),
            keys(("ab", &a), ("b", &b)),
        ];
        let mut all: Vec<TagKey> = others.iter().flat_map(|keys| [keys.transmit_key, keys.receive_key]).collect();
        all.extend([at_a.transmit_key, at_a.receive_key]);
        for (number, key) in all.iter().enumerate() {
            assert!(all[number + 1..].iter().all(|other| other != key), "{number}");
        }
    }

    #[test]
    fn a_low_order_public_key_is_rejected() {
        let own = TunnelSecret::generate().unwrap();
        let one = std::array::from_fn(|at| u8::from(at == 0));
        for low in [[0; 32], one] {
            assert_eq!(own.derive_tag_keys("a", TunnelEnd { name: "b", key: &low }), None);
        }
        assert_eq!(format!("{own:?}"), "TunnelSecret(..)");
    }
}
