//! What a pool with `ownership: reserve` is to allocate, and what it may release.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use vipgate_cloud::demand::{self, Demand, Reserve};
use vipgate_cloud::plan::Desired;
use vipgate_cloud::{AddressId, Observation, Tags};
use vipgate_policy::Shortage;
use vipgate_policy::manifest::{Family, Ownership, ProviderSpec, claim_owner};

/// Time after which an allocation is observed, or didn't take place.
const MAX_READ_LAG: Duration = Duration::from_mins(1);
/// Time in which a VIP uses an address that was allocated for it: its policy is compiled and published.
const USE_TIME: Duration = Duration::from_secs(30);
/// Time without use after which an allocated address is released.
const RELEASE_TIME: Duration = Duration::from_mins(10);

/// Allocations of a pool over time.
#[derive(Debug, Default)]
pub(super) struct DemandTracker {
    /// When each allocation that isn't observed was last asked for, by token.
    issued: BTreeMap<String, Instant>,
    /// Since when each allocated address has had no use.
    unused: BTreeMap<AddressId, Instant>,
    /// Allocated addresses that VIPs have used.
    used: BTreeSet<AddressId>,
}

impl DemandTracker {
    /// Adds to the desired state what is to be allocated for `shortages`, and what may be released; returns the number of
    /// addresses that are lacking beyond the limit.
    pub(super) fn update(
        &mut self,
        pool: &str,
        spec: &ProviderSpec,
        shortages: &[Shortage],
        desired: &mut Desired,
        observed: &Observation,
        now: Instant,
    ) -> usize {
        if spec.ownership != Ownership::Reserve {
            *self = Self::default();
            return 0;
        }
        let no_tags = Tags::new();
        let max = spec.max.map_or(0, |max| max.get() as usize);
        let reserve = Reserve { pool, tags: spec.tags().unwrap_or(&no_tags), max };
        let of_pool: Vec<demand::Shortage> = shortages.iter().filter(|it| it.pool == pool).map(shortage).collect();
        let observed_tokens: BTreeSet<&str> = observed.addresses.iter().filter_map(|it| it.token.as_deref()).collect();
        self.issued
            .retain(|token, at| !observed_tokens.contains(token.as_str()) && now.duration_since(*at) < MAX_READ_LAG);
        let issued = self.issued.keys().cloned().collect();
        let Demand { allocations, beyond_limit } = demand::demand(&reserve, &of_pool, desired, observed, &issued);
        self.issued.extend(allocations.iter().map(|allocation| (allocation.token.clone(), now)));
        desired.allocations = allocations;
        self.track_use(&of_pool, desired, observed, now);
        beyond_limit
    }

    /// A new address keeps its claim for a while, and as long as its owner lacks one. One without use is released after a longer
    /// time, if nobody lacks one.
    fn track_use(
        &mut self,
        shortages: &[demand::Shortage],
        desired: &mut Desired,
        observed: &Observation,
        now: Instant,
    ) {
        let (mut unused, mut used) = (BTreeMap::new(), BTreeSet::new());
        for address in observed.addresses.iter().filter(|address| address.token.is_some()) {
            let is_vip = desired.vips.contains_key(&address.address);
            if is_vip || self.used.contains(&address.id) {
                used.insert(address.id.clone());
            }
            if is_vip {
                continue;
            }
            let since = self.unused.get(&address.id).copied().unwrap_or(now);
            let of_family = || shortages.iter().filter(|it| it.is_ipv6 == address.address.is_ipv6());
            let is_awaited = of_family().any(|it| address.claim.as_ref().is_some_and(|claim| claim.owner == it.owner));
            let time = now.duration_since(since);
            if is_awaited || time < USE_TIME && !used.contains(&address.id) {
                desired.expected.insert(address.id.clone());
            } else if time >= RELEASE_TIME && of_family().next().is_none() {
                desired.releasable.insert(address.id.clone());
            }
            unused.insert(address.id.clone(), since);
        }
        (self.unused, self.used) = (unused, used);
    }
}

fn shortage(shortage: &Shortage) -> demand::Shortage {
    demand::Shortage {
        owner: claim_owner(&shortage.owner),
        is_ipv6: shortage.family == Family::V6,
        wanted: shortage.wanted,
    }
}

#[cfg(test)]
mod tests;
