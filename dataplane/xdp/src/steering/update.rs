//! Updates of the maps, in two phases: capture what is new, then, once policy is in force, release what is gone.
//!
//! At each moment, also when a write fails, the maps capture what they captured before the change, and after the first
//! phase what they capture after it:
//!
//! - An endpoint's packets are captured by its address alone. Packets to it are captured unless its policy translates
//!   their source. So addresses and excluded prefixes come first, translated prefixes last; an endpoint whose policy's
//!   prefixes are missing is captured in both directions.
//! - A prefix that is translated no longer is removed in the first phase, one that is excluded no longer in the second.
//! - A local address, which is not captured, is added in the second phase and removed in the first; so is, for
//!   uncovered pods, a destination in the cluster.
//!
//! - What a new endpoint sends is dropped until the second phase: the workers don't know its policy, and would treat it
//!   as that of an uncovered pod.
//!
//! A failed write leaves its map unchanged, so `applied` is exact, unless others write to the maps. After a failure
//! only a full write by [`Steering::apply`] is trusted. Where the first phase fails, addresses of endpoints may be
//! missing, so the program drops everything unknown from inside that leaves the cluster, until then.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::cluster_prefixes::{ClusterPrefixes, PODS};
use super::entries::{BACKEND, ENDPOINT, Entries, Host, LOCAL, PrefixValue, TRANSLATED};
use super::tables::{Listener, NO_POLICY, SteeringChange, SteeringTables};
use super::{Steering, SteeringError};

/// Bits of the map `flags`.
const CLOSED: u32 = 1;
const UNCOVERED: u32 = 2;
const INCOMPLETE: u32 = 4;

/// What the maps contain.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) entries: Entries,
    pub(super) cluster: BTreeMap<IpNet, PrefixValue>,
    /// Cluster prefixes of the policy in force.
    cluster_prefixes: ClusterPrefixes,
    is_closed: bool,
    /// An update has failed.
    needs_full_write: bool,
    /// The first phase of an update has failed.
    is_incomplete: bool,
}

/// A change as map entries.
struct EntryChange {
    added: Entries,
    removed: Entries,
    /// The cluster prefixes after it.
    cluster: ClusterPrefixes,
}

impl Steering {
    /// Closes the program, or opens it again. Closed, while the policy is unknown, it captures all packets but those to
    /// local addresses and with link-local scope.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_closed(&mut self, closed: bool) -> Result<(), SteeringError> {
        self.applied.is_closed = closed;
        self.write_flags()
    }

    /// First phase of a change: captures what it adds. What was captured remains so.
    ///
    /// # Errors
    /// When the kernel refuses. Until [`Self::apply`] succeeds, everything unknown from inside that leaves the cluster
    /// is dropped.
    pub fn extend(&mut self, change: &SteeringChange) -> Result<(), SteeringError> {
        let change = self.entry_change(change);
        self.capture(&change)
    }

    /// Second phase of a change, once it is in force: stops capturing what it removes.
    ///
    /// # Errors
    /// When the kernel refuses; some of it may still be captured.
    pub fn reduce(&mut self, change: &SteeringChange) -> Result<(), SteeringError> {
        let change = self.entry_change(change);
        self.release(&change)
    }

    /// Sets the captured traffic, in both phases. After a failed update, writes all entries.
    ///
    /// # Errors
    /// When the kernel refuses; see [`Self::extend`] and [`Self::reduce`].
    pub fn apply(&mut self, tables: &SteeringTables) -> Result<(), SteeringError> {
        let added = Entries::of(tables);
        let removed = self.applied.entries.without(&added);
        let cluster = ClusterPrefixes { pods: tables.pod_cidrs.clone(), all: tables.cluster_cidrs.clone() };
        let change = EntryChange { added, removed, cluster };
        self.capture(&change)?;
        self.release(&change)?;
        if self.applied.needs_full_write {
            self.write_all()?;
            (self.applied.needs_full_write, self.applied.is_incomplete) = (false, false);
        }
        self.write_flags()
    }

    /// Whether an update has failed since the last complete one.
    pub fn needs_full_write(&self) -> bool {
        self.applied.needs_full_write
    }

    fn entry_change(&self, SteeringChange { added, removed }: &SteeringChange) -> EntryChange {
        let ClusterPrefixes { pods, all } = &self.applied.cluster_prefixes;
        let cluster = ClusterPrefixes {
            pods: &(pods - &removed.pod_cidrs) | &added.pod_cidrs,
            all: &(all - &removed.cluster_cidrs) | &added.cluster_cidrs,
        };
        EntryChange { added: Entries::of(added), removed: Entries::of(removed), cluster }
    }

    fn capture(&mut self, change: &EntryChange) -> Result<(), SteeringError> {
        let captured = self.try_capture(change);
        if captured.is_err() {
            (self.applied.needs_full_write, self.applied.is_incomplete) = (true, true);
            // A map of one entry: this doesn't fail for lack of memory.
            self.write_flags()?;
        }
        captured
    }

    fn try_capture(&mut self, change: &EntryChange) -> Result<(), SteeringError> {
        for (&address, &[_, roles]) in &change.added.hosts {
            let [former, known] = self.host(address);
            // The policy of an endpoint isn't in force before the second phase; a former one still is.
            let policy = if roles & !known & ENDPOINT != 0 { NO_POLICY } else { former };
            self.set_host(address, [policy, known | roles & !LOCAL])?;
        }
        for (&address, &[_, roles]) in &change.removed.hosts {
            let [policy, known] = self.host(address);
            self.set_host(address, [policy, known & !(roles & LOCAL)])?;
        }
        for &listener in &change.added.listeners {
            self.set_listener(listener, true)?;
        }
        for (&key, &value) in &change.added.cidrs {
            if value[0] & TRANSLATED == 0 {
                self.set_cidr(key, Some(value))?;
            }
        }
        for &(policy, net) in change.removed.cidrs.keys() {
            // Without prefixes, the policy is removed, and so are its endpoints.
            if self.is_translated((policy, net)) && change.added.has_prefixes_of(policy) {
                let covering = change.added.covering(policy, net);
                self.set_cidr((policy, net), covering.filter(|[flags, _]| flags & TRANSLATED != 0))?;
            }
        }
        self.set_cluster(&self.applied.cluster_prefixes.entries_until(&change.cluster))?;
        self.write_flags()
    }

    fn release(&mut self, change: &EntryChange) -> Result<(), SteeringError> {
        self.applied.cluster_prefixes.clone_from(&change.cluster);
        let released = self.try_release(change);
        self.applied.needs_full_write |= released.is_err();
        released
    }

    fn try_release(&mut self, change: &EntryChange) -> Result<(), SteeringError> {
        for (&address, &[policy, roles]) in &change.added.hosts {
            let [former, known] = self.host(address);
            let policy = if roles & ENDPOINT == 0 { former } else { policy };
            self.set_host(address, [policy, known | roles])?;
        }
        for (&address, &[_, removed]) in &change.removed.hosts {
            let [policy, roles] = self.host(address);
            // A backend keeps its role while it listens on another port.
            let mut listeners = self.applied.entries.listeners.range((address, 0, 0)..=(address, u16::MAX, u8::MAX));
            let listens = listeners.any(|listener| !change.removed.listeners.contains(listener));
            let remaining = roles & !(if listens { removed & !BACKEND } else { removed });
            self.set_host(address, [if remaining & ENDPOINT == 0 { 0 } else { policy }, remaining])?;
        }
        for &listener in &change.removed.listeners {
            self.set_listener(listener, false)?;
        }
        for (&key, &value) in &change.added.cidrs {
            self.set_cidr(key, Some(value))?;
        }
        for &key in change.removed.cidrs.keys() {
            self.set_cidr(key, None)?;
        }
        self.set_cluster(&change.cluster.entries())?;
        self.write_flags()
    }

    /// Writes all entries, even if they are known to be there: in doubt.
    fn write_all(&mut self) -> Result<(), SteeringError> {
        let Self { maps, applied: Applied { entries, cluster, .. }, .. } = self;
        entries.hosts.iter().try_for_each(|(&address, &host)| maps.set_host(address, Some(host)))?;
        entries.listeners.iter().try_for_each(|&listener| maps.set_listener(listener, true))?;
        entries.cidrs.iter().try_for_each(|(&key, &value)| maps.set_cidr(key, Some(value)))?;
        cluster.iter().try_for_each(|(&net, &value)| maps.set_cluster_prefix(net, Some(value)))
    }

    fn write_flags(&mut self) -> Result<(), SteeringError> {
        let Applied { is_closed, is_incomplete, cluster, .. } = &self.applied;
        let has_pods = cluster.values().any(|[flags, _]| flags & PODS != 0);
        let bits = [(*is_closed, CLOSED), (has_pods, UNCOVERED), (*is_incomplete, INCOMPLETE)];
        let written = self.maps.set_flags(bits.into_iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit).sum());
        self.applied.needs_full_write |= written.is_err();
        written
    }

    fn host(&self, address: IpAddr) -> Host {
        self.applied.entries.hosts.get(&address).copied().unwrap_or_default()
    }

    fn is_translated(&self, key: (u32, IpNet)) -> bool {
        self.applied.entries.cidrs.get(&key).is_some_and(|[flags, _]| flags & TRANSLATED != 0)
    }

    /// Sets an address, or removes it if it has no role.
    fn set_host(&mut self, address: IpAddr, host: Host) -> Result<(), SteeringError> {
        let host = (host[1] != 0).then_some(host);
        set(&mut self.applied.entries.hosts, address, host, |host| self.maps.set_host(address, host))
    }

    fn set_cidr(&mut self, key: (u32, IpNet), value: Option<PrefixValue>) -> Result<(), SteeringError> {
        set(&mut self.applied.entries.cidrs, key, value, |value| self.maps.set_cidr(key, value))
    }

    fn set_listener(&mut self, listener: Listener, is_present: bool) -> Result<(), SteeringError> {
        let listeners = &mut self.applied.entries.listeners;
        if listeners.contains(&listener) != is_present {
            self.maps.set_listener(listener, is_present)?;
            if is_present {
                listeners.insert(listener)
            } else {
                listeners.remove(&listener)
            };
        }
        Ok(())
    }

    /// Sets the entries of cluster prefixes. New ones are written before others are removed.
    fn set_cluster(&mut self, target: &BTreeMap<IpNet, PrefixValue>) -> Result<(), SteeringError> {
        let Self { maps, applied: Applied { cluster, .. }, .. } = self;
        for (&net, &value) in target {
            set(cluster, net, Some(value), |value| maps.set_cluster_prefix(net, value))?;
        }
        let gone: Vec<IpNet> = cluster.keys().filter(|net| !target.contains_key(net)).copied().collect();
        gone.into_iter().try_for_each(|net| set(cluster, net, None, |value| maps.set_cluster_prefix(net, value)))
    }
}

/// Writes an entry unless it is known to be there, and records it.
fn set<K: Ord, V: Copy + PartialEq>(
    known: &mut BTreeMap<K, V>,
    key: K,
    value: Option<V>,
    write: impl FnOnce(Option<V>) -> Result<(), SteeringError>,
) -> Result<(), SteeringError> {
    if known.get(&key).copied() != value {
        write(value)?;
        match value {
            Some(value) => known.insert(key, value),
            None => known.remove(&key),
        };
    }
    Ok(())
}
