//! Role of this server among those that elect a leader: only the leader applies heartbeats and decides views.
//!
//! A leader takes over before it decides: from the write that this makes, no write of the leader before can succeed.

use std::future::pending;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::{Coordinator, HeartbeatError, Store, StreamEvent};
use crate::policyd::leader::Leadership;

/// Minimum interval of attempts to take over.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Role of a server.
pub(super) struct Role {
    /// Until when this server leads; `None`: there is no election, and each server decides.
    leadership: Option<watch::Receiver<Leadership>>,
    /// Until when it led when that was last looked at. A lead that ended meanwhile was possibly another server's.
    led_until: Option<Instant>,
    /// Whether it has taken over since it leads.
    has_taken_over: bool,
    /// Whether the state is that of a server that decides.
    was_decider: bool,
    /// When the next attempt to take over may begin.
    retry_at: Option<Instant>,
}

impl Role {
    pub(super) fn new(leadership: Option<watch::Receiver<Leadership>>) -> Self {
        Self { leadership, led_until: None, has_taken_over: false, was_decider: false, retry_at: None }
    }

    /// Whether this server may decide and grant leases now.
    pub(super) fn decides(&mut self) -> bool {
        self.leadership.is_none() || self.leads() && self.has_taken_over
    }

    /// Whether it leads.
    fn leads(&mut self) -> bool {
        let Some(leadership) = &mut self.leadership else { return true };
        let now = Instant::now();
        if self.led_until.is_some_and(|until| until <= now) {
            (self.led_until, self.has_taken_over) = (None, false);
        }
        let until = leadership.borrow_and_update().map(Instant::from_std).filter(|until| *until > now);
        self.has_taken_over &= until.is_some();
        self.led_until = until;
        until.is_some()
    }

    /// Waits until the lead begins, is renewed or ends.
    pub(super) async fn changed(&mut self) {
        let is_open = match &mut self.leadership {
            Some(leadership) => leadership.changed().await.is_ok(),
            None => false,
        };
        if !is_open {
            pending::<()>().await;
        }
    }
}

impl<S: Store> Coordinator<S> {
    /// Takes over if this server has begun to lead; whether it decides.
    pub(super) async fn take_role(&mut self) -> bool {
        if self.role.decides() {
            return true;
        }
        if std::mem::take(&mut self.role.was_decider) {
            // Its heartbeats are of the past: the next leader's aren't known here.
            self.state.restart(Instant::now().into_std());
            self.origins.clear();
            self.publish();
            tracing::info!(
                event = "membership_left",
                view = self.state.view().number,
                "another server decides membership"
            );
        }
        let is_early = self.role.retry_at.is_some_and(|at| Instant::now() < at);
        if is_early || !self.role.leads() {
            return false;
        }
        self.role.retry_at = Some(Instant::now() + RETRY_INTERVAL);
        match self.store.take_over().await {
            Ok(contents) => {
                let now = Instant::now().into_std();
                self.state.restart(now);
                self.state.load(now, contents.view);
                (self.role.has_taken_over, self.role.was_decider) = (true, true);
                self.log_outage(None);
                self.publish();
                tracing::info!(
                    event = "membership_taken",
                    view = self.state.view().number,
                    "this server decides membership"
                );
            }
            Err(error) => self.log_outage(Some(&error.into())),
        }
        self.role.decides()
    }

    /// Refuses the heartbeats of a batch: the gateways are to send them to the leader.
    pub(super) fn refuse(batch: impl Iterator<Item = StreamEvent>) {
        for event in batch {
            if let StreamEvent::Heartbeat(_, _, reply) = event {
                // The stream may have ended.
                let _ = reply.send(Err(HeartbeatError::NotLeader));
            }
        }
    }
}
