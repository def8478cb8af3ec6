//! Egress claims: for each EgressPolicy or annotated Service the pod addresses that it covers, its VIPs and its
//! precedence.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use foldhash::HashSet;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use vipgate_dataplane::policy::spec::{self, EgressSpec};

use super::cluster::ClusterPrefixes;
use super::gateways::{Candidates, Gateways};
use super::inventory::{Inventory, NamespacedName, ObjectRef};
use super::pods::{CoveredAddress, Pods};
use super::pool::{Allocation, Allocator, Lack, Pools, Reserved};
use super::precedence::{Precedence, service_of};
use crate::address_record::Recorded;
use crate::compiler::tenancy::Tenancy;
use crate::diagnostic::{Code, Diagnostic, Severity};
use crate::manifest::{
    AddressSelection, Cidr, Distribution, EGRESS_FIELD, EgressPolicy, EgressPolicySpec, Family, GatewayRef, ObjectId,
    OnExhaustion, Origin, PodSelector, PoolRef, Service, ZoneAffinity,
};
use crate::shortage::Shortage;

/// Precedence by kind of policy, highest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// EgressPolicy or ClusterEgressPolicy with `serviceRef`.
    Service,
    /// EgressPolicy or ClusterEgressPolicy with `selectors`.
    Selectors,
    /// Service with the egress annotation.
    Annotation,
}

impl Rank {
    /// Why it takes precedence over another one.
    pub(super) fn precedence_reason(self, other: Self, is_namespaced: bool) -> &'static str {
        match (self, other) {
            (_, Self::Annotation) if !is_namespaced => "a ClusterEgressPolicy precedes an annotation",
            (_, Self::Annotation) => "an EgressPolicy precedes an annotation",
            _ => "serviceRef precedes selectors",
        }
    }
}

/// The endpoints, VIPs and gateways that a policy claims.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    pub(super) id: &'a ObjectId,
    /// The name of its policy.
    pub(super) name: &'a Arc<str>,
    /// `None`: that of an annotated Service, which is all defaults.
    policy: Option<&'a EgressPolicySpec>,
    /// Its namespace; empty for a ClusterEgressPolicy.
    pub(super) namespace: &'a str,
    pub(super) origin: &'a Origin,
    pub(super) rank: Rank,
    /// `metadata.creationTimestamp`.
    pub(super) created: Option<&'a Time>,
    /// Field for diagnostics about the policy as a whole.
    pub(super) field: &'static str,
    /// Field that defines its VIPs.
    pub(super) vips_field: &'static str,
    /// Source addresses of its endpoints after SNAT, with their fields.
    pub(super) vips: Cow<'a, [(Arc<str>, IpAddr)]>,
    /// The Service that the VIPs belong to, if any.
    pub(super) service: Option<NamespacedName<'a>>,
    /// Name of the object that the VIPs are defined by: the Service, or the policy.
    pub(super) group: &'a Arc<str>,
    /// The selectors of its pods, without a Service.
    pub(super) selectors: &'a [PodSelector],
    /// Covered addresses, with duplicates; empty until [`Inputs::cover`].
    pub(super) covers: Vec<CoveredAddress<'a>>,
    /// Eligible gateways; meaningless without `VipGateway` manifests.
    pub(super) gateways: Candidates,
    pub(super) distribution: Distribution,
    pub(super) zone_affinity: ZoneAffinity,
    /// Whether its VIPs are missing for a reason that was already reported.
    pub(super) is_invalid: bool,
    /// Addresses that it lacks, and that a provider can allocate.
    pub(super) shortages: Vec<Shortage>,
    /// Addresses of pools that it has, closed or not.
    pub(super) kept: Vec<IpAddr>,
    /// Addresses of pools that it is to have once they are recorded.
    pub(super) pending: Vec<IpAddr>,
}

impl Claim<'_> {
    /// Closes it as something that takes as little as possible of limits: for all destinations.
    pub(super) fn close_minimal(&mut self) {
        self.close();
        self.policy = None;
    }

    /// Whether it has no settings of its own.
    pub(super) fn is_default(&self) -> bool {
        self.policy.is_none()
    }

    /// Takes its VIPs away for a reason that was reported: what it covers stays covered, so its traffic is dropped.
    pub(super) fn close(&mut self) {
        self.is_invalid = true;
        self.vips = Cow::Borrowed(&[]);
        self.shortages.clear();
        self.pending.clear();
    }

    /// Number of its prefixes of each family.
    pub(super) fn prefixes(&self) -> [usize; 2] {
        let Some(policy) = self.policy else { return [1, 1] };
        let default = policy.destination_cidrs.is_none();
        let all = policy.destination_cidrs.iter().flatten().chain(&policy.excluded_cidrs);
        let v6 = all.clone().filter(|cidr| cidr.0.network().is_ipv6()).count();
        [all.count() - v6 + usize::from(default), v6 + usize::from(default)]
    }

    pub(super) fn diagnostic(&self, severity: Severity, code: Code, field: &str, reason: String) -> Diagnostic {
        self.origin.diagnostic(severity, code, field, reason)
    }

    /// Adds what it lacks of a pool, where it may have addresses of an earlier entry of `spec.pools` already.
    fn add_shortage(&mut self, pool: &str, family: Family, missing: usize, pools: &Pools<'_>) {
        let is_same = |other: &&mut Shortage| other.pool == pool && other.family == family;
        if let Some(other) = self.shortages.iter_mut().find(is_same) {
            other.wanted += missing;
            return;
        }
        let is_its = |vip: &IpAddr| Family::of(*vip) == family && pools.of(*vip).is_some_and(|of| of.id.name == pool);
        let given = self.vips.iter().filter(|(_, vip)| is_its(vip)).count();
        let (pool, owner) = (pool.to_owned(), self.name.to_string());
        self.shortages.push(Shortage { pool, owner, family, wanted: given + missing });
    }

    /// The policy for the engine.
    pub(super) fn spec(&self) -> EgressSpec {
        let name = self.name.clone();
        match self.policy {
            Some(policy) => egress_spec(name, policy),
            None => default_spec(name),
        }
    }
}

/// Inputs of the compiler's passes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs<'a> {
    pub(super) inventory: &'a Inventory<'a>,
    pub(super) gateways: &'a Gateways<'a>,
    pub(super) pods: &'a Pods<'a>,
    pub(super) pools: &'a Pools<'a>,
    pub(super) cluster: &'a ClusterPrefixes,
    pub(super) tenancy: Tenancy,
    /// Addresses that are VIPs, whatever else names them; empty while claims are collected.
    pub(super) vips: &'a HashSet<IpAddr>,
    /// The record of addresses of pools, if there is one.
    pub(super) recorded: Option<&'a Recorded>,
    /// What policies have by the record; empty while claims are collected.
    pub(super) reserved: &'a Reserved<'a>,
}

/// What policies and annotated Services claim.
pub(super) struct Collected<'a> {
    /// All claims in the order of precedence, without the addresses that they cover.
    pub(super) claims: Vec<Claim<'a>>,
    /// What policies have by the record.
    pub(super) reserved: Reserved<'a>,
}

/// Collects all claims.
pub(super) fn collect<'a>(
    sources: &Inputs<'a>,
    precedence: &Precedence,
    diagnostics: &mut Vec<Diagnostic>,
) -> Collected<'a> {
    let Inventory { services, policies, .. } = sources.inventory;
    // Pools allocate only addresses that no Service and no policy with a higher precedence uses. One with a lower
    // precedence may name such an address, and is refused: it moves nobody.
    let mut allocator = Allocator::new(sources);
    let mut claims = Vec::with_capacity(precedence.policies.len() + precedence.services.len());
    for (policy, service) in &precedence.policies {
        let service = service.map(|service| services[service]);
        claims.push(sources.policy(policies[*policy], service, &mut allocator, diagnostics));
    }
    claims.extend(precedence.services.iter().map(|service| sources.annotated(services[*service], diagnostics)));
    Collected { claims, reserved: allocator.into_reserved() }
}

/// The VIPs that policies have of their own, or are to have, with their owners; by address.
pub(super) fn own_addresses<'a>(claims: &[Claim<'a>]) -> Vec<(IpAddr, &'a ObjectId)> {
    let own = claims.iter().filter(|claim| claim.service.is_none()).flat_map(|claim| {
        let vips = claim.vips.iter().map(|(_, vip)| vip);
        vips.chain(&claim.kept).chain(&claim.pending).map(|vip| (*vip, claim.id))
    });
    // By precedence, where several have one.
    let mut addresses: Vec<(IpAddr, &ObjectId)> = own.collect();
    addresses.sort_by_key(|(address, _)| *address);
    addresses.dedup();
    addresses
}

impl<'a> Inputs<'a> {
    /// Claim of an annotated Service: like an EgressPolicy with this `serviceRef` and all defaults.
    fn annotated(&self, service: ObjectRef<'a, Service>, diagnostics: &mut Vec<Diagnostic>) -> Claim<'a> {
        let ObjectRef { id, name, origin, body } = service;
        if let Some(why) = &body.no_vip_reason {
            let diagnostic = if body.pending { ObjectRef::warning } else { ObjectRef::error };
            let reason = format!("{id} has no egress VIP: {why}");
            diagnostics.push(diagnostic(&service, Code::ServiceWithoutVip, EGRESS_FIELD, reason));
        }
        let key = service.namespaced_name();
        Claim {
            id,
            name,
            policy: None,
            namespace: key.0,
            origin,
            rank: Rank::Annotation,
            created: body.created.as_ref(),
            field: EGRESS_FIELD,
            vips_field: "status.loadBalancer.ingress",
            vips: Cow::Borrowed(&body.vips),
            service: Some(key),
            group: name,
            selectors: &[],
            covers: Vec::new(),
            gateways: self.gateways.candidates(None),
            distribution: Distribution::default(),
            zone_affinity: ZoneAffinity::default(),
            is_invalid: body.no_vip_reason.is_some(),
            shortages: Vec::new(),
            kept: Vec::new(),
            pending: Vec::new(),
        }
    }

    fn policy(
        &self,
        policy: ObjectRef<'a, EgressPolicy>,
        found: Option<ObjectRef<'a, Service>>,
        allocator: &mut Allocator<'a>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Claim<'a> {
        let spec = &policy.body.spec;
        self.check_gateways(policy, diagnostics);
        let mut claim = Claim {
            id: policy.id,
            name: policy.name,
            policy: Some(spec),
            namespace: &policy.id.namespace,
            origin: policy.origin,
            rank: if spec.service_ref.is_some() { Rank::Service } else { Rank::Selectors },
            created: policy.body.metadata.creation_timestamp.as_ref(),
            field: "metadata.name",
            vips_field: "spec.serviceRef.name",
            vips: Cow::Borrowed(&[]),
            service: None,
            group: policy.name,
            selectors: &[],
            covers: Vec::new(),
            gateways: self.gateways.candidates(spec.gateways.as_ref()),
            distribution: spec.distribution,
            zone_affinity: spec.zone_affinity,
            is_invalid: false,
            shortages: Vec::new(),
            kept: Vec::new(),
            pending: Vec::new(),
        };
        if let Some(key) = service_of(&policy) {
            claim.service = Some(key);
            let missing = match found {
                None => Some((Code::NoSuchService, format!("there is no Service {}/{}", key.0, key.1))),
                Some(service) => {
                    let why = service.body.no_vip_reason.as_ref();
                    why.map(|why| (Code::ServiceWithoutVip, no_vip(service, why)))
                }
            };
            claim.is_invalid = missing.is_some();
            claim.group = found.map_or(claim.group, |service| service.name);
            claim.vips = Cow::Borrowed(found.map_or(&[], |service| &service.body.vips));
            let diagnostic =
                if found.is_some_and(|service| service.body.pending) { ObjectRef::warning } else { ObjectRef::error };
            diagnostics.extend(missing.map(|(code, why)| diagnostic(&policy, code, "spec.serviceRef.name", why)));
        } else {
            claim.vips_field = if spec.addresses.is_some() { "spec.addresses" } else { "spec.pools" };
            claim.selectors = policy.body.spec.selectors.as_deref().unwrap_or_default();
            let before = diagnostics.len();
            self.name_addresses(policy, &mut claim, allocator, diagnostics);
            allocator.take(claim.vips.iter().map(|(_, vip)| *vip));
            self.allocate_from_pools(policy, &mut claim, allocator, diagnostics);
            if diagnostics[before..].iter().any(Diagnostic::is_error) {
                allocator.give_back(policy.id, &claim.pending);
                claim.close();
            }
        }
        claim
    }

    /// Adds the addresses that a policy names, but for those that it may not have.
    fn name_addresses(
        &self,
        policy: ObjectRef<'a, EgressPolicy>,
        claim: &mut Claim<'a>,
        allocator: &mut Allocator<'a>,
        diagnostics: &mut Vec<Diagnostic>,
    ) {
        for (i, vip) in policy.body.spec.addresses.iter().flatten().enumerate() {
            let field = format!("spec.addresses[{i}]");
            let refused =
                self.refused_address(policy.id, *vip).map(|(code, reason)| policy.error(code, &field, reason));
            let refused = refused.or_else(|| {
                let refusal = allocator.name(policy.id, *vip).err()?;
                Some(policy.origin.diagnostic(refusal.severity(), refusal.code(), &field, refusal.reason(*vip)))
            });
            if let Some(refused) = refused {
                // Nobody else is kept from using it.
                claim.is_invalid = true;
                diagnostics.push(refused);
            } else {
                claim.vips.to_mut().push((field.into(), *vip));
            }
        }
    }

    /// Labels that the selectors of a claim are compared with.
    pub(super) fn selector_steps(&self, claim: &Claim<'a>) -> usize {
        let pods = self.pods.count(self.reach(claim.namespace));
        let terms = claim.selectors.iter().map(|selector| 1 + selector.pod_selector.terms());
        terms.fold(0, |sum: usize, terms| sum.saturating_add(terms.saturating_mul(pods)))
    }

    /// Adds the addresses that a claim covers.
    pub(super) fn cover(&self, claim: &mut Claim<'a>, diagnostics: &mut Vec<Diagnostic>) {
        if let Some(service) = claim.service {
            claim.covers = self.covered_endpoints(service, diagnostics);
            return;
        }
        for (i, selector) in claim.selectors.iter().enumerate() {
            let before = claim.covers.len();
            let pods = self.pods.select(selector, self.reach(claim.namespace));
            claim.covers.extend(pods.filter(|pod| !self.vips.contains(&pod.address)));
            if let Some(reason) = self.pods_of_others(selector, claim.namespace) {
                let field = format!("spec.selectors[{i}].namespaceSelector");
                diagnostics.push(claim.diagnostic(Severity::Warning, Code::PodsOfOtherNamespace, &field, reason));
            }
            if claim.covers.len() == before {
                let field = format!("spec.selectors[{i}]");
                let reason = "selects no pod that has an address".to_owned();
                diagnostics.push(claim.diagnostic(Severity::Warning, Code::NoPodSelected, &field, reason));
            }
        }
    }

    fn allocate_from_pools(
        &self,
        policy: ObjectRef<'a, EgressPolicy>,
        claim: &mut Claim<'a>,
        allocator: &mut Allocator<'a>,
        diagnostics: &mut Vec<Diagnostic>,
    ) {
        let mut lacks = Vec::new();
        for (i, pool) in policy.body.spec.pools.iter().flatten().enumerate() {
            let field = format!("spec.pools[{i}]");
            if let Err((code, reason)) = self.check_pool(policy.id, &pool.name) {
                claim.is_invalid = true;
                diagnostics.push(policy.error(code, &format!("{field}.name"), reason));
                continue;
            }
            let Allocation { addresses, pending, lack } = allocator.allocate(policy, pool);
            if !pending.is_empty() {
                let reason = format!("{} of AddressPool {} are being recorded for it", pending.len(), pool.name);
                diagnostics.push(policy.warning(Code::AddressPending, &field, reason));
                claim.is_invalid = true;
            }
            claim.kept.extend(addresses.iter().copied());
            let vips_field: Arc<str> = field.as_str().into();
            claim.vips.to_mut().extend(addresses.into_iter().map(|vip| (vips_field.clone(), vip)));
            claim.pending.extend(pending);
            lacks.extend(lack.map(|lack| (field, pool, lack)));
        }
        for (field, pool, lack) in lacks {
            claim.is_invalid = true;
            diagnostics.push(self.report_lack(policy, &field, pool, lack, claim));
        }
    }

    /// Reports that a policy gets too few addresses of a family of a pool; notes what its provider can allocate. A policy
    /// that has some is in force with these, whatever others take.
    fn report_lack(
        &self,
        policy: ObjectRef<'a, EgressPolicy>,
        field: &str,
        pool: &PoolRef,
        (family, missing, lack): (Family, usize, Lack),
        claim: &mut Claim<'a>,
    ) -> Diagnostic {
        let reason = format!("AddressPool {} has fewer than {} free {family} addresses", pool.name, pool.count);
        let severity = if claim.vips.is_empty() { Severity::Error } else { Severity::Warning };
        let report = |severity, code, reason| policy.origin.diagnostic(severity, code, field, reason);
        if let Lack::Limited(why) = lack {
            return report(severity, Code::NamespaceLimit, why);
        }
        if self.pools.may_grow(&pool.name, family) {
            claim.add_shortage(&pool.name, family, missing, self.pools);
            let reason = format!("{reason}: vipgate allocates more at its provider, up to `max`");
            return report(Severity::Warning, Code::PoolExhausted, reason);
        }
        match lack {
            Lack::Quarantined(end) => {
                let reason = format!("{reason}: others are quarantined, the first one until {end:.0}");
                report(Severity::Warning, Code::AddressQuarantined, reason)
            }
            _ => report(severity, Code::PoolExhausted, reason),
        }
    }

    fn check_gateways(&self, policy: ObjectRef<'a, EgressPolicy>, diagnostics: &mut Vec<Diagnostic>) {
        if self.gateways.is_empty() {
            return;
        }
        match &policy.body.spec.gateways {
            Some(GatewayRef::Names(names)) => {
                for (i, name) in names.iter().enumerate().filter(|(_, name)| !self.gateways.contains(name)) {
                    let field = format!("spec.gateways.names[{i}]");
                    let reason = format!("there is no VipGateway {name}");
                    diagnostics.push(policy.warning(Code::NoSuchGateway, &field, reason));
                }
            }
            selector @ Some(GatewayRef::Selector(_)) if self.gateways.candidates(selector.as_ref()).ids.is_empty() => {
                let field = "spec.gateways.selector";
                diagnostics.push(policy.warning(Code::NoGatewaySelected, field, "selects no VipGateway"));
            }
            _ => {}
        }
    }
}

fn no_vip(service: ObjectRef<'_, Service>, why: &str) -> String {
    format!("{} ({}) has no egress VIP: {why}", service.id, service.origin)
}

fn all_destinations() -> Vec<IpNet> {
    vec![Ipv4Net::default().into(), Ipv6Net::default().into()]
}

fn default_spec(name: Arc<str>) -> EgressSpec {
    EgressSpec {
        name,
        destinations: all_destinations(),
        excluded: Vec::new(),
        address_selection: spec::AddressSelection::default(),
        limits: spec::Limits::default(),
        on_exhaustion: spec::OnExhaustion::default(),
    }
}

fn egress_spec(name: Arc<str>, policy: &EgressPolicySpec) -> EgressSpec {
    let sorted =
        |nets: &[Cidr]| -> Vec<IpNet> { nets.iter().map(|cidr| cidr.0).collect::<BTreeSet<_>>().into_iter().collect() };
    EgressSpec {
        name,
        destinations: policy.destination_cidrs.as_deref().map_or_else(all_destinations, sorted),
        excluded: sorted(&policy.excluded_cidrs),
        address_selection: match policy.address_selection {
            AddressSelection::PerEndpoint => spec::AddressSelection::PerEndpoint,
            AddressSelection::PerConnection => spec::AddressSelection::PerConnection,
        },
        limits: spec::Limits {
            sessions: policy.limits.sessions_per_endpoint.map(NonZeroU32::get),
            new_sessions_per_second: policy.limits.new_sessions_per_second.map(NonZeroU32::get),
            guaranteed_ports: policy.limits.guaranteed_ports_per_endpoint.map(NonZeroU32::get),
        },
        on_exhaustion: match policy.on_exhaustion {
            OnExhaustion::Reject => spec::OnExhaustion::Reject,
            OnExhaustion::Drop => spec::OnExhaustion::Drop,
        },
    }
}
