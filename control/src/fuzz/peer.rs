//! Fuzzing of the link protocol between gateways: frames and the session records in them.

use std::sync::Arc;

use futures::FutureExt;
use prost::Message;
use vipgate_dataplane::session::record::ReplicationRecord;

use crate::membership::MembershipView;
use crate::membership::replication::receive_state::{Action, ReceiveState};
use crate::membership::replication::sync_rounds::SyncRounds;
use crate::peer::fuzz::{decode, decode_numbered, encode, read_frame, write_frame};
use crate::peer::proto::frame::Kind;
use crate::xds::proto;

/// Commands to the workers that result from frames.
#[derive(Clone, Debug)]
pub enum RecordCommand {
    /// Apply records of a sync round.
    Apply(Vec<ReplicationRecord>, u8),
    /// Purge standby sessions that this round hasn't listed.
    Purge(u8),
}

/// Decodes the input as the byte stream of a link; returns the resulting commands to the workers.
pub fn peer(data: &[u8]) -> Vec<RecordCommand> {
    let mut rest = data;
    let mut buffer = Vec::new();
    let mut inbound = ReceiveState::new(Arc::from("gw-b"), SyncRounds::default());
    let mut commands = Vec::new();
    let mut last = 0;
    // All input is available, so reads never block.
    while let Some(Ok(kind)) = read_frame(&mut rest, &mut buffer).now_or_never() {
        assert!(
            buffer.capacity() <= 2 * data.len().max(1 << 20),
            "a frame's length is checked before memory is allocated"
        );
        let Some(kind) = kind else { continue };
        let bytes = write_frame(kind.clone());
        let again = read_frame(&mut bytes.as_slice(), &mut Vec::new()).now_or_never();
        assert!(
            matches!(again, Some(Ok(Some(ref again))) if *again == kind),
            "round trip of a frame: {kind:?}, {again:?}"
        );
        if let Kind::RelayedView(relayed_view) = &kind
            && let Ok(message) = proto::View::decode(&*relayed_view.view)
            && let Ok(view) = MembershipView::try_from(message)
        {
            assert_eq!(MembershipView::try_from(proto::View::from(&view)).as_ref(), Ok(&view));
        }
        let Ok(frame) = decode_numbered(&kind) else { continue };
        let Ok((number, step)) = inbound.process(frame) else { continue };
        assert!(number > last, "numbers increase");
        last = number;
        match step {
            Action::BeginRound { .. } | Action::Released(_) => {}
            Action::Apply { records, round } => {
                assert!((1..16).contains(&round), "a valid round number");
                for record in &records {
                    assert_eq!(decode(&encode(record)).as_ref(), Ok(record), "round trip of a record");
                }
                commands.push(RecordCommand::Apply(records, round));
            }
            Action::Purge { round, .. } => {
                inbound.end_round(round);
                commands.push(RecordCommand::Purge(round));
            }
        }
    }
    commands
}
