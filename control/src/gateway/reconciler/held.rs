//! Updates that wait for the steering program's maps. What can't be captured isn't in force: the update is held, not
//! acknowledged, and retried; the previous policy stays in force, and what new addresses send is dropped. Later updates
//! join the one that is held, so one that needs less room helps at once. An update whose second phase fails is
//! published, and acknowledged once the retry has written it.

use std::net::IpAddr;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;
use vipgate_xdp::steering::{Steering, SteeringChange, SteeringError, SteeringTables};

use super::{JobResult, Reconciler, check_local_addresses, rejection};
use crate::gateway::steering_tables;
use crate::gateway::steering_tables::PreviousTables;
use crate::state::capture::CaptureStatus;
use crate::xds::client::{Effect, Rejection, UpdateReply};
use crate::xds::store::PolicyUpdate;

/// How far an update has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// It waits for the maps; nothing is published.
    Held,
    /// The workers have it, but a write of the second phase has failed: what new endpoints send may still be dropped.
    Published,
    /// The maps have all of it.
    InForce,
}

impl Progress {
    fn result(self) -> JobResult {
        match self {
            Self::Held => JobResult::Capture,
            Self::Published | Self::InForce => JobResult::Policy,
        }
    }
}

impl Reconciler {
    /// Records whether the maps hold the initial policy. If they don't, the program is closed.
    pub(in crate::gateway) fn start(&mut self, programmed: Result<(), SteeringError>, reply: Option<UpdateReply>) {
        self.is_closed = programmed.is_err();
        self.record(programmed);
        let effect = if self.is_closed { self.hold() } else { Effect::InForce };
        // If the connection has closed, the server sends the update again.
        let _ = reply.map(|reply| reply.send(Ok(effect)));
    }

    /// Applies an update, with the one that is held. Returns what the job has done, and the reply. A rejected update
    /// changes nothing.
    pub(super) fn accept(&mut self, update: PolicyUpdate) -> Result<(JobResult, Effect), Rejection> {
        let update = match &self.held {
            None => update,
            Some(held) => combined(held.clone(), update),
        };
        check_local_addresses(&update.change, &self.local_addresses)?;
        self.builder.validate(&update.change).map_err(|error| rejection(&error))?;
        self.held = None;
        let progress = self.put_in_force(update)?;
        let effect = if progress == Progress::InForce { Effect::InForce } else { self.hold() };
        Ok((progress.result(), effect))
    }

    /// Retries what has failed.
    pub(super) fn retry(&mut self) -> JobResult {
        let Some(update) = self.held.take() else {
            let written = self.write_all();
            self.record(written);
            return JobResult::Capture;
        };
        match self.put_in_force(update) {
            Ok(progress) => progress.result(),
            Err(rejection) => {
                // Nothing that it was validated against has changed since.
                super::reject(&self.state, &rejection.to_string());
                JobResult::Policy
            }
        }
    }

    /// Captures what an update adds, and publishes it; or holds it.
    fn put_in_force(&mut self, update: PolicyUpdate) -> Result<Progress, Rejection> {
        let before = PreviousTables::of(&update.change, &self.builder);
        let captured = self.steering().extend(&before.to_capture(&update.change, &self.builder));
        if captured.is_err() {
            self.held = Some(update);
            self.record(captured);
            return Ok(Progress::Held);
        }
        Ok(if self.publish(update, before)? { Progress::InForce } else { Progress::Published })
    }

    /// Second phase of a published update: opens what it adds, and stops capturing what it removes. If that succeeds,
    /// all accepted updates are in force, which is reported; else the retry writes everything and reports it. Returns
    /// whether it has succeeded.
    pub(super) fn release(&mut self, change: &SteeringChange) -> bool {
        let released = if self.steering().needs_full_write() || self.is_closed {
            self.write_all()
        } else {
            self.steering().reduce(change)
        };
        let is_released = released.is_ok();
        self.record(released);
        if is_released {
            self.report_in_force();
        }
        is_released
    }

    /// Sets the addresses of the kernel in the maps.
    pub(super) fn set_local_addresses(&mut self, locals: Vec<IpAddr>) {
        let of = |these: &[IpAddr], others: &[IpAddr]| SteeringTables {
            local_addresses: these.iter().filter(|address| !others.contains(address)).copied().collect(),
            ..SteeringTables::default()
        };
        let change =
            SteeringChange { added: of(&locals, &self.local_addresses), removed: of(&self.local_addresses, &locals) };
        self.local_addresses = locals;
        let written = {
            let mut steering = self.steering();
            steering.extend(&change).and_then(|()| steering.reduce(&change))
        };
        self.record(written);
    }

    /// Writes all entries of the policy in force, and opens the program.
    fn write_all(&mut self) -> Result<(), SteeringError> {
        let policy = self.state.compiled.load_full();
        let tables = steering_tables::for_policy(&policy, &self.local_addresses, &self.tunnels);
        let mut steering = self.steering();
        steering.apply(&tables)?;
        if self.is_closed {
            steering.set_closed(false)?;
        }
        drop(steering);
        self.is_closed = false;
        self.report_in_force();
        Ok(())
    }

    /// Reports that all accepted updates are in force.
    fn report_in_force(&mut self) {
        for waiting in self.waiting.drain(..) {
            // Fails if the policy source has another connection since.
            let _ = waiting.send(());
        }
    }

    fn hold(&mut self) -> Effect {
        let (sender, receiver) = oneshot::channel();
        self.waiting.push(sender);
        Effect::Held(receiver)
    }

    fn steering(&self) -> MutexGuard<'_, Steering> {
        self.steering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the outcome of a write: logs changes, and schedules the retry.
    fn record(&mut self, written: Result<(), SteeringError>) {
        let status = self.state.capture.load_full();
        let (error, failures) = match written {
            Err(error) => {
                self.due = Some(Instant::now() + self.backoff.next_delay());
                (error.to_string(), status.failures + 1)
            }
            Ok(()) if self.held.is_some() || self.is_closed || self.steering().needs_full_write() => return,
            Ok(()) => {
                self.due = None;
                self.backoff.reset();
                if status.error.is_some() {
                    tracing::info!(event = "capture_complete", "the XDP program's maps hold all that policy needs");
                    self.state.capture.store(Arc::new(CaptureStatus { error: None, failures: status.failures }));
                }
                return;
            }
        };
        if status.error.is_none() {
            tracing::error!(
                event = "capture_incomplete",
                error,
                "the XDP program's maps can't take what policy needs, which is retried: {error}"
            );
        }
        self.state.capture.store(Arc::new(CaptureStatus { error: Some(error.into()), failures }));
    }
}

/// Two updates in a row as one.
fn combined(first: PolicyUpdate, next: PolicyUpdate) -> PolicyUpdate {
    PolicyUpdate {
        update_count: first.update_count + next.update_count,
        change: first.change.then(next.change),
        peers: next.peers,
    }
}

#[cfg(test)]
mod tests;
