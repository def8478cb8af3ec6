//! Resynchronization: connections that advanced without passing this gateway.

use super::*;

/// Where a connection advances without passing this gateway.
#[derive(Clone, Copy, Debug, PartialEq)]
enum UnseenPath {
    /// Via a gateway that this one replaces.
    Failover,
    /// On another path, for longer than the silence timeout.
    OtherPath,
}

impl Scenario<'_> {
    /// Neither direction has passed this gateway for long.
    fn become_stale(&mut self, path: UnseenPath) {
        match path {
            UnseenPath::Failover => self.tracker.0.iter_mut().for_each(Track::mark_stale),
            UnseenPath::OtherPath => self.tracker.1 = [true; 2],
        }
    }

    /// Advances each side by so many bytes that this gateway doesn't see.
    fn advance_unseen(&mut self, path: UnseenPath, bytes: [u32; 2]) {
        self.become_stale(path);
        for (side, bytes) in bytes.into_iter().enumerate() {
            self.peers[side].next = self.peers[side].next.wrapping_add(bytes);
            self.peers[side].acknowledged = self.peers[side].next;
        }
        for side in 0..2 {
            self.peers[side].received = self.peers[1 - side].next;
        }
    }
}

/// Bytes of both sides that pass unseen: often none of one side, as in a download. The last GiB before the sequence
/// numbers wrap may be taken for one before the known number.
fn unseen_bytes() -> impl Strategy<Value = [u32; 2]> {
    let bytes = || 0..(3_u32 << 30) - (1 << 18);
    prop_oneof![
        2 => [bytes(), bytes()],
        1 => bytes().prop_map(|bytes| [bytes, 0]),
        1 => bytes().prop_map(|bytes| [0, bytes]),
    ]
}

fn unseen_path() -> impl Strategy<Value = UnseenPath> {
    prop_oneof![Just(UnseenPath::Failover), Just(UnseenPath::OtherPath)]
}

#[test]
fn a_connection_that_advanced_unseen_is_trusted_again_once_both_directions_match() {
    let forge = (prop_oneof![Just(ACK), Just(SYN), Just(RST), Just(FIN | ACK)], any::<u32>(), any::<u32>());
    let input = (
        [any::<u32>(), any::<u32>()],
        0_usize..2,
        (unseen_path(), unseen_bytes()),
        prop::collection::vec((0_usize..2, 0_u32..3000, prop::collection::vec(forge, 0..4)), 8..20),
    );
    let classes = ["forged", "far", "Failover", "OtherPath", "one side only"];
    property(ProptestConfig::with_cases(400), &input, &classes, |(first, forged, (path, bytes), turns), coverage| {
        let mut scenario = Scenario::established(first, forged, coverage);
        scenario.advance_unseen(path, bytes);
        if bytes.contains(&0) {
            coverage.count("one side only");
        }
        coverage.count(format!("{path:?}"));
        if bytes.iter().any(|bytes| bytes.wrapping_add(1 << 18) > 1 << 19) {
            coverage.count("far");
        }
        let turns: Vec<_> = turns.into_iter().chain([(0, 1, vec![]), (1, 1, vec![])]).collect();
        for (side, data, forgeries) in turns {
            let mut last = 0;
            for (flags, sequence, ack) in forgeries {
                // Also directly after the previous forged segment.
                for sequence in [sequence, last] {
                    let forgery = segment(flags, sequence, ack, 7);
                    scenario.tracker.pass(forged, &forgery);
                    last = sequence.wrapping_add(forgery.sequence_length);
                }
                coverage.count("forged");
            }
            prop_assert_eq!(scenario.tracker.has(Flags::RST), [false; 2]);
            // Data, then its acknowledgement.
            for (side, data) in [(side, data), (1 - side, 0)] {
                let peer = scenario.peers[side];
                scenario.tracker.pass(side, &segment(ACK, peer.next, peer.received, data));
                scenario.peers[side].next = peer.next.wrapping_add(data);
                scenario.peers[1 - side].received = scenario.peers[side].next;
            }
        }
        for side in 0..2 {
            let (track, peer) = (scenario.tracker.0[side], scenario.peers[side]);
            prop_assert!(track.is_trusted(), "{:?}", track);
            prop_assert_eq!((track.sequence, track.acknowledged), (peer.next, peer.received));
            prop_assert_eq!(track.flags.has(Flags::FIN), false);
        }
        // A real reset counts again, a forged one doesn't.
        let peer = scenario.peers[forged];
        scenario.tracker.pass(forged, &segment(RST, peer.next.wrapping_add(1), 0, 0));
        prop_assert_eq!(scenario.tracker.has(Flags::RST), [false; 2]);
        scenario.tracker.pass(forged, &segment(RST, peer.next, 0, 0));
        prop_assert!(scenario.tracker.has(Flags::RST)[forged]);
        Ok(())
    });
}

#[test]
fn off_path_segments_do_not_refresh_a_silent_connection_and_its_endpoints_resume() {
    let flags = prop_oneof![4 => Just(ACK), 1 => Just(SYN), 1 => Just(RST), 2 => Just(FIN | ACK), 1 => Just(0)];
    let forgeries = prop::collection::vec((flags, any::<u32>(), any::<u32>(), 0_u32..1460), 1..20);
    let input = ([any::<u32>(), any::<u32>()], 0_usize..2, unseen_path(), forgeries, 0_usize..2, 0_u32..3000);
    let classes = ["forged", "Failover", "OtherPath"];
    property(ProptestConfig::with_cases(400), &input, &classes, |input, coverage| {
        let (first, forged, path, forgeries, next, data) = input;
        let mut scenario = Scenario::established(first, forged, coverage);
        scenario.become_stale(path);
        coverage.count(format!("{path:?}"));
        let mut last = 0;
        for (flags, sequence, ack, data) in forgeries {
            // A segment that continues a blind one is as blind.
            for sequence in [sequence, last] {
                let forgery = segment(flags, sequence, ack, data);
                if !scenario.is_lucky_guess(&forgery) {
                    prop_assert_eq!(scenario.tracker.pass(forged, &forgery), TrackOutcome::IGNORED);
                    coverage.count("forged");
                }
                last = sequence.wrapping_add(forgery.sequence_length);
            }
        }
        prop_assert_eq!((scenario.tracker.has(Flags::FIN), scenario.tracker.has(Flags::RST)), ([false; 2], [false; 2]));
        scenario.send(next, ACK, data, Loss::None);
        scenario.send(1 - next, ACK, 0, Loss::None);
        scenario.check()?;
        prop_assert!(scenario.tracker.0.iter().all(Track::is_trusted));
        Ok(())
    });
}

#[test]
fn one_direction_alone_refreshes_the_session_unless_it_can_be_forged() {
    let coverage = Coverage::default();
    for side in 0..2 {
        for is_outside in [false, true] {
            let mut scenario = Scenario::established([7, 9], if is_outside { side } else { 1 - side }, &coverage);
            scenario.become_stale(UnseenPath::OtherPath);
            let mut place = |side: usize, sequence: u32, ack: u32| {
                scenario.tracker.pass(side, &segment(ACK, sequence << 28, ack << 28, 0)).position
            };
            assert_eq!(place(side, 1, 2), WindowPosition::OutOfWindow, "the first segment after a gap");
            let continued = if is_outside { WindowPosition::OutOfWindow } else { WindowPosition::Unknown };
            assert_eq!(place(side, 1, 2), continued);
            assert_eq!(place(side, 3, 2), WindowPosition::OutOfWindow, "after another gap");
            // Both directions are seen, but neither matches the other.
            assert_eq!(place(1 - side, 7, 9), WindowPosition::OutOfWindow);
            for _ in 0..2 {
                assert_eq!(
                    (place(side, 3, 2), place(1 - side, 7, 9)),
                    (WindowPosition::Unknown, WindowPosition::Unknown)
                );
            }
        }
    }
}

#[test]
fn an_unverified_fin_counts_once_the_other_direction_matches() {
    let coverage = Coverage::default();
    for (closer, path) in
        [(0, UnseenPath::Failover), (1, UnseenPath::Failover), (0, UnseenPath::OtherPath), (1, UnseenPath::OtherPath)]
    {
        let mut scenario = Scenario::established([7, 9], 1 - closer, &coverage);
        scenario.advance_unseen(path, [3 << 20, 5 << 20]);
        let (own, other) = (scenario.peers[closer], scenario.peers[1 - closer]);
        let outcome = scenario.tracker.pass(closer, &segment(FIN | ACK, own.next, own.received, 0));
        assert_eq!((outcome, scenario.tracker.has(Flags::FIN)), (TrackOutcome::IGNORED, [false; 2]));
        let acknowledgement = segment(ACK, other.next, own.next.wrapping_add(1), 0);
        assert_eq!(
            scenario.tracker.pass(1 - closer, &acknowledgement),
            TrackOutcome::with_change(StateChange::Closing)
        );
        assert!(scenario.tracker.has(Flags::FIN)[closer]);
        let fin = segment(FIN | ACK, other.next, own.next.wrapping_add(1), 0);
        assert_eq!(scenario.tracker.pass(1 - closer, &fin).change, StateChange::Closing);
        assert!(is_closed(scenario.tracker.0[0].flags, scenario.tracker.0[1].flags));
    }
}
