//! Membership in the control loop: publishes to the workers what the group decides.

use std::sync::Arc;
use std::time::Duration;

use super::ControlLoop;
use crate::gateway::group::Group;
use crate::gateway::reconciler::{Job, JobResult};
use crate::membership::member::{PolicyState, Snapshot, active_members};

/// Maximum wait at startup for the membership authority.
const MEMBERSHIP_TIMEOUT: Duration = Duration::from_secs(2);

/// The group.
pub(in crate::gateway) struct Membership {
    pub(super) group: Group,
    /// The membership, or the policy that names its members, has changed.
    pub(super) is_due: bool,
}

impl Membership {
    /// Membership at startup.
    pub(in crate::gateway) fn new(group: Group) -> Self {
        Self { group, is_due: false }
    }
}

impl ControlLoop {
    /// Waits until the membership authority has responded, or [`MEMBERSHIP_TIMEOUT`] has passed.
    pub(super) async fn await_membership(&mut self) {
        if let Some(reconciler) = self.reconciler.idle() {
            reconciler.announce(None);
        }
        let deadline = tokio::time::Instant::now() + MEMBERSHIP_TIMEOUT;
        loop {
            self.membership.is_due = true;
            self.update_membership_if_due();
            while !self.reconciler.is_idle() {
                let result = self.reconciler.completed().await;
                self.record_result(result);
            }
            let group = &mut self.membership.group;
            if !group.is_authority_unknown() || tokio::time::timeout_at(deadline, group.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Updates the membership if it may have changed and no job is running.
    pub(super) fn update_membership_if_due(&mut self) {
        if !self.membership.is_due || !self.reconciler.is_idle() {
            return;
        }
        self.membership.is_due = false;
        let policy = {
            let (policy, compiled) = (self.state.policy.load(), self.state.compiled.load());
            let (version, awaits_release) = (compiled.version().into(), compiled.awaits_policy_release());
            PolicyState { gateways: policy.peers.clone(), version, awaits_release }
        };
        let is_converged = self.reconciler.is_converged();
        let group = &mut self.membership.group;
        if let Some(spec) = group.observe(policy, is_converged, || self.state.placement.get()) {
            self.reconciler.start(Job::Members(spec));
        }
        group.log_lease_changes();
        self.state.group.store(Arc::new(group.status()));
    }

    /// Records what a job has published.
    pub(super) fn record_result(&mut self, result: JobResult) {
        let snapshot = match result {
            JobResult::Policy => Snapshot::Policy,
            JobResult::Members(spec) => {
                tracing::info!(event = "group", serving = ?active_members(&spec), "membership changed");
                Snapshot::Members(spec)
            }
            JobResult::Network | JobResult::Capture => Snapshot::Other,
        };
        let is_other = matches!(snapshot, Snapshot::Other);
        self.membership.group.published(snapshot, self.state.compiled.load().members().replication_epoch());
        if is_other {
            return;
        }
        self.membership.is_due = true;
        if let Some(log) = &self.nat_log {
            log.set_policy(&self.state.compiled.load_full());
        }
        self.advertise();
    }
}
