//! vipgate's own kinds, `vipgate.io/v1alpha1`. Unlike in Kubernetes' kinds, an unknown field is an error.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::num::NonZeroU32;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::schema::{Address, Metadata, policy_forms, pool_forms};
use super::{AddressRange, Cidr, LabelSelector};

/// What one of our documents looks like.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Document<S> {
    #[serde(rename = "apiVersion")]
    #[schemars(with = "String")]
    _api_version: IgnoredAny,
    #[serde(rename = "kind")]
    #[schemars(with = "String")]
    _kind: IgnoredAny,
    #[schemars(with = "Metadata")]
    pub(super) metadata: ObjectMeta,
    pub(super) spec: S,
    #[serde(rename = "status")]
    #[schemars(with = "Option<serde_json::Value>")]
    _status: Option<IgnoredAny>,
}

/// A kind's specification that can contradict itself.
pub(super) trait Verify {
    /// Reports each contradiction as (field, reason); the field's path starts at the object.
    fn verify(&self, report: &mut dyn FnMut(&str, String));
}

/// Which pods leave with which VIPs.
#[derive(Clone, Debug)]
pub struct EgressPolicy {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// What it says.
    pub spec: EgressPolicySpec,
}

/// What an `EgressPolicy` says. Exactly one of `serviceRef` and `selectors` is there.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("oneOf" = policy_forms()))]
pub struct EgressPolicySpec {
    /// The Service whose ingress addresses are the VIPs and whose endpoints are the pods.
    pub service_ref: Option<ServiceRef>,
    /// Or: pods by label, those of any entry.
    #[schemars(length(min = 1))]
    pub selectors: Option<Vec<PodSelector>>,
    /// With selectors: the VIPs themselves.
    #[schemars(with = "Option<Vec<Address>>", extend("uniqueItems" = true))]
    pub addresses: Option<Vec<IpAddr>>,
    /// With selectors: VIPs from pools.
    pub pools: Option<Vec<PoolRef>>,
    /// Destinations that are translated. Default: everything.
    #[serde(rename = "destinationCIDRs")]
    #[schemars(length(min = 1))]
    pub destination_cidrs: Option<Vec<Cidr>>,
    /// Destinations that are routed unchanged. Default: none.
    #[serde(default, rename = "excludedCIDRs")]
    #[schemars(extend("default" = []))]
    pub excluded_cidrs: Vec<Cidr>,
    /// The gateways that serve it. Default: every gateway.
    pub gateways: Option<GatewayRef>,
    /// How endpoints are spread over gateways. Default: `Rendezvous`.
    #[serde(default)]
    pub distribution: Distribution,
    /// How a new session picks one of several VIPs. Default: `PerEndpoint`.
    #[serde(default)]
    pub address_selection: AddressSelection,
    /// Whether an endpoint's gateway is in its zone. Default: `None`.
    #[serde(default)]
    pub zone_affinity: ZoneAffinity,
    /// What one endpoint may have open. Default: no limits.
    #[serde(default)]
    pub limits: Limits,
    /// What an endpoint hears when it gets no session. Default: `Reject`.
    #[serde(default)]
    pub on_exhaustion: OnExhaustion,
}

/// A Service in the policy's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceRef {
    /// Its name.
    #[schemars(length(min = 1))]
    pub name: String,
}

/// Pods by their labels and those of their namespace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PodSelector {
    /// Namespaces. Default: the policy's own.
    pub namespace_selector: Option<LabelSelector>,
    /// Pods in them; `{}` is all of them.
    pub pod_selector: LabelSelector,
}

/// VIPs from a pool.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolRef {
    /// The pool's name.
    pub name: String,
    /// How many of each address family that the pool has. Default: 1.
    #[serde(default = "one")]
    pub count: NonZeroU32,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

/// Gateways.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GatewayRef {
    /// By name.
    Names(#[schemars(length(min = 1), extend("uniqueItems" = true))] Vec<String>),
    /// By the labels of their manifests.
    Selector(LabelSelector),
}

/// How endpoints are spread over gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum Distribution {
    /// By rendezvous hashing: a change moves only what it must.
    #[default]
    Rendezvous,
    /// Sorted endpoints over sorted gateways.
    RoundRobin,
}

/// How a new session picks one of several VIPs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum AddressSelection {
    /// An endpoint keeps one VIP per family.
    #[default]
    PerEndpoint,
    /// Each session picks anew.
    PerConnection,
}

/// Whether an endpoint's gateway is in its zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum ZoneAffinity {
    /// It doesn't matter.
    #[default]
    None,
    /// If one is there.
    Prefer,
    /// Or its traffic is dropped.
    Require,
}

/// What one endpoint may have open; what is left out is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Limits {
    /// Sessions open at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions_per_endpoint: Option<NonZeroU32>,
    /// New sessions a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_sessions_per_second: Option<NonZeroU32>,
    /// Ports that it can have toward each destination, whatever the others behind the same VIP have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guaranteed_ports_per_endpoint: Option<NonZeroU32>,
}

/// What an endpoint hears when it gets no session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum OnExhaustion {
    /// ICMP "administratively prohibited"; TCP gets a reset.
    #[default]
    Reject,
    /// Nothing.
    Drop,
}

/// What becomes of a pod's packet that no policy covers, and that would leave the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Uncovered {
    /// It is dropped, and counted as `no_policy`.
    Drop,
    /// The kernel has it.
    Pass,
}

/// A gateway and what it may hold.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// Its metadata; policies select gateways by its labels.
    pub metadata: ObjectMeta,
    /// What it says.
    pub spec: GatewaySpec,
}

/// What a `Gateway` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct GatewaySpec {
    /// Its zone.
    pub zone: Option<String>,
    /// The Kubernetes node that it is on.
    pub node: Option<String>,
    /// Where other gateways reach it.
    #[schemars(with = "Option<Address>")]
    pub peer_address: Option<IpAddr>,
    /// VIPs that it may hold. Default: no limit.
    pub max_addresses: Option<NonZeroU32>,
    /// Pods' addresses behind it, beside `pod_cidrs` in configuration files.
    #[serde(default, rename = "podCIDRs")]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub pod_cidrs: Vec<Cidr>,
    /// What becomes of packets of pods that no policy covers. Default: as the policy server says, else `drop` where pods' addresses
    /// are known.
    pub uncovered: Option<Uncovered>,
}

/// Addresses to take VIPs from.
#[derive(Clone, Debug)]
pub struct AddressPool {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// What it says.
    pub spec: AddressPoolSpec,
}

/// What an `AddressPool` says.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("anyOf" = pool_forms()))]
pub struct AddressPoolSpec {
    /// Its addresses; ranges don't overlap.
    #[serde(default)]
    #[schemars(extend("default" = []))]
    pub ranges: Vec<AddressRange>,
    /// How the network learns where they are. Default: `L2`.
    #[serde(default)]
    pub announce: Announce,
    /// Static public addresses of a cloud, by tags.
    #[serde(default)]
    pub provider: BTreeMap<String, serde_json::Value>,
}

/// How the network learns where a VIP is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize, JsonSchema)]
pub enum Announce {
    /// One owner per VIP answers ARP and NDP.
    #[default]
    L2,
    /// Every gateway, by routing; ports split in blocks.
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

impl Verify for EgressPolicySpec {
    fn verify(&self, report: &mut dyn FnMut(&str, String)) {
        let Limits { sessions_per_endpoint, guaranteed_ports_per_endpoint, .. } = self.limits;
        if let (Some(most), Some(guaranteed)) = (sessions_per_endpoint, guaranteed_ports_per_endpoint)
            && guaranteed > most
        {
            report(
                "spec.limits.guaranteedPortsPerEndpoint",
                format!("{guaranteed} is more than sessionsPerEndpoint ({most})"),
            );
        }
        match (&self.service_ref, &self.selectors) {
            (None, None) => report("spec", "needs `serviceRef` or `selectors`".into()),
            (Some(_), Some(_)) => report("spec.selectors", "can't stand beside `serviceRef`: choose one".into()),
            (Some(service), None) if service.name.is_empty() => report("spec.serviceRef.name", "is empty".into()),
            (None, Some(selectors)) if selectors.is_empty() => {
                report(
                    "spec.selectors",
                    "selects nothing; for all pods of the namespace write [{podSelector: {}}]".into(),
                );
            }
            (None, Some(_)) if self.addresses.is_none() && self.pools.is_none() => {
                report("spec.selectors", "needs `addresses` or `pools` beside it: they are the VIPs".into());
            }
            _ => {}
        }
        if self.service_ref.is_some() {
            for (field, given) in [("addresses", self.addresses.is_some()), ("pools", self.pools.is_some())] {
                if given {
                    report(
                        &format!("spec.{field}"),
                        "can't stand beside `serviceRef`: the Service's are the VIPs".into(),
                    );
                }
            }
        }
        each_once("spec.addresses", self.addresses.as_deref().unwrap_or_default(), report);
        let pools: Vec<_> = self.pools.iter().flatten().map(|pool| pool.name.as_str()).collect();
        each_once("spec.pools", &pools, report);
        if self.destination_cidrs.as_ref().is_some_and(Vec::is_empty) {
            report("spec.destinationCIDRs", "is empty; leave it out for every destination".into());
        }
        if let Some(GatewayRef::Names(names)) = &self.gateways {
            if names.is_empty() {
                report("spec.gateways.names", "is empty; leave `gateways` out for every gateway".into());
            }
            each_once("spec.gateways.names", names, report);
        }
    }
}

impl Verify for GatewaySpec {
    fn verify(&self, report: &mut dyn FnMut(&str, String)) {
        if let Some(address) = self.peer_address
            && (address.is_unspecified() || address.is_multicast() || address.is_loopback())
        {
            report("spec.peerAddress", format!("{address} can't be reached from another gateway"));
        }
        let nets: Vec<_> = self.pod_cidrs.iter().map(|cidr| cidr.0).collect();
        each_once("spec.podCIDRs", &nets, report);
        for (i, net) in nets.iter().enumerate().filter(|(_, net)| net.prefix_len() == 0) {
            report(&format!("spec.podCIDRs[{i}]"), format!("{net} holds every address: nothing would be outside"));
        }
    }
}

impl Verify for AddressPoolSpec {
    fn verify(&self, report: &mut dyn FnMut(&str, String)) {
        if self.ranges.is_empty() && self.provider.is_empty() {
            report("spec.ranges", "holds no address: give a range, or a provider".into());
        }
        for (i, range) in self.ranges.iter().enumerate() {
            let overlapped = self.ranges[..i].iter().position(|other| other.overlaps(range));
            if let Some(other) = overlapped {
                report(&format!("spec.ranges[{i}]"), format!("{range} overlaps spec.ranges[{other}]"));
            }
        }
    }
}

pub(super) fn each_once<T: Eq + std::hash::Hash + ToString>(
    field: &str,
    values: &[T],
    report: &mut dyn FnMut(&str, String),
) {
    let mut seen = HashSet::new();
    for (i, value) in values.iter().enumerate() {
        if !seen.insert(value) {
            report(&format!("{field}[{i}]"), format!("{} is in the list already", value.to_string()));
        }
    }
}
