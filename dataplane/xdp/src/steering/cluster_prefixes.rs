//! Cluster prefixes in the steering program's maps.

use std::collections::{BTreeMap, BTreeSet};

use aya::Ebpf;
use aya::maps::lpm_trie::Key;
use aya::maps::{LpmTrie, MapData};
use ipnet::IpNet;

use super::{PrefixValue, SteeringError, changed_entries, ignore_missing, take_map};

/// The maps and their contents.
pub(super) struct ClusterPrefixes {
    v4: LpmTrie<MapData, [u8; 4], PrefixValue>,
    v6: LpmTrie<MapData, [u8; 16], PrefixValue>,
    /// Pod prefixes whose uncovered packets are captured.
    pub(super) pods: BTreeSet<IpNet>,
    /// All prefixes in the cluster.
    pub(super) prefixes: BTreeSet<IpNet>,
    applied: BTreeMap<IpNet, PrefixValue>,
    /// An update failed: the next one writes all entries.
    pub(super) needs_full_write: bool,
}

impl ClusterPrefixes {
    pub(super) fn new(program: &mut Ebpf) -> Result<Self, SteeringError> {
        Ok(Self {
            v4: take_map(program, "cluster4")?,
            v6: take_map(program, "cluster6")?,
            pods: BTreeSet::new(),
            prefixes: BTreeSet::new(),
            applied: BTreeMap::new(),
            needs_full_write: false,
        })
    }

    /// Sets the prefixes. New entries are added before others are removed.
    pub(super) fn set(&mut self, pods: BTreeSet<IpNet>, cluster: BTreeSet<IpNet>) -> Result<(), SteeringError> {
        if !self.needs_full_write && (&self.pods, &self.prefixes) == (&pods, &cluster) {
            return Ok(());
        }
        let target = entries(&pods, &cluster);
        let mut old = std::mem::take(&mut self.applied);
        let write_all = std::mem::replace(&mut self.needs_full_write, true);
        let result = self.update(&old, &target, write_all);
        if result.is_err() {
            // The maps may contain entries of both.
            old.extend(target);
            self.applied = old;
            return result;
        }
        (self.pods, self.prefixes, self.applied, self.needs_full_write) = (pods, cluster, target, false);
        Ok(())
    }

    fn update(
        &mut self,
        old: &BTreeMap<IpNet, PrefixValue>,
        target: &BTreeMap<IpNet, PrefixValue>,
        write_all: bool,
    ) -> Result<(), SteeringError> {
        for (net, value) in changed_entries(target, old, write_all) {
            self.write(*net, Some(*value))?;
        }
        for net in old.keys().filter(|net| !target.contains_key(*net)) {
            self.write(*net, None)?;
        }
        Ok(())
    }

    fn write(&mut self, net: IpNet, value: Option<PrefixValue>) -> Result<(), SteeringError> {
        let length = net.prefix_len().into();
        let result = match net {
            IpNet::V4(net) => {
                let key = Key::new(length, net.network().octets());
                match value {
                    Some(value) => self.v4.insert(&key, value, 0),
                    None => ignore_missing(self.v4.remove(&key)),
                }
            }
            IpNet::V6(net) => {
                let key = Key::new(length, net.network().octets());
                match value {
                    Some(value) => self.v6.insert(&key, value, 0),
                    None => ignore_missing(self.v6.remove(&key)),
                }
            }
        };
        result.map_err(|source| SteeringError::Table { table: "cluster", source })
    }
}

/// Map entries of the prefixes. A prefix within a pod prefix is a pod prefix, too.
fn entries(pods: &BTreeSet<IpNet>, cluster: &BTreeSet<IpNet>) -> BTreeMap<IpNet, PrefixValue> {
    // Sorted, so that enclosing prefixes come first.
    let mut enclosing: Vec<(IpNet, bool)> = Vec::new();
    let mut entries = BTreeMap::new();
    for net in pods.union(cluster) {
        while enclosing.last().is_some_and(|(outer, _)| !outer.contains(net)) {
            enclosing.pop();
        }
        let is_pods = pods.contains(net) || enclosing.last().is_some_and(|(_, is_pods)| *is_pods);
        enclosing.push((*net, is_pods));
        entries.insert(net.trunc(), [u8::from(is_pods), net.prefix_len()]);
    }
    entries
}
