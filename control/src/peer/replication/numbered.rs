//! Numbered frames as protobuf messages of the link protocol.

use vipgate_dataplane::session::standby::MAX_RECORDS_APPLIED;

use crate::membership::replication::{NumberedFrame, Release};
use crate::peer::frame::{self, LinkError};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Released, Sessions, SyncBegin, SyncEnd};
use crate::peer::record;

/// Encodes a numbered frame with its length.
pub(crate) fn encode(frame: NumberedFrame) -> Vec<u8> {
    frame::encode(match frame {
        NumberedFrame::Sessions { number, records } => {
            Kind::Sessions(Sessions { number, sessions: records.iter().map(record::encode).collect() })
        }
        NumberedFrame::SyncBegin { number, round, view, applied } => {
            Kind::SyncBegin(SyncBegin { number, round, view, applied: Some(applied) })
        }
        NumberedFrame::SyncEnd { number, round, policy } => {
            Kind::SyncEnd(SyncEnd { number, round, policy: policy.to_string() })
        }
        NumberedFrame::Released { number, release: Release { view, policy, applied, seen } } => {
            Kind::Released(Released { number, view, policy: policy.to_string(), applied, seen })
        }
    })
}

/// Decodes a numbered frame.
///
/// # Errors
/// If the frame has no number or too many sessions, lacks a field, or a session is invalid.
pub(crate) fn decode(kind: &Kind) -> Result<NumberedFrame, LinkError> {
    Ok(match kind {
        Kind::Sessions(frame) => {
            if frame.sessions.len() > MAX_RECORDS_APPLIED {
                return Err(LinkError::ProtocolViolation("too many sessions in one frame"));
            }
            let records: Result<Vec<_>, _> = frame.sessions.iter().map(record::decode).collect();
            NumberedFrame::Sessions { number: frame.number, records: records? }
        }
        Kind::SyncBegin(SyncBegin { number, round, view, applied }) => {
            let applied = applied.ok_or(LinkError::ProtocolViolation("a SyncBegin without `applied`"))?;
            NumberedFrame::SyncBegin { number: *number, round: *round, view: *view, applied }
        }
        Kind::SyncEnd(SyncEnd { number, round, policy }) => {
            NumberedFrame::SyncEnd { number: *number, round: *round, policy: policy.as_str().into() }
        }
        Kind::Released(Released { policy, applied, .. }) if policy.is_empty() || *applied == 0 => {
            return Err(LinkError::ProtocolViolation("a Released without the version or the number of its policy"));
        }
        Kind::Released(Released { number, view, policy, applied, seen }) => NumberedFrame::Released {
            number: *number,
            release: Release { view: *view, policy: policy.as_str().into(), applied: *applied, seen: *seen },
        },
        Kind::Hello(_)
        | Kind::Farewell(_)
        | Kind::Heartbeat(_)
        | Kind::Echo(_)
        | Kind::Ack(_)
        | Kind::RelayedView(_)
        | Kind::SyncRequest(_) => return Err(LinkError::ProtocolViolation("a frame without a number")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::tests::session_record;

    #[test]
    fn frames_without_a_number_and_with_too_many_sessions_are_protocol_violations() {
        let sessions =
            |count| Kind::Sessions(Sessions { number: 4, sessions: vec![record::encode(&session_record(1)); count] });
        assert!(decode(&sessions(MAX_RECORDS_APPLIED)).is_ok());
        for kind in [sessions(MAX_RECORDS_APPLIED + 1), Kind::SyncRequest(crate::peer::proto::SyncRequest {})] {
            assert!(matches!(decode(&kind), Err(LinkError::ProtocolViolation(_))));
        }
    }

    #[test]
    fn frames_that_lack_a_field_are_protocol_violations() {
        let begin = |applied| Kind::SyncBegin(SyncBegin { number: 4, round: 1, view: 2, applied });
        assert!(decode(&begin(Some(0))).is_ok());
        let released = |policy: &str, applied| {
            Kind::Released(Released { number: 4, view: 2, policy: policy.into(), applied, seen: 0 })
        };
        assert!(decode(&released("v1", 1)).is_ok());
        for kind in [begin(None), released("", 1), released("v1", 0)] {
            assert!(matches!(decode(&kind), Err(LinkError::ProtocolViolation(_))), "{kind:?}");
        }
    }
}
