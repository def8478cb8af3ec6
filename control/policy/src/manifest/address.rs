//! Address families, and addresses that no VIP or pod can have.

use std::fmt;
use std::net::IpAddr;

use vipgate_dataplane::flow::special_purpose;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// Family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// Why an address is not a routable unicast address; `None` if it is one.
///
/// As the packet path decides, except for 240.0.0.0/4, which some clouds give to pods: as a pod's address it is
/// accepted, so that gateways capture what comes from it and drop it. Otherwise their kernels would forward it.
pub fn unusable(address: IpAddr) -> Option<&'static str> {
    let (link_local, may_be_pod) = match address {
        IpAddr::V4(v4) => (v4.is_link_local(), v4.octets()[0] >= 240 && !v4.is_broadcast()),
        IpAddr::V6(v6) => (v6.is_unicast_link_local(), false),
    };
    [
        (address.is_unspecified(), "the unspecified address"),
        (address.is_loopback(), "a loopback address"),
        (address.is_multicast(), "a multicast address"),
        (link_local, "a link-local address"),
        (special_purpose::is_martian(address) && !may_be_pod, "not a valid host address"),
    ]
    .into_iter()
    .find_map(|(matches, what)| matches.then_some(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routable_unicast_addresses_are_usable() {
        for bad in [
            "0.0.0.0",
            "::",
            "127.0.0.2",
            "::1",
            "224.0.0.1",
            "ff02::1",
            "169.254.0.1",
            "192.0.0.170",
            "100:0:0:1::1",
            "fe80::1",
            "0.1.2.3",
            "255.255.255.255",
            "::ffff:10.0.0.1",
        ] {
            assert!(unusable(bad.parse().unwrap()).is_some(), "{bad}");
        }
        for good in ["10.0.0.1", "203.0.113.10", "100.64.0.1", "198.18.0.1", "240.0.0.1", "2001:db8::1", "fd00::1"] {
            assert_eq!(unusable(good.parse().unwrap()), None, "{good}");
        }
    }

    #[test]
    fn what_no_gateway_forwards_is_unusable_but_for_class_e() {
        for block in special_purpose::BLOCKS {
            // Of the most specific block that contains it.
            let is_martian = special_purpose::is_martian(block.network);
            let is_class_e = block.rfc == 1112;
            assert_eq!(unusable(block.network).is_some(), is_martian && !is_class_e, "{}", block.network);
        }
    }
}
