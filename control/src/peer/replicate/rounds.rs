//! Numbers for rounds of telling all. A copy remembers in which round it was named last, in four bits, so numbers come again; one that
//! an old copy may still have would keep that copy from being forgotten.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Numbers below this, and not 0: that is what copies have that were never named.
const ROUNDS: u8 = 16;

/// Which numbers copies may have, by the gateway that named them. Links come and go; copies stay.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds(Arc<Mutex<Marks>>);

#[derive(Debug, Default)]
struct Marks {
    last: u8,
    /// A bit for each number.
    used: HashMap<Arc<str>, u16>,
}

/// A round of telling all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    /// What its copies are marked with.
    pub(super) mark: u8,
    /// Whether copies of rounds that came to no end may have this mark too: then all must be told once more.
    pub(super) blurred: bool,
}

impl Rounds {
    /// A gateway begins a round: its mark is one that no copy has; if there is none, one that no copy of this gateway has, since
    /// shares seldom pass from one to another.
    pub(super) fn begin(&self, gateway: &Arc<str>) -> Round {
        let mut marks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = marks.used.get(gateway).copied().unwrap_or(0);
        let all = marks.used.values().fold(0, |all, used| all | used);
        let after = marks.last;
        let order = || (0..ROUNDS - 1).map(|step| (after + step) % (ROUNDS - 1) + 1);
        let free = |used: u16| order().find(|&mark| used & 1 << mark == 0);
        let clear = free(all).or_else(|| free(own));
        let mark = clear.or_else(|| order().next()).unwrap_or(1);
        marks.last = mark;
        *marks.used.entry(gateway.clone()).or_default() |= 1 << mark;
        Round { mark, blurred: clear.is_none() }
    }

    /// A gateway's round has come to its end: its copies have this mark and no other.
    pub(super) fn end(&self, gateway: &Arc<str>, mark: u8) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).used.insert(gateway.clone(), 1 << mark);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_without_an_end_use_numbers_up_and_that_is_noticed() {
        let (rounds, gateway) = (Rounds::default(), Arc::from("a"));
        let marks: Vec<_> = (0..15).map(|_| rounds.begin(&gateway)).collect();
        assert!(marks.iter().enumerate().all(|(n, round)| *round == Round { mark: n as u8 + 1, blurred: false }));
        let blurred = rounds.begin(&gateway);
        assert!(blurred.blurred);
        rounds.end(&gateway, blurred.mark);
        let next = rounds.begin(&gateway);
        assert!(!next.blurred && next.mark != blurred.mark);
    }

    #[test]
    fn marks_of_two_gateways_differ_however_often_one_begins() {
        let (rounds, a, b) = (Rounds::default(), Arc::from("a"), Arc::from("b"));
        let of_a = rounds.begin(&a);
        rounds.end(&a, of_a.mark);
        for _ in 0..100 {
            let of_b = rounds.begin(&b);
            assert_ne!(of_b.mark, of_a.mark);
            assert!(!of_b.blurred);
            rounds.end(&b, of_b.mark);
        }
        assert!(!rounds.begin(&a).blurred);
    }
}
