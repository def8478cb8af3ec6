//! Receiver state of one link: checks the order of numbered frames, and assigns received records to sync rounds.

use std::sync::Arc;

use vipgate_dataplane::session::record::ReplicationRecord;

use super::sync_rounds::{SyncRound, SyncRounds};
use super::{NumberedFrame, ProtocolViolation, Release};

/// The action that a frame requires. The frame's number is acknowledged when the action is done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// A sync round begins.
    BeginRound {
        /// The view that the peer uses.
        view: u64,
        /// The last frame of this gateway that the peer had applied; 0: none.
        applied: u64,
    },
    /// Apply these records.
    Apply {
        records: Vec<ReplicationRecord>,
        /// The number that their standby sessions get.
        round: u8,
    },
    /// A sync round ends: purge standby sessions that it hasn't listed. Then the standby sessions are complete.
    Purge {
        /// The number of its standby sessions.
        round: u8,
        /// The view of the peer.
        view: u64,
        /// The version of its policy; empty: this gateway isn't in it.
        policy: Arc<str>,
        /// Whether another full sync is needed.
        needs_resync: bool,
    },
    /// The peer has released shards.
    Released(Release),
}

/// State of one link's sequence of frames.
#[derive(Clone, Debug)]
pub struct ReceiveState {
    peer: Arc<str>,
    rounds: SyncRounds,
    last: u64,
    /// The round that received records belong to; `None` before the first one of the link.
    round: Option<SyncRound>,
    /// The peer's number of the current round, and its view at the start; `None` between rounds.
    current: Option<(u32, u64)>,
}

impl ReceiveState {
    /// The state of a new link.
    pub fn new(peer: Arc<str>, rounds: SyncRounds) -> Self {
        Self { peer, rounds, last: 0, round: None, current: None }
    }

    /// Checks a frame; returns its number and the required action.
    ///
    /// # Errors
    /// If it violates the protocol.
    pub fn process(&mut self, frame: NumberedFrame) -> Result<(u64, Action), ProtocolViolation> {
        let (number, step) = match frame {
            NumberedFrame::Sessions { number, records } => {
                let round = self.round.ok_or(ProtocolViolation("sessions before the first SyncBegin"))?;
                (number, Action::Apply { records, round: round.number })
            }
            NumberedFrame::SyncBegin { number, round, view, applied } => {
                self.current = Some((round, view));
                self.round = Some(self.rounds.begin(&self.peer));
                (number, Action::BeginRound { view, applied })
            }
            NumberedFrame::SyncEnd { number, round: ended, policy } => {
                let begun = self.current.take().filter(|(round, _)| *round == ended);
                let (Some((_, view)), Some(round)) = (begun, self.round) else {
                    return Err(ProtocolViolation("SyncEnd without a matching SyncBegin"));
                };
                (number, Action::Purge { round: round.number, view, policy, needs_resync: round.ambiguous })
            }
            NumberedFrame::Released { number, release } => (number, Action::Released(release)),
        };
        if number <= self.last {
            return Err(ProtocolViolation("frame numbers don't increase"));
        }
        self.last = number;
        Ok((number, step))
    }

    #[cfg(test)]
    /// Takes the round numbers of a copied gateway.
    pub fn set_rounds(&mut self, rounds: SyncRounds) {
        self.rounds = rounds;
    }

    /// Ends a round: standby sessions that it hasn't listed have been purged.
    pub fn end_round(&self, round: u8) {
        self.rounds.end(&self.peer, round);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replication::fixtures::session_record;

    fn sessions(number: u64) -> NumberedFrame {
        NumberedFrame::Sessions { number, records: vec![session_record(number as u32)] }
    }

    fn inbound() -> ReceiveState {
        ReceiveState::new(Arc::from("a"), SyncRounds::default())
    }

    #[test]
    fn records_belong_to_the_current_round_until_the_next_one_begins() {
        let mut inbound = inbound();
        let begin = |number, round| NumberedFrame::SyncBegin { number, round, view: 7, applied: 3 };
        let end = |number, round| NumberedFrame::SyncEnd { number, round, policy: "v1".into() };
        let frames = [begin(1, 9), sessions(2), end(5, 9), sessions(6), begin(7, 10), sessions(8), end(9, 10)];
        let steps = frames.map(|kind| {
            let (_, step) = inbound.process(kind).unwrap();
            if let Action::Purge { round, .. } = step {
                inbound.end_round(round);
            }
            step
        });
        let apply = |number, round| Action::Apply { records: vec![session_record(number)], round };
        let purge = |round| Action::Purge { round, view: 7, policy: "v1".into(), needs_resync: false };
        let begun = || Action::BeginRound { view: 7, applied: 3 };
        assert_eq!(steps, [begun(), apply(2, 1), purge(1), apply(6, 1), begun(), apply(8, 2), purge(2)]);
    }

    #[test]
    fn invalid_frame_sequences_are_protocol_violations() {
        let begun = || {
            let mut inbound = inbound();
            inbound.process(NumberedFrame::SyncBegin { number: 3, round: 1, view: 0, applied: 0 }).unwrap();
            inbound
        };
        assert!(inbound().process(sessions(1)).is_err(), "no round has begun");
        assert!(begun().process(sessions(3)).is_err(), "a repeated number");
        let end = |round| NumberedFrame::SyncEnd { number: 4, round, policy: "".into() };
        assert!(begun().process(end(2)).is_err(), "another round");
        assert!(begun().process(end(1)).is_ok());
    }
}
