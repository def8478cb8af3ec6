//! SCTP association tracking (RFC 9260), with the flags of TCP: INIT and INIT ACK set SYN, SHUTDOWN ACK and SHUTDOWN
//! COMPLETE set FIN, ABORT sets RST. A packet has one verification tag, and may bundle several chunks (section 6.10):
//! those of a handshake come first, those that end the association behind others, too.
//!
//! All packets of a direction carry the verification tag that the other side chose in its INIT or INIT ACK (section
//! 8.5): 32 bits that an off-path sender doesn't have. Anyone can send an INIT, and an endpoint that refuses it replies
//! with the tag from that INIT and keeps an open association (section 5.2.2). So the tags of a handshake are pending
//! until a COOKIE ECHO or COOKIE ACK uses one: its sender has received the tag, so it is confirmed, and the association
//! is open with the new tags (section 5.2.4). Until then a handshake in an open association has no effect.
//!
//! In an association whose handshake was not seen, each direction's first tag counts, but confirms no initiator.

use super::flags::{Flags, Tracking};
use super::table::Table;
use super::tcp::is_closed;
use super::track::{StateChange, Track, TrackOutcome};
use crate::flow::address::Address;
use crate::flow::ids::Slot;
use crate::wire::sctp::{ChunkType, CommonHeader};

/// Updates association state with a packet of the direction in `slot`.
pub fn track_packet<A: Address>(table: &mut Table<A>, slot: Slot, packet: &CommonHeader) -> TrackOutcome {
    let twin_slot = table.entry(slot).twin();
    let (mut own, mut twin) = (table.entry(slot).track(), table.entry(twin_slot).track());
    let outcome = update(&mut own, &mut twin, packet);
    table.entry_mut(slot).set_track(own);
    table.entry_mut(twin_slot).set_track(twin);
    outcome
}

/// Applies a packet of `own` to both directions. `sequence` is the tag of a direction's packets, `acknowledged` the
/// pending one; 0 is no tag (section 3.3.2).
///
/// If the other direction has SYN, its endpoint chose the tag in `sequence`; otherwise that is only the first tag seen.
fn update(own: &mut Track, twin: &mut Track, packet: &CommonHeader) -> TrackOutcome {
    own.flags = own.flags.with(Flags::SEEN);
    let (tag, closing) = (packet.verification_tag, packet.closing_chunk);
    let outcome = match packet.first_chunk {
        ChunkType::Init => return track_init(own, twin, packet),
        _ if tag == 0 => return TrackOutcome::IGNORED,
        ChunkType::InitAck => return track_init_ack(own, twin, packet),
        ChunkType::CookieEcho | ChunkType::CookieAck if completes_handshake(own, twin, tag) => establish(own, twin),
        _ if is_reflected(twin, closing, tag) || is_refusal(own, twin, closing, tag) => TrackOutcome::UNCHANGED,
        _ if tag == own.sequence => {
            verify_tag(own, twin);
            TrackOutcome::UNCHANGED
        }
        _ if closing.is_none() && is_first_tag(own, twin) => {
            own.sequence = tag;
            TrackOutcome::UNCHANGED
        }
        _ => return TrackOutcome::IGNORED,
    };
    let ends = match closing {
        Some(ChunkType::Abort) => Flags::RST,
        Some(_) => Flags::FIN,
        None => return outcome,
    };
    if own.flags.has(ends) {
        return outcome;
    }
    own.flags = own.flags.with(ends);
    TrackOutcome::with_change(StateChange::Closing)
}

/// Tracks an INIT: its initiate tag is pending.
fn track_init(own: &mut Track, twin: &mut Track, packet: &CommonHeader) -> TrackOutcome {
    if packet.initiate_tag == 0 {
        return TrackOutcome::IGNORED;
    }
    twin.acknowledged = packet.initiate_tag;
    let is_first = own.sequence == 0 && twin.sequence == 0 && !own.flags.has(Flags::SYN);
    if is_first {
        own.flags = own.flags.with(Flags::SYN);
    }
    if is_first || is_opening_handshake(own, twin) { TrackOutcome::UNCHANGED } else { TrackOutcome::IGNORED }
}

/// Tracks an INIT ACK: its verification tag is the initiate tag of the INIT, and its own initiate tag is pending.
fn track_init_ack(own: &mut Track, twin: &mut Track, packet: &CommonHeader) -> TrackOutcome {
    let (tag, initiate_tag) = (packet.verification_tag, packet.initiate_tag);
    if tag != own.acknowledged || initiate_tag == 0 {
        return TrackOutcome::IGNORED;
    }
    twin.acknowledged = initiate_tag;
    // In the first handshake, both tags are fixed from the INIT ACK on: later handshakes displace pending tags only. In
    // a simultaneous open (section 5.2.1), each INIT ACK fixes the other side's tag.
    let (sent_init, sent_init_ack) = (twin.flags.has(Flags::SYN), own.flags.has(Flags::SYN));
    let is_first = sent_init && (!sent_init_ack || twin.sequence == 0);
    if is_first {
        twin.sequence = initiate_tag;
    }
    if sent_init && !sent_init_ack {
        own.sequence = tag;
        own.flags = own.flags.with(Flags::SYN);
    }
    if is_first || is_opening_handshake(twin, own) { TrackOutcome::UNCHANGED } else { TrackOutcome::IGNORED }
}

/// Whether a handshake of initiator `own` opens the association, for the first time or after it has closed.
fn is_opening_handshake(own: &Track, twin: &Track) -> bool {
    own.flags.has(Flags::ORIGIN.with(Flags::SYN)) && (own.is_unconfirmed() || is_closed(own.flags, twin.flags))
}

/// Whether a COOKIE ECHO or COOKIE ACK with this tag completes a handshake that changes something: other tags, or a
/// closed association.
fn completes_handshake(own: &Track, twin: &Track, tag: u32) -> bool {
    tag == own.acknowledged && (tag != own.sequence || is_closed(own.flags, twin.flags))
}

/// Whether an endpoint without association reflects the tag of the packet that it received, and sets the T bit (section
/// 8.4). That bit isn't read: a guess matches two of 2^32 tags with it or without it.
fn is_reflected(twin: &Track, closing: Option<ChunkType>, tag: u32) -> bool {
    matches!(closing, Some(ChunkType::Abort | ChunkType::ShutdownComplete)) && tag == twin.sequence
}

/// Whether an ABORT with this tag refuses the INIT that would have opened the association.
fn is_refusal(own: &Track, twin: &Track, closing: Option<ChunkType>, tag: u32) -> bool {
    let is_replied = own.sequence != 0 || own.flags.has(Flags::SYN);
    closing == Some(ChunkType::Abort) && !is_replied && twin.flags.has(Flags::SYN) && tag == own.acknowledged
}

/// Whether a packet's tag is the first one of its direction, with nothing to verify it against. Packets that end an
/// association may carry the other direction's tag, and are not used.
fn is_first_tag(own: &Track, twin: &Track) -> bool {
    own.sequence == 0 && !twin.flags.has(Flags::SYN)
}

/// Completes a handshake: the association is open, whatever its state was. Other gateways have its old tags.
fn establish(own: &mut Track, twin: &mut Track) -> TrackOutcome {
    let had_tag = own.sequence != 0;
    own.sequence = own.acknowledged;
    twin.flags = twin.flags.with(Flags::SYN);
    if twin.acknowledged != 0 {
        twin.sequence = twin.acknowledged;
        own.flags = own.flags.with(Flags::SYN);
    }
    let ended = Flags::FIN.with(Flags::RST);
    (own.flags, twin.flags) = (own.flags.without(ended), twin.flags.without(ended));
    verify_tag(own, twin);
    if had_tag { TrackOutcome::with_change(StateChange::Reopened) } else { TrackOutcome::UNCHANGED }
}

/// `own` uses the tag in `sequence`. If the other endpoint chose it, the sender has received it and is confirmed.
fn verify_tag(own: &mut Track, twin: &mut Track) {
    if !twin.flags.has(Flags::SYN) {
        return;
    }
    if twin.sequence == 0 {
        twin.sequence = twin.acknowledged;
    }
    // A late COOKIE ECHO must not reopen an association that has closed since.
    for track in [&mut *own, &mut *twin] {
        if track.acknowledged == track.sequence {
            track.acknowledged = 0;
        }
    }
    if own.flags.has(Flags::ORIGIN) {
        own.tracking = own.tracking.with(Tracking::CONFIRMED);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vipgate_coverage::property;

    use super::*;

    const ORIGIN: usize = 0;
    const REPLY: usize = 1;
    /// Verification tags of both directions, in most of these tests.
    const TAGS: [u32; 2] = [0x22, 0x11];

    const REOPENED: TrackOutcome = TrackOutcome { change: StateChange::Reopened, ..TrackOutcome::UNCHANGED };
    /// Outcomes of a handshake in an open association, up to its COOKIE ECHO.
    const RESTART: [TrackOutcome; 3] = [TrackOutcome::IGNORED, TrackOutcome::IGNORED, REOPENED];

    /// Tracking state of both directions, the original one first.
    #[derive(Clone, Copy)]
    struct Tracker([Track; 2]);

    impl Tracker {
        fn new() -> Self {
            Self([Track { flags: Flags::ORIGIN, ..Track::default() }, Track::default()])
        }

        /// State after the first handshake.
        fn open(tags: [u32; 2]) -> Self {
            let mut tracker = Self::new();
            tracker.restart(tags, [TrackOutcome::UNCHANGED; 3]);
            assert!(tracker.is_confirmed() && !tracker.is_closed());
            tracker
        }

        /// A handshake of the original direction, after which packets have these tags.
        fn restart(&mut self, tags: [u32; 2], expected: [TrackOutcome; 3]) {
            let outcomes = [
                self.pass(ORIGIN, ChunkType::Init, 0, tags[REPLY]),
                self.pass(REPLY, ChunkType::InitAck, tags[REPLY], tags[ORIGIN]),
                self.pass(ORIGIN, ChunkType::CookieEcho, tags[ORIGIN], 0),
            ];
            assert_eq!(outcomes, expected);
            assert_eq!(self.pass(REPLY, ChunkType::CookieAck, tags[REPLY], 0), TrackOutcome::UNCHANGED);
            assert_eq!(self.tags(), tags);
        }

        /// Passes a packet of one chunk with this verification tag and, in a handshake, this initiate tag.
        fn pass(&mut self, side: usize, chunk: ChunkType, tag: u32, initiate_tag: u32) -> TrackOutcome {
            use ChunkType::{Abort, ShutdownAck, ShutdownComplete};
            let closing_chunk = Some(chunk).filter(|it| matches!(it, Abort | ShutdownAck | ShutdownComplete));
            self.pass_chunks(side, (chunk, closing_chunk), tag, initiate_tag)
        }

        /// Passes a packet with this first chunk and this one that ends the association.
        fn pass_chunks(
            &mut self,
            side: usize,
            (first_chunk, closing_chunk): (ChunkType, Option<ChunkType>),
            verification_tag: u32,
            initiate_tag: u32,
        ) -> TrackOutcome {
            let [origin, reply] = &mut self.0;
            let (own, twin) = if side == ORIGIN { (origin, reply) } else { (reply, origin) };
            let packet =
                CommonHeader { verification_tag, first_chunk, closing_chunk, initiate_tag, ..CommonHeader::default() };
            update(own, twin, &packet)
        }

        fn tags(&self) -> [u32; 2] {
            self.0.map(|track| track.sequence)
        }

        /// State that only the endpoints of the association may change.
        fn state(&self) -> [(u32, Flags, Tracking); 2] {
            self.0.map(|track| (track.sequence, track.flags.without(Flags::SEEN), track.tracking))
        }

        fn is_confirmed(&self) -> bool {
            self.0[ORIGIN].tracking.has(Tracking::CONFIRMED)
        }

        fn is_closed(&self) -> bool {
            is_closed(self.0[ORIGIN].flags, self.0[REPLY].flags)
        }
    }

    #[test]
    fn an_abort_that_answers_an_init_ends_no_open_association() {
        for forger in [ORIGIN, REPLY] {
            let mut tracker = Tracker::open(TAGS);
            let before = tracker.state();
            for tag in [0xbad, 0xbee] {
                assert_eq!(tracker.pass(forger, ChunkType::Init, 0, tag), TrackOutcome::IGNORED);
                assert_eq!(tracker.pass(1 - forger, ChunkType::Abort, tag, 0), TrackOutcome::IGNORED);
                assert_eq!(tracker.pass(1 - forger, ChunkType::Data, tag, 0), TrackOutcome::IGNORED);
            }
            assert_eq!(tracker.state(), before);
        }
        // Nor an association that is being opened.
        let mut tracker = Tracker::new();
        tracker.pass(ORIGIN, ChunkType::Init, 0, TAGS[REPLY]);
        tracker.pass(REPLY, ChunkType::Init, 0, 0xbad);
        assert_eq!(tracker.pass(ORIGIN, ChunkType::Abort, 0xbad, 0), TrackOutcome::IGNORED);
        tracker.pass(REPLY, ChunkType::InitAck, TAGS[REPLY], TAGS[ORIGIN]);
        tracker.pass(REPLY, ChunkType::Init, 0, 0xbee);
        assert_eq!(tracker.pass(ORIGIN, ChunkType::CookieEcho, TAGS[ORIGIN], 0), TrackOutcome::UNCHANGED);
        assert!(tracker.is_confirmed() && !tracker.is_closed());
        assert_eq!(tracker.tags(), TAGS);
    }

    /// Forged packet of one side: chunk, verification tag, whether to use the last forged initiate tag instead,
    /// initiate tag. Reply of the other side to a forged INIT: whether it refuses, and its initiate tag otherwise.
    fn forgery() -> impl Strategy<Value = (ChunkType, u32, bool, u32, bool, u32)> {
        let chunks = vec![
            ChunkType::Init,
            ChunkType::Init,
            ChunkType::Init,
            ChunkType::InitAck,
            ChunkType::CookieEcho,
            ChunkType::CookieAck,
            ChunkType::Data,
            ChunkType::Abort,
            ChunkType::ShutdownAck,
            ChunkType::ShutdownComplete,
            ChunkType::Other,
        ];
        (prop::sample::select(chunks), any::<u32>(), any::<bool>(), 1_u32.., any::<bool>(), 1_u32..)
    }

    #[test]
    fn guessed_tags_change_no_state_and_the_endpoints_restart_and_abort_the_association() {
        let input = (
            [1..u32::MAX, 1..u32::MAX],
            ORIGIN..=REPLY,
            prop::collection::vec(forgery(), 1..40),
            any::<bool>(),
            ORIGIN..=REPLY,
        );
        let classes = ["refused", "answered", "with its own tag", "restarted"];
        property(ProptestConfig::with_cases(400), &input, &classes, |input, coverage| {
            let (mut tags, forger, forgeries, restarts, aborts) = input;
            let mut tracker = Tracker::open(tags);
            let before = tracker.state();
            let mut own_tag = 0;
            for (chunk, any_tag, is_own, initiate_tag, refuses, reply_tag) in forgeries {
                let tag = match chunk {
                    ChunkType::Init => 0,
                    _ if is_own => own_tag,
                    _ => any_tag,
                };
                let (own, other) = (tracker.0[forger], tracker.0[1 - forger]);
                let right = [own.sequence, own.acknowledged, other.sequence];
                if right.contains(&tag) && tag != 0 || right.contains(&initiate_tag) {
                    coverage.count("lucky guess");
                    continue;
                }
                prop_assert_eq!(tracker.pass(forger, chunk, tag, initiate_tag), TrackOutcome::IGNORED);
                prop_assert_eq!(tracker.state(), before);
                if chunk != ChunkType::Init {
                    coverage.add("with its own tag", u64::from(is_own && tag != 0));
                    continue;
                }
                own_tag = initiate_tag;
                let reply = if refuses { ChunkType::Abort } else { ChunkType::InitAck };
                coverage.count(if refuses { "refused" } else { "answered" });
                prop_assert_eq!(tracker.pass(1 - forger, reply, initiate_tag, reply_tag), TrackOutcome::IGNORED);
                prop_assert_eq!(tracker.state(), before);
            }
            if restarts {
                tags = tags.map(|tag| tag.rotate_left(1) | 1);
                tracker.restart(tags, RESTART);
                coverage.count("restarted");
            }
            for side in [ORIGIN, REPLY] {
                prop_assert_eq!(tracker.pass(side, ChunkType::Data, tags[side], 0), TrackOutcome::UNCHANGED);
            }
            prop_assert_eq!(
                tracker.pass(aborts, ChunkType::Abort, tags[aborts], 0),
                TrackOutcome::with_change(StateChange::Closing)
            );
            prop_assert!(tracker.is_closed());
            Ok(())
        });
    }

    #[test]
    fn a_restarted_association_has_only_new_tags_and_is_replicated() {
        let mut tracker = Tracker::open(TAGS);
        tracker.restart([0x44, 0x33], RESTART);
        assert!(tracker.is_confirmed());
        for (side, tag) in TAGS.into_iter().enumerate() {
            assert_eq!(tracker.pass(side, ChunkType::Data, tag, 0), TrackOutcome::IGNORED, "old tags");
        }
        // The other side may restart it, too.
        assert_eq!(tracker.pass(REPLY, ChunkType::Init, 0, 0x66), TrackOutcome::IGNORED);
        assert_eq!(tracker.pass(ORIGIN, ChunkType::InitAck, 0x66, 0x55), TrackOutcome::IGNORED);
        assert_eq!(tracker.pass(REPLY, ChunkType::CookieEcho, 0x55, 0), REOPENED);
        assert_eq!(tracker.pass(ORIGIN, ChunkType::CookieAck, 0x66, 0), TrackOutcome::UNCHANGED);
        assert_eq!(tracker.tags(), [0x66, 0x55]);
    }

    #[test]
    fn a_simultaneous_open_sets_both_tags_and_confirms_the_initiator() {
        let handshake = [
            (REPLY, ChunkType::Init, 0, TAGS[ORIGIN]),
            (ORIGIN, ChunkType::InitAck, TAGS[ORIGIN], TAGS[REPLY]),
            (REPLY, ChunkType::InitAck, TAGS[REPLY], TAGS[ORIGIN]),
        ];
        // Either side's INIT ACK may be lost before the gateway, and either side's cookie may come first.
        for lost in [None, Some(1), Some(2)] {
            for first in [ORIGIN, REPLY] {
                let mut tracker = Tracker::new();
                tracker.pass(ORIGIN, ChunkType::Init, 0, TAGS[REPLY]);
                for (n, (side, chunk, tag, initiate_tag)) in handshake.into_iter().enumerate() {
                    if lost != Some(n) {
                        assert_eq!(tracker.pass(side, chunk, tag, initiate_tag), TrackOutcome::UNCHANGED);
                    }
                }
                assert!(!tracker.is_confirmed());
                for (side, chunk) in [(first, ChunkType::CookieEcho), (1 - first, ChunkType::CookieAck)] {
                    assert_eq!(tracker.pass(side, chunk, TAGS[side], 0), TrackOutcome::UNCHANGED, "{lost:?} {first}");
                }
                assert!(tracker.is_confirmed() && !tracker.is_closed(), "{lost:?} {first}");
                assert_eq!(tracker.tags(), TAGS);
            }
        }
    }

    #[test]
    fn an_association_picked_up_midstream_has_its_first_tags() {
        let mut tracker = Tracker::new();
        for chunk in [ChunkType::Abort, ChunkType::ShutdownComplete, ChunkType::InitAck] {
            assert_eq!(tracker.pass(ORIGIN, chunk, 0xbad, 0x77), TrackOutcome::IGNORED, "these set no tag");
        }
        for side in [ORIGIN, REPLY, ORIGIN] {
            assert_eq!(tracker.pass(side, ChunkType::Data, TAGS[side], 0), TrackOutcome::UNCHANGED);
            assert_eq!(tracker.pass(side, ChunkType::Data, 0xbad, 0), TrackOutcome::IGNORED);
        }
        assert_eq!(tracker.pass(ORIGIN, ChunkType::CookieEcho, TAGS[ORIGIN], 0), TrackOutcome::UNCHANGED);
        assert!(!tracker.is_confirmed(), "the tag that its sender received was not seen");
        let before = tracker.state();
        assert_eq!(tracker.pass(ORIGIN, ChunkType::Init, 0, 0xbad), TrackOutcome::IGNORED);
        assert_eq!(tracker.pass(REPLY, ChunkType::Abort, 0xbad, 0), TrackOutcome::IGNORED);
        assert_eq!(tracker.state(), before);
        tracker.restart([0x44, 0x33], RESTART);
        assert!(tracker.is_confirmed());
    }

    #[test]
    fn a_tag_that_the_other_side_did_not_choose_confirms_no_initiator() {
        let mut tracker = Tracker::new();
        tracker.pass(ORIGIN, ChunkType::Init, 0, TAGS[REPLY]);
        // With asymmetric routing, no more than this is ever seen.
        assert_eq!(tracker.pass(ORIGIN, ChunkType::Data, 5, 0), TrackOutcome::UNCHANGED);
        assert_eq!(tracker.pass(REPLY, ChunkType::InitAck, TAGS[REPLY], TAGS[ORIGIN]), TrackOutcome::UNCHANGED);
        assert_eq!(tracker.pass(ORIGIN, ChunkType::CookieEcho, 5, 0), TrackOutcome::IGNORED);
        assert!(!tracker.is_confirmed());
        assert_eq!(tracker.pass(ORIGIN, ChunkType::CookieEcho, TAGS[ORIGIN], 0), TrackOutcome::UNCHANGED);
        assert!(tracker.is_confirmed());
    }

    #[test]
    fn an_endpoint_without_association_refuses_it_or_reflects_the_received_tag() {
        let mut tracker = Tracker::new();
        tracker.pass(ORIGIN, ChunkType::Init, 0, TAGS[REPLY]);
        assert_eq!(
            tracker.pass(REPLY, ChunkType::Abort, TAGS[REPLY], 0),
            TrackOutcome::with_change(StateChange::Closing)
        );
        for (side, chunk) in
            [(ORIGIN, ChunkType::Abort), (REPLY, ChunkType::Abort), (REPLY, ChunkType::ShutdownComplete)]
        {
            let mut tracker = Tracker::open(TAGS);
            assert_eq!(
                tracker.pass(1 - side, ChunkType::ShutdownAck, TAGS[1 - side], 0),
                TrackOutcome::with_change(StateChange::Closing)
            );
            assert_eq!(tracker.pass(side, chunk, TAGS[1 - side], 0), TrackOutcome::with_change(StateChange::Closing));
            assert!(tracker.is_closed());
        }
    }

    #[test]
    fn a_chunk_behind_others_ends_the_association_under_the_same_tags() {
        const CLOSING: TrackOutcome = TrackOutcome { change: StateChange::Closing, ..TrackOutcome::UNCHANGED };
        for side in [ORIGIN, REPLY] {
            for first in [ChunkType::Sack, ChunkType::Error, ChunkType::CookieAck] {
                let mut tracker = Tracker::open(TAGS);
                let before = tracker.state();
                for closing in [ChunkType::Abort, ChunkType::ShutdownAck] {
                    for tag in [0, 0xbad] {
                        let outcome = tracker.pass_chunks(side, (first, Some(closing)), tag, 0);
                        assert_eq!((outcome, tracker.state()), (TrackOutcome::IGNORED, before));
                    }
                }
                let shutdown = (first, Some(ChunkType::ShutdownAck));
                assert_eq!(tracker.pass_chunks(side, shutdown, TAGS[1 - side], 0), TrackOutcome::IGNORED);
                assert_eq!(tracker.pass_chunks(side, shutdown, TAGS[side], 0), CLOSING);
                assert!(!tracker.is_closed(), "the other side may still send");
                assert_eq!(tracker.pass_chunks(side, (first, Some(ChunkType::Abort)), TAGS[side], 0), CLOSING);
                assert!(tracker.is_closed());
                // Reflected, with the T bit.
                let mut tracker = Tracker::open(TAGS);
                assert_eq!(tracker.pass_chunks(side, (first, Some(ChunkType::Abort)), TAGS[1 - side], 0), CLOSING);
                assert!(tracker.is_closed());
            }
        }
        // Its first tag isn't verified, so it neither ends an association nor is kept.
        let mut tracker = Tracker::new();
        let abort = (ChunkType::Sack, Some(ChunkType::Abort));
        assert_eq!(tracker.pass_chunks(ORIGIN, abort, 0xbad, 0), TrackOutcome::IGNORED);
        assert_eq!(tracker.pass(ORIGIN, ChunkType::Data, TAGS[ORIGIN], 0), TrackOutcome::UNCHANGED);
        // One packet completes a restart and ends it.
        let mut tracker = Tracker::open(TAGS);
        tracker.pass(ORIGIN, ChunkType::Init, 0, 0x33);
        tracker.pass(REPLY, ChunkType::InitAck, 0x33, 0x44);
        let refused = (ChunkType::CookieEcho, Some(ChunkType::Abort));
        assert_eq!(tracker.pass_chunks(ORIGIN, refused, 0x44, 0), CLOSING);
        assert!(tracker.is_closed());
        assert_eq!(tracker.tags(), [0x44, 0x33]);
    }

    #[test]
    fn a_closed_association_reopens_only_when_a_handshake_completes() {
        for same_tags in [false, true] {
            let mut tracker = Tracker::open(TAGS);
            for side in [REPLY, ORIGIN] {
                tracker.pass(side, ChunkType::ShutdownAck, TAGS[side], 0);
            }
            assert!(tracker.is_closed());
            let before = tracker.state();
            assert_eq!(
                tracker.pass(ORIGIN, ChunkType::CookieEcho, TAGS[ORIGIN], 0),
                TrackOutcome::UNCHANGED,
                "a late COOKIE ECHO"
            );
            assert_eq!(tracker.pass(REPLY, ChunkType::Init, 0, 0xbad), TrackOutcome::IGNORED);
            assert_eq!(
                tracker.pass(ORIGIN, ChunkType::Init, 0, 0xbee),
                TrackOutcome::UNCHANGED,
                "a new handshake may start"
            );
            assert_eq!(tracker.state(), before);
            let tags = if same_tags { TAGS } else { [0x44, 0x33] };
            tracker.restart(tags, [TrackOutcome::UNCHANGED, TrackOutcome::UNCHANGED, REOPENED]);
            assert!(tracker.is_confirmed() && !tracker.is_closed());
        }
    }
}
