//! Addresses inside the tunnels: gateways are next hops on the tunnel device, which has no ARP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The next hop of all routes into tunnels. Its MAC address doesn't matter to gateways.
pub const NEXT_HOP_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 118, 1);
/// The same in IPv6.
pub const NEXT_HOP_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x7669, 0x7001);
/// Its MAC address.
pub const NEXT_HOP_MAC: [u8; 6] = [0x0a, 0x76, 0x67, 0x61, 0x74, 0x65];
/// Address of the tunnel device, of host scope, so that it is no source of packets: without any address, the kernel's
/// reverse path filter has nothing to compare with and drops.
pub const DEVICE_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 118, 103);

/// Inner source MAC address of a gateway's packets: gateways derive it from their tunnel address.
pub fn gateway_mac(address: IpAddr) -> [u8; 6] {
    let [.., a, b, c, d] = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    [0x0a, 0x76, a, b, c, d]
}
