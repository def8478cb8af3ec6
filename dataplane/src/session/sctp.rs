//! SCTP association state (RFC 9260): the same flags as TCP's, set by other words. What opens is INIT and its answer, what
//! closes is SHUTDOWN ACK and SHUTDOWN COMPLETE, what resets is ABORT.
//!
//! All packets of a direction carry the verification tag that the other side chose in its INIT or INIT ACK (section 8.5), 32 bits that
//! only they know. Anybody can send an INIT, and who refuses it answers with the tag that it brings and keeps an open association (section
//! 5.2.2). So the tags of a handshake are pending until COOKIE ECHO or COOKIE ACK uses one: its sender has received it, so it is confirmed,
//! and the association is open with the new tags (section 5.2.4). Until then a handshake of an open association has no effect.
//!
//! Of an association whose handshake didn't pass here, each direction's first tag counts, and confirms nobody.

use super::entry::Slot;
use super::flags::{Flags, Tracking};
use super::table::Table;
use super::tcp::is_closed;
use super::track::{Event, Noted, Track};
use crate::address::Address;
use crate::wire::sctp::{Chunk, Common};

/// Notes a packet of the direction in `slot`.
pub fn note<A: Address>(table: &mut Table<A>, slot: Slot, packet: &Common) -> Noted {
    let twin_slot = table.entry(slot).twin();
    let (mut own, mut twin) = (table.entry(slot).track(), table.entry(twin_slot).track());
    let noted = follow(&mut own, &mut twin, packet);
    table.entry_mut(slot).set_track(own);
    table.entry_mut(twin_slot).set_track(twin);
    noted
}

/// What a packet of `own` does to both directions. `sequence` is the tag of a direction's packets, `acknowledged` the one that is pending;
/// 0 is no tag (section 3.3.2).
///
/// Where the other direction has SYN, its side chose the tag in `sequence`; elsewhere that is only the one that came first.
fn follow(own: &mut Track, twin: &mut Track, packet: &Common) -> Noted {
    own.flags = own.flags.with(Flags::SEEN);
    let tag = packet.verification_tag;
    match packet.first_chunk {
        Chunk::Init => return begin(own, twin, packet),
        _ if tag == 0 => return Noted::IGNORED,
        Chunk::InitAck => return answer(own, twin, packet),
        Chunk::CookieEcho | Chunk::CookieAck if ends_handshake(own, twin, tag) => return adopt(own, twin),
        // Whoever has no association sends back the tag of what it received, and sets the T bit (section 8.4). That isn't read: a guess
        // is right for two of 2^32 tags with it or without it.
        Chunk::Abort | Chunk::ShutdownComplete if tag == twin.sequence => {}
        Chunk::Abort if refuses(own, twin, tag) => {}
        _ if tag == own.sequence => agree(own, twin),
        chunk if is_first_tag(own, twin, chunk) => own.sequence = tag,
        _ => return Noted::IGNORED,
    }
    let ends = match packet.first_chunk {
        Chunk::Abort => Flags::RST,
        Chunk::ShutdownAck | Chunk::ShutdownComplete => Flags::FIN,
        _ => return Noted::NOTHING,
    };
    if own.flags.has(ends) {
        return Noted::NOTHING;
    }
    own.flags = own.flags.with(ends);
    Noted::event(Event::Closing)
}

/// Notes an INIT: the tag that it brings is pending.
fn begin(own: &mut Track, twin: &mut Track, packet: &Common) -> Noted {
    if packet.initiate_tag == 0 {
        return Noted::IGNORED;
    }
    twin.acknowledged = packet.initiate_tag;
    let is_first = own.sequence == 0 && twin.sequence == 0 && !own.flags.has(Flags::SYN);
    if is_first {
        own.flags = own.flags.with(Flags::SYN);
    }
    if is_first || opens(own, twin) { Noted::NOTHING } else { Noted::IGNORED }
}

/// Notes an INIT ACK: it has the tag that an INIT brought, and the one that it brings is pending.
fn answer(own: &mut Track, twin: &mut Track, packet: &Common) -> Noted {
    let (tag, brought) = (packet.verification_tag, packet.initiate_tag);
    if tag != own.acknowledged || brought == 0 {
        return Noted::IGNORED;
    }
    twin.acknowledged = brought;
    // Of the first handshake, both tags stand from its answer on: what somebody else begins meanwhile displaces pending ones only. Where
    // both sides begin at once (section 5.2.1), each one's answer gives the other one's tag.
    let (has_begun, has_answered) = (twin.flags.has(Flags::SYN), own.flags.has(Flags::SYN));
    let is_first = has_begun && (!has_answered || twin.sequence == 0);
    if is_first {
        twin.sequence = brought;
    }
    if has_begun && !has_answered {
        own.sequence = tag;
        own.flags = own.flags.with(Flags::SYN);
    }
    if is_first || opens(twin, own) { Noted::NOTHING } else { Noted::IGNORED }
}

/// Whether a handshake that `own` begins is the one that opens the association, first or after it has closed.
fn opens(own: &Track, twin: &Track) -> bool {
    own.flags.has(Flags::ORIGIN.with(Flags::SYN)) && (own.is_unconfirmed() || is_closed(own.flags, twin.flags))
}

/// Whether this tag of a COOKIE ECHO or COOKIE ACK is of a handshake that changes something: its tags, or that it was closed.
fn ends_handshake(own: &Track, twin: &Track, tag: u32) -> bool {
    tag == own.acknowledged && (tag != own.sequence || is_closed(own.flags, twin.flags))
}

/// Whether this tag of an ABORT is that of the INIT that would have opened the association.
fn refuses(own: &Track, twin: &Track, tag: u32) -> bool {
    let is_answered = own.sequence != 0 || own.flags.has(Flags::SYN);
    !is_answered && twin.flags.has(Flags::SYN) && tag == own.acknowledged
}

/// Whether the tag of a packet is the first one of its direction, and nothing says what it should be. Those that end an association may
/// have the other direction's, and prove nothing.
fn is_first_tag(own: &Track, twin: &Track, chunk: Chunk) -> bool {
    let ends = matches!(chunk, Chunk::Abort | Chunk::ShutdownAck | Chunk::ShutdownComplete);
    own.sequence == 0 && !twin.flags.has(Flags::SYN) && !ends
}

/// A handshake has ended: the association is open, whatever it was before. Other gateways have its old tags.
fn adopt(own: &mut Track, twin: &mut Track) -> Noted {
    let was_known = own.sequence != 0;
    own.sequence = own.acknowledged;
    twin.flags = twin.flags.with(Flags::SYN);
    if twin.acknowledged != 0 {
        twin.sequence = twin.acknowledged;
        own.flags = own.flags.with(Flags::SYN);
    }
    let ended = Flags::FIN.with(Flags::RST);
    (own.flags, twin.flags) = (own.flags.without(ended), twin.flags.without(ended));
    agree(own, twin);
    if was_known { Noted::event(Event::Reopened) } else { Noted::NOTHING }
}

/// `own` uses the tag in `sequence`. If the other side chose it, its sender has received it.
fn agree(own: &mut Track, twin: &mut Track) {
    if !twin.flags.has(Flags::SYN) {
        return;
    }
    if twin.sequence == 0 {
        twin.sequence = twin.acknowledged;
    }
    // A COOKIE ECHO that comes late must not open again what has closed since.
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

    use super::*;
    use crate::tally::property;

    const ORIGIN: usize = 0;
    const REPLY: usize = 1;
    /// The tags of packets of both directions, of most associations here.
    const TAGS: [u32; 2] = [0x22, 0x11];

    const REOPENED: Noted = Noted { event: Event::Reopened, ..Noted::NOTHING };
    /// A handshake of an open association, up to its COOKIE ECHO.
    const RESTART: [Noted; 3] = [Noted::IGNORED, Noted::IGNORED, REOPENED];

    /// What the gateway knows of both directions: of whoever sent the first packet, and of the other side.
    #[derive(Clone, Copy)]
    struct Known([Track; 2]);

    impl Known {
        fn new() -> Self {
            Self([Track { flags: Flags::ORIGIN, ..Track::default() }, Track::default()])
        }

        /// The first handshake has passed.
        fn open(tags: [u32; 2]) -> Self {
            let mut known = Self::new();
            known.restart(tags, [Noted::NOTHING; 3]);
            assert!(known.is_confirmed() && !known.is_closed());
            known
        }

        /// A handshake that the origin begins, after which packets have these tags.
        fn restart(&mut self, tags: [u32; 2], expected: [Noted; 3]) {
            let noted = [
                self.pass(ORIGIN, Chunk::Init, 0, tags[REPLY]),
                self.pass(REPLY, Chunk::InitAck, tags[REPLY], tags[ORIGIN]),
                self.pass(ORIGIN, Chunk::CookieEcho, tags[ORIGIN], 0),
            ];
            assert_eq!(noted, expected);
            assert_eq!(self.pass(REPLY, Chunk::CookieAck, tags[REPLY], 0), Noted::NOTHING);
            assert_eq!(self.tags(), tags);
        }

        /// A packet with this tag; one of a handshake brings another one.
        fn pass(&mut self, side: usize, chunk: Chunk, tag: u32, brought: u32) -> Noted {
            let [origin, reply] = &mut self.0;
            let (own, twin) = if side == ORIGIN { (origin, reply) } else { (reply, origin) };
            let packet =
                Common { verification_tag: tag, first_chunk: chunk, initiate_tag: brought, ..Common::default() };
            follow(own, twin, &packet)
        }

        fn tags(&self) -> [u32; 2] {
            self.0.map(|track| track.sequence)
        }

        /// What only those who belong to the association may change.
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
            let mut known = Known::open(TAGS);
            let before = known.state();
            for tag in [0xbad, 0xbee] {
                assert_eq!(known.pass(forger, Chunk::Init, 0, tag), Noted::IGNORED);
                assert_eq!(known.pass(1 - forger, Chunk::Abort, tag, 0), Noted::IGNORED);
                assert_eq!(known.pass(1 - forger, Chunk::Data, tag, 0), Noted::IGNORED);
            }
            assert_eq!(known.state(), before);
        }
        // Nor one that is about to open.
        let mut known = Known::new();
        known.pass(ORIGIN, Chunk::Init, 0, TAGS[REPLY]);
        known.pass(REPLY, Chunk::Init, 0, 0xbad);
        assert_eq!(known.pass(ORIGIN, Chunk::Abort, 0xbad, 0), Noted::IGNORED);
        known.pass(REPLY, Chunk::InitAck, TAGS[REPLY], TAGS[ORIGIN]);
        known.pass(REPLY, Chunk::Init, 0, 0xbee);
        assert_eq!(known.pass(ORIGIN, Chunk::CookieEcho, TAGS[ORIGIN], 0), Noted::NOTHING);
        assert!(known.is_confirmed() && !known.is_closed());
        assert_eq!(known.tags(), TAGS);
    }

    /// Of the side that begins: the chunk, its tag, whether that is the one that it has brought itself, the tag that it brings; of the
    /// other one: whether it refuses an INIT, and the tag that it brings otherwise.
    fn forgery() -> impl Strategy<Value = (Chunk, u32, bool, u32, bool, u32)> {
        let chunks = vec![
            Chunk::Init,
            Chunk::Init,
            Chunk::Init,
            Chunk::InitAck,
            Chunk::CookieEcho,
            Chunk::CookieAck,
            Chunk::Data,
            Chunk::Abort,
            Chunk::ShutdownAck,
            Chunk::ShutdownComplete,
            Chunk::Other,
        ];
        (prop::sample::select(chunks), any::<u32>(), any::<bool>(), 1_u32.., any::<bool>(), 1_u32..)
    }

    #[test]
    fn nobody_who_guesses_tags_moves_an_association_and_its_sides_restart_and_end_it() {
        let input = (
            [1..u32::MAX, 1..u32::MAX],
            ORIGIN..=REPLY,
            prop::collection::vec(forgery(), 1..40),
            any::<bool>(),
            ORIGIN..=REPLY,
        );
        let classes = ["refused", "answered", "with a tag of its own", "restarted"];
        property(ProptestConfig::with_cases(400), &input, &classes, |input, tally| {
            let (mut tags, forger, forgeries, restarts, aborts) = input;
            let mut known = Known::open(tags);
            let before = known.state();
            let mut own_tag = 0;
            for (chunk, any_tag, is_own, brought, refuses, answer) in forgeries {
                let tag = match chunk {
                    Chunk::Init => 0,
                    _ if is_own => own_tag,
                    _ => any_tag,
                };
                let (own, other) = (known.0[forger], known.0[1 - forger]);
                let right = [own.sequence, own.acknowledged, other.sequence];
                if right.contains(&tag) && tag != 0 || right.contains(&brought) {
                    tally.count("lucky");
                    continue;
                }
                prop_assert_eq!(known.pass(forger, chunk, tag, brought), Noted::IGNORED);
                prop_assert_eq!(known.state(), before);
                if chunk != Chunk::Init {
                    tally.add("with a tag of its own", u64::from(is_own && tag != 0));
                    continue;
                }
                own_tag = brought;
                let reply = if refuses { Chunk::Abort } else { Chunk::InitAck };
                tally.count(if refuses { "refused" } else { "answered" });
                prop_assert_eq!(known.pass(1 - forger, reply, brought, answer), Noted::IGNORED);
                prop_assert_eq!(known.state(), before);
            }
            if restarts {
                tags = tags.map(|tag| tag.rotate_left(1) | 1);
                known.restart(tags, RESTART);
                tally.count("restarted");
            }
            for side in [ORIGIN, REPLY] {
                prop_assert_eq!(known.pass(side, Chunk::Data, tags[side], 0), Noted::NOTHING);
            }
            prop_assert_eq!(known.pass(aborts, Chunk::Abort, tags[aborts], 0), Noted::event(Event::Closing));
            prop_assert!(known.is_closed());
            Ok(())
        });
    }

    #[test]
    fn an_association_that_restarts_has_new_tags_only_and_others_must_know() {
        let mut known = Known::open(TAGS);
        known.restart([0x44, 0x33], RESTART);
        assert!(known.is_confirmed());
        for (side, tag) in TAGS.into_iter().enumerate() {
            assert_eq!(known.pass(side, Chunk::Data, tag, 0), Noted::IGNORED, "the old ones");
        }
        // The other side may begin, too.
        assert_eq!(known.pass(REPLY, Chunk::Init, 0, 0x66), Noted::IGNORED);
        assert_eq!(known.pass(ORIGIN, Chunk::InitAck, 0x66, 0x55), Noted::IGNORED);
        assert_eq!(known.pass(REPLY, Chunk::CookieEcho, 0x55, 0), REOPENED);
        assert_eq!(known.pass(ORIGIN, Chunk::CookieAck, 0x66, 0), Noted::NOTHING);
        assert_eq!(known.tags(), [0x66, 0x55]);
    }

    #[test]
    fn both_sides_that_begin_at_once_are_known_and_the_origin_is_confirmed() {
        let handshake = [
            (REPLY, Chunk::Init, 0, TAGS[ORIGIN]),
            (ORIGIN, Chunk::InitAck, TAGS[ORIGIN], TAGS[REPLY]),
            (REPLY, Chunk::InitAck, TAGS[REPLY], TAGS[ORIGIN]),
        ];
        // Either side's answer may be lost before the gateway, and either side's cookie may come first.
        for lost in [None, Some(1), Some(2)] {
            for first in [ORIGIN, REPLY] {
                let mut known = Known::new();
                known.pass(ORIGIN, Chunk::Init, 0, TAGS[REPLY]);
                for (n, (side, chunk, tag, brought)) in handshake.into_iter().enumerate() {
                    if lost != Some(n) {
                        assert_eq!(known.pass(side, chunk, tag, brought), Noted::NOTHING);
                    }
                }
                assert!(!known.is_confirmed());
                for (side, chunk) in [(first, Chunk::CookieEcho), (1 - first, Chunk::CookieAck)] {
                    assert_eq!(known.pass(side, chunk, TAGS[side], 0), Noted::NOTHING, "{lost:?} {first}");
                }
                assert!(known.is_confirmed() && !known.is_closed(), "{lost:?} {first}");
                assert_eq!(known.tags(), TAGS);
            }
        }
    }

    #[test]
    fn an_association_that_was_open_before_is_known_by_its_first_tags() {
        let mut known = Known::new();
        for chunk in [Chunk::Abort, Chunk::ShutdownComplete, Chunk::InitAck] {
            assert_eq!(known.pass(ORIGIN, chunk, 0xbad, 0x77), Noted::IGNORED, "these teach nothing");
        }
        for side in [ORIGIN, REPLY, ORIGIN] {
            assert_eq!(known.pass(side, Chunk::Data, TAGS[side], 0), Noted::NOTHING);
            assert_eq!(known.pass(side, Chunk::Data, 0xbad, 0), Noted::IGNORED);
        }
        assert_eq!(known.pass(ORIGIN, Chunk::CookieEcho, TAGS[ORIGIN], 0), Noted::NOTHING);
        assert!(!known.is_confirmed(), "nobody has seen what its sender was told");
        let before = known.state();
        assert_eq!(known.pass(ORIGIN, Chunk::Init, 0, 0xbad), Noted::IGNORED);
        assert_eq!(known.pass(REPLY, Chunk::Abort, 0xbad, 0), Noted::IGNORED);
        assert_eq!(known.state(), before);
        known.restart([0x44, 0x33], RESTART);
        assert!(known.is_confirmed());
    }

    #[test]
    fn a_tag_that_the_other_side_did_not_choose_confirms_nobody() {
        let mut known = Known::new();
        known.pass(ORIGIN, Chunk::Init, 0, TAGS[REPLY]);
        // Where answers don't pass here, that is all that is ever known.
        assert_eq!(known.pass(ORIGIN, Chunk::Data, 5, 0), Noted::NOTHING);
        assert_eq!(known.pass(REPLY, Chunk::InitAck, TAGS[REPLY], TAGS[ORIGIN]), Noted::NOTHING);
        assert_eq!(known.pass(ORIGIN, Chunk::CookieEcho, 5, 0), Noted::IGNORED);
        assert!(!known.is_confirmed());
        assert_eq!(known.pass(ORIGIN, Chunk::CookieEcho, TAGS[ORIGIN], 0), Noted::NOTHING);
        assert!(known.is_confirmed());
    }

    #[test]
    fn who_has_no_association_refuses_it_or_sends_back_the_tag_that_it_received() {
        let mut known = Known::new();
        known.pass(ORIGIN, Chunk::Init, 0, TAGS[REPLY]);
        assert_eq!(known.pass(REPLY, Chunk::Abort, TAGS[REPLY], 0), Noted::event(Event::Closing));
        for (side, chunk) in [(ORIGIN, Chunk::Abort), (REPLY, Chunk::Abort), (REPLY, Chunk::ShutdownComplete)] {
            let mut known = Known::open(TAGS);
            assert_eq!(known.pass(1 - side, Chunk::ShutdownAck, TAGS[1 - side], 0), Noted::event(Event::Closing));
            assert_eq!(known.pass(side, chunk, TAGS[1 - side], 0), Noted::event(Event::Closing));
            assert!(known.is_closed());
        }
    }

    #[test]
    fn what_has_closed_opens_anew_when_a_handshake_ends_and_not_before() {
        for same_tags in [false, true] {
            let mut known = Known::open(TAGS);
            for side in [REPLY, ORIGIN] {
                known.pass(side, Chunk::ShutdownAck, TAGS[side], 0);
            }
            assert!(known.is_closed());
            let before = known.state();
            assert_eq!(known.pass(ORIGIN, Chunk::CookieEcho, TAGS[ORIGIN], 0), Noted::NOTHING, "a late one");
            assert_eq!(known.pass(REPLY, Chunk::Init, 0, 0xbad), Noted::IGNORED);
            assert_eq!(known.pass(ORIGIN, Chunk::Init, 0, 0xbee), Noted::NOTHING, "it may begin again");
            assert_eq!(known.state(), before);
            let tags = if same_tags { TAGS } else { [0x44, 0x33] };
            known.restart(tags, [Noted::NOTHING, Noted::NOTHING, REOPENED]);
            assert!(known.is_confirmed() && !known.is_closed());
        }
    }
}
