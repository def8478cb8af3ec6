//! Membership as a gateway knows it.

use std::sync::Arc;
use std::time::Duration;

use crate::view::{DrainBlock, MembershipView};

/// State of the membership authority, the policy server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authority {
    /// No server was reached yet.
    Unknown,
    /// The server has no membership service: every gateway is active.
    None,
    /// It was reached, but isn't reachable now.
    Unreachable,
    /// It is reachable.
    Reachable,
}

/// Membership as this gateway knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MembershipStatus {
    /// State of the authority.
    pub authority: Authority,
    /// The last view; number 0: none yet.
    pub view: Arc<MembershipView>,
    /// Duration of a lease, from when a heartbeat is sent: so long after a view was made, no gateway is active by the
    /// previous one without knowing the new one. A default until the first lease.
    pub ttl: Duration,
    /// Whether the TTL is from a lease; until then it may differ from other gateways' TTL.
    pub is_ttl_confirmed: bool,
    /// Why the drain that this gateway requests is blocked.
    pub drain_block: Option<DrainBlock>,
}
