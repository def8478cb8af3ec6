//! Address families, and addresses that no VIP or pod can have.

use std::fmt;
use std::net::IpAddr;

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
pub fn unusable(address: IpAddr) -> Option<&'static str> {
    let (link_local, reserved) = match address {
        // RFC 1122 section 3.2.1.3: 0/8 is "this network".
        IpAddr::V4(v4) => (v4.is_link_local(), v4.octets()[0] == 0 || v4.is_broadcast()),
        IpAddr::V6(v6) => (v6.is_unicast_link_local(), v6.to_ipv4_mapped().is_some()),
    };
    [
        (address.is_unspecified(), "the unspecified address"),
        (address.is_loopback(), "a loopback address"),
        (address.is_multicast(), "a multicast address"),
        (link_local, "a link-local address"),
        (reserved, "not a valid host address"),
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
            "fe80::1",
            "0.1.2.3",
            "255.255.255.255",
            "::ffff:10.0.0.1",
        ] {
            assert!(unusable(bad.parse().unwrap()).is_some(), "{bad}");
        }
        for good in ["10.0.0.1", "203.0.113.10", "100.64.0.1", "2001:db8::1", "fd00::1"] {
            assert_eq!(unusable(good.parse().unwrap()), None, "{good}");
        }
    }
}
