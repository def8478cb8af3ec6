//! What routes a side had for a family: those that vanish with a router leave no next hop behind that could be found dead.

use std::time::Instant;

use super::{Group, Hop, Seen, Wait};
use crate::config::Health;
use crate::gateway::tracking::fault::{Fault, Routes};

/// The routes of one side and family that led to a next hop which answered.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// The next hops that answered last, and of which routes; none: none ever has.
    last: Option<(Routes, Vec<Hop>)>,
    /// Since when those routes are missing.
    missing: Option<Wait>,
}

impl Memory {
    pub(super) fn missing(&self) -> Option<&Wait> {
        self.missing.as_ref()
    }

    /// Takes in who answers. Of a side with a default route that one is remembered, also while only others answer.
    pub(super) fn remember(&mut self, group: &Group) {
        let is_less = group.routes == Routes::All && matches!(self.last, Some((Routes::Default, _)));
        if group.answers() && !is_less {
            self.last = Some((group.routes, group.answering()));
        }
    }

    /// The fault that routes are missing, once they have been for as long as a dead next hop takes: a routing daemon may take a route back
    /// before it has another one. It ends when a next hop of a new route answers, or turns out to be dead, which is a fault of its own.
    ///
    /// It isn't forgotten with time, since packets are lost for as long as it lasts. Who removes routes on purpose ends it by
    /// removing the VIPs of their family from the policy, or by starting the gateway anew, whose memory begins empty.
    pub(super) fn missed(&mut self, group: &Group, seen: &Seen<'_>, health: &Health, now: Instant) -> Option<Fault> {
        let (routes, hops) = self.last.as_ref()?;
        let (side, routes, is_v4) = (group.side, *routes, group.is_v4);
        let is_gone = match routes {
            Routes::Default => !group.has_default,
            Routes::All => !group.has_any,
        };
        if !is_gone && self.missing.is_none() {
            return None;
        }
        // The default route leads to the gateway's other side now.
        let has_moved = is_gone && routes == Routes::Default && !seen.default_route(is_v4).is_empty();
        if has_moved || !(seen.needs)(is_v4) {
            *self = Self::default();
            return None;
        }
        let is_lost = self.missing.is_some_and(|missing| missing.is_over(health));
        let is_back = !is_gone && (!is_lost || group.answers() || group.is_dead());
        // The kernel takes routes away with their interface: that is the fault, and afterwards they have their time to come back.
        if is_back || is_gone && seen.is_behind_fault(hops, health) {
            self.missing = None;
            return None;
        }
        let missing = self.missing.get_or_insert_with(|| Wait::begin(now, health));
        missing.look(now, health);
        missing.is_over(health).then(|| Fault::NoRoute { side, routes, is_v4, hops: seen.named(hops) })
    }
}
