//! The lease of this gateway's shares, as workers see it: needed only where others could have them.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, PoisonError};

use vipgate_dataplane::link::lease::Lease;
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
    until: Mutex<Option<Tick>>,
}

impl GroupLease {
    /// Around the workers' lease; nobody needs one yet.
    pub fn new(lease: Arc<Lease>) -> Self {
        Self { lease, needed: AtomicBool::new(false), until: Mutex::new(None) }
    }

    /// Whether others could have this gateway's shares.
    pub fn need(&self, needed: bool) {
        if self.needed.swap(needed, Release) == needed {
            return;
        }
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if needed {
            // None was granted yet: it has ended already.
            self.lease.extend(until.unwrap_or_else(workers::now));
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
        self.until.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// How it stands now.
    pub fn status(&self) -> LeaseStatus {
        if !self.needed.load(Acquire) {
            return LeaseStatus::NotNeeded;
        }
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let now = workers::now();
        until
            .filter(|until| !now.reached(*until))
            .map_or(LeaseStatus::Lapsed, |until| LeaseStatus::Held(until.since(now)))
    }
}

impl LeaseClock for GroupLease {
    fn now(&self) -> Tick {
        workers::now()
    }

    fn extend(&self, until: Tick) {
        let mut last = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        // It only grows: whoever grants less takes nothing back.
        let until = last.map_or(until, |last| last.later(until));
        *last = Some(until);
        if self.needed.load(Acquire) {
            self.lease.extend(until);
        }
    }
}
