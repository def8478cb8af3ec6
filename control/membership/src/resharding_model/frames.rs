//! Frames of the replication protocol as bytes: shorter than the link protocol's, since a world sends hundreds.

use vipgate_dataplane::session::record::ReplicationRecord;

use super::table::Record;
use crate::replication::{NumberedFrame, Release};

const SESSIONS: u8 = 0;
const SYNC_BEGIN: u8 = 1;
const SYNC_END: u8 = 2;
const RELEASED: u8 = 3;

pub(super) fn encode(frame: NumberedFrame) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(32);
    let mut put = |value: u64| bytes.extend_from_slice(&value.to_le_bytes());
    match frame {
        NumberedFrame::Sessions { number, records } => {
            put(number);
            for record in records.iter().map(Record::decode) {
                put(u64::from(record.id) << 32 | (record.shard as u64) << 16 | u64::from(record.port));
                put(record.seen << 1 | u64::from(record.is_ended));
            }
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
    records.iter().map(Record::decode).any(|record| record.id == session && !record.is_ended)
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
            let record = |at: usize| {
                let (key, state) = (value(at), value(at + 1));
                let record = Record {
                    id: (key >> 32) as u32,
                    shard: (key >> 16 & 0xffff) as usize,
                    port: key as u8,
                    is_ended: state & 1 == 1,
                    seen: state >> 1,
                };
                record.encode()
            };
            let records: Vec<ReplicationRecord> = (1..bytes.len() / 8).step_by(2).map(record).collect();
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
