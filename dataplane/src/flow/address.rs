//! IP addresses as the tables hold them: integers in host byte order, one type per family.
//!
//! `wire/` converts from and to network byte order; no other module of the engine knows of byte order.

use std::fmt::Debug;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytemuck::{Pod, Zeroable};

use super::special_purpose;

/// IPv4 addresses are `u32`, IPv6 addresses are [`V6`].
pub trait Address: Copy + Clone + Eq + Ord + Hash + Debug + Default + Send + Pod {
    /// Bits in an address.
    const BITS: u8;
    /// The highest address.
    const MAX: Self;

    /// The address in `ip`, if it is of this family.
    fn from_ip(ip: IpAddr) -> Option<Self>;
    /// The address as a `std::net` type, for output.
    fn to_ip(self) -> IpAddr;
    /// The next higher address; `None` after the highest.
    fn next(self) -> Option<Self>;
    /// The last address of the prefix of `length` bits that starts at this address.
    fn last_of_prefix(self, length: u8) -> Self;
    /// The sum of its 16-bit words, not folded: its contribution to an Internet checksum (RFC 1071).
    fn word_sum(self) -> u32;
    /// Two addresses packed into as few 64-bit words as they fill; the other words are 0.
    fn pair_words(one: Self, other: Self) -> [u64; 4];
    /// Its bits as four 32-bit words; an address of fewer bits is repeated.
    fn to_u32x4(self) -> [u32; 4];
    /// Whether any of the four addresses, masked, equals `wanted`; `mask` and `wanted` as [`Address::to_u32x4`] returns
    /// them.
    fn any_matches(addresses: [Self; 4], mask: [u32; 4], wanted: [u32; 4]) -> bool;
    /// Whether no packet to it is forwarded, as the table of [special-purpose addresses](special_purpose) says: among
    /// others unspecified, loopback, link-local, multicast and reserved addresses.
    ///
    /// One jump by the first bytes, at most two compares behind it. Only addresses in the two blocks that IANA assigns
    /// from piece by piece (192.0.0.0/24, 2001::/23) are looked up in the table. The fast path doesn't check.
    fn is_martian(self) -> bool;
    /// Whether no packet from it is forwarded.
    #[inline]
    fn is_martian_source(self) -> bool {
        self.is_martian()
    }
    /// Whether it is a unicast address that is valid on one link only (RFC 3927, RFC 4291 section 2.5.6).
    fn is_link_local(self) -> bool;
    /// A hash whose upper bits are spread evenly over neighboring addresses. Not keyed, so not resistant to attackers.
    fn mix(self) -> u32;
    /// A second, independent hash: addresses that collide in the upper bits of [`Address::mix`] rarely collide here.
    fn mix_alternative(self) -> u32;
    /// One of 2048 buckets.
    #[inline]
    fn bucket(self) -> usize {
        (self.mix() >> 21) as usize
    }
    /// Converts between host byte order and the byte order of a packet in memory; the conversion is its own inverse.
    fn swap_network_order(self) -> Self;
    /// The value of this family.
    fn pick<P: PerFamily>(of: &P) -> &P::Of<Self>;
}

/// The value of an expression about an address of either family, for which `it` is of that family's type.
macro_rules! of_family {
    ($address:expr, $it:ident => $value:expr) => {
        match $address {
            ::std::net::IpAddr::V4(v4) => {
                let $it = v4.to_bits();
                $value
            }
            ::std::net::IpAddr::V6(v6) => {
                let $it = $crate::flow::address::V6::from_bits(v6.to_bits());
                $value
            }
        }
    };
}
pub(crate) use of_family;

/// Two values of the same shape, one for each address family.
pub trait PerFamily {
    /// The value of one family.
    type Of<A: Address>;
    /// The value of IPv4.
    fn v4(&self) -> &Self::Of<u32>;
    /// The value of IPv6.
    fn v6(&self) -> &Self::Of<V6>;
}

impl Address for u32 {
    const BITS: u8 = 32;
    const MAX: Self = Self::MAX;

    fn from_ip(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(v4) => Some(v4.to_bits()),
            IpAddr::V6(_) => None,
        }
    }

    fn to_ip(self) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(self))
    }

    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }

    fn last_of_prefix(self, length: u8) -> Self {
        self | Self::MAX.checked_shr(length.into()).unwrap_or(0)
    }

    #[inline]
    fn word_sum(self) -> u32 {
        (self >> 16) + (self & 0xffff)
    }

    #[inline]
    fn pair_words(one: Self, other: Self) -> [u64; 4] {
        [u64::from(one) | u64::from(other) << 32, 0, 0, 0]
    }

    #[inline]
    fn to_u32x4(self) -> [u32; 4] {
        [self; 4]
    }

    #[inline]
    #[expect(clippy::needless_bitwise_bool, reason = "without a branch for each address, all four are one vector")]
    fn any_matches(addresses: [Self; 4], mask: [u32; 4], wanted: [u32; 4]) -> bool {
        (0..4).fold(false, |is_one, i| is_one | (addresses[i] & mask[i] == wanted[i]))
    }

    #[inline]
    fn is_martian(self) -> bool {
        match self >> 24 {
            0 | 127 | 224.. => true,
            169 => self.is_link_local(),
            192 => self >> 8 == 0x00c0_0000 && special_purpose::is_martian(self.to_ip()),
            _ => false,
        }
    }

    #[inline]
    fn is_martian_source(self) -> bool {
        self.is_martian() && self != special_purpose::DUMMY_V4
    }

    #[inline]
    fn is_link_local(self) -> bool {
        self >> 16 == 0xa9fe
    }

    #[inline]
    fn mix(self) -> u32 {
        // Multiplicative hashing: neighboring addresses of a subnet get distant hashes.
        self.wrapping_mul(0x9e37_79b1)
    }

    #[inline]
    fn mix_alternative(self) -> u32 {
        self.wrapping_mul(0x85eb_ca6b)
    }

    #[inline]
    fn swap_network_order(self) -> Self {
        self.to_be()
    }

    fn pick<P: PerFamily>(of: &P) -> &P::Of<Self> {
        of.v4()
    }
}

/// An IPv6 address as its upper and lower half. Ordered like its 128-bit integer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct V6 {
    /// The upper 64 bits.
    pub high: u64,
    /// The lower 64 bits.
    pub low: u64,
}

impl V6 {
    /// The address with these bits.
    #[inline]
    pub fn from_bits(bits: u128) -> Self {
        Self { high: (bits >> 64) as u64, low: bits as u64 }
    }

    /// Its bits as one integer.
    #[inline]
    pub fn to_bits(self) -> u128 {
        u128::from(self.high) << 64 | u128::from(self.low)
    }
}

impl Address for V6 {
    const BITS: u8 = 128;
    const MAX: Self = Self { high: u64::MAX, low: u64::MAX };

    fn from_ip(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(Self::from_bits(v6.to_bits())),
        }
    }

    fn to_ip(self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from_bits(self.to_bits()))
    }

    fn next(self) -> Option<Self> {
        self.to_bits().checked_add(1).map(Self::from_bits)
    }

    fn last_of_prefix(self, length: u8) -> Self {
        Self::from_bits(self.to_bits() | u128::MAX.checked_shr(length.into()).unwrap_or(0))
    }

    #[inline]
    fn word_sum(self) -> u32 {
        let half = |n: u64| {
            let sum = (n >> 32) + (n & 0xffff_ffff);
            ((sum >> 32) + ((sum >> 16) & 0xffff) + (sum & 0xffff)) as u32
        };
        half(self.high) + half(self.low)
    }

    #[inline]
    fn pair_words(one: Self, other: Self) -> [u64; 4] {
        [one.high, one.low, other.high, other.low]
    }

    #[inline]
    fn to_u32x4(self) -> [u32; 4] {
        let [high, low] = [self.high, self.low].map(|half| [half as u32, (half >> 32) as u32]);
        [high[0], high[1], low[0], low[1]]
    }

    #[inline]
    fn any_matches(addresses: [Self; 4], mask: [u32; 4], wanted: [u32; 4]) -> bool {
        let halves = |quad: [u32; 4]| [0, 2].map(|at| u64::from(quad[at]) | u64::from(quad[at + 1]) << 32);
        let (mask, wanted) = (halves(mask), halves(wanted));
        let differs = |it: Self| ((it.high & mask[0]) ^ wanted[0]) | ((it.low & mask[1]) ^ wanted[1]);
        addresses.into_iter().fold(false, |is_one, it| is_one | (differs(it) == 0))
    }

    #[inline]
    fn is_martian(self) -> bool {
        match self.high >> 48 {
            0 => self.high == 0 && (self.low <= 1 || self.low >> 32 == 0xffff),
            0x0100 => self.high == 0x0100_0000_0000_0001,
            0x2001 => self.high >> 41 == 0x2001_0000 >> 9 && special_purpose::is_martian(self.to_ip()),
            0xfe80..=0xfebf | 0xff00.. => true,
            _ => false,
        }
    }

    #[inline]
    fn is_link_local(self) -> bool {
        self.high >> 54 == 0xfe80 >> 6
    }

    #[inline]
    fn mix(self) -> u32 {
        ((self.high.rotate_left(32) ^ self.low).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
    }

    #[inline]
    fn mix_alternative(self) -> u32 {
        ((self.high.rotate_left(32) ^ self.low).wrapping_mul(0xc2b2_ae3d_27d4_eb4f) >> 32) as u32
    }

    #[inline]
    fn swap_network_order(self) -> Self {
        Self { high: self.high.to_be(), low: self.low.to_be() }
    }

    fn pick<P: PerFamily>(of: &P) -> &P::Of<Self> {
        of.v6()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_address_of_a_prefix_has_all_host_bits_set() {
        assert_eq!(0x0a00_0000_u32.last_of_prefix(8), 0x0aff_ffff);
        assert_eq!(0_u32.last_of_prefix(0), u32::MAX);
        assert_eq!(7_u32.last_of_prefix(32), 7);
        assert_eq!(V6::from_bits(1 << 64).last_of_prefix(64), V6 { high: 1, low: u64::MAX });
        assert_eq!(V6::default().last_of_prefix(0), V6::MAX);
    }

    #[test]
    fn martian_addresses_are_recognized() {
        let is_martian = |text: &str| match text.parse().unwrap() {
            IpAddr::V4(v4) => v4.to_bits().is_martian(),
            IpAddr::V6(v6) => V6::from_bits(v6.to_bits()).is_martian(),
        };
        let v4 =
            ["0.1.2.3", "127.0.0.1", "169.254.169.254", "192.0.0.170", "224.0.0.1", "240.0.0.1", "255.255.255.255"];
        let v6 = ["::", "::1", "100:0:0:1::1", "2001:1::4", "fe80::1", "febf::1", "ff02::1", "::ffff:192.0.2.1"];
        for martian in v4.into_iter().chain(v6) {
            assert!(is_martian(martian), "{martian}");
        }
        let v4 =
            ["1.0.0.0", "126.0.0.1", "128.0.0.1", "169.253.255.255", "169.255.0.0", "192.0.0.9", "223.255.255.255"];
        for fine in v4.into_iter().chain(["2001:db8::1", "fd00::1", "fec0::1", "::2", "64:ff9b::192.0.2.1", "2002::1"])
        {
            assert!(!is_martian(fine), "{fine}");
        }
        // Laboratories and clusters.
        for fine in ["10.0.0.1", "100.64.0.1", "192.168.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"]
        {
            assert!(!is_martian(fine), "{fine}");
        }
    }

    #[test]
    fn word_sums_equal_the_sums_of_the_bytes() {
        let sum = |bytes: &[u8]| {
            let total: u32 = bytes.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
            total % 0xffff
        };
        let v4 = Ipv4Addr::new(203, 0, 113, 254);
        assert_eq!(v4.to_bits().word_sum() % 0xffff, sum(&v4.octets()));
        let v6: Ipv6Addr = "2001:db8:ffff:fffe:8000:1:abcd:ffff".parse().unwrap();
        assert_eq!(V6::from_bits(v6.to_bits()).word_sum() % 0xffff, sum(&v6.octets()));
    }
}
