//! Session records and frames of tests.

use std::cell::RefCell;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::session::record::{DirectionRecord, FamilyRecord, RecordState, ReplicationRecord};
use vipgate_dataplane::session::standby::MAX_RECORDS_APPLIED;

use super::NumberedFrame;

/// About as long as the link protocol's.
const RECORD_BYTES: usize = 100;
/// Maximum length of a frame.
pub(super) const MAX_FRAME_BYTES: usize = (MAX_RECORDS_APPLIED + 1) * RECORD_BYTES;

thread_local! {
    /// The frames that were encoded.
    static FRAMES: RefCell<Vec<NumberedFrame>> = const { RefCell::new(Vec::new()) };
}

/// The record of a session with this number.
pub(super) fn session_record(number: u32) -> ReplicationRecord {
    let tuple = |source, source_port| Tuple {
        source,
        destination: 0x0800_0001,
        source_port,
        destination_port: 443,
        protocol: 6,
    };
    let half =
        |flags| DirectionRecord { flags, idle_ms: number, sequence: 3, acknowledged: 4, packets: 5, bytes: 1 << 40 };
    ReplicationRecord::V4(FamilyRecord {
        state: RecordState::Open,
        direction: Direction::Egress,
        origin: tuple(0x0a00_0000 + number, 40_000),
        translated: tuple(0xc000_0201, number as u16),
        directions: [half(1), half(2)],
    })
}

/// A frame as bytes of a realistic length, which name it.
pub(super) fn encode(frame: NumberedFrame) -> Vec<u8> {
    let records = if let NumberedFrame::Sessions { records, .. } = &frame { records.len() } else { 0 };
    let number = FRAMES.with_borrow_mut(|frames| {
        frames.push(frame);
        frames.len() - 1
    });
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize((records + 1) * RECORD_BYTES, 0);
    bytes
}

pub(super) fn decode(bytes: &[u8]) -> NumberedFrame {
    let number = usize::from_le_bytes(*bytes.first_chunk().unwrap());
    FRAMES.with_borrow(|frames| frames[number].clone())
}
