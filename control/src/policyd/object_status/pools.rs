//! The status of AddressPools: how many addresses it has, and which are used.

use std::cmp::Reverse;

use serde_json::{Map, Value, json};
use vipgate_policy::ipam::PoolUsage;

use super::accepted::Acceptance;
use super::condition::{Condition, DesiredStatus, Truth};
use crate::policyd::cloud::{AllocationFacts, PoolFacts};

/// The condition's type.
pub(super) const EXHAUSTED: &str = "Exhausted";
/// The condition's type: whether its provider can be observed.
pub(super) const PROVIDER_READY: &str = "ProviderReady";
/// The condition's type: whether its VIPs are attached to their gateways.
pub(super) const ATTACHED: &str = "Attached";
/// The condition's type: whether what it lacks can be allocated.
pub(super) const ALLOCATED: &str = "Allocated";
/// The reason of a condition that will be true by itself.
pub(super) const IN_PROGRESS: &str = "InProgress";
/// Maximum namespaces in a status: those with the most addresses.
const MAX_NAMESPACES: usize = 32;

/// The status of the pool with this manifest; `None` while its usage is not known.
pub(super) fn pool_status(
    acceptance: &Acceptance<'_>,
    manifest: &str,
    usage: &[PoolUsage],
    clouds: &[PoolFacts],
) -> Option<DesiredStatus> {
    let accepted = acceptance.condition(manifest);
    let name = manifest.split_once('/').map_or(manifest, |(_, name)| name);
    let of_provider = clouds.iter().find(|facts| facts.name == name).map(provider_conditions).unwrap_or_default();
    let Some(usage) = usage.iter().find(|usage| usage.name == name) else {
        let status = DesiredStatus { conditions: vec![accepted], ..DesiredStatus::default() };
        return acceptance.fault(manifest).map(|_| status);
    };
    let used = usage.services.saturating_add(usage.policies);
    let capacity = used.saturating_add(usage.quarantined).saturating_add(usage.free);
    let fields = [
        ("capacity", count(capacity)),
        ("used", count(used)),
        ("services", count(usage.services)),
        ("policies", count(usage.policies)),
        ("quarantined", count(usage.quarantined)),
        ("namespaces", namespaces(usage)),
    ];
    let exhausted: Vec<String> = usage.exhausted.iter().map(ToString::to_string).collect();
    let exhausted = if exhausted.is_empty() {
        Condition::new(EXHAUSTED, false, "AddressesFree", "it has free addresses of each of its families")
    } else {
        let message = format!("no {} address is free", exhausted.join(" and no "));
        Condition::new(EXHAUSTED, true, "NoAddressFree", &message)
    };
    let fields: Map<String, Value> = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let conditions = [vec![accepted, exhausted], of_provider].concat();
    Some(DesiredStatus { conditions, fields, ..DesiredStatus::default() })
}

/// Whether the provider is observed, and whether the pool's VIPs are attached to their gateways.
fn provider_conditions(facts: &PoolFacts) -> Vec<Condition> {
    let ready = match &facts.fault {
        Some((reason, message)) => Condition::new(PROVIDER_READY, false, reason, message),
        None if facts.is_observed => Condition::new(PROVIDER_READY, true, "Observed", "its addresses are observed"),
        None => Condition::new(PROVIDER_READY, Truth::Unknown, "NotObserved", "it wasn't observed yet"),
    };
    let attached = if facts.attached >= facts.vips {
        Condition::new(ATTACHED, facts.is_observed, "Attached", "each VIP is attached to the gateway that owns it")
    } else {
        let left = format!("{} of {} VIPs aren't attached to their gateways", facts.vips - facts.attached, facts.vips);
        match &facts.problem {
            Some((reason, message)) => Condition::new(ATTACHED, false, reason, &format!("{left}: {message}")),
            None => Condition::new(ATTACHED, false, IN_PROGRESS, &left),
        }
    };
    let allocated = facts.allocation.as_ref().map(allocated_condition);
    [ready, attached].into_iter().chain(allocated).collect()
}

/// Whether the provider has allocated what Services and policies lack.
fn allocated_condition(facts: &AllocationFacts) -> Condition {
    let AllocationFacts { missing, beyond_limit, failure } = facts;
    if let Some((reason, message)) = failure {
        return Condition::new(
            ALLOCATED,
            false,
            reason,
            &format!("{missing} addresses are to be allocated: {message}"),
        );
    }
    if *beyond_limit > 0 {
        let message = format!("{beyond_limit} addresses are lacking, and `max` is reached");
        return Condition::new(ALLOCATED, false, "LimitReached", &message);
    }
    if *missing > 0 {
        return Condition::new(ALLOCATED, false, IN_PROGRESS, &format!("{missing} addresses are being allocated"));
    }
    Condition::new(ALLOCATED, true, "Allocated", "no Service or policy lacks an address")
}

/// A count, which the API has as a signed integer of 64 bits: more is cut off.
fn count(count: u64) -> Value {
    i64::try_from(count).unwrap_or(i64::MAX).into()
}

/// The namespaces with the most addresses, by name.
fn namespaces(usage: &PoolUsage) -> Value {
    let mut all: Vec<&(String, u64)> = usage.namespaces.iter().collect();
    all.sort_by_key(|(name, count)| (Reverse(*count), name.clone()));
    all.truncate(MAX_NAMESPACES);
    all.sort();
    all.into_iter().map(|(name, used)| json!({"name": name, "used": count(*used)})).collect()
}

#[cfg(test)]
mod tests;
