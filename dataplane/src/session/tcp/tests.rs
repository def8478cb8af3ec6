//! Connections against a slow model, while somebody who doesn't see them forges segments in the name of one side.

mod unseen;

use proptest::prelude::*;

use super::*;
use crate::session::window::{NEAR, later_acknowledgement};
use crate::tally::{Tally, property};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

fn segment(flags: u8, sequence: u32, acknowledgement: u32, data: u32) -> Segment {
    let space = data + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    Segment { sequence, acknowledgement, flags: TcpFlags(flags), space, ..Segment::default() }
}

/// What the gateway knows of both sides: whoever opened first. And whether each has been silent for long.
#[derive(Clone, Copy)]
struct Known([Track; 2], [bool; 2]);

impl Known {
    fn new() -> Self {
        Self([Track { flags: Flags::ORIGIN, ..Track::default() }, Track::default()], [false; 2])
    }

    fn pass(&mut self, side: usize, segment: &Segment) -> Noted {
        let noted = self.note(side, segment);
        self.1[side] &= noted.place == Place::OutOfWindow;
        noted
    }

    fn note(&mut self, side: usize, segment: &Segment) -> Noted {
        let is_alone = self.1[1 - side];
        let [origin, reply] = &mut self.0;
        let (own, twin) = if side == 0 { (origin, reply) } else { (reply, origin) };
        // The fast path, where it is taken.
        if own.flags.has(Flags::SEEN) && !segment.flags.is_rare() && segment.sequence == own.sequence {
            let (mut fast, mut slow, mut other) = (*own, *own, *twin);
            fast.sequence = segment.sequence.wrapping_add(segment.space);
            if let Some(ack) = acknowledgement(segment) {
                fast.acknowledged = later_acknowledgement(fast.acknowledged, ack);
            }
            let noted = follow(&mut slow, &mut other, segment, is_alone);
            assert_eq!((fast, noted), (slow, Noted::NOTHING), "both ways do the same");
            (*own, *twin) = (slow, other);
            return noted;
        }
        follow(own, twin, segment, is_alone)
    }

    fn has(&self, flag: Flags) -> [bool; 2] {
        self.0.map(|track| track.flags.has(flag))
    }
}

fn confirmed(known: &Known) -> bool {
    known.0[0].tracking.has(Tracking::CONFIRMED)
}

/// What really goes on: numbers of one side.
#[derive(Clone, Copy, Debug)]
struct Peer {
    /// Behind what it has sent, what of that was acknowledged to it, and what it has received.
    next: u32,
    acknowledged: u32,
    received: u32,
    /// Behind what passed the gateway, and the last acknowledgement that did.
    passed: u32,
    said: u32,
    fin_at: Option<u32>,
    fin_passed: bool,
}

/// A step of the connection, or of who forges it.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A side sends data, or an acknowledgement; it is lost before the gateway, or behind it.
    Send { side: usize, data: u32, lost: Loss },
    /// A side sends all again that wasn't acknowledged.
    Again { side: usize },
    /// A side asks whether the other one is there.
    KeepAlive { side: usize },
    /// The last segment of a side comes once more.
    Twice { side: usize },
    /// Somebody else sends in the name of the side that can be forged.
    Forge { flags: u8, sequence: Guess, ack: Guess, data: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    None,
    Before,
    Behind,
}

/// A number of somebody who doesn't see the connection; but what it has sent itself, it knows.
#[derive(Clone, Copy, Debug)]
enum Guess {
    Any(u32),
    /// Where its own last forged segment ended.
    Own,
    /// One number is right by chance, or near: the other one isn't.
    Around(i32),
}

fn guess() -> impl Strategy<Value = Guess> {
    prop_oneof![any::<u32>().prop_map(Guess::Any), Just(Guess::Own), (-200_000_i32..200_000).prop_map(Guess::Around),]
}

fn step() -> impl Strategy<Value = Step> {
    let side = 0_usize..2;
    let lost = prop_oneof![6 => Just(Loss::None), 1 => Just(Loss::Before), 1 => Just(Loss::Behind)];
    let data = prop_oneof![Just(0_u32), 1_u32..1460];
    let flags = prop_oneof![4 => Just(ACK), 2 => Just(SYN), 2 => Just(RST), 1 => Just(RST | ACK), 1 => Just(SYN | ACK), 1 => Just(FIN | ACK), 1 => Just(0)];
    prop_oneof![
        6 => (side.clone(), data.clone(), lost).prop_map(|(side, data, lost)| Step::Send { side, data, lost }),
        1 => side.clone().prop_map(|side| Step::Again { side }),
        1 => side.clone().prop_map(|side| Step::KeepAlive { side }),
        1 => side.prop_map(|side| Step::Twice { side }),
        6 => (flags, guess(), guess(), data)
            .prop_map(|(flags, sequence, ack, data)| Step::Forge { flags, sequence, ack, data }),
    ]
}

/// A connection, what the gateway knows of it, and what it should know.
struct Story<'a> {
    known: Known,
    peers: [Peer; 2],
    last: [Option<Segment>; 2],
    /// The side in whose name somebody forges, and where that one's last segment ended.
    forged: usize,
    forged_end: u32,
    tally: &'a Tally,
}

/// More than this a side never has in flight.
const FLIGHT: u32 = NEAR - 2000;

impl<'a> Story<'a> {
    /// The handshake is over. The side that can be forged is outside.
    fn opened(first: [u32; 2], forged: usize, tally: &'a Tally) -> Self {
        let mut known = Known::new();
        for (side, track) in known.0.iter_mut().enumerate() {
            track.flags = track.flags.with_side(if side == forged { Flags::OUTSIDE.0 } else { Flags::INSIDE.0 });
        }
        let [a, b] = first.map(|first| first.wrapping_add(1));
        assert_eq!(known.pass(0, &segment(SYN, first[0], 0, 0)), Noted::NOTHING);
        assert_eq!(known.pass(1, &segment(SYN | ACK, first[1], a, 0)), Noted::NOTHING);
        assert!(!confirmed(&known));
        assert_eq!(known.pass(0, &segment(ACK, a, b, 0)), Noted::NOTHING);
        assert!(confirmed(&known));
        let peer = |own, other| Peer {
            next: own,
            acknowledged: own,
            received: other,
            passed: own,
            said: other,
            fin_at: None,
            fin_passed: false,
        };
        Self { known, peers: [peer(a, b), peer(b, a)], last: [None; 2], forged, forged_end: 0, tally }
    }

    /// Passes a real segment, which the other side receives if it is in order.
    fn real(&mut self, side: usize, segment: Segment, reaches: bool) {
        let noted = self.known.pass(side, &segment);
        assert_eq!(noted.place, Place::InWindow, "{segment:?} of {side}: {:?}", self.peers);
        self.last[side] = Some(segment);
        let end = segment.sequence.wrapping_add(segment.space);
        let peer = &mut self.peers[side];
        peer.passed = later(peer.passed, end);
        peer.said = later(peer.said, segment.acknowledgement);
        peer.fin_passed |= segment.flags.has(TcpFlags::FIN);
        if !reaches {
            return;
        }
        let other = &mut self.peers[1 - side];
        other.acknowledged = later(other.acknowledged, segment.acknowledgement);
        if segment.sequence.wrapping_sub(other.received) > 1 << 31 || segment.sequence == other.received {
            other.received = later(other.received, end);
        }
    }

    fn send(&mut self, side: usize, flags: u8, data: u32, lost: Loss) {
        let peer = &mut self.peers[side];
        if peer.fin_at.is_some() && (flags & FIN != 0 || data > 0) {
            return;
        }
        let data = if peer.next.wrapping_sub(peer.acknowledged) > FLIGHT { 0 } else { data };
        let segment = segment(flags | ACK, peer.next, peer.received, data);
        if flags & FIN != 0 {
            peer.fin_at = Some(peer.next.wrapping_add(data));
        }
        peer.next = peer.next.wrapping_add(segment.space);
        if lost == Loss::Before {
            self.tally.count("lost before the gateway");
        } else {
            self.real(side, segment, lost == Loss::None);
        }
    }

    fn again(&mut self, side: usize) {
        let Peer { mut acknowledged, next, received, fin_at, .. } = self.peers[side];
        while acknowledged != next {
            let end = fin_at.unwrap_or(next);
            let data = end.wrapping_sub(acknowledged).min(1400);
            let fin = if fin_at == Some(acknowledged.wrapping_add(data)) { FIN } else { 0 };
            let segment = segment(ACK | fin, acknowledged, received, data);
            acknowledged = acknowledged.wrapping_add(segment.space);
            self.real(side, segment, true);
            self.tally.count("sent again");
        }
    }

    /// Whether a forged segment hits what the best of guesses may hit.
    fn is_lucky(&self, forged: &Segment) -> bool {
        let (own, other) = (self.peers[self.forged], self.peers[1 - self.forged]);
        let near = |number: u32, low: u32, high: u32| {
            number.wrapping_sub(low.wrapping_sub(NEAR)) <= high.wrapping_sub(low) + 2 * NEAR
        };
        [own.passed, other.said].contains(&forged.sequence)
            || forged.sequence.wrapping_add(1) == other.said
            || [own.said, other.passed].contains(&forged.acknowledgement)
            || (near(forged.sequence, other.said, own.passed) && near(forged.acknowledgement, own.said, other.passed))
    }

    fn forge(&mut self, flags: u8, sequence: Guess, ack: Guess, data: u32) {
        let own = self.peers[self.forged];
        let number = |guess, right: u32| match guess {
            Guess::Any(number) => number,
            Guess::Own => self.forged_end,
            Guess::Around(away) => right.wrapping_add_signed(away),
        };
        let forged = segment(flags, number(sequence, own.passed), number(ack, own.said), data);
        if self.is_lucky(&forged) {
            self.tally.count("lucky");
            return;
        }
        let before = self.known;
        let noted = self.known.pass(self.forged, &forged);
        assert_eq!(noted, Noted::IGNORED, "{forged:?}: {:?}", self.peers);
        let plain = |known: &Known| known.0.map(|it| (it.sequence, it.acknowledged, it.flags.without(Flags::SEEN)));
        assert_eq!(plain(&self.known), plain(&before), "{forged:?}");
        self.forged_end = forged.sequence.wrapping_add(forged.space);
        self.tally.count(format!("forged {}", ["data", "fin", "syn", "rst"][(flags & 7).min(3) as usize]));
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send { side, data, lost } => self.send(side, ACK, data, lost),
            Step::Again { side } => self.again(side),
            Step::KeepAlive { side } => {
                let Peer { acknowledged, next, received, .. } = self.peers[side];
                if acknowledged == next {
                    self.real(side, segment(ACK, next.wrapping_sub(1), received, 0), true);
                    self.tally.count("keep-alive");
                }
            }
            Step::Twice { side } => {
                if let Some(last) = self.last[side] {
                    self.real(side, last, true);
                }
            }
            Step::Forge { flags, sequence, ack, data } => self.forge(flags, sequence, ack, data),
        }
    }

    /// What the gateway knows is what it saw.
    fn check(&self) -> Result<(), TestCaseError> {
        for (track, peer) in self.known.0.iter().zip(&self.peers) {
            prop_assert_eq!((track.sequence, track.acknowledged), (peer.passed, peer.said));
            prop_assert_eq!(track.flags.has(Flags::FIN), peer.fin_passed);
            prop_assert!(!track.flags.has(Flags::RST));
        }
        Ok(())
    }
}

#[test]
fn nobody_who_does_not_see_a_connection_moves_it_and_it_ends_when_its_ends_say_so() {
    let classes = [
        "lost before the gateway",
        "sent again",
        "keep-alive",
        "forged data",
        "forged fin",
        "forged syn",
        "forged rst",
        "lucky",
        "closed",
        "reset at once",
        "reset by a challenge",
    ];
    let first = prop_oneof![any::<u32>(), (u32::MAX - 3000)..];
    let input = (first.clone(), first, 0_usize..2, prop::collection::vec(step(), 1..120), 0_usize..2, any::<bool>());
    property(ProptestConfig::with_cases(400), &input, &classes, |(a, b, forged, steps, closer, resets), tally| {
        let mut story = Story::opened([a, b], forged, tally);
        let half = steps.len() / 2;
        for (n, step) in steps.into_iter().enumerate() {
            if n == half && !resets {
                story.send(closer, FIN, 10, Loss::Behind);
            }
            story.step(step);
            story.check()?;
        }
        if resets {
            // At what it has sent; or, if the other side hasn't received that, at what its challenge says.
            let (next, expected) = (story.peers[closer].next, story.peers[1 - closer].received);
            story.known.pass(closer, &segment(RST, next, 0, 0));
            if story.known.has(Flags::RST)[closer] {
                tally.count("reset at once");
            } else {
                story.send(1 - closer, ACK, 0, Loss::None);
                story.known.pass(closer, &segment(RST, expected, 0, 0));
                tally.count("reset by a challenge");
            }
            prop_assert!(story.known.has(Flags::RST)[closer]);
        } else {
            story.send(1 - closer, FIN, 0, Loss::Before);
            (0..2).for_each(|side| story.again(side));
            story.check()?;
            prop_assert!(is_closed(story.known.0[0].flags, story.known.0[1].flags));
            tally.count("closed");
        }
        Ok(())
    });
}

#[test]
fn only_an_acknowledgement_of_what_was_really_sent_confirms() {
    for ack in [1, 4999, 5000, 5102, 70_000, u32::MAX] {
        let mut known = Known::new();
        known.pass(0, &segment(SYN, 1000, 0, 0));
        known.pass(0, &segment(ACK, 1001, ack, 0));
        known.pass(1, &segment(SYN | ACK, 5000, 1001, 0));
        // Behind the answer, more that may be acknowledged.
        known.pass(1, &segment(ACK, 5001, 1001, 100));
        for data in [0, 10] {
            known.pass(0, &segment(ACK, 1001, ack, data));
            assert!(!confirmed(&known), "{ack}");
        }
        known.pass(0, &segment(ACK, 1011, 5001, 0));
        assert!(confirmed(&known), "{ack}");
    }
    for ack in [5001, 5050, 5101] {
        let mut known = Known::new();
        known.pass(0, &segment(SYN, 1000, 0, 0));
        known.pass(1, &segment(SYN | ACK, 5000, 1001, 0));
        known.pass(1, &segment(ACK, 5001, 1001, 100));
        known.pass(0, &segment(ACK, 1001, ack, 0));
        assert!(confirmed(&known), "{ack}");
    }
    // An answer that acknowledges something else is no answer.
    let mut known = Known::new();
    known.pass(0, &segment(SYN, 1000, 0, 0));
    assert_eq!(known.pass(1, &segment(SYN | ACK, 5000, 1002, 0)), Noted::IGNORED);
    known.pass(0, &segment(ACK, 1001, 5001, 0));
    assert!(!confirmed(&known) && !known.has(Flags::SYN)[1]);
}

#[test]
fn a_client_that_begins_again_with_another_number_connects() {
    let mut known = Known::new();
    known.pass(0, &segment(SYN, 1000, 0, 0));
    known.pass(0, &segment(SYN, 3_000_000_000, 0, 0));
    assert_eq!(known.pass(1, &segment(SYN | ACK, 5000, 3_000_000_001, 0)), Noted::NOTHING);
    // One that comes later is challenged; it is over as soon as its sender says so in the right place.
    assert_eq!(known.pass(0, &segment(SYN, 77, 0, 0)), Noted::IGNORED);
    assert_eq!(known.pass(0, &segment(RST, 3_000_000_001, 0, 0)).event, Event::Closing);
    assert_eq!(known.pass(0, &segment(SYN, 77, 0, 0)).event, Event::Reopened);
    known.pass(1, &segment(SYN | ACK, 9000, 78, 0));
    known.pass(0, &segment(ACK, 78, 9001, 0));
    assert!(confirmed(&known) && known.0.iter().all(Track::is_sound));
}

#[test]
fn a_window_that_is_closed_is_probed() {
    let tally = Tally::default();
    let mut story = Story::opened([1, 2], 0, &tally);
    let peer = story.peers[1];
    for _ in 0..3 {
        // With one byte that is known already, and with one that isn't.
        for sequence in [peer.next.wrapping_sub(1), peer.next] {
            assert_eq!(story.known.pass(1, &segment(ACK, sequence, peer.received, 1)), Noted::NOTHING);
        }
        assert_eq!(story.known.pass(0, &segment(ACK, peer.received, peer.next, 0)), Noted::NOTHING);
    }
}
