//! Map entries of cluster prefixes: before, after and during a change.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::entries::PrefixValue;

/// Packets from this prefix are captured when they leave the cluster, covered or not.
pub(super) const PODS: u8 = 1;
/// In the cluster either only before or only after the change.
const CHANGING: u8 = 2;

/// Prefixes in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ClusterPrefixes {
    /// Pod prefixes whose uncovered packets are captured.
    pub(super) pods: BTreeSet<IpNet>,
    /// All prefixes in the cluster.
    pub(super) all: BTreeSet<IpNet>,
}

impl ClusterPrefixes {
    /// Their map entries. A prefix within a pod prefix is a pod prefix, too.
    pub(super) fn entries(&self) -> BTreeMap<IpNet, PrefixValue> {
        self.entries_until(self)
    }

    /// Map entries that capture what these prefixes and those `after` a change capture.
    pub(super) fn entries_until(&self, after: &Self) -> BTreeMap<IpNet, PrefixValue> {
        let nets: BTreeSet<IpNet> =
            [&self.pods, &self.all, &after.pods, &after.all].into_iter().flatten().copied().collect();
        // Sorted, so that enclosing prefixes come first.
        let mut enclosing: Vec<(IpNet, Membership)> = Vec::new();
        let mut entries = BTreeMap::new();
        for net in nets {
            while enclosing.last().is_some_and(|(outer, _)| !outer.contains(&net)) {
                enclosing.pop();
            }
            let outer = enclosing.last().map(|(_, membership)| *membership).unwrap_or_default();
            let membership = Membership {
                pods: outer.pods || self.pods.contains(&net) || after.pods.contains(&net),
                before: outer.before || self.contains(&net),
                after: outer.after || after.contains(&net),
            };
            enclosing.push((net, membership));
            entries.insert(net.trunc(), [membership.flags(), net.prefix_len()]);
        }
        entries
    }

    fn contains(&self, net: &IpNet) -> bool {
        self.pods.contains(net) || self.all.contains(net)
    }
}

/// What a prefix is, with those that enclose it.
#[derive(Clone, Copy, Debug, Default)]
struct Membership {
    pods: bool,
    /// In the cluster before and after the change.
    before: bool,
    after: bool,
}

impl Membership {
    fn flags(self) -> u8 {
        (if self.pods { PODS } else { 0 }) | (if self.before == self.after { 0 } else { CHANGING })
    }
}
