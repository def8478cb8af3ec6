//! Liveness state machine of next hops: rounds of probes and replies.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use vipgate_dataplane::flow::ids::InterfaceId;

use super::NextHop;

/// The liveness of a next hop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum NextHopState {
    /// It has never replied.
    #[default]
    Unknown,
    /// It replies.
    Up,
    /// It has replied before and no longer does.
    Down,
}

impl NextHopState {
    /// Its name in output and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// One next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHopStatus {
    pub interface: InterfaceId,
    pub address: IpAddr,
    /// Its liveness.
    pub state: NextHopState,
    /// When it last replied.
    pub last_reply: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ProbeState {
    state: NextHopState,
    answered: Option<Instant>,
    /// Consecutive unanswered probes.
    missed: u32,
    /// A probe was sent in this round.
    is_probed: bool,
}

/// All probed next hops.
#[derive(Debug)]
pub(super) struct Liveness {
    failures: u32,
    hops: BTreeMap<NextHop, ProbeState>,
}

impl Liveness {
    /// No next hops yet; `failures` consecutive unanswered probes mean down.
    pub(super) fn new(failures: u32) -> Self {
        Self { failures: failures.max(1), hops: BTreeMap::new() }
    }

    /// Sets the next hops to probe; those probed before keep their state.
    pub(super) fn set_next_hops(&mut self, hops: &[NextHop]) {
        let mut before = std::mem::take(&mut self.hops);
        self.hops = hops.iter().map(|hop| (*hop, before.remove(hop).unwrap_or_default())).collect();
    }

    /// A reply was received.
    pub(super) fn reply_received(&mut self, hop: NextHop, now: Instant) {
        if let Some(it) = self.hops.get_mut(&hop) {
            *it = ProbeState { state: NextHopState::Up, answered: Some(now), missed: 0, is_probed: false };
        }
    }

    /// Ends a round, after all its replies were received, and begins the next one. Returns the next hops to probe, and
    /// whether their last probe was unanswered.
    pub(super) fn next_round(&mut self) -> Vec<(NextHop, bool)> {
        for it in self.hops.values_mut() {
            if std::mem::take(&mut it.is_probed) {
                it.missed = it.missed.saturating_add(1);
                if it.missed >= self.failures && it.state == NextHopState::Up {
                    it.state = NextHopState::Down;
                }
            }
        }
        self.hops.iter().map(|(hop, it)| (*hop, it.missed > 0)).collect()
    }

    /// A probe was sent.
    pub(super) fn probe_sent(&mut self, hop: NextHop) {
        if let Some(it) = self.hops.get_mut(&hop) {
            it.is_probed = true;
        }
    }

    /// The state of all next hops.
    pub(super) fn status(&self) -> Vec<NextHopStatus> {
        let status = |(&(interface, address), it): (&NextHop, &ProbeState)| NextHopStatus {
            interface,
            address,
            state: it.state,
            last_reply: it.answered,
        };
        self.hops.iter().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hop(number: u8) -> NextHop {
        (InterfaceId(number % 2), IpAddr::from([192, 0, 2, number]))
    }

    fn state(liveness: &Liveness, number: u8) -> NextHopState {
        liveness.status().iter().find(|it| it.address == hop(number).1).unwrap().state
    }

    fn probe_all(liveness: &mut Liveness) {
        for (hop, _) in liveness.next_round() {
            liveness.probe_sent(hop);
        }
    }

    #[test]
    fn three_unanswered_probes_mean_down_and_one_reply_means_up() {
        let (mut liveness, now) = (Liveness::new(3), Instant::now());
        liveness.set_next_hops(&[hop(1), hop(2)]);
        for _ in 0..10 {
            probe_all(&mut liveness);
            assert_eq!(state(&liveness, 2), NextHopState::Unknown, "it has never replied");
        }
        for _ in 0..3 {
            liveness.reply_received(hop(1), now);
            probe_all(&mut liveness);
            assert_eq!(state(&liveness, 1), NextHopState::Up);
            // Rounds without a probe don't count as failures.
            liveness.reply_received(hop(1), now);
            for _ in 0..9 {
                liveness.next_round();
            }
            probe_all(&mut liveness);
            for _ in 0..2 {
                probe_all(&mut liveness);
                assert_eq!(state(&liveness, 1), NextHopState::Up);
            }
            assert!(liveness.next_round().iter().any(|(it, is_lost)| *it == hop(1) && *is_lost));
            assert_eq!(state(&liveness, 1), NextHopState::Down);
        }
        // With a new set, the remaining next hops keep their state.
        liveness.set_next_hops(&[hop(1), hop(3)]);
        assert_eq!((state(&liveness, 1), state(&liveness, 3)), (NextHopState::Down, NextHopState::Unknown));
        liveness.set_next_hops(&[]);
        liveness.reply_received(hop(1), now);
        assert!(liveness.status().is_empty());
    }

    proptest! {
        /// For any loss pattern: down is a next hop that has replied once and then missed `failures` consecutive
        /// probes.
        #[test]
        fn a_next_hop_is_down_after_one_reply_and_enough_consecutive_losses(
            failures in 1u32..6, replies in proptest::collection::vec(any::<bool>(), 1..60),
        ) {
            let (mut liveness, now) = (Liveness::new(failures), Instant::now());
            liveness.set_next_hops(&[hop(1)]);
            let (mut has_replied, mut missed) = (false, 0);
            probe_all(&mut liveness);
            for is_reply in replies {
                if is_reply {
                    liveness.reply_received(hop(1), now);
                    (has_replied, missed) = (true, 0);
                } else {
                    missed += 1;
                }
                probe_all(&mut liveness);
                let expected = match (has_replied, missed >= failures) {
                    (false, _) => NextHopState::Unknown,
                    (true, false) => NextHopState::Up,
                    (true, true) => NextHopState::Down,
                };
                // Down until the next reply, which means up at once.
                prop_assert_eq!(state(&liveness, 1), expected);
            }
        }
    }
}
