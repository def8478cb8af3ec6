//! Value types of vipgate's custom resources: prefixes without host bits, address ranges, and how long addresses are
//! quarantined.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::schema::{DURATION_PATTERN, cidr, parse_duration, range};

/// A prefix with zero host bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr(pub IpNet);

/// An inclusive address range of one family, never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    /// Lowest address.
    pub first: IpAddr,
    /// Highest address.
    pub last: IpAddr,
}

/// How long an address that became free is given to nobody else. Displays as `300s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReuseAfter(pub Duration);

/// Its maximum: 30 days.
const MAX_REUSE_AFTER: Duration = Duration::from_hours(720);

impl Default for ReuseAfter {
    fn default() -> Self {
        Self(Duration::from_mins(5))
    }
}

/// Error of parsing a prefix, a range, a duration or a MAC address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Not a prefix.
    #[error("`{0}` is not a prefix: write address/length, e.g. 10.0.0.0/8 or 2001:db8::/32")]
    Prefix(String),
    /// An address instead of a prefix.
    #[error(
        "`{0}` is an address, not a prefix: for a single address write {0}/{bits}",
        bits = if .0.is_ipv4() { 32 } else { 128 }
    )]
    Address(IpAddr),
    /// A prefix with host bits.
    #[error("{0} has host bits set: did you mean {network}?", network = .0.trunc())]
    HostBits(IpNet),
    /// Not a range.
    #[error("`{0}` is not a range: write a prefix, e.g. 203.0.113.0/28, or first-last, e.g. 203.0.113.32-203.0.113.40")]
    Range(String),
    /// A range with addresses of both families.
    #[error("range `{0}` has addresses of both families")]
    Families(String),
    /// A range in descending order.
    #[error("range `{0}` ends before it begins")]
    Reversed(String),
    /// Not a duration.
    #[error("`{0}` is not a duration: write a whole number and a unit, e.g. 30s, 5m or 2h, at most 720h")]
    Duration(String),
    /// Not a MAC address.
    #[error("`{0}` is not a MAC address: write six bytes, e.g. 0a:58:0a:f4:01:00")]
    MacAddress(String),
    /// A group address, or only zeros.
    #[error("`{0}` is not a unicast MAC address")]
    NotUnicast(String),
}

impl std::str::FromStr for Cidr {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if let Ok(address) = text.parse() {
            return Err(ValueError::Address(address));
        }
        let net: IpNet = text.parse().map_err(|_| ValueError::Prefix(text.to_owned()))?;
        if net == net.trunc() { Ok(Self(net)) } else { Err(ValueError::HostBits(net)) }
    }
}

impl std::str::FromStr for AddressRange {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let Some((first, last)) = text.split_once('-') else {
            let Cidr(net) = match text.parse() {
                Err(ValueError::Prefix(_)) => return Err(ValueError::Range(text.to_owned())),
                parsed => parsed?,
            };
            return Ok(Self { first: net.network(), last: net.broadcast() });
        };
        let address = |text: &str| text.trim().parse::<IpAddr>();
        let (Ok(first), Ok(last)) = (address(first), address(last)) else {
            return Err(ValueError::Range(text.to_owned()));
        };
        if first.is_ipv4() != last.is_ipv4() {
            return Err(ValueError::Families(text.to_owned()));
        }
        if first <= last { Ok(Self { first, last }) } else { Err(ValueError::Reversed(text.to_owned())) }
    }
}

impl std::str::FromStr for ReuseAfter {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let duration = parse_duration(text).filter(|duration| *duration <= MAX_REUSE_AFTER);
        duration.map(Self).ok_or_else(|| ValueError::Duration(text.to_owned()))
    }
}

impl AddressRange {
    /// Whether an address is in the range.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.first.is_ipv4() == address.is_ipv4() && (self.first..=self.last).contains(&address)
    }

    /// Number of addresses; of all of IPv6 one less.
    pub fn size(&self) -> u128 {
        (bits(self.last) - bits(self.first)).saturating_add(1)
    }

    /// The address at this offset, which is less than the size.
    pub fn nth(&self, offset: u128) -> IpAddr {
        let address = bits(self.first).saturating_add(offset);
        match self.first {
            // Addresses of an IPv4 range have 32 bits.
            IpAddr::V4(_) => Ipv4Addr::from_bits(u32::try_from(address).unwrap_or(u32::MAX)).into(),
            IpAddr::V6(_) => Ipv6Addr::from_bits(address).into(),
        }
    }

    /// Whether the ranges have a common address.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&str>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for AddressRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&str>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for ReuseAfter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&str>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl JsonSchema for ReuseAfter {
    fn schema_name() -> Cow<'static, str> {
        "ReuseAfter".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": DURATION_PATTERN, "maxLength": 12, "examples": ["30s", "5m", "2h"]})
    }
}

impl JsonSchema for Cidr {
    fn schema_name() -> Cow<'static, str> {
        "Cidr".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        cidr()
    }
}

impl JsonSchema for AddressRange {
    fn schema_name() -> Cow<'static, str> {
        "AddressRange".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        range()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_no_host_bits() {
        for good in ["0.0.0.0/0", "::/0", "10.0.0.0/8", "203.0.113.7/32", "2001:db8::/32"] {
            assert_eq!(good.parse::<Cidr>().map(|cidr| cidr.0.to_string()).as_deref(), Ok(good));
        }
        for (bad, expected) in [
            ("10.1.2.3/8", "10.1.2.3/8 has host bits set: did you mean 10.0.0.0/8?"),
            ("2001:db8::1/32", "did you mean 2001:db8::/32?"),
            ("10.0.0.1", "write 10.0.0.1/32"),
            ("::1", "write ::1/128"),
            ("10.0.0.0/33", "is not a prefix"),
            ("ten/8", "is not a prefix"),
        ] {
            let error = bad.parse::<Cidr>().expect_err(bad).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_duration_is_one_number_and_one_unit_of_at_most_720h() {
        for (text, millis) in [("0s", 0), ("500ms", 500), ("5m", 300_000), ("720h", 2_592_000_000)] {
            assert_eq!(text.parse(), Ok(ReuseAfter(Duration::from_millis(millis))));
        }
        for bad in ["", "5", "m", "5d", "-5m", "5 m", "721h", "18446744073709551615h", "99999999999999999999s"] {
            assert_eq!(bad.parse::<ReuseAfter>(), Err(ValueError::Duration(bad.to_owned())));
        }
    }

    #[test]
    fn a_range_is_a_prefix_or_two_addresses_in_order() {
        let range = |text: &str| text.parse::<AddressRange>().map(|range| range.to_string());
        assert_eq!(range("203.0.113.0/28").as_deref(), Ok("203.0.113.0-203.0.113.15"));
        assert_eq!(range("203.0.113.32-203.0.113.40").as_deref(), Ok("203.0.113.32-203.0.113.40"));
        assert_eq!(range("2001:db8::-2001:db8::f").as_deref(), Ok("2001:db8::-2001:db8::f"));
        for (bad, expected) in [
            ("203.0.113.9-203.0.113.8", "ends before it begins"),
            ("203.0.113.9-2001:db8::1", "addresses of both families"),
            ("203.0.113.9", "write 203.0.113.9/32"),
            ("203.0.113.9/28", "did you mean 203.0.113.0/28?"),
            ("x-y", "is not a range"),
            ("x", "is not a range"),
        ] {
            let error = range(bad).expect_err(bad).to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!("10.0.0.0/30".parse::<AddressRange>().unwrap().contains("10.0.0.3".parse().unwrap()));
        assert!(!"0.0.0.0/0".parse::<AddressRange>().unwrap().contains("::1".parse().unwrap()));
    }
}
