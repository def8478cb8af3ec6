//! etcd store, shared by several servers: the view in one key, the last heartbeat of each gateway in a key of its own.
//!
//! Every transaction compares the revision of the view's key with the known one. A transaction that deactivates a
//! gateway compares the revision of its heartbeat as well: if another server has accepted a later one, it fails and
//! reads the contents instead. So leases are granted only under the current view, and a server's clock decides only
//! about heartbeats that it knows. Limits: plain http and no passwords, like the policy source. Each heartbeat makes a
//! revision, so etcd must compact (`--auto-compaction-retention`).

#[cfg(test)]
mod tests;
mod watch;

use std::collections::HashMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, Error, GetOptions, KvClient, ResponseHeader, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};
use prost::{DecodeError, Message};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::timeout;

use self::watch::ObservedWrite;
use super::{CommitOutcome, RemoteWrite, Store, StoreContents, StoreError, Transaction};
use crate::config;
use crate::membership::{DesiredState, Heartbeat, MembershipView};
use crate::xds::client::error_chain;
use crate::xds::membership_message::InvalidMessage;
use crate::xds::proto;

/// Minimum and maximum timeout of a transaction; in between, half a TTL.
const TIMEOUT_RANGE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));
/// Capacity of the queue of writes by other servers.
const QUEUE: usize = 256;

/// Keys of the store.
#[derive(Clone, Debug)]
struct Keys {
    prefix: String,
}

/// Meaning of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum KeyKind {
    View,
    Heartbeat(Arc<str>),
}

impl Keys {
    fn view(&self) -> String {
        format!("{}view", self.prefix)
    }

    fn heartbeat(&self, name: &str) -> String {
        format!("{}heartbeats/{name}", self.prefix)
    }

    /// `None`: not a key of the store.
    fn parse(&self, key: &[u8]) -> Option<KeyKind> {
        let rest = str::from_utf8(key).ok()?.strip_prefix(&self.prefix)?;
        if rest == "view" {
            return Some(KeyKind::View);
        }
        Some(KeyKind::Heartbeat(rest.strip_prefix("heartbeats/")?.into()))
    }
}

/// Known revisions of keys; 0: the key doesn't exist.
#[derive(Debug, Default)]
struct Revisions {
    /// `None`: not read yet.
    view: Option<i64>,
    heartbeats: HashMap<Arc<str>, i64>,
}

/// Why a transaction at one etcd endpoint failed.
#[derive(Debug, Error)]
enum TransactionError {
    #[error("{}", explain(.0))]
    Etcd(#[from] Error),
    #[error("no response within {} ms", .0.as_millis())]
    Timeout(Duration),
}

/// Why the value of the view's key isn't a view.
#[derive(Debug, Error)]
enum ViewError {
    #[error("not a view ({0}): delete the key")]
    Decode(#[from] DecodeError),
    #[error("{0}: delete the key")]
    Invalid(#[from] InvalidMessage),
}

/// Why a value isn't a heartbeat.
#[derive(Debug, Error)]
enum HeartbeatError {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Invalid(#[from] InvalidMessage),
}

/// A store in etcd.
pub struct EtcdStore {
    endpoints: Vec<String>,
    /// Index of the endpoint in use.
    endpoint: usize,
    kv: Option<KvClient>,
    timeout: Duration,
    keys: Keys,
    known: Revisions,
    writes: mpsc::Receiver<ObservedWrite>,
}

impl EtcdStore {
    /// A store with a prefix beside the policy source's, for leases with this TTL. Starts to watch writes of other
    /// servers.
    pub fn open(config: &config::Etcd, ttl: Duration) -> Self {
        let keys = Keys { prefix: config.membership_prefix() };
        let (sender, writes) = mpsc::channel(QUEUE);
        let endpoints = config.endpoints.clone();
        tokio::spawn(watch::watch(endpoints.clone(), keys.clone(), sender));
        let timeout = (ttl / 2).clamp(TIMEOUT_RANGE.0, TIMEOUT_RANGE.1);
        Self { endpoints, endpoint: 0, kv: None, timeout, keys, known: Revisions::default(), writes }
    }

    /// Executes a transaction, trying one etcd endpoint after the other.
    async fn execute(&mut self, transaction: Txn) -> Result<TxnResponse, StoreError> {
        let mut errors = Vec::new();
        for _ in 0..self.endpoints.len() {
            let attempt = self.try_execute(transaction.clone());
            match attempt.await {
                Ok(response) => return Ok(response),
                Err(error) => errors.push(format!("{}: {error}", self.endpoints[self.endpoint])),
            }
            self.kv = None;
            self.endpoint = (self.endpoint + 1) % self.endpoints.len();
        }
        Err(StoreError::Unavailable(format!("etcd is unreachable: {}", errors.join("; "))))
    }

    async fn try_execute(&mut self, transaction: Txn) -> Result<TxnResponse, TransactionError> {
        let mut kv = match self.kv.take() {
            Some(kv) => kv,
            None => connect(&self.endpoints[self.endpoint]).await?.kv_client(),
        };
        let response = timeout(self.timeout, kv.txn(transaction)).await;
        let response = response.map_err(|_| TransactionError::Timeout(self.timeout))?;
        self.kv = Some(kv);
        Ok(response?)
    }

    fn read_all(&self) -> TxnOp {
        TxnOp::get(self.keys.prefix.clone(), Some(GetOptions::new().with_prefix()))
    }

    /// Decodes the contents of the store and updates the known revisions.
    fn load_all(&mut self, response: &TxnResponse) -> Result<StoreContents, StoreError> {
        let is_first = self.known.view.is_none();
        let mut known = Revisions { view: Some(0), heartbeats: HashMap::new() };
        let mut contents = StoreContents::default();
        let responses = response.op_responses();
        let pairs = responses.iter().filter_map(|response| match response {
            TxnOpResponse::Get(get) => Some(get.kvs()),
            TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
        });
        for pair in pairs.flatten() {
            let revision = pair.mod_revision();
            let key = String::from_utf8_lossy(pair.key());
            match self.keys.parse(pair.key()) {
                None => tracing::debug!(%key, "not a key of the membership store"),
                Some(KeyKind::View) => {
                    known.view = Some(revision);
                    let view = decode_view(pair.value())
                        .map_err(|error| StoreError::Unavailable(format!("{key}: {error}")))?;
                    contents.view = Some(Arc::new(view));
                }
                Some(KeyKind::Heartbeat(name)) => {
                    if self.known.heartbeats.get(&name) != Some(&revision) {
                        match decode_heartbeat(pair.value(), is_first) {
                            Ok(heartbeat) => contents.heartbeats.push(heartbeat),
                            Err(error) => tracing::warn!(%key, %error, "invalid heartbeat in the membership store"),
                        }
                    }
                    known.heartbeats.insert(name, revision);
                }
            }
        }
        self.known = known;
        Ok(contents)
    }

    /// Decodes a write of another server; `None` if its revision is known already.
    fn decode_write(&mut self, write: ObservedWrite) -> Option<RemoteWrite> {
        let ObservedWrite { kind, revision, value, is_initial } = write;
        let known = match &kind {
            KeyKind::View => self.known.view.unwrap_or_default(),
            KeyKind::Heartbeat(name) => self.known.heartbeats.get(name).copied().unwrap_or_default(),
        };
        if revision <= known {
            return None;
        }
        match kind {
            KeyKind::View => {
                // An invalid view is reported by the next transaction, which conflicts with it.
                let view = decode_view(&value).ok()?;
                self.known.view = Some(revision);
                Some(RemoteWrite::View(Arc::new(view)))
            }
            KeyKind::Heartbeat(name) => {
                let heartbeat = decode_heartbeat(&value, is_initial).ok()?;
                self.known.heartbeats.insert(name, revision);
                Some(RemoteWrite::Heartbeat(Box::new(heartbeat)))
            }
        }
    }
}

impl Store for EtcdStore {
    async fn commit(&mut self, transaction: Transaction<'_>) -> Result<CommitOutcome, StoreError> {
        let Transaction { heartbeats, view, unchanged, removed } = transaction;
        let Some(known) = self.known.view else {
            let all = self.execute(Txn::new().and_then([self.read_all()])).await?;
            return self.load_all(&all).map(CommitOutcome::Conflict);
        };
        let has_revision = |key: String, revision| Compare::mod_revision(key, CompareOp::Equal, revision);
        let revision_of = |name: &Arc<str>| self.known.heartbeats.get(name).copied().unwrap_or_default();
        let mut compares = vec![has_revision(self.keys.view(), known)];
        compares.extend(unchanged.iter().map(|name| has_revision(self.keys.heartbeat(name), revision_of(name))));
        let mut writes = Vec::new();
        writes.extend(view.map(|view| TxnOp::put(self.keys.view(), proto::View::from(view).encode_to_vec(), None)));
        writes.extend(heartbeats.iter().map(|heartbeat| {
            let message = proto::Heartbeat::of(&Heartbeat { view: None, ..(*heartbeat).clone() }, 0);
            TxnOp::put(self.keys.heartbeat(&heartbeat.gateway), message.encode_to_vec(), None)
        }));
        writes.extend(removed.iter().map(|name| TxnOp::delete(self.keys.heartbeat(name), None)));
        let transaction = Txn::new().when(compares).and_then(writes).or_else([self.read_all()]);
        let response = self.execute(transaction).await?;
        if !response.succeeded() {
            return self.load_all(&response).map(CommitOutcome::Conflict);
        }
        let revision = response.header().map_or(0, ResponseHeader::revision);
        if view.is_some() {
            self.known.view = Some(revision);
        }
        self.known.heartbeats.extend(heartbeats.iter().map(|it| (it.gateway.clone(), revision)));
        self.known.heartbeats.retain(|name, _| !removed.contains(name));
        Ok(CommitOutcome::Committed)
    }

    async fn next_remote_write(&mut self) -> RemoteWrite {
        while let Some(write) = self.writes.recv().await {
            if let Some(write) = self.decode_write(write) {
                return write;
            }
        }
        pending().await
    }
}

/// Client of an etcd endpoint. It connects lazily: an error here is an invalid URL.
async fn connect(endpoint: &str) -> Result<Client, Error> {
    // An etcd member that is partitioned from its leader serves stale data; with this option it returns an error.
    let options = ConnectOptions::new().with_require_leader(true).with_connect_timeout(TIMEOUT_RANGE.1);
    Client::connect([endpoint], Some(options)).await
}

fn explain(error: &Error) -> String {
    match error {
        Error::GRpcStatus(status) => error_chain(status),
        other => other.to_string(),
    }
}

fn decode_view(value: &[u8]) -> Result<MembershipView, ViewError> {
    Ok(MembershipView::try_from(proto::View::decode(value)?)?)
}

/// Decodes a heartbeat. One of unknown age proves that its gateway existed, not that it is ready now.
fn decode_heartbeat(value: &[u8], is_initial: bool) -> Result<Heartbeat, HeartbeatError> {
    let mut heartbeat = proto::Heartbeat::decode(value)?.into_stored()?;
    if is_initial && heartbeat.desired_state == DesiredState::Ready {
        heartbeat.desired_state = DesiredState::Joining;
    }
    Ok(heartbeat)
}
