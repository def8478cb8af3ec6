//! The 5-tuple of a packet, and its keyed hash.

use bytemuck::AnyBitPattern;

use super::key::Key;
use crate::flow::address::Address;
use crate::flow::listener::Listener;

/// Addresses, ports and protocol of a packet. ICMP echo: the identifier is the requester's port; the other port is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, AnyBitPattern)]
#[repr(C)]
pub struct Tuple<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    pub source_port: u16,
    pub destination_port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

impl<A: Address> Tuple<A> {
    /// A tuple with only the source address set: the key of everything from this source.
    #[must_use]
    pub fn only_source(self) -> Self {
        Self { source: self.source, ..Self::default() }
    }

    /// Whether the packet is a martian: an address that is never forwarded, or source and destination are equal. A
    /// hairpinned packet may return to its sender's address.
    pub fn is_martian(&self, is_hairpin: bool) -> bool {
        self.source.is_martian_source()
            || self.destination.is_martian()
            || (self.source == self.destination && !is_hairpin)
    }

    /// Whether a host on the link sent it from a link-local address to another kind of address. It is a martian, since
    /// no router forwards it (RFC 3927 section 7, RFC 4291 section 2.5.6), but the gateway itself may reply.
    pub fn is_from_link(&self) -> bool {
        self.source.is_link_local() && !self.destination.is_martian()
    }

    /// The listener that its packets are addressed to.
    #[inline]
    pub fn receiver(&self) -> Listener<A> {
        Listener { address: self.destination, port: self.destination_port, protocol: self.protocol }
    }

    /// The listener at its source.
    #[inline]
    pub fn sender(&self) -> Listener<A> {
        Listener { address: self.source, port: self.source_port, protocol: self.protocol }
    }

    /// The tuple of a reply.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: self.protocol,
        }
    }
}

/// Secret key of a table's hash, random at each start, so that collisions can't be provoked from outside.
#[derive(Clone, Copy, Debug)]
pub struct HashKey([u64; 4]);

impl HashKey {
    /// A key from random numbers.
    pub fn new(random: [u64; 4]) -> Self {
        Self(random)
    }

    /// A fixed key, for choices that several gateways must agree on. Never for a table.
    pub const fn fixed() -> Self {
        Self([0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89])
    }

    /// The secret itself, to be stored where only its owner can read it.
    pub(crate) fn words(&self) -> [u64; 4] {
        self.0
    }

    /// Hash of a tuple.
    pub fn hash<A: Address>(&self, tuple: &Tuple<A>) -> u64 {
        self.hash_key(&Key::of(tuple))
    }

    /// Hash of a tuple's key; equal to the tuple's hash.
    ///
    /// Two rounds of multiply-and-fold, both with secrets: about 2 ns, and pipelined over a batch.
    #[inline]
    pub fn hash_key<A: Address>(&self, key: &Key<A>) -> u64 {
        let [k0, k1, k2, k3] = self.0;
        let [first, second, third, fourth, rest] = key.words();
        if A::BITS == 32 {
            return fold(fold(first ^ k0, rest ^ k1) ^ k2, rest ^ k3);
        }
        let high = fold(first ^ k2, third ^ k3);
        let low = fold(second ^ k0, fourth.rotate_left(32) ^ rest ^ k1);
        fold(low ^ high.rotate_left(29) ^ k1, rest ^ k0 ^ high)
    }

    /// Hashes of the first address, and of the pair: one multiplication each. Weak for a hash table, but the values are
    /// never visible outside.
    #[inline]
    pub(crate) fn hash_pair<A: Address>(&self, one: A, other: A) -> [u64; 2] {
        let [k0, k1, k2, k3] = self.0;
        let [first, second, third, fourth] = A::pair_words(one, other);
        if A::BITS == 32 {
            return [fold(first << 32 ^ k0, k1 | 1), fold(first ^ k2, k3 | 1)];
        }
        let own = fold(first ^ k0, second ^ k1);
        [own, fold(own ^ third ^ k2, fourth ^ k3)]
    }

    /// Keyed pseudorandom function of a counter: unpredictable without the key.
    #[inline]
    pub fn draw(&self, counter: u64) -> u64 {
        let [k0, k1, k2, k3] = self.0;
        fold(fold(counter ^ k0, k1 | 1) ^ k2, k3 ^ counter.rotate_left(32))
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_spread_and_depend_on_the_key() {
        let key =
            HashKey::new([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaef1_7502_108e_f2d9, 0x632b_e593_8a41_7d6f]);
        let other = HashKey::new([1, 2, 3, 4]);
        let mut buckets = [0_u32; 64];
        for port in 0..64_000_u32 {
            let tuple = Tuple {
                source: 0x0a00_0001_u32,
                destination: 9,
                source_port: port as u16,
                destination_port: 443,
                protocol: 6,
            };
            let hash = key.hash(&tuple);
            assert_ne!(hash, other.hash(&tuple));
            buckets[(hash >> 58) as usize] += 1;
        }
        // 1000 expected; a binomial deviates by 31.
        assert!(buckets.iter().all(|&n| (800..1200).contains(&n)), "{buckets:?}");
    }
}
