//! Numbers of sync rounds. A standby session stores the number of the last round that listed it, in four bits, so
//! numbers are reused. A number that stale standby sessions may still have must not be reused: it would keep them from
//! being purged.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Round numbers are less than this. 0 is reserved for sessions that no round has listed.
const ROUNDS: u8 = 16;

/// The round numbers that standby sessions may have, by the gateway that sent them. Outlives links, as standby sessions
/// do.
#[derive(Clone, Debug, Default)]
pub struct SyncRounds(Arc<Mutex<UsedNumbers>>);

#[derive(Clone, Debug, Default)]
struct UsedNumbers {
    last: u8,
    /// Bitmap of numbers.
    used: HashMap<Arc<str>, u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncRound {
    /// The number that standby sessions of this round get.
    pub number: u8,
    /// Whether standby sessions of unfinished rounds may have this number, too. Then another full sync is needed.
    pub ambiguous: bool,
}

impl SyncRounds {
    /// Starts a round of a gateway with a number that no standby session has. If all are in use, with one that no
    /// standby session of this gateway has, since shards rarely move between gateways.
    pub fn begin(&self, gateway: &Arc<str>) -> SyncRound {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let used_by_gateway = numbers.used.get(gateway).copied().unwrap_or(0);
        let used_by_all = numbers.used.values().fold(0, |bits, used| bits | used);
        let after = numbers.last;
        let order = || (0..ROUNDS - 1).map(|step| (after + step) % (ROUNDS - 1) + 1);
        let first_unused = |used: u16| order().find(|&number| used & 1 << number == 0);
        let unused = first_unused(used_by_all).or_else(|| first_unused(used_by_gateway));
        let number = unused.or_else(|| order().next()).unwrap_or(1);
        numbers.last = number;
        *numbers.used.entry(gateway.clone()).or_default() |= 1 << number;
        SyncRound { number, ambiguous: unused.is_none() }
    }

    /// A copy that shares nothing.
    #[cfg(test)]
    pub fn detached(&self) -> Self {
        let numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Self(Arc::new(Mutex::new(numbers.clone())))
    }

    /// Ends a gateway's round: all standby sessions from it have this number now.
    pub fn end(&self, gateway: &Arc<str>, number: u8) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).used.insert(gateway.clone(), 1 << number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_rounds_exhaust_the_numbers_and_the_next_one_is_ambiguous() {
        let (rounds, gateway) = (SyncRounds::default(), Arc::from("a"));
        let numbers: Vec<_> = (0..15).map(|_| rounds.begin(&gateway)).collect();
        assert!(
            numbers.iter().enumerate().all(|(n, round)| *round == SyncRound { number: n as u8 + 1, ambiguous: false })
        );
        let ambiguous = rounds.begin(&gateway);
        assert!(ambiguous.ambiguous);
        rounds.end(&gateway, ambiguous.number);
        let next = rounds.begin(&gateway);
        assert!(!next.ambiguous && next.number != ambiguous.number);
    }

    #[test]
    fn numbers_of_two_gateways_differ_however_many_rounds_one_starts() {
        let (rounds, a, b) = (SyncRounds::default(), Arc::from("a"), Arc::from("b"));
        let of_a = rounds.begin(&a);
        rounds.end(&a, of_a.number);
        for _ in 0..100 {
            let of_b = rounds.begin(&b);
            assert_ne!(of_b.number, of_a.number);
            assert!(!of_b.ambiguous);
            rounds.end(&b, of_b.number);
        }
        assert!(!rounds.begin(&a).ambiguous);
    }
}
