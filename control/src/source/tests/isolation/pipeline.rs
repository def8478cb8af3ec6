//! From entries to what is in force: a store with its compiler, and the store of a fresh start with the same objects.

use std::sync::Arc;
use std::time::Instant;

use vipgate_policy::compiler::{NodeAgents, Share, Tenancy};
use vipgate_policy::manifest::UnclassedServices;

use super::entries::{Content, Entries};
use super::sources::Source;
use super::watchdog::{MAX_COMPILATION, Watchdog};
use super::world::{Change, SMALL_SHARE, Setting, Shape};
use crate::source::store::{CompileOutcome, ManifestStore};

/// A store and its source.
pub(super) struct Pipeline {
    setting: Setting,
    source: Source,
    pub(super) entries: Entries,
    store: ManifestStore,
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
    }
}

impl Pipeline {
    pub(super) fn new(setting: Setting, source: Source) -> Self {
        let entries = Entries::new(setting.shape, source.prefix());
        Self { setting, entries, store: setting.store(), source }
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

    pub(super) fn compile(&mut self, watchdog: &Watchdog) -> CompileOutcome {
        compile(&mut self.store, watchdog)
    }

    /// What a fresh start with the same objects brings into force.
    pub(super) fn fresh(&self, watchdog: &Watchdog) -> CompileOutcome {
        let mut store = self.setting.store();
        store.update(self.entries.readable());
        compile(&mut store, watchdog)
    }
}

fn compile(store: &mut ManifestStore, watchdog: &Watchdog) -> CompileOutcome {
    let start = Instant::now();
    let outcome = watchdog.limit(|| store.compile());
    assert!(start.elapsed() < MAX_COMPILATION, "a compilation has taken {:?}", start.elapsed());
    outcome
}
