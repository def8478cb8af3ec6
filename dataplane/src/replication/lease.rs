//! Lease on this gateway's ports: until when it may open sessions from them. A gateway that could take over its shards
//! waits until the lease has certainly expired. The control thread renews it; workers check it once per loop turn.
//!
//! Ticks wrap after 49 days, so a lease that expired long ago would look like one that expires in the future. Two
//! bounds keep them apart: no lease is longer than [`MAX_LEASE_MS`], so an end further in the future is an expired one;
//! and the control thread marks expired leases ([`Lease::mark_expired`]) long before ticks wrap.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use crate::flow::sync::AtomicU64;
use crate::flow::time::Tick;

/// The longest lease: a minute.
pub const MAX_LEASE_MS: u32 = 60_000;
/// Age after which an expired lease is marked, milliseconds.
const MARK_AFTER_MS: u32 = 3_600_000;

/// No lease is needed: no other gateway could own the ports. Lower values are ticks.
const FREE: u64 = 1 << 32;
/// Expired long ago.
const EXPIRED: u64 = FREE + 1;

/// A lease, shared by the control thread and the workers.
#[derive(Debug)]
pub struct Lease(AtomicU64);

/// State of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// It is valid, or none is needed.
    Valid,
    /// It expired this many milliseconds ago, or longer ago than ticks can count.
    Expired(u32),
}

impl LeaseState {
    /// It expired half the tick range ago, or longer.
    const EXPIRED_LONG_AGO: Self = Self::Expired(1 << 31);

    /// State of a lease that ends at `until` and was granted at most [`MAX_LEASE_MS`] before that.
    pub fn of(until: Tick, now: Tick) -> Self {
        match until.since(now) {
            0 if now.reached(until) => Self::Expired(now.since(until)),
            1..=MAX_LEASE_MS => Self::Valid,
            _ => Self::EXPIRED_LONG_AGO,
        }
    }
}

impl Lease {
    /// For a gateway that needs no lease.
    pub fn unlimited() -> Self {
        Self(AtomicU64::new(FREE))
    }

    /// Renews it until `until`, at most [`MAX_LEASE_MS`] from now.
    pub fn renew(&self, until: Tick) {
        self.0.store(until.0.into(), Release);
    }

    /// Marks a lease that expired long ago, for good. Must be called at least once in 24 days.
    pub fn mark_expired(&self, now: Tick) {
        let found = self.0.load(Acquire);
        if found < FREE && matches!(LeaseState::of(Tick(found as u32), now), LeaseState::Expired(MARK_AFTER_MS..)) {
            // A concurrent renewal wins.
            let _ = self.0.compare_exchange(found, EXPIRED, AcqRel, Acquire);
        }
    }

    /// No lease is needed from now on.
    pub fn set_unlimited(&self) {
        self.0.store(FREE, Release);
    }

    /// Its state at `now`.
    pub fn state(&self, now: Tick) -> LeaseState {
        match self.0.load(Acquire) {
            FREE => LeaseState::Valid,
            EXPIRED => LeaseState::EXPIRED_LONG_AGO,
            until => LeaseState::of(Tick(until as u32), now),
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_lease_expires_without_renewal() {
        let lease = Lease::unlimited();
        assert_eq!(lease.state(Tick(77)), LeaseState::Valid);
        lease.renew(Tick(100));
        assert_eq!(
            (lease.state(Tick(99)), lease.state(Tick(100)), lease.state(Tick(130))),
            (LeaseState::Valid, LeaseState::Expired(0), LeaseState::Expired(30))
        );
        lease.set_unlimited();
        assert_eq!(lease.state(Tick(130)), LeaseState::Valid);
    }

    /// Every hour of a hundred days, from just before until just after ticks wrap, for a lease that ended in the first
    /// second.
    #[test]
    fn an_expired_lease_never_becomes_valid_again() {
        for end in [Tick(0), Tick(1_000), Tick(u32::MAX)] {
            let lease = Lease::unlimited();
            lease.renew(end);
            for hour in 0..2400u32 {
                let now = end.plus(hour.wrapping_mul(3_600_000));
                lease.mark_expired(now);
                assert_ne!(lease.state(now), LeaseState::Valid, "{hour} hours after {end:?}");
            }
            lease.renew(end.plus(500));
            lease.mark_expired(end);
            assert_eq!(lease.state(end), LeaseState::Valid, "renewed");
            lease.set_unlimited();
            lease.mark_expired(end);
            assert_eq!(lease.state(end), LeaseState::Valid, "no lease needed");
        }
    }

    /// The whole tick range in steps of ten seconds.
    #[test]
    fn a_lease_is_valid_only_in_the_minute_before_its_end() {
        for end in [Tick(0), Tick(1 << 31), Tick(u32::MAX)] {
            for age in
                (0..=u32::MAX).step_by(9_973).chain([u32::MAX - MAX_LEASE_MS, u32::MAX - MAX_LEASE_MS + 1, u32::MAX])
            {
                let is_held = LeaseState::of(end, end.plus(age)) == LeaseState::Valid;
                assert_eq!(is_held, age > u32::MAX - MAX_LEASE_MS, "{age} ms after {end:?}");
            }
        }
    }

    /// Without marking, only one minute of each tick wrap is taken for a valid lease.
    #[test]
    fn an_end_beyond_the_longest_lease_means_expired() {
        let lease = Lease::unlimited();
        lease.renew(Tick(100));
        for (ms, hold) in
            [(1 << 31, LeaseState::EXPIRED_LONG_AGO), (u32::MAX - MAX_LEASE_MS, LeaseState::EXPIRED_LONG_AGO)]
        {
            assert_eq!(lease.state(Tick(100).plus(ms)), hold, "{ms} ms later");
        }
        assert_eq!(
            lease.state(Tick(100).plus(u32::MAX - MAX_LEASE_MS + 1)),
            LeaseState::Valid,
            "like a lease of a minute"
        );
    }
}
