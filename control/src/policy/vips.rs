//! All VIPs: whose they are, which of their ports are spoken for, how they are announced; and what can't be a VIP.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use vipgate_dataplane::snapshot::spec::{self, VipSpec};

use super::ANNOUNCE_ANNOTATION;
use super::address::unusable;
use super::claim::{Claim, Sources};
use super::inventory::Key;
use super::pool::Pools;
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
    owned: bool,
}

/// Puts all VIPs together; only those that this gateway owns are returned, sorted.
pub(super) fn settle<'a>(sources: &Sources<'a>, claims: &'a [Claim<'a>], log: &mut Vec<Complaint>) -> Vec<VipSpec> {
    // A Service that policies refer to is served where one of them is; others are served everywhere.
    let mut referred: BTreeMap<Key<'_>, bool> = BTreeMap::new();
    for claim in claims {
        if let Some(service) = claim.service {
            *referred.entry(service).or_default() |= claim.served;
        }
    }
    let mut vips = BTreeMap::new();
    for (key, frontend) in sources.services {
        let owned = referred.get(key).copied().unwrap_or(true);
        for (field, vip) in &frontend.vips {
            complain_about_address(*vip, frontend.service.origin, field, sources, log);
            add_frontend(vips.entry(*vip), frontend, owned, log);
        }
    }
    for claim in claims.iter().filter(|claim| claim.service.is_none()) {
        for (field, vip) in &claim.vips {
            complain_about_address(*vip, claim.origin, field, sources, log);
            add_claim(vips.entry(*vip), *vip, claim, field, log);
        }
    }
    complain_about_announcing(sources, log);
    let owned = vips.into_iter().filter(|(_, vip)| vip.owned);
    owned.map(|(address, vip)| finish(address, vip, sources.pools)).collect()
}

fn new_vip<'a>() -> Vip<'a> {
    Vip {
        names: Vec::new(),
        namespaces: BTreeSet::new(),
        claimed: None,
        ports: BTreeMap::new(),
        announce: None,
        owned: false,
    }
}

fn add_frontend<'a>(
    entry: Entry<'_, IpAddr, Vip<'a>>,
    frontend: &'a Frontend<'a>,
    owned: bool,
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
    vip.names.push(id);
    vip.owned |= owned;
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
        vip.names.push(claim.spec.name.clone());
    }
    vip.owned |= claim.served;
}

fn complain_about_address(
    address: IpAddr,
    origin: &Origin,
    field: &str,
    sources: &Sources<'_>,
    log: &mut Vec<Complaint>,
) {
    let whose = || {
        let pod = sources.pods.name_of(address).map(|pod| format!("the address of Pod {pod}"));
        let host = || sources.pods.host_of(address).map(|host| format!("an address of {host}"));
        let endpoint = || sources.slices.contains(address).then(|| "the address of an endpoint".to_owned());
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
                let reason = format!("{vip} is in AddressPool {pool}, which announces it by {announce:?}: that counts");
                let field = format!("metadata.annotations[{ANNOUNCE_ANNOTATION}]");
                log.push(frontend.service.warning(&field, reason));
            }
        }
    }
}

fn finish(address: IpAddr, vip: Vip<'_>, pools: &Pools<'_>) -> VipSpec {
    let announce = pools.announce(address).map(|(announce, _)| announce).or(vip.announce.map(|(announce, _)| announce));
    let ports: BTreeSet<u16> = vip.ports.keys().map(|(port, _)| *port).collect();
    VipSpec {
        address,
        name: vip.names.join(", "),
        announce: match announce.unwrap_or_default() {
            Announce::L2 => spec::Announce::L2,
            Announce::Bgp => spec::Announce::Bgp,
        },
        reserved_ports: ports.into_iter().collect(),
    }
}
