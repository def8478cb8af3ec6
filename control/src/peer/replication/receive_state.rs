//! Receiver state of one link: checks the order of numbered frames, and assigns received records to sync rounds.

use std::sync::Arc;

use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::session::standby::MAX_RECORDS_APPLIED;

use crate::peer::frame::LinkError;
use crate::peer::proto::frame::Kind;
use crate::peer::record;
use crate::peer::replication::sync_rounds::{SyncRound, SyncRounds};

/// The action that a frame requires. The frame's number is acknowledged when the action is done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// A sync round begins.
    BeginRound { view: u64 },
    /// Apply these records.
    Apply { records: Vec<ReplicationRecord>, round: u8 },
    /// A sync round ends: purge standby sessions that it hasn't listed, by this view. Then the standby sessions are
    /// complete, unless another full sync is needed (`again`).
    Purge { round: u8, view: u64, needs_resync: bool },
    /// The peer has released the shards that a view moves away from it.
    Released { view: u64 },
}

/// State of one link's sequence of frames.
#[derive(Debug)]
pub(crate) struct ReceiveState {
    peer: Arc<str>,
    rounds: SyncRounds,
    last: u64,
    /// The round that received records belong to; `None` before the first one of the link.
    round: Option<SyncRound>,
    /// The peer's number of the current round, and its view at the start; `None` between rounds.
    current: Option<(u32, u64)>,
}

impl ReceiveState {
    pub(crate) fn new(peer: Arc<str>, rounds: SyncRounds) -> Self {
        Self { peer, rounds, last: 0, round: None, current: None }
    }

    /// Checks a frame; returns its number and the required action.
    pub(crate) fn process(&mut self, kind: &Kind) -> Result<(u64, Action), LinkError> {
        let (number, step) = match kind {
            Kind::Sessions(frame) => {
                if frame.sessions.len() > MAX_RECORDS_APPLIED {
                    return Err(LinkError::ProtocolViolation("too many sessions in one frame"));
                }
                let records: Result<Vec<_>, _> = frame.sessions.iter().map(record::decode).collect();
                let records = records?.into_iter().flatten().collect();
                let round = self.round.ok_or(LinkError::ProtocolViolation("sessions before the first SyncBegin"))?;
                (frame.number, Action::Apply { records, round: round.number })
            }
            Kind::SyncBegin(frame) => {
                self.current = Some((frame.round, frame.view));
                self.round = Some(self.rounds.begin(&self.peer));
                (frame.number, Action::BeginRound { view: frame.view })
            }
            Kind::SyncEnd(frame) => {
                let begun = self.current.take().filter(|(round, _)| *round == frame.round);
                let (Some((_, view)), Some(round)) = (begun, self.round) else {
                    return Err(LinkError::ProtocolViolation("SyncEnd without a matching SyncBegin"));
                };
                (frame.number, Action::Purge { round: round.number, view, needs_resync: round.ambiguous })
            }
            Kind::Released(frame) => (frame.number, Action::Released { view: frame.view }),
            Kind::Hello(_)
            | Kind::Farewell(_)
            | Kind::Beat(_)
            | Kind::Echo(_)
            | Kind::Ack(_)
            | Kind::Hearsay(_)
            | Kind::SyncRequest(_) => {
                return Err(LinkError::ProtocolViolation("a frame without a number"));
            }
        };
        if number <= self.last {
            return Err(LinkError::ProtocolViolation("frame numbers don't increase"));
        }
        self.last = number;
        Ok((number, step))
    }

    /// Ends a round: standby sessions that it hasn't listed have been purged.
    pub(crate) fn end_round(&self, round: u8) {
        self.rounds.end(&self.peer, round);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::proto::{Sessions, SyncBegin, SyncEnd};
    use super::super::super::tests::session_record;
    use super::*;

    fn sessions(number: u64) -> Kind {
        Kind::Sessions(Sessions { number, sessions: vec![record::encode(&session_record(number as u32))] })
    }

    fn inbound() -> ReceiveState {
        ReceiveState::new(Arc::from("a"), SyncRounds::default())
    }

    #[test]
    fn records_belong_to_the_current_round_until_the_next_one_begins() {
        let mut inbound = inbound();
        let begin = |number, round| Kind::SyncBegin(SyncBegin { number, round, view: 7 });
        let end = |number, round| Kind::SyncEnd(SyncEnd { number, round });
        let frames = [begin(1, 9), sessions(2), end(5, 9), sessions(6), begin(7, 10), sessions(8), end(9, 10)];
        let steps = frames.map(|kind| {
            let (_, step) = inbound.process(&kind).unwrap();
            if let Action::Purge { round, .. } = step {
                inbound.end_round(round);
            }
            step
        });
        let apply = |number, round| Action::Apply { records: vec![session_record(number)], round };
        let purge = |round| Action::Purge { round, view: 7, needs_resync: false };
        let begun = || Action::BeginRound { view: 7 };
        assert_eq!(steps, [begun(), apply(2, 1), purge(1), apply(6, 1), begun(), apply(8, 2), purge(2)]);
    }

    #[test]
    fn invalid_frame_sequences_are_protocol_violations() {
        let begun = || {
            let mut inbound = inbound();
            inbound.process(&Kind::SyncBegin(SyncBegin { number: 3, round: 1, view: 0 })).unwrap();
            inbound
        };
        assert!(inbound().process(&sessions(1)).is_err(), "no round has begun");
        assert!(begun().process(&sessions(3)).is_err(), "a repeated number");
        assert!(begun().process(&Kind::SyncEnd(SyncEnd { number: 4, round: 2 })).is_err(), "another round");
        let too_many = vec![record::encode(&session_record(1)); MAX_RECORDS_APPLIED + 1];
        assert!(begun().process(&Kind::Sessions(Sessions { number: 4, sessions: too_many })).is_err(), "too many");
        assert!(begun().process(&Kind::SyncEnd(SyncEnd { number: 4, round: 1 })).is_ok());
    }
}
