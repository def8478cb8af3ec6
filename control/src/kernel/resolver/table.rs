//! Table of tracked next hops: rate limits, refresh times, eviction. Pure: time is an argument.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use vipgate_common::{Rate, TokenBucket};

use super::{NextHop, ResolverLimits};

/// A next hop is in use for this many `ResolverLimits::refresh_interval`s after it was marked.
const IN_USE_INTERVALS: u32 = 3;

/// One tracked next hop.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// When the kernel was last asked to resolve it.
    requested: Option<Instant>,
    /// When it was last requested or marked as in use.
    used: Instant,
    /// When it was last marked as in use.
    marked: Option<Instant>,
    /// The kernel keeps it resolved on vipgate's behalf.
    managed: bool,
}

/// The tracked next hops.
#[derive(Debug)]
pub(super) struct NextHopTable {
    limits: ResolverLimits,
    hops: HashMap<NextHop, Entry>,
    /// Of requests.
    bucket: TokenBucket,
}

/// A next hop that is no longer tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Released {
    pub(super) hop: NextHop,
    /// The kernel must stop managing it.
    pub(super) managed: bool,
}

/// The decision about a requested next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Ask the kernel; the least recently used next hop may have been evicted.
    Request(Option<Released>),
    RateLimited,
}

impl NextHopTable {
    /// An empty table.
    pub(super) fn new(limits: ResolverLimits) -> Self {
        // The bucket holds one second's worth.
        let rate = Rate { interval: Duration::from_secs(1) / limits.per_second, burst: limits.per_second };
        Self { limits, hops: HashMap::new(), bucket: TokenBucket::new(rate) }
    }

    /// Packets need a next hop that isn't resolved.
    pub(super) fn request(&mut self, hop: NextHop, now: Instant) -> Admission {
        if let Some(entry) = self.hops.get_mut(&hop) {
            entry.used = now;
            if entry.requested.is_some_and(|requested| now < requested + self.limits.min_interval) {
                return Admission::RateLimited;
            }
        }
        if !self.bucket.try_take(now.into_std()) {
            return Admission::RateLimited;
        }
        let is_full = self.hops.len() >= self.limits.max_next_hops && !self.hops.contains_key(&hop);
        let evicted = if is_full { self.least_recent().and_then(|oldest| self.remove(oldest)) } else { None };
        let entry = self.hops.entry(hop).or_insert(Entry { requested: None, used: now, marked: None, managed: false });
        entry.requested = Some(now);
        Admission::Request(evicted)
    }

    /// Marks next hops as in use. New ones are due at once; returns the evicted ones.
    pub(super) fn mark_in_use(&mut self, hops: &[NextHop], now: Instant) -> Vec<Released> {
        let mut evicted = Vec::new();
        for hop in hops {
            if !self.hops.contains_key(hop) && self.hops.len() >= self.limits.max_next_hops {
                // Entries marked by this same call aren't evicted: else a list longer than the limit would evict
                // itself.
                match self.least_recent().filter(|oldest| self.hops[oldest].used < now) {
                    Some(oldest) => evicted.extend(self.remove(oldest)),
                    None => continue,
                }
            }
            let entry =
                self.hops.entry(*hop).or_insert(Entry { requested: None, used: now, marked: None, managed: false });
            entry.used = now;
            entry.marked = Some(now);
        }
        evicted
    }

    /// Tracks an entry that a previous process has marked as managed.
    pub(super) fn restore(&mut self, hop: NextHop, now: Instant) {
        self.hops.insert(hop, Entry { requested: Some(now), used: now, marked: None, managed: true });
    }

    /// The next hops to refresh, longest overdue first, within the rate limit.
    pub(super) fn due(&mut self, now: Instant) -> Vec<NextHop> {
        let is_due =
            |entry: &Entry| entry.requested.is_none_or(|requested| now >= requested + self.limits.refresh_interval);
        let mut due: Vec<(Option<Instant>, NextHop)> =
            self.hops.iter().filter(|(_, entry)| is_due(entry)).map(|(hop, entry)| (entry.requested, *hop)).collect();
        due.sort_unstable();
        due.truncate(self.limits.per_second as usize);
        for (_, hop) in &due {
            if let Some(entry) = self.hops.get_mut(hop) {
                entry.requested = Some(now);
            }
        }
        due.into_iter().map(|(_, hop)| hop).collect()
    }

    /// Whether to release a next hop that doesn't respond, since it isn't in use: the kernel would probe it forever.
    pub(super) fn should_release(&self, hop: NextHop, now: Instant) -> bool {
        let in_use = |entry: &Entry| {
            entry.marked.is_some_and(|marked| now < marked + self.limits.refresh_interval * IN_USE_INTERVALS)
        };
        self.hops.get(&hop).is_some_and(|entry| !in_use(entry))
    }

    /// Whether the next hop is tracked.
    pub(super) fn contains(&self, hop: NextHop) -> bool {
        self.hops.contains_key(&hop)
    }

    /// Records whether the kernel manages the next hop on vipgate's behalf.
    pub(super) fn set_managed(&mut self, hop: NextHop, managed: bool) {
        if let Some(entry) = self.hops.get_mut(&hop) {
            entry.managed = managed;
        }
    }

    /// Stops tracking a next hop.
    pub(super) fn remove(&mut self, hop: NextHop) -> Option<Released> {
        self.hops.remove(&hop).map(|entry| Released { hop, managed: entry.managed })
    }

    /// All tracked next hops.
    pub(super) fn next_hops(&self) -> Vec<NextHop> {
        self.hops.keys().copied().collect()
    }

    fn least_recent(&self) -> Option<NextHop> {
        self.hops.iter().min_by_key(|(_, entry)| entry.used).map(|(hop, _)| *hop)
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
