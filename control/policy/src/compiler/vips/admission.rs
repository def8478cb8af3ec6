//! Admission of VIPs: which objects have them, where several claim the same.
//!
//! The oldest Service is served first, then policies by precedence. An object is admitted as a whole or not at all: one that
//! conflicts with an admitted one, or exceeds a limit, claims nothing and takes nothing from others. So who gives way is
//! always the newcomer; `docs/security-model.md` has the table.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::address_record::NamespaceUse;
use crate::compiler::budget::{Grants, Totals, Usage};
use crate::compiler::claim::{Claim, Inputs};
use crate::compiler::inventory::{AgeKey, NamespacedName, ObjectRef, age_key};
use crate::compiler::options::Share;
use crate::diagnostic::{Code, Diagnostic, ObjectLocation, Severity};
use crate::manifest::{ANNOUNCE_FIELD, Announce, Origin, Protocol, Service, ServicePort, unusable_address};

/// A VIP with the objects that have it.
#[derive(Debug, Default)]
pub(in crate::compiler) struct Vip<'a> {
    /// Services with this VIP, oldest first.
    pub(super) services: Vec<ObjectRef<'a, Service>>,
    /// The policy with selectors that uses it, as an index of the claims.
    pub(super) claimed: Option<usize>,
    /// Service by port and protocol.
    pub(super) ports: BTreeMap<(u16, Protocol), ObjectRef<'a, Service>>,
    pub(super) announce: Option<(Announce, ObjectRef<'a, Service>)>,
    /// The namespace of the oldest object with it; who shares it later doesn't move it.
    pub(super) namespace: &'a str,
    /// The policy of that namespace with the highest precedence, which decides on its gateways; `None`: every gateway.
    pub(super) placed_by: Option<usize>,
}

impl<'a> Vip<'a> {
    /// Whether a Service isn't in the namespace of the oldest one.
    fn is_foreign(&self, service: &ObjectRef<'_, Service>) -> bool {
        self.services.first().is_some_and(|oldest| oldest.id.namespace != service.id.namespace)
    }

    /// The announce mode that another Service has to agree with, and whose it is. One of another namespace doesn't decide
    /// for those that name none.
    fn announce_for(
        &self,
        service: &ObjectRef<'_, Service>,
        is_pooled: bool,
    ) -> Option<(Announce, ObjectRef<'a, Service>)> {
        let oldest = self.services.first().filter(|_| !is_pooled && self.is_foreign(service));
        self.announce.or(oldest.map(|oldest| (Announce::default(), *oldest)))
    }

    fn namespace_of_oldest(&self, claims: &[Claim<'a>]) -> &'a str {
        let age = |created: Option<&'a Time>| (created.is_none(), created);
        let service = self.services.first().map(|it| (age(it.body.created.as_ref()), &*it.id.namespace));
        let claim = self.claimed.map(|claim| (age(claims[claim].created), claims[claim].namespace));
        // Of one age, Services precede policies.
        match (service, claim) {
            (Some((service, namespace)), Some((claim, _))) if service <= claim => namespace,
            (_, Some((_, namespace))) | (Some((_, namespace)), None) => namespace,
            (None, None) => "",
        }
    }
}

/// What was admitted.
#[derive(Debug, Default)]
pub(in crate::compiler) struct Admitted<'a> {
    /// The Services, oldest first.
    pub(super) services: Vec<ObjectRef<'a, Service>>,
    pub(super) vips: BTreeMap<IpAddr, Vip<'a>>,
    /// Services that were refused.
    pub(in crate::compiler) refused: HashSet<NamespacedName<'a>>,
    /// Claims that were closed.
    pub(in crate::compiler) closed: Closed,
}

impl Admitted<'_> {
    /// All VIPs.
    pub(in crate::compiler) fn addresses(&self) -> HashSet<IpAddr> {
        self.vips.keys().copied().collect()
    }
}

/// What is closed of the claims, by the location of their objects.
#[derive(Clone, Debug, Default)]
pub(in crate::compiler) struct Closed {
    /// Claims that stay as they are, without VIPs.
    as_written: HashSet<ObjectLocation>,
    /// Claims that exceed a limit, and fit as the least that a policy can be.
    minimal: HashSet<ObjectLocation>,
    /// Claims that don't even fit like that: they cover nothing.
    left_out: HashSet<ObjectLocation>,
}

impl Closed {
    /// Closes the claims.
    pub(in crate::compiler) fn apply(&self, claims: &mut Vec<Claim<'_>>) {
        if !self.left_out.is_empty() {
            claims.retain(|claim| !self.left_out.contains(&claim.origin.location()));
        }
        for claim in claims {
            let location = claim.origin.location();
            if self.minimal.contains(&location) {
                claim.close_minimal();
            } else if self.as_written.contains(&location) {
                claim.close();
            }
        }
    }
}

/// Admits Services and claims. Claims that are refused, or whose Service is, are closed.
pub(in crate::compiler) fn admit<'a>(
    sources: &Inputs<'a>,
    claims: &mut Vec<Claim<'a>>,
    share: Share,
    diagnostics: &mut Vec<Diagnostic>,
) -> Admitted<'a> {
    let with_vips = sources.inventory.services.iter().filter(|service| !service.body.vips.is_empty());
    let mut services: Vec<ObjectRef<'a, Service>> = with_vips.copied().collect();
    services.sort_by_cached_key(|service| age_key(service.body.created.as_ref(), service.id));
    let (excess_services, mut closed) = check_limits(sources, &services, claims, share, diagnostics);
    closed.apply(claims);
    let own = claims.iter().filter(|claim| claim.service.is_none()).flat_map(|claim| claim.vips.iter());
    let unpooled = own.map(|(_, vip)| *vip).filter(|vip| sources.pools.of(*vip).is_none()).collect();
    let mut admission = Admission {
        sources,
        admitted: Admitted::default(),
        health_ports: HashMap::new(),
        in_use: sources.in_use_among(&unpooled),
        namespaces: sources.pools.recorded_use(sources.recorded),
        diagnostics,
    };
    for service in &services {
        admission.add_service(*service, excess_services.contains(&service.origin.location()));
    }
    for claim in claims.iter_mut() {
        if claim.service.is_some_and(|service| admission.admitted.refused.contains(&service)) {
            claim.close();
            closed.as_written.insert(claim.origin.location());
        }
    }
    // The eligible gateways of a Service are those of the referring policy with the highest precedence, else all.
    let mut referrers: HashMap<NamespacedName<'_>, usize> = HashMap::new();
    for (at, claim) in claims.iter().enumerate() {
        if let Some(service) = claim.service {
            referrers.entry(service).or_insert(at);
        }
    }
    for at in 0..claims.len() {
        let claim = &claims[at];
        if claim.service.is_none() && !claim.vips.is_empty() && !admission.add_claim(at, claims) {
            claims[at].close();
            closed.as_written.insert(claims[at].origin.location());
        }
    }
    for vip in admission.admitted.vips.values_mut() {
        vip.namespace = vip.namespace_of_oldest(claims);
        let own = vip.services.iter().filter(|service| service.id.namespace == vip.namespace);
        let mut referring = own.filter_map(|service| referrers.get(&service.namespaced_name()).copied());
        let claimed = vip.claimed.filter(|claim| claims[*claim].namespace == vip.namespace);
        vip.placed_by = referring.next().or(claimed);
    }
    Admitted { closed, ..admission.admitted }
}

/// An object that takes part of limits.
struct Consumer<'c> {
    /// What sorts objects: age, whether it is a policy, name.
    order: (AgeKey<'c>, bool, &'c str),
    namespace: &'c str,
    origin: &'c Origin,
    /// VIPs of its own. One of several objects of a namespace is that of the oldest one that is granted it. It counts for each
    /// namespace that names it: which of them has it is decided later.
    vips: &'c [(Arc<str>, IpAddr)],
    /// Those that it is to have once they are recorded.
    pending: &'c [IpAddr],
    /// What it takes besides VIPs.
    usage: Usage,
}

/// The Services that exceed a limit, and what is closed of the claims.
fn check_limits<'a>(
    sources: &Inputs<'a>,
    services: &[ObjectRef<'a, Service>],
    claims: &[Claim<'a>],
    share: Share,
    diagnostics: &mut Vec<Diagnostic>,
) -> (HashSet<ObjectLocation>, Closed) {
    let of_service = |service: &'_ ObjectRef<'a, Service>| Consumer {
        order: (age_key(service.body.created.as_ref(), service.id), false, service.name),
        namespace: &service.id.namespace,
        origin: service.origin,
        vips: &service.body.vips,
        pending: &[],
        usage: Usage { services: 1, ..Usage::default() },
    };
    let mut consumers: Vec<Consumer<'_>> = services.iter().map(of_service).collect();
    consumers.extend(claims.iter().map(|claim| Consumer {
        order: (age_key(claim.created, claim.id), true, claim.name),
        namespace: claim.namespace,
        origin: claim.origin,
        vips: if claim.service.is_none() { &claim.vips } else { &[] },
        pending: &claim.pending,
        usage: Usage {
            policies: 1,
            prefixes: claim.prefixes(),
            selector_steps: sources.selector_steps(claim),
            ..Usage::default()
        },
    }));
    // At most: a VIP of several objects is counted for each.
    let mut totals = Totals::default();
    for Consumer { namespace, vips, pending, usage, .. } in &consumers {
        totals.add(namespace, &Usage { vips: vips.len() + pending.len(), ..*usage });
    }
    if totals.fits(share) {
        return Default::default();
    }
    consumers.sort_by(|a, b| a.order.cmp(&b.order));
    let (mut grants, mut granted_vips) = (Grants::new(share), HashSet::default());
    let (mut excess_services, mut closed) = (HashSet::default(), Closed::default());
    for Consumer { order: (_, is_policy, _), namespace, origin, vips, pending, usage } in consumers {
        let all = vips.iter().map(|(_, vip)| *vip).chain(pending.iter().copied());
        let new: HashSet<(&str, IpAddr)> =
            all.map(|vip| (namespace, vip)).filter(|vip| !granted_vips.contains(vip)).collect();
        let Err(mut reason) = grants.grant(namespace, &Usage { vips: new.len(), ..usage }) else {
            granted_vips.extend(new);
            continue;
        };
        if !is_policy {
            excess_services.insert(origin.location());
        } else if grants.grant(namespace, &Usage { prefixes: [1, 1], ..usage }).is_ok() {
            closed.minimal.insert(origin.location());
        } else {
            closed.left_out.insert(origin.location());
            reason += "; its endpoints are not covered";
        }
        diagnostics.push(origin.diagnostic(Severity::Error, Code::LimitExceeded, "metadata.name", reason));
    }
    (excess_services, closed)
}

/// An admission under way.
struct Admission<'a, 'b> {
    sources: &'b Inputs<'a>,
    admitted: Admitted<'a>,
    /// Health check ports: they listen on the gateway's own addresses, too.
    health_ports: HashMap<u16, ObjectRef<'a, Service>>,
    /// Addresses of pods, hosts and endpoints among those that policies name outside of pools.
    in_use: HashSet<IpAddr>,
    /// Addresses that namespaces have of pools that limit them.
    namespaces: NamespaceUse<'a>,
    diagnostics: &'b mut Vec<Diagnostic>,
}

impl<'a> Admission<'a, '_> {
    /// Adds a Service, unless it is refused.
    fn add_service(&mut self, service: ObjectRef<'a, Service>, is_excess: bool) {
        let mut faults = Vec::new();
        self.check_vips(service, &mut faults);
        self.check_ports(service, &mut faults);
        if !is_excess && !faults.iter().any(Diagnostic::is_error) {
            let granted = self
                .namespaces
                .grant_all((&service.id.namespace, &service.body.vips), |vip| self.sources.pools.spec_of(vip));
            let refused = granted.err().map(|(field, why)| service.error(Code::NamespaceLimit, field, why));
            faults.extend(refused);
        }
        if is_excess || faults.iter().any(Diagnostic::is_error) {
            self.diagnostics.extend(faults);
            self.admitted.refused.insert(service.namespaced_name());
            return;
        }
        self.diagnostics.extend(faults);
        self.health_ports.extend(service.body.active_health_check().map(|port| (port, service)));
        for (_, address) in &service.body.vips {
            let vip = self.admitted.vips.entry(*address).or_default();
            let health = service.body.health_check.map(|port| (port, Protocol::Tcp));
            let frontends = service.body.ports.iter().map(|it| (it.port, it.protocol));
            vip.ports.extend(frontends.chain(health).map(|key| (key, service)));
            if vip.announce.is_none() && !vip.is_foreign(&service) {
                vip.announce = service.body.announce.map(|mode| (mode, service));
            }
            vip.services.push(service);
        }
        self.admitted.services.push(service);
    }

    /// Checks the VIPs of a Service.
    fn check_vips(&self, service: ObjectRef<'a, Service>, faults: &mut Vec<Diagnostic>) {
        for (field, address) in &service.body.vips {
            faults.extend(self.sources.check_service_vip(service, field, *address));
            // A tenant may write any address into its Service, but into no pool.
            let is_pooled = self.sources.pools.of(*address).is_some();
            faults.extend(self.check_address(*address, service.origin, field, !is_pooled, false));
            let reserved = self.sources.reserved.get(address);
            if let Some(owner) = reserved.filter(|owner| owner.namespace != service.id.namespace) {
                let reason = format!("{address} is already a VIP of {owner}");
                faults.push(service.error(Code::VipOfOtherNamespace, field, reason));
            }
            let Some(vip) = self.admitted.vips.get(address) else { continue };
            if let Some((first, ObjectRef { id, origin, .. })) = vip.announce_for(&service, is_pooled)
                && service.body.announce.is_some_and(|mode| mode != first)
            {
                let reason = format!("{id} ({origin}) shares {address} and has {first}");
                faults.push(service.error(Code::AnnounceConflict, ANNOUNCE_FIELD, reason));
            }
            // Two tenants share it, and remote hosts and firewalls can't distinguish them.
            let other = vip.services.iter().find(|it| it.id.namespace != service.id.namespace);
            if let Some(ObjectRef { id, origin, .. }) = other {
                let reason = format!("{address} is also the VIP of {id} ({origin}): two namespaces share it");
                faults.push(service.warning(Code::VipOfTwoNamespaces, field, reason));
            }
        }
    }

    /// Checks the ports of a Service, its health check's included, at all of its VIPs.
    fn check_ports(&self, service: ObjectRef<'a, Service>, faults: &mut Vec<Diagnostic>) {
        let mut own: HashMap<(u16, Protocol), Option<&ServicePort>> = HashMap::new();
        let health = service.body.health_check.map(|port| (port, Protocol::Tcp, None));
        for (port, protocol, frontend) in
            service.body.ports.iter().map(|it| (it.port, it.protocol, Some(it))).chain(health)
        {
            let field = || frontend.map_or_else(|| Service::HEALTH_CHECK_FIELD.to_owned(), ServicePort::field);
            let is_twice = own.insert((port, protocol), frontend).is_some();
            for (_, address) in &service.body.vips {
                let other = self.admitted.vips.get(address).and_then(|vip| vip.ports.get(&(port, protocol)));
                let other = other.copied().or_else(|| is_twice.then_some(service));
                if let Some(ObjectRef { id, origin, .. }) = other {
                    let reason = format!("{protocol} port {port} of {address} is already used by {id} ({origin})");
                    faults.push(service.error(Code::PortConflict, &field(), reason));
                }
            }
        }
        if let Some(port) = service.body.active_health_check()
            && let Some(ObjectRef { id, origin, .. }) = self.health_ports.get(&port)
        {
            let reason = format!("port {port} is already the health check port of {id} ({origin})");
            faults.push(service.error(Code::HealthCheckPortConflict, Service::HEALTH_CHECK_FIELD, reason));
        }
    }

    /// Adds the VIPs that a policy has of its own; returns whether all of them are its.
    fn add_claim(&mut self, at: usize, claims: &[Claim<'a>]) -> bool {
        let claim = &claims[at];
        let before = self.diagnostics.len();
        for (field, address) in claim.vips.iter() {
            // A Service's VIP gives way to nobody.
            let is_given = self.sources.pools.of(*address).is_some() || self.admitted.vips.contains_key(address);
            let fault = self.check_address(*address, claim.origin, field, !is_given, !is_given);
            self.diagnostics.extend(fault.or_else(|| self.check_claimed(*address, claim, field, claims)));
        }
        if self.diagnostics[before..].iter().any(Diagnostic::is_error) {
            return false;
        }
        for (_, address) in claim.vips.iter() {
            let vip = self.admitted.vips.entry(*address).or_default();
            vip.claimed = Some(at);
        }
        true
    }

    /// Checks that a policy may use an address beside others that have it.
    fn check_claimed(
        &self,
        address: IpAddr,
        claim: &Claim<'_>,
        field: &str,
        claims: &[Claim<'_>],
    ) -> Option<Diagnostic> {
        let vip = self.admitted.vips.get(&address)?;
        let is_foreign = |service: &ObjectRef<'_, Service>| service.id.namespace != claim.namespace;
        let (code, reason) = if let Some(other) = vip.claimed.map(|other| &claims[other]) {
            (Code::VipOfTwoPolicies, format!("{address} is already a VIP of {} ({})", other.name, other.origin))
        } else if !vip.services.is_empty() && vip.services.iter().all(is_foreign) {
            let whose = if claim.namespace.is_empty() {
                "which a ClusterEgressPolicy can't share"
            } else {
                "in another namespace"
            };
            (Code::VipOfOtherNamespace, format!("{address} is the VIP of {}, {whose}", vip.services[0].name))
        } else {
            return None;
        };
        Some(claim.diagnostic(Severity::Error, code, field, reason))
    }

    /// Why an address can't be a VIP. Gateways have their own; a pod, a host or an endpoint has one only where who claims
    /// the VIP gives way to it.
    fn check_address(
        &self,
        address: IpAddr,
        origin: &Origin,
        field: &str,
        gives_way_to_pods: bool,
        gives_way_to_hosts: bool,
    ) -> Option<Diagnostic> {
        let sources = self.sources;
        let gives_way_to = |host: &str| gives_way_to_hosts || gives_way_to_pods && host.starts_with("Pod ");
        let (code, what) = if let Some(what) = unusable_address(address) {
            (Code::UnusableVip, what.to_owned())
        } else if let Some(gateway) = sources.gateways.with_peer_address(address) {
            (Code::VipInUse, format!("the peer address of VipGateway {gateway}"))
        } else if let Some(pod) = sources.pods.name_of(address).filter(|_| gives_way_to_pods) {
            (Code::VipInUse, format!("the address of Pod {pod}"))
        } else if let Some(host) = sources.pods.host_of(address).filter(|host| gives_way_to(host)) {
            (Code::VipInUse, format!("an address of {host}"))
        } else if gives_way_to_hosts && self.in_use.contains(&address) {
            (Code::VipInUse, "the address of an endpoint".to_owned())
        } else {
            return None;
        };
        let reason = format!("{address} can't be a VIP: it is {what}");
        Some(origin.diagnostic(Severity::Error, code, field, reason))
    }
}

/// Warns of pods and hosts that name a VIP: their address is ignored.
pub(in crate::compiler) fn warn_about_addresses(sources: &Inputs<'_>, diagnostics: &mut Vec<Diagnostic>) {
    let is_vip = |address: &IpAddr| sources.vips.contains(address);
    let reason = |address: &IpAddr| format!("{address} is a VIP: the address is ignored");
    for pod in sources.inventory.pods.iter().filter(|pod| pod.body.addresses.iter().any(|(_, it)| is_vip(it))) {
        for (field, address) in pod.body.addresses.iter().filter(|(_, address)| is_vip(address)) {
            diagnostics.push(pod.warning(Code::AddressIsVip, field, reason(address)));
        }
    }
    for node in &sources.inventory.nodes {
        let addresses = node.body.status.iter().flat_map(|status| status.addresses.iter().flatten()).enumerate();
        for (at, text) in addresses {
            if let Some(address) = text.address.parse().ok().filter(is_vip) {
                let field = format!("status.addresses[{at}].address");
                diagnostics.push(node.warning(Code::AddressIsVip, &field, reason(&address)));
            }
        }
    }
}
