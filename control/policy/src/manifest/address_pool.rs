//! `AddressPool`: addresses that VIPs are allocated from, listed or found at a cloud provider.

use std::borrow::Cow;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vipgate_dataplane::policy::limits::{MAX_RANGES_OF_POOL, MAX_VIPS};

use super::custom_resources::{ReportError, Validate, check_count};
use super::provider::ProviderSpec;
use super::schema::pool_alternatives;
use super::{AddressRange, AddressRecord, CloudPool, LabelSelector, ReuseAfter};
use crate::diagnostic::Code;

/// Addresses of one range that a provider is asked for, at most.
const MAX_PROVIDED_ADDRESSES: u128 = 256;

fn yes() -> bool {
    true
}

/// Address ranges that VIPs are allocated from.
#[derive(Clone, Debug)]
pub struct AddressPool {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// Its spec.
    pub spec: AddressPoolSpec,
    /// What the provider of the spec has; `None`: not known.
    pub cloud: Option<Arc<CloudPool>>,
    /// What its status has recorded of its addresses; `None`: nothing yet.
    pub recorded: Option<Arc<AddressRecord>>,
}

impl AddressPool {
    /// Its ranges: those of the spec, and the addresses that the provider has for it.
    pub fn ranges(&self) -> Cow<'_, [AddressRange]> {
        let Some(cloud) = &self.cloud else { return Cow::Borrowed(&self.spec.ranges) };
        let single = |address: &IpAddr| AddressRange { first: *address, last: *address };
        let addresses = cloud.addresses.keys().map(single);
        let others = addresses.filter(|one| !self.spec.ranges.iter().any(|range| range.overlaps(one)));
        Cow::Owned(self.spec.ranges.iter().copied().chain(others).collect())
    }

    /// Whether its addresses are a provider's.
    pub fn has_provider(&self) -> bool {
        !self.spec.provider.is_none()
    }
}

/// Spec of an `AddressPool`.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("anyOf" = pool_alternatives()))]
pub struct AddressPoolSpec {
    /// Address ranges; they must not overlap.
    #[serde(default)]
    #[schemars(length(max = MAX_RANGES_OF_POOL), extend("default" = []))]
    pub ranges: Vec<AddressRange>,
    /// Namespaces whose EgressPolicies and Services may have its addresses, with `tenancy: strict`. Default: all.
    pub namespaces: Option<LabelSelector>,
    /// Services that may get its addresses from the policy server, by their labels. Default: all.
    pub service_selector: Option<LabelSelector>,
    /// Whether Services that name neither a pool nor an address get its addresses. Default: true.
    #[serde(default = "yes")]
    pub auto_assign: bool,
    /// Announcement of its VIPs. Default: `L2`.
    #[serde(default)]
    pub announce: Announce,
    /// An address that became free is given to nobody else before this time has passed. At most 720h. Default: `5m`.
    #[serde(default)]
    #[schemars(extend("default" = "5m"))]
    pub reuse_after: ReuseAfter,
    /// Addresses of the pool that the objects of one namespace may have, with those that it gave up and nobody else gets
    /// yet. Default: no limit.
    #[schemars(range(min = 1, max = MAX_VIPS))]
    pub max_per_namespace: Option<NonZeroU32>,
    /// Static public addresses of a cloud provider. Default: none.
    #[serde(default)]
    pub provider: ProviderSpec,
}

/// Announcement of a VIP to the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize, JsonSchema)]
pub enum Announce {
    /// ARP and NDP replies by one owner per VIP.
    #[default]
    L2,
    /// BGP routes from every gateway; the VIP's port blocks are divided among them.
    #[serde(rename = "BGP")]
    Bgp,
}

impl std::fmt::Display for Announce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::L2 => "L2",
            Self::Bgp => "BGP",
        })
    }
}

impl Validate for AddressPoolSpec {
    fn validate(&self, report: &mut ReportError<'_>) {
        if self.ranges.is_empty() && self.provider.is_none() {
            report(Code::PoolWithoutAddresses, "spec.ranges", "has no address: set `ranges` or `provider`".into());
        }
        check_count("spec.ranges", self.ranges.len(), MAX_RANGES_OF_POOL, report);
        let selectors = [("spec.namespaces", &self.namespaces), ("spec.serviceSelector", &self.service_selector)];
        for (field, selector) in selectors.into_iter().filter_map(|(field, it)| Some((field, it.as_ref()?))) {
            selector.validate(field, report);
        }
        self.provider.validate(report);
        self.validate_provided_ranges(report);
        for (i, range) in self.ranges.iter().enumerate() {
            let overlapping = self.ranges[..i].iter().position(|other| other.overlaps(range));
            if let Some(other) = overlapping {
                let reason = format!("{range} overlaps spec.ranges[{other}]");
                report(Code::OverlappingRanges, &format!("spec.ranges[{i}]"), reason);
            }
        }
    }
}

impl AddressPoolSpec {
    /// With a provider, ranges are only for addresses that have no tags there.
    fn validate_provided_ranges(&self, report: &mut ReportError<'_>) {
        if self.provider.is_none() {
            return;
        }
        for (i, range) in self.ranges.iter().enumerate() {
            let reason = if self.provider.aws.is_none() || range.first.is_ipv4() {
                "can't be combined with `provider`, which finds addresses by tags: only IPv6 addresses of `aws` have none"
            } else if range.size() > MAX_PROVIDED_ADDRESSES {
                "has more than 256 addresses, each of which is asked for at the provider"
            } else {
                continue;
            };
            report(Code::ProviderField, &format!("spec.ranges[{i}]"), reason.into());
        }
        if self.announce == Announce::Bgp {
            let reason = "can't be `BGP` with `provider`: a cloud delivers packets of an address to one gateway";
            report(Code::ProviderField, "spec.announce", reason.into());
        }
    }
}
