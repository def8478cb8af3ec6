//! A collection of the API, the objects of one kind: listed in pages, then watched from the list's resource version.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::api::DynamicObject;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::mpsc::Sender;
use tokio::time::sleep;
use vipgate_common::{Backoff, jittered};
use vipgate_policy::manifest::Kind;

use super::client::objects;
use super::definition::{self, Definition};
use super::manifest::{self, Manifest};
use crate::config::ListMode;

/// Objects per page of a list.
const PAGE_SIZE: u32 = 500;
/// The server ends a watch after this time, in seconds; it goes on from there.
const WATCH_SECONDS: u32 = 290;
/// Maximum events at once: so many deletions are confirmed by one request.
const MAX_CHUNK: usize = 512;
/// How long a request that isn't a watch may take.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// So many failures in a row make a collection unavailable.
const MAX_FAILURES: u32 = 4;

/// The objects of a kind, in one namespace or in all. Displays as the beginning of its objects' names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Collection {
    pub(super) kind: Kind,
    pub(super) namespace: Option<Arc<str>>,
}

impl fmt::Display for Collection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.as_str())?;
        self.namespace.as_ref().map_or(Ok(()), |namespace| write!(f, "/{namespace}"))
    }
}

/// An event of a collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CollectionEvent {
    /// All its objects, and the uid of the kind's definition, if it has one and it is known.
    Listed(Vec<Manifest>, Option<Arc<str>>),
    /// A new or changed object.
    Applied(Manifest),
    /// A deleted object, by its name.
    Deleted(Arc<str>),
    /// It can't be read now: whether it doesn't exist, and why.
    Unavailable { is_missing: bool, reason: String },
    /// A request has failed, and why; it is repeated.
    Failed(String),
}

/// Lists and watches a collection, until the receiver is dropped.
pub(super) async fn watch(
    client: Client,
    collection: Collection,
    mode: ListMode,
    events: Sender<(Collection, CollectionEvent)>,
) {
    let mut watch = CollectionWatch { client, collection, mode, events, backoff: Backoff::default(), definition: None };
    // A watch that can't go on begins again with a list, so that what it says next is known to be whole.
    while watch.run().await.is_ok() {
        sleep(jittered(watch.backoff.next_delay(), getrandom::u32())).await;
    }
}

/// The receiver is dropped.
struct Closed;

struct CollectionWatch {
    client: Client,
    collection: Collection,
    mode: ListMode,
    events: Sender<(Collection, CollectionEvent)>,
    backoff: Backoff,
    /// Uid of the kind's definition at the last list for which it was known.
    definition: Option<Arc<str>>,
}

impl CollectionWatch {
    /// Lists and watches until the collection is unavailable.
    async fn run(&mut self) -> Result<(), Closed> {
        let config = watcher::Config::default().page_size(PAGE_SIZE).timeout(WATCH_SECONDS);
        let config = match self.mode {
            ListMode::Paged => config,
            ListMode::Streamed => config.streaming_lists(),
        };
        let mut chunks = Box::pin(watcher(self.api(), config).ready_chunks(MAX_CHUNK));
        let mut listed = Vec::new();
        let mut failures = 0;
        while let Some(chunk) = chunks.next().await {
            let mut deleted = Vec::new();
            for event in chunk {
                let kind = self.collection.kind;
                if !matches!(event, Ok(Event::Delete(_))) {
                    // Deletions in a row are confirmed together, and before what comes after them.
                    if !self.send_deleted(&mut deleted).await? {
                        return Ok(());
                    }
                }
                match event {
                    Ok(Event::Init) => listed = Vec::new(),
                    Ok(Event::InitApply(object)) => listed.push(manifest::manifest(kind, object)),
                    Ok(Event::InitDone) => {
                        failures = 0;
                        if !self.send_list(std::mem::take(&mut listed)).await? {
                            return Ok(());
                        }
                        self.backoff.reset();
                    }
                    Ok(Event::Apply(object)) => {
                        failures = 0;
                        self.send(CollectionEvent::Applied(manifest::manifest(kind, object))).await?;
                    }
                    Ok(Event::Delete(object)) => deleted.push(manifest::name(kind, &object.metadata)),
                    Err(error) => {
                        failures += 1;
                        if self.report(&error, failures).await? {
                            return Ok(());
                        }
                        sleep(jittered(self.backoff.next_delay(), getrandom::u32())).await;
                    }
                }
            }
            if !self.send_deleted(&mut deleted).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn api(&self) -> Api<DynamicObject> {
        objects(self.client.clone(), self.collection.kind, self.collection.namespace.as_deref())
    }

    /// Sends a list; returns false instead if the definition of the kind is being deleted: then objects are missing.
    async fn send_list(&mut self, listed: Vec<Manifest>) -> Result<bool, Closed> {
        let definition = match self.definition().await? {
            Definition::Served(uid) => Some(uid),
            Definition::Unknown => None,
            Definition::Removed => return self.send_removed().await,
        };
        tracing::debug!(collection = %self.collection, objects = listed.len(), "listed all objects");
        if definition.is_some() {
            self.definition.clone_from(&definition);
        }
        self.send(CollectionEvent::Listed(listed, definition)).await?;
        Ok(true)
    }

    /// The kind isn't served any more, or not much longer. Returns false.
    async fn send_removed(&self) -> Result<bool, Closed> {
        let reason = self.missing_reason();
        self.send(CollectionEvent::Unavailable { is_missing: true, reason }).await?;
        Ok(false)
    }

    /// Sends deletions; returns false instead if the objects were deleted with the definition of their kind.
    async fn send_deleted(&mut self, deleted: &mut Vec<Arc<str>>) -> Result<bool, Closed> {
        if deleted.is_empty() {
            return Ok(true);
        }
        let is_whole = match self.definition().await? {
            Definition::Served(uid) => self.definition.as_ref().is_none_or(|listed| *listed == uid),
            Definition::Unknown => true,
            Definition::Removed => false,
        };
        if !is_whole {
            return self.send_removed().await;
        }
        for name in deleted.drain(..) {
            self.send(CollectionEvent::Deleted(name)).await?;
        }
        Ok(true)
    }

    /// The definition of the kind; waits until the API server says.
    async fn definition(&mut self) -> Result<Definition, Closed> {
        loop {
            match definition::read(&self.client, self.collection.kind).await {
                Ok(definition) => return Ok(definition),
                Err(error) => self.send(CollectionEvent::Failed(describe(&error))).await?,
            }
            sleep(jittered(self.backoff.next_delay(), getrandom::u32())).await;
        }
    }

    /// Reports an error; returns whether the collection is unavailable.
    async fn report(&mut self, error: &watcher::Error, failures: u32) -> Result<bool, Closed> {
        let (code, reason) = match error {
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => (status.code, status.message.clone()),
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => (0, describe(error)),
            watcher::Error::WatchError(status) => (0, status.message.clone()),
            watcher::Error::NoResourceVersion => (0, error.to_string()),
        };
        tracing::debug!(collection = %self.collection, %error, "a request has failed");
        let event = match code {
            404 => CollectionEvent::Unavailable { is_missing: true, reason: self.missing_reason() },
            401 | 403 => CollectionEvent::Unavailable {
                is_missing: false,
                reason: format!("{reason}: grant the server's account `list` and `watch`"),
            },
            // The connection: the probe reports it.
            0 => CollectionEvent::Failed(reason),
            _ if failures < MAX_FAILURES => CollectionEvent::Failed(reason),
            _ => CollectionEvent::Unavailable { is_missing: false, reason },
        };
        let is_unavailable = matches!(event, CollectionEvent::Unavailable { .. });
        self.send(event).await?;
        Ok(is_unavailable)
    }

    fn missing_reason(&self) -> String {
        let kind = self.collection.kind;
        let name = kind.as_str();
        if kind.is_custom() {
            format!("the cluster has no kind {name} any more, or not yet: apply vipgate's CustomResourceDefinitions")
        } else {
            format!("the cluster doesn't serve {name} of {}", kind.api_version())
        }
    }

    fn send(&self, event: CollectionEvent) -> impl Future<Output = Result<(), Closed>> + Send + use<> {
        let (events, collection) = (self.events.clone(), self.collection.clone());
        async move { events.send((collection, event)).await.map_err(|_| Closed) }
    }
}

/// An error of the client with its cause: the outer one often says only that a service has failed.
pub(super) fn describe(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return status.message.clone();
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
