//! Frames to one peer: numbered and queued, then unacknowledged within the window.

use std::collections::VecDeque;

use super::RecordNumbers;
use crate::replication::{NumberedFrame, ProtocolViolation, Release, WINDOW};

/// Encodes a frame for the link.
pub type EncodeFrame = fn(NumberedFrame) -> Vec<u8>;

/// What a frame carries, for its acknowledgement or its loss.
#[derive(Clone, Debug)]
pub(super) enum Content {
    Sessions {
        numbers: RecordNumbers,
        count: u64,
    },
    Begin,
    /// End of the round that began with the frame `begin`.
    End {
        round: u32,
        begin: u64,
        epoch: u64,
        numbers: RecordNumbers,
    },
    Released(Release),
}

/// A frame that is queued or unacknowledged.
#[derive(Clone, Debug)]
struct Entry {
    number: u64,
    /// The encoded frame; empty once sent.
    bytes: Vec<u8>,
    content: Content,
}

/// The frames of one link that are queued or unacknowledged.
#[derive(Clone, Debug)]
pub(super) struct FrameQueue {
    encode: EncodeFrame,
    /// Number of the next frame; starts at 1 with each link.
    next: u64,
    queued: VecDeque<Entry>,
    queued_bytes: usize,
    unacknowledged: VecDeque<Entry>,
}

impl FrameQueue {
    pub(super) fn new(encode: EncodeFrame) -> Self {
        Self { encode, next: 1, queued: VecDeque::new(), queued_bytes: 0, unacknowledged: VecDeque::new() }
    }

    /// The number that the next frame will get.
    pub(super) fn next_number(&self) -> u64 {
        self.next
    }

    /// Numbers frames from 1 again, for a new link.
    pub(super) fn restart_numbers(&mut self) {
        self.next = 1;
    }

    /// Number of queued bytes.
    pub(super) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Whether no frame is queued.
    pub(super) fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Whether another frame may be sent.
    pub(super) fn is_window_open(&self) -> bool {
        self.unacknowledged.len() < WINDOW
    }

    /// Whether less than half of the window is in use.
    pub(super) fn is_window_half_open(&self) -> bool {
        self.unacknowledged.len() < WINDOW / 2
    }

    /// Queues a frame, which is made from its number.
    pub(super) fn push(&mut self, content: Content, frame: impl FnOnce(u64) -> NumberedFrame) {
        let number = self.next;
        self.next += 1;
        let bytes = (self.encode)(frame(number));
        self.queued_bytes += bytes.len();
        self.queued.push_back(Entry { number, bytes, content });
    }

    /// Moves the first queued frame into the window; returns its bytes and its number of records.
    pub(super) fn send_next(&mut self) -> Option<(Vec<u8>, u64)> {
        let mut entry = self.queued.pop_front()?;
        let bytes = std::mem::take(&mut entry.bytes);
        self.queued_bytes -= bytes.len();
        let count = if let Content::Sessions { count, .. } = entry.content { count } else { 0 };
        self.unacknowledged.push_back(entry);
        Some((bytes, count))
    }

    /// Drops the queued frames; returns what they carried.
    pub(super) fn drop_queued(&mut self) -> impl Iterator<Item = Content> + use<> {
        self.queued_bytes = 0;
        std::mem::take(&mut self.queued).into_iter().map(|entry| entry.content)
    }

    /// Drops the unacknowledged frames; returns what they carried.
    pub(super) fn drop_unacknowledged(&mut self) -> impl Iterator<Item = Content> + use<> {
        std::mem::take(&mut self.unacknowledged).into_iter().map(|entry| entry.content)
    }

    /// The peer has applied all frames up to a number; returns what they carried.
    ///
    /// # Errors
    /// If no such frame is unacknowledged.
    pub(super) fn acknowledge(&mut self, number: u64) -> Result<Vec<Content>, ProtocolViolation> {
        if self.unacknowledged.back().is_none_or(|last| last.number < number) {
            return Err(ProtocolViolation("acknowledgement of a frame that wasn't sent"));
        }
        let mut acknowledged = Vec::new();
        while let Some(entry) = self.unacknowledged.pop_front_if(|entry| entry.number <= number) {
            acknowledged.push(entry.content);
        }
        Ok(acknowledged)
    }
}
