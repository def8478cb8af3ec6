//! Provider of an AddressPool: static public addresses of a cloud, by tags.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::num::NonZeroU32;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::custom_resources::ReportError;
use super::{Cidr, Family};
use crate::diagnostic::Code;

/// Where the addresses of a pool are, and how they are attached to gateways. Exactly one of `aws`, `azure` and `gcp`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ProviderSpec {
    /// Elastic IP addresses of AWS.
    pub aws: Option<AwsSpec>,
    /// Public IP addresses of Azure.
    pub azure: Option<AzureSpec>,
    /// Static external addresses of Google Cloud.
    pub gcp: Option<GcpSpec>,
    /// What an address is attached to. Default: `nic`, with `gcp` `instance`.
    pub associate: Option<Associate>,
    /// Private addresses for VIPs at gateways: `auto`, any free one of the NIC's subnet, or a list of prefixes. Default: `auto`.
    #[serde(default)]
    pub private: PrivateAddresses,
    /// Which addresses the pool has. Default: `pool`.
    #[serde(default)]
    pub ownership: Ownership,
    /// With `ownership: reserve`: maximum number of addresses that vipgate allocates.
    pub max: Option<NonZeroU32>,
}

/// Elastic IP addresses of an AWS region.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct AwsSpec {
    /// The region.
    #[schemars(length(min = 1))]
    pub region: String,
    /// Tags that an address has, all of them.
    #[schemars(extend("minProperties" = 1))]
    pub tags: BTreeMap<String, String>,
}

/// Public IP addresses of an Azure resource group.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct AzureSpec {
    /// Id of the subscription.
    #[schemars(length(min = 1))]
    pub subscription: String,
    /// The resource group.
    #[schemars(length(min = 1))]
    pub resource_group: String,
    /// Region of allocated addresses. Default: that of the gateways' NICs.
    pub location: Option<String>,
    /// Tags that an address has, all of them.
    #[schemars(extend("minProperties" = 1))]
    pub tags: BTreeMap<String, String>,
}

/// Static external addresses of a Google Cloud region.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct GcpSpec {
    /// Id of the project.
    #[schemars(length(min = 1))]
    pub project: String,
    /// The region.
    #[schemars(length(min = 1))]
    pub region: String,
    /// Labels that an address has, all of them.
    #[schemars(extend("minProperties" = 1))]
    pub labels: BTreeMap<String, String>,
}

/// What a public address is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Associate {
    /// A secondary private address of the gateway's NIC, one for each VIP.
    Nic,
    /// The primary private address of the gateway's NIC: one VIP per gateway, and a NIC for it alone.
    Instance,
}

/// Which addresses a pool has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Ownership {
    /// Those that exist. None is allocated or released.
    #[default]
    Pool,
    /// More are allocated on demand, up to `max`, and released when they have been without use for a while.
    Reserve,
}

/// Private addresses that VIPs get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PrivateAddresses {
    /// Any free one of the NIC's subnet.
    #[default]
    Auto,
    /// Those of these prefixes.
    List(Vec<Cidr>),
}

impl PrivateAddresses {
    /// The prefixes; empty: any address of the subnet.
    pub fn prefixes(&self) -> &[Cidr] {
        match self {
            Self::Auto => &[],
            Self::List(prefixes) => prefixes,
        }
    }
}

impl<'de> Deserialize<'de> for PrivateAddresses {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AutoOrList;
        impl<'de> Visitor<'de> for AutoOrList {
            type Value = PrivateAddresses;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("`auto` or a list of prefixes")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
                if text == "auto" { Ok(PrivateAddresses::Auto) } else { Err(E::unknown_variant(text, &["auto"])) }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut prefixes = Vec::new();
                while let Some(prefix) = items.next_element()? {
                    prefixes.push(prefix);
                }
                if prefixes.is_empty() {
                    return Err(A::Error::custom("is empty: write `auto` for any address of the subnet"));
                }
                Ok(PrivateAddresses::List(prefixes))
            }
        }
        deserializer.deserialize_any(AutoOrList)
    }
}

impl JsonSchema for PrivateAddresses {
    fn schema_name() -> Cow<'static, str> {
        "PrivateAddresses".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        // A CustomResourceDefinition can't say "a text or a list".
        json_schema!({"additionalProperties": true})
    }
}

impl ProviderSpec {
    /// Whether no provider is named, as in `provider: {}`.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Name of the provider.
    pub fn name(&self) -> Option<&'static str> {
        let named = [("aws", self.aws.is_some()), ("azure", self.azure.is_some()), ("gcp", self.gcp.is_some())];
        named.into_iter().find_map(|(name, is_set)| is_set.then_some(name))
    }

    /// Tags, or labels, that an address has.
    pub fn tags(&self) -> Option<&BTreeMap<String, String>> {
        let aws = self.aws.as_ref().map(|aws| &aws.tags);
        let azure = || self.azure.as_ref().map(|azure| &azure.tags);
        let gcp = || self.gcp.as_ref().map(|gcp| &gcp.labels);
        aws.or_else(azure).or_else(gcp)
    }

    /// Whether vipgate may allocate addresses of a family: those of AWS that are IPv6 are no objects there, and Google Cloud
    /// attaches none to NICs.
    pub fn allocates(&self, family: Family) -> bool {
        self.ownership == Ownership::Reserve && (family == Family::V4 || self.azure.is_some())
    }

    pub(super) fn validate(&self, report: &mut ReportError<'_>) {
        if self.is_none() {
            return;
        }
        let set = [self.aws.is_some(), self.azure.is_some(), self.gcp.is_some()].into_iter().filter(|is_set| *is_set);
        if set.count() != 1 {
            report(Code::NotExactlyOne, "spec.provider", "needs exactly one of `aws`, `azure` and `gcp`".into());
        }
        let tags = [
            ("aws.tags", self.aws.as_ref().map(|aws| &aws.tags)),
            ("azure.tags", self.azure.as_ref().map(|azure| &azure.tags)),
            ("gcp.labels", self.gcp.as_ref().map(|gcp| &gcp.labels)),
        ];
        for (field, _) in tags.iter().filter(|(_, tags)| tags.is_some_and(BTreeMap::is_empty)) {
            let reason = "is empty: every address of the account would be in the pool";
            report(Code::EmptyValue, &format!("spec.provider.{field}"), reason.into());
        }
        if self.gcp.is_some() && self.associate == Some(Associate::Nic) {
            let reason =
                "can't be `nic` with `gcp`: a NIC there has one external address, for its primary private address";
            report(Code::ProviderField, "spec.provider.associate", reason.into());
        }
        match (self.ownership, self.max) {
            (Ownership::Reserve, None) => {
                report(
                    Code::MissingField,
                    "spec.provider.max",
                    "is missing: `ownership: reserve` needs a limit".into(),
                );
            }
            (Ownership::Pool, Some(_)) => {
                let reason = "is only for `ownership: reserve`: without it no address is allocated";
                report(Code::ProviderField, "spec.provider.max", reason.into());
            }
            _ => {}
        }
    }
}
