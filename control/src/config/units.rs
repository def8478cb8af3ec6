//! Durations (`5s`) and port ranges (`1024-65535`).

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vipgate_policy::schema;

use crate::membership::authority::UnavailableLimit;

/// An inclusive port range, never empty. Displays as `1024-65535`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// Lowest port, at least 1.
    pub first: u16,
    /// Highest port.
    pub last: u16,
}

impl PortRange {
    /// Number of ports.
    pub fn count(self) -> u32 {
        u32::from(self.last) - u32::from(self.first) + 1
    }
}

/// How many gateways may be unavailable: a number, or a percentage of all. Written as `1` or `25%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxUnavailable(pub UnavailableLimit);

impl FromStr for MaxUnavailable {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let digits = text.strip_suffix('%').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
        let percent = digits.and_then(|digits| digits.parse().ok()).filter(|percent| *percent <= 100);
        percent
            .map(|percent| Self(UnavailableLimit::Percent(percent)))
            .ok_or_else(|| UnitError::MaxUnavailable(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for MaxUnavailable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CountOrPercent;

        impl Visitor<'_> for CountOrPercent {
            type Value = MaxUnavailable;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of gateways, or a percentage of them, e.g. 1 or 25%")
            }

            fn visit_u64<E: serde::de::Error>(self, count: u64) -> Result<Self::Value, E> {
                let count = u32::try_from(count);
                count
                    .map(|count| MaxUnavailable(UnavailableLimit::Count(count)))
                    .map_err(|_| E::custom("more than 4294967295 gateways"))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(CountOrPercent)
    }
}

impl JsonSchema for MaxUnavailable {
    fn schema_name() -> Cow<'static, str> {
        "MaxUnavailable".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A number of gateways, or a percentage of them: `1` or `25%`.",
            // A limit applies to numbers, the pattern to text.
            "type": ["string", "integer"],
            "minimum": 0,
            "maximum": u32::MAX,
            "pattern": "^0*(100|[0-9]{1,2})%$",
        })
    }
}

/// Error of parsing a duration or a port range.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Invalid duration.
    #[error("`{0}` is not a duration: write a whole number and a unit, e.g. 500ms, 5s, 4m or 2h")]
    Duration(String),
    /// Invalid port range.
    #[error("`{0}` is not a port range: write first-last, e.g. 1024-65535")]
    PortRange(String),
    /// A port range in descending order.
    #[error("port range {0}-{1} ends before it starts")]
    Reversed(u16, u16),
    /// Invalid percentage of gateways.
    #[error("`{0}` is not a number of gateways: write a whole number, or a percentage of them, e.g. 1 or 25%")]
    MaxUnavailable(String),
}

impl FromStr for PortRange {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        let (first, last) = text
            .split_once('-')
            .and_then(|(first, last)| Some((port(first)?, port(last)?)))
            .ok_or_else(|| UnitError::PortRange(text.to_owned()))?;
        if first <= last { Ok(Self { first, last }) } else { Err(UnitError::Reversed(first, last)) }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(FromText { expected: "a port range first-last, e.g. 1024-65535", parse: str::parse })
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl JsonSchema for PortRange {
    fn schema_name() -> Cow<'static, str> {
        "PortRange".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A port range first-last, e.g. 1024-65535.",
            "pattern": "^[0-9]{1,5} *- *[0-9]{1,5}$",
            "examples": ["1024-65535"],
        })
    }
}

/// Schema of a duration field.
pub(crate) enum DurationText {}

impl JsonSchema for DurationText {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A whole number and a unit, e.g. 500ms, 5s, 4m or 2h.",
            "pattern": schema::DURATION_PATTERN,
            "examples": ["500ms", "5s", "4m", "2h"],
        })
    }
}

/// A duration field: `500ms`, `5s`, `4m`, `2h`.
pub(super) mod duration {
    use std::time::Duration;

    use serde::{Deserializer, Serializer};

    use super::{FromText, parse_duration};

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        deserializer.deserialize_any(FromText {
            expected: "a number and a unit, e.g. 500ms, 5s, 4m or 2h",
            parse: parse_duration,
        })
    }

    pub(in crate::config) fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        match value.subsec_millis() {
            0 => serializer.collect_str(&format_args!("{}s", value.as_secs())),
            _ => serializer.collect_str(&format_args!("{}ms", value.as_millis())),
        }
    }
}

/// Deserializes a value from a string; `expected` is for errors.
struct FromText<T> {
    expected: &'static str,
    parse: fn(&str) -> Result<T, UnitError>,
}

impl<T> Visitor<'_> for FromText<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text).map_err(E::custom)
    }
}

/// Parses a duration: a whole number and `ms`, `s`, `m` or `h`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    schema::parse_duration(text).ok_or_else(|| UnitError::Duration(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_one_number_and_one_unit() {
        for (text, millis) in [("500ms", 500), ("5s", 5000), ("4m", 240_000), ("2h", 7_200_000), ("0s", 0)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "5", "s", "5 s", "-5s", "1.5s", "5d", "2h4m", "99999999999999999999s", "18446744073709551615h"]
        {
            assert_eq!(parse_duration(text), Err(UnitError::Duration(text.into())), "{text}");
        }
    }

    #[test]
    fn a_port_range_is_ascending_and_without_port_0() {
        assert_eq!("1024-65535".parse(), Ok(PortRange { first: 1024, last: 65535 }));
        assert_eq!("7-7".parse::<PortRange>().map(PortRange::count), Ok(1));
        assert_eq!("9-8".parse::<PortRange>(), Err(UnitError::Reversed(9, 8)));
        for text in ["", "80", "0-10", "1-65536", "a-b", "1-2-3"] {
            assert_eq!(text.parse::<PortRange>(), Err(UnitError::PortRange(text.into())), "{text}");
        }
    }
}
