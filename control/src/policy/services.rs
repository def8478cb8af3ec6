//! Services that are reached at VIPs: what stands where, who is behind it, and what can't work as it is written.

use std::net::IpAddr;

use foldhash::{HashMap, HashMapExt};
use vipgate_dataplane::snapshot::spec::ServicePortSpec;

use super::backends::Finder;
use super::claim::Sources;
use super::deal::{DealtBackend, DealtService};
use super::inventory::{Located, seniority};
use super::vips::{Held, Settled};
use crate::complaint::Complaint;
use crate::manifest::{Family, Service, TABLE_SIZE_FIELD};

/// Places that a backend should have in its Service's table: with fewer, what backends get differs by more than a tenth.
const PLACES: usize = 20;

/// The Services with VIPs that somebody holds, by name.
pub(super) fn settle<'a>(sources: &'a Sources<'a>, vips: &'a Settled, log: &mut Vec<Complaint>) -> Vec<DealtService> {
    complain_about_health_checks(&sources.inventory.services, log);
    let mut finder = Finder::new(sources, &vips.endpoints);
    let mut dealt = Vec::new();
    for service in sources.inventory.services.iter().filter(|service| !service.body.vips.is_empty()) {
        let is_held = |vip: &IpAddr| vips.held.binary_search_by_key(vip, |Held { spec, .. }| spec.address).is_ok();
        let mut held: Vec<IpAddr> = service.body.vips.iter().map(|(_, vip)| *vip).filter(is_held).collect();
        if held.is_empty() {
            continue;
        }
        held.sort_unstable();
        let backends = finder.behind(*service, log);
        complain_about_size(*service, &backends, log);
        complain_about_backends(*service, &held, &backends, log);
        let Service { ports, source_ranges, affinity, table_size, external, internal, .. } = service.body;
        let port = |it: &crate::manifest::ServicePort| ServicePortSpec {
            name: it.name.clone(),
            protocol: it.protocol.number(),
            port: it.port,
        };
        dealt.push(DealtService {
            name: service.name.clone(),
            vips: held,
            ports: ports.iter().map(port).collect(),
            backends,
            source_ranges: source_ranges.clone(),
            affinity: *affinity,
            table_size: *table_size,
            external: *external,
            internal: *internal,
            health_port: service.body.served_health_check(),
        });
    }
    dealt.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    dealt
}

/// Health checks are answered at the gateway's own addresses too, where a port can be only one Service's: the oldest one's.
fn complain_about_health_checks<'a>(services: &[Located<'a, Service>], log: &mut Vec<Complaint>) {
    let mut checked: Vec<_> = services
        .iter()
        .filter(|service| !service.body.vips.is_empty())
        .filter_map(|service| Some((service.body.served_health_check()?, *service)))
        .collect();
    checked.sort_by_cached_key(|(_, service)| seniority(service.body.created.as_ref(), service.id));
    let mut taken: HashMap<u16, Located<'a, Service>> = HashMap::new();
    for (port, service) in checked {
        let Located { id, origin, .. } = *taken.entry(port).or_insert(service);
        if id != service.id {
            let reason = format!("port {port} is that of the health check of {id} ({origin}) already");
            log.push(service.error(Service::HEALTH_CHECK_FIELD, reason));
        }
    }
}

/// More than gateways are told of one Service is no Service that people write.
fn complain_about_size(service: Located<'_, Service>, backends: &[DealtBackend], log: &mut Vec<Complaint>) {
    let Service { ports, source_ranges, .. } = service.body;
    for (field, what, count, most) in [
        ("spec.ports", "ports", ports.len(), DealtService::MOST_PORTS),
        ("spec.loadBalancerSourceRanges", "prefixes", source_ranges.len(), DealtService::MOST_RANGES),
        ("spec", "addresses behind it", backends.len(), DealtService::MOST_BACKENDS),
        ("spec", "bytes of names behind it", DealtService::bytes(backends), DealtService::MOST_BYTES),
    ] {
        if count > most {
            log.push(service.error(field, format!("has {count} {what}, at most {most} can be served")));
        }
    }
}

/// What of a Service leads nowhere, and what is spread badly.
fn complain_about_backends(
    service: Located<'_, Service>,
    held: &[IpAddr],
    backends: &[DealtBackend],
    log: &mut Vec<Complaint>,
) {
    if backends.is_empty() {
        return;
    }
    for (i, port) in service.body.ports.iter().enumerate() {
        if backends.iter().all(|backend| backend.ports[i] == 0) {
            let (field, name) = match &*port.name {
                "" => (port.field(), format!("{} port {}", port.protocol, port.port)),
                name => (format!("spec.ports[{}].name", port.at), format!("port `{name}`")),
            };
            log.push(service.warning(&field, format!("{name} is named in no endpoint: it leads nowhere")));
        }
    }
    let of = |family| backends.iter().filter(move |it| Family::of(it.address) == family);
    let has = Family::ALL.map(|family| of(family).next().is_some());
    for (field, vip) in service.body.vips.iter().filter(|(_, vip)| held.binary_search(vip).is_ok()) {
        if !has[usize::from(vip.is_ipv6())] {
            let family = Family::of(*vip);
            log.push(service.warning(field, format!("{vip} leads nowhere: {} has no {family} endpoint", service.id)));
        }
    }
    let places = service.body.table_size as usize;
    for family in Family::ALL {
        let count = of(family).filter(|it| it.may_be_chosen()).count();
        if count > places / PLACES {
            let reason = format!(
                "{count} {family} endpoints share a table of {places} places, which spreads sessions unevenly: let \
                 vipgate.io/maglev-table-size be a prime of {} or more",
                count * PLACES
            );
            log.push(service.warning(TABLE_SIZE_FIELD, reason));
        }
    }
}
