//! The lease of this gateway's shards, as the workers see it: required only where other gateways could own them.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::replication::lease::{Lease, LeaseState};

use crate::clock;
use crate::heartbeat::LeaseClock;

/// Status of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStatus {
    /// No other gateway could own this gateway's shards.
    NotRequired,
    /// Valid for this many more milliseconds.
    Held(u32),
    /// Expired, or never granted.
    Expired,
}

/// The workers' lease, and the grant that it follows while it is required.
#[derive(Debug)]
pub struct GroupLease {
    lease: Arc<Lease>,
    required: AtomicBool,
    /// Recorded even while no lease is required.
    grant: Mutex<Grant>,
}

/// The latest grant.
#[derive(Clone, Copy, Debug, Default)]
struct Grant {
    /// Whether a lease was ever granted.
    ever: bool,
    /// End of the lease; `None`: expired long ago.
    until: Option<Tick>,
}

impl Grant {
    /// The end of the lease, if it is valid.
    fn valid_until(&self, now: Tick) -> Option<Tick> {
        self.until.filter(|until| LeaseState::of(*until, now) == LeaseState::Valid)
    }
}

impl GroupLease {
    /// Wraps the workers' lease; not required yet.
    pub fn new(lease: Arc<Lease>) -> Self {
        Self { lease, required: AtomicBool::new(false), grant: Mutex::default() }
    }

    /// Sets whether a lease is required: whether other gateways could own this gateway's shards.
    pub fn set_required(&self, required: bool) {
        if self.required.swap(required, Release) == required {
            return;
        }
        if required {
            let (until, now) = (self.grant().until, clock::now());
            // Without a grant it has expired already.
            self.lease.renew(until.unwrap_or(now));
        } else {
            self.lease.set_unlimited();
        }
    }

    /// Extends the lease by the promises of all other gateways.
    pub(crate) fn extend_by_peers(&self, until: Tick) {
        self.extend(until);
    }

    /// Whether a lease was ever granted.
    pub(crate) fn was_granted(&self) -> bool {
        self.grant().ever
    }

    /// The current status.
    pub fn status(&self) -> LeaseStatus {
        if !self.required.load(Acquire) {
            return LeaseStatus::NotRequired;
        }
        let now = clock::now();
        self.grant().valid_until(now).map_or(LeaseStatus::Expired, |until| LeaseStatus::Held(until.since(now)))
    }

    /// Marks an expired lease, which would look valid again after ticks have wrapped. Call at least once a day.
    pub(crate) fn expire(&self) {
        let now = clock::now();
        self.lease.mark_expired(now);
        let mut grant = self.grant();
        grant.until = grant.valid_until(now);
    }

    fn grant(&self) -> MutexGuard<'_, Grant> {
        self.grant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeaseClock for GroupLease {
    fn now(&self) -> Tick {
        clock::now()
    }

    fn extend(&self, until: Tick) {
        let mut grant = self.grant();
        // Only ever extended: a shorter grant revokes nothing.
        let until = grant.valid_until(self.now()).map_or(until, |last| last.later(until));
        *grant = Grant { ever: true, until: Some(until) };
        if self.required.load(Acquire) {
            self.lease.renew(until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_expired_weeks_ago_stays_expired_until_the_next_grant() {
        for days in [1, 24, 25, 40, 49] {
            let long_ago = clock::now().plus(0u32.wrapping_sub(days * 24 * 3_600_000));
            let lease = GroupLease::new(Arc::new(Lease::unlimited()));
            lease.extend(long_ago);
            lease.set_required(true);
            assert_eq!((lease.status(), lease.was_granted()), (LeaseStatus::Expired, true), "{days} days ago");
            lease.expire();
            assert_eq!((lease.status(), lease.was_granted()), (LeaseStatus::Expired, true), "{days} days ago");
            lease.extend(clock::now().plus(50_000));
            assert!(
                matches!(lease.status(), LeaseStatus::Held(40_000..=50_000)),
                "{days} days ago: {:?}",
                lease.status()
            );
            assert_eq!(lease.lease.state(clock::now()), LeaseState::Valid);
        }
    }
}
