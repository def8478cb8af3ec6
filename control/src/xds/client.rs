//! Policy client: a delta xDS stream from the policy server. Passes updates to the gateway, and sends an ACK once an
//! update is in force, or a NACK with the reason. Stops when the receiver of the events is dropped.

mod cache_writer;
mod coalesce;
mod connect;
mod held;
mod logged_errors;
mod stream;
mod target;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use vipgate_policy::compiler::GatewayLocality;

pub use self::coalesce::COALESCE_INTERVAL;
use self::connect::CONNECT_TIMEOUT;
pub use self::connect::error_chain;
pub(crate) use self::connect::open_channel;
pub(crate) use self::logged_errors::LoggedErrors;
pub(crate) use self::stream::describe_status;
pub(crate) use self::target::{Target, TargetList};
use super::cache::{Cache, CacheContents};
use crate::config::PolicyServer;
use crate::source::backoff::RECOVERY;
use crate::xds::client::cache_writer::{CacheWriter, Confirmation, store_at};
use crate::xds::client::held::HeldUpdates;
use crate::xds::resource::Key;
use crate::xds::store::{PolicyUpdate, ResourceStore, StoredResource};

/// Reconnect backoff: first and maximum delay.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(4));
const _: () = assert!(BACKOFF.1.as_secs() + CONNECT_TIMEOUT.as_secs() < RECOVERY.as_secs());
/// The same after a response that is too large: the next one will be as large, and as expensive for both sides.
const BACKOFF_TOO_LARGE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_mins(2));
/// A connection that lasted longer resets the backoff.
const BACKOFF_RESET: Duration = Duration::from_secs(30);
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
    /// Changes a status that client and cache writer share.
    fn change(status: &ArcSwap<Self>, change: impl Fn(&mut Self)) {
        status.rcu(|current| {
            let mut changed = (**current).clone();
            change(&mut changed);
            Arc::new(changed)
        });
    }
}

/// Why a stream has ended.
#[derive(Debug)]
enum StreamEnd {
    /// The server rejected this gateway: an operator must fix that.
    Denied(String),
    /// A response exceeded the size limit.
    TooLarge(String),
    /// Any other error.
    Disconnected(String),
}

impl StreamEnd {
    fn reason(&self) -> &str {
        match self {
            Self::Denied(reason) | Self::TooLarge(reason) | Self::Disconnected(reason) => reason,
        }
    }
}

/// The receiver of the client's events is gone: the client stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("stopped")]
struct ClientStopped;

/// Client of a policy server, or of one of several.
#[derive(Debug)]
pub struct Client {
    gateway: GatewayLocality,
    /// Identifies the gateway's process: a new number at each start.
    incarnation: u64,
    server: PolicyServer,
    targets: TargetList,
    store: ResourceStore,
    /// To the writer of the cache.
    confirmations: mpsc::UnboundedSender<Confirmation>,
    /// Until the client runs. The cache is missing if it couldn't be opened yet: the gateway works without it and reports
    /// the error, and the writer opens it.
    cache: Option<(CacheWriter, Option<Cache>)>,
    status: Arc<ArcSwap<ServerStatus>>,
    events: mpsc::Sender<ClientEvent>,
    held: HeldUpdates,
}

impl Client {
    /// Opens the cache; returns the client and the cached policy. Cache errors are logged and reported in the status.
    pub fn open(
        gateway: GatewayLocality,
        server: PolicyServer,
        events: mpsc::Sender<ClientEvent>,
    ) -> (Self, Option<PolicyUpdate>) {
        let (cache, contents, cache_error) = open_cache(&server.cache);
        let status = Arc::new(ArcSwap::from_pointee(ServerStatus {
            connected: false,
            since: SystemTime::now(),
            error: Some("not connected yet".to_owned()),
            confirmed_at: None,
            cache_error,
        }));
        let (confirmations, received) = mpsc::unbounded_channel();
        let writer = CacheWriter::new(server.cache.clone(), status.clone(), received);
        // Fallback without a random source: the start time.
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut client = Self {
            gateway,
            incarnation: getrandom::u64().unwrap_or(started.as_nanos() as u64),
            targets: TargetList::new(&server),
            server,
            store: ResourceStore::default(),
            confirmations,
            cache: Some((writer, cache)),
            status,
            events,
            held: HeldUpdates::default(),
        };
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
        if let Err(error) = self.store.stage_cached(resources) {
            self.discard_cached(&error.to_string());
            return None;
        }
        let update = self.store.has_staged().then(|| self.store.update_for(&self.gateway));
        self.store.commit();
        if let Some((writer, _)) = &mut self.cache {
            writer.set_written(self.store.resources().clone());
        }
        self.change_status(|status| status.confirmed_at = Some(confirmed_at));
        update
    }

    /// The status, which the running client keeps up to date.
    pub fn status(&self) -> Arc<ArcSwap<ServerStatus>> {
        self.status.clone()
    }

    /// Discards the cached policy: it is damaged, or the gateway rejected it.
    pub fn discard_cached(&mut self, reason: &str) {
        let file = self.server.cache.display().to_string();
        tracing::error!(event = "policy_cache_damaged", file, reason, "the policy cache is damaged and is ignored");
        self.store = ResourceStore::default();
        // The next update must not be added to the discarded content.
        if let Some((writer, _)) = &mut self.cache {
            writer.discard();
        }
        self.change_status(|status| {
            status.confirmed_at = None;
            status.cache_error = Some(format!("{file} was ignored: {reason}"));
        });
    }

    /// Connects, runs the stream and reconnects until the receiver of the events is dropped. Then writes what the cache
    /// lacks.
    pub async fn run(mut self) {
        let path = self.server.cache.clone();
        let file = path.display().to_string();
        // The lock is held until the last write has ended, even if that is after the client's end.
        let writer = self.cache.take().map(|(writer, cache)| tokio::spawn(writer.run(store_at(path, cache))));
        self.follow().await;
        // The writer ends with the sender.
        drop(self);
        let Some(writer) = writer else { return };
        if timeout(CACHE_CLOSE_TIMEOUT, writer).await.is_err() {
            tracing::error!(
                event = "policy_cache_failed",
                file,
                "the policy cache isn't written yet at the end: the disk doesn't respond"
            );
        }
    }

    async fn follow(&mut self) {
        let (mut delay, mut delay_too_large) = (BACKOFF.0, BACKOFF_TOO_LARGE.0);
        let mut logged = LoggedErrors::default();
        let events = self.events.clone();
        while !events.is_closed() {
            let started = Instant::now();
            let (target, end) = tokio::select! {
                // Before the end, since what the gateway has in force is to be acknowledged.
                biased;
                ended = self.run_stream() => ended,
                () = events.closed() => return,
            };
            self.store.discard();
            if self.status.load().connected {
                logged.clear();
            }
            let is_new = logged.is_new(end.reason());
            let (server, reason) = (target.to_string(), end.reason());
            match &end {
                _ if !is_new => {}
                StreamEnd::Denied(_) => tracing::error!(
                    event = "policy_server_refuses",
                    server,
                    reason,
                    "the policy server rejected this gateway: {reason}"
                ),
                StreamEnd::TooLarge(_) => tracing::error!(
                    event = "policy_response_too_large",
                    server,
                    reason,
                    "the policy can't be received: {reason}"
                ),
                StreamEnd::Disconnected(_) if self.status.load().connected => {
                    tracing::warn!(event = "policy_server_lost", server, reason, "policy server connection lost");
                }
                StreamEnd::Disconnected(_) => {
                    tracing::warn!(event = "policy_server_unreachable", server, reason, "policy server unreachable");
                }
            }
            let (next, max) = match &end {
                StreamEnd::TooLarge(_) => (&mut delay_too_large, BACKOFF_TOO_LARGE.1),
                StreamEnd::Denied(_) | StreamEnd::Disconnected(_) => {
                    if started.elapsed() > BACKOFF_RESET {
                        (delay, delay_too_large) = (BACKOFF.0, BACKOFF_TOO_LARGE.0);
                    }
                    (&mut delay, BACKOFF.1)
                }
            };
            self.set_disconnected(end.reason());
            // The delay is for rounds, not for servers.
            let is_last = !self.targets.has_more();
            tokio::select! {
                () = tokio::time::sleep(jittered(if is_last { *next } else { BACKOFF.0 })) => {}
                () = events.closed() => return,
            }
            if is_last {
                *next = (*next * 2).min(max);
            }
        }
    }

    /// Runs a stream of the next server; returns why it has ended.
    async fn run_stream(&mut self) -> (Target, StreamEnd) {
        let target = self.targets.next().await;
        let end = stream::run(self, &target).await;
        (target, end)
    }

    fn set_disconnected(&self, reason: &str) {
        self.change_status(|status| {
            if status.connected {
                status.since = SystemTime::now();
            }
            status.connected = false;
            status.error = Some(reason.to_owned());
        });
    }

    fn change_status(&self, change: impl Fn(&mut ServerStatus)) {
        ServerStatus::change(&self.status, change);
    }
}

/// Opens the cache; if that fails, the error is logged and returned.
fn open_cache(path: &Path) -> (Option<Cache>, CacheContents, Option<String>) {
    match Cache::open(path) {
        Ok((cache, contents)) => (Some(cache), contents, None),
        Err(error) => {
            let error = error.to_string();
            tracing::error!(
                event = "policy_cache_failed",
                error,
                "no policy cache yet: a restart without the policy server would lose the policy"
            );
            (None, CacheContents::Empty, Some(error))
        }
    }
}

/// A delay with jitter: 50 to 100 % of it, so that gateways that lost the server together don't reconnect together.
pub(crate) fn jittered(delay: Duration) -> Duration {
    // Without a random source: the whole delay.
    let random = getrandom::u32().unwrap_or(u32::MAX);
    delay / 2 + (delay / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests;
