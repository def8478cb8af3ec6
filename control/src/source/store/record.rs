//! The record of addresses of pools, as compilations get it: where it is, and what of the source decides about it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use vipgate_policy::address_record::{AddressRecord, Recorded};
use vipgate_policy::compiler::{Compiler, Options};
use vipgate_policy::manifest::{Body, Kind, Object, ObjectId};

use super::ManifestStore;

/// How much later than another server this one may have the objects of the source.
pub(crate) const CATCH_UP_TIME: Duration = Duration::from_secs(10);

/// Where the record of addresses of pools is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RecordMode {
    /// Nowhere: what policies get of pools is a function of the manifests alone.
    #[default]
    None,
    /// Beside the source; [`ManifestStore::set_record`] sets it.
    Kept,
    /// As `Kept` while there is no `VipGateway` but this one, else nowhere: gateways that compile files themselves share no
    /// record.
    KeptBy(Arc<str>),
    /// In the status of the pools, where somebody else writes it.
    OfPools,
}

/// Whether the source is reachable: if not, nothing is known to be gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Reachability {
    #[default]
    Reachable,
    Lost,
}

impl ManifestStore {
    /// Sets where the record of addresses of pools is. Default: nowhere.
    #[must_use]
    pub fn with_record(self, record_mode: RecordMode) -> Self {
        Self { record_mode, ..self }
    }

    /// Sets the record, where it is beside the source.
    pub fn set_record(&mut self, record: Arc<AddressRecord>) {
        self.record = record;
    }

    /// Sets the record to one that may be another server's. Objects that it is of may still be on their way to this one, so
    /// they keep what they have for a while.
    pub fn adopt_record(&mut self, record: Arc<AddressRecord>, now: Timestamp) {
        self.adopted_until = now.checked_add(CATCH_UP_TIME).ok();
        self.set_record(record);
    }

    /// Sets whether the source is reachable.
    pub fn set_reachable(&mut self, is_reachable: bool) {
        self.reachability = if is_reachable { Reachability::Reachable } else { Reachability::Lost };
    }

    /// When what the adopted record says of objects that aren't there is no longer true.
    pub(super) fn adoption_ends(&self) -> Option<Timestamp> {
        self.adopted_until.filter(|end| *end > self.now)
    }

    /// Sets the time of the next compilations. Default: the epoch.
    pub fn set_now(&mut self, now: Timestamp) {
        self.now = now;
    }

    /// Has the next compilation work on the record; `unreadable`: objects that keep what they have.
    pub(super) fn update_recorded(&mut self, unreadable: &BTreeSet<ObjectId>, is_complete: bool) {
        if self.record_mode == RecordMode::OfPools {
            self.merge_pools();
        }
        if self.has_record(unreadable) {
            let (record, now, unreadable) = (self.record.clone(), self.now, unreadable.clone());
            let unrecorded_pools = self.unrecorded_pools();
            let recorded = Recorded { record, now, unreadable, is_complete, unrecorded_pools };
            self.compiler.set_recorded(recorded);
        } else if self.compiler.options().recorded.is_some() {
            let options = Options { recorded: None, ..self.compiler.options().clone() };
            self.compiler = Compiler::new(options);
        }
    }

    /// What is to be stored beside the source of the record that a compilation gives.
    pub(super) fn note_next(&mut self, next: Option<Arc<AddressRecord>>) -> Option<Arc<AddressRecord>> {
        let next = next.filter(|_| self.record_mode != RecordMode::OfPools)?;
        self.compiler.repeat_next_record();
        Some(next)
    }

    /// Pools whose status never had a record, where the status has it: the leader will write it in a moment.
    fn unrecorded_pools(&self) -> BTreeSet<String> {
        let is_unrecorded =
            |object: &&Arc<Object>| matches!(&object.body, Body::AddressPool(pool) if pool.recorded.is_none());
        let pools = self.entries.of_kind(Kind::AddressPool).filter(|_| self.record_mode == RecordMode::OfPools);
        pools.filter(is_unrecorded).map(|object| object.id.name.clone()).collect()
    }

    fn has_record(&self, unreadable: &BTreeSet<ObjectId>) -> bool {
        let RecordMode::KeptBy(name) = &self.record_mode else { return self.record_mode != RecordMode::None };
        let ids = self.entries.of_kind(Kind::Gateway).map(|object| &object.id).chain(unreadable);
        ids.filter(|id| id.kind == Kind::Gateway).all(|id| id.name == **name)
    }

    /// Merges the records of the pools, unless they are the same ones.
    fn merge_pools(&mut self) {
        let recorded = |object: &Arc<Object>| match &object.body {
            Body::AddressPool(pool) => pool.recorded.clone(),
            _ => None,
        };
        let of_pools: Vec<_> = self.entries.of_kind(Kind::AddressPool).filter_map(recorded).collect();
        if of_pools.iter().map(Arc::as_ptr).eq(self.of_pools.iter().map(Arc::as_ptr)) {
            return;
        }
        let mut record = AddressRecord::default();
        for one in &of_pools {
            record.extend(one);
        }
        (self.record, self.of_pools) = (Arc::new(record), of_pools);
    }
}
