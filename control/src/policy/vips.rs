//! All VIPs: whose they are, which of their ports are spoken for, how they are announced; and what can't be a VIP.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use vipgate_dataplane::snapshot::spec::{self, ShareSpec, VipSpec};

use super::claim::{Claim, Sources};
use super::gateways::{Bid, GatewayId, Gateways};
use super::inventory::{Key, Located, seniority};
use crate::complaint::{Complaint, Severity};
use crate::manifest::{ANNOUNCE_FIELD, Announce, Origin, Protocol, Service, ServicePort, unusable_address};

/// A VIP while it is being put together.
#[derive(Debug, Default)]
struct Vip<'a> {
    /// The Services that it belongs to, the oldest first.
    services: Vec<Located<'a, Service>>,
    /// The policy with selectors that holds it.
    claimed: Option<&'a Claim<'a>>,
    /// Port and protocol, and who has it.
    ports: BTreeMap<(u16, Protocol), Located<'a, Service>>,
    announce: Option<(Announce, Located<'a, Service>)>,
    /// Who may hold it, as the strongest policy that has it says; without one, every gateway.
    gateways: Option<&'a Arc<[GatewayId]>>,
}

impl Vip<'_> {
    /// Names of whom it belongs to.
    fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.services.iter().map(|service| service.name).chain(self.claimed.map(|claim| &claim.spec.name))
    }
}

/// A VIP that somebody holds.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) spec: VipSpec,
    /// By number; none where no gateway is known.
    pub(super) holders: Vec<GatewayId>,
}

/// The VIPs that somebody holds, sorted, and which of all VIPs are, by mistake, addresses of endpoints too.
pub(super) struct Settled {
    pub(super) held: Vec<Held>,
    pub(super) endpoints: HashSet<IpAddr>,
}

/// Puts all VIPs together and settles who holds them; those that nobody may hold are left out. What two Services want, the
/// older one has.
pub(super) fn settle<'a>(sources: &Sources<'a>, claims: &'a [Claim<'a>], log: &mut Vec<Complaint>) -> Settled {
    let mut services: Vec<&Located<'a, Service>> = sources.inventory.services.iter().collect();
    services.sort_by_cached_key(|service| seniority(service.body.created.as_ref(), service.id));
    // A Service that policies refer to is served where the strongest of them is; others are served everywhere.
    let mut referred: HashMap<Key<'_>, &Claim<'_>> = HashMap::new();
    for claim in claims {
        if let Some(service) = claim.service {
            referred.entry(service).or_insert(claim);
        }
    }
    let of_services = services.iter().flat_map(|service| &service.body.vips);
    let all = of_services.chain(claims.iter().flat_map(|claim| &claim.vips));
    let endpoints = sources.slices.among(&all.map(|(_, vip)| *vip).collect());
    let mut vips = BTreeMap::new();
    for service in &services {
        for (field, vip) in &service.body.vips {
            complain_about_address(*vip, service.origin, field, sources, &endpoints, log);
            let entry: &mut Vip<'_> = vips.entry(*vip).or_default();
            warn_of_other_tenant(*vip, entry, **service, field, log);
            add_service(*vip, entry, **service, log);
            if let Some(claim) = referred.get(&service.key()) {
                entry.gateways.get_or_insert(&claim.gateways);
            }
        }
    }
    for claim in claims.iter().filter(|claim| claim.service.is_none()) {
        for (field, vip) in &claim.vips {
            complain_about_address(*vip, claim.origin, field, sources, &endpoints, log);
            add_claim(*vip, vips.entry(*vip).or_default(), claim, field, log);
        }
    }
    complain_about_announcing(sources, log);
    Settled { held: hold(&vips, sources), endpoints }
}

fn hold(vips: &BTreeMap<IpAddr, Vip<'_>>, sources: &Sources<'_>) -> Vec<Held> {
    let gateways = sources.gateways;
    let announce = |address: &IpAddr, vip: &Vip<'_>| {
        let pool = sources.pools.announce(*address).map(|(announce, _)| announce);
        pool.or(vip.announce.as_ref().map(|(announce, _)| *announce)).unwrap_or_default()
    };
    let announced: Vec<Announce> = vips.iter().map(|(address, vip)| announce(address, vip)).collect();
    let bids: Vec<Bid<'_>> = vips
        .iter()
        .zip(&announced)
        .map(|((address, vip), announce)| Bid {
            vip: *address,
            group: vip.names().next().map(|name| &**name).unwrap_or_default(),
            candidates: vip.gateways.cloned().unwrap_or_else(|| gateways.candidates(None)),
            shared: *announce == Announce::Bgp,
        })
        .collect();
    let holders = gateways.hold(&bids);
    let shares: Vec<_> =
        bids.iter().zip(&holders.of).map(|(bid, of)| shares(bid, of, &holders.room, gateways)).collect();
    let held = vips.iter().zip(announced).zip(holders.of).zip(shares);
    held.filter(|((_, holders), _)| gateways.are_unknown() || !holders.is_empty())
        .map(|((((address, vip), announce), holders), shares)| {
            let spec = VipSpec { shares, ..finish(*address, vip, announce) };
            Held { spec, holders }
        })
        .collect()
}

/// Splits the ports of a VIP between those that hold it, and says who stands in for each: another holder, or, where one holds
/// it all, whoever else may.
fn shares(bid: &Bid<'_>, holders: &[GatewayId], room: &[usize], gateways: &Gateways<'_>) -> Vec<ShareSpec> {
    let blocks = match holders {
        [] | [_] => vec![None; holders.len()],
        several => gateways.blocks(bid.vip, several).into_iter().map(|own| Some(Arc::new(own))).collect(),
    };
    let among = if bid.shared { holders } else { &*bid.candidates };
    let share = |(&home, blocks): (&GatewayId, _)| {
        let backups = gateways.backups(bid.group, home, among, room);
        let backups = backups.into_iter().map(|id| gateways.name(id).clone()).collect();
        ShareSpec { gateway: gateways.name(home).clone(), blocks, backups }
    };
    holders.iter().zip(blocks).map(share).collect()
}

fn add_service<'a>(address: IpAddr, vip: &mut Vip<'a>, service: Located<'a, Service>, log: &mut Vec<Complaint>) {
    let frontends = service.body.ports.iter().map(|it| (it.port, it.protocol, Some(it)));
    let health = service.body.health_check.map(|port| (port, Protocol::Tcp, None));
    for (port, protocol, frontend) in frontends.chain(health) {
        match vip.ports.entry((port, protocol)) {
            Entry::Occupied(other) => {
                let Located { id, origin, .. } = other.get();
                let reason = format!("{protocol} port {port} of {address} belongs to {id} ({origin}) already");
                let field = frontend.map_or_else(|| Service::HEALTH_CHECK_FIELD.to_owned(), ServicePort::field);
                log.push(service.error(&field, reason));
            }
            Entry::Vacant(free) => {
                free.insert(service);
            }
        }
    }
    match (&vip.announce, service.body.announce) {
        (Some((known, Located { id, origin, .. })), Some(wanted)) if *known != wanted => {
            let reason = format!("{id} ({origin}) shares {address} and says otherwise");
            log.push(service.error(ANNOUNCE_FIELD, reason));
        }
        (None, Some(wanted)) => vip.announce = Some((wanted, service)),
        _ => {}
    }
    vip.services.push(service);
}

/// A VIP of two namespaces is what two tenants share: replies and firewalls of others can't tell them apart.
fn warn_of_other_tenant<'a>(
    address: IpAddr,
    vip: &Vip<'a>,
    service: Located<'a, Service>,
    field: &str,
    log: &mut Vec<Complaint>,
) {
    if let Some(Located { id, origin, .. }) = vip.services.iter().find(|it| it.id.namespace != service.id.namespace) {
        let reason = format!("{address} is the VIP of {id} ({origin}), too: two namespaces share it");
        log.push(service.warning(field, reason));
    }
}

fn add_claim<'a>(address: IpAddr, vip: &mut Vip<'a>, claim: &'a Claim<'a>, field: &str, log: &mut Vec<Complaint>) {
    let is_elsewhere = |service: &Located<'_, Service>| service.id.namespace != claim.namespace;
    if let Some(other) = vip.claimed {
        let reason = format!("{address} is a VIP of {} ({}) already", other.spec.name, other.origin);
        log.push(claim.complaint(Severity::Error, field, reason));
    } else if !vip.services.is_empty() && vip.services.iter().all(is_elsewhere) {
        let names: Vec<&str> = vip.names().map(|name| &**name).collect();
        let reason = format!("{address} is the VIP of {}, in another namespace", names.join(", "));
        log.push(claim.complaint(Severity::Error, field, reason));
    } else {
        vip.claimed = Some(claim);
        vip.gateways.get_or_insert(&claim.gateways);
    }
}

fn complain_about_address(
    address: IpAddr,
    origin: &Origin,
    field: &str,
    sources: &Sources<'_>,
    endpoints: &HashSet<IpAddr>,
    log: &mut Vec<Complaint>,
) {
    let whose = || {
        let pod = sources.pods.name_of(address).map(|pod| format!("the address of Pod {pod}"));
        let host = || sources.pods.host_of(address).map(|host| format!("an address of {host}"));
        let endpoint = || endpoints.contains(&address).then(|| "the address of an endpoint".to_owned());
        pod.or_else(host).or_else(endpoint)
    };
    if let Some(what) = unusable_address(address).map(str::to_owned).or_else(whose) {
        log.push(origin.complaint(Severity::Error, field, format!("{address} can't be a VIP: it is {what}")));
    }
}

fn complain_about_announcing(sources: &Sources<'_>, log: &mut Vec<Complaint>) {
    for service in &sources.inventory.services {
        let Some(wanted) = service.body.announce else { continue };
        for (_, vip) in &service.body.vips {
            if let Some((announce, pool)) = sources.pools.announce(*vip).filter(|(announce, _)| *announce != wanted) {
                let reason = format!("{vip} is in AddressPool {pool}, which announces it by {announce}: that counts");
                log.push(service.warning(ANNOUNCE_FIELD, reason));
            }
        }
    }
}

fn finish(address: IpAddr, vip: &Vip<'_>, announce: Announce) -> VipSpec {
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
        shares: vec![],
    }
}
