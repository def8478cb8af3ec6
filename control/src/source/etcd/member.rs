//! Connection to one etcd member: requests, watch, health checks, with timeouts.
//!
//! The client library could balance over all members. But then health checks might go to another member than the watch,
//! and errors wouldn't identify their member.

use std::time::Duration;

use etcd_client::{
    Client, ConnectOptions, Error, GetOptions, GetResponse, KvClient, ResponseHeader, Txn, TxnResponse, WatchClient,
    WatchOptions, WatchResponse, WatchStream,
};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout};

use crate::source::etcd::decode::{DecodedEntry, decode_pair};

/// Timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of health checks during a watch.
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Timeout of a health check.
const HEALTH_CHECK_TIMEOUT: Duration = Duration::from_secs(3);
/// A member without a successful response for this long is abandoned; longer than an election.
const UNHEALTHY_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval and timeout of HTTP/2 keepalive pings. etcd closes connections with more than one ping in five seconds.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(4));
/// Keys per range request.
const PAGE_SIZE: i64 = 1000;
/// Maximum message size. Sufficient for a page of values of etcd's default maximum (1.5 MiB each), and for a watch
/// response, which has at most 1000 revisions.
const MAX_MESSAGE_BYTES: usize = 2 << 30;

/// Why a member can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EtcdError {
    #[error("no endpoints configured")]
    NoEndpoints,
    #[error("https endpoints are not supported: use http://")]
    HttpsUnsupported,
    #[error("not a URL of the form http://HOST:PORT ({0})")]
    InvalidUrl(String),
    #[error("no response within {0:?}")]
    Timeout(Duration),
    #[error("{0}")]
    Rejected(String),
    #[error("its responses have no header: not an etcd server")]
    NotEtcd,
    #[error("the watch was cancelled ({0})")]
    WatchCanceled(String),
    #[error("the history since revision {0} was compacted")]
    Compacted(i64),
    #[error("its history differs from the one read before: the cluster was restored or replaced")]
    Replaced,
    #[error("the server has closed the watch")]
    WatchClosed,
    /// Errors with their endpoints.
    #[error("{0}")]
    Endpoints(String),
}

impl EtcdError {
    /// Adds the endpoint of the member.
    pub(in crate::source) fn at_member(self, member: &Member) -> Self {
        Self::Endpoints(format!("{}: {self}", member.endpoint))
    }
}

impl From<Error> for EtcdError {
    fn from(error: Error) -> Self {
        let Error::GRpcStatus(status) = &error else { return Self::Rejected(error.to_string()) };
        // The root cause is the most specific: "Connection refused", not "tcp connect error".
        let mut source = std::error::Error::source(status);
        let mut root = String::new();
        while let Some(error) = source {
            root = error.to_string();
            source = error.source();
        }
        let message = if status.message().is_empty() { status.code().description() } else { status.message() };
        Self::Rejected(if root.is_empty() || message.contains(&root) {
            message.to_owned()
        } else {
            format!("{message}: {root}")
        })
    }
}

/// A half-open range of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::source) struct KeyRange {
    first: Vec<u8>,
    end: Vec<u8>,
}

impl KeyRange {
    /// All keys that begin with `prefix`.
    pub(in crate::source) fn with_prefix(prefix: &str) -> Self {
        let first = prefix.as_bytes().to_vec();
        let mut end = first.clone();
        match end.last_mut() {
            // UTF-8 has no 0xff byte.
            Some(byte) => *byte += 1,
            // For etcd, the range from \0 to \0 is all keys.
            None => return Self { first: vec![0], end: vec![0] },
        }
        Self { first, end }
    }
}

/// A position in a cluster's history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Revision {
    /// Zero if an etcd proxy doesn't report it.
    cluster: u64,
    number: i64,
}

impl Revision {
    fn of(header: Option<&ResponseHeader>) -> Result<Self, EtcdError> {
        let header = header.ok_or(EtcdError::NotEtcd)?;
        Ok(Self { cluster: header.cluster_id(), number: header.revision() })
    }

    /// Checks that `later` is a later revision of the same history: revisions only decrease in a cluster that was
    /// recreated or restored from a backup.
    fn check_later(self, later: Self) -> Result<Self, EtcdError> {
        let same = later.cluster == self.cluster || later.cluster == 0 || self.cluster == 0;
        if same && later.number >= self.number { Ok(later) } else { Err(EtcdError::Replaced) }
    }
}

/// A member that has responded.
pub(in crate::source) struct Member {
    endpoint: String,
    keys: KeyRange,
    kv: KvClient,
    watch: WatchClient,
    /// The revision of its last successful response.
    revision: Revision,
}

impl Member {
    /// Connects to all members concurrently and returns the first one that responds.
    pub(in crate::source) async fn connect_any(endpoints: &[String], keys: &KeyRange) -> Result<Self, EtcdError> {
        if endpoints.is_empty() {
            return Err(EtcdError::NoEndpoints);
        }
        let attempts = endpoints
            .iter()
            .enumerate()
            .map(|(index, endpoint)| async move { (index, endpoint, Self::connect(endpoint, keys).await) });
        let mut attempts: FuturesUnordered<_> = attempts.collect();
        let mut errors = Vec::new();
        while let Some((index, endpoint, result)) = attempts.next().await {
            match result {
                Ok(member) => return Ok(member),
                Err(error) => errors.push((index, format!("{endpoint}: {error}"))),
            }
        }
        // In the order of the configuration, so that the same state yields the same message.
        errors.sort();
        let errors: Vec<String> = errors.into_iter().map(|(_, error)| error).collect();
        Err(EtcdError::Endpoints(errors.join("; ")))
    }

    pub(super) async fn connect(endpoint: &str, keys: &KeyRange) -> Result<Self, EtcdError> {
        const HTTPS: &str = "https://";
        if endpoint.get(..HTTPS.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(HTTPS)) {
            return Err(EtcdError::HttpsUnsupported);
        }
        // A partitioned member has stale keys; with a required leader it returns an error instead.
        let options = ConnectOptions::new()
            .with_require_leader(true)
            .with_connect_timeout(REQUEST_TIMEOUT)
            .with_keep_alive(KEEP_ALIVE.0, KEEP_ALIVE.1)
            .with_keep_alive_while_idle(false);
        // Doesn't connect yet: an error here is about the URL.
        let client = Client::connect([endpoint], Some(options))
            .await
            .map_err(|error| EtcdError::InvalidUrl(error.to_string()))?;
        let mut member = Self {
            endpoint: endpoint.to_owned(),
            keys: keys.clone(),
            kv: client.kv_client().max_decoding_message_size(MAX_MESSAGE_BYTES),
            watch: client.watch_client().max_decoding_message_size(MAX_MESSAGE_BYTES),
            revision: Revision { cluster: 0, number: 0 },
        };
        member.check(REQUEST_TIMEOUT).await?;
        Ok(member)
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Lists all keys and values at one revision.
    pub(super) async fn list(&mut self) -> Result<Vec<DecodedEntry>, EtcdError> {
        let mut texts = Vec::new();
        let mut from = self.keys.first.clone();
        // The first page is read at the current revision (0), the others at the revision of the first.
        let mut number = 0;
        loop {
            let options =
                GetOptions::new().with_range(self.keys.end.clone()).with_limit(PAGE_SIZE).with_revision(number);
            let mut page = self.get(from, options, REQUEST_TIMEOUT).await?;
            let revision = self.revision.check_later(Revision::of(page.header())?)?;
            if number == 0 {
                number = revision.number;
                self.revision = revision;
            }
            let more = page.more();
            let pairs = page.take_kvs();
            let last = pairs.last().map(|pair| pair.key().to_vec());
            texts.extend(pairs.into_iter().map(|pair| {
                let (key, value) = pair.into_key_value();
                decode_pair(&key, value)
            }));
            match last {
                Some(last) if more => from = [last, vec![0]].concat(),
                _ => return Ok(texts),
            }
        }
    }

    /// Executes a transaction, without a timeout.
    pub(in crate::source) async fn execute(&mut self, transaction: Txn) -> Result<TxnResponse, EtcdError> {
        Ok(self.kv.txn(transaction).await?)
    }

    /// Watches changes after the listed revision.
    ///
    /// Without response fragmentation, which the client doesn't expose: so a response always has all events of a
    /// revision.
    pub(super) async fn watch(&mut self) -> Result<Watch, EtcdError> {
        let options =
            WatchOptions::new().with_range(self.keys.end.clone()).with_start_revision(self.revision.number + 1);
        let open = async {
            let stream = self.watch.watch(self.keys.first.clone(), Some(options)).await?;
            let mut watch = Watch { stream, start: self.revision };
            while !watch.next().await?.created() {}
            Ok(watch)
        };
        timeout(REQUEST_TIMEOUT, open).await.unwrap_or(Err(EtcdError::Timeout(REQUEST_TIMEOUT)))
    }

    /// Runs health checks until the member is unhealthy; returns the error.
    ///
    /// A request checks more than a watch progress notification: that the member has a quorum and the same history. And
    /// etcd proxies don't support progress requests.
    pub(super) async fn until_unhealthy(&mut self) -> EtcdError {
        let mut last_success = Instant::now();
        loop {
            sleep(HEALTH_CHECK_INTERVAL).await;
            match self.check(HEALTH_CHECK_TIMEOUT).await {
                Ok(()) => last_success = Instant::now(),
                Err(EtcdError::Replaced) => return EtcdError::Replaced,
                Err(error) if last_success.elapsed() >= UNHEALTHY_TIMEOUT => return error,
                Err(error) => tracing::debug!(endpoint = self.endpoint, %error, "a health check has failed"),
            }
        }
    }

    /// A small linearizable read, which needs a quorum.
    async fn check(&mut self, limit: Duration) -> Result<(), EtcdError> {
        let options = GetOptions::new().with_limit(1).with_keys_only();
        let response = self.get(self.keys.first.clone(), options, limit).await?;
        self.revision = self.revision.check_later(Revision::of(response.header())?)?;
        Ok(())
    }

    async fn get(&mut self, key: Vec<u8>, options: GetOptions, limit: Duration) -> Result<GetResponse, EtcdError> {
        Ok(timeout(limit, self.kv.get(key, Some(options))).await.map_err(|_| EtcdError::Timeout(limit))??)
    }
}

/// A watch of all keys.
pub(super) struct Watch {
    stream: WatchStream,
    /// The listed revision that it starts after.
    start: Revision,
}

impl Watch {
    /// The next response; it may have no events.
    pub(super) async fn next(&mut self) -> Result<WatchResponse, EtcdError> {
        let response = self.stream.message().await?.ok_or(EtcdError::WatchClosed)?;
        if response.compact_revision() > 0 {
            return Err(EtcdError::Compacted(self.start.number));
        }
        if response.canceled() {
            return Err(EtcdError::WatchCanceled(response.cancel_reason().to_owned()));
        }
        self.start.check_later(Revision::of(response.header())?)?;
        Ok(response)
    }
}
