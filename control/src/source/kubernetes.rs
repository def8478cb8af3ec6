//! The Kubernetes API as a policy source: lists and watches the kinds that policy is made of.
//!
//! ```text
//!   collection (one task per kind) --\
//!                                     -> mirror (pure) -> updates
//!   probe (is it there, is it new) --/
//! ```
//! Pods are watched only while a policy selects by labels: they are many, and endpoint slices name the others.

mod client;
mod collection;
mod definition;
#[cfg(test)]
pub(super) mod fixtures;
mod manifest;
mod mirror;
mod observed;
mod probe;
mod request;

use std::convert::Infallible;
use std::sync::Arc;

use kube::Client;
use tokio::sync::mpsc::{self, Sender};
use tokio::task::JoinSet;
use tokio::time::sleep;
use vipgate_common::{Backoff, LoggedErrors, jittered};
use vipgate_policy::manifest::Kind;

pub(crate) use self::client::{ConnectError, client, objects};
use self::collection::{Collection, CollectionEvent};
use self::mirror::Mirror;
pub(crate) use self::observed::{ObservedMap, ObservedObject, ObservedObjects};
use self::probe::Finding;
pub(crate) use self::probe::cluster_uid;
pub(crate) use self::request::{RequestError, ReusedClient, request};
use super::SourceEvent;
use crate::config::{KubernetesSource, PodWatch};

/// Capacity of the queue of collections' events; when it is full, their watches wait.
const EVENT_QUEUE: usize = 1024;

/// Lists and watches the cluster until the receiver is dropped. Updates `observed`, too.
pub(crate) async fn watch_cluster(
    config: KubernetesSource,
    events: Sender<SourceEvent>,
    observed: Arc<ObservedObjects>,
) {
    let mut reflector = Reflector {
        config: &config,
        events: &events,
        reported: LoggedErrors::default(),
        mirror: Mirror::new(observed),
        cluster_uid: None,
    };
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Pod) {
        reflector.collections(kind).into_iter().for_each(|collection| reflector.mirror.add(collection));
    }
    tokio::select! {
        () = events.closed() => {}
        never = reflector.run() => match never {},
    }
}

struct Reflector<'a> {
    config: &'a KubernetesSource,
    events: &'a Sender<SourceEvent>,
    /// Errors that were reported since the last update.
    reported: LoggedErrors,
    mirror: Mirror,
    /// Which cluster it is.
    cluster_uid: Option<String>,
}

impl Reflector<'_> {
    async fn run(&mut self) -> Infallible {
        let mut backoff = Backoff::default();
        loop {
            match self.connect().await {
                Ok(client) => {
                    let reason = self.session(client).await;
                    tracing::info!(event = "source_listed_again", reason, "listing the cluster again");
                    self.mirror.list_again();
                    backoff.reset();
                }
                Err(error) => self.report_unreachable(&error).await,
            }
            sleep(jittered(backoff.next_delay(), getrandom::u32())).await;
        }
    }

    /// A client of the same cluster as before: another one's objects would remove all that is in force.
    async fn connect(&mut self) -> Result<Client, String> {
        let client = client(self.config).await.map_err(|error| error.to_string())?;
        match (&self.cluster_uid, cluster_uid(&client).await?) {
            (Some(before), Some(now)) if *before != now => Err(format!(
                "it is another cluster than before (`kube-system` has uid {now}, not {before}): restart the policy \
                 server if that is intended"
            )),
            (None, uid) => {
                self.cluster_uid = uid;
                Ok(client)
            }
            _ => Ok(client),
        }
    }

    /// Follows the cluster with one client; returns why everything must be listed again.
    async fn session(&mut self, client: Client) -> String {
        let (sender, mut receiver) = mpsc::channel(EVENT_QUEUE);
        let mut watches = JoinSet::new();
        let mut pod_watches = JoinSet::new();
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Pod) {
            self.start(&mut watches, kind, &client, &sender);
        }
        let (finding_sender, mut findings) = mpsc::channel(1);
        watches.spawn(probe::run(client.clone(), finding_sender));
        loop {
            let is_selected = self.config.pods == PodWatch::Always || self.mirror.selects_pods();
            if is_selected && pod_watches.is_empty() {
                self.collections(Kind::Pod).into_iter().for_each(|collection| self.mirror.add(collection));
                self.start(&mut pod_watches, Kind::Pod, &client, &sender);
            } else if !is_selected {
                pod_watches.abort_all();
                pod_watches = JoinSet::new();
                self.mirror.remove(Kind::Pod);
            }
            if let Some(update) = self.mirror.take_update() {
                self.reported.clear();
                self.send(SourceEvent::Update(update)).await;
            } else if let Some(path) = self.mirror.blocked_by().cloned().filter(|_| !self.mirror.is_complete()) {
                self.report_unreachable(&format!("{}: {}", path.path, path.reason)).await;
            }
            let mut batch = Vec::new();
            tokio::select! {
                _ = receiver.recv_many(&mut batch, EVENT_QUEUE) => self.apply(batch).await,
                Some(finding) = findings.recv() => match finding {
                    Finding::Reachable => self.mirror.request_update(),
                    Finding::Unreachable(reason) => self.report_unreachable(&reason).await,
                    Finding::Stale(reason) => return reason,
                },
            }
        }
    }

    /// Applies events of collections.
    async fn apply(&mut self, batch: Vec<(Collection, CollectionEvent)>) {
        let mut failures = Vec::new();
        for (collection, event) in batch {
            if let CollectionEvent::Failed(reason) = &event {
                failures.push(reason.clone());
            }
            self.mirror.apply(&collection, event);
        }
        // Later on the probe decides: a watch that ends is no outage.
        if !self.mirror.is_complete() {
            for reason in failures {
                self.report_unreachable(&reason).await;
            }
        }
    }

    /// The collections of a kind: one for each configured namespace, or one.
    fn collections(&self, kind: Kind) -> Vec<Collection> {
        if !kind.is_namespaced() || self.config.namespaces.is_empty() {
            return vec![Collection { kind, namespace: None }];
        }
        let namespaces = self.config.namespaces.iter().map(|name| Some(name.as_str().into()));
        namespaces.map(|namespace| Collection { kind, namespace }).collect()
    }

    fn start(
        &self,
        watches: &mut JoinSet<()>,
        kind: Kind,
        client: &Client,
        sender: &Sender<(Collection, CollectionEvent)>,
    ) {
        for collection in self.collections(kind) {
            watches.spawn(collection::watch(client.clone(), collection, self.config.lists, sender.clone()));
        }
    }

    async fn report_unreachable(&mut self, error: &str) {
        let reason = format!(
            "can't read the Kubernetes API: {error}: check that it runs, `source.kubernetes`, and the account's rights"
        );
        if self.reported.is_new(&reason) {
            self.send(SourceEvent::Unreachable(reason)).await;
        }
    }

    async fn send(&mut self, event: SourceEvent) {
        // Fails when the receiver is dropped, which ends `watch_cluster`.
        let _ = self.events.send(event).await;
    }
}
