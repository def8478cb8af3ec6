//! Membership in the control loop: publishes to the workers what the group decides.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::policy::members::MembersSpec;

use super::ControlLoop;
use crate::gateway::group::Group;
use crate::gateway::reconciler::{Job, JobResult};

/// Maximum wait at startup for the membership authority.
const MEMBERSHIP_TIMEOUT: Duration = Duration::from_secs(2);

/// The group, and what was published of it.
pub(in crate::gateway) struct Membership {
    pub(super) group: Group,
    /// The membership that was published to the workers.
    published: MembersSpec,
    /// The replication epoch of the latest snapshot.
    replication_epoch: u64,
    /// The membership, or the policy that names its members, has changed.
    pub(super) is_due: bool,
}

impl Membership {
    /// Membership at startup.
    pub(in crate::gateway) fn new(group: Group, published: MembersSpec) -> Self {
        Self { group, published, replication_epoch: 0, is_due: false }
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
        let Membership { group, published, is_due, .. } = &mut self.membership;
        if !*is_due || !self.reconciler.is_idle() {
            return;
        }
        *is_due = false;
        group.set_policy(&self.state.policy.load().peers, &self.state.compiled.load());
        let spec = group.update(Instant::now());
        group.give_up_refused_drain(|| self.state.placement.get());
        if spec != *published {
            self.reconciler.start(Job::Members(spec));
        } else if group.has_unapplied_view() {
            group.mark_pending(false);
        }
        if group.is_pending() && self.reconciler.is_converged() {
            group.mark_applied();
            // A view that has come meanwhile, and changes nothing.
            *is_due = group.has_unapplied_view();
        }
        group.publish_desired_state();
        group.log_lease_changes();
        self.state.group.store(Arc::new(group.status(published)));
    }

    /// Records what a job has published.
    pub(super) fn record_result(&mut self, result: JobResult) {
        let Membership { group, published, replication_epoch, is_due } = &mut self.membership;
        // A new replication epoch: other replica targets than before need a full sync, be it due to a view or to
        // policy.
        let epoch = self.state.compiled.load().members().replication_epoch();
        let is_new_epoch = std::mem::replace(replication_epoch, epoch) != epoch;
        match result {
            // Peers wait for what the new policy gives to them.
            JobResult::Policy => {
                published.gateways.iter_mut().for_each(|member| member.policy_release.forget());
                group.mark_pending(is_new_epoch);
            }
            JobResult::Members(spec) => {
                let needs_sync = is_new_epoch || active(&spec) != active(published);
                tracing::info!(event = "group", serving = ?active(&spec), "membership changed");
                *published = spec;
                group.mark_pending(needs_sync);
            }
            JobResult::Network | JobResult::Capture => return,
        }
        *is_due = true;
        if let Some(log) = &self.nat_log {
            log.set_policy(&self.state.compiled.load_full());
        }
        self.advertise();
    }
}

/// Names of the active members.
fn active(spec: &MembersSpec) -> Vec<&str> {
    spec.gateways.iter().filter(|member| member.active).map(|member| &*member.name).collect()
}
