//! Events (core/v1): what `kubectl describe` shows of an object. Recorded into a queue: nothing waits for an Event.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tokio::sync::{Mutex, mpsc};
use vipgate_policy::manifest::DEFAULT_NAMESPACE;

use super::kubernetes::writer::{KubeWriter, ObjectReference, Purpose, Write};
use super::stats::Counter;
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;

/// Capacity of the queue; Events beyond it are dropped.
const MAX_QUEUED: usize = 256;
/// Maximum length of a message, as in the API.
const MAX_MESSAGE: usize = 1024;
/// Maximum length of an object's name in that of an Event, which has a suffix and at most 253 characters.
const MAX_NAME: usize = 230;
/// Maximum number of Events whose counts are remembered; the API server forgets Events after an hour.
const MAX_REMEMBERED: usize = 4096;
/// The component that Events are from.
const COMPONENT: &str = "vipgate-policyd";

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

    /// The namespace of its object, or the one of Events of objects without one.
    fn namespace(&self) -> &str {
        if self.object.namespace.is_empty() { DEFAULT_NAMESPACE } else { &self.object.namespace }
    }

    /// A name that is the same for the same Event on every server.
    fn name(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        let name = &self.object.name;
        format!("{}.{:016x}", &name[..name.floor_char_boundary(MAX_NAME)], hasher.finish())
    }

    /// It has happened this often since `first`, and now.
    fn write(&self, count: i32, first: Timestamp, now: Timestamp) -> Write {
        let ObjectReference { kind, namespace, name, uid } = &self.object;
        let mut object = json!({"apiVersion": kind.api_version(), "kind": kind.as_str(), "name": name});
        for (field, text) in [("namespace", namespace.as_str()), ("uid", &**uid)] {
            if !text.is_empty() {
                object[field] = text.into();
            }
        }
        let document = json!({
            "metadata": {"name": self.name(), "namespace": self.namespace()},
            "involvedObject": object,
            "type": if self.is_warning { "Warning" } else { "Normal" },
            "reason": self.reason,
            "message": self.message,
            "firstTimestamp": Time(first),
            "lastTimestamp": Time(now),
            "count": count,
            "source": {"component": COMPONENT},
        });
        Write::event(document)
    }

    /// What it says, for tests.
    #[cfg(test)]
    pub(super) fn text(&self) -> String {
        let kind = if self.is_warning { "Warning" } else { "Normal" };
        format!("{kind} {} {}/{}: {}", self.reason, self.object.kind.as_str(), self.object.name, self.message)
    }
}

/// The queue of Events that are to be written.
#[derive(Debug)]
pub(super) struct ObjectEvents {
    sender: mpsc::Sender<ObjectEvent>,
    receiver: Mutex<mpsc::Receiver<ObjectEvent>>,
    dropped: Counter,
}

impl Default for ObjectEvents {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED);
        Self { sender, receiver: Mutex::new(receiver), dropped: Counter::default() }
    }
}

impl ObjectEvents {
    /// Adds an Event; drops it if the queue is full.
    pub(super) fn record(&self, event: ObjectEvent) {
        if self.sender.try_send(event).is_err() {
            self.dropped.increment();
        }
    }

    /// Its metric.
    pub(super) fn family(&self) -> Family {
        defined::EVENTS_DROPPED.single(self.dropped.get())
    }
}

/// How often Events were written, by name: one that is repeated increases the count of the first one.
#[derive(Debug, Default)]
struct Counts(HashMap<String, (i32, Timestamp)>);

impl Counts {
    /// The count of an Event with this one, and when it happened first.
    fn next(&mut self, name: &str, now: Timestamp) -> (i32, Timestamp) {
        if self.0.len() >= MAX_REMEMBERED && !self.0.contains_key(name) {
            self.0.clear();
        }
        self.0.get(name).map_or((1, now), |(count, first)| (count.saturating_add(1), *first))
    }
}

/// Writes recorded Events until the server stops. One that can't be written is lost.
pub(super) async fn run(events: Arc<ObjectEvents>, writer: Arc<KubeWriter>) {
    let mut counts = Counts::default();
    let write_all = async {
        let mut receiver = events.receiver.lock().await;
        while let Some(event) = receiver.recv().await {
            let (name, now) = (event.name(), Timestamp::now());
            let (count, first) = counts.next(&name, now);
            if writer.apply(&event.write(count, first, now)).await.is_ok() {
                counts.0.insert(name, (count, first));
                writer.succeeded(Purpose::Events);
            }
        }
    };
    tokio::select! {
        () = write_all => {}
        () = writer.tasks.stopped() => {}
    }
}

#[cfg(test)]
mod tests {
    use vipgate_policy::manifest::Kind;

    use super::*;

    #[tokio::test]
    async fn a_full_queue_drops_what_comes_last_and_keeps_the_order() {
        let queue = ObjectEvents::default();
        let object = ObjectReference::of_manifest(Kind::Service, "Service/t/web", &"u".into());
        for n in 0..MAX_QUEUED + 3 {
            queue.record(ObjectEvent::normal(object.clone(), "Reason", &n.to_string()));
        }
        assert_eq!(queue.dropped.get(), 3);
        let mut receiver = queue.receiver.lock().await;
        for n in 0..2 {
            assert_eq!(receiver.recv().await.unwrap().text(), format!("Normal Reason Service/web: {n}"));
        }
    }

    #[test]
    fn events_are_in_the_namespace_of_their_object_and_messages_are_bounded() {
        let policy = ObjectReference::of_manifest(Kind::EgressPolicy, "EgressPolicy/t/p", &"u".into());
        let event = ObjectEvent::warning(policy, "Rejected", &"é".repeat(1000));
        assert_eq!((event.namespace(), event.message.len()), ("t", MAX_MESSAGE));
        let pool = ObjectReference::of_manifest(Kind::AddressPool, "AddressPool/public", &"".into());
        let document = ObjectEvent::normal(pool, "Reason", "message")
            .write(1, Timestamp::UNIX_EPOCH, Timestamp::UNIX_EPOCH)
            .document;
        let expected = json!({"apiVersion": "vipgate.io/v1alpha1", "kind": "AddressPool", "name": "public"});
        assert_eq!((&document["involvedObject"], &document["metadata"]["namespace"]), (&expected, &json!("default")));
    }

    #[test]
    fn a_repeated_event_is_the_same_one_with_a_higher_count_and_another_one_is_not() {
        let web = ObjectReference::of_manifest(Kind::Service, "Service/t/web", &"u".into());
        let created_again = ObjectReference { uid: "v".into(), ..web.clone() };
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut counts = Counts::default();
        let mut write = |object: &ObjectReference, second| {
            let event = ObjectEvent::warning(object.clone(), "Reason", "message");
            let (count, first) = counts.next(&event.name(), at(second));
            counts.0.insert(event.name(), (count, first));
            event.write(count, first, at(second)).document
        };
        let (first, second, other) = (write(&web, 0), write(&web, 60), write(&created_again, 70));
        assert_eq!(first["metadata"]["name"], second["metadata"]["name"]);
        assert_ne!(first["metadata"]["name"], other["metadata"]["name"]);
        let counted =
            |it: &serde_json::Value| (it["count"].clone(), it["firstTimestamp"].clone(), it["lastTimestamp"].clone());
        let (start, later) = (json!("1970-01-01T00:00:00Z"), json!("1970-01-01T00:01:00Z"));
        assert_eq!(counted(&first), (json!(1), start.clone(), start.clone()));
        assert_eq!(counted(&second), (json!(2), start, later));
        assert_eq!(other["count"], 1);
    }

    #[test]
    fn the_number_of_remembered_counts_is_bounded() {
        let (mut counts, now) = (Counts::default(), Timestamp::UNIX_EPOCH);
        for n in 0..2 * MAX_REMEMBERED {
            let count = counts.next(&n.to_string(), now);
            counts.0.insert(n.to_string(), count);
            assert!(counts.0.len() <= MAX_REMEMBERED);
        }
    }
}
