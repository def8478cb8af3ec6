//! Custom resources `vipgate.io/v1alpha1`: `EgressPolicy`, `ClusterEgressPolicy` and `VipGateway`. Unlike in Kubernetes' kinds, an
//! unknown field is an error.

use std::collections::HashSet;
use std::net::IpAddr;
use std::num::NonZeroU32;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use vipgate_dataplane::policy::limits::{
    MAX_ADDRESSES_OF_POLICY, MAX_GATEWAYS_OF_POLICY, MAX_GUARANTEED_PORTS, MAX_POOLS_OF_POLICY, MAX_PREFIXES_OF_POLICY,
    MAX_SELECTORS_OF_POLICY, MAX_SESSIONS_PER_ENDPOINT, MAX_VIPS,
};

use super::schema::{Metadata, policy_alternatives};
use super::{Cidr, LabelSelector};
use crate::diagnostic::Code;
use crate::schema::Address;

/// A document of a custom resource. An item of a list may have `apiVersion` and `kind` of the list.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Document<S> {
    #[serde(rename = "apiVersion")]
    #[schemars(with = "String")]
    _api_version: Option<IgnoredAny>,
    #[serde(rename = "kind")]
    #[schemars(with = "String")]
    _kind: Option<IgnoredAny>,
    #[schemars(with = "Metadata")]
    pub(super) metadata: ObjectMeta,
    pub(super) spec: S,
    #[serde(rename = "status")]
    #[schemars(with = "Option<serde_json::Value>")]
    _status: Option<IgnoredAny>,
}

/// Receives errors in one object: code, field and reason.
pub(super) type ReportError<'a> = dyn FnMut(Code, &str, String) + 'a;

/// Validation beyond the types of the fields.
pub(super) trait Validate {
    /// Reports each error as (code, field, reason); the field is relative to the object.
    fn validate(&self, report: &mut ReportError<'_>);
}

/// SNAT policy: the VIPs of selected pods. The content of an `EgressPolicy` and of a `ClusterEgressPolicy`.
#[derive(Clone, Debug)]
pub struct EgressPolicy {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// Its spec.
    pub spec: EgressPolicySpec,
}

/// Spec of an `EgressPolicy`. Exactly one of `serviceRef` and `selectors` is required.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("oneOf" = policy_alternatives()))]
pub struct EgressPolicySpec {
    /// Service that defines the VIPs (its ingress addresses) and the pods (its endpoints).
    pub service_ref: Option<ServiceRef>,
    /// Pods by label; the union of all entries.
    #[schemars(length(min = 1, max = MAX_SELECTORS_OF_POLICY))]
    pub selectors: Option<Vec<PodSelector>>,
    /// With selectors: VIPs.
    #[schemars(with = "Option<Vec<Address>>", length(max = MAX_ADDRESSES_OF_POLICY), extend("uniqueItems" = true))]
    pub addresses: Option<Vec<IpAddr>>,
    /// With selectors: VIPs allocated from pools.
    #[schemars(length(max = MAX_POOLS_OF_POLICY))]
    pub pools: Option<Vec<PoolRef>>,
    /// Destinations with SNAT. Default: all.
    #[serde(rename = "destinationCIDRs")]
    #[schemars(length(min = 1, max = MAX_PREFIXES_OF_POLICY))]
    pub destination_cidrs: Option<Vec<Cidr>>,
    /// Destinations without SNAT; the longest prefix of both lists decides. Default: none.
    #[serde(default, rename = "excludedCIDRs")]
    #[schemars(length(max = MAX_PREFIXES_OF_POLICY), extend("default" = []))]
    pub excluded_cidrs: Vec<Cidr>,
    /// Eligible gateways. Default: every gateway.
    pub gateways: Option<GatewayRef>,
    /// Distribution of endpoints over gateways. Default: `Rendezvous`.
    #[serde(default)]
    pub distribution: Distribution,
    /// Selection among several VIPs. Default: `PerEndpoint`.
    #[serde(default)]
    pub address_selection: AddressSelection,
    /// Whether an endpoint's gateway must be in its zone. Default: `None`.
    #[serde(default)]
    pub zone_affinity: ZoneAffinity,
    /// Limits per endpoint. Default: none.
    #[serde(default)]
    pub limits: Limits,
    /// Action when no session can be opened because of limits or port exhaustion. Default: `Reject`.
    #[serde(default)]
    pub on_exhaustion: OnExhaustion,
}

/// Spec of a `ClusterEgressPolicy`: that of an `EgressPolicy`, but `serviceRef` has a namespace, and a selector without
/// `namespaceSelector` selects pods of all namespaces.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ClusterEgressPolicySpec(pub EgressPolicySpec);

/// A Service.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceRef {
    /// Its name.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Its namespace: required in a `ClusterEgressPolicy`; in an `EgressPolicy` it is the policy's.
    #[schemars(length(min = 1))]
    pub namespace: Option<String>,
}

/// Pods by labels of the pod and of its namespace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PodSelector {
    /// Namespaces. Default: the policy's namespace.
    pub namespace_selector: Option<LabelSelector>,
    /// Pods in these namespaces; `{}` selects all.
    pub pod_selector: LabelSelector,
}

/// VIPs from a pool.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolRef {
    /// The pool's name.
    pub name: String,
    /// Number of VIPs of each address family of the pool. Default: 1.
    #[serde(default = "one")]
    #[schemars(range(max = MAX_ADDRESSES_OF_POLICY))]
    pub count: NonZeroU32,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

/// Gateways by name or by label.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GatewayRef {
    /// By name.
    Names(#[schemars(length(min = 1, max = MAX_GATEWAYS_OF_POLICY), extend("uniqueItems" = true))] Vec<String>),
    /// By labels of the VipGateway manifests.
    Selector(LabelSelector),
}

/// Distribution of endpoints over gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum Distribution {
    /// Rendezvous hashing: adding or removing a gateway moves a minimum of endpoints.
    #[default]
    Rendezvous,
    /// Round robin: sorted endpoints over sorted gateways.
    RoundRobin,
}

/// Selection among several VIPs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum AddressSelection {
    /// One VIP per endpoint and address family.
    #[default]
    PerEndpoint,
    /// Each session selects a VIP.
    PerConnection,
}

/// Whether an endpoint's gateway must be in its zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum ZoneAffinity {
    /// No affinity.
    #[default]
    None,
    /// If a gateway is in the zone.
    Prefer,
    /// Without a gateway in the zone, traffic is dropped.
    Require,
}

/// Limits per endpoint; an omitted field is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Limits {
    /// Concurrent sessions.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_SESSIONS_PER_ENDPOINT))]
    pub sessions_per_endpoint: Option<NonZeroU32>,
    /// New sessions per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_SESSIONS_PER_ENDPOINT))]
    pub new_sessions_per_second: Option<NonZeroU32>,
    /// Ports guaranteed per destination, independent of other endpoints of the same VIP.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_GUARANTEED_PORTS))]
    pub guaranteed_ports_per_endpoint: Option<NonZeroU32>,
}

/// Action when no session can be opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum OnExhaustion {
    /// ICMP "administratively prohibited"; a reset for TCP.
    #[default]
    Reject,
    /// Drop silently.
    Drop,
}

/// Action for packets of pods to destinations outside the cluster that no policy covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UncoveredAction {
    /// Drop, with reason `no_policy`.
    Drop,
    /// Pass to the kernel.
    Pass,
}

/// A gateway: locality, peer address and capacity for VIPs.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// Its metadata; policies select gateways by label.
    pub metadata: ObjectMeta,
    /// Its spec.
    pub spec: GatewaySpec,
}

/// Spec of a `VipGateway`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct GatewaySpec {
    /// Its zone.
    pub zone: Option<String>,
    /// Its Kubernetes node, as `node` in its gateway.yaml. Default: its name.
    pub node: Option<String>,
    /// Its address for other gateways.
    #[schemars(with = "Option<Address>")]
    pub peer_address: Option<IpAddr>,
    /// Maximum number of VIPs. Default: no limit.
    #[schemars(range(max = MAX_VIPS))]
    pub max_addresses: Option<NonZeroU32>,
    /// Pod prefixes behind it, in addition to `pod_cidrs` of configuration files.
    #[serde(default, rename = "podCIDRs")]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub pod_cidrs: Vec<Cidr>,
    /// Action for packets of pods that no policy covers. Default: that of the policy server, else `drop` if pod
    /// prefixes are configured.
    pub uncovered: Option<UncoveredAction>,
    /// Its instance at a cloud provider, as `spec.providerID` of a Node. Default: that of its node.
    #[serde(rename = "providerID")]
    pub provider_id: Option<String>,
    /// The NIC of the instance that gets public addresses: its id, name, or index. Default: the primary one.
    pub nic: Option<String>,
}

impl Validate for EgressPolicySpec {
    fn validate(&self, report: &mut ReportError<'_>) {
        if self.service_ref.as_ref().is_some_and(|service| service.namespace.is_some()) {
            let reason = "is only for a ClusterEgressPolicy: an EgressPolicy refers to a Service in its own namespace; \
                          remove the field, or write a ClusterEgressPolicy";
            report(Code::ServiceRefNamespace, "spec.serviceRef.namespace", reason.into());
        }
        self.validate_fields(report);
    }
}

impl Validate for ClusterEgressPolicySpec {
    fn validate(&self, report: &mut ReportError<'_>) {
        let field = "spec.serviceRef.namespace";
        match self.0.service_ref.as_ref().map(|service| service.namespace.as_deref()) {
            Some(None) => {
                let reason = "is missing: a ClusterEgressPolicy has no namespace of its own";
                report(Code::MissingField, field, reason.into());
            }
            Some(Some("")) => report(Code::EmptyValue, field, "is empty".into()),
            _ => {}
        }
        self.0.validate_fields(report);
    }
}

impl EgressPolicySpec {
    /// Validates what both kinds have in common.
    fn validate_fields(&self, report: &mut ReportError<'_>) {
        self.validate_counts(report);
        let Limits { sessions_per_endpoint, guaranteed_ports_per_endpoint, .. } = self.limits;
        if let (Some(max), Some(guaranteed)) = (sessions_per_endpoint, guaranteed_ports_per_endpoint)
            && guaranteed > max
        {
            report(
                Code::InconsistentLimits,
                "spec.limits.guaranteedPortsPerEndpoint",
                format!("{guaranteed} is more than sessionsPerEndpoint ({max})"),
            );
        }
        match (&self.service_ref, &self.selectors) {
            (None, None) => {
                report(Code::PolicyWithoutPods, "spec", "needs `serviceRef` or `selectors`".into());
            }
            (Some(_), Some(_)) => {
                let reason = "can't be combined with `serviceRef`";
                report(Code::PolicySourcesCombined, "spec.selectors", reason.into());
            }
            (Some(service), None) if service.name.is_empty() => {
                report(Code::EmptyValue, "spec.serviceRef.name", "is empty".into());
            }
            (None, Some(selectors)) if selectors.is_empty() => {
                report(
                    Code::EmptyValue,
                    "spec.selectors",
                    "is empty and selects nothing; to select all pods write [{podSelector: {}}]".into(),
                );
            }
            (None, Some(_)) if self.addresses.is_none() && self.pools.is_none() => {
                let reason = "needs `addresses` or `pools` for the VIPs";
                report(Code::PolicyWithoutVips, "spec.selectors", reason.into());
            }
            _ => {}
        }
        if self.service_ref.is_some() {
            for (field, is_set) in [("addresses", self.addresses.is_some()), ("pools", self.pools.is_some())] {
                if is_set {
                    report(
                        Code::PolicySourcesCombined,
                        &format!("spec.{field}"),
                        "can't be combined with `serviceRef`, which defines the VIPs".into(),
                    );
                }
            }
        }
        check_unique("spec.addresses", self.addresses.as_deref().unwrap_or_default(), report);
        let pools: Vec<_> = self.pools.iter().flatten().map(|pool| pool.name.as_str()).collect();
        check_unique("spec.pools", &pools, report);
        if self.destination_cidrs.as_ref().is_some_and(Vec::is_empty) {
            report(Code::EmptyValue, "spec.destinationCIDRs", "is empty; omit it for all destinations".into());
        }
        if let Some(GatewayRef::Names(names)) = &self.gateways {
            if names.is_empty() {
                let reason = "is empty; omit `gateways` for every gateway";
                report(Code::EmptyValue, "spec.gateways.names", reason.into());
            }
            check_unique("spec.gateways.names", names, report);
        }
    }
}

impl EgressPolicySpec {
    /// Validates the lengths of its lists, and its numbers.
    fn validate_counts(&self, report: &mut ReportError<'_>) {
        let length = |list: Option<usize>| list.unwrap_or_default();
        for (field, count, max) in [
            ("spec.selectors", length(self.selectors.as_ref().map(Vec::len)), MAX_SELECTORS_OF_POLICY),
            ("spec.addresses", length(self.addresses.as_ref().map(Vec::len)), MAX_ADDRESSES_OF_POLICY),
            ("spec.pools", length(self.pools.as_ref().map(Vec::len)), MAX_POOLS_OF_POLICY),
            ("spec.destinationCIDRs", length(self.destination_cidrs.as_ref().map(Vec::len)), MAX_PREFIXES_OF_POLICY),
            ("spec.excludedCIDRs", self.excluded_cidrs.len(), MAX_PREFIXES_OF_POLICY),
        ] {
            check_count(field, count, max, report);
        }
        match &self.gateways {
            Some(GatewayRef::Names(names)) => {
                check_count("spec.gateways.names", names.len(), MAX_GATEWAYS_OF_POLICY, report);
            }
            Some(GatewayRef::Selector(selector)) => selector.validate("spec.gateways.selector", report),
            None => {}
        }
        for (i, PodSelector { namespace_selector, pod_selector }) in self.selectors.iter().flatten().enumerate() {
            pod_selector.validate(&format!("spec.selectors[{i}].podSelector"), report);
            if let Some(selector) = namespace_selector {
                selector.validate(&format!("spec.selectors[{i}].namespaceSelector"), report);
            }
        }
        for (i, pool) in self.pools.iter().flatten().enumerate() {
            check_max(&format!("spec.pools[{i}].count"), Some(pool.count), MAX_ADDRESSES_OF_POLICY, report);
        }
        let Limits { sessions_per_endpoint, new_sessions_per_second, guaranteed_ports_per_endpoint } = self.limits;
        for (field, number, max) in [
            ("spec.limits.sessionsPerEndpoint", sessions_per_endpoint, MAX_SESSIONS_PER_ENDPOINT),
            ("spec.limits.newSessionsPerSecond", new_sessions_per_second, MAX_SESSIONS_PER_ENDPOINT),
            ("spec.limits.guaranteedPortsPerEndpoint", guaranteed_ports_per_endpoint, MAX_GUARANTEED_PORTS),
        ] {
            check_max(field, number, max, report);
        }
    }
}

/// Reports a list that is too long.
pub(super) fn check_count(field: &str, count: usize, max: usize, report: &mut ReportError<'_>) {
    if count > max {
        report(Code::OutOfRange, field, format!("has {count} entries, the maximum is {max}"));
    }
}

/// Reports a number that is too high.
fn check_max(field: &str, number: Option<NonZeroU32>, max: usize, report: &mut ReportError<'_>) {
    if let Some(number) = number.filter(|number| number.get() as usize > max) {
        report(Code::OutOfRange, field, format!("is {number}, the maximum is {max}"));
    }
}

impl Validate for GatewaySpec {
    fn validate(&self, report: &mut ReportError<'_>) {
        check_max("spec.maxAddresses", self.max_addresses, MAX_VIPS, report);
        if let Some(address) = self.peer_address
            && (address.is_unspecified() || address.is_multicast() || address.is_loopback())
        {
            let reason = format!("{address} is not reachable from another gateway");
            report(Code::UnreachableAddress, "spec.peerAddress", reason);
        }
        let nets: Vec<_> = self.pod_cidrs.iter().map(|cidr| cidr.0).collect();
        check_unique("spec.podCIDRs", &nets, report);
        for (i, net) in nets.iter().enumerate().filter(|(_, net)| net.prefix_len() == 0) {
            let reason = format!("{net} covers every address: no destination would be outside the cluster");
            report(Code::PrefixOfEverything, &format!("spec.podCIDRs[{i}]"), reason);
        }
    }
}

/// Reports duplicate values of a list.
pub(super) fn check_unique<T: Eq + std::hash::Hash + ToString>(
    field: &str,
    values: &[T],
    report: &mut ReportError<'_>,
) {
    let mut seen = HashSet::new();
    for (i, value) in values.iter().enumerate() {
        if !seen.insert(value) {
            report(Code::DuplicateValue, &format!("{field}[{i}]"), format!("{} is a duplicate", value.to_string()));
        }
    }
}
