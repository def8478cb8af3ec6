//! VIP table: owners, announce mode, shards and reserved ports of each VIP, and checks of conflicting claims.

mod private_addresses;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use vipgate_dataplane::policy::spec;
use vipgate_dataplane::policy::spec::{SLOTS, ShardMapRef, ShardSpec, VipSpec};

use super::claim::{Claim, Inputs};
use super::gateways::{Assignment, Candidates, GatewayId, Gateways, Locality, VipRequest, address_key};
use super::inventory::{NamespacedName, ObjectRef, age_key};
use super::shard_maps::{MapKey, ShardMaps};
use crate::diagnostic::{Code, Diagnostic, Severity};
use crate::manifest::{
    ANNOUNCE_FIELD, Announce, Origin, Protocol, Service, ServicePort, ZoneAffinity, unusable_address,
};

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
    /// The policy with the highest precedence, which decides on its gateways; `None`: every gateway.
    placed_by: Option<&'a Claim<'a>>,
}

impl Vip<'_> {
    /// Names of its Services and its policy.
    fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.services.iter().map(|service| service.name).chain(self.claimed.map(|claim| claim.name))
    }
}

/// A VIP that is assigned to at least one gateway.
#[derive(Clone, Debug)]
pub(super) struct AssignedVip {
    pub(super) spec: VipSpec,
    /// Owning gateways; empty if there are no `VipGateway` manifests.
    pub(super) owners: Vec<GatewayId>,
}

/// Result: the assigned VIPs, sorted, and all VIPs that are (by mistake) endpoint addresses, too.
#[derive(Clone)]
pub(super) struct VipTable {
    pub(super) assigned: Vec<AssignedVip>,
    pub(super) endpoint_addresses: HashSet<IpAddr>,
}

/// Collects all VIPs and assigns them to gateways; a VIP without an eligible gateway is left out. If two Services
/// conflict, the older one takes precedence.
pub(super) fn compile<'a>(
    sources: &Inputs<'a>,
    claims: &'a [Claim<'a>],
    shard_maps: &mut ShardMaps,
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
    sources.check_service_vips(diagnostics);
    let of_services = services.iter().flat_map(|service| sources.vips_of(service));
    let all = of_services.chain(claims.iter().flat_map(|claim| claim.vips.iter()));
    let endpoints = sources.slices.endpoints_among(&all.map(|(_, vip)| *vip).collect());
    let mut vips = BTreeMap::new();
    for service in &services {
        for (field, vip) in sources.vips_of(service) {
            check_address(*vip, service.origin, field, sources, &endpoints, diagnostics);
            let entry: &mut Vip<'_> = vips.entry(*vip).or_default();
            check_namespace(*vip, entry, **service, field, diagnostics);
            add_service(*vip, entry, **service, diagnostics);
            if let Some(claim) = referrers.get(&service.namespaced_name()) {
                entry.placed_by.get_or_insert(claim);
            }
        }
    }
    for claim in claims.iter().filter(|claim| claim.service.is_none()) {
        for (field, vip) in claim.vips.iter() {
            check_address(*vip, claim.origin, field, sources, &endpoints, diagnostics);
            let entry = vips.entry(*vip).or_default();
            add_claim(*vip, entry, claim, field, diagnostics);
        }
    }
    check_announce_modes(sources, diagnostics);
    let seniorities = seniorities(&services, claims);
    let assigned = assign(&vips, &seniorities, claims, sources, shard_maps);
    VipTable { assigned, endpoint_addresses: endpoints }
}

/// When a VIP gets its turn in the assignment, and with which other VIPs. Both follow from the oldest object with this
/// VIP, so a younger one changes neither.
#[derive(Clone, Copy, Debug)]
struct Seniority<'a> {
    turn: usize,
    /// Name of the oldest object.
    group: &'a str,
}

/// The seniority of each VIP. Objects without a `creationTimestamp` are the youngest, and of one age Services precede
/// policies.
fn seniorities<'a>(services: &[&ObjectRef<'a, Service>], claims: &'a [Claim<'a>]) -> HashMap<IpAddr, Seniority<'a>> {
    let of_service =
        |it: &&ObjectRef<'a, Service>| (it.body.created.as_ref(), false, &**it.name, it.body.vips.as_slice());
    let of_claim = |it: &'a Claim<'a>| (it.created, true, &**it.name, &*it.vips);
    let of_claims = claims.iter().filter(|claim| claim.service.is_none()).map(of_claim);
    let mut objects: Vec<_> = services.iter().map(of_service).chain(of_claims).collect();
    objects.sort_by_key(|(created, is_policy, name, _)| (created.is_none(), *created, *is_policy, *name));
    let mut seniorities = HashMap::new();
    for (.., group, vips) in objects {
        for (_, vip) in vips {
            let turn = seniorities.len();
            seniorities.entry(*vip).or_insert(Seniority { turn, group });
        }
    }
    seniorities
}

fn assign(
    vips: &BTreeMap<IpAddr, Vip<'_>>,
    seniorities: &HashMap<IpAddr, Seniority<'_>>,
    claims: &[Claim<'_>],
    sources: &Inputs<'_>,
    shard_maps: &mut ShardMaps,
) -> Vec<AssignedVip> {
    let gateways = sources.gateways;
    // Endpoints of any policy with the VIP may require gateways in their zone.
    let with_zone = claims.iter().filter(|claim| claim.zone_affinity == ZoneAffinity::Require);
    let with_zone: HashSet<IpAddr> = with_zone.flat_map(|claim| claim.vips.iter()).map(|(_, vip)| *vip).collect();
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
            group: seniorities[address].group,
            turn: seniorities[address].turn,
            candidates: eligible(*address, vip, sources),
            requires_zone: with_zone.contains(address),
            shared: *announce == Announce::Bgp,
        })
        .collect();
    let Assignment { owners, backups } = gateways.assign(&requests);
    let all = vips.iter().zip(modes).zip(requests.iter().zip(owners).zip(backups));
    let assigned = all.filter(|(_, ((_, owners), _))| gateways.is_empty() || !owners.is_empty());
    let mut assigned: Vec<AssignedVip> = assigned
        .map(|(((address, vip), mode), ((request, owners), backups))| {
            let spec = VipSpec { private: private_addresses::of(*address, sources), ..vip_spec(*address, vip, mode) };
            AssignedVip { spec: place(spec, request, (&owners, &backups), gateways, shard_maps), owners }
        })
        .collect();
    private_addresses::remove_ambiguous(&mut assigned, &vips.keys().copied().collect());
    assigned
}

/// The gateways that may own a VIP: those of its policy; of a provider's address those with a NIC in its zone.
fn eligible(address: IpAddr, vip: &Vip<'_>, sources: &Inputs<'_>) -> Candidates {
    let gateways = sources.gateways;
    let all = vip.placed_by.map_or_else(|| gateways.candidates(None), |claim| claim.gateways.clone());
    let Some(cloud) = sources.pools.cloud(address) else { return all };
    let fits = |id: &GatewayId| cloud.fits(address, gateways.name(*id));
    Candidates { ids: all.ids.iter().copied().filter(fits).collect(), name: all.name }
}

/// Places a VIP: as a whole on one gateway, or by a shard map on all.
fn place(
    spec: VipSpec,
    request: &VipRequest<'_>,
    (owners, backups): (&[GatewayId], &[GatewayId]),
    gateways: &Gateways<'_>,
    shard_maps: &mut ShardMaps,
) -> VipSpec {
    let name = |id: &GatewayId| gateways.name(*id).clone();
    match owners {
        [] => spec,
        [home, ..] if !request.shared => {
            let backups = backups.iter().map(name).collect();
            VipSpec { shards: vec![ShardSpec { gateway: name(home), blocks: None, backups }], ..spec }
        }
        owners => {
            let key = MapKey {
                candidates: &request.candidates,
                gateways: owners,
                group: request.group,
                locality: Locality::default(),
                requires_zone: false,
            };
            let map = shard_maps.get(&key, gateways).spec.name.clone();
            let rotation = (address_key(request.vip) % SLOTS as u64) as u16;
            VipSpec { shard_map: Some(ShardMapRef { map, rotation }), ..spec }
        }
    }
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
        let reason = format!("{address} is already a VIP of {} ({})", other.name, other.origin);
        diagnostics.push(claim.diagnostic(Severity::Error, Code::VipOfTwoPolicies, field, reason));
    } else if !vip.services.is_empty() && vip.services.iter().all(is_foreign) {
        let names: Vec<&str> = vip.names().map(|name| &**name).collect();
        let whose =
            if claim.namespace.is_empty() { "which a ClusterEgressPolicy can't share" } else { "in another namespace" };
        let reason = format!("{address} is the VIP of {}, {whose}", names.join(", "));
        diagnostics.push(claim.diagnostic(Severity::Error, Code::VipOfOtherNamespace, field, reason));
    } else {
        vip.claimed = Some(claim);
        vip.placed_by.get_or_insert(claim);
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
        shard_map: None,
        private: vec![],
    }
}
