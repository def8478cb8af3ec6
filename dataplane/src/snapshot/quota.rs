//! What one endpoint uses, shared by the workers that carry its sessions: counted where sessions open and end, which is
//! rare beside packets.

use std::sync::atomic::Ordering::Relaxed;

use super::spec::Limits;
use crate::ports::allocator::Claim;
use crate::sync::{AtomicU32, AtomicU64};
use crate::time::Tick;

/// Sessions of one endpoint and how fast it opens them. Lives on when policy changes around it.
#[derive(Debug, Default)]
pub struct EndpointUse {
    sessions: AtomicU32,
    /// The second that the count below is for, and how many sessions were opened in it.
    second: AtomicU64,
    /// Sessions that it was refused.
    refused: AtomicU64,
}

/// An endpoint has reached a limit of its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverQuota;

impl EndpointUse {
    /// Counts one more session; says whether it is one of those that are guaranteed a port.
    ///
    /// # Errors
    /// Counts nothing when a limit is reached.
    pub fn open(&self, limits: Limits, now: Tick) -> Result<Claim, OverQuota> {
        if let Some(rate) = limits.new_sessions_per_second {
            let second = u64::from(now.0 / 1000);
            self.second
                .fetch_update(Relaxed, Relaxed, |word| {
                    let opened = if word >> 32 == second { word & 0xffff_ffff } else { 0 };
                    (opened < rate.into()).then_some(second << 32 | (opened + 1))
                })
                .map_err(|_| OverQuota)?;
        }
        let most = limits.sessions.unwrap_or(u32::MAX);
        let before = self.sessions.fetch_update(Relaxed, Relaxed, |now| (now < most).then(|| now + 1));
        let is_guaranteed = before.map_err(|_| OverQuota)? < limits.guaranteed_ports.unwrap_or(0);
        Ok(if is_guaranteed { Claim::Guaranteed } else { Claim::Ordinary })
    }

    /// What [`Self::open`] would say once so many of its sessions have ended, without counting anything.
    ///
    /// # Errors
    /// When a limit is reached.
    pub fn would_open(&self, limits: Limits, ended: u32, now: Tick) -> Result<Claim, OverQuota> {
        let (word, second) = (self.second.load(Relaxed), u64::from(now.0 / 1000));
        let opened = if word >> 32 == second { word & 0xffff_ffff } else { 0 };
        let sessions = self.sessions.load(Relaxed).saturating_sub(ended);
        let is_over = limits.new_sessions_per_second.is_some_and(|rate| opened >= rate.into())
            || limits.sessions.is_some_and(|most| sessions >= most);
        match is_over {
            true => Err(OverQuota),
            false if sessions < limits.guaranteed_ports.unwrap_or(0) => Ok(Claim::Guaranteed),
            false => Ok(Claim::Ordinary),
        }
    }

    /// Counts a session that was open before this process began, whatever the limits say now.
    pub fn adopt(&self) {
        self.sessions.fetch_add(1, Relaxed);
    }

    /// Counts one session less.
    pub fn close(&self) {
        // Never below zero: an endpoint that policy dropped and took up again starts from nothing.
        let _ = self.sessions.fetch_update(Relaxed, Relaxed, |now| now.checked_sub(1));
    }

    /// Takes back what [`Self::open`] has counted: there was no port, or no room, and another worker may be asked.
    pub fn withdraw(&self, now: Tick) {
        self.close();
        let second = u64::from(now.0 / 1000);
        // Without a limit nothing was counted; a second later it doesn't count any more.
        let _ = self
            .second
            .fetch_update(Relaxed, Relaxed, |word| (word >> 32 == second && word & 0xffff_ffff > 0).then(|| word - 1));
    }

    /// Counts a session that it was refused, for want of quota, ports or room.
    pub fn refuse(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Sessions that it was refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Sessions open now.
    pub fn sessions(&self) -> u32 {
        self.sessions.load(Relaxed)
    }
}

#[cfg(all(test, feature = "loom"))]
mod every_order {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn a_limit_holds_for_two_workers_at_once() {
        for limits in [
            Limits { sessions: Some(1), ..Limits::default() },
            Limits { new_sessions_per_second: Some(1), ..Limits::default() },
        ] {
            loom::model(move || {
                let usage = Arc::new(EndpointUse::default());
                let other = {
                    let usage = usage.clone();
                    thread::spawn(move || usage.open(limits, Tick(5)).is_ok())
                };
                let own = usage.open(limits, Tick(5)).is_ok();
                assert!(own != other.join().unwrap(), "one of the two");
                assert_eq!(usage.sessions(), 1);
            });
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn both_limits_hold_and_the_rate_renews_each_second() {
        let usage = EndpointUse::default();
        let limits = Limits { sessions: Some(3), new_sessions_per_second: Some(2), guaranteed_ports: Some(1) };
        let open = |now| {
            let foretold = usage.would_open(limits, 0, Tick(now));
            let outcome = usage.open(limits, Tick(now));
            assert_eq!(foretold, outcome, "at {now} ms");
            outcome
        };
        assert_eq!(open(10), Ok(Claim::Guaranteed));
        assert_eq!(open(20), Ok(Claim::Ordinary));
        assert_eq!(open(999), Err(OverQuota));
        assert_eq!(open(1000), Ok(Claim::Ordinary));
        assert_eq!(open(2000), Err(OverQuota), "three are open");
        usage.close();
        assert_eq!(open(3000), Ok(Claim::Ordinary));
        assert_eq!(usage.sessions(), 3);
    }

    #[test]
    fn what_is_withdrawn_counts_against_no_limit() {
        let usage = EndpointUse::default();
        let limits = Limits { sessions: Some(5), new_sessions_per_second: Some(1), guaranteed_ports: None };
        for _ in 0..3 {
            assert!(usage.open(limits, Tick(10)).is_ok());
            usage.withdraw(Tick(10));
        }
        assert_eq!(usage.sessions(), 0);
        assert!(usage.open(limits, Tick(10)).is_ok());
        usage.withdraw(Tick(1000));
        assert!(usage.open(limits, Tick(999)).is_err(), "a second later there is nothing to take back");
    }
}
