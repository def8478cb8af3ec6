//! Special-purpose addresses: IANA's registries of both families (RFC 6890, RFC 8190) and multicast, in one table. From
//! it follows which addresses are martians: in the packet path (`Address::is_martian`), in what policy may name, and in
//! tests.
//!
//! The registries are those of October 2025. An address in none of the blocks is ordinary unicast.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The address from which routers without an IPv4 address send ICMP errors (RFC 7600 section 4.8), as a number.
pub const DUMMY_V4: u32 = 0xc000_0008;

/// A block of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first address.
    pub network: IpAddr,
    /// Its prefix length, bits.
    pub length: u8,
    /// Its name in the registry.
    pub name: &'static str,
    /// The RFC that defines it.
    pub rfc: u16,
    /// What the registry says of it.
    pub registered: Attributes,
    /// Where the gateway differs from that.
    pub exception: Option<Exception>,
}

/// Attributes of a block (RFC 6890 section 2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// A packet may have such a source.
    pub source: bool,
    /// A packet may have such a destination.
    pub destination: bool,
    /// A router may forward packets from and to it.
    pub forwardable: bool,
}

/// How the gateway forwards what isn't forwardable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exception {
    /// From and to the block.
    Forwarded,
    /// From the block only.
    ForwardedFrom,
}

impl Attributes {
    const NONE: Self = Self { source: false, destination: false, forwardable: false };
    const SOURCE: Self = Self { source: true, ..Self::NONE };
    const DESTINATION: Self = Self { destination: true, ..Self::NONE };
    const ON_LINK: Self = Self { source: true, destination: true, forwardable: false };
    const FORWARDABLE: Self = Self { source: true, destination: true, forwardable: true };
}

/// The blocks of both families. Of several that contain an address, the most specific one counts.
///
/// Exceptions: laboratories and clusters use documentation prefixes; without the dummy address as a source, path MTU
/// discovery fails across routers that have no IPv4 address; 192.88.99.0/24 has no attributes any more. 240.0.0.0/4 is
/// no exception, although some clouds give it to pods.
pub const BLOCKS: &[Block] = &[
    v4([0, 0, 0, 0], 8, "This network", 791, Attributes::SOURCE),
    v4([0, 0, 0, 0], 32, "This host on this network", 1122, Attributes::SOURCE),
    v4([10, 0, 0, 0], 8, "Private-Use", 1918, Attributes::FORWARDABLE),
    v4([100, 64, 0, 0], 10, "Shared Address Space", 6598, Attributes::FORWARDABLE),
    v4([127, 0, 0, 0], 8, "Loopback", 1122, Attributes::NONE),
    v4([169, 254, 0, 0], 16, "Link Local", 3927, Attributes::ON_LINK),
    v4([172, 16, 0, 0], 12, "Private-Use", 1918, Attributes::FORWARDABLE),
    v4([192, 0, 0, 0], 24, "IETF Protocol Assignments", 6890, Attributes::NONE),
    v4([192, 0, 0, 0], 29, "IPv4 Service Continuity Prefix", 7335, Attributes::FORWARDABLE),
    v4([192, 0, 0, 8], 32, "IPv4 dummy address", 7600, Attributes::SOURCE).except(Exception::ForwardedFrom),
    v4([192, 0, 0, 9], 32, "Port Control Protocol Anycast", 7723, Attributes::FORWARDABLE),
    v4([192, 0, 0, 10], 32, "TURN Anycast", 8155, Attributes::FORWARDABLE),
    v4([192, 0, 0, 170], 31, "NAT64/DNS64 Discovery", 8880, Attributes::NONE),
    v4([192, 0, 2, 0], 24, "Documentation (TEST-NET-1)", 5737, Attributes::NONE).except(Exception::Forwarded),
    v4([192, 31, 196, 0], 24, "AS112-v4", 7535, Attributes::FORWARDABLE),
    v4([192, 52, 193, 0], 24, "AMT", 7450, Attributes::FORWARDABLE),
    v4([192, 88, 99, 0], 24, "Deprecated (6to4 Anycast)", 7526, Attributes::NONE).except(Exception::Forwarded),
    v4([192, 88, 99, 2], 32, "6a44 Anycast", 6751, Attributes::FORWARDABLE),
    v4([192, 168, 0, 0], 16, "Private-Use", 1918, Attributes::FORWARDABLE),
    v4([192, 175, 48, 0], 24, "Direct Delegation AS112 Service", 7534, Attributes::FORWARDABLE),
    v4([198, 18, 0, 0], 15, "Benchmarking", 2544, Attributes::FORWARDABLE),
    v4([198, 51, 100, 0], 24, "Documentation (TEST-NET-2)", 5737, Attributes::NONE).except(Exception::Forwarded),
    v4([203, 0, 113, 0], 24, "Documentation (TEST-NET-3)", 5737, Attributes::NONE).except(Exception::Forwarded),
    v4([224, 0, 0, 0], 4, "Multicast", 5771, Attributes::DESTINATION),
    v4([240, 0, 0, 0], 4, "Reserved", 1112, Attributes::NONE),
    v4([255, 255, 255, 255], 32, "Limited Broadcast", 919, Attributes::DESTINATION),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128, "Loopback Address", 4291, Attributes::NONE),
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128, "Unspecified Address", 4291, Attributes::SOURCE),
    v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96, "IPv4-mapped Address", 4291, Attributes::NONE),
    v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96, "IPv4-IPv6 Translation", 6052, Attributes::FORWARDABLE),
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48, "IPv4-IPv6 Translation", 8215, Attributes::FORWARDABLE),
    v6([0x100, 0, 0, 0, 0, 0, 0, 0], 64, "Discard-Only Address Block", 6666, Attributes::FORWARDABLE),
    v6([0x100, 0, 0, 1, 0, 0, 0, 0], 64, "Dummy IPv6 Prefix", 9780, Attributes::SOURCE),
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23, "IETF Protocol Assignments", 2928, Attributes::NONE),
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32, "TEREDO", 4380, Attributes::FORWARDABLE),
    v6([0x2001, 1, 0, 0, 0, 0, 0, 1], 128, "Port Control Protocol Anycast", 7723, Attributes::FORWARDABLE),
    v6([0x2001, 1, 0, 0, 0, 0, 0, 2], 128, "TURN Anycast", 8155, Attributes::FORWARDABLE),
    v6([0x2001, 1, 0, 0, 0, 0, 0, 3], 128, "DNS-SD Service Registration Anycast", 9665, Attributes::FORWARDABLE),
    v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48, "Benchmarking", 5180, Attributes::FORWARDABLE),
    v6([0x2001, 3, 0, 0, 0, 0, 0, 0], 32, "AMT", 7450, Attributes::FORWARDABLE),
    v6([0x2001, 4, 0x112, 0, 0, 0, 0, 0], 48, "AS112-v6", 7535, Attributes::FORWARDABLE),
    v6([0x2001, 0x10, 0, 0, 0, 0, 0, 0], 28, "Deprecated (previously ORCHID)", 4843, Attributes::NONE),
    v6([0x2001, 0x20, 0, 0, 0, 0, 0, 0], 28, "ORCHIDv2", 7343, Attributes::FORWARDABLE),
    v6([0x2001, 0x30, 0, 0, 0, 0, 0, 0], 28, "Drone Remote ID Entity Tags", 9374, Attributes::FORWARDABLE),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32, "Documentation", 3849, Attributes::NONE).except(Exception::Forwarded),
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16, "6to4", 3056, Attributes::FORWARDABLE),
    v6([0x2620, 0x4f, 0x8000, 0, 0, 0, 0, 0], 48, "Direct Delegation AS112", 7534, Attributes::FORWARDABLE),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20, "Documentation", 9637, Attributes::NONE).except(Exception::Forwarded),
    v6([0x5f00, 0, 0, 0, 0, 0, 0, 0], 16, "Segment Routing (SRv6) SIDs", 9602, Attributes::FORWARDABLE),
    v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7, "Unique-Local", 4193, Attributes::FORWARDABLE),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, "Link-Local Unicast", 4291, Attributes::ON_LINK),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8, "Multicast", 4291, Attributes::DESTINATION),
];

const fn v4(network: [u8; 4], length: u8, name: &'static str, rfc: u16, registered: Attributes) -> Block {
    Block { network: IpAddr::V4(Ipv4Addr::from_octets(network)), length, name, rfc, registered, exception: None }
}

const fn v6(network: [u16; 8], length: u8, name: &'static str, rfc: u16, registered: Attributes) -> Block {
    let network = IpAddr::V6(Ipv6Addr::from_segments(network));
    Block { network, length, name, rfc, registered, exception: None }
}

impl Block {
    const fn except(self, exception: Exception) -> Self {
        Self { exception: Some(exception), ..self }
    }

    /// Whether an address is in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        let common = match (self.network, address) {
            (IpAddr::V4(network), IpAddr::V4(v4)) => (network.to_bits() ^ v4.to_bits()).leading_zeros(),
            (IpAddr::V6(network), IpAddr::V6(v6)) => (network.to_bits() ^ v6.to_bits()).leading_zeros(),
            _ => return false,
        };
        common >= u32::from(self.length)
    }

    /// Whether the gateway forwards packets from it.
    pub fn is_forwarded_from(&self) -> bool {
        self.is_forwarded_to() || self.exception == Some(Exception::ForwardedFrom)
    }

    /// Whether the gateway forwards packets to it.
    pub fn is_forwarded_to(&self) -> bool {
        self.registered.forwardable || self.exception == Some(Exception::Forwarded)
    }
}

/// The most specific block that contains an address.
pub fn find(address: IpAddr) -> Option<&'static Block> {
    BLOCKS.iter().filter(|block| block.contains(address)).max_by_key(|block| block.length)
}

/// Whether no packet to an address is forwarded. Searches the table: the packet path does so for few addresses only.
#[cold]
pub fn is_martian(address: IpAddr) -> bool {
    find(address).is_some_and(|block| !block.is_forwarded_to())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::flow::address::{Address, V6, of_family};

    /// Whether an address is a martian, as a source and as a destination: by the packet path's checks.
    fn by_packet_path(address: IpAddr) -> [bool; 2] {
        fn of<A: Address>(address: A) -> [bool; 2] {
            [address.is_martian_source(), address.is_martian()]
        }
        of_family!(address, it => of(it))
    }

    /// The same by the table.
    fn by_table(address: IpAddr) -> [bool; 2] {
        find(address).map_or([false; 2], |block| [!block.is_forwarded_from(), !block.is_forwarded_to()])
    }

    /// The first and the last address of a block, and those next to it.
    fn edges(block: &Block) -> [IpAddr; 4] {
        match block.network {
            IpAddr::V4(network) => {
                let (first, last) = (network.to_bits(), network.to_bits().last_of_prefix(block.length));
                [first.wrapping_sub(1), first, last, last.wrapping_add(1)].map(|bits| Ipv4Addr::from_bits(bits).into())
            }
            IpAddr::V6(network) => {
                let first = network.to_bits();
                let last = V6::from_bits(first).last_of_prefix(block.length).to_bits();
                [first.wrapping_sub(1), first, last, last.wrapping_add(1)].map(|bits| Ipv6Addr::from_bits(bits).into())
            }
        }
    }

    #[test]
    fn the_packet_path_follows_each_row() {
        for block in BLOCKS {
            for address in edges(block) {
                assert_eq!(by_packet_path(address), by_table(address), "{address}, at {}", block.name);
            }
        }
    }

    #[test]
    fn link_local_addresses_are_the_unicast_blocks_of_a_link() {
        for block in BLOCKS {
            let is_on_link = block.registered == Attributes::ON_LINK;
            let is_link_local = of_family!(block.network, it => it.is_link_local());
            assert_eq!(is_link_local, is_on_link, "{}", block.name);
        }
        for outside in [0xa9fd_ffff_u32, 0xa9ff_0000] {
            assert!(!outside.is_link_local());
        }
        for outside in [0xfe7f_ffff_u64, 0xfec0_0000] {
            assert!(!V6 { high: outside << 32, low: 0 }.is_link_local());
        }
    }

    #[test]
    fn rows_are_prefixes_and_agree_with_themselves() {
        for (i, block) in BLOCKS.iter().enumerate() {
            let [before, first, last, after] = edges(block);
            assert_eq!(first, block.network, "no host bits: {}", block.name);
            assert!(block.contains(first) && block.contains(last), "{}", block.name);
            assert!(!block.contains(before) && !block.contains(after), "{}", block.name);
            let Attributes { source, destination, forwardable } = block.registered;
            assert!(!forwardable || (source && destination), "RFC 6890 section 2.2.1: {}", block.name);
            assert!(!forwardable || block.exception.is_none(), "{}", block.name);
            let same = |other: &Block| (other.network, other.length) == (block.network, block.length);
            assert!(!BLOCKS.iter().skip(i + 1).any(same), "twice: {}", block.name);
        }
        assert_eq!(find(Ipv4Addr::from_bits(DUMMY_V4).into()).map(|block| block.rfc), Some(7600));
    }

    #[test]
    fn exceptions_are_documentation_prefixes_the_dummy_address_and_what_has_no_attributes() {
        let exceptions = BLOCKS.iter().filter(|block| block.exception.is_some());
        let exceptions: Vec<String> = exceptions.map(|block| format!("{}/{}", block.network, block.length)).collect();
        let documentation = ["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"];
        let mut expected: Vec<&str> = documentation.into();
        expected.extend(["192.0.0.8/32", "192.88.99.0/24"]);
        expected.sort_unstable();
        let mut exceptions: Vec<&str> = exceptions.iter().map(String::as_str).collect();
        exceptions.sort_unstable();
        assert_eq!(exceptions, expected);
    }

    proptest! {
        #[test]
        fn the_packet_path_agrees_with_the_table(row in 0..BLOCKS.len(), host: u128, v4: u32, v6: u128) {
            let block = BLOCKS[row];
            let length = u32::from(block.length);
            let in_block: IpAddr = match block.network {
                IpAddr::V4(network) => {
                    let host = (host as u32).checked_shr(length).unwrap_or(0);
                    Ipv4Addr::from_bits(network.to_bits() | host).into()
                }
                IpAddr::V6(network) => {
                    Ipv6Addr::from_bits(network.to_bits() | host.checked_shr(length).unwrap_or(0)).into()
                }
            };
            prop_assert!(block.contains(in_block));
            let (v4, v6) = (Ipv4Addr::from_bits(v4), Ipv6Addr::from_bits(v6));
            for address in [in_block, v4.into(), v6.into()] {
                prop_assert_eq!(by_packet_path(address), by_table(address), "{}", address);
            }
        }
    }
}
