//! Membership as a gateway knows it.

use std::sync::Arc;
use std::time::Duration;

use vipgate_dataplane::replication::lease::MAX_LEASE_MS;

use crate::view::{DrainBlock, MembershipView};

/// State of the membership authority, the policy server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authority {
    /// No server was reached yet.
    Unknown,
    /// There is none, or the server offers no views: the gateways of the policy are the view, and every one is active.
    Fixed,
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

/// TTL of leases until the server has granted one.
const DEFAULT_TTL: Duration = Duration::from_millis(600);

impl Default for MembershipStatus {
    /// Before any server was reached.
    fn default() -> Self {
        Self {
            authority: Authority::Unknown,
            view: Arc::default(),
            ttl: DEFAULT_TTL,
            is_ttl_confirmed: false,
            drain_block: None,
        }
    }
}

impl MembershipStatus {
    /// Applies a view that another gateway has relayed from the server; whether it was applied. Only while the server is
    /// unreachable, and if the view is newer: so a gateway cut off from the server learns which gateway has taken its
    /// place.
    pub fn apply_relayed_view(&mut self, view: Arc<MembershipView>) -> bool {
        let is_applied = self.authority == Authority::Unreachable && view.number > self.view.number;
        if is_applied {
            self.view = view;
        }
        is_applied
    }

    /// How long a lease lasts at most. Before the first one that is unknown.
    pub fn longest_lease(&self) -> Duration {
        if self.is_ttl_confirmed { self.ttl } else { Duration::from_millis(MAX_LEASE_MS.into()) }
    }
}
