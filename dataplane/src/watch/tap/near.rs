//! What packets on the short way are asked, which has only their addresses at hand.

use ipnet::IpNet;

use super::filter::TapFilter;
use crate::address::{Address, V6};

/// What packets on the short way are asked, in each family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub v4: Near,
    pub v6: Near,
}

/// Which packets on the short way may match.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// None.
    Nobody,
    /// Those that have an address in this, before or after.
    In(Prefix),
    /// Each.
    Everybody,
}

/// A prefix of addresses as they stand in packets, for [`Address::is_one`].
#[derive(Clone, Copy, Debug)]
pub struct Prefix {
    mask: [u32; 4],
    first: [u32; 4],
}

impl Prefix {
    /// `None` if it is of the other family.
    fn of<A: Address>(net: IpNet) -> Option<Self> {
        let first = A::from_ip(net.network())?;
        let last = first.last_of_prefix(net.prefix_len());
        let [first, last] = [first, last].map(|it| it.in_packet_order().quad());
        Some(Self { mask: std::array::from_fn(|i| !(first[i] ^ last[i])), first })
    }

    /// Whether a packet has an address in it, before or after.
    #[inline]
    pub fn has<A: Address>(&self, [source, destination]: [A; 2], [to_source, to_destination]: [A; 2]) -> bool {
        A::is_one([source, destination, to_source, to_destination], self.mask, self.first)
    }
}

impl Asked {
    pub(super) fn by(filter: &TapFilter) -> Self {
        Self { v4: Near::of::<u32>(filter), v6: Near::of::<V6>(filter) }
    }
}

impl Near {
    fn of<A: Address>(filter: &TapFilter) -> Self {
        let Some(net) = filter.nets.first() else { return Self::Everybody };
        Prefix::of::<A>(*net).map_or(Self::Nobody, Self::In)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use ipnet::{Ipv4Net, Ipv6Net};
    use proptest::prelude::*;

    use super::*;

    /// Addresses that differ from the first in one bit each, or not.
    fn beside<A: Address>(first: u128, flips: [u8; 4]) -> [A; 4] {
        let to_ip = |bits: u128| match A::BITS {
            32 => IpAddr::from((bits as u32).to_be_bytes()),
            _ => IpAddr::from(bits.to_be_bytes()),
        };
        flips.map(|flip| A::from_ip(to_ip(first ^ 1_u128.checked_shl(flip.into()).unwrap_or(0))).unwrap())
    }

    fn agrees<A: Address>(net: IpNet, addresses: [A; 4]) -> bool {
        let expected = addresses.iter().any(|address| net.contains(&address.to_ip()));
        let [a, b, c, d] = addresses.map(Address::in_packet_order);
        Prefix::of::<A>(net).unwrap().has([a, b], [c, d]) == expected
    }

    proptest! {
        #[test]
        fn a_prefix_has_what_ipnet_says(
            first: u128, length in 0_u8..=128, flips in prop::array::uniform4(0_u8..=128),
        ) {
            let v4 = Ipv4Net::new((first as u32).into(), length % 33).unwrap();
            let v6 = Ipv6Net::new(first.into(), length).unwrap();
            prop_assert!(agrees::<V6>(v6.into(), beside(first, flips)), "{v6}");
            prop_assert!(agrees::<u32>(v4.into(), beside(first, flips.map(|flip| flip % 33))), "{v4}");
            prop_assert!(Prefix::of::<u32>(v6.into()).is_none() && Prefix::of::<V6>(v4.into()).is_none());
        }
    }
}
