//! The gateway's side of membership: beats, keeps the lease alive, and tells who serves. A task that never waits for anybody but
//! the server; a server that is lost is looked for at once, since the lease runs meanwhile.

mod stream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use vipgate_dataplane::time::Tick;

use super::secret::Secret;
use super::view::{Fingerprint, TunnelKey, View, Wish};
use crate::config::PolicyServer;
use crate::xds::client::jittered;

/// How long a lease is thought to be until a server says it.
const USUAL_TTL: Duration = Duration::from_millis(600);
/// The first pause between attempts, and the longest: a lease outlasts both.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(200));
/// The pause after a refusal: what it is about takes people to mend.
const REFUSED: Duration = Duration::from_secs(1);
/// How often a server that knows nothing of membership is asked whether it does now.
const NO_SERVICE: Duration = Duration::from_secs(5);

/// Where leases go, and the clock that they are told by.
pub trait LeaseClock: Send + Sync {
    /// Now.
    fn now(&self) -> Tick;
    /// The lease is good until then, or longer.
    fn extend(&self, until: Tick);
}

/// Who beats, and where.
pub struct Plan {
    /// The gateway's name.
    pub name: Arc<str>,
    /// By which its process shows that it is this one: another one for each start.
    pub secret: Secret,
    /// That of the process before on this host.
    pub predecessor: Option<Secret>,
    /// The policy server.
    pub server: PolicyServer,
    /// Of the certificate that it shows other gateways.
    pub fingerprint: Fingerprint,
    /// The public half of the key of its tunnels.
    pub tunnel_key: TunnelKey,
    /// Where other gateways reach it.
    pub peer: Option<SocketAddr>,
    /// Where leases go.
    pub lease: Arc<dyn LeaseClock>,
}

/// Whether somebody says who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authority {
    /// Nobody was reached yet.
    Unknown,
    /// The server says that it is none: everybody serves.
    None,
    /// There is one, but it can't be heard now.
    Lost,
    /// There is one.
    Present,
}

/// How things stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Whether somebody says who serves.
    pub authority: Authority,
    /// What was said last; number 0: nothing.
    pub view: Arc<View>,
    /// How long a lease is, from when a beat is sent: so long after a view was made, nobody serves by the one before unless it
    /// has heard of the new one. Until the first lease, what is usual.
    pub ttl: Duration,
    /// Whether a lease has said so: until then, how long others wait for nobody knows.
    pub is_granted: bool,
}

/// What a gateway says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// What it wants.
    pub wish: Wish,
    /// Number of the view that it acts by.
    pub seen_view: u64,
    /// Why it can't do what it serves for, if it can't.
    pub unable: Option<Arc<str>>,
}

/// What the gateway says and hears. When `wish` is dropped, the client ends.
#[derive(Debug)]
pub struct Handle {
    /// What the gateway wants.
    pub wish: watch::Sender<Wanted>,
    /// How things stand.
    pub status: watch::Receiver<Status>,
    told: watch::Sender<Status>,
}

impl Handle {
    /// Another gateway says who serves, as the server told it. It counts only while the server can't be heard, and if it is news; says
    /// whether it does. So who is cut off learns who stands in for it.
    pub fn hear_elsewhere(&self, view: Arc<View>) -> bool {
        self.told.send_if_modified(|status| {
            let counts = status.authority == Authority::Lost && view.number > status.view.number;
            if counts {
                status.view = view;
            }
            counts
        })
    }
}

/// Beats for a gateway.
pub struct MembersClient {
    plan: Plan,
    wish: watch::Receiver<Wanted>,
    status: watch::Sender<Status>,
    /// Whether this server was ever heard.
    is_reached: bool,
    /// How long it may take until then.
    first_patience: Duration,
    pause: Duration,
    /// What was last logged of a server that can't be heard.
    complaint: Option<String>,
    /// When somebody who wants the same name was last logged.
    contested: Option<Instant>,
}

/// Why a stream has ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// Nobody wants to know any more.
    Abandoned,
    /// The server has no such service.
    NoService,
    /// The server won't have this gateway, and why.
    Refused(String),
    /// Another process has its name, and lives; where.
    InUse(String),
    /// Anything else.
    Lost(String),
}

impl MembersClient {
    /// A client that doesn't run yet.
    pub fn open(plan: Plan) -> (Self, Handle) {
        let (wish, wished) = watch::channel(Wanted::default());
        let status = Status { authority: Authority::Unknown, view: Arc::default(), ttl: USUAL_TTL, is_granted: false };
        let (status, told) = watch::channel(status);
        let handle = Handle { wish, status: told, told: status.clone() };
        let client = Self {
            plan,
            wish: wished,
            status,
            is_reached: false,
            first_patience: stream::FIRST_PATIENCE,
            pause: PAUSE.0,
            complaint: None,
            contested: None,
        };
        (client, handle)
    }

    /// Beats for as long as anybody wishes anything.
    pub async fn run(mut self) {
        loop {
            let end = match stream::follow(&mut self).await {
                // Whoever has said who serves doesn't take it back: something else answers at its address.
                End::NoService if self.is_reached => End::Lost("it knows nothing of leases any more".to_owned()),
                end => end,
            };
            let pause = match &end {
                End::Abandoned => return,
                End::NoService => NO_SERVICE,
                End::Refused(_) | End::InUse(_) => REFUSED,
                End::Lost(_) => jittered(self.pause),
            };
            self.tell(end);
            tokio::select! {
                () = sleep(pause) => {}
                () = is_abandoned(self.wish.clone()) => return,
            }
            self.pause = (self.pause * 2).min(PAUSE.1);
        }
    }

    /// Says what has become of the server.
    fn tell(&mut self, end: End) {
        let url = &self.plan.server.url;
        let was = self.status.borrow().authority;
        let is_in_use = matches!(end, End::InUse(_));
        let (now, why) = match end {
            End::Abandoned => return,
            End::NoService => (Authority::None, None),
            End::Refused(why) | End::InUse(why) | End::Lost(why) => {
                (if was == Authority::Present { Authority::Lost } else { was }, Some(why))
            }
        };
        match &why {
            None if was != Authority::None => tracing::info!(
                event = "authority_none",
                server = url,
                "the policy server knows nothing of leases: every gateway serves, and none takes over from another"
            ),
            Some(reason) if is_in_use && self.complaint != why => tracing::error!(
                event = "name_in_use",
                gateway = &*self.plan.name,
                server = url,
                reason,
                "this gateway may not have its name: {reason}"
            ),
            Some(reason) if self.complaint != why => {
                tracing::warn!(event = "authority_lost", server = url, reason, "who serves can't be asked");
            }
            _ => {}
        }
        self.complaint = why;
        self.set(|status| status.authority = now);
    }

    /// Changes the status; whoever watches it hears only of differences.
    fn set(&self, change: impl FnOnce(&mut Status)) {
        self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        });
    }
}

/// Waits until nobody can wish anything any more.
async fn is_abandoned(mut wish: watch::Receiver<Wanted>) {
    while wish.changed().await.is_ok() {}
}

#[cfg(test)]
mod tests;
