//! Resource usage of an endpoint, shared by the workers: updated when sessions open and end, which is rare compared to
//! packets.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use super::rate_window::RateWindow;
use super::spec::Limits;
use crate::flow::sync::{AtomicU32, AtomicU64};
use crate::flow::time::Tick;
use crate::ports::allocator::AllocationClass;

/// Session count and opening rate of an endpoint. Survives policy changes.
#[derive(Debug, Default)]
pub struct EndpointUsage {
    sessions: AtomicU32,
    /// Sessions opened within the last second; allocated by [`Self::prepare`].
    rate: OnceLock<Box<RateWindow>>,
    /// Rejected sessions.
    rejected: AtomicU64,
}

/// A limit of the endpoint's policy is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverQuota;

impl EndpointUsage {
    /// Allocates what these limits need, so that no packet does. A rate limit applies from then on.
    pub(super) fn prepare(&self, limits: Limits) {
        if limits.new_sessions_per_second.is_some() {
            self.rate.get_or_init(Box::default);
        }
    }

    /// Counts a new session; returns whether it has a guaranteed port.
    ///
    /// # Errors
    /// If a limit is reached; nothing is counted then.
    pub fn open(&self, limits: Limits, now: Tick) -> Result<AllocationClass, OverQuota> {
        if let (Some(limit), Some(rate)) = (limits.new_sessions_per_second, self.rate.get())
            && !rate.open(limit, now)
        {
            return Err(OverQuota);
        }
        let max = limits.sessions.unwrap_or(u32::MAX);
        let before = self.sessions.fetch_update(Relaxed, Relaxed, |now| (now < max).then(|| now + 1));
        let Ok(before) = before else {
            self.undo_rate(now);
            return Err(OverQuota);
        };
        let is_guaranteed = before < limits.guaranteed_ports.unwrap_or(0);
        Ok(if is_guaranteed { AllocationClass::Guaranteed } else { AllocationClass::Ordinary })
    }

    /// The result of [`Self::open`] after `ended` more sessions have ended; counts nothing.
    ///
    /// # Errors
    /// If a limit is reached.
    pub fn would_open(&self, limits: Limits, ended: u32, now: Tick) -> Result<AllocationClass, OverQuota> {
        let sessions = self.sessions.load(Relaxed).saturating_sub(ended);
        let is_over_rate = |limit| self.rate.get().is_some_and(|rate| !rate.would_open(limit, now));
        let is_over = limits.new_sessions_per_second.is_some_and(is_over_rate)
            || limits.sessions.is_some_and(|max| sessions >= max);
        match is_over {
            true => Err(OverQuota),
            false if sessions < limits.guaranteed_ports.unwrap_or(0) => Ok(AllocationClass::Guaranteed),
            false => Ok(AllocationClass::Ordinary),
        }
    }

    /// Counts a session restored from the previous process, without checking limits.
    pub fn restore(&self) {
        self.sessions.fetch_add(1, Relaxed);
    }

    /// Counts a session as ended.
    pub fn close(&self) {
        // Never below zero: an endpoint that was removed and added again starts from zero.
        let _ = self.sessions.fetch_update(Relaxed, Relaxed, |now| now.checked_sub(1));
    }

    /// Undoes [`Self::open`]: there was no port or no table entry, or another worker will be asked.
    pub fn undo_open(&self, now: Tick) {
        self.close();
        self.undo_rate(now);
    }

    fn undo_rate(&self, now: Tick) {
        if let Some(rate) = self.rate.get() {
            rate.undo_open(now);
        }
    }

    /// Counts a rejected session: no quota, port or table entry.
    pub fn count_rejected(&self) {
        self.rejected.fetch_add(1, Relaxed);
    }

    /// Rejected sessions.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Relaxed)
    }

    /// Open sessions.
    pub fn sessions(&self) -> u32 {
        self.sessions.load(Relaxed)
    }
}

#[cfg(all(test, feature = "loom"))]
mod interleavings {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn a_limit_holds_for_concurrent_workers() {
        for limits in [
            Limits { sessions: Some(1), ..Limits::default() },
            Limits { new_sessions_per_second: Some(1), ..Limits::default() },
        ] {
            loom::model(move || {
                let usage = Arc::new(EndpointUsage::default());
                usage.prepare(limits);
                let other = {
                    let usage = usage.clone();
                    thread::spawn(move || usage.open(limits, Tick(5)).is_ok())
                };
                let own = usage.open(limits, Tick(5)).is_ok();
                assert!(own != other.join().unwrap(), "exactly one succeeds");
                assert_eq!(usage.sessions(), 1);
            });
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn both_limits_hold() {
        let usage = EndpointUsage::default();
        let limits = Limits { sessions: Some(3), new_sessions_per_second: Some(2), guaranteed_ports: Some(1) };
        usage.prepare(limits);
        let open = |now| {
            let predicted = usage.would_open(limits, 0, Tick(now));
            let outcome = usage.open(limits, Tick(now));
            assert_eq!(predicted, outcome, "at {now} ms");
            outcome
        };
        assert_eq!(open(910), Ok(AllocationClass::Guaranteed));
        assert_eq!(open(920), Ok(AllocationClass::Ordinary));
        assert_eq!(open(1000), Err(OverQuota), "two within a second");
        assert_eq!(open(2000), Ok(AllocationClass::Ordinary));
        assert_eq!(open(4000), Err(OverQuota), "three sessions are open");
        usage.close();
        assert_eq!(open(4000), Ok(AllocationClass::Ordinary));
        assert_eq!(open(4000), Err(OverQuota), "three sessions are open");
        usage.close();
        assert_eq!(open(4000), Ok(AllocationClass::Ordinary), "a rejected one doesn't count");
        assert_eq!(usage.sessions(), 3);
    }

    #[test]
    fn an_undone_session_counts_against_no_limit() {
        let usage = EndpointUsage::default();
        let limits = Limits { sessions: Some(5), new_sessions_per_second: Some(1), guaranteed_ports: None };
        usage.prepare(limits);
        for _ in 0..3 {
            assert!(usage.open(limits, Tick(10)).is_ok());
            usage.undo_open(Tick(10));
        }
        assert_eq!(usage.sessions(), 0);
        assert!(usage.open(limits, Tick(10)).is_ok());
        usage.undo_open(Tick(60));
        assert!(usage.open(limits, Tick(60)).is_err(), "nothing is undone in a later slice");
    }
}
