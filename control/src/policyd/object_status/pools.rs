//! The status of AddressPools: how many addresses it has, and which are used.

use std::cmp::Reverse;

use serde_json::{Map, Value, json};
use vipgate_policy::ipam::PoolUsage;

use super::accepted::Acceptance;
use super::condition::{Condition, DesiredStatus};

/// The condition's type.
pub(super) const EXHAUSTED: &str = "Exhausted";
/// Maximum namespaces in a status: those with the most addresses.
const MAX_NAMESPACES: usize = 32;

/// The status of the pool with this manifest; `None` while its usage is not known.
pub(super) fn pool_status(acceptance: &Acceptance<'_>, manifest: &str, usage: &[PoolUsage]) -> Option<DesiredStatus> {
    let accepted = acceptance.condition(manifest);
    let name = manifest.split_once('/').map_or(manifest, |(_, name)| name);
    let Some(usage) = usage.iter().find(|usage| usage.name == name) else {
        let status = DesiredStatus { conditions: vec![accepted], ..DesiredStatus::default() };
        return acceptance.fault(manifest).map(|_| status);
    };
    let used = usage.services.saturating_add(usage.policies);
    let fields = [
        ("capacity", count(used.saturating_add(usage.free))),
        ("used", count(used)),
        ("services", count(usage.services)),
        ("policies", count(usage.policies)),
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
    Some(DesiredStatus { conditions: vec![accepted, exhausted], fields, ..DesiredStatus::default() })
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
