//! Status of this gateway within its group.

use std::sync::Arc;

use vipgate_dataplane::policy::members::MembersSpec;

use crate::membership::status::Authority;
use crate::membership::{DrainBlock, MembershipView};
use crate::peer::PeersStatus;
use crate::state::lease::{GroupLease, LeaseStatus};

/// Status of the group, for the admin socket and metrics.
#[derive(Clone, Debug, Default)]
pub struct GroupStatus {
    /// The membership authority.
    pub authority: Option<Authority>,
    /// The latest membership view.
    pub view: Arc<MembershipView>,
    /// Status of the peer links.
    pub links: Arc<PeersStatus>,
    /// Whether this gateway is draining.
    pub draining: bool,
    /// Why the drain is blocked, if it is.
    pub drain_block: Option<DrainBlock>,
    /// Drains that were refused, and why the last one was; no reason once the next order has come.
    pub refused_drains: RefusedDrains,
    /// The membership that was published to the engine.
    pub spec: MembersSpec,
    /// The lease of this gateway's shards; it expires without an update of this status.
    pub lease: Option<Arc<GroupLease>>,
}

/// Drains that the policy server has refused.
#[derive(Clone, Debug, Default)]
pub struct RefusedDrains {
    /// Their number.
    pub count: u64,
    /// Why the last one was refused; `None` after another order to drain or undrain.
    pub last: Option<Arc<str>>,
}

impl GroupStatus {
    /// Whether this gateway is an active member. A single gateway always is.
    pub fn is_active(&self) -> bool {
        self.spec.this.is_none()
            || self.spec.gateways.iter().any(|it| Some(&it.name) == self.spec.this.as_ref() && it.active)
    }

    /// Number of active members.
    pub fn active_count(&self) -> usize {
        if self.spec.this.is_none() { 1 } else { self.spec.gateways.iter().filter(|it| it.active).count() }
    }

    /// The current status of the lease of this gateway's shards.
    pub fn lease(&self) -> LeaseStatus {
        self.lease.as_ref().map_or(LeaseStatus::NotRequired, |lease| lease.status())
    }

    /// Whether this gateway may open sessions in its shards. A single gateway always may.
    pub fn may_open_sessions(&self) -> bool {
        let Some(this) = &self.spec.this else { return true };
        self.spec.gateways.iter().any(|member| member.name == *this && member.active && member.may_open)
    }
}
