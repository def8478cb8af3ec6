//! Connections that went on where this gateway didn't see them.

use super::*;

/// Where a connection goes on while nobody sees it here.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Elsewhere {
    /// At a gateway whose sessions this one takes over.
    TakenOver,
    /// Past this gateway, by another way, for longer than a direction is silent.
    Silent,
}

impl Story<'_> {
    /// Neither side has said anything here for long.
    fn fall_silent(&mut self, elsewhere: Elsewhere) {
        match elsewhere {
            Elsewhere::TakenOver => self.known.0.iter_mut().for_each(Track::suspect),
            Elsewhere::Silent => self.known.1 = [true; 2],
        }
    }

    /// So many bytes of each side have gone elsewhere meanwhile.
    fn go_on(&mut self, elsewhere: Elsewhere, bytes: [u32; 2]) {
        self.fall_silent(elsewhere);
        for (side, bytes) in bytes.into_iter().enumerate() {
            self.peers[side].next = self.peers[side].next.wrapping_add(bytes);
            self.peers[side].acknowledged = self.peers[side].next;
        }
        for side in 0..2 {
            self.peers[side].received = self.peers[1 - side].next;
        }
    }
}

/// What both sides have said where nobody saw it: often one of them nothing, as in a download. The last GiB before the circle of numbers
/// closes may be taken for the one before what was known.
fn unseen_bytes() -> impl Strategy<Value = [u32; 2]> {
    let bytes = || 0..(3_u32 << 30) - (1 << 18);
    prop_oneof![
        2 => [bytes(), bytes()],
        1 => bytes().prop_map(|bytes| [bytes, 0]),
        1 => bytes().prop_map(|bytes| [0, bytes]),
    ]
}

fn elsewhere() -> impl Strategy<Value = Elsewhere> {
    prop_oneof![Just(Elsewhere::TakenOver), Just(Elsewhere::Silent)]
}

#[test]
fn a_connection_that_went_on_unseen_is_known_again_by_what_both_sides_say() {
    let forge = (prop_oneof![Just(ACK), Just(SYN), Just(RST), Just(FIN | ACK)], any::<u32>(), any::<u32>());
    let input = (
        [any::<u32>(), any::<u32>()],
        0_usize..2,
        (elsewhere(), unseen_bytes()),
        prop::collection::vec((0_usize..2, 0_u32..3000, prop::collection::vec(forge, 0..4)), 8..20),
    );
    let classes = ["forged", "far", "TakenOver", "Silent", "one side only"];
    property(ProptestConfig::with_cases(400), &input, &classes, |(first, forged, (elsewhere, bytes), turns), tally| {
        let mut story = Story::opened(first, forged, tally);
        story.go_on(elsewhere, bytes);
        if bytes.contains(&0) {
            tally.count("one side only");
        }
        tally.count(format!("{elsewhere:?}"));
        if bytes.iter().any(|bytes| bytes.wrapping_add(1 << 18) > 1 << 19) {
            tally.count("far");
        }
        let turns: Vec<_> = turns.into_iter().chain([(0, 1, vec![]), (1, 1, vec![])]).collect();
        for (side, data, forgeries) in turns {
            let mut last = 0;
            for (flags, sequence, ack) in forgeries {
                // Right behind what it has said before, which only it believes.
                for sequence in [sequence, last] {
                    let forgery = segment(flags, sequence, ack, 7);
                    story.known.pass(forged, &forgery);
                    last = sequence.wrapping_add(forgery.space);
                }
                tally.count("forged");
            }
            prop_assert_eq!(story.known.has(Flags::RST), [false; 2]);
            // Data, and at once its acknowledgement.
            for (side, data) in [(side, data), (1 - side, 0)] {
                let peer = story.peers[side];
                story.known.pass(side, &segment(ACK, peer.next, peer.received, data));
                story.peers[side].next = peer.next.wrapping_add(data);
                story.peers[1 - side].received = story.peers[side].next;
            }
        }
        for side in 0..2 {
            let (track, peer) = (story.known.0[side], story.peers[side]);
            prop_assert!(track.is_sound(), "{:?}", track);
            prop_assert_eq!((track.sequence, track.acknowledged), (peer.next, peer.received));
            prop_assert_eq!(track.flags.has(Flags::FIN), false);
        }
        // Its reset counts again, and only its.
        let peer = story.peers[forged];
        story.known.pass(forged, &segment(RST, peer.next.wrapping_add(1), 0, 0));
        prop_assert_eq!(story.known.has(Flags::RST), [false; 2]);
        story.known.pass(forged, &segment(RST, peer.next, 0, 0));
        prop_assert!(story.known.has(Flags::RST)[forged]);
        Ok(())
    });
}

#[test]
fn nobody_who_does_not_see_a_silent_connection_keeps_it_alive_and_its_sides_go_on() {
    let flags = prop_oneof![4 => Just(ACK), 1 => Just(SYN), 1 => Just(RST), 2 => Just(FIN | ACK), 1 => Just(0)];
    let forgeries = prop::collection::vec((flags, any::<u32>(), any::<u32>(), 0_u32..1460), 1..20);
    let input = ([any::<u32>(), any::<u32>()], 0_usize..2, elsewhere(), forgeries, 0_usize..2, 0_u32..3000);
    let classes = ["forged", "TakenOver", "Silent"];
    property(ProptestConfig::with_cases(400), &input, &classes, |input, tally| {
        let (first, forged, elsewhere, forgeries, next, data) = input;
        let mut story = Story::opened(first, forged, tally);
        story.fall_silent(elsewhere);
        tally.count(format!("{elsewhere:?}"));
        let mut last = 0;
        for (flags, sequence, ack, data) in forgeries {
            // One that goes on from another is as blind as that.
            for sequence in [sequence, last] {
                let forgery = segment(flags, sequence, ack, data);
                if !story.is_lucky(&forgery) {
                    prop_assert_eq!(story.known.pass(forged, &forgery), Noted::IGNORED);
                    tally.count("forged");
                }
                last = sequence.wrapping_add(forgery.space);
            }
        }
        prop_assert_eq!((story.known.has(Flags::FIN), story.known.has(Flags::RST)), ([false; 2], [false; 2]));
        story.send(next, ACK, data, Loss::None);
        story.send(1 - next, ACK, 0, Loss::None);
        story.check()?;
        prop_assert!(story.known.0.iter().all(Track::is_sound));
        Ok(())
    });
}

#[test]
fn a_connection_of_which_one_direction_goes_another_way_stays_alive_unless_it_can_be_forged() {
    let tally = Tally::default();
    for side in 0..2 {
        for is_outside in [false, true] {
            let mut story = Story::opened([7, 9], if is_outside { side } else { 1 - side }, &tally);
            story.fall_silent(Elsewhere::Silent);
            let mut place = |side: usize, sequence: u32, ack: u32| {
                story.known.pass(side, &segment(ACK, sequence << 28, ack << 28, 0)).place
            };
            assert_eq!(place(side, 1, 2), Place::OutOfWindow, "what was unseen is skipped");
            let goes_on = if is_outside { Place::OutOfWindow } else { Place::Unknown };
            assert_eq!(place(side, 1, 2), goes_on);
            assert_eq!(place(side, 3, 2), Place::OutOfWindow, "skipped again");
            // The other one is there, but neither fits to the other.
            assert_eq!(place(1 - side, 7, 9), Place::OutOfWindow);
            for _ in 0..2 {
                assert_eq!((place(side, 3, 2), place(1 - side, 7, 9)), (Place::Unknown, Place::Unknown));
            }
        }
    }
}

#[test]
fn who_went_on_unseen_and_says_fin_first_is_closed_once_the_other_side_agrees() {
    let tally = Tally::default();
    for (closer, elsewhere) in
        [(0, Elsewhere::TakenOver), (1, Elsewhere::TakenOver), (0, Elsewhere::Silent), (1, Elsewhere::Silent)]
    {
        let mut story = Story::opened([7, 9], 1 - closer, &tally);
        story.go_on(elsewhere, [3 << 20, 5 << 20]);
        let (own, other) = (story.peers[closer], story.peers[1 - closer]);
        let noted = story.known.pass(closer, &segment(FIN | ACK, own.next, own.received, 0));
        assert_eq!((noted, story.known.has(Flags::FIN)), (Noted::IGNORED, [false; 2]));
        let acknowledgement = segment(ACK, other.next, own.next.wrapping_add(1), 0);
        assert_eq!(story.known.pass(1 - closer, &acknowledgement), Noted::event(Event::Closing));
        assert!(story.known.has(Flags::FIN)[closer]);
        let fin = segment(FIN | ACK, other.next, own.next.wrapping_add(1), 0);
        assert_eq!(story.known.pass(1 - closer, &fin).event, Event::Closing);
        assert!(is_closed(story.known.0[0].flags, story.known.0[1].flags));
    }
}
