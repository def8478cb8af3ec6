//! From entries to what is in force: a store with its compiler, and the store of a fresh start with the same objects.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use vipgate_policy::address_record::AddressRecord;
use vipgate_policy::compiler::{NodeAgents, Share, Tenancy};
use vipgate_policy::manifest::UnclassedServices;

use super::entries::{Content, Entries};
use super::sources::Source;
use super::watchdog::Watchdog;
use super::world::{Change, SMALL_SHARE, Setting, Shape};
use crate::source::store::{CompileOutcome, ManifestStore, RecordMode};

/// The time from one batch to the next: some quarantines end meanwhile.
const BATCH_INTERVAL: Duration = Duration::from_mins(3);
/// Records that may follow from each other at once.
const MAX_RECORDS: usize = 4;

/// A store, its source, and the record of addresses, which outlives both.
pub(super) struct Pipeline {
    setting: Setting,
    source: Source,
    pub(super) entries: Entries,
    store: ManifestStore,
    record: Arc<AddressRecord>,
    now: Timestamp,
}

impl Setting {
    /// The part of the limits of a namespace.
    pub(super) fn share(&self) -> Share {
        if self.is_big { Share::QUARTER } else { Share::new(SMALL_SHARE).unwrap() }
    }

    fn unclassed(&self) -> UnclassedServices {
        if self.shape == Shape::Kubernetes { UnclassedServices::Ignore } else { UnclassedServices::Serve }
    }

    fn store(&self) -> ManifestStore {
        let agents = self.has_node_agents.then_some(NodeAgents { port: 4789, vni: 7, secret: None });
        ManifestStore::new(false)
            .with_tenancy(Tenancy::Strict)
            .with_namespace_share(self.share())
            .with_unclassed(self.unclassed())
            .with_ipam(self.shape == Shape::Kubernetes)
            .with_node_agents(agents)
            .with_record(RecordMode::Kept)
    }
}

impl Pipeline {
    pub(super) fn new(setting: Setting, source: Source) -> Self {
        let entries = Entries::new(setting.shape, source.prefix());
        Self { setting, entries, store: setting.store(), source, record: Arc::default(), now: Timestamp::default() }
    }

    /// What the names of its entries begin with.
    pub(super) fn prefix(&self) -> String {
        self.source.prefix()
    }

    /// The process starts again: what could be read once is unknown.
    pub(super) fn restart(&mut self) {
        self.store = self.setting.store();
        self.source.restart();
        let all = self.entries.all();
        self.deliver(all);
    }

    pub(super) fn apply<'a>(&mut self, changes: impl Iterator<Item = &'a Change>) {
        let entries = self.entries.apply(changes);
        self.deliver(entries);
    }

    fn deliver(&mut self, entries: Vec<(Arc<str>, Content)>) {
        for update in self.source.deliver(entries) {
            self.entries.note(&update, self.setting.unclassed());
            self.store.update(update);
        }
    }

    /// Compiles until what is given is recorded, as the product does.
    pub(super) fn compile(&mut self, watchdog: &Watchdog) -> CompileOutcome {
        self.now += BATCH_INTERVAL;
        for _ in 0..=MAX_RECORDS {
            let outcome = compile(&mut self.store, (&self.record, self.now), watchdog);
            match outcome.next_record.clone() {
                Some(next) => self.record = next,
                None => return outcome,
            }
        }
        panic!("what is given is recorded, and there is more: {}", self.record);
    }

    /// Whether another namespace has an address, or had it.
    pub(super) fn is_recorded_for_others(&self, address: IpAddr, namespace: &str) -> bool {
        self.record.get(address).is_some_and(|holding| holding.owner.namespace != namespace)
    }

    /// What a fresh start with the same objects and the same record brings into force, at the same time.
    pub(super) fn fresh(&self, watchdog: &Watchdog) -> CompileOutcome {
        let mut store = self.setting.store();
        store.update(self.entries.readable());
        compile(&mut store, (&self.record, self.now), watchdog)
    }
}

fn compile(
    store: &mut ManifestStore,
    (record, now): (&Arc<AddressRecord>, Timestamp),
    watchdog: &Watchdog,
) -> CompileOutcome {
    store.set_record(record.clone());
    store.set_now(now);
    watchdog.limit(|| store.compile())
}
