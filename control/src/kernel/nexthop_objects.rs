//! Nexthop objects (`ip nexthop`): a route may reference one by id instead of listing its next hops.

use std::collections::HashMap;

use vipgate_netlink::{Change, NextHop, NextHopObject, NextHopObjectTarget};

/// The kernel's nexthop objects, by id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NextHopObjects(HashMap<u32, NextHopObjectTarget>);

impl NextHopObjects {
    /// Applies an event; returns whether anything changed.
    pub(super) fn apply(&mut self, change: Change, next_hop: NextHopObject) -> bool {
        if change == Change::Removed {
            return self.0.remove(&next_hop.id).is_some();
        }
        self.0.get(&next_hop.id) != Some(&next_hop.target) && {
            self.0.insert(next_hop.id, next_hop.target);
            true
        }
    }

    /// The next hops of the object: empty for a blackhole, `None` for an unknown id.
    pub(super) fn resolve(&self, id: u32) -> Option<Vec<NextHop>> {
        Some(match self.0.get(&id)? {
            NextHopObjectTarget::Blackhole => Vec::new(),
            NextHopObjectTarget::Single(hop) => vec![*hop],
            // The kernel doesn't allow nested groups.
            NextHopObjectTarget::Group(members) => members.iter().filter_map(|member| self.hop(*member)).collect(),
        })
    }

    fn hop(&self, id: u32) -> Option<NextHop> {
        match self.0.get(&id)? {
            NextHopObjectTarget::Single(hop) => Some(*hop),
            NextHopObjectTarget::Blackhole | NextHopObjectTarget::Group(_) => None,
        }
    }
}
