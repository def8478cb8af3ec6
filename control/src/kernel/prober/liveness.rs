//! Which next hops answer: decided from probes and answers alone, in rounds.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use vipgate_dataplane::io::InterfaceId;

use super::Hop;

/// Whether a next hop answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum NextHopState {
    /// It has never answered: perhaps it never does.
    #[default]
    Unknown,
    /// It does.
    Up,
    /// It did, and does no more.
    Down,
}

impl NextHopState {
    /// Its word for people and programs.
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
    /// The interface that it is behind.
    pub interface: InterfaceId,
    /// Its address.
    pub address: IpAddr,
    /// Whether it answers.
    pub state: NextHopState,
    /// When it answered last.
    pub answered: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Hopeful {
    state: NextHopState,
    answered: Option<Instant>,
    /// Probes in a row without an answer.
    missed: u32,
    /// A probe of this round is on its way.
    is_probed: bool,
}

/// All next hops that are probed.
#[derive(Debug)]
pub(super) struct Liveness {
    failures: u32,
    hops: BTreeMap<Hop, Hopeful>,
}

impl Liveness {
    /// None yet. So many probes in a row without an answer are a dead next hop.
    pub(super) fn new(failures: u32) -> Self {
        Self { failures: failures.max(1), hops: BTreeMap::new() }
    }

    /// These are probed from now on; what is known of those that were probed before stays.
    pub(super) fn set_hops(&mut self, hops: &[Hop]) {
        let mut before = std::mem::take(&mut self.hops);
        self.hops = hops.iter().map(|hop| (*hop, before.remove(hop).unwrap_or_default())).collect();
    }

    /// One has answered.
    pub(super) fn answered(&mut self, hop: Hop, now: Instant) {
        if let Some(it) = self.hops.get_mut(&hop) {
            *it = Hopeful { state: NextHopState::Up, answered: Some(now), missed: 0, is_probed: false };
        }
    }

    /// Ends a round, after all answers that have come, and begins the next one: what is to be probed, and whether the last probe of it
    /// was in vain.
    pub(super) fn round(&mut self) -> Vec<(Hop, bool)> {
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

    /// A probe has been sent.
    pub(super) fn probed(&mut self, hop: Hop) {
        if let Some(it) = self.hops.get_mut(&hop) {
            it.is_probed = true;
        }
    }

    /// How all of them stand.
    pub(super) fn status(&self) -> Vec<NextHopStatus> {
        let status = |(&(interface, address), it): (&Hop, &Hopeful)| NextHopStatus {
            interface,
            address,
            state: it.state,
            answered: it.answered,
        };
        self.hops.iter().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hop(number: u8) -> Hop {
        (InterfaceId(number % 2), IpAddr::from([192, 0, 2, number]))
    }

    fn state(liveness: &Liveness, number: u8) -> NextHopState {
        liveness.status().iter().find(|it| it.address == hop(number).1).unwrap().state
    }

    fn probe_all(liveness: &mut Liveness) {
        for (hop, _) in liveness.round() {
            liveness.probed(hop);
        }
    }

    #[test]
    fn three_probes_in_vain_are_a_dead_next_hop_and_one_answer_a_live_one() {
        let (mut liveness, now) = (Liveness::new(3), Instant::now());
        liveness.set_hops(&[hop(1), hop(2)]);
        for _ in 0..10 {
            probe_all(&mut liveness);
            assert_eq!(state(&liveness, 2), NextHopState::Unknown, "it has never answered");
        }
        for _ in 0..3 {
            liveness.answered(hop(1), now);
            probe_all(&mut liveness);
            assert_eq!(state(&liveness, 1), NextHopState::Up);
            // What can't be probed misses nothing.
            liveness.answered(hop(1), now);
            for _ in 0..9 {
                liveness.round();
            }
            probe_all(&mut liveness);
            for _ in 0..2 {
                probe_all(&mut liveness);
                assert_eq!(state(&liveness, 1), NextHopState::Up);
            }
            assert!(liveness.round().iter().any(|(it, is_lost)| *it == hop(1) && *is_lost));
            assert_eq!(state(&liveness, 1), NextHopState::Down);
        }
        // Other next hops are asked for; it keeps what is known of those that stay.
        liveness.set_hops(&[hop(1), hop(3)]);
        assert_eq!((state(&liveness, 1), state(&liveness, 3)), (NextHopState::Down, NextHopState::Unknown));
        liveness.set_hops(&[]);
        liveness.answered(hop(1), now);
        assert!(liveness.status().is_empty());
    }

    proptest! {
        /// Whatever is lost: dead is who answered once, and has not answered as many probes in a row as it takes.
        #[test]
        fn dead_is_who_answered_once_and_then_missed_enough_in_a_row(
            failures in 1u32..6, answers in proptest::collection::vec(any::<bool>(), 1..60),
        ) {
            let (mut liveness, now) = (Liveness::new(failures), Instant::now());
            liveness.set_hops(&[hop(1)]);
            let (mut ever, mut missed) = (false, 0);
            probe_all(&mut liveness);
            for answer in answers {
                if answer {
                    liveness.answered(hop(1), now);
                    (ever, missed) = (true, 0);
                } else {
                    missed += 1;
                }
                probe_all(&mut liveness);
                let expected = match (ever, missed >= failures) {
                    (false, _) => NextHopState::Unknown,
                    (true, false) => NextHopState::Up,
                    (true, true) => NextHopState::Down,
                };
                // Down stays until an answer comes, which makes it up at once.
                prop_assert_eq!(state(&liveness, 1), expected);
            }
        }
    }
}
