//! Membership client of a gateway: sends heartbeats, renews the lease, publishes the membership view. A lost connection
//! is re-established at once, since the lease runs meanwhile. Of several servers one alone decides, and the others refuse
//! heartbeats: they are tried in turn. What heartbeats say and what replies mean is decided by `membership::heartbeat`.

mod stream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::sleep;
use vipgate_common::MinInterval;
use vipgate_dataplane::flow::time::Tick;

use crate::config::PolicyServer;
use crate::membership::heartbeat::{Client, Ended, Retry};
pub use crate::membership::heartbeat::{FormerMembership, ReportedState};
use crate::membership::secret::Secret;
use crate::membership::status::MembershipStatus;
use crate::membership::view::{DesiredState, Fingerprint, Heartbeat, MembershipView, TunnelKey};
use crate::xds::client::{Attempts, Target};

/// Delay between connection attempts: a lease outlasts it.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(200));
/// Minimum interval between log lines about rivals for this gateway's name.
const CONTESTED_LOG_INTERVAL: Duration = Duration::from_secs(10);

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
        self.status_sender.send_if_modified(|status| status.apply_relayed_view(view))
    }
}

/// Membership client of a gateway.
pub struct HeartbeatClient {
    config: ClientConfig,
    decisions: Client,
    reported: watch::Receiver<ReportedState>,
    status: watch::Sender<MembershipStatus>,
    attempts: Attempts,
    /// Log lines about rivals for the gateway's name.
    contested: MinInterval,
}

impl HeartbeatClient {
    /// Creates a client and its handle; `run` starts it.
    pub fn open(mut config: ClientConfig) -> (Self, ClientHandle) {
        let (report_sender, report_receiver) = watch::channel(ReportedState::default());
        let (status_sender, status_receiver) = watch::channel(MembershipStatus::default());
        let handle =
            ClientHandle { reported: report_sender, status: status_receiver, status_sender: status_sender.clone() };
        let client = Self {
            attempts: Attempts::new(&config.server, RETRY_DELAY),
            decisions: Client::new(Instant::now(), config.identity(), config.former.take()),
            config,
            reported: report_receiver,
            status: status_sender,
            contested: MinInterval::default(),
        };
        (client, handle)
    }

    /// Sends heartbeats until the handle is dropped.
    pub async fn run(mut self) {
        loop {
            let target = self.attempts.next().await;
            let Some(end) = stream::run_stream(&mut self, &target).await else { return };
            let has_more = self.attempts.has_more();
            let decisions = &mut self.decisions;
            let mut ended = Ended::default();
            update_status(&self.status, |status| ended = decisions.ended(end, has_more, status));
            let delay = match ended.retry {
                Retry::NextServer => Duration::ZERO,
                Retry::Backoff => self.attempts.next_delay(),
                Retry::After(delay) => delay,
            };
            self.log_end(&ended, &target);
            tokio::select! {
                () = sleep(delay) => {}
                () = handle_dropped(self.reported.clone()) => return,
            }
        }
    }

    fn log_end(&mut self, ended: &Ended, server: &Target) {
        let Ended { retry: _, has_no_service, is_view_fixed, lost, name_in_use, place_taken } = ended;
        if *has_no_service {
            self.attempts.clear_logged();
        }
        if *is_view_fixed {
            tracing::info!(
                event = "view_fixed",
                %server,
                "the policy server offers no views: the gateways of the policy are a fixed one, every gateway is active, \
                 without failover"
            );
        }
        if let Some(reason) = name_in_use.as_deref().filter(|reason| self.attempts.is_new(reason)) {
            tracing::error!(
                event = "name_in_use",
                gateway = &*self.config.name,
                %server,
                reason,
                "the policy server rejects this gateway's name: {reason}"
            );
        }
        if let Some(reason) = lost.as_deref().filter(|reason| self.attempts.is_new(reason)) {
            tracing::warn!(event = "authority_lost", %server, reason, "the membership service is unreachable");
        }
        if let Some(view) = place_taken {
            tracing::warn!(
                event = "place_taken",
                view,
                "the membership service is unreachable: this gateway takes the place of its previous process, by the \
                 last view that this one had, as far as other gateways accept it"
            );
        }
    }

    /// Logs that another process, at this address, tries to use the gateway's name; empty: none does.
    fn log_rival(&mut self, rival: &str) {
        if rival.is_empty() || self.contested.due(CONTESTED_LOG_INTERVAL, Instant::now()).is_none() {
            return;
        }
        let gateway = &*self.config.name;
        tracing::warn!(
            event = "name_contested",
            gateway,
            address = rival,
            "another process, at {rival}, tries to use the name of gateway {gateway}; the policy server rejects it"
        );
    }
}

impl ClientConfig {
    /// What all heartbeats say about the process.
    fn identity(&self) -> Heartbeat {
        Heartbeat {
            commitment: self.secret.commitment(),
            fingerprint: Some(self.fingerprint),
            peer: self.peer,
            tunnel_key: Some(self.tunnel_key),
            overlay: self.overlay,
            ..Heartbeat::minimal(&self.name, self.secret.incarnation(), DesiredState::default(), 0)
        }
    }
}

/// Changes the status; watchers are notified only if it differs.
fn update_status(status: &watch::Sender<MembershipStatus>, change: impl FnOnce(&mut MembershipStatus)) {
    status.send_if_modified(|status| {
        let before = status.clone();
        change(status);
        *status != before
    });
}

/// Waits until the handle is dropped.
async fn handle_dropped(mut reports: watch::Receiver<ReportedState>) {
    while reports.changed().await.is_ok() {}
}

#[cfg(test)]
mod tests;
