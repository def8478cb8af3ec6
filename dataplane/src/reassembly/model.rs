//! Property tests of virtual reassembly: any sequence of fragments gives the same results as a model without index,
//! lists and counters, and no frame is lost.

use std::collections::VecDeque;

use proptest::prelude::*;
use vipgate_coverage::property;

use super::tests::{FRAGMENTS, NOW, PORTS, TIMEOUT, fragments, frames, key, tags, v6};
use super::*;

/// A datagram of the model.
#[derive(Debug)]
struct ModelDatagram {
    key: (usize, u32),
    deadline: u64,
    seen: ReceivedRanges,
    known: Option<Known>,
    poisoned: bool,
    finished: bool,
    buffered: Vec<u8>,
}

/// Reference model: searches linearly and counts anew. Overlap detection is shared with the implementation; `received`
/// has tests of its own.
#[derive(Debug, Default)]
struct Model {
    /// Unfinished and finished datagrams, each in the order in which they became so.
    datagrams: Vec<ModelDatagram>,
    lost: VecDeque<u8>,
}

const DATAGRAMS: usize = 8;
const BUFFER_CAPACITY: usize = 12;
/// Sources 0 to 2 share a /24, 3 and 4 a /64.
const SOURCES: usize = 6;

fn network(source: usize) -> usize {
    [0, 0, 0, 1, 1, 2][source]
}

impl Model {
    fn held(&self) -> usize {
        self.lost.len() + self.datagrams.iter().map(|datagram| datagram.buffered.len()).sum::<usize>()
    }

    fn is_below_limit(&self, source: usize, limit: usize, of: impl Fn(&ModelDatagram) -> usize) -> bool {
        let sum = |same: &dyn Fn(usize) -> bool| -> usize {
            self.datagrams.iter().filter(|datagram| same(datagram.key.0)).map(&of).sum()
        };
        sum(&|other| other == source) < limit / 4 && sum(&|other| network(other) == network(source)) < limit / 2
    }

    fn end(&mut self, at: usize) {
        let ended = self.datagrams.remove(at);
        self.lost.extend(ended.buffered);
    }

    /// Ends the oldest unfinished datagram if it has expired, else the oldest finished one if that has.
    fn expire_one(&mut self, now: u64) -> bool {
        let oldest = |finished| self.datagrams.iter().position(|it| it.finished == finished);
        let mut both = [oldest(false), oldest(true)].into_iter().flatten();
        let expired = both.find(|&at| self.datagrams[at].deadline <= now);
        if let Some(at) = expired {
            self.end(at);
        }
        expired.is_some()
    }

    fn sweep(&mut self, now: u64) -> Vec<u8> {
        while self.expire_one(now) {}
        std::mem::take(&mut self.lost).into()
    }

    fn poison(&mut self, at: usize) {
        self.datagrams[at].poisoned = true;
        self.lost.extend(std::mem::take(&mut self.datagrams[at].buffered));
    }

    fn admit(&mut self, key: (usize, u32), piece: Fragment, now: u64) -> Result<usize, FragmentError> {
        if let Some(at) = self.datagrams.iter().position(|it| it.key == key) {
            let datagram = &mut self.datagrams[at];
            let mut seen = datagram.seen;
            let noted = seen.add(piece);
            let anew = datagram.finished && (piece.is_first() || noted == Err(FragmentError::Overlap));
            if !anew && datagram.deadline > now {
                if datagram.poisoned {
                    return Err(FragmentError::Poisoned);
                }
                datagram.seen = seen;
                if noted == Err(FragmentError::Overlap) {
                    self.poison(at);
                }
                return noted.map(|()| at);
            }
            self.end(at);
        }
        // As the implementation: at most two expired datagrams are removed per new one.
        let _ = self.expire_one(now) && self.expire_one(now);
        if !self.is_below_limit(key.0, DATAGRAMS, |datagram| usize::from(!datagram.finished)) {
            return Err(FragmentError::LimitReached);
        }
        if self.datagrams.len() == DATAGRAMS {
            let finished = self.datagrams.iter().position(|it| it.finished).ok_or(FragmentError::LimitReached)?;
            self.end(finished);
        }
        let mut seen = ReceivedRanges::default();
        seen.add(piece).unwrap();
        let deadline = now + u64::from(TIMEOUT);
        let (known, poisoned, finished, buffered) = (None, false, false, Vec::new());
        self.datagrams.push(ModelDatagram { key, deadline, seen, known, poisoned, finished, buffered });
        Ok(self.datagrams.len() - 1)
    }

    fn first(
        &mut self,
        key: (usize, u32),
        piece: Fragment,
        new: Known,
        now: u64,
    ) -> Result<(Known, Vec<u8>), FragmentError> {
        let at = self.admit(key, piece, now)?;
        let known = *self.datagrams[at].known.get_or_insert(new);
        if known.ports != new.ports {
            self.poison(at);
            return Err(FragmentError::Overlap);
        }
        let released = std::mem::take(&mut self.datagrams[at].buffered);
        self.finish_if_complete(at);
        Ok((known, released))
    }

    fn later(&mut self, key: (usize, u32), piece: Fragment, now: u64) -> Result<Option<Known>, FragmentError> {
        let at = self.admit(key, piece, now)?;
        let known = self.datagrams[at].known;
        self.finish_if_complete(at);
        Ok(known)
    }

    fn buffer(&mut self, key: (usize, u32), tag: u8) -> bool {
        let fits = self.held() < BUFFER_CAPACITY
            && self.is_below_limit(key.0, BUFFER_CAPACITY, |datagram| datagram.buffered.len());
        let at = self.datagrams.iter().position(|it| it.key == key).unwrap();
        if fits {
            self.datagrams[at].buffered.push(tag);
        } else {
            self.poison(at);
        }
        fits
    }

    fn finish_if_complete(&mut self, at: usize) {
        if self.datagrams[at].known.is_some() && self.datagrams[at].seen.is_complete() && !self.datagrams[at].finished {
            let mut datagram = self.datagrams.remove(at);
            datagram.finished = true;
            self.datagrams.push(datagram);
        }
    }
}

/// A fragment, and the time since the one before it.
#[derive(Clone, Debug)]
struct Arrival {
    after_ms: u32,
    source: usize,
    id: u32,
    piece: Fragment,
    port: u16,
    budget: usize,
    /// Whether it ends its batch: frames are stored only then.
    ends_batch: bool,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let any = (0_u16..8, 1_u16..4, any::<bool>())
        .prop_filter("a whole datagram", |&(offset, _, more)| offset != 0 || more)
        .prop_map(|(offset, length, more)| Fragment { offset: offset * 8, length: length * 8, more });
    let piece = prop_oneof![12 => (0..FRAGMENTS.len()).prop_map(|i| FRAGMENTS[i]), 1 => any];
    let after_ms = prop_oneof![8 => Just(0), 4 => 1_u32..300, 1 => 1_000_u32..3_000];
    let port = prop_oneof![20 => Just(1_u16), 1 => Just(2)];
    (after_ms, 0..SOURCES, 0_u32..2, piece, port, 0_usize..3, prop::bool::ANY).prop_map(
        |(after_ms, source, id, piece, port, budget, ends_batch)| Arrival {
            after_ms,
            source,
            id,
            piece,
            port,
            budget,
            ends_batch,
        },
    )
}

/// The state under test, the frames outside of it, and the time.
struct Harness {
    fragments: VirtualReassembly,
    outside: Vec<Received>,
    /// Packets of the current batch that have a buffer slot, by number.
    in_batch: Vec<(BufferSlot, Option<Received>)>,
    elapsed: u64,
    translated_ids: u32,
}

/// Outcome for a fragment, with the tags of the frames released by it.
#[derive(Debug, PartialEq)]
enum Outcome {
    First(Known, Vec<u8>),
    Resolved(Known),
    Buffered(bool),
    Dropped(FragmentError),
}

const FRAMES: u8 = 40;

impl Harness {
    fn new() -> Self {
        let fragments = fragments(DATAGRAMS as u32, BUFFER_CAPACITY as u32);
        Self { fragments, outside: frames(FRAMES), in_batch: Vec::new(), elapsed: 0, translated_ids: 0 }
    }

    fn now(&self) -> Tick {
        NOW.plus(self.elapsed as u32)
    }

    fn sweep(&mut self, budget: usize) -> Vec<u8> {
        let before = self.outside.len();
        self.fragments.expire(self.now(), budget, |received| self.outside.push(received));
        tags(&self.outside[before..])
    }

    /// Ends the batch: frames are stored in their slots.
    fn end_batch(&mut self) {
        for (place, received) in self.in_batch.drain(..) {
            if let Some(received) = received {
                self.fragments.fill(place, received);
            }
        }
    }

    fn buffered(&self) -> usize {
        self.fragments.buffered() as usize + self.in_batch.iter().filter(|(_, received)| received.is_some()).count()
    }

    fn arrive(&mut self, arrival: &Arrival) -> (u8, Outcome) {
        // All packets of a batch have the same time.
        if arrival.after_ms > 0 {
            self.end_batch();
        }
        let end = self.arrive_in_batch(arrival);
        if arrival.ends_batch {
            self.end_batch();
        }
        end
    }

    fn arrive_in_batch(&mut self, arrival: &Arrival) -> (u8, Outcome) {
        let source = arrival.source;
        if source < 3 {
            self.arrive_with(&key(7 << 8 | source as u32, arrival.id), arrival)
        } else {
            self.arrive_with(&v6(source as u64 / 5, source as u64, arrival.id), arrival)
        }
    }

    fn new_known(&mut self, arrival: &Arrival) -> Known {
        self.translated_ids += 1;
        Known { ports: TransportPorts { source: arrival.port, ..PORTS }, translated_id: self.translated_ids }
    }

    fn arrive_with<A: Address>(&mut self, key: &DatagramKey<A>, arrival: &Arrival) -> (u8, Outcome) {
        let received = self.outside.remove(0);
        let (tag, now) = (received.interface.0, self.now());
        let end = if arrival.piece.is_first() {
            let Known { ports, translated_id } = self.new_known(arrival);
            self.outside.push(received);
            match self.fragments.add_first(key, arrival.piece, ports, translated_id, now) {
                Ok(known) => {
                    let before = self.outside.len();
                    while let Some(waiting) = self.fragments.release(key) {
                        let released = match waiting {
                            BufferedFragment::Frame(received) => received,
                            BufferedFragment::InBatch(packet) => self.in_batch[usize::from(packet)].1.take().unwrap(),
                        };
                        self.outside.push(released);
                    }
                    let released = tags(&self.outside[before..]);
                    Outcome::First(known, released)
                }
                Err(error) => Outcome::Dropped(error),
            }
        } else {
            match self.fragments.add_later(key, arrival.piece, now) {
                Ok(LaterFragment::Resolved(known)) => {
                    self.outside.push(received);
                    Outcome::Resolved(known)
                }
                Ok(LaterFragment::OutOfOrder) => {
                    let place = self.fragments.reserve(key, self.in_batch.len() as u8);
                    match place {
                        Some(place) => self.in_batch.push((place, Some(received))),
                        None => self.outside.push(received),
                    }
                    Outcome::Buffered(place.is_some())
                }
                Err(error) => {
                    self.outside.push(received);
                    Outcome::Dropped(error)
                }
            }
        };
        (tag, end)
    }

    /// Whether every frame exists exactly once.
    fn frames_are_conserved(&self) -> bool {
        let mut outside = tags(&self.outside);
        outside.sort_unstable();
        outside.dedup();
        outside.len() == self.outside.len() && self.outside.len() + self.buffered() == FRAMES.into()
    }

    /// Lets every datagram expire; whether nothing is left.
    fn end(&mut self) -> bool {
        self.end_batch();
        self.elapsed += u64::from(TIMEOUT) * 2;
        self.sweep(usize::MAX);
        let VirtualReassembly { datagram_limits, frame_limits, .. } = &self.fragments;
        self.fragments.is_empty()
            && self.fragments.buffered() == 0
            && self.frames_are_conserved()
            && datagram_limits.is_empty()
            && frame_limits.is_empty()
    }
}

impl Outcome {
    fn name(&self) -> &'static str {
        match self {
            Self::First(_, released) if released.is_empty() => "first",
            Self::First(..) => "first, others buffered",
            Self::Resolved(_) => "resolved",
            Self::Buffered(true) => "buffered",
            Self::Buffered(false) => "buffer full",
            Self::Dropped(FragmentError::Overlap) => "overlap",
            Self::Dropped(FragmentError::Poisoned) => "poisoned",
            Self::Dropped(FragmentError::LimitReached) => "limit reached",
            Self::Dropped(FragmentError::TooManyDuplicates) => "too many duplicates",
            Self::Dropped(FragmentError::TooManyRanges) => "too many ranges",
            Self::Dropped(FragmentError::Malformed | FragmentError::Tiny) => "malformed",
        }
    }
}

/// The classes of arrivals that a run must reach.
const CLASSES: [&str; 12] = [
    "first",
    "first, others buffered",
    "resolved",
    "buffered",
    "buffer full",
    "overlap",
    "poisoned",
    "limit reached",
    "finished",
    "table full of finished ones",
    "expired with a buffered frame",
    "two buffered in one batch",
];

#[test]
fn any_sequence_of_fragments_agrees_with_the_model() {
    property(
        ProptestConfig::with_cases(1_000),
        &prop::collection::vec(arrival(), 1..200),
        &CLASSES,
        |arrivals, coverage| {
            let (mut harness, mut model) = (Harness::new(), Model::default());
            for arrival in arrivals {
                harness.elapsed += u64::from(arrival.after_ms);
                let now = harness.elapsed;
                if arrival.after_ms > 0 {
                    harness.end_batch();
                }
                // Nothing expires within a batch.
                if harness.in_batch.is_empty() {
                    let expired = model.sweep(now);
                    coverage.add("expired with a buffered frame", expired.len() as u64);
                    prop_assert_eq!(harness.sweep(usize::MAX), expired);
                }
                coverage.add("two buffered in one batch", u64::from(harness.in_batch.len() > 1));
                let (tag, end) = harness.arrive(&arrival);
                let key = (arrival.source, arrival.id);
                let expected = if arrival.piece.is_first() {
                    let ports = TransportPorts { source: arrival.port, ..PORTS };
                    let new = Known { ports, translated_id: harness.translated_ids };
                    match model.first(key, arrival.piece, new, now) {
                        Ok((known, released)) => Outcome::First(known, released),
                        Err(error) => Outcome::Dropped(error),
                    }
                } else {
                    match model.later(key, arrival.piece, now) {
                        Ok(Some(known)) => Outcome::Resolved(known),
                        Ok(None) => Outcome::Buffered(model.buffer(key, tag)),
                        Err(error) => Outcome::Dropped(error),
                    }
                };
                coverage.count(end.name());
                prop_assert_eq!(end, expected, "{:?}", arrival);
                let finished = model.datagrams.iter().any(|datagram| datagram.finished);
                coverage.add("finished", u64::from(finished));
                coverage.add("table full of finished ones", u64::from(finished && model.datagrams.len() == DATAGRAMS));
                prop_assert_eq!(harness.fragments.len() as usize, model.datagrams.len());
                prop_assert_eq!(harness.buffered(), model.held());
                prop_assert!(harness.frames_are_conserved());
            }
            prop_assert!(harness.end());
            Ok(())
        },
    );
}

#[test]
fn no_frame_is_lost_with_any_expiry_budget() {
    let classes = ["expired", "budget exhausted", "buffered", "first, others buffered"];
    property(
        ProptestConfig::with_cases(1_000),
        &prop::collection::vec(arrival(), 1..300),
        &classes,
        |arrivals, coverage| {
            let mut harness = Harness::new();
            for arrival in arrivals {
                harness.elapsed += u64::from(arrival.after_ms);
                if harness.in_batch.is_empty() {
                    let expired = harness.sweep(arrival.budget).len();
                    prop_assert!(expired <= arrival.budget);
                    coverage.add("expired", expired as u64);
                    coverage.add("budget exhausted", u64::from(expired > 0 && expired == arrival.budget));
                }
                let (_, end) = harness.arrive(&arrival);
                coverage.count(end.name());
                prop_assert!(harness.frames_are_conserved());
                prop_assert!(
                    harness.fragments.len() as usize <= DATAGRAMS
                        && harness.fragments.buffered() as usize <= BUFFER_CAPACITY
                );
            }
            prop_assert!(harness.end());
            Ok(())
        },
    );
}
