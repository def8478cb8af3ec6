//! The cluster's own addresses in the steering program's tables.

use std::collections::{BTreeMap, BTreeSet};

use aya::Ebpf;
use aya::maps::lpm_trie::Key;
use aya::maps::{LpmTrie, MapData};
use ipnet::IpNet;

use super::{Reach, SteeringError, difference, forget_missing, take};

/// The tables, and what they hold.
pub(super) struct Ranges {
    v4: LpmTrie<MapData, [u8; 4], Reach>,
    v6: LpmTrie<MapData, [u8; 16], Reach>,
    /// Pods that don't leave the cluster uncovered.
    pub(super) pods: BTreeSet<IpNet>,
    /// All of the cluster's own addresses.
    pub(super) inside: BTreeSet<IpNet>,
    applied: BTreeMap<IpNet, Reach>,
    /// A change failed half-way: all is written anew by the next one.
    pub(super) is_unsure: bool,
}

impl Ranges {
    pub(super) fn of(program: &mut Ebpf) -> Result<Self, SteeringError> {
        Ok(Self {
            v4: take(program, "ranges4")?,
            v6: take(program, "ranges6")?,
            pods: BTreeSet::new(),
            inside: BTreeSet::new(),
            applied: BTreeMap::new(),
            is_unsure: false,
        })
    }

    /// Makes these the cluster's own addresses, what is new first.
    pub(super) fn set(&mut self, pods: BTreeSet<IpNet>, inside: BTreeSet<IpNet>) -> Result<(), SteeringError> {
        if !self.is_unsure && (&self.pods, &self.inside) == (&pods, &inside) {
            return Ok(());
        }
        let wanted = reaches(&pods, &inside);
        let mut old = std::mem::take(&mut self.applied);
        let anew = std::mem::replace(&mut self.is_unsure, true);
        let outcome = self.change(&old, &wanted, anew);
        if outcome.is_err() {
            // Whatever of both is there, the next change has to look at.
            old.extend(wanted);
            self.applied = old;
            return outcome;
        }
        (self.pods, self.inside, self.applied, self.is_unsure) = (pods, inside, wanted, false);
        Ok(())
    }

    fn change(
        &mut self,
        old: &BTreeMap<IpNet, Reach>,
        wanted: &BTreeMap<IpNet, Reach>,
        anew: bool,
    ) -> Result<(), SteeringError> {
        for (net, reach) in difference(wanted, old, anew) {
            self.put(*net, Some(*reach))?;
        }
        for net in old.keys().filter(|net| !wanted.contains_key(*net)) {
            self.put(*net, None)?;
        }
        Ok(())
    }

    fn put(&mut self, net: IpNet, reach: Option<Reach>) -> Result<(), SteeringError> {
        let length = net.prefix_len().into();
        let result = match net {
            IpNet::V4(net) => {
                let key = Key::new(length, net.network().octets());
                match reach {
                    Some(reach) => self.v4.insert(&key, reach, 0),
                    None => forget_missing(self.v4.remove(&key)),
                }
            }
            IpNet::V6(net) => {
                let key = Key::new(length, net.network().octets());
                match reach {
                    Some(reach) => self.v6.insert(&key, reach, 0),
                    None => forget_missing(self.v6.remove(&key)),
                }
            }
        };
        result.map_err(|source| SteeringError::Table { table: "ranges", source })
    }
}

/// What is said of each prefix: what lies in a prefix of pods is pods', too.
fn reaches(pods: &BTreeSet<IpNet>, inside: &BTreeSet<IpNet>) -> BTreeMap<IpNet, Reach> {
    // In order, so that what encloses a prefix comes before it.
    let mut around: Vec<(IpNet, bool)> = Vec::new();
    let mut all = BTreeMap::new();
    for net in pods.union(inside) {
        while around.last().is_some_and(|(outer, _)| !outer.contains(net)) {
            around.pop();
        }
        let is_pods = pods.contains(net) || around.last().is_some_and(|(_, is_pods)| *is_pods);
        around.push((*net, is_pods));
        all.insert(net.trunc(), [u8::from(is_pods), net.prefix_len()]);
    }
    all
}
