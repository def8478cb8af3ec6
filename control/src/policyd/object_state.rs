//! What is shared about objects of the Kubernetes API: by the source, which observes them, the compiler, the tasks of the
//! leader, which write status and Events, and metrics.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::ArcSwapOption;
use vipgate_policy::manifest::Kind;

use super::events::{ObjectEvent, ObjectEvents, ObjectReference};
use super::publication::Publication;
use super::stats::Counter;
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;
use crate::source::kubernetes::ObservedObjects;
use crate::source::store::CompileOutcome;

/// A compilation, and the publication that is in force with it.
#[derive(Clone, Debug)]
pub(super) struct Compilation {
    pub(super) outcome: Arc<CompileOutcome>,
    pub(super) published: Arc<Publication>,
}

/// The shared state.
#[derive(Debug, Default)]
pub struct ObjectState {
    /// The objects as the source has observed them.
    pub(super) observed: Arc<ObservedObjects>,
    /// The last compilation that is published.
    pub(super) compilation: ArcSwapOption<Compilation>,
    /// Events that are to be written.
    pub(super) events: Arc<ObjectEvents>,
    /// Writes of status, by result.
    pub(super) written: Counter,
    pub(super) gone: Counter,
    pub(super) denied: Counter,
    pub(super) failed: Counter,
    /// Objects whose status is still to be written.
    pub(super) pending: AtomicU64,
}

impl ObjectState {
    /// Records an Event of a Service (`namespace/name`).
    pub(super) fn record_for_service(&self, path: &str, event: impl FnOnce(ObjectReference) -> ObjectEvent) {
        let manifest = format!("{}/{path}", Kind::Service.as_str());
        let uid = self.observed.snapshot().get(&*manifest).map(|object| object.uid.clone()).unwrap_or_default();
        self.events.record(event(ObjectReference::of_manifest(Kind::Service, &manifest, &uid)));
    }

    /// Its metrics.
    pub(super) fn families(&self) -> Vec<Family> {
        let results =
            [("written", &self.written), ("gone", &self.gone), ("denied", &self.denied), ("failed", &self.failed)];
        let mut families = vec![
            defined::STATUS_WRITES.by_label(results.map(|(result, count)| (result, count.get()))),
            defined::STATUS_PENDING.single(self.pending.load(Relaxed)),
        ];
        families.extend(self.events.families());
        families
    }
}
