//! SCTP association state (RFC 9260): the same flags as TCP's, set by other words. What opens is INIT and its answer, what
//! closes is SHUTDOWN ACK and SHUTDOWN COMPLETE, what resets is ABORT.

use super::entry::{Flags, Slot};
use super::table::Table;
use super::tcp::Event;
use crate::address::Address;
use crate::wire::sctp::{Chunk, Common};

/// Notes a packet in its own direction; only those that open or close look at the other one.
#[inline]
pub fn note<A: Address>(table: &mut Table<A>, slot: Slot, packet: &Common) -> Event {
    match packet.first_chunk {
        Chunk::Init | Chunk::InitAck | Chunk::Abort | Chunk::ShutdownAck | Chunk::ShutdownComplete => {
            note_rare(table, slot, packet)
        }
        _ => {
            // All packets of a direction carry the tag that the other side chose (RFC 9260 section 8.5).
            let entry = table.entry_mut(slot);
            entry.advance(packet.verification_tag, None, true);
            Event::None
        }
    }
}

#[cold]
fn note_rare<A: Address>(table: &mut Table<A>, slot: Slot, packet: &Common) -> Event {
    let twin_slot = table.entry(slot).twin();
    let twin_flags = table.entry(twin_slot).flags();
    let own = table.entry_mut(slot);
    let flags = own.flags();
    let closed = Flags::FIN.with(Flags::RST);
    match packet.first_chunk {
        Chunk::Init if flags.has(Flags::ORIGIN) && super::tcp::is_closed(flags, twin_flags) => {
            own.set_flags(flags.without(closed).with(Flags::SYN));
            own.advance(0, None, true);
            let unanswered = twin_flags.without(closed).without(Flags::SYN).without(Flags::SEEN);
            table.entry_mut(twin_slot).set_flags(unanswered);
            Event::Reopened
        }
        Chunk::Init => {
            own.set_flags(flags.with(Flags::SYN));
            Event::None
        }
        Chunk::InitAck => {
            own.set_flags(flags.with(Flags::SYN));
            own.advance(packet.verification_tag, None, true);
            Event::None
        }
        // Who can't see the association doesn't know its tag, of 32 bits (RFC 9260 section 8.5.1).
        Chunk::Abort if flags.has(Flags::RST) || (own.sequence() != 0 && own.sequence() != packet.verification_tag) => {
            Event::None
        }
        Chunk::Abort => {
            own.set_flags(flags.with(Flags::RST));
            Event::Closing
        }
        _ if flags.has(Flags::FIN) || own.sequence() != packet.verification_tag => Event::None,
        _ => {
            own.set_flags(flags.with(Flags::FIN));
            Event::Closing
        }
    }
}
