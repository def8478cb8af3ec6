//! SCTP association state (RFC 9260): the same flags as TCP's, set by other words. What opens is INIT and its answer, what
//! closes is SHUTDOWN ACK and SHUTDOWN COMPLETE, what resets is ABORT.
//!
//! All packets of a direction carry the verification tag that the other side chose in its INIT or INIT ACK (section 8.5), 32 bits that
//! only they know. A handshake, of an open association too (section 5.2), has tags of its own; they count as soon as whoever began it
//! uses its new one, with COOKIE ECHO: that is what confirms it.

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

/// What a packet of `own` does to both directions. `sequence` is the tag of a direction's packets, `acknowledged` that of a handshake
/// which hasn't ended; 0 is no tag (section 3.3.2).
fn follow(own: &mut Track, twin: &mut Track, packet: &Common) -> Noted {
    own.flags = own.flags.with(Flags::SEEN);
    let tag = packet.verification_tag;
    match packet.first_chunk {
        Chunk::Init => return begin(own, twin, packet),
        Chunk::InitAck if tag == 0 || tag != own.acknowledged => return Noted::IGNORED,
        Chunk::InitAck => {
            own.flags = own.flags.with(Flags::SYN);
            twin.acknowledged = packet.initiate_tag;
            if own.sequence == 0 {
                own.sequence = tag;
            }
            return Noted::NOTHING;
        }
        // The answer to INIT, or one that returns the tag that it was sent with (section 8.5.1).
        Chunk::Abort if tag != 0 && (tag == twin.sequence || (own.sequence == 0 && tag == own.acknowledged)) => {}
        _ if tag != 0 && tag == own.sequence => {}
        _ if tag != 0 && tag == own.acknowledged => adopt(own, twin),
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

/// Notes an INIT, which anybody may say.
fn begin(own: &mut Track, twin: &mut Track, packet: &Common) -> Noted {
    let reopens = own.flags.has(Flags::ORIGIN) && is_closed(own.flags, twin.flags);
    if reopens {
        let closed = Flags::FIN.with(Flags::RST);
        own.flags = own.flags.without(closed);
        twin.flags = twin.flags.without(closed).without(Flags::SYN).without(Flags::SEEN);
        own.tracking = own.tracking.without(Tracking::CONFIRMED);
        (own.sequence, own.acknowledged, twin.sequence) = (0, 0, 0);
    }
    twin.acknowledged = packet.initiate_tag;
    if !reopens && (own.sequence != 0 || twin.sequence != 0) {
        return Noted::IGNORED;
    }
    own.flags = own.flags.with(Flags::SYN);
    if reopens { Noted::event(Event::Reopened) } else { Noted::NOTHING }
}

/// The tags of a handshake count from now on: whoever uses this one has received it.
fn adopt(own: &mut Track, twin: &mut Track) {
    own.sequence = own.acknowledged;
    if twin.acknowledged != 0 {
        twin.sequence = twin.acknowledged;
    }
    if own.flags.has(Flags::ORIGIN) {
        own.tracking = own.tracking.with(Tracking::CONFIRMED);
    }
}
