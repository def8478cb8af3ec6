//! Clients of policy servers. `delta` is the client: it connects, opens delta xDS streams and reconnects, whatever it keeps;
//! agents of nodes use it, too. Here is what a gateway keeps: it passes updates to the gateway, and sends an ACK once an
//! update is in force, or a NACK with the reason. It stops when the receiver of the events is dropped.

mod attempts;
mod cache_writer;
mod coalesce;
mod connect;
mod delta;
mod held;
mod identity;
mod stream;
mod target;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use vipgate_common::{RECOVERY, Tasks};
use vipgate_policy::compiler::GatewayLocality;

pub(crate) use self::attempts::Attempts;
pub(crate) use self::cache_writer::{CacheWriter, Confirmation};
pub use self::coalesce::COALESCE_INTERVAL;
use self::connect::CONNECT_TIMEOUT;
pub(crate) use self::connect::open_channel;
pub(crate) use self::delta::{DeltaClient, OpenStream, Pending, StreamEnd, Subscriber, describe_status};
pub(crate) use self::identity::{Identity, authorized};
pub(crate) use self::target::Target;
use super::cache::{Cache, CacheContents};
use crate::config::PolicyServer;
use crate::xds::client::cache_writer::store_at;
use crate::xds::client::held::HeldUpdates;
use crate::xds::resource::Key;
use crate::xds::store::{PolicyUpdate, ResourceStore, StoredResource};

/// Reconnect backoff.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(4));
const _: () = assert!(BACKOFF.1.as_secs() + CONNECT_TIMEOUT.as_secs() < RECOVERY.as_secs());
/// Time for the last write of the cache when the client stops.
const CACHE_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Event of the client for the gateway.
#[derive(Debug)]
pub enum ClientEvent {
    /// An update to apply; the gateway replies with the outcome.
    Update(Box<PolicyUpdate>, UpdateReply),
    /// The client rejected an update of the server; the reason.
    Rejected(String),
}

/// Reply to an update: accepted, or rejected.
pub type UpdateReply = oneshot::Sender<Result<Effect, Rejection>>;

/// Effect of an accepted update. Further updates are relative to it in both cases.
#[derive(Debug)]
pub enum Effect {
    /// It is in force.
    InForce,
    /// It waits for the kernel. The receiver gets a message once it is in force, by itself or with later updates.
    Held(oneshot::Receiver<()>),
}

/// Why the gateway rejected an update.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Rejection {
    /// The rejected resource, if it is a single one.
    pub resource: Option<Key>,
    pub reason: String,
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(resource) = &self.resource else { return f.write_str(&self.reason) };
        // Most reasons are whole sentences that begin with the resource, for where it isn't known.
        let reason = self.reason.strip_prefix(&resource.to_string()).and_then(|rest| rest.strip_prefix(": "));
        write!(f, "resource {resource}: {}", reason.unwrap_or(&self.reason))
    }
}

/// Status of the connection to the policy server, and of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerStatus {
    /// Whether a stream is open.
    pub connected: bool,
    /// Time of the last change of `connected`.
    pub since: SystemTime,
    /// Why no stream is open.
    pub error: Option<String>,
    /// When the policy in force was last confirmed to be the server's.
    pub confirmed_at: Option<SystemTime>,
    /// Why the cache can't be used; `None` while it can.
    pub cache_error: Option<String>,
}

impl ServerStatus {
    /// That of a client that doesn't run yet.
    pub(crate) fn initial(cache_error: Option<String>) -> Arc<ArcSwap<Self>> {
        Arc::new(ArcSwap::from_pointee(Self {
            connected: false,
            since: SystemTime::now(),
            error: Some("not connected yet".to_owned()),
            confirmed_at: None,
            cache_error,
        }))
    }

    /// Changes a status that client and cache writer share.
    fn change(status: &ArcSwap<Self>, change: impl Fn(&mut Self)) {
        status.rcu(|current| {
            let mut changed = (**current).clone();
            change(&mut changed);
            Arc::new(changed)
        });
    }
}

/// The receiver of the client's events is gone: the client stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("stopped")]
pub(crate) struct ClientStopped;

/// Has the gateway apply an update; waits for the outcome.
///
/// # Errors
/// If the gateway stops.
pub(crate) async fn apply(
    events: &mpsc::Sender<ClientEvent>,
    update: PolicyUpdate,
) -> Result<Result<Effect, Rejection>, ClientStopped> {
    let (reply, replied) = oneshot::channel();
    events.send(ClientEvent::Update(Box::new(update), reply)).await.map_err(|_| ClientStopped)?;
    replied.await.map_err(|_| ClientStopped)
}

/// What a gateway keeps of a server's resources: its policy.
#[derive(Debug)]
struct GatewayPolicy {
    gateway: GatewayLocality,
    store: ResourceStore,
    held: HeldUpdates,
    events: mpsc::Sender<ClientEvent>,
    /// To the writer of the cache.
    confirmations: mpsc::UnboundedSender<Confirmation>,
    status: Arc<ArcSwap<ServerStatus>>,
}

impl GatewayPolicy {
    fn change_status(&self, change: impl Fn(&mut ServerStatus)) {
        ServerStatus::change(&self.status, change);
    }
}

/// A gateway's client of a policy server, or of one of several.
#[derive(Debug)]
pub struct Client {
    delta: DeltaClient<GatewayPolicy>,
    cache: CacheWriter,
    /// Missing if it couldn't be opened yet: the gateway works without it and reports the error, and the writer opens it.
    opened: Option<Cache>,
}

impl Client {
    /// Opens the cache; returns the client and the cached policy. Cache errors are logged and reported in the status.
    pub fn open(
        gateway: GatewayLocality,
        server: PolicyServer,
        events: mpsc::Sender<ClientEvent>,
    ) -> (Self, Option<PolicyUpdate>) {
        let (opened, contents, cache_error) = open_cache(&server.cache);
        let status = ServerStatus::initial(cache_error);
        let (confirmations, received) = mpsc::unbounded_channel();
        let cache = CacheWriter::new(server.cache.clone(), status.clone(), received);
        let identity = Identity::gateway(&gateway);
        let (store, held) = (ResourceStore::default(), HeldUpdates::default());
        let policy = GatewayPolicy { gateway, store, held, events, confirmations, status: status.clone() };
        let delta = DeltaClient::new(identity, server, BACKOFF, status, policy);
        let mut client = Self { delta, cache, opened };
        let update = match contents {
            CacheContents::Empty => None,
            CacheContents::Policy(resources, confirmed_at) => client.load(resources, confirmed_at),
            CacheContents::Damaged(damage) => {
                client.discard_cached(&damage.to_string());
                None
            }
        };
        (client, update)
    }

    /// Takes the cached resources as those in force; returns the policy of them.
    fn load(&mut self, resources: BTreeMap<Key, StoredResource>, confirmed_at: SystemTime) -> Option<PolicyUpdate> {
        let policy = &mut self.delta.subscriber;
        if let Err(error) = policy.store.stage_cached(resources) {
            self.discard_cached(&error.to_string());
            return None;
        }
        let update = policy.store.has_staged().then(|| policy.store.update_for(&policy.gateway));
        policy.store.commit();
        self.cache.set_written(policy.store.resources().clone());
        policy.change_status(|status| status.confirmed_at = Some(confirmed_at));
        update
    }

    /// The status, which the running client keeps up to date.
    pub fn status(&self) -> Arc<ArcSwap<ServerStatus>> {
        self.delta.subscriber.status.clone()
    }

    /// Discards the cached policy: it is damaged, or the gateway rejected it.
    pub fn discard_cached(&mut self, reason: &str) {
        let file = self.delta.server.cache.display().to_string();
        tracing::error!(event = "policy_cache_damaged", file, reason, "the policy cache is damaged and is ignored");
        let policy = &mut self.delta.subscriber;
        policy.store = ResourceStore::default();
        // The next update must not be added to the discarded content.
        self.cache.discard();
        policy.change_status(|status| {
            status.confirmed_at = None;
            status.cache_error = Some(format!("{file} was ignored: {reason}"));
        });
    }

    /// Connects, runs the stream and reconnects until the receiver of the events is dropped. Then writes what the cache
    /// lacks.
    pub async fn run(self) {
        let Self { delta, cache, opened } = self;
        let (path, events) = (delta.server.cache.clone(), delta.subscriber.events.clone());
        let file = path.display().to_string();
        // The lock is held until the last write has ended, even if that is after the client's end.
        let writer = Tasks::default();
        writer.spawn("policy cache", cache.run(store_at(path, opened)));
        tokio::select! {
            // Before the end, since what the gateway has in force is to be acknowledged.
            biased;
            () = delta.run() => {}
            () = events.closed() => {}
        }
        // The writer ends with the client, which has the sender.
        if !writer.stop(CACHE_CLOSE_TIMEOUT).await {
            tracing::error!(
                event = "policy_cache_failed",
                file,
                "the policy cache isn't written yet at the end: the disk doesn't respond"
            );
        }
    }
}

/// Opens the cache; if that fails, the error is logged and returned.
fn open_cache(path: &Path) -> (Option<Cache>, CacheContents, Option<String>) {
    match Cache::open(path) {
        Ok((cache, contents)) => (Some(cache), contents, None),
        Err(error) => {
            let error = format!("policy.server.cache: {}: {error}", path.display());
            tracing::error!(
                event = "policy_cache_failed",
                error,
                "no policy cache yet: a restart without the policy server would lose the policy"
            );
            (None, CacheContents::Empty, Some(error))
        }
    }
}

#[cfg(test)]
mod tests;
