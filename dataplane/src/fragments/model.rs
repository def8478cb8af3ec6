//! What is promised about every sequence of fragments: a memory without index, lists and counters says the same, and
//! every frame that goes in comes out.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::tests::{NOW, PIECES, PORTS, TIMEOUT, fragments, frames, key, tags, v6};
use super::*;
use crate::tally::property;

/// One datagram as the model sees it.
#[derive(Debug)]
struct ModelDatagram {
    who: (usize, u32),
    deadline: u64,
    seen: Seen,
    known: Option<Known>,
    poisoned: bool,
    finished: bool,
    parked: Vec<u8>,
}

/// The same memory without an index: everything is searched, nothing is linked. Which bytes contradict each other is
/// tested beside `seen`.
#[derive(Debug, Default)]
struct Model {
    /// Unfinished and finished ones, each in the order in which they became that.
    datagrams: Vec<ModelDatagram>,
    lost: VecDeque<u8>,
}

const DATAGRAMS: usize = 8;
const PARKED: usize = 12;
/// Sources 0 to 2 share a /24, 3 and 4 a /64.
const SOURCES: usize = 6;

fn network(source: usize) -> usize {
    [0, 0, 0, 1, 1, 2][source]
}

impl Model {
    fn held(&self) -> usize {
        self.lost.len() + self.datagrams.iter().map(|datagram| datagram.parked.len()).sum::<usize>()
    }

    fn has_share(&self, source: usize, limit: usize, of: impl Fn(&ModelDatagram) -> usize) -> bool {
        let sum = |same: &dyn Fn(usize) -> bool| -> usize {
            self.datagrams.iter().filter(|datagram| same(datagram.who.0)).map(&of).sum()
        };
        sum(&|other| other == source) < limit / 4 && sum(&|other| network(other) == network(source)) < limit / 2
    }

    fn end(&mut self, at: usize) {
        let ended = self.datagrams.remove(at);
        self.lost.extend(ended.parked);
    }

    /// Ends the oldest unfinished one if its time is over, else the oldest finished one.
    fn end_one(&mut self, now: u64) -> bool {
        let oldest = |finished| self.datagrams.iter().position(|it| it.finished == finished);
        let mut both = [oldest(false), oldest(true)].into_iter().flatten();
        let over = both.find(|&at| self.datagrams[at].deadline <= now);
        if let Some(at) = over {
            self.end(at);
        }
        over.is_some()
    }

    fn sweep(&mut self, now: u64) -> Vec<u8> {
        while self.end_one(now) {}
        std::mem::take(&mut self.lost).into()
    }

    fn poison(&mut self, at: usize) {
        self.datagrams[at].poisoned = true;
        self.lost.extend(std::mem::take(&mut self.datagrams[at].parked));
    }

    fn admit(&mut self, who: (usize, u32), piece: Piece, now: u64) -> Result<usize, Refusal> {
        if let Some(at) = self.datagrams.iter().position(|it| it.who == who) {
            let datagram = &mut self.datagrams[at];
            let mut seen = datagram.seen;
            let noted = seen.note(piece);
            let anew = datagram.finished && (piece.is_first() || noted == Err(Refusal::Overlap));
            if !anew && datagram.deadline > now {
                if datagram.poisoned {
                    return Err(Refusal::Poisoned);
                }
                datagram.seen = seen;
                if noted == Err(Refusal::Overlap) {
                    self.poison(at);
                }
                return noted.map(|()| at);
            }
            self.end(at);
        }
        // The oldest finished one may have gone just now, and the next one's time may be over.
        let _ = self.end_one(now) && self.end_one(now);
        if !self.has_share(who.0, DATAGRAMS, |datagram| usize::from(!datagram.finished)) {
            return Err(Refusal::TooMany);
        }
        if self.datagrams.len() == DATAGRAMS {
            let finished = self.datagrams.iter().position(|it| it.finished).ok_or(Refusal::TooMany)?;
            self.end(finished);
        }
        let mut seen = Seen::default();
        seen.note(piece).unwrap();
        let deadline = now + u64::from(TIMEOUT);
        let (known, poisoned, finished, parked) = (None, false, false, Vec::new());
        self.datagrams.push(ModelDatagram { who, deadline, seen, known, poisoned, finished, parked });
        Ok(self.datagrams.len() - 1)
    }

    fn first(&mut self, who: (usize, u32), piece: Piece, new: Known, now: u64) -> Result<(Known, Vec<u8>), Refusal> {
        let at = self.admit(who, piece, now)?;
        let known = *self.datagrams[at].known.get_or_insert(new);
        if known.ports != new.ports {
            self.poison(at);
            return Err(Refusal::Overlap);
        }
        let released = std::mem::take(&mut self.datagrams[at].parked);
        self.finish_if_complete(at);
        Ok((known, released))
    }

    fn later(&mut self, who: (usize, u32), piece: Piece, now: u64) -> Result<Option<Known>, Refusal> {
        let at = self.admit(who, piece, now)?;
        let known = self.datagrams[at].known;
        self.finish_if_complete(at);
        Ok(known)
    }

    fn park(&mut self, who: (usize, u32), tag: u8) -> bool {
        let has_room = self.held() < PARKED && self.has_share(who.0, PARKED, |datagram| datagram.parked.len());
        let at = self.datagrams.iter().position(|it| it.who == who).unwrap();
        if has_room {
            self.datagrams[at].parked.push(tag);
        } else {
            self.poison(at);
        }
        has_room
    }

    fn finish_if_complete(&mut self, at: usize) {
        if self.datagrams[at].known.is_some() && self.datagrams[at].seen.is_complete() && !self.datagrams[at].finished {
            let mut datagram = self.datagrams.remove(at);
            datagram.finished = true;
            self.datagrams.push(datagram);
        }
    }
}

/// A fragment that arrives after some time.
#[derive(Clone, Debug)]
struct Arrival {
    after_ms: u32,
    source: usize,
    id: u32,
    piece: Piece,
    port: u16,
    budget: usize,
    /// Whether it is the last of its batch: only then frames move.
    ends_batch: bool,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let any = (0_u16..8, 1_u16..4, any::<bool>())
        .prop_filter("the whole", |&(offset, _, more)| offset != 0 || more)
        .prop_map(|(offset, length, more)| Piece { offset: offset * 8, length: length * 8, more });
    let piece = prop_oneof![12 => (0..PIECES.len()).prop_map(|i| PIECES[i]), 1 => any];
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

/// The memory under test, the frames that are outside of it, and the time.
struct Rig {
    fragments: Fragments,
    outside: Vec<Received>,
    /// Packets of the batch in hand that have a place, by number.
    in_batch: Vec<(Place, Option<Received>)>,
    elapsed: u64,
    translated_ids: u32,
}

/// How a fragment ends, with the tags of the frames that come out with it.
#[derive(Debug, PartialEq)]
enum End {
    First(Known, Vec<u8>),
    Known(Known),
    Parked(bool),
    Refused(Refusal),
}

const FRAMES: u8 = 40;

impl Rig {
    fn new() -> Self {
        let fragments = fragments(DATAGRAMS as u32, PARKED as u32);
        Self { fragments, outside: frames(FRAMES), in_batch: Vec::new(), elapsed: 0, translated_ids: 0 }
    }

    fn now(&self) -> Tick {
        NOW.plus(self.elapsed as u32)
    }

    fn sweep(&mut self, budget: usize) -> Vec<u8> {
        let before = self.outside.len();
        self.fragments.sweep(self.now(), budget, |received| self.outside.push(received));
        tags(&self.outside[before..])
    }

    /// The batch is over: frames go where they belong.
    fn end_batch(&mut self) {
        for (place, received) in self.in_batch.drain(..) {
            if let Some(received) = received {
                self.fragments.fill(place, received);
            }
        }
    }

    fn waiting(&self) -> usize {
        self.fragments.parked() as usize + self.in_batch.iter().filter(|(_, received)| received.is_some()).count()
    }

    fn arrive(&mut self, arrival: &Arrival) -> (u8, End) {
        // No time passes within a batch.
        if arrival.after_ms > 0 {
            self.end_batch();
        }
        let end = self.arrive_in_batch(arrival);
        if arrival.ends_batch {
            self.end_batch();
        }
        end
    }

    fn arrive_in_batch(&mut self, arrival: &Arrival) -> (u8, End) {
        let who = arrival.source;
        if who < 3 {
            self.arrive_with(&key(7 << 8 | who as u32, arrival.id), arrival)
        } else {
            self.arrive_with(&v6(who as u64 / 5, who as u64, arrival.id), arrival)
        }
    }

    fn new_known(&mut self, arrival: &Arrival) -> Known {
        self.translated_ids += 1;
        Known { ports: Ports { source: arrival.port, ..PORTS }, translated_id: self.translated_ids }
    }

    fn arrive_with<A: Address>(&mut self, key: &Key<A>, arrival: &Arrival) -> (u8, End) {
        let received = self.outside.remove(0);
        let (tag, now) = (received.interface.0, self.now());
        let end = if arrival.piece.is_first() {
            let Known { ports, translated_id } = self.new_known(arrival);
            self.outside.push(received);
            match self.fragments.first(key, arrival.piece, ports, translated_id, now) {
                Ok(known) => {
                    let before = self.outside.len();
                    while let Some(waiting) = self.fragments.release(key) {
                        let released = match waiting {
                            Waiting::Frame(received) => received,
                            Waiting::InBatch(packet) => self.in_batch[usize::from(packet)].1.take().unwrap(),
                        };
                        self.outside.push(released);
                    }
                    let released = tags(&self.outside[before..]);
                    End::First(known, released)
                }
                Err(refusal) => End::Refused(refusal),
            }
        } else {
            match self.fragments.later(key, arrival.piece, now) {
                Ok(Later::Known(known)) => {
                    self.outside.push(received);
                    End::Known(known)
                }
                Ok(Later::Early) => {
                    let place = self.fragments.reserve(key, self.in_batch.len() as u8);
                    match place {
                        Some(place) => self.in_batch.push((place, Some(received))),
                        None => self.outside.push(received),
                    }
                    End::Parked(place.is_some())
                }
                Err(refusal) => {
                    self.outside.push(received);
                    End::Refused(refusal)
                }
            }
        };
        (tag, end)
    }

    /// Whether every frame is there exactly once, those outside at least.
    fn frames_are_conserved(&self) -> bool {
        let mut outside = tags(&self.outside);
        outside.sort_unstable();
        outside.dedup();
        outside.len() == self.outside.len() && self.outside.len() + self.waiting() == FRAMES.into()
    }

    /// Lets all time run out.
    fn end(&mut self) -> bool {
        self.end_batch();
        self.elapsed += u64::from(TIMEOUT) * 2;
        self.sweep(usize::MAX);
        let Fragments { datagram_shares, frame_shares, .. } = &self.fragments;
        self.fragments.is_empty()
            && self.fragments.parked() == 0
            && self.frames_are_conserved()
            && datagram_shares.is_empty()
            && frame_shares.is_empty()
    }
}

impl End {
    fn class(&self) -> &'static str {
        match self {
            Self::First(_, released) if released.is_empty() => "first",
            Self::First(..) => "first after others",
            Self::Known(_) => "known",
            Self::Parked(true) => "parked",
            Self::Parked(false) => "no room to park",
            Self::Refused(Refusal::Overlap) => "overlap",
            Self::Refused(Refusal::Poisoned) => "poisoned",
            Self::Refused(Refusal::TooMany) => "too many",
            Self::Refused(Refusal::Repeated) => "repeated",
            Self::Refused(Refusal::Scattered) => "scattered",
            Self::Refused(Refusal::Malformed | Refusal::Tiny) => "no piece",
        }
    }
}

#[test]
fn it_behaves_like_a_list_of_datagrams() {
    let classes = [
        "first",
        "first after others",
        "known",
        "parked",
        "no room to park",
        "overlap",
        "poisoned",
        "too many",
        "finished",
        "full of finished ones",
        "expired with a frame",
        "both of a batch",
    ];
    property(
        ProptestConfig::with_cases(1_000),
        &prop::collection::vec(arrival(), 1..200),
        &classes,
        |arrivals, tally| {
            let (mut rig, mut model) = (Rig::new(), Model::default());
            for arrival in arrivals {
                rig.elapsed += u64::from(arrival.after_ms);
                let now = rig.elapsed;
                if arrival.after_ms > 0 {
                    rig.end_batch();
                }
                // Nothing is swept while a batch is in hand.
                if rig.in_batch.is_empty() {
                    let expired = model.sweep(now);
                    tally.add("expired with a frame", expired.len() as u64);
                    prop_assert_eq!(rig.sweep(usize::MAX), expired);
                }
                tally.add("both of a batch", u64::from(rig.in_batch.len() > 1));
                let (tag, end) = rig.arrive(&arrival);
                let who = (arrival.source, arrival.id);
                let expected = if arrival.piece.is_first() {
                    let ports = Ports { source: arrival.port, ..PORTS };
                    let new = Known { ports, translated_id: rig.translated_ids };
                    match model.first(who, arrival.piece, new, now) {
                        Ok((known, released)) => End::First(known, released),
                        Err(refusal) => End::Refused(refusal),
                    }
                } else {
                    match model.later(who, arrival.piece, now) {
                        Ok(Some(known)) => End::Known(known),
                        Ok(None) => End::Parked(model.park(who, tag)),
                        Err(refusal) => End::Refused(refusal),
                    }
                };
                tally.count(end.class());
                prop_assert_eq!(end, expected, "{:?}", arrival);
                let finished = model.datagrams.iter().any(|datagram| datagram.finished);
                tally.add("finished", u64::from(finished));
                tally.add("full of finished ones", u64::from(finished && model.datagrams.len() == DATAGRAMS));
                prop_assert_eq!(rig.fragments.len() as usize, model.datagrams.len());
                prop_assert_eq!(rig.waiting(), model.held());
                prop_assert!(rig.frames_are_conserved());
            }
            prop_assert!(rig.end());
            Ok(())
        },
    );
}

#[test]
fn no_frame_is_lost_however_seldom_it_is_swept() {
    let classes = ["swept", "left for later", "parked", "first after others"];
    property(
        ProptestConfig::with_cases(1_000),
        &prop::collection::vec(arrival(), 1..300),
        &classes,
        |arrivals, tally| {
            let mut rig = Rig::new();
            for arrival in arrivals {
                rig.elapsed += u64::from(arrival.after_ms);
                if rig.in_batch.is_empty() {
                    let swept = rig.sweep(arrival.budget).len();
                    prop_assert!(swept <= arrival.budget);
                    tally.add("swept", swept as u64);
                    tally.add("left for later", u64::from(swept > 0 && swept == arrival.budget));
                }
                let (_, end) = rig.arrive(&arrival);
                tally.count(end.class());
                prop_assert!(rig.frames_are_conserved());
                prop_assert!(rig.fragments.len() as usize <= DATAGRAMS && rig.fragments.parked() as usize <= PARKED);
            }
            prop_assert!(rig.end());
            Ok(())
        },
    );
}
