//! The gateway's side of the policy protocol: follows a server, offers what it says to the gateway, and answers the server
//! when that is in force, or why it isn't. Ends when nobody wants offers any more.

mod connect;
mod crowd;
mod stream;

pub use self::connect::chain;
pub(crate) use self::connect::connect_watched;
pub use self::crowd::PACE;
pub(crate) use self::stream::explain;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot};

use super::book::{Book, Offer};
use super::cache::{Cache, Found};
use crate::config::PolicyServer;
use crate::policy::Viewer;

/// The first pause between attempts, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// The same after a response that is too large: the next one will be as large, and costs both sides as much.
const PAUSE_TOO_LARGE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_mins(2));
/// A connection that held for so long was a good one: the next pause is short again.
const GOOD: Duration = Duration::from_secs(30);

/// What the client tells the gateway.
#[derive(Debug)]
pub enum Event {
    /// Something to put in force.
    Offer(Box<Offer>, Answer),
    /// The server said something that can't be put in force, and why.
    Refused(String),
}

/// Whether an offer is in force now.
pub type Answer = oneshot::Sender<Result<(), Rejection>>;

/// Why an offer isn't put in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The resource at fault as people name it, if it is one's.
    pub resource: Option<String>,
    /// What is wrong.
    pub reason: String,
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(resource) = &self.resource {
            write!(f, "resource {resource}: ")?;
        }
        f.write_str(&self.reason)
    }
}

/// How things stand with the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerStatus {
    /// Whether it can be heard.
    pub connected: bool,
    /// Since when that is so.
    pub since: SystemTime,
    /// Why it can't be heard.
    pub error: Option<String>,
    /// When the policy in force was last known to be the server's.
    pub known_at: Option<SystemTime>,
    /// Why there is no cache; empty while there is one.
    pub cache_error: Option<String>,
}

/// Why a stream has ended.
#[derive(Debug)]
enum End {
    /// The server refuses this gateway, which takes people to mend.
    Refused(String),
    /// A response is larger than what a gateway takes.
    TooLarge(String),
    /// Anything else.
    Lost(String),
}

impl End {
    fn reason(&self) -> &str {
        match self {
            Self::Refused(reason) | Self::TooLarge(reason) | Self::Lost(reason) => reason,
        }
    }
}

impl From<String> for End {
    fn from(reason: String) -> Self {
        Self::Lost(reason)
    }
}

/// Follows one server.
#[derive(Debug)]
pub struct Client {
    /// The gateway.
    viewer: Viewer,
    /// Its process: another number for each start.
    incarnation: u64,
    server: PolicyServer,
    book: Book,
    /// None where it can't be had: the gateway serves all the same, and says that nothing would outlast it.
    cache: Option<Cache>,
    status: Arc<ArcSwap<ServerStatus>>,
    events: mpsc::Sender<Event>,
}

impl Client {
    /// A client, and the policy that its cache knows. What goes wrong with the cache is logged and told by the status.
    pub fn open(viewer: Viewer, server: PolicyServer, events: mpsc::Sender<Event>) -> (Self, Option<Offer>) {
        let (cache, found, cache_error) = match Cache::open(&server.cache) {
            Ok((cache, found)) => (Some(cache), found, None),
            Err(error) => {
                let error = error.to_string();
                tracing::error!(
                    event = "policy_cache_failed",
                    error,
                    "policy would not outlive a restart without the server"
                );
                (None, Found::Nothing, Some(error))
            }
        };
        let mut status = ServerStatus {
            connected: false,
            since: SystemTime::now(),
            error: Some("not connected yet".to_owned()),
            known_at: None,
            cache_error,
        };
        let mut book = Book::default();
        let damaged = match found {
            Found::Nothing => None,
            Found::Damaged(reason) => Some(reason),
            Found::Policy(held, known_at) => match book.stage_held(held) {
                Ok(()) => {
                    status.known_at = Some(known_at);
                    None
                }
                Err(refusal) => Some(refusal.to_string()),
            },
        };
        let status = Arc::new(ArcSwap::from_pointee(status));
        // Without random numbers the moment tells processes apart.
        let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let incarnation = getrandom::u64().unwrap_or(moment.as_nanos() as u64);
        let mut client = Self { viewer, incarnation, server, book, cache, status, events };
        if let Some(reason) = damaged {
            client.forget(&reason);
            return (client, None);
        }
        let offer = client.book.has_staged().then(|| client.book.offer(&client.viewer));
        client.book.commit();
        (client, offer)
    }

    /// How things stand with the server, now and later.
    pub fn status(&self) -> Arc<ArcSwap<ServerStatus>> {
        self.status.clone()
    }

    /// Forgets the policy that the cache knew: it is damaged, or can't be put in force.
    pub fn forget(&mut self, reason: &str) {
        let file = self.server.cache.display().to_string();
        tracing::error!(
            event = "policy_cache_damaged",
            file,
            reason,
            "the policy cache can't be relied on: it is ignored"
        );
        self.book = Book::default();
        // The next update must not be added to what was there.
        if let Some(cache) = &mut self.cache {
            cache.forget();
        }
        self.change_status(|status| {
            status.known_at = None;
            status.cache_error = Some(format!("{file} was ignored: {reason}"));
        });
    }

    /// Follows the server for as long as anybody wants to hear of it.
    pub async fn run(mut self) {
        let (mut pause, mut pause_too_large) = (PAUSE.0, PAUSE_TOO_LARGE.0);
        while !self.events.is_closed() {
            let begun = Instant::now();
            let end = stream::follow(&mut self).await;
            self.book.discard();
            let is_news = self.status.load().connected || self.status.load().error.as_deref() != Some(end.reason());
            let (server, reason) = (&self.server.url, end.reason());
            match &end {
                _ if !is_news => {}
                End::Refused(_) => tracing::error!(
                    event = "policy_server_refuses",
                    server,
                    reason,
                    "the policy server refuses this gateway: {reason}"
                ),
                End::TooLarge(_) => tracing::error!(
                    event = "policy_response_too_large",
                    server,
                    reason,
                    "the policy can't be taken: {reason}"
                ),
                End::Lost(_) if self.status.load().connected => {
                    tracing::warn!(event = "policy_server_lost", server, reason, "policy server lost");
                }
                End::Lost(_) => {
                    tracing::warn!(
                        event = "policy_server_unreachable",
                        server,
                        reason,
                        "policy server can't be reached"
                    );
                }
            }
            let (next, longest) = match end {
                End::TooLarge(_) => (&mut pause_too_large, PAUSE_TOO_LARGE.1),
                End::Refused(_) | End::Lost(_) => {
                    if begun.elapsed() > GOOD {
                        (pause, pause_too_large) = (PAUSE.0, PAUSE_TOO_LARGE.0);
                    }
                    (&mut pause, PAUSE.1)
                }
            };
            self.lost(end.reason().to_owned());
            let events = self.events.clone();
            tokio::select! {
                () = tokio::time::sleep(jittered(*next)) => {}
                () = events.closed() => return,
            }
            *next = (*next * 2).min(longest);
        }
    }

    fn lost(&self, why: String) {
        self.change_status(|status| {
            if status.connected {
                status.since = SystemTime::now();
            }
            status.connected = false;
            status.error = Some(why);
        });
    }

    fn change_status(&self, change: impl FnOnce(&mut ServerStatus)) {
        let mut status = (**self.status.load()).clone();
        change(&mut status);
        self.status.store(Arc::new(status));
    }
}

/// Between a half and all of a pause: many gateways that lost one server at once don't come back at once.
pub(crate) fn jittered(pause: Duration) -> Duration {
    // Without random numbers the pause is what it is.
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause / 2 + (pause / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests;
