//! Replies of the EC2 query API (XML), as far as they are read.
#![expect(clippy::struct_field_names, reason = "the names are the API's")]

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::{CloudError, ErrorKind};

/// A list: its items are elements `item`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Set<T> {
    #[serde(rename = "item", default = "Vec::new")]
    pub(super) items: Vec<T>,
}

impl<T> Default for Set<T> {
    fn default() -> Self {
        Self { items: Vec::new() }
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Tag {
    pub(super) key: String,
    #[serde(default)]
    pub(super) value: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DescribeAddresses {
    #[serde(default)]
    pub(super) addresses_set: Set<Address>,
}

/// An Elastic IP address.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Address {
    pub(super) public_ip: IpAddr,
    pub(super) allocation_id: String,
    pub(super) association_id: Option<String>,
    pub(super) network_interface_id: Option<String>,
    pub(super) private_ip_address: Option<IpAddr>,
    pub(super) network_border_group: Option<String>,
    #[serde(default)]
    pub(super) tag_set: Set<Tag>,
}

impl Address {
    pub(super) fn tag(&self, key: &str) -> Option<&str> {
        self.tag_set.items.iter().find(|tag| tag.key == key).map(|tag| tag.value.as_str())
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DescribeNetworkInterfaces {
    #[serde(default)]
    pub(super) network_interface_set: Set<NetworkInterface>,
    pub(super) next_token: Option<String>,
}

/// An elastic network interface.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkInterface {
    pub(super) network_interface_id: String,
    pub(super) subnet_id: String,
    pub(super) availability_zone: Option<String>,
    pub(super) source_dest_check: Option<bool>,
    pub(super) attachment: Option<InterfaceAttachment>,
    #[serde(default)]
    pub(super) private_ip_addresses_set: Set<PrivateAddress>,
    #[serde(default)]
    pub(super) ipv6_addresses_set: Set<Ipv6Address>,
    /// Prefixes that are delegated to it.
    #[serde(default)]
    pub(super) ipv4_prefix_set: Set<Ipv4Prefix>,
    #[serde(default)]
    pub(super) ipv6_prefix_set: Set<Ipv6Prefix>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InterfaceAttachment {
    pub(super) instance_id: Option<String>,
    pub(super) device_index: Option<u32>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PrivateAddress {
    pub(super) private_ip_address: IpAddr,
    #[serde(default)]
    pub(super) primary: bool,
    pub(super) association: Option<Association>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Association {
    pub(super) allocation_id: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Ipv6Address {
    pub(super) ipv6_address: IpAddr,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Ipv4Prefix {
    pub(super) ipv4_prefix: IpNet,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Ipv6Prefix {
    pub(super) ipv6_prefix: IpNet,
}

impl NetworkInterface {
    /// Its primary private address.
    pub(super) fn primary(&self) -> Option<IpAddr> {
        let addresses = &self.private_ip_addresses_set.items;
        addresses.iter().find(|address| address.primary).map(|address| address.private_ip_address)
    }

    /// The private address, if it has it.
    pub(super) fn private(&self, address: IpAddr) -> Option<&PrivateAddress> {
        self.private_ip_addresses_set.items.iter().find(|private| private.private_ip_address == address)
    }

    pub(super) fn has_ipv6(&self, address: IpAddr) -> bool {
        self.ipv6_addresses_set.items.iter().any(|it| it.ipv6_address == address)
    }

    /// The prefixes that are delegated to it.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = &IpNet> {
        let v4 = self.ipv4_prefix_set.items.iter().map(|it| &it.ipv4_prefix);
        v4.chain(self.ipv6_prefix_set.items.iter().map(|it| &it.ipv6_prefix))
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DescribeSubnets {
    #[serde(default)]
    pub(super) subnet_set: Set<Subnet>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Subnet {
    pub(super) cidr_block: IpNet,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DescribeInstances {
    #[serde(default)]
    pub(super) reservation_set: Set<Reservation>,
    pub(super) next_token: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Reservation {
    #[serde(default)]
    pub(super) instances_set: Set<Instance>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Instance {
    pub(super) instance_id: String,
    pub(super) instance_type: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DescribeInstanceTypes {
    #[serde(default)]
    pub(super) instance_type_set: Set<InstanceType>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InstanceType {
    pub(super) instance_type: String,
    pub(super) network_info: NetworkInfo,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkInfo {
    pub(super) ipv4_addresses_per_interface: usize,
    #[serde(default)]
    pub(super) ipv6_addresses_per_interface: usize,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ErrorReply {
    errors: Errors,
    /// Of STS, which has one error at the top.
    error: Option<ErrorEntry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Errors {
    error: Vec<ErrorEntry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ErrorEntry {
    code: String,
    message: String,
}

/// Code and message of an error reply.
pub(super) fn error_of(body: &[u8]) -> Option<(String, String)> {
    let reply: ErrorReply = quick_xml::de::from_reader(body).ok()?;
    let entry = reply.errors.error.into_iter().next().or(reply.error)?;
    Some((entry.code, entry.message))
}

/// Reads a reply.
pub(super) fn read<T: DeserializeOwned>(operation: &'static str, body: &[u8]) -> Result<T, CloudError> {
    let invalid = |error: quick_xml::DeError| {
        CloudError::new(ErrorKind::Unknown, operation, "UnreadableReply", &error.to_string())
    };
    quick_xml::de::from_reader(body).map_err(invalid)
}
