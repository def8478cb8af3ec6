//! Who uses what of a policy: endpoints by policy and by VIP, and the ports that they are guaranteed. Counted as they come
//! and go, so that a change needn't look at all endpoints to know what may be taken away.

use std::sync::Arc;

use foldhash::HashMap;

use super::policy::{EgressId, Policy, VipId};
use super::service::ServiceId;

/// Counts of uses, and the numbers that nothing uses.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// Numbers of policies by name.
    pub(super) egress: HashMap<Arc<str>, EgressId>,
    /// Numbers of Services by name.
    pub(super) services: HashMap<Arc<str>, ServiceId>,
    /// Endpoints by the number of their policy.
    endpoints_of: Vec<u32>,
    /// Endpoints by the number of a VIP of theirs.
    endpoints_behind: Vec<u32>,
    /// Ports that are guaranteed behind a VIP, by number.
    guaranteed: Vec<u64>,
    /// Numbers below the highest that no policy has.
    pub(super) free_egress: Vec<EgressId>,
    /// Numbers below the highest that no VIP has.
    pub(super) free_vips: Vec<VipId>,
    /// Numbers below the highest that no Service has.
    pub(super) free_services: Vec<ServiceId>,
}

impl Uses {
    /// Endpoints that name this policy.
    pub(super) fn of_egress(&self, id: EgressId) -> u32 {
        self.endpoints_of.get(id.0 as usize).copied().unwrap_or(0)
    }

    /// Endpoints that name this VIP.
    pub(super) fn of_vip(&self, id: VipId) -> u32 {
        self.endpoints_behind.get(usize::from(id.0)).copied().unwrap_or(0)
    }

    /// Ports that are guaranteed to the endpoints behind a VIP, all together.
    pub(super) fn guaranteed(&self, id: VipId) -> u32 {
        let ports = self.guaranteed.get(usize::from(id.0)).copied().unwrap_or(0);
        u32::try_from(ports).unwrap_or(u32::MAX)
    }

    /// Counts an endpoint that is there now, or is there no more; `ports` are guaranteed to it.
    pub(super) fn count(&mut self, egress: EgressId, vips: &[VipId], ports: u32, comes: bool) {
        let count = |counts: &mut Vec<u32>, at: usize| {
            let count = at_mut(counts, at);
            *count = if comes { *count + 1 } else { count.saturating_sub(1) };
        };
        count(&mut self.endpoints_of, egress.0 as usize);
        for vip in vips {
            let at = usize::from(vip.0);
            count(&mut self.endpoints_behind, at);
            let sum = at_mut(&mut self.guaranteed, at);
            *sum = if comes { *sum + u64::from(ports) } else { sum.saturating_sub(ports.into()) };
        }
    }

    /// A policy guarantees another number of ports than before: sums them up anew.
    pub(super) fn recount_guaranteed(&mut self, policy: &Policy) {
        self.guaranteed.clear();
        for (_, endpoint) in policy.endpoints() {
            let ports = policy.egress_of(endpoint).spec.limits.guaranteed_ports.unwrap_or(0);
            for vip in &endpoint.vips {
                *at_mut(&mut self.guaranteed, usize::from(vip.0)) += u64::from(ports);
            }
        }
    }
}

fn at_mut<T: Clone + Default>(counts: &mut Vec<T>, at: usize) -> &mut T {
    if counts.len() <= at {
        counts.resize(at + 1, T::default());
    }
    &mut counts[at]
}
