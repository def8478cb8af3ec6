//! TCP tracking against a reference model, with an off-path sender that forges segments of one side.

mod resync;

use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};

use super::*;
use crate::session::window::{TOLERANCE, later_acknowledgement};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

fn segment(flags: u8, sequence: u32, acknowledgement: u32, data: u32) -> Segment {
    let space = data + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    Segment {
        sequence,
        acknowledgment: acknowledgement,
        flags: TcpFlags(flags),
        sequence_length: space,
        ..Segment::default()
    }
}

/// Tracking state of both directions, the initiator's first, and whether each has been silent for long.
#[derive(Clone, Copy)]
struct Tracker([Track; 2], [bool; 2]);

impl Tracker {
    fn new() -> Self {
        Self([Track { flags: Flags::ORIGIN, ..Track::default() }, Track::default()], [false; 2])
    }

    fn pass(&mut self, side: usize, segment: &Segment) -> TrackOutcome {
        let outcome = self.note(side, segment);
        self.1[side] &= outcome.position == WindowPosition::OutOfWindow;
        outcome
    }

    fn note(&mut self, side: usize, segment: &Segment) -> TrackOutcome {
        let is_twin_silent = self.1[1 - side];
        let [origin, reply] = &mut self.0;
        let (own, twin) = if side == 0 { (origin, reply) } else { (reply, origin) };
        // The fast path, where it applies.
        if own.flags.has(Flags::SEEN) && !segment.flags.has_syn_fin_rst() && segment.sequence == own.sequence {
            let (mut fast, mut slow, mut other) = (*own, *own, *twin);
            fast.sequence = segment.sequence.wrapping_add(segment.sequence_length);
            if let Some(ack) = acknowledgement(segment) {
                fast.acknowledged = later_acknowledgement(fast.acknowledged, ack);
            }
            let outcome = update(&mut slow, &mut other, segment, is_twin_silent);
            assert_eq!((fast, outcome), (slow, TrackOutcome::UNCHANGED), "fast and slow path agree");
            (*own, *twin) = (slow, other);
            return outcome;
        }
        update(own, twin, segment, is_twin_silent)
    }

    fn has(&self, flag: Flags) -> [bool; 2] {
        self.0.map(|track| track.flags.has(flag))
    }
}

fn is_confirmed(tracker: &Tracker) -> bool {
    tracker.0[0].tracking.has(Tracking::CONFIRMED)
}

/// Model of one endpoint: its real numbers.
#[derive(Clone, Copy, Debug)]
struct Peer {
    /// Behind what it has sent; what of that was acknowledged to it; what it has received.
    next: u32,
    acknowledged: u32,
    received: u32,
    /// Behind what has passed the gateway, and the last acknowledgement that has.
    passed: u32,
    passed_ack: u32,
    fin_at: Option<u32>,
    fin_passed: bool,
}

/// A step of an endpoint or of the off-path sender.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A side sends data or an acknowledgement, which is lost before or after the gateway, or arrives.
    Send { side: usize, data: u32, lost: Loss },
    /// A side retransmits all unacknowledged data.
    Retransmit { side: usize },
    /// A side sends a keep-alive.
    KeepAlive { side: usize },
    /// The last segment of a side is duplicated.
    Duplicate { side: usize },
    /// The off-path sender forges a segment of the side that can be forged.
    Forge { flags: u8, sequence: Guess, ack: Guess, data: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    None,
    BeforeGateway,
    AfterGateway,
}

/// A number chosen by the off-path sender, which knows only what it has sent itself.
#[derive(Clone, Copy, Debug)]
enum Guess {
    Any(u32),
    /// The end of its last forged segment.
    OwnEnd,
    /// A number near the right one.
    Near(i32),
}

fn guess() -> impl Strategy<Value = Guess> {
    prop_oneof![any::<u32>().prop_map(Guess::Any), Just(Guess::OwnEnd), (-200_000_i32..200_000).prop_map(Guess::Near),]
}

fn step() -> impl Strategy<Value = Step> {
    let side = 0_usize..2;
    let lost = prop_oneof![6 => Just(Loss::None), 1 => Just(Loss::BeforeGateway), 1 => Just(Loss::AfterGateway)];
    let data = prop_oneof![Just(0_u32), 1_u32..1460];
    let flags = prop_oneof![
        4 => Just(ACK),
        2 => Just(SYN),
        2 => Just(RST),
        1 => Just(RST | ACK),
        1 => Just(SYN | ACK),
        1 => Just(FIN | ACK),
        1 => Just(0),
    ];
    prop_oneof![
        6 => (side.clone(), data.clone(), lost).prop_map(|(side, data, lost)| Step::Send { side, data, lost }),
        1 => side.clone().prop_map(|side| Step::Retransmit { side }),
        1 => side.clone().prop_map(|side| Step::KeepAlive { side }),
        1 => side.prop_map(|side| Step::Duplicate { side }),
        6 => (flags, guess(), guess(), data)
            .prop_map(|(flags, sequence, ack, data)| Step::Forge { flags, sequence, ack, data }),
    ]
}

/// A connection: its tracking state and the model's.
struct Scenario<'a> {
    tracker: Tracker,
    peers: [Peer; 2],
    last: [Option<Segment>; 2],
    /// The side whose segments are forged, and the end of the last forged segment.
    forged: usize,
    forged_end: u32,
    coverage: &'a Coverage,
}

/// Limit of a side's data in flight.
const MAX_FLIGHT: u32 = TOLERANCE - 2000;

impl<'a> Scenario<'a> {
    /// After the handshake. The side that can be forged is outside.
    fn established(first: [u32; 2], forged: usize, coverage: &'a Coverage) -> Self {
        let mut tracker = Tracker::new();
        for (side, track) in tracker.0.iter_mut().enumerate() {
            track.flags = track.flags.with_side(if side == forged { Flags::OUTSIDE.0 } else { Flags::INSIDE.0 });
        }
        let [a, b] = first.map(|first| first.wrapping_add(1));
        assert_eq!(tracker.pass(0, &segment(SYN, first[0], 0, 0)), TrackOutcome::UNCHANGED);
        assert_eq!(tracker.pass(1, &segment(SYN | ACK, first[1], a, 0)), TrackOutcome::UNCHANGED);
        assert!(!is_confirmed(&tracker));
        assert_eq!(tracker.pass(0, &segment(ACK, a, b, 0)), TrackOutcome::UNCHANGED);
        assert!(is_confirmed(&tracker));
        let peer = |own, other| Peer {
            next: own,
            acknowledged: own,
            received: other,
            passed: own,
            passed_ack: other,
            fin_at: None,
            fin_passed: false,
        };
        Self { tracker, peers: [peer(a, b), peer(b, a)], last: [None; 2], forged, forged_end: 0, coverage }
    }

    /// Passes a real segment, which the other side accepts if it is in order.
    fn pass_real(&mut self, side: usize, segment: Segment, reaches: bool) {
        let outcome = self.tracker.pass(side, &segment);
        assert_eq!(outcome.position, WindowPosition::InWindow, "{segment:?} of {side}: {:?}", self.peers);
        self.last[side] = Some(segment);
        let end = segment.sequence.wrapping_add(segment.sequence_length);
        let peer = &mut self.peers[side];
        peer.passed = later(peer.passed, end);
        peer.passed_ack = later(peer.passed_ack, segment.acknowledgment);
        peer.fin_passed |= segment.flags.has(TcpFlags::FIN);
        if !reaches {
            return;
        }
        let other = &mut self.peers[1 - side];
        other.acknowledged = later(other.acknowledged, segment.acknowledgment);
        if segment.sequence.wrapping_sub(other.received) > 1 << 31 || segment.sequence == other.received {
            other.received = later(other.received, end);
        }
    }

    fn send(&mut self, side: usize, flags: u8, data: u32, lost: Loss) {
        let peer = &mut self.peers[side];
        if peer.fin_at.is_some() && (flags & FIN != 0 || data > 0) {
            return;
        }
        let data = if peer.next.wrapping_sub(peer.acknowledged) > MAX_FLIGHT { 0 } else { data };
        let segment = segment(flags | ACK, peer.next, peer.received, data);
        if flags & FIN != 0 {
            peer.fin_at = Some(peer.next.wrapping_add(data));
        }
        peer.next = peer.next.wrapping_add(segment.sequence_length);
        if lost == Loss::BeforeGateway {
            self.coverage.count("lost before the gateway");
        } else {
            self.pass_real(side, segment, lost == Loss::None);
        }
    }

    fn retransmit(&mut self, side: usize) {
        let Peer { mut acknowledged, next, received, fin_at, .. } = self.peers[side];
        while acknowledged != next {
            let end = fin_at.unwrap_or(next);
            let data = end.wrapping_sub(acknowledged).min(1400);
            let fin = if fin_at == Some(acknowledged.wrapping_add(data)) { FIN } else { 0 };
            let segment = segment(ACK | fin, acknowledged, received, data);
            acknowledged = acknowledged.wrapping_add(segment.sequence_length);
            self.pass_real(side, segment, true);
            self.coverage.count("retransmitted");
        }
    }

    /// Whether a forged segment matches the window by chance.
    fn is_lucky_guess(&self, forged: &Segment) -> bool {
        let (own, other) = (self.peers[self.forged], self.peers[1 - self.forged]);
        let near = |number: u32, low: u32, high: u32| {
            number.wrapping_sub(low.wrapping_sub(TOLERANCE)) <= high.wrapping_sub(low) + 2 * TOLERANCE
        };
        [own.passed, other.passed_ack].contains(&forged.sequence)
            || forged.sequence.wrapping_add(1) == other.passed_ack
            || [own.passed_ack, other.passed].contains(&forged.acknowledgment)
            || (near(forged.sequence, other.passed_ack, own.passed)
                && near(forged.acknowledgment, own.passed_ack, other.passed))
    }

    fn forge(&mut self, flags: u8, sequence: Guess, ack: Guess, data: u32) {
        let own = self.peers[self.forged];
        let number = |guess, right: u32| match guess {
            Guess::Any(number) => number,
            Guess::OwnEnd => self.forged_end,
            Guess::Near(away) => right.wrapping_add_signed(away),
        };
        let forged = segment(flags, number(sequence, own.passed), number(ack, own.passed_ack), data);
        if self.is_lucky_guess(&forged) {
            self.coverage.count("lucky guess");
            return;
        }
        let before = self.tracker;
        let outcome = self.tracker.pass(self.forged, &forged);
        assert_eq!(outcome, TrackOutcome::IGNORED, "{forged:?}: {:?}", self.peers);
        let plain =
            |tracker: &Tracker| tracker.0.map(|it| (it.sequence, it.acknowledged, it.flags.without(Flags::SEEN)));
        assert_eq!(plain(&self.tracker), plain(&before), "{forged:?}");
        self.forged_end = forged.sequence.wrapping_add(forged.sequence_length);
        self.coverage.count(format!("forged {}", ["data", "fin", "syn", "rst"][(flags & 7).min(3) as usize]));
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send { side, data, lost } => self.send(side, ACK, data, lost),
            Step::Retransmit { side } => self.retransmit(side),
            Step::KeepAlive { side } => {
                let Peer { acknowledged, next, received, .. } = self.peers[side];
                if acknowledged == next {
                    self.pass_real(side, segment(ACK, next.wrapping_sub(1), received, 0), true);
                    self.coverage.count("keep-alive");
                }
            }
            Step::Duplicate { side } => {
                if let Some(last) = self.last[side] {
                    self.pass_real(side, last, true);
                }
            }
            Step::Forge { flags, sequence, ack, data } => self.forge(flags, sequence, ack, data),
        }
    }

    /// The tracking state is what has passed.
    fn check(&self) -> Result<(), TestCaseError> {
        for (track, peer) in self.tracker.0.iter().zip(&self.peers) {
            prop_assert_eq!((track.sequence, track.acknowledged), (peer.passed, peer.passed_ack));
            prop_assert_eq!(track.flags.has(Flags::FIN), peer.fin_passed);
            prop_assert!(!track.flags.has(Flags::RST));
        }
        Ok(())
    }
}

#[test]
fn off_path_segments_change_no_state_and_the_endpoints_close_the_connection() {
    let classes = [
        "lost before the gateway",
        "retransmitted",
        "keep-alive",
        "forged data",
        "forged fin",
        "forged syn",
        "forged rst",
        "lucky guess",
        "closed",
        "reset at once",
        "reset after a challenge",
    ];
    let first = prop_oneof![any::<u32>(), (u32::MAX - 3000)..];
    let input = (first.clone(), first, 0_usize..2, prop::collection::vec(step(), 1..120), 0_usize..2, any::<bool>());
    property(ProptestConfig::with_cases(400), &input, &classes, |(a, b, forged, steps, closer, resets), coverage| {
        let mut scenario = Scenario::established([a, b], forged, coverage);
        let half = steps.len() / 2;
        for (n, step) in steps.into_iter().enumerate() {
            if n == half && !resets {
                scenario.send(closer, FIN, 10, Loss::AfterGateway);
            }
            scenario.step(step);
            scenario.check()?;
        }
        if resets {
            // At the end of what it has sent; or, if the other side hasn't received that, at the number of its
            // challenge ACK.
            let (next, expected) = (scenario.peers[closer].next, scenario.peers[1 - closer].received);
            scenario.tracker.pass(closer, &segment(RST, next, 0, 0));
            if scenario.tracker.has(Flags::RST)[closer] {
                coverage.count("reset at once");
            } else {
                scenario.send(1 - closer, ACK, 0, Loss::None);
                scenario.tracker.pass(closer, &segment(RST, expected, 0, 0));
                coverage.count("reset after a challenge");
            }
            prop_assert!(scenario.tracker.has(Flags::RST)[closer]);
        } else {
            scenario.send(1 - closer, FIN, 0, Loss::BeforeGateway);
            (0..2).for_each(|side| scenario.retransmit(side));
            scenario.check()?;
            prop_assert!(is_closed(scenario.tracker.0[0].flags, scenario.tracker.0[1].flags));
            coverage.count("closed");
        }
        Ok(())
    });
}

#[test]
fn only_an_acknowledgement_of_sent_data_confirms_the_initiator() {
    for ack in [1, 4999, 5000, 5102, 70_000, u32::MAX] {
        let mut tracker = Tracker::new();
        tracker.pass(0, &segment(SYN, 1000, 0, 0));
        tracker.pass(0, &segment(ACK, 1001, ack, 0));
        tracker.pass(1, &segment(SYN | ACK, 5000, 1001, 0));
        // Data after the SYN-ACK, which may be acknowledged, too.
        tracker.pass(1, &segment(ACK, 5001, 1001, 100));
        for data in [0, 10] {
            tracker.pass(0, &segment(ACK, 1001, ack, data));
            assert!(!is_confirmed(&tracker), "{ack}");
        }
        tracker.pass(0, &segment(ACK, 1011, 5001, 0));
        assert!(is_confirmed(&tracker), "{ack}");
    }
    for ack in [5001, 5050, 5101] {
        let mut tracker = Tracker::new();
        tracker.pass(0, &segment(SYN, 1000, 0, 0));
        tracker.pass(1, &segment(SYN | ACK, 5000, 1001, 0));
        tracker.pass(1, &segment(ACK, 5001, 1001, 100));
        tracker.pass(0, &segment(ACK, 1001, ack, 0));
        assert!(is_confirmed(&tracker), "{ack}");
    }
    // A SYN-ACK that acknowledges something else is ignored.
    let mut tracker = Tracker::new();
    tracker.pass(0, &segment(SYN, 1000, 0, 0));
    assert_eq!(tracker.pass(1, &segment(SYN | ACK, 5000, 1002, 0)), TrackOutcome::IGNORED);
    tracker.pass(0, &segment(ACK, 1001, 5001, 0));
    assert!(!is_confirmed(&tracker) && !tracker.has(Flags::SYN)[1]);
}

#[test]
fn a_client_that_retries_with_another_isn_connects() {
    let mut tracker = Tracker::new();
    tracker.pass(0, &segment(SYN, 1000, 0, 0));
    tracker.pass(0, &segment(SYN, 3_000_000_000, 0, 0));
    assert_eq!(tracker.pass(1, &segment(SYN | ACK, 5000, 3_000_000_001, 0)), TrackOutcome::UNCHANGED);
    // A later SYN is challenged; the connection is closed once its sender resets it with the right number.
    assert_eq!(tracker.pass(0, &segment(SYN, 77, 0, 0)), TrackOutcome::IGNORED);
    assert_eq!(tracker.pass(0, &segment(RST, 3_000_000_001, 0, 0)).change, StateChange::Closing);
    assert_eq!(tracker.pass(0, &segment(SYN, 77, 0, 0)).change, StateChange::Reopened);
    tracker.pass(1, &segment(SYN | ACK, 9000, 78, 0));
    tracker.pass(0, &segment(ACK, 78, 9001, 0));
    assert!(is_confirmed(&tracker) && tracker.0.iter().all(Track::is_trusted));
}

#[test]
fn zero_window_probes_are_in_window() {
    let coverage = Coverage::default();
    let mut scenario = Scenario::established([1, 2], 0, &coverage);
    let peer = scenario.peers[1];
    for _ in 0..3 {
        // With one byte that is acknowledged already, and with one that isn't.
        for sequence in [peer.next.wrapping_sub(1), peer.next] {
            assert_eq!(scenario.tracker.pass(1, &segment(ACK, sequence, peer.received, 1)), TrackOutcome::UNCHANGED);
        }
        assert_eq!(scenario.tracker.pass(0, &segment(ACK, peer.received, peer.next, 0)), TrackOutcome::UNCHANGED);
    }
}
