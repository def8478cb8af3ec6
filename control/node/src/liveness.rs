//! Whether gateways answer: echo requests in their tunnels at a fixed interval. Time and nonces are arguments.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Identifies an echo request: only who receives it can answer.
pub type Nonce = [u8; 16];

/// Consecutive unanswered requests after which a gateway is unreachable, and consecutive answers after which it is
/// reachable again.
const MAX_UNANSWERED: u32 = 3;
const MIN_ANSWERED: u32 = 2;
/// Requests of a gateway that still may be answered.
const MAX_PENDING: usize = 8;

/// The echo state of all gateways.
#[derive(Debug, Default)]
pub struct Liveness {
    gateways: BTreeMap<Arc<str>, Echo>,
}

/// The echo state of a gateway.
#[derive(Debug, Default)]
struct Echo {
    is_unreachable: bool,
    /// Consecutive requests without an answer, and consecutive answers.
    unanswered: u32,
    answered: u32,
    pending: Vec<(Nonce, Instant)>,
    /// Round-trip time of the last answer.
    round_trip: Option<Duration>,
}

/// What an answer means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub gateway: Arc<str>,
    /// Whether it has become reachable by it.
    pub is_change: bool,
}

impl Liveness {
    /// Forgets all other gateways; new ones count as reachable until they don't answer.
    pub fn retain(&mut self, gateways: impl Iterator<Item = Arc<str>>) {
        let mut before = std::mem::take(&mut self.gateways);
        self.gateways = gateways.map(|name| (name.clone(), before.remove(&name).unwrap_or_default())).collect();
    }

    /// Whether a gateway is reachable, as far as echoes show.
    pub fn is_reachable(&self, gateway: &str) -> bool {
        self.gateways.get(gateway).is_none_or(|echo| !echo.is_unreachable)
    }

    /// Round-trip time of the last answer.
    pub fn round_trip(&self, gateway: &str) -> Option<Duration> {
        self.gateways.get(gateway)?.round_trip
    }

    /// Notes that a request is sent now. Returns whether the gateway has become unreachable, since the ones before
    /// weren't answered.
    pub fn request(&mut self, gateway: &str, nonce: Nonce, now: Instant) -> bool {
        let Some(echo) = self.gateways.get_mut(gateway) else { return false };
        let is_change = !echo.is_unreachable && echo.unanswered >= MAX_UNANSWERED;
        if is_change {
            (echo.is_unreachable, echo.answered) = (true, 0);
        }
        echo.unanswered = echo.unanswered.saturating_add(1);
        if echo.unanswered > 1 {
            echo.answered = 0;
        }
        if echo.pending.len() == MAX_PENDING {
            echo.pending.remove(0);
        }
        echo.pending.push((nonce, now));
        is_change
    }

    /// Notes an answer; `None` if nobody asked, or it came before.
    pub fn answer(&mut self, nonce: Nonce, now: Instant) -> Option<Answer> {
        let found = self.gateways.iter_mut().find_map(|(name, echo)| {
            let at = echo.pending.iter().position(|(pending, _)| *pending == nonce)?;
            Some((name, echo, at))
        });
        let (name, echo, at) = found?;
        let (_, sent) = echo.pending[at];
        // Earlier ones may be lost; a later answer says more.
        echo.pending.drain(..=at);
        echo.round_trip = Some(now.saturating_duration_since(sent));
        (echo.unanswered, echo.answered) = (0, echo.answered.saturating_add(1));
        let is_change = echo.is_unreachable && echo.answered >= MIN_ANSWERED;
        if is_change {
            echo.is_unreachable = false;
        }
        Some(Answer { gateway: name.clone(), is_change })
    }

    /// Takes back that requests were unanswered: this process wasn't running, or had no socket.
    pub fn excuse(&mut self) {
        for echo in self.gateways.values_mut() {
            echo.unanswered = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(100);

    fn nonce(number: u8) -> Nonce {
        [number; 16]
    }

    fn with(names: &[&str]) -> Liveness {
        let mut liveness = Liveness::default();
        liveness.retain(names.iter().map(|name| Arc::from(*name)));
        liveness
    }

    #[test]
    fn three_unanswered_requests_make_a_gateway_unreachable_and_two_answers_reachable_again() {
        let (mut liveness, start) = (with(&["a", "b"]), Instant::now());
        let sent: Vec<bool> = (0..4).map(|n| liveness.request("a", nonce(n), start + STEP * u32::from(n))).collect();
        assert_eq!(sent, [false, false, false, true]);
        assert!(!liveness.is_reachable("a") && liveness.is_reachable("b"));
        let answer = liveness.answer(nonce(3), start + STEP * 3).unwrap();
        assert_eq!(answer, Answer { gateway: "a".into(), is_change: false });
        assert!(!liveness.request("a", nonce(4), start + STEP * 4));
        assert!(liveness.answer(nonce(4), start + STEP * 5).unwrap().is_change);
        assert!(liveness.is_reachable("a"));
        assert_eq!(liveness.round_trip("a"), Some(STEP));
    }

    #[test]
    fn an_answer_counts_once_and_only_if_it_was_asked_for() {
        let (mut liveness, start) = (with(&["a"]), Instant::now());
        liveness.request("a", nonce(1), start);
        liveness.request("a", nonce(2), start);
        assert_eq!(liveness.answer(nonce(9), start), None);
        assert!(liveness.answer(nonce(2), start).is_some());
        // Neither the same one again nor an earlier one.
        assert_eq!((liveness.answer(nonce(2), start), liveness.answer(nonce(1), start)), (None, None));
    }

    #[test]
    fn a_gateway_that_answers_every_third_time_stays_as_it_is() {
        let (mut liveness, start) = (with(&["a"]), Instant::now());
        for n in 0..90 {
            assert!(!liveness.request("a", nonce(n), start));
            if n % 3 == 2 {
                liveness.answer(nonce(n), start);
            }
        }
        for n in 100..104 {
            liveness.request("a", nonce(n), start);
        }
        assert!(!liveness.is_reachable("a"));
        // One answer of three: never two in a row.
        for n in 110..200 {
            liveness.request("a", nonce(n), start);
            assert!(n % 3 != 2 || !liveness.answer(nonce(n), start).unwrap().is_change);
        }
    }

    #[test]
    fn what_is_pending_is_bounded_and_a_removed_gateway_forgotten() {
        let (mut liveness, start) = (with(&["a"]), Instant::now());
        for n in 0..100 {
            liveness.request("a", nonce(n), start);
        }
        assert_eq!(liveness.gateways["a"].pending.len(), MAX_PENDING);
        liveness.retain(std::iter::once("b".into()));
        assert!(liveness.answer(nonce(99), start).is_none() && liveness.is_reachable("a"));
    }
}
