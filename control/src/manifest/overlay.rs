//! `OverlayNode`: a node that sends its pods' packets in VXLAN, and takes theirs so.

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
use super::schema::Address;
use super::vipgate::{Verify, each_once};

/// The port that Linux uses unless it is told another one.
const LINUX_PORT: NonZeroU16 = NonZeroU16::new(8472).unwrap();

/// A node of the overlay network.
#[derive(Clone, Debug)]
pub struct OverlayNode {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// What it says.
    pub spec: OverlayNodeSpec,
}

/// What an `OverlayNode` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct OverlayNodeSpec {
    /// Where its tunnels begin and end.
    #[schemars(with = "Address")]
    pub address: IpAddr,
    /// The UDP port there. Default: 8472, as Linux has it.
    #[serde(default = "port")]
    #[schemars(extend("default" = LINUX_PORT.get()))]
    pub port: NonZeroU16,
    /// The number of the overlay network (VNI).
    #[schemars(range(max = 0x00ff_ffff))]
    pub vni: u32,
    /// The link address of its end of the overlay network.
    pub mac: MacAddress,
    /// Its pods' addresses. Where prefixes of several nodes hold one, the longest decides.
    #[serde(rename = "podCIDRs")]
    #[schemars(length(min = 1), extend("uniqueItems" = true))]
    pub pod_cidrs: Vec<Cidr>,
}

fn port() -> NonZeroU16 {
    LINUX_PORT
}

impl OverlayNodeSpec {
    /// Where its tunnels begin and end.
    pub fn end(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port.get())
    }
}

/// A link address of one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddress(pub [u8; 6]);

impl std::str::FromStr for MacAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no link address: write six bytes, as in 0a:58:0a:f4:01:00");
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            // What reads numbers would take a sign, too.
            let is_pair = |part: &&str| part.len() == 2 && part.bytes().all(|letter| letter.is_ascii_hexdigit());
            let part = parts.next().filter(is_pair).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() {
            return Err(wrong());
        }
        if ethernet::is_group(bytes) || bytes == [0; 6] {
            return Err(format!("`{text}` is the link address of no interface"));
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
            "description": "A link address of one interface.",
            "pattern": "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$",
            "examples": ["0a:58:0a:f4:01:00"],
        })
    }
}

impl Verify for OverlayNodeSpec {
    fn verify(&self, report: &mut dyn FnMut(&str, String)) {
        let address = self.address;
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            report("spec.address", format!("{address} can't be reached from a gateway"));
        }
        if self.vni >= 1 << 24 {
            report("spec.vni", format!("{} is more than 24 bits", self.vni));
        }
        if self.pod_cidrs.is_empty() {
            report("spec.podCIDRs", "is empty: a node without pods needs no manifest".into());
        }
        let nets: Vec<_> = self.pod_cidrs.iter().map(|cidr| cidr.0).collect();
        each_once("spec.podCIDRs", &nets, report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_addresses_are_read_and_written_and_others_are_refused() {
        let good: MacAddress = "0A:58:0a:f4:01:00".parse().unwrap();
        assert_eq!((good.0, good.to_string().as_str()), ([10, 88, 10, 244, 1, 0], "0a:58:0a:f4:01:00"));
        for bad in
            ["", "0a:58:0a:f4:01", "0a:58:0a:f4:01:00:00", "0a-58-0a-f4-01-00", "a:58:0a:f4:01:00", "+1:58:0a:f4:01:00"]
        {
            assert!(bad.parse::<MacAddress>().unwrap_err().contains("is no link address"), "{bad}");
        }
        for group in ["ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "00:00:00:00:00:00"] {
            assert!(group.parse::<MacAddress>().unwrap_err().contains("of no interface"), "{group}");
        }
    }
}
