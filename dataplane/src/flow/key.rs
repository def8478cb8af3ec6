//! Table key of one direction: a tuple in network byte order, so that lookups need no byte swaps.

use bytemuck::{AnyBitPattern, cast};

use super::tuple::Tuple;
use crate::flow::address::Address;

/// A tuple in network byte order.
#[derive(Clone, Copy, Debug, Default, AnyBitPattern)]
#[repr(C)]
pub struct Key<A> {
    source: A,
    destination: A,
    ports: u32,
    /// 32 bits, so that it forms one word with the ports.
    protocol: u32,
}

impl<A: Address> Key<A> {
    /// The key of a tuple.
    #[inline]
    pub fn of(tuple: &Tuple<A>) -> Self {
        let ports = [tuple.source_port.to_be(), tuple.destination_port.to_be()];
        let (source, destination) = (tuple.source.swap_network_order(), tuple.destination.swap_network_order());
        Self { source, destination, ports: cast(ports), protocol: tuple.protocol.into() }
    }

    /// Key from header fields, in network byte order.
    #[inline]
    pub fn from_packet(source: A, destination: A, ports: [u8; 4], protocol: u8) -> Self {
        Self { source, destination, ports: cast(ports), protocol: protocol.into() }
    }

    /// Overwrites this key field by field: a key that is built first and then moved stalls the processor.
    #[inline]
    pub fn set(&mut self, source: A, destination: A, ports: [u8; 4], protocol: u8) {
        self.source = source;
        self.destination = destination;
        self.ports = cast(ports);
        self.protocol = protocol.into();
    }

    /// The tuple of a key.
    #[inline]
    pub fn tuple(&self) -> Tuple<A> {
        let [source_port, destination_port]: [u16; 2] = cast(self.ports);
        Tuple {
            source: self.source.swap_network_order(),
            destination: self.destination.swap_network_order(),
            source_port: u16::from_be(source_port),
            destination_port: u16::from_be(destination_port),
            protocol: self.protocol(),
        }
    }

    /// Addresses and ports, in network byte order.
    #[inline]
    pub fn in_packet(&self) -> ([A; 2], [u8; 4]) {
        ([self.source, self.destination], cast(self.ports))
    }

    /// IP protocol number.
    #[inline]
    pub fn protocol(&self) -> u8 {
        self.protocol as u8
    }

    /// The key as words: the addresses, then ports and protocol as five little-endian bytes.
    #[inline]
    pub fn words(&self) -> [u64; 5] {
        let [a, b, c, d] = A::pair_words(self.source, self.destination);
        [a, b, c, d, u64::from(self.ports.to_le()) | u64::from(self.protocol) << 32]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::flow::direction::Direction;
    use crate::session::entry::{Entry, Flags};

    proptest! {
        #[test]
        fn a_key_converts_to_its_tuple_and_compares_like_it(
            one: (u32, u32, u16, u16, u8),
            other: (u32, u32, u16, u16, u8),
            same: [bool; 5],
        ) {
            let tuple = |(source, destination, source_port, destination_port, protocol)| {
                Tuple { source, destination, source_port, destination_port, protocol }
            };
            let other = (
                if same[0] { one.0 } else { other.0 },
                if same[1] { one.1 } else { other.1 },
                if same[2] { one.2 } else { other.2 },
                if same[3] { one.3 } else { other.3 },
                if same[4] { one.4 } else { other.4 },
            );
            let (one, other) = (tuple(one), tuple(other));
            prop_assert_eq!(Key::of(&one).tuple(), one);
            prop_assert_eq!(Key::of(&one).words() == Key::of(&other).words(), one == other);
            let to = Tuple { protocol: one.protocol, ..other };
            let (from_pod, to_pod) = (Tuple { destination: one.destination, ..to }, Tuple { source: one.source, ..to });
            for (direction, to) in [
                (Direction::Egress, from_pod),
                (Direction::Reply, to_pod),
                (Direction::Inbound, to_pod),
                (Direction::ServiceReply, from_pod),
            ] {
                let entry = Entry::new(one, to, direction, Flags(0xff));
                prop_assert_eq!(entry.has_key(&Key::of(&other)), one == other);
                prop_assert_eq!((entry.key(), entry.translated()), (one, to));
                prop_assert_eq!((entry.flags(), entry.direction()), (Flags(0xff), direction));
            }
        }
    }

    #[test]
    fn a_key_has_network_byte_order() {
        let tuple = Tuple {
            source: 0x0a00_0001_u32,
            destination: 0xc000_0201,
            source_port: 0x1234,
            destination_port: 53,
            protocol: 17,
        };
        let (addresses, ports) = Key::of(&tuple).in_packet();
        assert_eq!(bytemuck::bytes_of(&addresses), [10, 0, 0, 1, 192, 0, 2, 1]);
        assert_eq!(ports, [0x12, 0x34, 0, 53]);
    }
}
