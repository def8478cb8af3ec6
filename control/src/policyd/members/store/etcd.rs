//! etcd as a store, so that any of several servers may be asked: the view in one key, the last beat of each gateway in another.
//!
//! Every transaction compares the revision of the view's key with the one that is known. One that takes `serving` from a gateway
//! compares its beat's as well: when another server has acknowledged a later beat, it fails, and what is there is read instead. So
//! a lease is given only under the view that stands, and a server's own clock decides only about beats that it knows.
//! Limits: plain http and no passwords, like the source. Each beat makes a revision: etcd must compact (`--auto-compaction-retention`).

mod follow;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, Error, GetOptions, KvClient, ResponseHeader, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::timeout;

use self::follow::Seen;
use super::{Change, Committed, News, Snapshot, Store, StoreError};
use crate::config;
use crate::members::{Beat, View, Wish};
use crate::xds::client::chain;
use crate::xds::proto;

/// How long a transaction may take, as far as the TTL doesn't say it.
const LIMIT: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));
/// What other servers have written that waits for the registrar.
const QUEUE: usize = 256;

/// Where things stand.
#[derive(Clone, Debug)]
struct Keys {
    prefix: String,
}

/// What a key is of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    View,
    Beat(Arc<str>),
}

impl Keys {
    fn view(&self) -> String {
        format!("{}view", self.prefix)
    }

    fn beat(&self, name: &str) -> String {
        format!("{}beats/{name}", self.prefix)
    }

    /// Of anything else, nothing.
    fn place(&self, key: &[u8]) -> Option<Place> {
        let rest = str::from_utf8(key).ok()?.strip_prefix(&self.prefix)?;
        if rest == "view" { Some(Place::View) } else { Some(Place::Beat(rest.strip_prefix("beats/")?.into())) }
    }
}

/// What is known to be there: revisions of keys; 0 of those that aren't.
#[derive(Debug, Default)]
struct Known {
    /// None: not read yet.
    view: Option<i64>,
    beats: HashMap<Arc<str>, i64>,
}

/// A store in etcd.
pub struct Etcd {
    endpoints: Vec<String>,
    /// The one that is asked.
    at: usize,
    kv: Option<KvClient>,
    limit: Duration,
    keys: Keys,
    known: Known,
    seen: mpsc::Receiver<Seen>,
}

impl Etcd {
    /// A store beside the keys of the source, for leases of this length. Follows what other servers write from now on.
    pub fn open(config: &config::Etcd, ttl: Duration) -> Self {
        let keys = Keys { prefix: config.members_prefix() };
        let (sender, seen) = mpsc::channel(QUEUE);
        let endpoints = config.endpoints.clone();
        tokio::spawn(follow::follow(endpoints.clone(), keys.clone(), sender));
        let limit = (ttl / 2).clamp(LIMIT.0, LIMIT.1);
        Self { endpoints, at: 0, kv: None, limit, keys, known: Known::default(), seen }
    }

    /// Asks one member after the other, until one answers.
    async fn ask(&mut self, transaction: Txn) -> Result<TxnResponse, StoreError> {
        let mut failures = Vec::new();
        for _ in 0..self.endpoints.len() {
            let asked = self.ask_one(transaction.clone());
            match asked.await {
                Ok(response) => return Ok(response),
                Err(why) => failures.push(format!("{}: {why}", self.endpoints[self.at])),
            }
            self.kv = None;
            self.at = (self.at + 1) % self.endpoints.len();
        }
        Err(StoreError::Unusable(format!("etcd can't be asked: {}", failures.join("; "))))
    }

    async fn ask_one(&mut self, transaction: Txn) -> Result<TxnResponse, String> {
        let mut kv = match self.kv.take() {
            Some(kv) => kv,
            None => connect(&self.endpoints[self.at]).await.map_err(|error| explain(&error))?.kv_client(),
        };
        let answer = timeout(self.limit, kv.txn(transaction)).await;
        let answer = answer.map_err(|_| format!("no answer within {} ms", self.limit.as_millis()))?;
        self.kv = Some(kv);
        answer.map_err(|error| explain(&error))
    }

    fn read_all(&self) -> TxnOp {
        TxnOp::get(self.keys.prefix.clone(), Some(GetOptions::new().with_prefix()))
    }

    /// Takes in all that is there.
    fn take_all(&mut self, response: &TxnResponse) -> Result<Snapshot, StoreError> {
        let is_first = self.known.view.is_none();
        let mut known = Known { view: Some(0), beats: HashMap::new() };
        let mut snapshot = Snapshot::default();
        let answers = response.op_responses();
        let pairs = answers.iter().filter_map(|answer| match answer {
            TxnOpResponse::Get(get) => Some(get.kvs()),
            TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
        });
        for pair in pairs.flatten() {
            let revision = pair.mod_revision();
            let key = String::from_utf8_lossy(pair.key());
            match self.keys.place(pair.key()) {
                None => tracing::debug!(%key, "a key that isn't ours"),
                Some(Place::View) => {
                    known.view = Some(revision);
                    let view = read_view(pair.value()).map_err(|why| StoreError::Unusable(format!("{key}: {why}")))?;
                    snapshot.view = Some(Arc::new(view));
                }
                Some(Place::Beat(name)) => {
                    if self.known.beats.get(&name) != Some(&revision) {
                        match read_beat(pair.value(), is_first) {
                            Ok(beat) => snapshot.beats.push(beat),
                            Err(why) => tracing::warn!(%key, why, "a beat that can't be read"),
                        }
                    }
                    known.beats.insert(name, revision);
                }
            }
        }
        self.known = known;
        Ok(snapshot)
    }

    /// What another server has written, if it wasn't known.
    fn take(&mut self, seen: Seen) -> Option<News> {
        let Seen { place, revision, value, is_old } = seen;
        let known = match &place {
            Place::View => self.known.view.unwrap_or_default(),
            Place::Beat(name) => self.known.beats.get(name).copied().unwrap_or_default(),
        };
        if revision <= known {
            return None;
        }
        match place {
            Place::View => {
                // One that can't be read is complained about when it is in the way.
                let view = read_view(&value).ok()?;
                self.known.view = Some(revision);
                Some(News::View(Arc::new(view)))
            }
            Place::Beat(name) => {
                let beat = read_beat(&value, is_old).ok()?;
                self.known.beats.insert(name, revision);
                Some(News::Beat(beat))
            }
        }
    }
}

impl Store for Etcd {
    async fn commit(&mut self, change: Change<'_>) -> Result<Committed, StoreError> {
        let Change { beats, view, silent, gone } = change;
        let Some(known) = self.known.view else {
            let all = self.ask(Txn::new().and_then([self.read_all()])).await?;
            return self.take_all(&all).map(Committed::Outdated);
        };
        let is = |key: String, revision| Compare::mod_revision(key, CompareOp::Equal, revision);
        let beat_of = |name: &Arc<str>| self.known.beats.get(name).copied().unwrap_or_default();
        let mut compares = vec![is(self.keys.view(), known)];
        compares.extend(silent.iter().map(|name| is(self.keys.beat(name), beat_of(name))));
        let mut writes = Vec::new();
        writes.extend(view.map(|view| TxnOp::put(self.keys.view(), proto::View::from(view).encode_to_vec(), None)));
        writes.extend(beats.iter().map(|beat| {
            let message = Beat { view: None, ..(*beat).clone() }.message(0);
            TxnOp::put(self.keys.beat(&beat.gateway), message.encode_to_vec(), None)
        }));
        writes.extend(gone.iter().map(|name| TxnOp::delete(self.keys.beat(name), None)));
        let transaction = Txn::new().when(compares).and_then(writes).or_else([self.read_all()]);
        let response = self.ask(transaction).await?;
        if !response.succeeded() {
            return self.take_all(&response).map(Committed::Outdated);
        }
        let now = response.header().map_or(0, ResponseHeader::revision);
        if view.is_some() {
            self.known.view = Some(now);
        }
        self.known.beats.extend(beats.iter().map(|beat| (beat.gateway.clone(), now)));
        self.known.beats.retain(|name, _| !gone.contains(name));
        Ok(Committed::Done)
    }

    async fn news(&mut self) -> News {
        while let Some(seen) = self.seen.recv().await {
            if let Some(news) = self.take(seen) {
                return news;
            }
        }
        pending().await
    }
}

/// A member. Doesn't connect yet, so what fails here is the URL.
async fn connect(endpoint: &str) -> Result<Client, Error> {
    // A member that has lost the others has old things to tell, and says so if a leader is required.
    let options = ConnectOptions::new().with_require_leader(true).with_connect_timeout(LIMIT.1);
    Client::connect([endpoint], Some(options)).await
}

fn explain(error: &Error) -> String {
    match error {
        Error::GRpcStatus(status) => chain(status),
        other => other.to_string(),
    }
}

fn read_view(value: &[u8]) -> Result<View, String> {
    let message = proto::View::decode(value).map_err(|error| format!("is no view ({error}): delete the key"))?;
    View::try_from(message).map_err(|error| format!("{error}: delete the key"))
}

/// A beat; one that may be of long ago says that its gateway was there, not what it wants now.
fn read_beat(value: &[u8], is_old: bool) -> Result<Beat, String> {
    let message = proto::Beat::decode(value).map_err(|error| error.to_string())?;
    let mut beat = Beat::kept(message).map_err(|error| error.to_string())?;
    if is_old && beat.wish == Wish::Ready {
        beat.wish = Wish::Joining;
    }
    Ok(beat)
}
