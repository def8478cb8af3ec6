//! VIP table: owners, announce mode, shards and reserved ports of each VIP, and checks of conflicting claims.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use vipgate_dataplane::policy::spec;
use vipgate_dataplane::policy::spec::{ShardSpec, VipSpec};

use super::claim::{Claim, Inputs};
use super::gateways::{GatewayId, Gateways, VipRequest};
use super::inventory::{NamespacedName, ObjectRef, age_key};
use crate::diagnostic::{Code, Diagnostic, Severity};
use crate::manifest::{ANNOUNCE_FIELD, Announce, Origin, Protocol, Service, ServicePort, unusable_address};

/// A VIP while objects that use it are collected.
#[derive(Debug, Default)]
struct Vip<'a> {
    /// Services with this VIP, oldest first.
    services: Vec<ObjectRef<'a, Service>>,
    /// The policy with selectors that uses it.
    claimed: Option<&'a Claim<'a>>,
    /// Service by port and protocol.
    ports: BTreeMap<(u16, Protocol), ObjectRef<'a, Service>>,
    announce: Option<(Announce, ObjectRef<'a, Service>)>,
    /// Eligible gateways: those of the policy with the highest precedence; `None`: every gateway.
    gateways: Option<&'a Arc<[GatewayId]>>,
}

impl Vip<'_> {
    /// Names of its Services and its policy.
    fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.services.iter().map(|service| service.name).chain(self.claimed.map(|claim| &claim.spec.name))
    }
}

/// A VIP that is assigned to at least one gateway.
#[derive(Debug)]
pub(super) struct AssignedVip {
    pub(super) spec: VipSpec,
    /// Owning gateways; empty if there are no `Gateway` manifests.
    pub(super) owners: Vec<GatewayId>,
}

/// Result: the assigned VIPs, sorted, and all VIPs that are (by mistake) endpoint addresses, too.
pub(super) struct VipTable {
    pub(super) assigned: Vec<AssignedVip>,
    pub(super) endpoint_addresses: HashSet<IpAddr>,
}

/// Collects all VIPs and assigns them to gateways; a VIP without an eligible gateway is left out. If two Services
/// conflict, the older one takes precedence.
pub(super) fn compile<'a>(
    sources: &Inputs<'a>,
    claims: &'a [Claim<'a>],
    diagnostics: &mut Vec<Diagnostic>,
) -> VipTable {
    let mut services: Vec<&ObjectRef<'a, Service>> = sources.inventory.services.iter().collect();
    services.sort_by_cached_key(|service| age_key(service.body.created.as_ref(), service.id));
    // The eligible gateways of a Service are those of the referring policy with the highest precedence, else all.
    let mut referrers: HashMap<NamespacedName<'_>, &Claim<'_>> = HashMap::new();
    for claim in claims {
        if let Some(service) = claim.service {
            referrers.entry(service).or_insert(claim);
        }
    }
    let of_services = services.iter().flat_map(|service| &service.body.vips);
    let all = of_services.chain(claims.iter().flat_map(|claim| &claim.vips));
    let endpoints = sources.slices.endpoints_among(&all.map(|(_, vip)| *vip).collect());
    let mut vips = BTreeMap::new();
    for service in &services {
        for (field, vip) in &service.body.vips {
            check_address(*vip, service.origin, field, sources, &endpoints, diagnostics);
            let entry: &mut Vip<'_> = vips.entry(*vip).or_default();
            check_namespace(*vip, entry, **service, field, diagnostics);
            add_service(*vip, entry, **service, diagnostics);
            if let Some(claim) = referrers.get(&service.namespaced_name()) {
                entry.gateways.get_or_insert(&claim.gateways);
            }
        }
    }
    for claim in claims.iter().filter(|claim| claim.service.is_none()) {
        for (field, vip) in &claim.vips {
            check_address(*vip, claim.origin, field, sources, &endpoints, diagnostics);
            add_claim(*vip, vips.entry(*vip).or_default(), claim, field, diagnostics);
        }
    }
    check_announce_modes(sources, diagnostics);
    VipTable { assigned: assign(&vips, sources), endpoint_addresses: endpoints }
}

fn assign(vips: &BTreeMap<IpAddr, Vip<'_>>, sources: &Inputs<'_>) -> Vec<AssignedVip> {
    let gateways = sources.gateways;
    let mode = |address: &IpAddr, vip: &Vip<'_>| {
        let pool = sources.pools.announce(*address).map(|(announce, _)| announce);
        pool.or(vip.announce.as_ref().map(|(announce, _)| *announce)).unwrap_or_default()
    };
    let modes: Vec<Announce> = vips.iter().map(|(address, vip)| mode(address, vip)).collect();
    let requests: Vec<VipRequest<'_>> = vips
        .iter()
        .zip(&modes)
        .map(|((address, vip), announce)| VipRequest {
            vip: *address,
            group: vip.names().next().map(|name| &**name).unwrap_or_default(),
            candidates: vip.gateways.cloned().unwrap_or_else(|| gateways.candidates(None)),
            shared: *announce == Announce::Bgp,
        })
        .collect();
    let assignment = gateways.assign(&requests);
    let shards: Vec<_> = requests
        .iter()
        .zip(&assignment.owners)
        .map(|(request, owners)| shards(request, owners, &assignment.remaining_capacity, gateways))
        .collect();
    let assigned = vips.iter().zip(modes).zip(assignment.owners).zip(shards);
    assigned
        .filter(|((_, owners), _)| gateways.is_empty() || !owners.is_empty())
        .map(|((((address, vip), mode), owners), shards)| {
            let spec = VipSpec { shards, ..vip_spec(*address, vip, mode) };
            AssignedVip { spec, owners }
        })
        .collect()
}

/// One shard per owner, with its port blocks and backup gateways: the other owners, or, if there is one owner, the
/// other candidates.
fn shards(
    request: &VipRequest<'_>,
    owners: &[GatewayId],
    capacity: &[usize],
    gateways: &Gateways<'_>,
) -> Vec<ShardSpec> {
    let blocks = match owners {
        [] | [_] => vec![None; owners.len()],
        several => gateways.port_blocks(request.vip, several).into_iter().map(|own| Some(Arc::new(own))).collect(),
    };
    let candidates = if request.shared { owners } else { &*request.candidates };
    let shard = |(&home, blocks): (&GatewayId, _)| {
        let backups = gateways.backups(request.group, home, candidates, capacity);
        let backups = backups.into_iter().map(|id| gateways.name(id).clone()).collect();
        ShardSpec { gateway: gateways.name(home).clone(), blocks, backups }
    };
    owners.iter().zip(blocks).map(shard).collect()
}

fn add_service<'a>(
    address: IpAddr,
    vip: &mut Vip<'a>,
    service: ObjectRef<'a, Service>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let frontends = service.body.ports.iter().map(|it| (it.port, it.protocol, Some(it)));
    let health = service.body.health_check.map(|port| (port, Protocol::Tcp, None));
    for (port, protocol, frontend) in frontends.chain(health) {
        match vip.ports.entry((port, protocol)) {
            Entry::Occupied(other) => {
                let ObjectRef { id, origin, .. } = other.get();
                let reason = format!("{protocol} port {port} of {address} is already used by {id} ({origin})");
                let field = frontend.map_or_else(|| Service::HEALTH_CHECK_FIELD.to_owned(), ServicePort::field);
                diagnostics.push(service.error(Code::PortConflict, &field, reason));
            }
            Entry::Vacant(free) => {
                free.insert(service);
            }
        }
    }
    match (&vip.announce, service.body.announce) {
        (Some((first, ObjectRef { id, origin, .. })), Some(mode)) if *first != mode => {
            let reason = format!("{id} ({origin}) shares {address} and has {first}");
            diagnostics.push(service.error(Code::AnnounceConflict, ANNOUNCE_FIELD, reason));
        }
        (None, Some(mode)) => vip.announce = Some((mode, service)),
        _ => {}
    }
    vip.services.push(service);
}

/// Warns of a VIP in two namespaces: two tenants share it, and remote hosts and firewalls can't distinguish them.
fn check_namespace<'a>(
    address: IpAddr,
    vip: &Vip<'a>,
    service: ObjectRef<'a, Service>,
    field: &str,
    diagnostics: &mut Vec<Diagnostic>,
) {
    if let Some(ObjectRef { id, origin, .. }) = vip.services.iter().find(|it| it.id.namespace != service.id.namespace) {
        let reason = format!("{address} is also the VIP of {id} ({origin}): two namespaces share it");
        diagnostics.push(service.warning(Code::VipOfTwoNamespaces, field, reason));
    }
}

fn add_claim<'a>(
    address: IpAddr,
    vip: &mut Vip<'a>,
    claim: &'a Claim<'a>,
    field: &str,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let is_foreign = |service: &ObjectRef<'_, Service>| service.id.namespace != claim.namespace;
    if let Some(other) = vip.claimed {
        let reason = format!("{address} is already a VIP of {} ({})", other.spec.name, other.origin);
        diagnostics.push(claim.diagnostic(Severity::Error, Code::VipOfTwoPolicies, field, reason));
    } else if !vip.services.is_empty() && vip.services.iter().all(is_foreign) {
        let names: Vec<&str> = vip.names().map(|name| &**name).collect();
        let reason = format!("{address} is the VIP of {}, in another namespace", names.join(", "));
        diagnostics.push(claim.diagnostic(Severity::Error, Code::VipOfOtherNamespace, field, reason));
    } else {
        vip.claimed = Some(claim);
        vip.gateways.get_or_insert(&claim.gateways);
    }
}

fn check_address(
    address: IpAddr,
    origin: &Origin,
    field: &str,
    sources: &Inputs<'_>,
    endpoints: &HashSet<IpAddr>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let user = || {
        let pod = sources.pods.name_of(address).map(|pod| format!("the address of Pod {pod}"));
        let host = || sources.pods.host_of(address).map(|host| format!("an address of {host}"));
        let endpoint = || endpoints.contains(&address).then(|| "the address of an endpoint".to_owned());
        pod.or_else(host).or_else(endpoint)
    };
    let unusable = unusable_address(address).map(|what| (Code::UnusableVip, what.to_owned()));
    if let Some((code, what)) = unusable.or_else(|| Some((Code::VipInUse, user()?))) {
        let reason = format!("{address} can't be a VIP: it is {what}");
        diagnostics.push(origin.diagnostic(Severity::Error, code, field, reason));
    }
}

/// Warns of annotations that contradict the announce mode of the VIP's pool.
fn check_announce_modes(sources: &Inputs<'_>, diagnostics: &mut Vec<Diagnostic>) {
    for service in &sources.inventory.services {
        let Some(annotated) = service.body.announce else { continue };
        for (_, vip) in &service.body.vips {
            if let Some((announce, pool)) = sources.pools.announce(*vip).filter(|(announce, _)| *announce != annotated)
            {
                let reason = format!("{vip} is in AddressPool {pool}, whose announce mode {announce} takes precedence");
                diagnostics.push(service.warning(Code::AnnounceOverridden, ANNOUNCE_FIELD, reason));
            }
        }
    }
}

fn vip_spec(address: IpAddr, vip: &Vip<'_>, announce: Announce) -> VipSpec {
    let mut reserved_ports: Vec<u16> = vip.ports.keys().map(|(port, _)| *port).collect();
    reserved_ports.dedup();
    let mut names = vip.names();
    let name = match (names.next(), names.next()) {
        (Some(only), None) => only.clone(),
        _ => vip.names().map(|name| &**name).collect::<Vec<_>>().join(", ").into(),
    };
    VipSpec {
        address,
        name,
        announce: match announce {
            Announce::L2 => spec::Announce::L2,
            Announce::Bgp => spec::Announce::Bgp,
        },
        reserved_ports,
        shards: vec![],
    }
}
