//! Keys of the tunnels between gateways: each process makes itself an X25519 key (RFC 7748) and tells the policy server its public half,
//! which the view shows to all. What two processes make of them, HKDF (RFC 5869) turns into a key for each direction.
//!
//! The information that HKDF is given names sender and receiver and both public keys, so no two directions, pairs or processes have a key
//! in common. Keys are as trustworthy as the way to the policy server, and are written nowhere.

use std::fmt;

use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use vipgate_dataplane::wire::tunnel_tag::TagKey;
use x25519_dalek::{PublicKey, StaticSecret};

/// What is derived, and its version.
const SALT: &[u8] = b"vipgate tunnel tag 1";

/// The public half of a gateway's key.
pub type TunnelKey = [u8; 32];

/// This process's key.
pub struct TunnelSecret {
    secret: StaticSecret,
    public: TunnelKey,
}

/// Secret: never shown.
impl fmt::Debug for TunnelSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TunnelSecret(..)")
    }
}

/// One end of a tunnel: who it is, and the key that it shows.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The gateway's name.
    pub name: &'a str,
    /// Its process's key.
    pub key: &'a TunnelKey,
}

/// The keys of both directions of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagKeys {
    /// Of what this gateway sends.
    pub sent: TagKey,
    /// Of what the other one does.
    pub taken: TagKey,
}

impl TunnelSecret {
    /// A new one.
    ///
    /// # Errors
    /// When there are no random numbers.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        let secret = StaticSecret::from(bytes);
        let public = PublicKey::from(&secret).to_bytes();
        Ok(Self { secret, public })
    }

    /// What others are shown.
    pub fn public(&self) -> &TunnelKey {
        &self.public
    }

    /// The keys that the gateway of this name and another one have; `None` if the other one's key is one that anybody could know the
    /// outcome of.
    pub fn keys_with(&self, name: &str, other: End<'_>) -> Option<TagKeys> {
        let shared = self.secret.diffie_hellman(&PublicKey::from(*other.key));
        if !shared.was_contributory() {
            return None;
        }
        let own = End { name, key: &self.public };
        let derive = |from: End<'_>, to: End<'_>| {
            let lengths = [from.name, to.name].map(|name| (name.len() as u64).to_be_bytes());
            let info =
                [&lengths[0][..], from.name.as_bytes(), &lengths[1], to.name.as_bytes(), &from.key[..], &to.key[..]];
            let secret = Salt::new(HKDF_SHA256, SALT).extract(shared.as_bytes());
            let mut bytes = [0; TAG_KEY];
            secret.expand(&info, TagKeyBytes).and_then(|okm| okm.fill(&mut bytes)).ok()?;
            Some(TagKey::new(&bytes))
        };
        Some(TagKeys { sent: derive(own, other)?, taken: derive(other, own)? })
    }
}

const TAG_KEY: usize = 16;

/// How much HKDF is to give.
struct TagKeyBytes;

impl KeyType for TagKeyBytes {
    fn len(&self) -> usize {
        TAG_KEY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(own: (&str, &TunnelSecret), other: (&str, &TunnelSecret)) -> TagKeys {
        own.1.keys_with(own.0, End { name: other.0, key: other.1.public() }).unwrap()
    }

    #[test]
    fn both_ends_make_the_same_keys_and_nobody_else_has_them() {
        let [a, b, c] = [(); 3].map(|()| TunnelSecret::generate().unwrap());
        let (at_a, at_b) = (keys(("a", &a), ("b", &b)), keys(("b", &b), ("a", &a)));
        assert!(at_a.sent == at_b.taken && at_a.taken == at_b.sent);
        let others = [
            keys(("a", &a), ("c", &c)),
            keys(("c", &c), ("b", &b)),
            // Other names with the same keys, and the same letters in other places.
            keys(("a", &a), ("bb", &b)),
            keys(("ab", &a), ("b", &b)),
        ];
        let mut all: Vec<TagKey> = others.iter().flat_map(|keys| [keys.sent, keys.taken]).collect();
        all.extend([at_a.sent, at_a.taken]);
        for (number, key) in all.iter().enumerate() {
            assert!(all[number + 1..].iter().all(|other| other != key), "{number}");
        }
    }

    #[test]
    fn a_key_whose_outcome_anybody_knows_gives_none() {
        let own = TunnelSecret::generate().unwrap();
        let one = std::array::from_fn(|at| u8::from(at == 0));
        for low in [[0; 32], one] {
            assert_eq!(own.keys_with("a", End { name: "b", key: &low }), None);
        }
        assert_eq!(format!("{own:?}"), "TunnelSecret(..)");
    }
}
