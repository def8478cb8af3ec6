//! What is shared about objects of the Kubernetes API: by the source, which observes them, the compiler, the tasks of the
//! leader, which write status and Events, and metrics.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use vipgate_policy::manifest::Kind;

use super::events::{ObjectEvent, ObjectEvents};
use super::kubernetes::writer::{ObjectReference, WriteCounts};
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;
use crate::source::kubernetes::ObservedObjects;
use crate::source::store::CompileOutcome;
use crate::xds::publication::{Publication, without_mark};

/// Publications whose versions are known. Servers compile the same within seconds of each other.
const MAX_RECENT_VERSIONS: usize = 1024;

/// A compilation, and the publication that is in force with it.
#[derive(Clone, Debug)]
pub(super) struct Compilation {
    pub(super) outcome: Arc<CompileOutcome>,
    pub(super) published: Arc<Publication>,
}

/// Versions of the latest publications with their numbers. A gateway that gets its policy from another server says in
/// heartbeats which version it has in force.
#[derive(Debug, Default)]
pub(super) struct RecentVersions(Mutex<VecDeque<(Arc<str>, u64)>>);

impl RecentVersions {
    /// Records a publication.
    pub(super) fn record(&self, published: &Publication) {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.back().is_none_or(|(_, number)| *number != published.number) {
            recent.push_back((published.version.as_str().into(), published.number));
            if recent.len() > MAX_RECENT_VERSIONS {
                recent.pop_front();
            }
        }
    }

    /// The number of the latest publication with this version, or a variant of it, if there was one lately.
    pub(super) fn number_of(&self, version: &str) -> Option<u64> {
        let (version, _) = without_mark(version);
        let recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recent.iter().rev().find(|(recent, _)| **recent == *version).map(|(_, number)| *number)
    }
}

/// The shared state.
#[derive(Debug, Default)]
pub(super) struct ObjectState {
    /// The objects as the source has observed them.
    pub(super) observed: Arc<ObservedObjects>,
    /// The last compilation that is published.
    pub(super) compilation: ArcSwapOption<Compilation>,
    /// The latest publications.
    pub(super) recent: RecentVersions,
    /// Events that are to be written.
    pub(super) events: Arc<ObjectEvents>,
    /// Writes to the API.
    pub(super) writes: Arc<WriteCounts>,
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
        let pending = defined::STATUS_PENDING.single(self.pending.load(Relaxed));
        vec![self.writes.family(), pending, self.events.family()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::fixtures::sample_placement;

    #[test]
    fn recent_versions_have_the_number_of_their_latest_publication() {
        let recent = RecentVersions::default();
        let mut published = Publication::default().next(Arc::new(sample_placement(2))).unwrap();
        recent.record(&published);
        recent.record(&published);
        assert_eq!((recent.number_of(&published.version), recent.number_of("other")), (Some(1), None));
        // The same content again, after another one.
        published.number = 3;
        recent.record(&published);
        assert_eq!(recent.number_of(&published.version), Some(3));
        let first = std::mem::take(&mut published.version);
        for number in 4..=MAX_RECENT_VERSIONS as u64 + 3 {
            (published.number, published.version) = (number, number.to_string());
            recent.record(&published);
        }
        assert_eq!((recent.number_of(&first), recent.number_of("4")), (None, Some(4)));
    }
}
