//! VIP table: owners, announce mode, shards and reserved ports of each VIP.

mod admission;
mod local_backends;
mod private_addresses;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use vipgate_dataplane::policy::limits::MAX_NAMES_OF_VIP;
use vipgate_dataplane::policy::spec;
use vipgate_dataplane::policy::spec::{SLOTS, ShardMapRef, ShardSpec, VipSpec};

use self::admission::Vip;
pub(super) use self::admission::{Admitted, Closed, admit, warn_about_addresses};
use self::local_backends::LocalBackends;
use super::claim::{Claim, Inputs};
use super::gateways::{Assignment, Candidates, GatewayId, Gateways, Locality, VipRequest, address_key};
use super::inventory::{ObjectRef, age_key};
use super::shard_maps::{MapKey, ShardMaps};
use crate::diagnostic::{Code, Diagnostic, Severity};
use crate::manifest::{ANNOUNCE_FIELD, Announce, Origin, Service, ZoneAffinity};

/// A VIP that is assigned to at least one gateway.
#[derive(Clone, Debug)]
pub(super) struct AssignedVip {
    pub(super) spec: VipSpec,
    /// Owning gateways; empty if there are no `VipGateway` manifests.
    pub(super) owners: Vec<GatewayId>,
}

/// Result: the assigned VIPs, sorted, the backends that decided about owners, and all VIPs that are the addresses of
/// pods, hosts or endpoints, too.
#[derive(Clone)]
pub(super) struct VipTable {
    pub(super) assigned: Vec<AssignedVip>,
    pub(super) local: LocalBackends,
    pub(super) in_use: HashSet<IpAddr>,
}

/// Assigns the admitted VIPs to gateways; a VIP without an eligible gateway is left out.
pub(super) fn compile(
    sources: &Inputs<'_>,
    admitted: &Admitted<'_>,
    claims: &[Claim<'_>],
    shard_maps: &mut ShardMaps,
    diagnostics: &mut Vec<Diagnostic>,
) -> VipTable {
    check_announce_modes(sources, diagnostics);
    let seniorities = seniorities(&admitted.services, claims);
    let local = LocalBackends::new(&admitted.vips, sources);
    let assigned = assign(&admitted.vips, &local, &seniorities, claims, sources, shard_maps);
    report_unassigned(&admitted.vips, &assigned, &admitted.services, claims, diagnostics);
    VipTable { assigned, local, in_use: sources.in_use_among(sources.vips) }
}

/// When a VIP gets its turn in the assignment, and with which other VIPs. Both follow from the oldest object with this
/// VIP, so a younger one changes neither.
#[derive(Clone, Copy, Debug)]
struct Seniority<'a> {
    turn: usize,
    /// Name of the oldest object.
    group: &'a str,
}

/// The seniority of each VIP. Objects without a `creationTimestamp` are the youngest; of one age, namespace and name decide.
fn seniorities<'a>(services: &[ObjectRef<'a, Service>], claims: &'a [Claim<'a>]) -> HashMap<IpAddr, Seniority<'a>> {
    let of_service = |it: &ObjectRef<'a, Service>| {
        (age_key(it.body.created.as_ref(), it.id), false, &**it.name, it.body.vips.as_slice())
    };
    let of_claim = |it: &'a Claim<'a>| (age_key(it.created, it.id), true, &**it.name, &*it.vips);
    let of_claims = claims.iter().filter(|claim| claim.service.is_none()).map(of_claim);
    let mut objects: Vec<_> = services.iter().map(of_service).chain(of_claims).collect();
    objects.sort_by_key(|(age, is_policy, ..)| (*age, *is_policy));
    let mut seniorities = HashMap::new();
    for (_, _, group, vips) in objects {
        for (_, vip) in vips {
            let turn = seniorities.len();
            seniorities.entry(*vip).or_insert(Seniority { turn, group });
        }
    }
    seniorities
}

/// The announce mode of a VIP.
fn mode(address: IpAddr, vip: &Vip<'_>, sources: &Inputs<'_>) -> Announce {
    let pool = sources.pools.announce(address).map(|(announce, _)| announce);
    pool.or(vip.announce.as_ref().map(|(announce, _)| *announce)).unwrap_or_default()
}

fn assign(
    vips: &BTreeMap<IpAddr, Vip<'_>>,
    local: &LocalBackends,
    seniorities: &HashMap<IpAddr, Seniority<'_>>,
    claims: &[Claim<'_>],
    sources: &Inputs<'_>,
    shard_maps: &mut ShardMaps,
) -> Vec<AssignedVip> {
    let gateways = sources.gateways;
    // Endpoints of any policy of its namespace, or of the cluster, may require gateways in their zone.
    let with_zone = claims.iter().filter(|claim| claim.zone_affinity == ZoneAffinity::Require);
    let with_zone: HashSet<(IpAddr, &str)> =
        with_zone.flat_map(|claim| claim.vips.iter().map(|(_, vip)| (*vip, claim.namespace))).collect();
    let modes: Vec<Announce> = vips.iter().map(|(address, vip)| mode(*address, vip, sources)).collect();
    let requests: Vec<VipRequest<'_>> = vips
        .iter()
        .zip(&modes)
        .map(|((address, vip), announce)| VipRequest {
            vip: *address,
            group: seniorities[address].group,
            turn: seniorities[address].turn,
            candidates: eligible(*address, vip, claims, sources),
            requires_zone: [vip.namespace, ""].iter().any(|it| with_zone.contains(&(*address, *it))),
            shared: *announce == Announce::Bgp,
            local: local.of(*address, vip, sources),
        })
        .collect();
    let Assignment { owners, backups } = gateways.assign(&requests);
    let all = vips.iter().zip(modes).zip(requests.iter().zip(owners).zip(backups));
    let assigned = all.filter(|(_, ((_, owners), _))| gateways.is_empty() || !owners.is_empty());
    let mut assigned: Vec<AssignedVip> = assigned
        .map(|(((address, vip), mode), ((request, owners), backups))| {
            let spec =
                VipSpec { private: private_addresses::of(*address, sources), ..vip_spec(*address, vip, claims, mode) };
            AssignedVip { spec: place(spec, request, &owners, &backups, gateways, shard_maps), owners }
        })
        .collect();
    private_addresses::remove_ambiguous(&mut assigned, &vips.keys().copied().collect());
    assigned
}

/// Warns of admitted VIPs that no gateway owns, once for each object.
fn report_unassigned(
    admitted: &BTreeMap<IpAddr, Vip<'_>>,
    assigned: &[AssignedVip],
    services: &[ObjectRef<'_, Service>],
    claims: &[Claim<'_>],
    diagnostics: &mut Vec<Diagnostic>,
) {
    if admitted.len() == assigned.len() {
        return;
    }
    let is_owned = |vip: &IpAddr| assigned.binary_search_by_key(vip, |it| it.spec.address).is_ok();
    let mut report = |origin: &Origin, vips: &[(Arc<str>, IpAddr)]| {
        let mut without = vips.iter().filter(|(_, vip)| admitted.contains_key(vip) && !is_owned(vip));
        let Some((field, _)) = without.next() else { return };
        let vips = match without.count() {
            0 => "this VIP".to_owned(),
            more => format!("this VIP and {more} more"),
        };
        let reason = format!("no eligible gateway has capacity for {vips}: not announced, and nothing leaves with it");
        diagnostics.push(origin.diagnostic(Severity::Warning, Code::NoEligibleGateway, field, reason));
    };
    for service in services {
        report(service.origin, &service.body.vips);
    }
    for claim in claims.iter().filter(|claim| claim.service.is_none()) {
        report(claim.origin, &claim.vips);
    }
}

/// The gateways that may own a VIP: those of its policy; of a provider's address those with a NIC in its zone.
fn eligible(address: IpAddr, vip: &Vip<'_>, claims: &[Claim<'_>], sources: &Inputs<'_>) -> Candidates {
    let gateways = sources.gateways;
    let all = vip.placed_by.map_or_else(|| gateways.candidates(None), |claim| claims[claim].gateways.clone());
    let Some(cloud) = sources.pools.cloud(address) else { return all };
    let fits = |id: &GatewayId| cloud.fits(address, gateways.name(*id));
    Candidates { ids: all.ids.iter().copied().filter(fits).collect(), name: all.name }
}

/// Places a VIP: as a whole on one gateway, or by a shard map on all.
fn place(
    spec: VipSpec,
    request: &VipRequest<'_>,
    owners: &[GatewayId],
    backups: &[GatewayId],
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

fn vip_spec(address: IpAddr, vip: &Vip<'_>, claims: &[Claim<'_>], announce: Announce) -> VipSpec {
    let mut reserved_ports: Vec<u16> = vip.ports.keys().map(|(port, _)| *port).collect();
    reserved_ports.dedup();
    VipSpec {
        address,
        name: name_of(vip, claims),
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

/// Names of its Services and its policy: the oldest ones, and the number of the others.
fn name_of(vip: &Vip<'_>, claims: &[Claim<'_>]) -> Arc<str> {
    let claimed = vip.claimed.map(|claim| claims[claim].name);
    let names: Vec<&Arc<str>> = vip.services.iter().map(|service| service.name).chain(claimed).collect();
    if let [only] = names[..] {
        return only.clone();
    }
    let listed: Vec<&str> = names.iter().take(MAX_NAMES_OF_VIP).map(|name| &***name).collect();
    let listed = listed.join(", ");
    match names.len().checked_sub(MAX_NAMES_OF_VIP).filter(|more| *more > 0) {
        Some(more) => format!("{listed} and {more} more").into(),
        None => listed.into(),
    }
}
