//! The one writer to the Kubernetes API: what address management, status and Events want there, by server-side apply, while
//! this server leads. Fields that others have written stay theirs.
//!
//! One write is under way at a time, at a limited rate. Each of the three has one in the queue, so they take turns, and
//! none delays the others.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Event as ApiEvent;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{Mutex, watch};
use tokio::time::sleep;
use vipgate_common::{LoggedErrors, Rate, TokenBucket};
use vipgate_policy::manifest::Kind;

use crate::config::KubernetesSource;
use crate::policyd::leader::{Leadership, leads_for};
use crate::source::kubernetes::{RequestError, ReusedClient, objects, request};

/// Rate of all writes together.
const RATE: Rate = Rate { interval: Duration::from_millis(20), burst: 50 };
/// Timeout of a write: the leader's Lease must be valid for longer.
const TIMEOUT: Duration = Duration::from_secs(1);

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

/// What is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Status(Kind),
    Event,
}

/// All fields that their manager wants of an object. What it applied before and isn't among them is removed.
#[derive(Clone, Debug)]
pub(in crate::policyd) struct Write {
    manager: &'static str,
    target: Target,
    pub(in crate::policyd) document: Value,
}

impl Write {
    /// The status of an object; `None`: no field of it. With the uid it is refused for an object that was created again
    /// with the same name, and with a resource version for one that anybody has changed since then.
    pub(in crate::policyd) fn status(
        manager: &'static str,
        object: &ObjectReference,
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
        Self { manager, target: Target::Status(object.kind), document }
    }

    /// An Event, without its type.
    pub(in crate::policyd) fn event(manager: &'static str, mut document: Value) -> Self {
        document["apiVersion"] = "v1".into();
        document["kind"] = "Event".into();
        Self { manager, target: Target::Event, document }
    }

    async fn send(&self, client: Client) -> Result<DynamicObject, kube::Error> {
        let (parameters, patch) = (PatchParams::apply(self.manager).force(), Patch::Apply(&self.document));
        let metadata = &self.document["metadata"];
        let (name, namespace) = (metadata["name"].as_str().unwrap_or_default(), metadata["namespace"].as_str());
        match self.target {
            Target::Status(kind) => objects(client, kind, namespace).patch_status(name, &parameters, &patch).await,
            Target::Event => {
                let resource = ApiResource::erase::<ApiEvent>(&());
                let events: Api<DynamicObject> = Api::namespaced_with(client, namespace.unwrap_or_default(), &resource);
                events.patch(name, &parameters, &patch).await
            }
        }
    }
}

/// Why a write has failed.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::policyd) enum WriteError {
    /// This server doesn't lead, or not for long enough, or stops: nothing was sent.
    NotLeader,
    /// The object has changed, is gone, or another one has its name.
    Conflict,
    /// The account may not.
    Denied(String),
    /// The API server refuses it.
    Refused(String),
    /// There was no response: it may have been done.
    Unknown(String),
}

impl WriteError {
    fn of(error: &RequestError) -> Self {
        let text = error.to_string();
        match error.code() {
            Some(404 | 409) => Self::Conflict,
            Some(401 | 403) => Self::Denied(text),
            Some(code @ 400..=499) if code != 429 => Self::Refused(text),
            _ => Self::Unknown(text),
        }
    }

    /// What people must know of it. The others are resolved by the next plan.
    pub(in crate::policyd) fn reason(&self) -> Option<&str> {
        match self {
            Self::NotLeader | Self::Conflict => None,
            Self::Denied(reason) | Self::Refused(reason) | Self::Unknown(reason) => Some(reason),
        }
    }
}

/// The writer.
pub(in crate::policyd) struct KubeWriter {
    pub(in crate::policyd) leadership: watch::Receiver<Leadership>,
    pub(in crate::policyd) stop: watch::Receiver<bool>,
    /// Its lock is the queue: first come, first served.
    connection: Mutex<Connection>,
}

struct Connection {
    client: ReusedClient,
    bucket: TokenBucket,
}

impl KubeWriter {
    pub(in crate::policyd) fn new(
        source: KubernetesSource,
        leadership: watch::Receiver<Leadership>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        let connection = Connection { client: ReusedClient::new(source), bucket: TokenBucket::new(RATE) };
        Self { leadership, stop, connection: Mutex::new(connection) }
    }

    /// Whether this server leads.
    pub(in crate::policyd) fn leads(&self) -> bool {
        leads_for(*self.leadership.borrow(), Duration::ZERO)
    }

    /// Whether a write may begin. Another leader may write when the Lease has ended: nothing may be under way then.
    fn may_write(&self) -> bool {
        leads_for(*self.leadership.borrow(), TIMEOUT) && !*self.stop.borrow()
    }

    /// Applies a write once it is its turn; returns the object.
    pub(in crate::policyd) async fn apply(&self, write: &Write) -> Result<DynamicObject, WriteError> {
        if !self.may_write() {
            return Err(WriteError::NotLeader);
        }
        let mut connection = self.connection.lock().await;
        sleep(connection.bucket.take(Instant::now())).await;
        let client = connection.client.get().await.map_err(|error| WriteError::Unknown(error.to_string()))?;
        if !self.may_write() {
            return Err(WriteError::NotLeader);
        }
        let written = request(TIMEOUT, write.send(client)).await.map_err(|error| WriteError::of(&error));
        if matches!(written, Err(WriteError::Denied(_) | WriteError::Unknown(_))) {
            connection.client.discard();
        }
        written
    }
}

/// What is logged of failed writes: each error once, until they succeed.
#[derive(Debug)]
pub(in crate::policyd) struct WriteLog {
    event: &'static str,
    failure: &'static str,
    rights: &'static str,
    reported: LoggedErrors,
}

impl WriteLog {
    /// A log with this name of its event, what a failure is, and the rights that may be lacking.
    pub(in crate::policyd) fn new(event: &'static str, failure: &'static str, rights: &'static str) -> Self {
        Self { event, failure, rights, reported: LoggedErrors::default() }
    }

    pub(in crate::policyd) fn report(&mut self, object: &str, error: &str) {
        if self.reported.is_new(error) {
            let Self { event, failure, rights, .. } = *self;
            tracing::warn!(event, object, error, "{failure}: check the API server and the account's rights ({rights})");
        }
    }

    /// Everything is written.
    pub(in crate::policyd) fn clear(&mut self) {
        self.reported.clear();
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
