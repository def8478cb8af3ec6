//! `OverlayNode`: a Kubernetes node whose pod traffic is encapsulated in VXLAN (RFC 7348).

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use vipgate_dataplane::wire::ethernet;

use super::Cidr;
use super::values::ValueError;
use crate::diagnostic::Code;
use crate::manifest::custom_resources::{ReportError, Validate, check_unique};
use crate::schema::Address;

/// Linux' default VXLAN port; IANA's is 4789.
const LINUX_PORT: NonZeroU16 = NonZeroU16::new(8472).unwrap();

/// A node of the overlay network.
#[derive(Clone, Debug)]
pub struct OverlayNode {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// Its spec.
    pub spec: OverlayNodeSpec,
}

/// Spec of an `OverlayNode`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct OverlayNodeSpec {
    /// Address of its VXLAN tunnel endpoint (VTEP).
    #[schemars(with = "Address")]
    pub address: IpAddr,
    /// UDP port of its VTEP. Default: 8472, Linux' default.
    #[serde(default = "port")]
    #[schemars(extend("default" = LINUX_PORT.get()))]
    pub port: NonZeroU16,
    /// VXLAN network identifier (VNI).
    #[schemars(range(max = 0x00ff_ffff))]
    pub vni: u32,
    /// MAC address of its VTEP.
    pub mac: MacAddress,
    /// Prefixes of its pods. Between overlapping prefixes of nodes, the longest match applies.
    #[serde(rename = "podCIDRs")]
    #[schemars(length(min = 1), extend("uniqueItems" = true))]
    pub pod_cidrs: Vec<Cidr>,
}

fn port() -> NonZeroU16 {
    LINUX_PORT
}

impl OverlayNodeSpec {
    /// Address and port of its VTEP.
    pub fn tunnel_endpoint(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port.get())
    }
}

/// A unicast MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddress(pub [u8; 6]);

impl std::str::FromStr for MacAddress {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let invalid = || ValueError::MacAddress(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            // `from_str_radix` alone would accept a sign.
            let is_pair = |part: &&str| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            let part = parts.next().filter(is_pair).ok_or_else(invalid)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| invalid())?;
        }
        if parts.next().is_some() {
            return Err(invalid());
        }
        if ethernet::is_group(bytes) || bytes == [0; 6] {
            return Err(ValueError::NotUnicast(text.to_owned()));
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(|byte| format!("{byte:02x}")).join(":"))
    }
}

impl<'de> Deserialize<'de> for MacAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&str>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl JsonSchema for MacAddress {
    fn schema_name() -> Cow<'static, str> {
        "MacAddress".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A unicast MAC address.",
            "pattern": "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$",
            "examples": ["0a:58:0a:f4:01:00"],
        })
    }
}

impl Validate for OverlayNodeSpec {
    fn validate(&self, report: &mut ReportError<'_>) {
        let address = self.address;
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            let reason = format!("{address} is not reachable from a gateway");
            report(Code::UnreachableAddress, "spec.address", reason);
        }
        if self.vni >= 1 << 24 {
            report(Code::OutOfRange, "spec.vni", format!("{} has more than 24 bits", self.vni));
        }
        if self.pod_cidrs.is_empty() {
            report(Code::EmptyValue, "spec.podCIDRs", "is empty: a node without pods needs no manifest".into());
        }
        let nets: Vec<_> = self.pod_cidrs.iter().map(|cidr| cidr.0).collect();
        check_unique("spec.podCIDRs", &nets, report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_are_parsed_and_formatted_and_others_are_rejected() {
        let good: MacAddress = "0A:58:0a:f4:01:00".parse().unwrap();
        assert_eq!((good.0, good.to_string().as_str()), ([10, 88, 10, 244, 1, 0], "0a:58:0a:f4:01:00"));
        for bad in
            ["", "0a:58:0a:f4:01", "0a:58:0a:f4:01:00:00", "0a-58-0a-f4-01-00", "a:58:0a:f4:01:00", "+1:58:0a:f4:01:00"]
        {
            assert_eq!(bad.parse::<MacAddress>(), Err(ValueError::MacAddress(bad.to_owned())));
        }
        for group in ["ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "00:00:00:00:00:00"] {
            assert_eq!(group.parse::<MacAddress>(), Err(ValueError::NotUnicast(group.to_owned())));
        }
    }
}
