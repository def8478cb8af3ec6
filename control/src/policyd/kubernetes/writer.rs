//! The one writer to the Kubernetes API: what address management, status and Events want there, by server-side apply, while
//! this server leads. Fields that others have written stay theirs.
//!
//! One write is under way at a time, at a limited rate. Each of the three has one in the queue, so they take turns, and
//! none delays the others. A planner says each time what all of its writes are: what has failed is tried again after a
//! while if it is still among them.

mod outcome;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Event as ApiEvent;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::sleep;
use vipgate_common::{Rate, Tasks, TokenBucket};
use vipgate_policy::manifest::{FIELD_MANAGER, Kind};

use self::outcome::Failures;
pub(in crate::policyd) use self::outcome::{WriteCounts, WriteError};
use crate::config::KubernetesSource;
use crate::policyd::leader::{Leadership, leads_for};
use crate::source::kubernetes::{ReusedClient, objects, request};

/// Rate of all writes together.
const RATE: Rate = Rate { interval: Duration::from_millis(20), burst: 50 };
/// Timeout of a write: the leader's Lease must be valid for longer.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Writes of a plan that are tried, and how long that may take: then there may be another plan.
const MAX_WRITES: usize = 100;
const MAX_TIME: Duration = Duration::from_secs(5);

/// The object that an Event or a status is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::policyd) struct ObjectReference {
    pub(in crate::policyd) kind: Kind,
    /// Empty for kinds without one.
    pub(in crate::policyd) namespace: String,
    pub(in crate::policyd) name: String,
    /// Empty if it is not known.
    pub(in crate::policyd) uid: Arc<str>,
}

impl ObjectReference {
    /// The object with this manifest (`Kind/namespace/name`).
    pub(in crate::policyd) fn of_manifest(kind: Kind, manifest: &str, uid: &Arc<str>) -> Self {
        let path = manifest.split_once('/').map_or(manifest, |(_, path)| path);
        let (namespace, name) = path.split_once('/').unwrap_or(("", path));
        Self { kind, namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.clone() }
    }
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::policyd) enum Purpose {
    Addresses,
    Status,
    Events,
}

impl Purpose {
    /// The field manager.
    fn manager(self) -> &'static str {
        match self {
            Self::Addresses => FIELD_MANAGER,
            Self::Status => "vipgate-status",
            Self::Events => "vipgate-policyd",
        }
    }

    /// The name of a failure's log event, what it is, and the rights that may be lacking.
    fn failure(self) -> [&'static str; 3] {
        match self {
            Self::Addresses => [
                "address_failed",
                "addresses can't be read or written",
                "`list` of services and addresspools, `patch` of services/status and addresspools/status",
            ],
            Self::Status => {
                ["status_failed", "status can't be written", "`patch` of the status of each of vipgate's kinds"]
            }
            Self::Events => ["event_failed", "an Event can't be written", "`create` and `patch` of events"],
        }
    }
}

/// All fields that a purpose has in an object. What it applied before and isn't among them is removed.
#[derive(Clone, Debug)]
pub(in crate::policyd) struct Write {
    purpose: Purpose,
    /// The object whose status it is; `None`: it is an Event.
    object: Option<ObjectReference>,
    pub(in crate::policyd) document: Value,
}

impl Write {
    /// The status of an object; `None`: no field of it. With the uid it is refused for an object that was created again
    /// with the same name, and with a resource version for one that anybody has changed since then.
    pub(in crate::policyd) fn status(
        purpose: Purpose,
        object: ObjectReference,
        version: Option<&str>,
        status: Option<Value>,
    ) -> Self {
        let mut metadata = json!({"name": object.name, "uid": *object.uid});
        if !object.namespace.is_empty() {
            metadata["namespace"] = object.namespace.as_str().into();
        }
        if let Some(version) = version {
            metadata["resourceVersion"] = version.into();
        }
        let (api_version, kind) = (object.kind.api_version(), object.kind.as_str());
        let mut document = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata});
        if let Some(status) = status {
            document["status"] = status;
        }
        Self { purpose, object: Some(object), document }
    }

    /// An Event: all of its fields but `apiVersion` and `kind`.
    pub(in crate::policyd) fn event(mut document: Value) -> Self {
        document["apiVersion"] = "v1".into();
        document["kind"] = "Event".into();
        Self { purpose: Purpose::Events, object: None, document }
    }

    /// Namespace and name of what is written to.
    fn path(&self) -> (Option<&str>, &str) {
        let metadata = &self.document["metadata"];
        (metadata["namespace"].as_str(), metadata["name"].as_str().unwrap_or_default())
    }

    /// What is written to, for people.
    fn title(&self) -> String {
        let kind = self.object.as_ref().map_or("Event", |object| object.kind.as_str());
        match self.path() {
            (Some(namespace), name) => format!("{kind} {namespace}/{name}"),
            (None, name) => format!("{kind} {name}"),
        }
    }

    async fn send(&self, client: Client) -> Result<DynamicObject, kube::Error> {
        let (parameters, patch) = (PatchParams::apply(self.purpose.manager()).force(), Patch::Apply(&self.document));
        let (namespace, name) = self.path();
        if let Some(object) = &self.object {
            return objects(client, object.kind, namespace).patch_status(name, &parameters, &patch).await;
        }
        let resource = ApiResource::erase::<ApiEvent>(&());
        let events: Api<DynamicObject> = Api::namespaced_with(client, namespace.unwrap_or_default(), &resource);
        events.patch(name, &parameters, &patch).await
    }
}

/// The outcome of a plan's writes.
#[derive(Debug)]
pub(in crate::policyd) struct Applied<T> {
    /// Those that were tried.
    pub(in crate::policyd) outcomes: Vec<(T, Result<DynamicObject, WriteError>)>,
    /// When another plan may have more success; `None`: everything is written.
    pub(in crate::policyd) retry_after: Option<Duration>,
}

/// The writer.
pub(in crate::policyd) struct KubeWriter {
    pub(in crate::policyd) leadership: watch::Receiver<Leadership>,
    /// Those of the server.
    pub(in crate::policyd) tasks: Tasks,
    counts: Arc<WriteCounts>,
    failures: Mutex<Failures>,
    /// The queue: first come, first served.
    connection: AsyncMutex<Connection>,
}

struct Connection {
    client: ReusedClient,
    bucket: TokenBucket,
}

impl KubeWriter {
    pub(in crate::policyd) fn new(
        source: KubernetesSource,
        leadership: watch::Receiver<Leadership>,
        tasks: Tasks,
        counts: Arc<WriteCounts>,
    ) -> Self {
        let connection = Connection { client: ReusedClient::new(source), bucket: TokenBucket::new(RATE) };
        Self { leadership, tasks, counts, failures: Mutex::default(), connection: AsyncMutex::new(connection) }
    }

    /// Whether this server leads.
    pub(in crate::policyd) fn leads(&self) -> bool {
        leads_for(*self.leadership.borrow(), Duration::ZERO)
    }

    /// Whether a write may begin. Another leader may write when the Lease has ended: nothing may be under way then.
    fn may_write(&self) -> bool {
        leads_for(*self.leadership.borrow(), TIMEOUT) && !self.tasks.is_stopping()
    }

    fn failures(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a write once it is its turn; returns the object.
    pub(in crate::policyd) async fn apply(&self, write: &Write) -> Result<DynamicObject, WriteError> {
        let wait = self.failures().wait(write, Instant::now());
        if !wait.is_zero() {
            return Err(WriteError::Held(wait));
        }
        if !self.may_write() {
            return Err(WriteError::NotLeader);
        }
        let mut connection = self.connection.lock().await;
        sleep(connection.bucket.take(Instant::now())).await;
        let client = connection.client.get().await.map_err(|error| WriteError::Unknown(error.to_string()));
        if !self.may_write() {
            return Err(WriteError::NotLeader);
        }
        let written = match client {
            Ok(client) => request(TIMEOUT, write.send(client)).await.map_err(|error| WriteError::of(&error)),
            Err(error) => Err(error),
        };
        let error = written.as_ref().err();
        if matches!(error, Some(WriteError::Denied(_) | WriteError::Unknown(_))) {
            connection.client.discard();
        }
        self.counts.count(write.purpose, error);
        self.failures().note(write, error, Instant::now());
        written
    }

    /// Applies the first writes of a plan that aren't to wait since they have failed.
    pub(in crate::policyd) async fn apply_all<T>(&self, writes: impl IntoIterator<Item = (T, Write)>) -> Applied<T> {
        let began = Instant::now();
        let mut applied = Applied { outcomes: Vec::new(), retry_after: None };
        for (of, write) in writes {
            if applied.outcomes.len() >= MAX_WRITES || began.elapsed() > MAX_TIME {
                applied.retry_after = Some(Duration::ZERO);
                break;
            }
            let outcome = self.apply(&write).await;
            let wait = match &outcome {
                Ok(_) => None,
                Err(WriteError::NotLeader) => Some(Duration::ZERO),
                Err(WriteError::Held(wait)) => Some(*wait),
                Err(_) => Some(self.failures().wait(&write, Instant::now())),
            };
            applied.retry_after = applied.retry_after.into_iter().chain(wait).min();
            match outcome {
                Err(WriteError::NotLeader) => break,
                Err(WriteError::Held(_)) => {}
                outcome => applied.outcomes.push((of, outcome)),
            }
        }
        applied
    }

    /// Logs an error of something else that a purpose needs.
    pub(in crate::policyd) fn report(&self, purpose: Purpose, object: &str, error: &str) {
        self.failures().report(purpose, object, error);
    }

    /// Everything is written: errors are logged again.
    pub(in crate::policyd) fn succeeded(&self, purpose: Purpose) {
        self.failures().forget_reported(purpose);
    }
}

/// Puts writes in their order: those of each namespace take turns, so that one with thousands of objects delays no other's.
/// `place` is a write's namespace, and whether it comes before those that aren't urgent.
pub(in crate::policyd) fn in_turns<T>(writes: Vec<T>, place: impl Fn(&T) -> (bool, String)) -> Vec<T> {
    let mut counts: HashMap<(bool, String), usize> = HashMap::new();
    let numbered = writes.into_iter().map(|write| {
        let place = place(&write);
        let is_urgent = place.0;
        let turn = counts.entry(place).or_default();
        *turn += 1;
        (!is_urgent, *turn, write)
    });
    let mut numbered: Vec<(bool, usize, T)> = numbered.collect();
    numbered.sort_by_key(|(is_later, turn, _)| (*is_later, *turn));
    numbered.into_iter().map(|(.., write)| write).collect()
}

#[cfg(test)]
mod tests;
