//! The records of pools: which ones are to be written, and which Services wait for that. Pure.
//!
//! What an object is to have is recorded first: then no restart and no other leader gives it to somebody else.

use std::collections::BTreeMap;
use std::net::IpAddr;

use vipgate_policy::address_record::AddressRecord;
use vipgate_policy::ipam::{AllocationPlan, Snapshot};
use vipgate_policy::manifest::{Body, Kind, ServiceRequest};

use super::api::ListedPool;

/// A record that the API doesn't have.
#[derive(Debug)]
pub(super) struct RecordChange<'a> {
    pub(super) pool: &'a str,
    /// As it was read; `None`: the API has no such pool.
    pub(super) listed: Option<&'a ListedPool>,
    pub(super) record: &'a AddressRecord,
}

impl RecordChange<'_> {
    /// Whether it lacks an address that the API has recorded.
    fn is_loss(&self) -> bool {
        let mut before = self.listed.iter().flat_map(|pool| pool.record.iter());
        before.any(|(address, _)| self.record.get(address).is_none())
    }
}

/// Whether the pools of the snapshot have recorded what was planned.
pub(super) fn are_observed(planned: &BTreeMap<String, AddressRecord>, snapshot: &Snapshot) -> bool {
    snapshot.objects.iter().all(|object| match &object.body {
        Body::AddressPool(pool) => {
            planned.get(&object.id.name).is_none_or(|record| pool.recorded.as_deref() == Some(record))
        }
        _ => true,
    })
}

/// What pools have recorded.
pub(super) fn merged(pools: &BTreeMap<String, ListedPool>) -> AddressRecord {
    let mut merged = AddressRecord::default();
    for pool in pools.values() {
        merged.extend(&pool.record);
    }
    merged
}

/// The snapshot for a plan with a record that was read. What another leader has recorded of a policy, which the snapshot
/// may not have yet, stays until the snapshot has that record, too.
pub(super) fn with_unobserved(snapshot: &Snapshot, record: &AddressRecord) -> Snapshot {
    let observed = snapshot.record();
    let mut snapshot = snapshot.clone();
    // Services are read with the record.
    let given = record.iter().filter(|(_, holding)| holding.freed.is_none() && holding.owner.kind != Kind::Service);
    let unobserved = given.filter(|(address, holding)| !observed.is_given_to(*address, &holding.owner));
    snapshot.unreadable.extend(unobserved.map(|(_, holding)| holding.owner.clone()));
    snapshot
}

/// The records that the API doesn't have. An address that has come to another pool is recorded there first.
pub(super) fn changes<'a>(pools: &'a BTreeMap<String, ListedPool>, plan: &'a AllocationPlan) -> Vec<RecordChange<'a>> {
    let change = |(pool, record): (&'a String, &'a AddressRecord)| {
        let listed = pools.get(pool);
        let is_same =
            listed.map_or(*record == AddressRecord::default(), |listed| listed.has_record && listed.record == *record);
        (!is_same).then_some(RecordChange { pool, listed, record })
    };
    let mut changes: Vec<RecordChange<'a>> = plan.records.iter().filter_map(change).collect();
    changes.sort_by_key(RecordChange::is_loss);
    changes
}

/// Whether a Service is to get an address that isn't recorded as its own, since these records aren't written.
pub(super) fn waits_for(service: &ServiceRequest, addresses: &[IpAddr], unwritten: &[RecordChange<'_>]) -> bool {
    let id = service.id();
    let mut new = addresses.iter().filter(|address| !service.current.contains(address));
    new.any(|address| {
        unwritten.iter().any(|RecordChange { listed, record, .. }| {
            let is_its = listed.is_some_and(|pool| pool.record.is_given_to(*address, &id));
            record.get(*address).is_some() && !is_its
        })
    })
}

#[cfg(test)]
mod tests;
