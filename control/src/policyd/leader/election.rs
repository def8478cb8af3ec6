//! Decisions of an election by a Lease, without I/O and clock.
//!
//! A server leads for the Lease's duration from the moment that it began to renew it; others count that duration from
//! when they see the renewal, which is later. So the first has stopped before another begins, if clocks run at the same
//! speed; the clocks' times don't matter.

use std::time::Duration;

/// How long a Lease is valid after its renewal.
pub(super) const LEASE_DURATION: Duration = Duration::from_secs(4);
/// How often the leader renews it.
pub(super) const RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// How often others look at it: with the duration, the time until another server leads.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How much earlier than the Lease ends the leader ceases to act.
pub(super) const MARGIN: Duration = Duration::from_millis(500);

/// A Lease as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::policyd) struct LeaseState {
    /// Identity of the holder; empty: it was released.
    pub(super) holder: String,
    /// Changes with each write.
    pub(super) version: String,
    pub(super) duration: Duration,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Create the Lease.
    Create,
    /// Write the Lease as its holder.
    Acquire,
    /// Read it again after this time.
    Wait(Duration),
}

/// A candidate.
#[derive(Debug)]
pub(super) struct Election {
    identity: String,
    /// Version of the Lease that was seen last, and when it was seen first.
    seen: Option<(String, Duration)>,
    /// Until when this server holds the Lease.
    held_until: Option<Duration>,
}

impl Election {
    pub(super) fn new(identity: String) -> Self {
        Self { identity, seen: None, held_until: None }
    }

    /// What to do about the Lease that was read; `None`: there is none.
    pub(super) fn observe(&mut self, lease: Option<&LeaseState>, now: Duration) -> Step {
        let Some(lease) = lease else { return Step::Create };
        if lease.holder == self.identity {
            return Step::Acquire;
        }
        self.held_until = None;
        if lease.holder.is_empty() {
            return Step::Acquire;
        }
        let since = match &self.seen {
            Some((version, since)) if *version == lease.version => *since,
            _ => {
                self.seen = Some((lease.version.clone(), now));
                now
            }
        };
        let left = (since + lease.duration).saturating_sub(now);
        if left.is_zero() { Step::Acquire } else { Step::Wait(left.min(POLL_INTERVAL)) }
    }

    /// The Lease was written by a request that began at this time.
    pub(super) fn acquired(&mut self, began: Duration) {
        self.held_until = Some(began + LEASE_DURATION);
    }

    /// Until when this server may act as the leader; `None`: it may not.
    pub(super) fn leads_until(&self, now: Duration) -> Option<Duration> {
        self.held_until.map(|end| end.saturating_sub(MARGIN)).filter(|end| *end > now)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::Config;
    use vipgate_coverage::property;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn lease(holder: &str, version: u64) -> LeaseState {
        LeaseState { holder: holder.to_owned(), version: version.to_string(), duration: LEASE_DURATION }
    }

    #[test]
    fn a_lease_that_is_not_renewed_is_acquired_after_its_duration() {
        let mut election = Election::new("b".to_owned());
        assert_eq!(election.observe(None, ms(0)), Step::Create);
        assert_eq!(election.observe(Some(&lease("a", 1)), ms(1000)), Step::Wait(POLL_INTERVAL));
        assert_eq!(election.observe(Some(&lease("a", 2)), ms(4900)), Step::Wait(POLL_INTERVAL), "renewed");
        assert_eq!(election.observe(Some(&lease("a", 2)), ms(8800)), Step::Wait(ms(100)));
        assert_eq!(election.observe(Some(&lease("a", 2)), ms(8900)), Step::Acquire);
        assert_eq!(election.leads_until(ms(8900)), None);
        election.acquired(ms(8900));
        assert_eq!(election.leads_until(ms(9000)), Some(ms(12_400)));
        assert_eq!(election.leads_until(ms(12_400)), None, "it can't renew it");
    }

    #[test]
    fn a_released_lease_is_acquired_at_once_and_a_lost_one_ends_the_lead() {
        let mut election = Election::new("b".to_owned());
        assert_eq!(election.observe(Some(&lease("", 1)), ms(0)), Step::Acquire);
        election.acquired(ms(0));
        assert_eq!(election.observe(Some(&lease("b", 2)), ms(1)), Step::Acquire, "its own: it renews it");
        assert!(election.leads_until(ms(1)).is_some());
        assert!(matches!(election.observe(Some(&lease("a", 3)), ms(2)), Step::Wait(_)));
        assert_eq!(election.leads_until(ms(2)), None);
    }

    /// A candidate in virtual time.
    struct Candidate {
        election: Election,
        /// When it does something next, and whether it is dead.
        next: u64,
        is_dead: bool,
    }

    #[test]
    fn no_two_lead_at_once_and_one_leads_soon() {
        // Of each step: its candidate's delays before and after the request takes effect, and what fails.
        let step = (0..700_u64, 0..700_u64, 0..10_u8);
        let strategy = prop::collection::vec(step, 20..200);
        let classes = ["led", "taken over", "lost reply", "died", "conflict"];
        property(Config { cases: 1000, ..Config::default() }, &strategy, &classes, |steps, coverage| {
            let names = ["a", "b", "c"];
            let mut all: Vec<Candidate> = (0..3)
                .map(|n| Candidate { election: Election::new(names[n].to_owned()), next: n as u64, is_dead: false })
                .collect();
            let mut stored: Option<LeaseState> = None;
            let mut version = 0;
            // Leads as intervals, in the order of their beginning.
            let mut leads: Vec<(usize, u64, u64)> = Vec::new();
            for (before, after, fault) in steps {
                let Some(at) = (0..3).filter(|at| !all[*at].is_dead).min_by_key(|at| all[*at].next) else { break };
                let candidate = &mut all[at];
                let now = candidate.next;
                if fault == 0 && at > 0 {
                    candidate.is_dead = true;
                    coverage.count("died");
                    continue;
                }
                // Requests of one candidate take effect in order; those of others may come between, so a write compares.
                let read = stored.clone();
                match candidate.election.observe(read.as_ref(), ms(now)) {
                    Step::Wait(delay) => candidate.next = now + u64::try_from(delay.as_millis()).unwrap() + 1,
                    Step::Create | Step::Acquire => {
                        let effect = now + before;
                        let is_conflict = fault == 1;
                        if is_conflict {
                            coverage.count("conflict");
                        } else {
                            version += 1;
                            if let Some((last, _, end)) = leads.last().filter(|(last, ..)| *last != at) {
                                prop_assert!(*end <= effect, "{} leads until {end}, {at} from {effect}", last);
                                coverage.count("taken over");
                            }
                            stored = Some(lease(names[at], version));
                            if fault == 2 {
                                coverage.count("lost reply");
                            } else {
                                candidate.election.acquired(ms(now));
                            }
                        }
                        let end = effect + after;
                        if let Some(until) = candidate.election.leads_until(ms(end)) {
                            leads.push((at, end, u64::try_from(until.as_millis()).unwrap()));
                            coverage.count("led");
                        }
                        candidate.next = end + 1000;
                        // Others see the write only from here on.
                        for other in all.iter_mut().filter(|other| other.next < effect) {
                            other.next = effect;
                        }
                    }
                }
            }
            Ok(())
        });
    }
}
