//! Validation of Services: no duplicate frontend, no backend that is a VIP, consistent ports and backends.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use crate::flow::address::{V6, of_family};
use crate::flow::ids::FrontendId;
use crate::flow::listener::Listener;
use crate::policy::change::{Entries, PolicyChange};
use crate::policy::compiled::Policy;
use crate::policy::limits::{MAX_BACKEND_PORTS, MAX_BACKENDS_OF_SERVICE, MAX_PORTS_OF_SERVICE};
use crate::policy::maglev::is_valid_size;
use crate::policy::references::References;
use crate::policy::spec::{ServiceSpec, repeated_target};
use crate::policy::validation::BuildError;
use crate::wire::protocol;

pub(super) fn check(
    policy: &Policy,
    references: &References,
    change: &PolicyChange,
    is_vip: impl Fn(IpAddr) -> bool,
) -> Result<(), BuildError> {
    for vip in change.vips.changed() {
        // New backends are checked below.
        if let Some(service) = service_of_backend(policy, references, &change.services, vip.address) {
            return Err(BuildError::BackendIsVip { address: vip.address, service });
        }
    }
    let mut frontends: HashMap<(IpAddr, u16, u8), &ServiceSpec> = HashMap::new();
    let mut counts = [policy.v4.backends.len(), policy.v6.backends.len()];
    for service in change.services.changed() {
        check_service(service)?;
        for &vip in &service.vips {
            let ports = service.ports.iter().map(|it| (it.port, it.protocol));
            for (port, protocol) in ports.chain(service.health.map(|it| (it.port, protocol::TCP))) {
                let duplicate =
                    |other| BuildError::DuplicateFrontend { vip, port, protocol, service: service.name.clone(), other };
                if let Some(other) = frontends.insert((vip, port, protocol), service) {
                    return Err(duplicate(other.name.clone()));
                }
                let known = frontend_at(policy, vip, port, protocol).and_then(|id| policy.service(id.service));
                if let Some(other) = known.filter(|other| !change.services.contains_key(&other.spec.name)) {
                    return Err(duplicate(other.spec.name.clone()));
                }
            }
        }
        for backend in &service.backends {
            if is_vip(backend.address) {
                return Err(BuildError::BackendIsVip { address: backend.address, service: service.name.clone() });
            }
            // An upper bound, since known backends count twice: the limit needs no precision.
            counts[usize::from(backend.address.is_ipv6())] += backend.ports.iter().filter(|port| **port != 0).count();
        }
    }
    for name in change.services.keys() {
        let Some(service) = references.services.get(name).and_then(|id| policy.service(*id)) else { continue };
        counts[0] = counts[0].saturating_sub(service.listeners::<u32>().count());
        counts[1] = counts[1].saturating_sub(service.listeners::<V6>().count());
    }
    match counts.into_iter().max().filter(|count| *count > MAX_BACKEND_PORTS) {
        Some(count) => Err(BuildError::TooManyBackendPorts { count }),
        None => Ok(()),
    }
}

/// The unchanged Service that has a backend at an address.
fn service_of_backend(
    policy: &Policy,
    references: &References,
    changes: &Entries<ServiceSpec>,
    address: IpAddr,
) -> Option<Arc<str>> {
    let is_backend = of_family!(address, it => policy.is_backend(it));
    if !is_backend {
        return None;
    }
    let stay = references.services.iter().filter(|(name, _)| !changes.contains_key(*name));
    let mut stay = stay.filter_map(|(_, id)| policy.service(*id));
    stay.find(|it| it.spec.backends.iter().any(|backend| backend.address == address)).map(|it| it.spec.name.clone())
}

fn frontend_at(policy: &Policy, vip: IpAddr, port: u16, protocol: u8) -> Option<FrontendId> {
    of_family!(vip, it => policy.frontend(&Listener { address: it, port, protocol }))
}

fn check_service(service: &ServiceSpec) -> Result<(), BuildError> {
    let reason = if !is_valid_size(service.table_size) {
        "the table size is not a prime from 7 to 131071"
    } else if service.ports.len() > MAX_PORTS_OF_SERVICE || service.backends.len() > MAX_BACKENDS_OF_SERVICE {
        "too many ports or backends"
    } else if service.backends.iter().any(|backend| backend.ports.len() != service.ports.len()) {
        "a backend doesn't have exactly one port per Service port"
    } else if !service.backends.is_sorted_by(|one, other| (one.address, &one.ports) < (other.address, &other.ports)) {
        "the backends are not sorted by address and ports, each once"
    } else if repeated_target(service.backends.iter().map(|backend| (backend.address, &*backend.ports))).is_some() {
        "two backends have the same address and port for one Service port"
    } else {
        return Ok(());
    };
    Err(BuildError::InvalidService { service: service.name.clone(), reason })
}
