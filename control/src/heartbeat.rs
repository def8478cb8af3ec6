//! Membership client of a gateway: sends heartbeats, renews the lease, publishes the membership view. A lost connection
//! is re-established at once, since the lease runs meanwhile. Of several servers one alone decides, and the others refuse
//! heartbeats: they are tried in turn. If none is reachable at the start, the last view of the previous process counts.

use crate::membership::status::{Authority, MembershipStatus};
mod stream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use vipgate_common::{Backoff, MinInterval};
use vipgate_dataplane::flow::time::Tick;

use crate::config::PolicyServer;
use crate::membership::secret::Secret;
use crate::membership::view::{DesiredState, Fingerprint, MembershipView, TunnelKey};
use crate::xds::client::{Attempts, Target};

/// TTL of leases until the server has granted one.
const DEFAULT_TTL: Duration = Duration::from_millis(600);
/// Delay between connection attempts: a lease outlasts it.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(200));
/// Delay after a rejection, whose cause an operator must fix.
const REJECTED_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Delay after connecting to a server without the membership service.
const NO_SERVICE_RETRY_DELAY: Duration = Duration::from_secs(5);

/// Receiver of leases, and their clock.
pub trait LeaseClock: Send + Sync {
    /// The current time.
    fn now(&self) -> Tick;
    /// Extends the lease to this time; never shortens it.
    fn extend(&self, until: Tick);
}

/// Configuration of the client.
pub struct ClientConfig {
    /// The gateway's name.
    pub name: Arc<str>,
    /// Secret that proves the identity of this process; a new one for each start.
    pub secret: Secret,
    /// Secret of the previous process on this host.
    pub predecessor: Option<Secret>,
    /// The policy server, or several of which one decides.
    pub server: PolicyServer,
    /// Fingerprint of the certificate for connections between gateways.
    pub fingerprint: Fingerprint,
    /// Public key of its tunnels.
    pub tunnel_key: TunnelKey,
    /// Address where other gateways reach it.
    pub peer: Option<SocketAddr>,
    /// Address and UDP port where it ends VXLAN tunnels of nodes.
    pub overlay: Option<SocketAddr>,
    /// The membership when the previous process on this host has ended.
    pub former: Option<FormerMembership>,
    /// Receiver of leases.
    pub lease: Arc<dyn LeaseClock>,
}

/// Membership that the previous process has had from the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerMembership {
    /// The last view.
    pub view: Arc<MembershipView>,
    /// Duration of a lease.
    pub ttl: Duration,
}

/// State that a gateway reports in heartbeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedState {
    /// The state that it requests.
    pub desired_state: DesiredState,
    /// Number of the view that it has applied.
    pub seen_view: u64,
    /// Its fault, if it has one.
    pub unable: Option<Arc<str>>,
    /// Version of the policy that it has in force.
    pub policy_version: Option<Arc<str>>,
    /// Number of its active sessions.
    pub sessions: u64,
}

/// Handle of the client. When `reported` is dropped, the client ends.
#[derive(Debug)]
pub struct ClientHandle {
    /// The state to report.
    pub reported: watch::Sender<ReportedState>,
    /// The current membership.
    pub status: watch::Receiver<MembershipStatus>,
    status_sender: watch::Sender<MembershipStatus>,
}

impl ClientHandle {
    /// Applies a view that another gateway has relayed from the server; whether it was applied. Only while the server
    /// is unreachable, and if the view is newer: so a gateway cut off from the server learns which gateway has taken
    /// its place.
    pub fn apply_relayed_view(&self, view: Arc<MembershipView>) -> bool {
        self.status_sender.send_if_modified(|status| {
            let is_applied = status.authority == Authority::Unreachable && view.number > status.view.number;
            if is_applied {
                status.view = view;
            }
            is_applied
        })
    }
}

/// Membership client of a gateway.
pub struct HeartbeatClient {
    config: ClientConfig,
    reported: watch::Receiver<ReportedState>,
    status: watch::Sender<MembershipStatus>,
    /// Whether this server was ever reached, by this process or its predecessor.
    was_reached: bool,
    /// Timeouts of connections until then.
    connect_timeout: Backoff,
    attempts: Attempts,
    /// Errors since the servers were last tried from the first one on.
    round_errors: Vec<String>,
    /// Log lines about rivals for the gateway's name.
    contested: MinInterval,
}

/// Why a stream has ended.
#[derive(Debug, PartialEq, Eq)]
enum StreamEnd {
    /// The handle was dropped.
    ClientClosed,
    /// The server has no membership service.
    NoService,
    /// The server rejects this gateway, with the reason.
    Rejected(String),
    /// Another live process has the name, with the server's message.
    NameInUse(String),
    /// Any other error.
    Disconnected(String),
}

impl HeartbeatClient {
    /// Creates a client and its handle; `run` starts it.
    pub fn open(config: ClientConfig) -> (Self, ClientHandle) {
        let (report_sender, report_receiver) = watch::channel(ReportedState::default());
        let status = MembershipStatus {
            authority: Authority::Unknown,
            view: Arc::default(),
            ttl: DEFAULT_TTL,
            is_ttl_confirmed: false,
            drain_block: None,
        };
        let (status_sender, status_receiver) = watch::channel(status);
        let handle =
            ClientHandle { reported: report_sender, status: status_receiver, status_sender: status_sender.clone() };
        let client = Self {
            attempts: Attempts::new(&config.server, RETRY_DELAY),
            was_reached: config.former.is_some(),
            config,
            reported: report_receiver,
            status: status_sender,
            connect_timeout: Backoff::new(stream::TIMEOUT_RANGE),
            round_errors: Vec::new(),
            contested: MinInterval::default(),
        };
        (client, handle)
    }

    /// Sends heartbeats until the handle is dropped.
    pub async fn run(mut self) {
        loop {
            let target = self.attempts.next().await;
            let end = match stream::run_stream(&mut self, &target).await {
                // A server that was the authority stays so: some other server answers at its address.
                StreamEnd::NoService if self.was_reached => {
                    StreamEnd::Disconnected("the server has no membership service any more".to_owned())
                }
                end => end,
            };
            let delay = match &end {
                StreamEnd::ClientClosed => return,
                StreamEnd::NoService => NO_SERVICE_RETRY_DELAY,
                StreamEnd::Rejected(_) | StreamEnd::NameInUse(_) => REJECTED_RETRY_DELAY,
                StreamEnd::Disconnected(_) if self.attempts.has_more() => Duration::ZERO,
                StreamEnd::Disconnected(_) => self.attempts.next_delay(),
            };
            self.report_end(end, &target);
            tokio::select! {
                () = sleep(delay) => {}
                () = handle_dropped(self.reported.clone()) => return,
            }
        }
    }

    /// Logs the end of a stream and updates the authority's state.
    fn report_end(&mut self, end: StreamEnd, server: &Target) {
        let previous = self.status.borrow().authority;
        // A server that rejects this gateway is there, and decides.
        let is_away = matches!(end, StreamEnd::Disconnected(_)) && !self.attempts.has_more();
        let former = self.config.former.take_if(|_| previous == Authority::Unknown && is_away);
        let authority = match end {
            StreamEnd::NoService => Authority::None,
            _ if previous == Authority::Reachable || former.is_some() => Authority::Unreachable,
            _ => previous,
        };
        match end {
            StreamEnd::ClientClosed => return,
            StreamEnd::NoService => {
                self.attempts.clear_logged();
                if previous != Authority::None {
                    tracing::info!(
                        event = "authority_none",
                        %server,
                        "the policy server has no membership service: every gateway is active, without failover"
                    );
                }
            }
            StreamEnd::NameInUse(reason) if self.attempts.is_new(&reason) => tracing::error!(
                event = "name_in_use",
                gateway = &*self.config.name,
                %server,
                reason,
                "the policy server rejects this gateway's name: {reason}"
            ),
            StreamEnd::NameInUse(_) => {}
            StreamEnd::Rejected(reason) => self.log_loss(server, &reason),
            StreamEnd::Disconnected(reason) => {
                if !self.round_errors.contains(&reason) {
                    self.round_errors.push(reason);
                }
                // That one of several servers doesn't lead, or is dead, matters only if no other one accepts heartbeats.
                if previous == Authority::Reachable || !self.attempts.has_more() {
                    let reason = std::mem::take(&mut self.round_errors).join("; ");
                    self.log_loss(server, &reason);
                }
            }
        }
        if let Some(FormerMembership { view, .. }) = &former {
            tracing::warn!(
                event = "place_taken",
                view = view.number,
                "the membership service is unreachable: this gateway takes the place of its previous process, by the \
                 last view that this one had, as far as other gateways accept it"
            );
        }
        self.update_status(|status| {
            status.authority = authority;
            status.drain_block = None;
            if let Some(FormerMembership { view, ttl }) = former {
                (status.view, status.ttl, status.is_ttl_confirmed) = (view, ttl, true);
            }
        });
    }

    fn log_loss(&mut self, server: &Target, reason: &str) {
        if self.attempts.is_new(reason) {
            tracing::warn!(event = "authority_lost", %server, reason, "the membership service is unreachable");
        }
    }

    /// Changes the status; watchers are notified only if it differs.
    fn update_status(&self, change: impl FnOnce(&mut MembershipStatus)) {
        self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        });
    }
}

/// Waits until the handle is dropped.
async fn handle_dropped(mut reports: watch::Receiver<ReportedState>) {
    while reports.changed().await.is_ok() {}
}

#[cfg(test)]
mod tests;
