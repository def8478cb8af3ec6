//! Reference counts of a policy: endpoints per egress policy and per VIP, and guaranteed ports per VIP. Updated with
//! every change, so that removals are validated without a scan of all endpoints.

use std::sync::Arc;

use foldhash::HashMap;

use crate::flow::ids::{EgressId, ServiceId, ShardMapId, VipId};
use crate::policy::compiled::Policy;
use crate::policy::spec::EgressSpec;
use crate::policy::validation::prefixes;

/// Reference counts and free numbers.
#[derive(Debug, Default)]
pub(super) struct References {
    /// Numbers of egress policies, by name.
    pub(super) egress: HashMap<Arc<str>, EgressId>,
    /// Numbers of shard maps, by name.
    pub(super) shard_maps: HashMap<Arc<str>, ShardMapId>,
    /// Numbers of Services, by name.
    pub(super) services: HashMap<Arc<str>, ServiceId>,
    /// Endpoints per egress policy, by number.
    per_egress: Vec<u32>,
    /// Endpoints per VIP, by number.
    per_vip: Vec<u32>,
    /// Guaranteed ports per VIP, by number.
    guaranteed: Vec<u64>,
    /// Distinct prefixes of each egress policy, summed up: of IPv4 and of IPv6.
    prefixes: [usize; 2],
    /// Free numbers below the highest, of egress policies.
    pub(super) free_egress: Vec<EgressId>,
    /// Free numbers below the highest, of shard maps.
    pub(super) free_shard_maps: Vec<ShardMapId>,
    /// Free numbers below the highest, of VIPs.
    pub(super) free_vips: Vec<VipId>,
    /// Free numbers below the highest, of Services.
    pub(super) free_services: Vec<ServiceId>,
}

impl References {
    /// Endpoints of an egress policy.
    pub(super) fn endpoints_of_egress(&self, id: EgressId) -> u32 {
        self.per_egress.get(id.0 as usize).copied().unwrap_or(0)
    }

    /// Endpoints of a VIP.
    pub(super) fn endpoints_of_vip(&self, id: VipId) -> u32 {
        self.per_vip.get(usize::from(id.0)).copied().unwrap_or(0)
    }

    /// Sum of the ports guaranteed to the endpoints of a VIP.
    pub(super) fn guaranteed(&self, id: VipId) -> u32 {
        let ports = self.guaranteed.get(usize::from(id.0)).copied().unwrap_or(0);
        u32::try_from(ports).unwrap_or(u32::MAX)
    }

    /// Prefixes of all egress policies, of IPv4 and of IPv6.
    pub(super) fn prefixes(&self) -> [usize; 2] {
        self.prefixes
    }

    /// Counts the prefixes of an egress policy that was added or removed.
    pub(super) fn count_prefixes(&mut self, spec: &EgressSpec, is_added: bool) {
        for (sum, count) in std::iter::zip(&mut self.prefixes, prefixes::count(spec)) {
            *sum = if is_added { *sum + count } else { sum.saturating_sub(count) };
        }
    }

    /// Counts an endpoint that was added or removed; `ports` are guaranteed to it.
    pub(super) fn count_endpoint(&mut self, egress: EgressId, vips: &[VipId], ports: u32, is_added: bool) {
        let count = |counts: &mut Vec<u32>, at: usize| {
            let count = entry_mut(counts, at);
            *count = if is_added { *count + 1 } else { count.saturating_sub(1) };
        };
        count(&mut self.per_egress, egress.0 as usize);
        for vip in vips {
            let at = usize::from(vip.0);
            count(&mut self.per_vip, at);
            let sum = entry_mut(&mut self.guaranteed, at);
            *sum = if is_added { *sum + u64::from(ports) } else { sum.saturating_sub(ports.into()) };
        }
    }

    /// Recomputes the guaranteed ports after a policy's guarantee has changed.
    pub(super) fn recount_guaranteed(&mut self, policy: &Policy) {
        self.guaranteed.clear();
        for (_, endpoint) in policy.endpoints() {
            let ports = policy.egress_of(endpoint).spec.limits.guaranteed_ports.unwrap_or(0);
            for vip in &endpoint.vips {
                *entry_mut(&mut self.guaranteed, usize::from(vip.0)) += u64::from(ports);
            }
        }
    }
}

fn entry_mut<T: Clone + Default>(counts: &mut Vec<T>, at: usize) -> &mut T {
    if counts.len() <= at {
        counts.resize(at + 1, T::default());
    }
    &mut counts[at]
}
