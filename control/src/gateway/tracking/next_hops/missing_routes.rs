//! Missing routes: when routes disappear together with a router, no next hop is left to be probed and found down.

use std::time::Instant;

use super::{NextHop, NextHopGroup, ProbeTimer, TrackingInput};
use crate::config::Health;
use crate::state::fault::{Fault, RouteScope};

/// The last routes of one side and address family with a next hop that was up.
#[derive(Debug, Default)]
pub(super) struct MissingRoutes {
    /// The next hops that were up last, and their routes; `None`: none was ever up.
    last: Option<(RouteScope, Vec<NextHop>)>,
    /// Timer since those routes are missing.
    missing: Option<ProbeTimer>,
}

impl MissingRoutes {
    pub(super) fn missing(&self) -> Option<&ProbeTimer> {
        self.missing.as_ref()
    }

    /// Records the next hops that are up. A default route isn't replaced by other routes.
    pub(super) fn record(&mut self, group: &NextHopGroup) {
        let is_weaker = group.routes == RouteScope::All && matches!(self.last, Some((RouteScope::Default, _)));
        if group.any_up() && !is_weaker {
            self.last = Some((group.routes, group.next_hops_up()));
        }
    }

    /// Returns the fault that routes are missing, once they have been for as long as it takes to detect a dead next
    /// hop: a routing daemon may withdraw a route before it has the next one. The fault ends when a next hop of a new
    /// route is up, or is found down, which is a fault of its own.
    ///
    /// It doesn't expire, since packets are lost as long as it lasts. After routes were removed on purpose, remove the
    /// VIPs of their address family from the policy, or restart the gateway.
    pub(super) fn fault(
        &mut self,
        group: &NextHopGroup,
        input: &TrackingInput<'_>,
        health: &Health,
        now: Instant,
    ) -> Option<Fault> {
        let (routes, hops) = self.last.as_ref()?;
        let (side, routes, is_v4) = (group.side, *routes, group.is_v4);
        let is_gone = match routes {
            RouteScope::Default => !group.has_default,
            RouteScope::All => !group.has_any,
        };
        if !is_gone && self.missing.is_none() {
            return None;
        }
        // The default route is on the other side now.
        let has_moved = is_gone && routes == RouteScope::Default && !input.default_route(is_v4).is_empty();
        if has_moved || !(input.needs)(is_v4) {
            *self = Self::default();
            return None;
        }
        let timed_out = self.missing.is_some_and(|missing| missing.has_expired(health));
        let is_back = !is_gone && (!timed_out || group.any_up() || group.all_down());
        // The kernel removes the routes of an interface that goes down, which is a fault of its own; afterwards the
        // timer starts anew.
        if is_back || is_gone && input.is_behind_fault(hops, health) {
            self.missing = None;
            return None;
        }
        let missing = self.missing.get_or_insert_with(|| ProbeTimer::start(now, health));
        missing.tick(now, health);
        missing.has_expired(health).then(|| Fault::NoRoute {
            side,
            routes,
            is_v4,
            hops: input.with_interface_names(hops),
        })
    }
}
