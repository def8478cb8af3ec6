//! The lease of this gateway's shares, as workers see it: needed only where others could have them.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vipgate_dataplane::link::lease::{Hold, Lease};
use vipgate_dataplane::time::Tick;

use crate::gateway::workers;
use crate::members::LeaseClock;

/// How the lease stands, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStatus {
    /// Nobody else could have this gateway's shares.
    NotNeeded,
    /// It holds for so many milliseconds more.
    Held(u32),
    /// It has ended, or was never granted.
    Lapsed,
}

/// The workers' lease, and until when it would hold.
#[derive(Debug)]
pub struct GroupLease {
    lease: Arc<Lease>,
    needed: AtomicBool,
    /// Whoever grants it may do so while nobody needs it.
    grant: Mutex<Grant>,
}

/// What was granted.
#[derive(Clone, Copy, Debug, Default)]
struct Grant {
    /// Whether anything ever was.
    ever: bool,
    /// Until when; `None`: it ended long ago.
    until: Option<Tick>,
}

impl Grant {
    /// Until when it holds, if it does.
    fn held_until(&self, now: Tick) -> Option<Tick> {
        self.until.filter(|until| Hold::of(*until, now) == Hold::Held)
    }
}

impl GroupLease {
    /// Around the workers' lease; nobody needs one yet.
    pub fn new(lease: Arc<Lease>) -> Self {
        Self { lease, needed: AtomicBool::new(false), grant: Mutex::default() }
    }

    /// Whether others could have this gateway's shares.
    pub fn need(&self, needed: bool) {
        if self.needed.swap(needed, Release) == needed {
            return;
        }
        if needed {
            let (until, now) = (self.grant().until, workers::now());
            // None was granted yet: it has ended already.
            self.lease.extend(until.unwrap_or(now));
        } else {
            self.lease.release();
        }
    }

    /// Every other gateway has promised to keep off until then.
    pub(super) fn extend_by_peers(&self, until: Tick) {
        self.extend(until);
    }

    /// Whether it was ever granted.
    pub(super) fn was_granted(&self) -> bool {
        self.grant().ever
    }

    /// How it stands now.
    pub fn status(&self) -> LeaseStatus {
        if !self.needed.load(Acquire) {
            return LeaseStatus::NotNeeded;
        }
        let now = workers::now();
        self.grant().held_until(now).map_or(LeaseStatus::Lapsed, |until| LeaseStatus::Held(until.since(now)))
    }

    /// Keeps what has ended from looking as if it had yet to end, when clocks have come around. To be called once a day or more often.
    pub(super) fn expire(&self) {
        let now = workers::now();
        self.lease.expire(now);
        let mut grant = self.grant();
        grant.until = grant.held_until(now);
    }

    fn grant(&self) -> MutexGuard<'_, Grant> {
        self.grant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeaseClock for GroupLease {
    fn now(&self) -> Tick {
        workers::now()
    }

    fn extend(&self, until: Tick) {
        let mut grant = self.grant();
        // It only grows: whoever grants less takes nothing back.
        let until = grant.held_until(self.now()).map_or(until, |last| last.later(until));
        *grant = Grant { ever: true, until: Some(until) };
        if self.needed.load(Acquire) {
            self.lease.extend(until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_ended_weeks_ago_has_ended_and_the_next_one_counts() {
        for days in [1, 24, 25, 40, 49] {
            let long_ago = workers::now().plus(0u32.wrapping_sub(days * 24 * 3_600_000));
            let lease = GroupLease::new(Arc::new(Lease::free()));
            lease.extend(long_ago);
            lease.need(true);
            assert_eq!((lease.status(), lease.was_granted()), (LeaseStatus::Lapsed, true), "{days} days ago");
            lease.expire();
            assert_eq!((lease.status(), lease.was_granted()), (LeaseStatus::Lapsed, true), "{days} days ago");
            lease.extend(workers::now().plus(50_000));
            assert!(
                matches!(lease.status(), LeaseStatus::Held(40_000..=50_000)),
                "{days} days ago: {:?}",
                lease.status()
            );
            assert_eq!(lease.lease.hold(workers::now()), Hold::Held);
        }
    }
}
