//! Senders: which gateways' tunnel packets come from an address, and how they are told from forged ones. Almost always that is one. But where a
//! gateway has replaced another one, the view may have both names with one address for a while, and only one of them lives.
//!
//! What a tunnel packet is asked stands side by side, found by one look at a small table: every tunnel packet comes by here first.

use std::net::IpAddr;

use foldhash::HashSet;

use super::members::Authentication;
use super::reverse_path::Interfaces;
use crate::address::{Address, V6};
use crate::io::InterfaceId;

/// The buckets of addresses: see [`Address::bucket`]. Of as many gateways as there can be, nine of ten have one for themselves.
const BUCKETS: usize = 2048;

/// A gateway that sends tunnel packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    address: IpAddr,
    /// Where its packets may come in.
    from: Interfaces,
    /// How its packets are told from forged ones.
    authentication: Authentication,
}

impl Sender {
    pub(super) fn new(address: IpAddr, from: Interfaces, authentication: Authentication) -> Self {
        Self { address, from, authentication }
    }

    fn is_tagged(&self) -> bool {
        matches!(self.authentication, Authentication::Tagged { .. })
    }

    /// Whether its packets may come in on an interface.
    #[inline]
    pub fn may_come_by(&self, interface: InterfaceId) -> bool {
        self.from.contains(interface)
    }

    /// Whether it has sent an inner frame.
    #[inline]
    pub fn is_authentic(&self, inner: &[u8], vni: u32) -> bool {
        match &self.authentication {
            Authentication::None => true,
            Authentication::Tagged { taken, .. } => taken.iter().flatten().any(|key| key.verifies(inner, vni)),
            Authentication::Refused => false,
        }
    }
}

/// All of them, by address.
#[derive(Debug, Default)]
pub(super) struct Senders {
    /// In the order of their buckets.
    list: Vec<Sender>,
    /// Where those of a bucket begin, and how many they are: there are no more gateways than a byte counts.
    buckets: Box<[(u8, u8)]>,
}

impl Senders {
    /// The senders of a group.
    pub(super) fn new(mut list: Vec<Sender>) -> Self {
        // A name that has no key must not let in what another one at its address would have to tag.
        let tagged: HashSet<IpAddr> = list.iter().filter(|it| it.is_tagged()).map(|it| it.address).collect();
        list.retain(|it| it.authentication != Authentication::None || !tagged.contains(&it.address));
        list.sort_by_key(|sender| bucket(sender.address));
        let mut buckets = vec![(0, 0); BUCKETS];
        for (sender, at) in list.iter().zip(0..u8::MAX) {
            let (first, count) = &mut buckets[bucket(sender.address)];
            *first = if *count == 0 { at } else { *first };
            *count += 1;
        }
        Self { list, buckets: buckets.into_boxed_slice() }
    }

    /// Those that send from an address.
    #[inline]
    pub(super) fn at(&self, address: IpAddr) -> impl Iterator<Item = &Sender> {
        let (first, count) = self.buckets.get(bucket(address)).copied().unwrap_or_default();
        let near = self.list.get(usize::from(first)..usize::from(first) + usize::from(count)).unwrap_or_default();
        near.iter().filter(move |sender| sender.address == address)
    }
}

#[inline]
fn bucket(address: IpAddr) -> usize {
    match address {
        IpAddr::V4(v4) => v4.to_bits().bucket(),
        IpAddr::V6(v6) => V6::from_bits(v6.to_bits()).bucket(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::members::MOST_GATEWAYS;
    use crate::wire::tunnel_tag::TagKey;

    fn sender(address: IpAddr, number: u8) -> Sender {
        let key = TagKey::new(&[number; 16]);
        Sender::new(address, Interfaces::default(), Authentication::Tagged { sent: key, taken: [Some(key), None] })
    }

    #[test]
    fn who_has_no_key_opens_no_way_around_the_key_of_another_one_at_its_address() {
        let ip = |n: u8| IpAddr::from([10, 2, 0, n]);
        let without = |n| Sender::new(ip(n), Interfaces::default(), Authentication::None);
        let senders = Senders::new(vec![without(1), sender(ip(1), 7), without(2), without(2)]);
        assert_eq!(senders.at(ip(1)).collect::<Vec<_>>(), [&sender(ip(1), 7)]);
        assert_eq!(senders.at(ip(2)).count(), 2, "where nobody has one, packets are known by their address");
    }

    #[test]
    fn all_that_send_from_an_address_are_found_there_and_nobody_else() {
        for v6 in [false, true] {
            let ip =
                |n: u8| if v6 { IpAddr::from([0xfd00, 2, 0, 0, 0, 0, 0, u16::from(n)]) } else { [10, 2, 0, n].into() };
            // As many as there can be, of which every fifth one has the same address.
            let all: Vec<Sender> =
                (0..MOST_GATEWAYS as u8).map(|n| sender(ip(if n.is_multiple_of(5) { 255 } else { n }), n)).collect();
            let senders = Senders::new(all.clone());
            for n in 0..=255 {
                let expected: Vec<&Sender> = all.iter().filter(|it| it.address == ip(n)).collect();
                assert_eq!(senders.at(ip(n)).collect::<Vec<_>>(), expected, "{}", ip(n));
                assert_eq!(Senders::default().at(ip(n)).next(), None);
            }
        }
    }
}
