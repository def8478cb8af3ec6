//! What the coordinator logs and counts: changes of active members, blocked drains, outages of the store.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Coordinator, HeartbeatError};
use crate::membership::authority::MembershipState;
use crate::membership::{DesiredState, DrainBlockReason, MembershipView};

/// Maximum number of gateways unknown to the policy that are tracked, so that each is logged once.
const MAX_UNKNOWN_GATEWAYS: usize = 1024;

impl<S> Coordinator<S> {
    /// Logs once that a gateway isn't in the policy. Not if the policy names no gateway at all: then each works alone.
    pub(super) fn log_unknown_gateway(&mut self, name: &Arc<str>) {
        let has_capacity = self.unknown_gateways.len() < MAX_UNKNOWN_GATEWAYS;
        if self.state.has_policy() && has_capacity && self.unknown_gateways.insert(name.clone()) {
            tracing::warn!(event = "gateway_unknown", gateway = %name,
                "the policy has no gateway {name}: it gets no lease; add a VipGateway manifest, or correct its `name`");
        }
    }

    /// Logs when the store becomes unavailable and when it works again.
    pub(super) fn log_outage(&mut self, error: Option<&HeartbeatError>) {
        let now = Instant::now().into_std();
        match error {
            Some(error) if self.outage.record_failure(now, &error.to_string()) => {
                tracing::error!(event = "leases_stopped", %error, "no leases are granted: {error}");
            }
            None if self.outage.record_recovery(now) => {
                tracing::info!(event = "leases_again", "leases are granted again");
            }
            _ => {}
        }
    }

    /// Logs when gateways know a later view than the record, and when this server goes on above it.
    pub(super) fn log_record(&self, previous: &MembershipState) {
        let view = self.state.view().number;
        match (previous.is_outdated(), self.state.is_outdated()) {
            (false, true) => tracing::error!(
                event = "record_outdated",
                view,
                known_view = self.state.used_number(),
                "the membership record was lost or is from a backup: gateways know a later view; this server decides \
                 nothing until all leases have expired that it can't know of"
            ),
            (true, false) => tracing::warn!(
                event = "record_renewed",
                view,
                term = self.state.stored_record().term,
                "all leases have expired that this server can't know of: it decides again, above what gateways know"
            ),
            _ => {}
        }
    }

    /// Logs and counts members that became active or inactive with the new view.
    pub(super) fn log_view_change(&self, previous: &MembershipView) {
        let view = self.state.view();
        for member in &view.members {
            let was_active = previous.member(&member.name).is_some_and(|old| old.serving);
            let (gateway, epoch) = (&*member.name, member.epoch);
            let is_draining =
                self.state.record(gateway).is_some_and(|record| record.desired_state == DesiredState::Draining);
            match (was_active, member.serving) {
                (false, true) => {
                    tracing::info!(event = "gateway_serves", gateway, epoch, view = view.number, "gateway is active");
                }
                (true, false) if member.unable.is_some() && !member.lease_expired => {
                    let reason = member.unable.as_deref();
                    tracing::warn!(
                        event = "gateway_unable",
                        gateway,
                        epoch,
                        view = view.number,
                        reason,
                        "gateway is inactive: it reports a fault, and others are active"
                    );
                }
                (true, false) if is_draining => {
                    tracing::info!(event = "gateway_drained", gateway, epoch, view = view.number, "gateway drained");
                }
                (true, false) => {
                    self.stats.lease_expiries.increment();
                    tracing::warn!(
                        event = "gateway_expired",
                        gateway,
                        epoch,
                        view = view.number,
                        "gateway is inactive: its heartbeats timed out, or another process has its name now"
                    );
                }
                (true, true) | (false, false) => {}
            }
        }
    }

    /// Logs drains that are refused or wait, and counts the refused ones, once each.
    pub(super) fn log_drain_blocks(&self, previous: &MembershipState) {
        for member in self.state.view().active_members() {
            let gateway = &*member.name;
            let Some(block) = self.state.drain_block(gateway) else { continue };
            let was_same = previous.drain_block(gateway).is_some_and(|before| before.reason == block.reason);
            if was_same {
                continue;
            }
            let others = block.gateways.join(", ");
            match block.reason {
                DrainBlockReason::NoBackup => {
                    self.stats.drains_refused.increment();
                    tracing::warn!(
                        event = "drain_refused",
                        gateway,
                        others,
                        "the drain of {gateway} is refused: no other active gateway without a fault could take over \
                         some of its shards; inactive, or with a fault: {others}"
                    );
                }
                DrainBlockReason::BecomingActive => tracing::info!(
                    event = "drain_waits",
                    gateway,
                    others,
                    "the drain of {gateway} waits until {others} is active"
                ),
                DrainBlockReason::MaxUnavailable(max_unavailable) => tracing::info!(
                    event = "drain_waits",
                    gateway,
                    others,
                    max_unavailable,
                    "the drain of {gateway} waits: membership.max_unavailable permits {max_unavailable}, and these \
                     gateways are unavailable: {others}"
                ),
            }
        }
    }
}
