//! Role of this server: only the one that leads applies heartbeats and decides views.
//!
//! It takes over before it decides: from the write that this makes, no write of the server before can succeed. A server
//! that shares its record with no other one leads always.

use std::future::pending;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::{Coordinator, HeartbeatError, RecordStore, StreamEvent};
use crate::policyd::leader::Leadership;

/// Minimum interval of attempts to take over.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Role of a server.
pub(super) struct Role {
    /// Until when this server leads; `None`: there is no election.
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

impl<S: RecordStore> Coordinator<S> {
    /// Whether this server may decide and grant leases now.
    pub(super) fn decides(&mut self) -> bool {
        self.role.leads() && self.role.has_taken_over && self.records.is_in_term()
    }

    /// Takes over if this server has begun to lead, or doesn't know what its last write has done; whether it decides.
    pub(super) async fn take_role(&mut self) -> bool {
        if self.decides() {
            return true;
        }
        let leads = self.role.leads();
        let continues = leads && self.role.has_taken_over;
        if !continues {
            self.leave_role();
        }
        let is_early = self.role.retry_at.is_some_and(|at| Instant::now() < at);
        if is_early || !leads {
            return false;
        }
        self.role.retry_at = Some(Instant::now() + RETRY_INTERVAL);
        match self.records.take_over().await {
            Ok(start) => {
                // Nobody else has decided meanwhile, so all heartbeats were received here.
                if !(continues && self.state.continue_term(&start.record, start.previous_term)) {
                    self.state.begin_term(&start.record);
                    self.origins.clear();
                }
                (self.role.has_taken_over, self.role.was_decider) = (true, true);
                self.log_outage(None);
                self.publish();
                let (term, view) = (start.record.term, self.state.view().number);
                tracing::info!(event = "membership_taken", term, view, "this server decides membership");
            }
            Err(error) => self.log_outage(Some(&error.into())),
        }
        self.decides()
    }

    /// Another server decides, if this one did before.
    fn leave_role(&mut self) {
        if std::mem::take(&mut self.role.was_decider) {
            // Its heartbeats are of the past: the next server's aren't known here.
            self.state.leave_term();
            self.origins.clear();
            self.publish();
            let view = self.state.view().number;
            tracing::info!(event = "membership_left", view, "another server decides membership");
        }
    }

    /// When the next attempt to take over is due, if this server leads and doesn't decide.
    pub(super) fn take_over_at(&mut self) -> Option<Instant> {
        (self.role.leads() && !self.decides()).then(|| self.role.retry_at.unwrap_or_else(Instant::now))
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
