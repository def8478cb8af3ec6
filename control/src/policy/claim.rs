//! Policies to claims: which pod addresses a policy wants to cover, with which VIPs, and how it ranks among others.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use foldhash::HashSet;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use vipgate_dataplane::snapshot::spec;

use super::gateways::{GatewayId, Gateways};
use super::inventory::{Inventory, Key, Located, seniority};
use super::pods::{Cover, Pods};
use super::pool::Pools;
use super::slices::Slices;
use crate::complaint::{Complaint, Severity};
use crate::manifest::{
    AddressSelection, Cidr, Distribution, EGRESS_FIELD, EgressPolicy, EgressPolicySpec, GatewayRef, OnExhaustion,
    Origin, PodSelector, Service, ZoneAffinity,
};

/// What kind of policy it is, first those that win over others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// An EgressPolicy with a Service.
    Service,
    /// One with selectors.
    Selectors,
    /// A Service with the annotation.
    Annotation,
}

impl Rank {
    /// Why it comes before another one.
    pub(super) fn over(self, other: Self) -> &'static str {
        match (self, other) {
            (_, Self::Annotation) => "an EgressPolicy comes before an annotation",
            _ => "one with serviceRef comes before one with selectors",
        }
    }
}

/// What a policy wants.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    /// The policy for the engine.
    pub(super) spec: spec::EgressSpec,
    pub(super) namespace: &'a str,
    pub(super) origin: &'a Origin,
    pub(super) rank: Rank,
    /// When it was made, if it says so.
    pub(super) created: Option<&'a Time>,
    /// Field that says that there is a policy.
    pub(super) field: &'static str,
    /// Field that says which VIPs it has.
    pub(super) vips_field: &'static str,
    /// The VIPs that its endpoints leave with, and the fields that name them.
    pub(super) vips: Vec<(Arc<str>, IpAddr)>,
    /// The Service whose VIPs they are, where they are one's.
    pub(super) service: Option<Key<'a>>,
    /// What it covers; an address may be in it more than once.
    pub(super) covers: Vec<Cover<'a>>,
    /// The gateways that may serve it; of no meaning where none is known.
    pub(super) gateways: Arc<[GatewayId]>,
    pub(super) distribution: Distribution,
    pub(super) zone_affinity: ZoneAffinity,
    /// Whether its VIPs are known to be missing for a reason that was complained about.
    pub(super) broken: bool,
}

impl Claim<'_> {
    pub(super) fn complaint(&self, severity: Severity, field: &str, reason: String) -> Complaint {
        self.origin.complaint(severity, field, reason)
    }
}

/// What claims are made from.
#[derive(Debug)]
pub(super) struct Sources<'a> {
    pub(super) inventory: &'a Inventory<'a>,
    pub(super) gateways: &'a Gateways<'a>,
    pub(super) pods: &'a Pods<'a>,
    pub(super) slices: &'a Slices<'a>,
    pub(super) pools: &'a Pools<'a>,
}

/// All claims, the one that wins over all others first.
pub(super) fn collect<'a>(sources: &Sources<'a>, log: &mut Vec<Complaint>) -> Vec<Claim<'a>> {
    let mut policies = sources.inventory.policies.clone();
    policies.sort_by(|a, b| {
        let rank = |policy: &Located<'a, EgressPolicy>| policy.body.spec.service_ref.is_none();
        let age =
            |policy: &Located<'a, EgressPolicy>| seniority(policy.body.metadata.creation_timestamp.as_ref(), policy.id);
        rank(a).cmp(&rank(b)).then_with(|| age(a).cmp(&age(b)))
    });
    let services = &sources.inventory.services;
    // Who takes addresses from pools must know whose are taken.
    let mut taken = HashSet::default();
    if policies.iter().any(|policy| policy.body.spec.pools.is_some()) {
        taken.extend(services.iter().flat_map(|service| &service.body.vips).map(|(_, vip)| *vip));
        taken.extend(policies.iter().flat_map(|policy| policy.body.spec.addresses.iter().flatten()));
    }
    let mut claims: Vec<_> = policies.iter().map(|policy| sources.policy(*policy, &mut taken, log)).collect();
    let mut annotated: Vec<_> = services.iter().filter(|service| service.body.egress).copied().collect();
    annotated.sort_by_key(|service| seniority(service.body.created.as_ref(), service.id));
    claims.extend(annotated.into_iter().map(|service| sources.annotated(service, log)));
    let services: HashSet<Key<'_>> = claims.iter().filter_map(|claim| claim.service).collect();
    for service in services {
        sources.slices.complain_about_hosts(service, log);
    }
    claims
}

impl<'a> Sources<'a> {
    /// A Service with the annotation: a policy with that Service and all defaults.
    fn annotated(&self, service: Located<'a, Service>, log: &mut Vec<Complaint>) -> Claim<'a> {
        let Located { id, name, origin, body } = service;
        if let Some(why) = &body.unserved {
            let complain = if body.pending { Located::warning } else { Located::error };
            log.push(complain(&service, EGRESS_FIELD, format!("{id} has no VIP to leave with: {why}")));
        }
        let key = service.key();
        Claim {
            spec: spec::EgressSpec {
                name: name.clone(),
                destinations: everything(),
                excluded: Vec::new(),
                address_selection: spec::AddressSelection::default(),
                limits: spec::Limits::default(),
                on_exhaustion: spec::OnExhaustion::default(),
            },
            namespace: key.0,
            origin,
            rank: Rank::Annotation,
            created: body.created.as_ref(),
            field: EGRESS_FIELD,
            vips_field: "status.loadBalancer.ingress",
            vips: body.vips.clone(),
            service: Some(key),
            covers: self.slices.of(key),
            gateways: self.gateways.candidates(None),
            distribution: Distribution::default(),
            zone_affinity: ZoneAffinity::default(),
            broken: body.unserved.is_some(),
        }
    }

    fn policy(
        &self,
        policy: Located<'a, EgressPolicy>,
        taken: &mut HashSet<IpAddr>,
        log: &mut Vec<Complaint>,
    ) -> Claim<'a> {
        let spec = &policy.body.spec;
        self.complain_about_gateways(policy, log);
        let mut claim = Claim {
            spec: egress_spec(policy.name.clone(), spec),
            namespace: &policy.id.namespace,
            origin: policy.origin,
            rank: if spec.service_ref.is_some() { Rank::Service } else { Rank::Selectors },
            created: policy.body.metadata.creation_timestamp.as_ref(),
            field: "metadata.name",
            vips_field: "spec.serviceRef.name",
            vips: Vec::new(),
            service: None,
            covers: Vec::new(),
            gateways: self.gateways.candidates(spec.gateways.as_ref()),
            distribution: spec.distribution,
            zone_affinity: spec.zone_affinity,
            broken: false,
        };
        if let Some(service) = &spec.service_ref {
            let key = (policy.id.namespace.as_str(), service.name.as_str());
            claim.service = Some(key);
            claim.covers = self.slices.of(key);
            let known = self.inventory.service(key);
            let missing = match known {
                None => Some(format!("there is no Service {}/{}", key.0, key.1)),
                Some(service) => service.body.unserved.as_ref().map(|why| unserved(service, why)),
            };
            claim.broken = missing.is_some();
            claim.vips = known.map(|service| service.body.vips.clone()).unwrap_or_default();
            let complain =
                if known.is_some_and(|service| service.body.pending) { Located::warning } else { Located::error };
            log.extend(missing.map(|why| complain(&policy, "spec.serviceRef.name", why)));
        } else {
            claim.vips_field = if spec.addresses.is_some() { "spec.addresses" } else { "spec.pools" };
            claim.covers = self.selected(policy, spec.selectors.as_deref().unwrap_or_default(), log);
            let addresses = spec.addresses.iter().flatten().enumerate();
            claim.vips = addresses.map(|(i, vip)| (format!("spec.addresses[{i}]").into(), *vip)).collect();
            self.take_from_pools(policy, &mut claim, taken, log);
        }
        claim
    }

    fn selected(
        &self,
        policy: Located<'a, EgressPolicy>,
        selectors: &[PodSelector],
        log: &mut Vec<Complaint>,
    ) -> Vec<Cover<'a>> {
        let mut covers = Vec::new();
        for (i, selector) in selectors.iter().enumerate() {
            let before = covers.len();
            covers.extend(self.pods.select(selector, &policy.id.namespace));
            if covers.len() == before {
                log.push(policy.warning(&format!("spec.selectors[{i}]"), "selects no pod that has an address"));
            }
        }
        covers
    }

    fn take_from_pools(
        &self,
        policy: Located<'a, EgressPolicy>,
        claim: &mut Claim<'a>,
        taken: &mut HashSet<IpAddr>,
        log: &mut Vec<Complaint>,
    ) {
        for (i, pool) in policy.body.spec.pools.iter().flatten().enumerate() {
            let field = format!("spec.pools[{i}]");
            if !self.pools.exists(&pool.name) {
                claim.broken = true;
                log.push(policy.error(&format!("{field}.name"), format!("there is no AddressPool {}", pool.name)));
                continue;
            }
            let (vips, short) = self.pools.take(&pool.name, &policy.id.path(), pool.count.get(), taken);
            if let Some(family) = short {
                let reason = format!("AddressPool {} has not {} free {family} addresses", pool.name, pool.count);
                log.push(policy.error(&field, reason));
            }
            let field: Arc<str> = field.into();
            claim.vips.extend(vips.into_iter().map(|vip| (field.clone(), vip)));
        }
    }

    fn complain_about_gateways(&self, policy: Located<'a, EgressPolicy>, log: &mut Vec<Complaint>) {
        if self.gateways.are_unknown() {
            return;
        }
        match &policy.body.spec.gateways {
            Some(GatewayRef::Names(names)) => {
                for (i, name) in names.iter().enumerate().filter(|(_, name)| !self.gateways.exists(name)) {
                    let field = format!("spec.gateways.names[{i}]");
                    log.push(policy.warning(&field, format!("there is no Gateway {name}")));
                }
            }
            selector @ Some(GatewayRef::Selector(_)) if self.gateways.candidates(selector.as_ref()).is_empty() => {
                log.push(policy.warning("spec.gateways.selector", "selects no Gateway"));
            }
            _ => {}
        }
    }
}

fn unserved(service: Located<'_, Service>, why: &str) -> String {
    format!("{} ({}) has no VIP to leave with: {why}", service.id, service.origin)
}

fn everything() -> Vec<IpNet> {
    vec![Ipv4Net::default().into(), Ipv6Net::default().into()]
}

fn egress_spec(name: Arc<str>, policy: &EgressPolicySpec) -> spec::EgressSpec {
    let sorted =
        |nets: &[Cidr]| -> Vec<IpNet> { nets.iter().map(|cidr| cidr.0).collect::<BTreeSet<_>>().into_iter().collect() };
    spec::EgressSpec {
        name,
        destinations: policy.destination_cidrs.as_deref().map_or_else(everything, sorted),
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
