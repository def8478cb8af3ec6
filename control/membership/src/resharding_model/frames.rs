//! Frames of the replication protocol as bytes: shorter than the link protocol's, since a world sends hundreds.

use vipgate_dataplane::session::record::{DirectionRecord, RecordState, ReplicationRecord};

use super::table::{live_session_of, of_v4, record, session_of};
use crate::replication::{NumberedFrame, Release};

const SESSIONS: u8 = 0;
const SYNC_BEGIN: u8 = 1;
const SYNC_END: u8 = 2;
const RELEASED: u8 = 3;

/// Words of a record.
const WORDS: usize = 9;

fn words_of(it: &ReplicationRecord) -> [u64; WORDS] {
    let known = of_v4(it);
    let (id, port) = (session_of(it), known.translated.source_port);
    debug_assert_eq!(record(id, port, known.state, known.directions), *it, "all records are of this form");
    let [origin, reply] = known.directions.map(|half| {
        let numbers = u64::from(half.sequence) << 32 | u64::from(half.acknowledged);
        [u64::from(half.flags) << 32 | u64::from(half.idle_ms), numbers, half.packets.into(), half.bytes]
    });
    let mut words = [u64::from(id) << 32 | u64::from(port) << 16 | u64::from(known.state == RecordState::Ended); WORDS];
    words[1..5].copy_from_slice(&origin);
    words[5..].copy_from_slice(&reply);
    words
}

fn of_words(words: &[u64; WORDS]) -> ReplicationRecord {
    let half = |at: usize| DirectionRecord {
        flags: (words[at] >> 32) as u8,
        idle_ms: words[at] as u32,
        sequence: (words[at + 1] >> 32) as u32,
        acknowledged: words[at + 1] as u32,
        packets: words[at + 2] as u32,
        bytes: words[at + 3],
    };
    let state = if words[0] & 1 == 1 { RecordState::Ended } else { RecordState::Open };
    record((words[0] >> 32) as u32, (words[0] >> 16) as u16, state, [half(1), half(5)])
}

pub(super) fn encode(frame: NumberedFrame) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(32);
    let mut put = |value: u64| bytes.extend_from_slice(&value.to_le_bytes());
    match frame {
        NumberedFrame::Sessions { number, records } => {
            put(number);
            records.iter().flat_map(words_of).for_each(put);
            bytes.push(SESSIONS);
        }
        NumberedFrame::SyncBegin { number, round, view, applied } => {
            [number, round.into(), view, applied].into_iter().for_each(put);
            bytes.push(SYNC_BEGIN);
        }
        NumberedFrame::SyncEnd { number, round, policy } => {
            [number, round.into()].into_iter().for_each(put);
            bytes.extend_from_slice(policy.as_bytes());
            bytes.push(SYNC_END);
        }
        NumberedFrame::Released { number, release } => {
            [number, release.view, release.applied, release.seen].into_iter().for_each(put);
            bytes.extend_from_slice(release.policy.as_bytes());
            bytes.push(RELEASED);
        }
    }
    bytes
}

/// Whether a frame has the record of a session that hasn't ended.
pub(super) fn carries(bytes: &[u8], session: u32) -> bool {
    let NumberedFrame::Sessions { records, .. } = decode(bytes) else { return false };
    records.iter().any(|record| live_session_of(record) == Some(session))
}

pub(super) fn decode(bytes: &[u8]) -> NumberedFrame {
    let (kind, bytes) = bytes.split_last().expect("a frame isn't empty");
    let value = |at: usize| {
        let bytes = bytes[at * 8..].first_chunk().expect("a frame is complete");
        u64::from_le_bytes(*bytes)
    };
    let version = |from: usize| str::from_utf8(&bytes[from * 8..]).expect("a version is text").into();
    let number = value(0);
    match *kind {
        SESSIONS => {
            let words: Vec<u64> = (1..bytes.len() / 8).map(value).collect();
            let records = words.as_chunks().0.iter().map(of_words).collect();
            NumberedFrame::Sessions { number, records }
        }
        SYNC_BEGIN => NumberedFrame::SyncBegin { number, round: value(1) as u32, view: value(2), applied: value(3) },
        SYNC_END => NumberedFrame::SyncEnd { number, round: value(1) as u32, policy: version(2) },
        RELEASED => NumberedFrame::Released {
            number,
            release: Release { view: value(1), applied: value(2), seen: value(3), policy: version(4) },
        },
        kind => panic!("frame of unknown kind {kind}"),
    }
}
