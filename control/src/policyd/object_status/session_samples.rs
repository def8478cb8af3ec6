//! Numbers of sessions as of their last sample: they change all the time, and no status is written more often than that
//! for them alone. A new leader writes none at once, so that it writes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::inputs::GatewayFacts;

/// How often numbers are sampled.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(30);

/// The last sample.
#[derive(Debug, Default)]
pub(super) struct SessionSamples {
    /// How long this server was the leader then; 0: none yet.
    taken: Duration,
    by_gateway: BTreeMap<Arc<str>, u64>,
}

impl SessionSamples {
    /// Replaces the numbers of gateways by those of the last sample, or takes a new one. Before the first one they are
    /// unknown.
    pub(super) fn apply(&mut self, gateways: &mut [GatewayFacts], leading_for: Duration) {
        if leading_for < self.taken {
            // It leads once more.
            *self = Self::default();
        }
        if leading_for.saturating_sub(self.taken) >= SAMPLE_INTERVAL {
            self.taken = leading_for;
            self.by_gateway.clear();
        }
        for gateway in gateways {
            gateway.sessions = match gateway.sessions {
                Some(sessions) if !self.taken.is_zero() => {
                    Some(*self.by_gateway.entry(gateway.name.clone()).or_insert(sessions))
                }
                _ => None,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_change_with_samples_and_a_new_gateway_has_its_number_at_once() {
        let mut samples = SessionSamples::default();
        let mut at = |seconds, reported: [Option<u64>; 2]| {
            let names = ["g1", "g2"].into_iter().zip(reported);
            let facts =
                names.map(|(name, sessions)| GatewayFacts { name: name.into(), sessions, ..Default::default() });
            let mut facts: Vec<GatewayFacts> = facts.collect();
            samples.apply(&mut facts, Duration::from_secs(seconds));
            [facts[0].sessions, facts[1].sessions]
        };
        assert_eq!(at(29, [Some(1), None]), [None, None], "a new leader");
        assert_eq!(at(30, [Some(1), None]), [Some(1), None]);
        assert_eq!(at(59, [Some(9), Some(2)]), [Some(1), Some(2)]);
        assert_eq!(at(60, [Some(9), Some(3)]), [Some(9), Some(3)]);
        assert_eq!(at(61, [None, Some(4)]), [None, Some(3)], "a gateway that is gone has none");
        assert_eq!(at(1, [Some(5), Some(5)]), [None, None], "a leader once more");
    }
}
