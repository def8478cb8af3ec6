//! Next-hop objects (`ip nexthop`): routes may name one instead of carrying their next hops themselves.

use std::collections::HashMap;

use super::message::{Change, Hop, NextHop, NextHopTarget};

/// The kernel's next-hop objects, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NextHops(HashMap<u32, NextHopTarget>);

impl NextHops {
    /// An object as it is now, or its end; returns whether that is news.
    pub(super) fn apply(&mut self, change: Change, next_hop: NextHop) -> bool {
        if change == Change::Gone {
            return self.0.remove(&next_hop.id).is_some();
        }
        self.0.get(&next_hop.id) != Some(&next_hop.target) && {
            self.0.insert(next_hop.id, next_hop.target);
            true
        }
    }

    /// The places that the object leads to; a blackhole leads to none. `None`: there is no such object.
    pub(super) fn hops(&self, id: u32) -> Option<Vec<Hop>> {
        Some(match self.0.get(&id)? {
            NextHopTarget::Blackhole => Vec::new(),
            NextHopTarget::Hop(hop) => vec![*hop],
            // The kernel allows no groups in groups.
            NextHopTarget::Group(members) => members.iter().filter_map(|member| self.hop(*member)).collect(),
        })
    }

    fn hop(&self, id: u32) -> Option<Hop> {
        match self.0.get(&id)? {
            NextHopTarget::Hop(hop) => Some(*hop),
            NextHopTarget::Blackhole | NextHopTarget::Group(_) => None,
        }
    }
}
