//! Sender state: batching, window, queue limit, sync rounds, releases and the acknowledged epoch.

use std::collections::{BTreeMap, VecDeque};

use vipgate_dataplane::session::record::{FamilyRecord, RecordState};

use super::*;
use crate::replication::WINDOW;
use crate::replication::fixtures::{MAX_FRAME_BYTES, decode, encode, session_record};
use crate::replication::receive_state::{Action, ReceiveState};
use crate::replication::sync_rounds::SyncRounds;

const WORKERS: u32 = 2;
/// Rows that a worker scans for one chunk.
const CHUNK_ROWS: usize = 3;

fn released(view: u64) -> Release {
    Release { view, ..Release::default() }
}

/// Sends all permitted frames; returns a description of each.
fn send_frames(outbound: &mut SendState) -> Vec<String> {
    std::iter::from_fn(|| outbound.next_frame())
        .map(|bytes| match decode(&bytes) {
            NumberedFrame::Sessions { records, .. } => format!("{} sessions", records.len()),
            NumberedFrame::SyncBegin { .. } => "begin".to_owned(),
            NumberedFrame::SyncEnd { .. } => "end".to_owned(),
            NumberedFrame::Released { release, .. } => format!("released {}{}", release.view, release.policy),
        })
        .collect()
}

/// Replies to all requests; the first worker has these sessions.
fn reply_to_all(outbound: &mut SendState, records: &[ReplicationRecord]) {
    while let Some(question) = outbound.next_request() {
        outbound.request_sent();
        outbound.add_chunk(question, if question.worker == 0 { records } else { &[] }, None);
    }
}

fn synced() -> SendState {
    let mut outbound = SendState::new(WORKERS as usize, 0, encode);
    outbound.link_up();
    reply_to_all(&mut outbound, &[]);
    assert_eq!(send_frames(&mut outbound), ["begin", "end"]);
    assert_eq!(outbound.frames_acknowledged(2), Ok(vec![0, 0]));
    assert!(outbound.in_sync());
    outbound
}

#[test]
fn records_are_batched_and_acknowledged_by_worker() {
    let mut outbound = synced();
    outbound.push(0, 7, &session_record(1));
    outbound.push(1, 3, &session_record(2));
    outbound.push(0, 8, &session_record(3));
    assert_eq!(send_frames(&mut outbound), ["3 sessions"]);
    assert_eq!(outbound.frames_acknowledged(3), Ok(vec![8, 3]));
    assert!(outbound.frames_acknowledged(4).is_err(), "it was never sent");
}

#[test]
fn the_window_limits_unacknowledged_frames() {
    let mut outbound = synced();
    (0..10_000).for_each(|number| outbound.push(0, number, &session_record(number as u32)));
    assert_eq!(send_frames(&mut outbound).len(), WINDOW);
    assert_eq!(outbound.frames_acknowledged(5).unwrap()[0], 3 * MAX_RECORDS_APPLIED as u64 - 1);
    assert_eq!(send_frames(&mut outbound).len(), 3);
}

#[test]
fn records_over_the_queue_limit_are_dropped_and_covered_by_a_full_sync() {
    let mut outbound = synced();
    let mut peak = 0;
    for number in 1..=100_000 {
        outbound.push(0, number, &session_record(number as u32));
        peak = peak.max(outbound.queued());
    }
    assert!(peak > MAX_QUEUED_BYTES / 2 && peak < MAX_QUEUED_BYTES + MAX_FRAME_BYTES, "{peak}");
    assert!(!outbound.in_sync());
    reply_to_all(&mut outbound, &[session_record(1)]);
    assert_eq!(send_frames(&mut outbound), ["begin", "1 sessions", "end"]);
    // The end of the round acknowledges the dropped records, too.
    assert_eq!(outbound.frames_acknowledged(outbound.frames.next_number() - 1), Ok(vec![100_000, 0]));
    assert!(outbound.in_sync());
}

#[test]
fn a_release_is_sent_last_and_repeated_until_acknowledged() {
    let mut outbound = synced();
    outbound.push(0, 1, &session_record(1));
    outbound.release(released(9));
    assert_eq!(send_frames(&mut outbound), ["1 sessions"], "not before the replication queues are drained");
    outbound.push(0, 2, &session_record(2));
    outbound.queues_drained();
    assert_eq!(send_frames(&mut outbound), ["1 sessions", "released 9"]);
    outbound.link_up();
    outbound.queues_drained();
    assert_eq!(send_frames(&mut outbound), Vec::<String>::new(), "not before the full sync");
    reply_to_all(&mut outbound, &[]);
    outbound.queues_drained();
    assert_eq!(send_frames(&mut outbound), ["begin", "end", "released 9"]);
    assert_eq!((outbound.frames_acknowledged(3), outbound.released.clone()), (Ok(vec![2, 0]), Some(released(9))));
    outbound.release(released(9));
    outbound.queues_drained();
    assert_eq!(send_frames(&mut outbound), Vec::<String>::new(), "acknowledged");
}

#[test]
fn a_reply_to_an_aborted_round_is_ignored() {
    let mut outbound = SendState::new(1, 0, encode);
    outbound.link_up();
    let old = outbound.next_request().unwrap();
    outbound.request_sent();
    outbound.require_sync();
    let new = outbound.next_request().unwrap();
    outbound.request_sent();
    outbound.add_chunk(old, &[session_record(1)], None);
    outbound.add_chunk(new, &[session_record(2), session_record(3)], None);
    assert_eq!(send_frames(&mut outbound), ["begin", "2 sessions", "end"]);
}

type Key = (u32, u32);
type Reply = (ChunkRequest, Vec<ReplicationRecord>, Option<u64>);

/// Model of a sending gateway, a receiving one, and the link between them, executed in random steps.
struct Model {
    random: u64,
    own: BTreeMap<Key, ReplicationRecord>,
    queues: Vec<VecDeque<(u64, ReplicationRecord)>>,
    lost: bool,
    last_number: Vec<u64>,
    acknowledged: Vec<u64>,
    replies: Vec<Option<Reply>>,
    outbound: SendState,
    wire: VecDeque<Vec<u8>>,
    acks: VecDeque<u64>,
    again: bool,
    rounds: SyncRounds,
    inbound: ReceiveState,
    standby: BTreeMap<u32, (ReplicationRecord, u8)>,
}

impl Model {
    fn new(seed: u64) -> Self {
        let rounds = SyncRounds::default();
        let workers = WORKERS as usize;
        Self {
            random: seed,
            own: BTreeMap::new(),
            queues: vec![VecDeque::new(); workers],
            lost: false,
            last_number: vec![0; workers],
            acknowledged: vec![0; workers],
            replies: vec![None; workers],
            outbound: SendState::new(workers, 0, encode),
            wire: VecDeque::new(),
            acks: VecDeque::new(),
            again: false,
            inbound: ReceiveState::new("a".into(), rounds.clone()),
            rounds,
            standby: BTreeMap::new(),
        }
    }

    fn draw(&mut self, below: u32) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as u32 % below
    }

    /// Opens, changes or ends a session.
    fn change_session(&mut self) {
        let number = self.draw(40);
        let worker = number % WORKERS;
        let index = worker as usize;
        self.last_number[index] += 1;
        let ReplicationRecord::V4(mut record) = session_record(number) else { panic!("IPv4") };
        record.directions[0].packets = self.last_number[index] as u32;
        if self.own.contains_key(&(worker, number)) && self.draw(3) == 0 {
            self.own.remove(&(worker, number));
            record = FamilyRecord { state: RecordState::Ended, ..record };
        } else {
            self.own.insert((worker, number), ReplicationRecord::V4(record));
        }
        if self.draw(50) == 0 {
            self.lost = true;
        } else {
            self.queues[index].push_back((self.last_number[index], ReplicationRecord::V4(record)));
        }
    }

    fn drain(&mut self) {
        if std::mem::take(&mut self.lost) {
            self.outbound.require_sync();
        }
        for worker in 0..WORKERS as usize {
            while self.replies[worker].is_none()
                && let Some((number, record)) = self.queues[worker].pop_front()
            {
                self.outbound.push(worker, number, &record);
            }
        }
    }

    /// The worker replies at once; the reply is delivered later.
    fn request_chunk(&mut self) {
        let Some(question) = self.outbound.next_request() else { return };
        if self.replies[question.worker].is_some() {
            return;
        }
        self.outbound.request_sent();
        let worker = question.worker as u32;
        let rows = self.own.range((worker, question.cursor as u32)..(worker + 1, 0)).take(CHUNK_ROWS);
        let rows: Vec<_> = rows.map(|((_, number), record)| (*number, *record)).collect();
        let cursor = (rows.len() == CHUNK_ROWS).then(|| u64::from(rows[CHUNK_ROWS - 1].0) + 1);
        self.replies[question.worker] = Some((question, rows.iter().map(|(_, record)| *record).collect(), cursor));
    }

    fn deliver_reply(&mut self) {
        let worker = self.draw(WORKERS) as usize;
        if let Some((question, records, cursor)) = self.replies[worker].take() {
            self.outbound.add_chunk(question, &records, cursor);
        }
    }

    fn receive_frame(&mut self) {
        let Some(bytes) = self.wire.pop_front() else { return };
        let (number, step) = self.inbound.process(decode(&bytes)).unwrap();
        match step {
            Action::BeginRound { .. } | Action::Released(_) => {}
            Action::Apply { records, round } => {
                for record in records {
                    let ReplicationRecord::V4(v4) = record else { panic!("IPv4") };
                    match v4.state {
                        RecordState::Open => self.standby.insert(v4.origin.source - 0x0a00_0000, (record, round)),
                        RecordState::Ended => self.standby.remove(&(v4.origin.source - 0x0a00_0000)),
                        RecordState::Affinity => panic!("records of sessions only"),
                    };
                }
            }
            Action::Purge { round, needs_resync: again, .. } => {
                self.standby.retain(|_, (_, listed_in)| *listed_in == round);
                self.inbound.end_round(round);
                self.again |= again;
            }
        }
        self.acks.push_back(number);
    }

    fn deliver_ack(&mut self) {
        if std::mem::take(&mut self.again) {
            self.outbound.require_sync();
        }
        if let Some(number) = self.acks.pop_front() {
            let numbers = self.outbound.frames_acknowledged(number).unwrap();
            merge_max(&mut self.acknowledged, &numbers);
        }
    }

    fn step(&mut self) {
        match self.draw(120) {
            0 => {
                self.outbound.link_down();
                self.lose_in_flight();
            }
            1..=3 => self.reconnect(),
            4..=30 => self.change_session(),
            31..=45 => self.drain(),
            46..=60 => self.request_chunk(),
            61..=75 => self.deliver_reply(),
            76..=90 => self.wire.extend(self.outbound.next_frame()),
            91..=105 => self.receive_frame(),
            _ => self.deliver_ack(),
        }
    }

    fn reconnect(&mut self) {
        self.lose_in_flight();
        self.outbound.link_up();
        self.inbound = ReceiveState::new("a".into(), self.rounds.clone());
    }

    fn lose_in_flight(&mut self) {
        self.wire.clear();
        self.acks.clear();
    }

    /// Delivers everything in flight over a new link, without new changes.
    fn quiesce(&mut self) {
        self.reconnect();
        for _ in 0..2000 {
            self.drain();
            self.request_chunk();
            self.deliver_reply();
            self.wire.extend(self.outbound.next_frame());
            self.receive_frame();
            self.deliver_ack();
        }
    }
}

#[test]
fn standby_sessions_equal_the_replicated_sessions_whatever_is_lost() {
    for seed in 0..300 {
        let mut model = Model::new(seed);
        for _ in 0..3 {
            (0..1500).for_each(|_| model.step());
            // A lost record is only noticed with the next record of its worker.
            (0..WORKERS as usize).for_each(|worker| model.last_number[worker] += 1);
            let ended = FamilyRecord {
                state: RecordState::Ended,
                ..match session_record(999) {
                    ReplicationRecord::V4(v4) => v4,
                    ReplicationRecord::V6(_) => panic!("IPv4"),
                }
            };
            for worker in 0..WORKERS as usize {
                model.queues[worker].push_back((model.last_number[worker], ReplicationRecord::V4(ended)));
            }
            model.quiesce();
            let own: Vec<ReplicationRecord> = model.own.values().copied().collect();
            let mut standby: Vec<ReplicationRecord> = model.standby.values().map(|(record, _)| *record).collect();
            standby.sort_by_key(|record| own.iter().position(|own| own == record));
            assert_eq!(standby, own, "seed {seed}");
            assert_eq!(model.acknowledged, model.last_number, "seed {seed}");
            assert!(model.outbound.in_sync(), "seed {seed}");
        }
    }
}

#[test]
fn the_acknowledged_epoch_is_that_of_the_last_completely_acknowledged_round() {
    let mut outbound = SendState::new(1, 0, encode);
    let round = |outbound: &mut SendState, epoch| {
        let question = outbound.next_request().unwrap();
        outbound.request_sent();
        outbound.check_ownership(question, (epoch, 7), &"v1".into());
        outbound.add_chunk(question, &[session_record(1)], None);
        assert_eq!(send_frames(outbound), ["begin", "1 sessions", "end"]);
        outbound.frames.next_number() - 1
    };
    outbound.set_view(7);
    outbound.link_up();
    let end = round(&mut outbound, 13);
    assert_eq!((outbound.frames_acknowledged(end - 1), outbound.acknowledged_epoch), (Ok(vec![0]), 0), "not its end");
    assert_eq!((outbound.frames_acknowledged(end), outbound.acknowledged_epoch), (Ok(vec![0]), 13));
    // A round is aborted, since the active members change.
    outbound.require_sync();
    let _ = outbound.next_request().unwrap();
    assert_eq!(send_frames(&mut outbound), ["begin"]);
    let begin = outbound.frames.next_number() - 1;
    outbound.require_sync();
    let end = round(&mut outbound, 15);
    assert_eq!(
        (outbound.frames_acknowledged(begin), outbound.acknowledged_epoch),
        (Ok(vec![0]), 0),
        "sessions listed in the aborted round may be lost"
    );
    // The peer has this round, although another full sync is necessary.
    outbound.require_sync();
    assert_eq!((outbound.frames_acknowledged(end), outbound.acknowledged_epoch), (Ok(vec![0]), 15));
    // Acknowledged frames stay applied; frames in flight when the link breaks may be lost.
    let end = round(&mut outbound, 16);
    outbound.link_up();
    assert!(outbound.frames_acknowledged(end).is_err());
    assert_eq!(outbound.acknowledged_epoch, 0);
}

#[test]
fn a_round_in_which_shards_move_is_aborted() {
    let mut outbound = SendState::new(2, 0, encode);
    outbound.set_view(7);
    outbound.link_up();
    let reply = |outbound: &mut SendState, listed_by| {
        let question = outbound.next_request()?;
        outbound.request_sent();
        outbound.check_ownership(question, listed_by, &"v1".into());
        outbound.add_chunk(question, &[session_record(1)], None);
        Some(question)
    };
    // The policy changes replica targets between the replies of two workers.
    assert!(reply(&mut outbound, (1, 7)).is_some());
    assert!(reply(&mut outbound, (2, 7)).is_some());
    assert_eq!(outbound.sync, SyncProgress::Required);
    // The workers already use a later view: the peer would end sessions that it has by the earlier one.
    assert!(reply(&mut outbound, (2, 8)).is_some());
    assert_eq!(
        (outbound.sync, outbound.next_request()),
        (SyncProgress::Required, None),
        "no round begins before this gateway uses that view"
    );
    outbound.release(released(8));
    outbound.queues_drained();
    outbound.set_view(8);
    assert!(reply(&mut outbound, (2, 8)).is_some());
    // A reply to a request of an earlier round is ignored.
    let earlier = ChunkRequest { round: 1, worker: 1, cursor: 0, expected: (7, None) };
    outbound.check_ownership(earlier, (1, 9), &"v1".into());
    assert!(reply(&mut outbound, (2, 8)).is_some());
    outbound.queues_drained();
    let sent = send_frames(&mut outbound);
    assert_eq!(sent[sent.len() - 5..], ["begin", "1 sessions", "1 sessions", "end", "released 8"][..]);
    let end = outbound.frames.next_number() - 1;
    assert_eq!(
        (outbound.frames_acknowledged(end).is_ok(), outbound.in_sync(), outbound.acknowledged_epoch),
        (true, true, 2)
    );
}

/// Sends a round in this epoch with one session; returns its frame numbers.
fn send_round(outbound: &mut SendState, epoch: u64) -> [u64; 3] {
    outbound.require_sync();
    let question = outbound.next_request().unwrap();
    outbound.request_sent();
    outbound.check_ownership(question, (epoch, 7), &"v1".into());
    outbound.add_chunk(question, &[session_record(1)], None);
    assert_eq!(send_frames(outbound), ["begin", "1 sessions", "end"]);
    let end = outbound.frames.next_number() - 1;
    [end - 2, end - 1, end]
}

/// The peer acknowledges a frame; returns the acknowledged epoch.
fn acknowledge(outbound: &mut SendState, number: u64, rejects: bool) -> u64 {
    if rejects {
        outbound.records_rejected(number);
    }
    assert!(outbound.frames_acknowledged(number).is_ok());
    outbound.acknowledged_epoch
}

#[test]
fn rejected_records_clear_the_acknowledged_epoch_until_a_round_is_fully_applied() {
    let mut outbound = SendState::new(1, 0, encode);
    outbound.set_view(7);
    outbound.link_up();
    let mut round = |rejects: bool| {
        let numbers = send_round(&mut outbound, 9);
        numbers.map(|number| acknowledge(&mut outbound, number, rejects && number == numbers[1]))[2]
    };
    assert_eq!([round(false), round(true), round(true), round(false)], [9, 0, 0, 9]);
    // Changed records, too.
    outbound.push(0, 1, &session_record(2));
    assert_eq!(send_frames(&mut outbound), ["1 sessions"]);
    let last = outbound.frames.next_number() - 1;
    assert_eq!(acknowledge(&mut outbound, last, true), 0);
}

#[test]
fn a_rejection_counts_for_the_round_of_its_frame() {
    let mut outbound = SendState::new(1, 0, encode);
    outbound.set_view(7);
    outbound.link_up();
    let [begin, session, end] = send_round(&mut outbound, 8);
    assert_eq!([acknowledge(&mut outbound, begin, false), acknowledge(&mut outbound, session, true)], [0, 0]);
    // The next round begins before the end of this one is acknowledged.
    let next = send_round(&mut outbound, 9);
    assert_eq!(acknowledge(&mut outbound, end, false), 0, "a record of that round is missing");
    assert_eq!(next.map(|number| acknowledge(&mut outbound, number, false)), [0, 0, 9]);
}

#[test]
fn an_aborted_round_resets_the_acknowledged_epoch_to_the_inherited_one() {
    let mut outbound = SendState::new(1, 3, encode);
    outbound.set_view(7);
    outbound.link_up();
    let numbers = send_round(&mut outbound, 9);
    assert_eq!(numbers.map(|number| acknowledge(&mut outbound, number, false))[2], 9);
    outbound.require_sync();
    assert_eq!(outbound.acknowledged_epoch, 9, "no frame was in flight");
    assert!(outbound.next_request().is_some());
    outbound.request_sent();
    outbound.link_up();
    assert_eq!(outbound.acknowledged_epoch, 3, "the inherited epoch remains");
}

#[test]
fn the_acknowledgement_of_an_earlier_round_says_nothing_about_an_aborted_one() {
    let mut outbound = SendState::new(1, 3, encode);
    outbound.set_view(7);
    outbound.link_up();
    let earlier = send_round(&mut outbound, 9);
    // The next round lists a session, and is aborted: whether that arrives is unknown.
    outbound.require_sync();
    let question = outbound.next_request().unwrap();
    outbound.request_sent();
    outbound.add_chunk(question, &[session_record(2)], Some(1));
    outbound.require_sync();
    assert_eq!(earlier.map(|number| acknowledge(&mut outbound, number, false)), [3; 3]);
}
