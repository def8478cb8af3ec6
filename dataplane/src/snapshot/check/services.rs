//! Whether Services can be built: each frontend is one Service's, no backend is a VIP, and each is whole in itself.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};

use super::BuildError;
use crate::address::V6;
use crate::snapshot::build::MOST_BACKENDS;
use crate::snapshot::change::PolicyChange;
use crate::snapshot::maglev::is_size;
use crate::snapshot::policy::Policy;
use crate::snapshot::service::{FrontendId, Listener};
use crate::snapshot::spec::ServiceSpec;
use crate::snapshot::uses::Uses;
use crate::wire::protocol;

/// Numbers that a backend, or a port, of a Service may have.
const MOST_PARTS: usize = u16::MAX as usize;

pub(super) fn check(
    policy: &Policy,
    uses: &Uses,
    change: &PolicyChange,
    is_vip: impl Fn(IpAddr) -> bool,
) -> Result<(), BuildError> {
    let changed: HashSet<&str> =
        change.services.iter().map(|it| &*it.name).chain(change.gone.services.iter().map(|name| &**name)).collect();
    for vip in &change.vips {
        // Backends that come are looked at below.
        if let Some(service) = whose_backend(policy, uses, &changed, vip.address) {
            return Err(BuildError::BackendIsVip { address: vip.address, service });
        }
    }
    let mut frontends: HashMap<(IpAddr, u16, u8), &ServiceSpec> = HashMap::new();
    let mut counts = [policy.v4.backends.len(), policy.v6.backends.len()];
    for service in &change.services {
        whole(service)?;
        for &vip in &service.vips {
            let ports = service.ports.iter().map(|it| (it.port, it.protocol));
            for (port, protocol) in ports.chain(service.health.map(|it| (it.port, protocol::TCP))) {
                let twice =
                    |other| BuildError::FrontendTwice { vip, port, protocol, service: service.name.clone(), other };
                if let Some(other) = frontends.insert((vip, port, protocol), service) {
                    return Err(twice(other.name.clone()));
                }
                let known = owner(policy, vip, port, protocol).and_then(|id| policy.service(id.service));
                if let Some(other) = known.filter(|other| !changed.contains(&*other.spec.name)) {
                    return Err(twice(other.spec.name.clone()));
                }
            }
        }
        for backend in &service.backends {
            if is_vip(backend.address) {
                return Err(BuildError::BackendIsVip { address: backend.address, service: service.name.clone() });
            }
            // More than there can be, where a backend was known: the limit is no fine line.
            counts[usize::from(backend.address.is_ipv6())] += backend.ports.iter().filter(|port| **port != 0).count();
        }
    }
    for name in &changed {
        let Some(service) = uses.services.get(*name).and_then(|id| policy.service(*id)) else { continue };
        counts[0] = counts[0].saturating_sub(service.listeners::<u32>().count());
        counts[1] = counts[1].saturating_sub(service.listeners::<V6>().count());
    }
    match counts.into_iter().max().filter(|count| *count > MOST_BACKENDS) {
        Some(count) => Err(BuildError::TooManyBackends { count }),
        None => Ok(()),
    }
}

/// The Service, of those that stay as they are, that has a backend at an address.
fn whose_backend(policy: &Policy, uses: &Uses, changed: &HashSet<&str>, address: IpAddr) -> Option<Arc<str>> {
    let is_backend = match address {
        IpAddr::V4(v4) => policy.is_backend(v4.to_bits()),
        IpAddr::V6(v6) => policy.is_backend(V6::from_bits(v6.to_bits())),
    };
    if !is_backend {
        return None;
    }
    let stay = uses.services.iter().filter(|(name, _)| !changed.contains(&***name));
    let mut stay = stay.filter_map(|(_, id)| policy.service(*id));
    stay.find(|it| it.spec.backends.iter().any(|backend| backend.address == address)).map(|it| it.spec.name.clone())
}

fn owner(policy: &Policy, vip: IpAddr, port: u16, protocol: u8) -> Option<FrontendId> {
    match vip {
        IpAddr::V4(v4) => policy.frontend(&Listener { address: v4.to_bits(), port, protocol }),
        IpAddr::V6(v6) => policy.frontend(&Listener { address: V6::from_bits(v6.to_bits()), port, protocol }),
    }
}

fn whole(service: &ServiceSpec) -> Result<(), BuildError> {
    let reason = if !is_size(service.table_size) {
        "the size of its table is no prime from 7 to 131071"
    } else if service.ports.len() >= MOST_PARTS || service.backends.len() > MOST_PARTS {
        "it has too many ports or backends"
    } else if service.backends.iter().any(|backend| backend.ports.len() != service.ports.len()) {
        "a backend has not one port for each of its ports"
    } else if !service.backends.is_sorted_by(|one, other| one.address < other.address) {
        "its backends are not in the order of their addresses, each once"
    } else {
        return Ok(());
    };
    Err(BuildError::Service { service: service.name.clone(), reason })
}
