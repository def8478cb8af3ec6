//! All VIPs: whose they are, which of their ports are spoken for, how they are announced; and what can't be a VIP.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use foldhash::HashSet;
use vipgate_dataplane::snapshot::spec::{self, VipSpec};

use super::ANNOUNCE_ANNOTATION;
use super::address::unusable;
use super::claim::{Claim, Sources};
use super::gateways::{Bid, GatewayId};
use super::inventory::Key;
use super::services::Frontend;
use crate::complaint::{Complaint, Severity};
use crate::manifest::{Announce, Origin};

/// A VIP while it is being put together.
#[derive(Debug)]
struct Vip<'a> {
    /// Names of whom it belongs to.
    names: Vec<String>,
    /// Namespaces of the Services that it belongs to.
    namespaces: BTreeSet<&'a str>,
    /// The policy with selectors that holds it.
    claimed: Option<String>,
    /// Port and protocol, and who has it.
    ports: BTreeMap<(u16, &'a str), String>,
    announce: Option<(Announce, String)>,
    /// Who may hold it, as the strongest policy that has it says; without one, every gateway.
    gateways: Option<Vec<GatewayId>>,
    /// Whose VIPs keep apart.
    group: String,
}

/// A VIP that somebody holds.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) spec: VipSpec,
    /// By number; none where no gateway is known.
    pub(super) holders: Vec<GatewayId>,
}

/// Puts all VIPs together, sorted, and settles who holds them; those that nobody may hold are left out.
pub(super) fn settle<'a>(sources: &Sources<'a>, claims: &'a [Claim<'a>], log: &mut Vec<Complaint>) -> Vec<Held> {
    // A Service that policies refer to is served where the strongest of them is; others are served everywhere.
    let mut referred: BTreeMap<Key<'_>, &Claim<'_>> = BTreeMap::new();
    for claim in claims {
        if let Some(service) = claim.service {
            referred.entry(service).or_insert(claim);
        }
    }
    let all =
        sources.services.values().flat_map(|frontend| &frontend.vips).chain(claims.iter().flat_map(|it| &it.vips));
    let endpoints = sources.slices.among(&all.map(|(_, vip)| *vip).collect());
    let mut vips = BTreeMap::new();
    for (key, frontend) in sources.services {
        for (field, vip) in &frontend.vips {
            complain_about_address(*vip, frontend.service.origin, field, sources, &endpoints, log);
            add_frontend(vips.entry(*vip), frontend, referred.get(key).copied(), log);
        }
    }
    for claim in claims.iter().filter(|claim| claim.service.is_none()) {
        for (field, vip) in &claim.vips {
            complain_about_address(*vip, claim.origin, field, sources, &endpoints, log);
            add_claim(vips.entry(*vip), *vip, claim, field, log);
        }
    }
    complain_about_announcing(sources, log);
    hold(vips, sources)
}

fn hold(vips: BTreeMap<IpAddr, Vip<'_>>, sources: &Sources<'_>) -> Vec<Held> {
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
            group: &vip.group,
            candidates: vip.gateways.clone().unwrap_or_else(|| gateways.candidates(None)),
            shared: *announce == Announce::Bgp,
        })
        .collect();
    let holders = gateways.hold(&bids);
    let held = vips.into_iter().zip(announced).zip(holders);
    held.filter(|(_, holders)| gateways.are_unknown() || !holders.is_empty())
        .map(|(((address, vip), announce), holders)| Held { spec: finish(address, &vip, announce), holders })
        .collect()
}

fn new_vip<'a>() -> Vip<'a> {
    Vip {
        names: Vec::new(),
        namespaces: BTreeSet::new(),
        claimed: None,
        ports: BTreeMap::new(),
        announce: None,
        gateways: None,
        group: String::new(),
    }
}

fn add_frontend<'a>(
    entry: Entry<'_, IpAddr, Vip<'a>>,
    frontend: &'a Frontend<'a>,
    claim: Option<&Claim<'_>>,
    log: &mut Vec<Complaint>,
) {
    let address = *entry.key();
    let vip = entry.or_insert_with(new_vip);
    let id = frontend.service.id.to_string();
    for (port, protocol, field) in &frontend.ports {
        match vip.ports.entry((*port, protocol)) {
            Entry::Occupied(other) => {
                let reason = format!("{protocol} port {port} of {address} belongs to {} already", other.get());
                log.push(frontend.service.error(field, reason));
            }
            Entry::Vacant(free) => {
                free.insert(format!("{id} ({})", frontend.service.origin));
            }
        }
    }
    match (&vip.announce, frontend.announce) {
        (Some((known, other)), Some(wanted)) if *known != wanted => {
            let reason = format!("{other} shares {address} and says otherwise");
            log.push(frontend.service.error(&format!("metadata.annotations[{ANNOUNCE_ANNOTATION}]"), reason));
        }
        (None, Some(wanted)) => vip.announce = Some((wanted, format!("{id} ({})", frontend.service.origin))),
        _ => {}
    }
    vip.namespaces.insert(&frontend.service.id.namespace);
    if let Some(claim) = claim {
        vip.gateways.get_or_insert_with(|| claim.gateways.clone());
    }
    if vip.group.is_empty() {
        vip.group.clone_from(&id);
    }
    vip.names.push(id);
}

fn add_claim<'a>(
    entry: Entry<'_, IpAddr, Vip<'a>>,
    address: IpAddr,
    claim: &'a Claim<'a>,
    field: &str,
    log: &mut Vec<Complaint>,
) {
    let vip = entry.or_insert_with(new_vip);
    let this = format!("{} ({})", claim.spec.name, claim.origin);
    if let Some(other) = &vip.claimed {
        log.push(claim.complaint(Severity::Error, field, format!("{address} is a VIP of {other} already")));
    } else if !vip.namespaces.is_empty() && !vip.namespaces.contains(claim.namespace) {
        let reason = format!("{address} is the VIP of {}, in another namespace", vip.names.join(", "));
        log.push(claim.complaint(Severity::Error, field, reason));
    } else {
        vip.claimed = Some(this);
        vip.names.push(claim.spec.name.to_string());
        vip.gateways.get_or_insert_with(|| claim.gateways.clone());
        if vip.group.is_empty() {
            vip.group = claim.spec.name.to_string();
        }
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
    if let Some(what) = unusable(address).map(str::to_owned).or_else(whose) {
        log.push(origin.complaint(Severity::Error, field, format!("{address} can't be a VIP: it is {what}")));
    }
}

fn complain_about_announcing(sources: &Sources<'_>, log: &mut Vec<Complaint>) {
    for frontend in sources.services.values() {
        let Some(wanted) = frontend.announce else { continue };
        for (_, vip) in &frontend.vips {
            if let Some((announce, pool)) = sources.pools.announce(*vip).filter(|(announce, _)| *announce != wanted) {
                let reason = format!("{vip} is in AddressPool {pool}, which announces it by {announce}: that counts");
                let field = format!("metadata.annotations[{ANNOUNCE_ANNOTATION}]");
                log.push(frontend.service.warning(&field, reason));
            }
        }
    }
}

fn finish(address: IpAddr, vip: &Vip<'_>, announce: Announce) -> VipSpec {
    let ports: BTreeSet<u16> = vip.ports.keys().map(|(port, _)| *port).collect();
    VipSpec {
        address,
        name: vip.names.join(", ").into(),
        announce: match announce {
            Announce::L2 => spec::Announce::L2,
            Announce::Bgp => spec::Announce::Bgp,
        },
        reserved_ports: ports.into_iter().collect(),
    }
}
