//! Who had the addresses of pools before, as far as a plan needs it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use foldhash::HashMap;
use k8s_openapi::jiff::Timestamp;

use super::pools::Pools;
use crate::address_record::Recorded;
use crate::manifest::{Family, ObjectId};

/// What follows from the record.
#[derive(Debug)]
pub(super) struct History<'a> {
    pub(super) recorded: &'a Recorded,
    /// Addresses that objects had, or were to have.
    former: HashMap<&'a ObjectId, Vec<IpAddr>>,
    /// Addresses that nobody has, by pool and family, and by the time when they became free.
    reusable: HashMap<(usize, Family), BTreeSet<(Timestamp, IpAddr)>>,
    /// Addresses that nobody but their former owner gets yet, by the time when they are free for all.
    quarantined: BTreeSet<(Timestamp, IpAddr)>,
    /// Whether a Service waits for the end of a quarantine.
    pub(super) is_awaited: bool,
}

impl<'a> History<'a> {
    pub(super) fn new(recorded: &'a Recorded, pools: &Pools<'_>) -> Self {
        let (former, reusable, quarantined) = Default::default();
        let mut history = Self { recorded, former, reusable, quarantined, is_awaited: false };
        for (address, holding) in recorded.record.iter() {
            let Some(pool) = pools.of(address) else { continue };
            let (_, spec) = pools.spec(pool);
            history.former.entry(&holding.owner).or_default().push(address);
            let Some(freed) = holding.freed else { continue };
            match recorded.quarantine_of(holding, spec.reuse_after) {
                Some(end) => drop(history.quarantined.insert((end, address))),
                None => {
                    history.reusable.entry((pool, Family::of(address))).or_default().insert((freed, address));
                }
            }
        }
        history
    }

    /// What an object had before, or was to have when its status wasn't written.
    pub(super) fn former(&self, owner: &ObjectId) -> &[IpAddr] {
        self.former.get(owner).map(Vec::as_slice).unwrap_or_default()
    }

    /// Free addresses of a pool that aren't quarantined, the one that is free for longest first.
    pub(super) fn reusable(&self, pool: usize, family: Family) -> impl Iterator<Item = IpAddr> {
        self.reusable.get(&(pool, family)).into_iter().flatten().map(|(_, address)| *address)
    }

    /// Quarantined addresses.
    pub(super) fn quarantined(&self) -> impl Iterator<Item = IpAddr> {
        self.quarantined.iter().map(|(_, address)| *address)
    }

    /// When the first quarantine of some of the addresses ends.
    pub(super) fn first_end(&self, is_here: impl Fn(IpAddr) -> bool) -> Option<Timestamp> {
        self.quarantined.iter().find(|(_, address)| is_here(*address)).map(|(end, _)| *end)
    }

    /// Whether another object has an address, or had it a short while ago.
    pub(super) fn is_withheld(&self, address: IpAddr, owner: &ObjectId, pools: &Pools<'_>) -> bool {
        let Some(holding) = self.recorded.record.get(address).filter(|holding| holding.owner != *owner) else {
            return false;
        };
        let reuse_after = pools.spec_of(address).map(|(_, spec)| spec.reuse_after).unwrap_or_default();
        holding.freed.is_none() || self.recorded.quarantine_of(holding, reuse_after).is_some()
    }

    /// When the first quarantine ends, if a Service waits for it.
    pub(super) fn waits_until(&self) -> Option<Timestamp> {
        self.quarantined.first().filter(|_| self.is_awaited).map(|(end, _)| *end)
    }
}
