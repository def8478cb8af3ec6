//! One member of etcd over one connection: what it is asked, and how long that may take.
//!
//! The client could balance over all members by itself. But then what is checked may not be what is watched, and no error
//! says which member it is from.

use std::time::Duration;

use etcd_client::{
    Client, ConnectOptions, Error, GetOptions, GetResponse, KvClient, ResponseHeader, WatchClient, WatchOptions,
    WatchResponse, WatchStream,
};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout};

use super::text::{Text, text};

/// How long a request may take.
const REQUEST: Duration = Duration::from_secs(5);
/// How often a member is asked whether it is still there while its keys are watched.
const CHECK: Duration = Duration::from_secs(2);
/// How long that may take.
const ANSWER: Duration = Duration::from_secs(3);
/// A member that gave no good answer this long is given up. An election is shorter.
const SILENCE: Duration = Duration::from_secs(5);
/// Pings of HTTP/2, and how long their answers may take. etcd takes more than one in five seconds for an attack.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(4));
/// Keys that are read at once.
const PAGE: i64 = 1000;
/// The largest message. A page fits even if each value is as large as etcd takes by default (1.5 MiB), and so does a
/// response of a watch: it has no more than 1000 revisions.
const MESSAGE: usize = 2 << 30;

/// Why a member can't be asked, or what it told isn't true any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("no endpoints: name one")]
    NoEndpoints,
    #[error("https endpoints are not supported by this version: name one of http://")]
    Https,
    #[error("is no URL of the form http://HOST:PORT ({0})")]
    Url(String),
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("{0}")]
    Refused(String),
    #[error("its answers have no header, so it is no etcd")]
    NoHeader,
    #[error("the watch was cancelled ({0})")]
    Cancelled(String),
    #[error("the history since revision {0} was compacted")]
    Compacted(i64),
    #[error("its history isn't the one that was read: it was restored or replaced")]
    Replaced,
    #[error("it has ended the watch")]
    Ended,
    /// With the endpoints.
    #[error("{0}")]
    Members(String),
}

impl Failure {
    /// Says whose failure it is.
    pub(super) fn of(self, member: &Member) -> Self {
        Self::Members(format!("{}: {self}", member.endpoint))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let Error::GRpcStatus(status) = &error else { return Self::Refused(error.to_string()) };
        // What says most is at the end of the chain: "Connection refused", not "tcp connect error".
        let mut source = std::error::Error::source(status);
        let mut deepest = String::new();
        while let Some(error) = source {
            deepest = error.to_string();
            source = error.source();
        }
        let message = if status.message().is_empty() { status.code().description() } else { status.message() };
        Self::Refused(if deepest.is_empty() || message.contains(&deepest) {
            message.to_owned()
        } else {
            format!("{message}: {deepest}")
        })
    }
}

/// The keys that are followed: from the first one to before `end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    first: Vec<u8>,
    end: Vec<u8>,
}

impl Keys {
    /// All keys that begin with `prefix`.
    pub(super) fn below(prefix: &str) -> Self {
        let first = prefix.as_bytes().to_vec();
        let mut end = first.clone();
        match end.last_mut() {
            // No byte of UTF-8 is 0xff.
            Some(byte) => *byte += 1,
            // To etcd, from zero to zero is all.
            None => return Self { first: vec![0], end: vec![0] },
        }
        Self { first, end }
    }
}

/// Where a cluster's history stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moment {
    /// Zero where a proxy of etcd doesn't tell.
    cluster: u64,
    revision: i64,
}

impl Moment {
    fn of(header: Option<&ResponseHeader>) -> Result<Self, Failure> {
        let header = header.ok_or(Failure::NoHeader)?;
        Ok(Self { cluster: header.cluster_id(), revision: header.revision() })
    }

    /// Takes a moment that must be a later one of the same history: revisions never go back, but in a cluster that was
    /// made anew or from a backup.
    fn check_later(self, later: Self) -> Result<Self, Failure> {
        let same = later.cluster == self.cluster || later.cluster == 0 || self.cluster == 0;
        if same && later.revision >= self.revision { Ok(later) } else { Err(Failure::Replaced) }
    }
}

/// A member that has answered.
pub(super) struct Member {
    endpoint: String,
    keys: Keys,
    kv: KvClient,
    watch: WatchClient,
    /// What its last good answer was true of.
    moment: Moment,
}

impl Member {
    /// The first of the members that answers. All are asked at once: dead ones cost no time.
    pub(super) async fn first(endpoints: &[String], keys: &Keys) -> Result<Self, Failure> {
        if endpoints.is_empty() {
            return Err(Failure::NoEndpoints);
        }
        let asked = endpoints
            .iter()
            .enumerate()
            .map(|(index, endpoint)| async move { (index, endpoint, Self::connect(endpoint, keys).await) });
        let mut answers: FuturesUnordered<_> = asked.collect();
        let mut failures = Vec::new();
        while let Some((index, endpoint, answer)) = answers.next().await {
            match answer {
                Ok(member) => return Ok(member),
                Err(failure) => failures.push((index, format!("{endpoint}: {failure}"))),
            }
        }
        // In the order of the configuration: the same state has the same words.
        failures.sort();
        let failures: Vec<String> = failures.into_iter().map(|(_, failure)| failure).collect();
        Err(Failure::Members(failures.join("; ")))
    }

    pub(super) async fn connect(endpoint: &str, keys: &Keys) -> Result<Self, Failure> {
        const HTTPS: &str = "https://";
        if endpoint.get(..HTTPS.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(HTTPS)) {
            return Err(Failure::Https);
        }
        // A member that has lost the others has old keys to tell, and says so if a leader is required.
        let options = ConnectOptions::new()
            .with_require_leader(true)
            .with_connect_timeout(REQUEST)
            .with_keep_alive(KEEP_ALIVE.0, KEEP_ALIVE.1)
            .with_keep_alive_while_idle(false);
        // Doesn't connect yet, so what fails here is the URL.
        let client =
            Client::connect([endpoint], Some(options)).await.map_err(|error| Failure::Url(error.to_string()))?;
        let mut member = Self {
            endpoint: endpoint.to_owned(),
            keys: keys.clone(),
            kv: client.kv_client().max_decoding_message_size(MESSAGE),
            watch: client.watch_client().max_decoding_message_size(MESSAGE),
            moment: Moment { cluster: 0, revision: 0 },
        };
        member.check(REQUEST).await?;
        Ok(member)
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Reads all texts as they are at one revision.
    pub(super) async fn read(&mut self) -> Result<Vec<Text>, Failure> {
        let mut texts = Vec::new();
        let mut from = self.keys.first.clone();
        // Of the first page zero, that is now; of the others the revision of the first one.
        let mut revision = 0;
        loop {
            let options = GetOptions::new().with_range(self.keys.end.clone()).with_limit(PAGE).with_revision(revision);
            let mut page = self.get(from, options, REQUEST).await?;
            let moment = self.moment.check_later(Moment::of(page.header())?)?;
            if revision == 0 {
                revision = moment.revision;
                self.moment = moment;
            }
            let more = page.more();
            let pairs = page.take_kvs();
            let last = pairs.last().map(|pair| pair.key().to_vec());
            texts.extend(pairs.into_iter().map(|pair| {
                let (key, value) = pair.into_key_value();
                text(&key, value)
            }));
            match last {
                Some(last) if more => from = [last, vec![0]].concat(),
                _ => return Ok(texts),
            }
        }
    }

    /// Watches what comes after what was read.
    ///
    /// Without fragments: the client doesn't tell which response is one. So a response is as large as it is, and never
    /// parts what happened at one revision.
    pub(super) async fn watch(&mut self) -> Result<Watch, Failure> {
        let options =
            WatchOptions::new().with_range(self.keys.end.clone()).with_start_revision(self.moment.revision + 1);
        let open = async {
            let stream = self.watch.watch(self.keys.first.clone(), Some(options)).await?;
            let mut watch = Watch { stream, began: self.moment };
            while !watch.next().await?.created() {}
            Ok(watch)
        };
        timeout(REQUEST, open).await.unwrap_or(Err(Failure::Silent(REQUEST)))
    }

    /// Waits until the member gives no good answers any more.
    ///
    /// A request tells more than the progress of a watch would: that there is a majority behind the member, and that it
    /// is the same history still. Proxies of etcd don't know progress requests.
    pub(super) async fn silence(&mut self) -> Failure {
        let mut heard = Instant::now();
        loop {
            sleep(CHECK).await;
            match self.check(ANSWER).await {
                Ok(()) => heard = Instant::now(),
                Err(Failure::Replaced) => return Failure::Replaced,
                Err(failure) if heard.elapsed() >= SILENCE => return failure,
                Err(failure) => tracing::debug!(endpoint = self.endpoint, %failure, "no good answer"),
            }
        }
    }

    /// Asks for little, but for something that takes a majority of the cluster.
    async fn check(&mut self, limit: Duration) -> Result<(), Failure> {
        let options = GetOptions::new().with_limit(1).with_keys_only();
        let answer = self.get(self.keys.first.clone(), options, limit).await?;
        let moment = self.moment.check_later(Moment::of(answer.header())?)?;
        self.moment = moment;
        Ok(())
    }

    async fn get(&mut self, key: Vec<u8>, options: GetOptions, limit: Duration) -> Result<GetResponse, Failure> {
        Ok(timeout(limit, self.kv.get(key, Some(options))).await.map_err(|_| Failure::Silent(limit))??)
    }
}

/// A watch of all keys.
pub(super) struct Watch {
    stream: WatchStream,
    /// What was read before it.
    began: Moment,
}

impl Watch {
    /// The next response; it may have no events.
    pub(super) async fn next(&mut self) -> Result<WatchResponse, Failure> {
        let response = self.stream.message().await?.ok_or(Failure::Ended)?;
        if response.compact_revision() > 0 {
            return Err(Failure::Compacted(self.began.revision));
        }
        if response.canceled() {
            return Err(Failure::Cancelled(response.cancel_reason().to_owned()));
        }
        self.began.check_later(Moment::of(response.header())?)?;
        Ok(response)
    }
}
