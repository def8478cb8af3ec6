//! Events (core/v1): what `kubectl describe` shows of an object. Recorded into a queue, and written by a task of its
//! own: nothing waits for an Event.

mod recorder;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference as ApiReference;
use tokio::sync::Notify;
use vipgate_policy::manifest::{DEFAULT_NAMESPACE, Kind};

pub(super) use self::recorder::run;
use super::stats::Counter;
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;

/// Capacity of the queue; Events beyond it are dropped.
const MAX_QUEUED: usize = 256;
/// Maximum length of a message, as in the API.
const MAX_MESSAGE: usize = 1024;

/// The object that an Event or a status is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ObjectReference {
    pub(super) kind: Kind,
    /// Empty for kinds without one.
    pub(super) namespace: String,
    pub(super) name: String,
    /// Empty if it is not known.
    pub(super) uid: Arc<str>,
}

impl ObjectReference {
    /// The object with this manifest (`Kind/namespace/name`).
    pub(super) fn of_manifest(kind: Kind, manifest: &str, uid: &Arc<str>) -> Self {
        let path = manifest.split_once('/').map_or(manifest, |(_, path)| path);
        let (namespace, name) = path.split_once('/').unwrap_or(("", path));
        Self { kind, namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.clone() }
    }

    /// The namespace of its Events.
    fn event_namespace(&self) -> &str {
        if self.namespace.is_empty() { DEFAULT_NAMESPACE } else { &self.namespace }
    }

    fn to_api(&self) -> ApiReference {
        let optional = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        ApiReference {
            api_version: Some(self.kind.api_version().to_owned()),
            kind: Some(self.kind.as_str().to_owned()),
            namespace: optional(&self.namespace),
            name: Some(self.name.clone()),
            uid: optional(&self.uid),
            ..ApiReference::default()
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ObjectEvent {
    object: ObjectReference,
    is_warning: bool,
    reason: String,
    message: String,
}

impl ObjectEvent {
    /// Something is not as it should be.
    pub(super) fn warning(object: ObjectReference, reason: &str, message: &str) -> Self {
        Self::new(object, true, reason, message)
    }

    /// Something has changed as it should.
    pub(super) fn normal(object: ObjectReference, reason: &str, message: &str) -> Self {
        Self::new(object, false, reason, message)
    }

    fn new(object: ObjectReference, is_warning: bool, reason: &str, message: &str) -> Self {
        let end = message.floor_char_boundary(MAX_MESSAGE);
        Self { object, is_warning, reason: reason.to_owned(), message: message[..end].to_owned() }
    }

    /// What it says, for tests.
    #[cfg(test)]
    pub(super) fn text(&self) -> String {
        let kind = if self.is_warning { "Warning" } else { "Normal" };
        format!("{kind} {} {}/{}: {}", self.reason, self.object.kind.as_str(), self.object.name, self.message)
    }
}

/// The queue of Events that are to be written.
#[derive(Debug, Default)]
pub(super) struct ObjectEvents {
    queue: Mutex<VecDeque<ObjectEvent>>,
    added: Notify,
    written: Counter,
    failed: Counter,
    dropped: Counter,
}

impl ObjectEvents {
    /// Adds an Event; drops it if the queue is full.
    pub(super) fn record(&self, event: ObjectEvent) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() >= MAX_QUEUED {
            self.dropped.increment();
            return;
        }
        queue.push_back(event);
        self.added.notify_one();
    }

    /// Removes the first Event; waits for one.
    async fn next(&self) -> ObjectEvent {
        loop {
            let event = self.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            if let Some(event) = event {
                return event;
            }
            self.added.notified().await;
        }
    }

    /// Its metrics.
    pub(super) fn families(&self) -> Vec<Family> {
        let results = [("written", &self.written), ("failed", &self.failed), ("dropped", &self.dropped)];
        vec![defined::EVENTS.by_label(results.map(|(result, count)| (result, count.get())))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_queue_drops_what_comes_last_and_keeps_the_order() {
        let queue = ObjectEvents::default();
        let object = ObjectReference::of_manifest(Kind::Service, "Service/t/web", &"u".into());
        for n in 0..MAX_QUEUED + 3 {
            queue.record(ObjectEvent::normal(object.clone(), "Reason", &n.to_string()));
        }
        assert_eq!(queue.dropped.get(), 3);
        assert_eq!(queue.next().await.text(), "Normal Reason Service/web: 0");
        assert_eq!(queue.next().await.text(), "Normal Reason Service/web: 1");
    }

    #[test]
    fn events_are_in_the_namespace_of_their_object_and_messages_are_bounded() {
        let policy = ObjectReference::of_manifest(Kind::EgressPolicy, "EgressPolicy/t/p", &"u".into());
        assert_eq!((policy.event_namespace(), &*policy.name), ("t", "p"));
        let pool = ObjectReference::of_manifest(Kind::AddressPool, "AddressPool/public", &"".into());
        assert_eq!((pool.event_namespace(), &*pool.name), ("default", "public"));
        let reference = pool.to_api();
        assert_eq!((reference.namespace, reference.uid), (None, None));
        assert_eq!(reference.api_version.as_deref(), Some("vipgate.io/v1alpha1"));
        let event = ObjectEvent::warning(policy, "Rejected", &"é".repeat(1000));
        assert_eq!(event.message.len(), MAX_MESSAGE);
    }
}
