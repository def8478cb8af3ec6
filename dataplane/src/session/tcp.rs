//! TCP connection state (RFC 6146 section 3.5.2, RFC 7857 section 2): what a segment does to the direction that it is
//! of, and what both directions together amount to.

use super::entry::{Entry, Flags, Slot};
use super::table::Table;
use crate::address::Address;
use crate::wire::tcp::{Flags as TcpFlags, Segment};

/// What a segment did that both directions must know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing.
    None,
    /// It says FIN for the first time, or resets the connection: the timeout may be shorter now.
    Closing,
    /// It opens the connection anew after it had closed.
    Reopened,
}

/// Notes a segment in its own direction; only SYN, FIN and RST look at the other one.
#[inline]
pub fn note<A: Address>(table: &mut Table<A>, slot: Slot, segment: &Segment) -> Event {
    let event = if segment.flags.is_rare() { note_rare(table, slot, segment) } else { Event::None };
    if !segment.flags.has(TcpFlags::RST) {
        let ack = segment.flags.has(TcpFlags::ACK).then_some(segment.acknowledgement);
        let end = segment.sequence.wrapping_add(segment.space);
        table.entry_mut(slot).advance(end, ack, segment.flags.has(TcpFlags::SYN));
    }
    event
}

#[cold]
fn note_rare<A: Address>(table: &mut Table<A>, slot: Slot, segment: &Segment) -> Event {
    let twin_slot = table.entry(slot).twin();
    let twin = *table.entry(twin_slot);
    let own = table.entry_mut(slot);
    let flags = own.flags();
    if segment.flags.has(TcpFlags::RST) {
        if !is_exact(own, &twin, segment) || flags.has(Flags::RST) {
            return Event::None;
        }
        own.set_flags(flags.with(Flags::RST));
        return Event::Closing;
    }
    if segment.flags.opens() && flags.has(Flags::ORIGIN) && is_closed(flags, twin.flags()) {
        own.set_flags(flags.without(Flags::FIN).without(Flags::RST).with(Flags::SYN));
        own.forget_acknowledged();
        let unanswered = twin.flags().without(Flags::SYN).without(Flags::FIN).without(Flags::RST).without(Flags::SEEN);
        table.entry_mut(twin_slot).set_flags(unanswered);
        return Event::Reopened;
    }
    if segment.flags.has(TcpFlags::SYN) {
        own.set_flags(flags.with(Flags::SYN));
    }
    if segment.flags.has(TcpFlags::FIN) && !flags.has(Flags::FIN) {
        own.set_flags(own.flags().with(Flags::FIN));
        return Event::Closing;
    }
    Event::None
}

/// Whether a reset stands exactly where the receiver, or the sender's own last byte, says it must (RFC 5961 section 3.2):
/// nobody who doesn't see the connection can hit that.
fn is_exact<A: Address>(own: &Entry<A>, twin: &Entry<A>, segment: &Segment) -> bool {
    if !own.flags().has(Flags::SYN) {
        // The answer to a SYN, from nothing that listens (RFC 9293 section 3.10.7.1).
        return segment.flags.has(TcpFlags::ACK) && segment.acknowledgement == twin.sequence();
    }
    segment.sequence == own.sequence() || (twin.flags().has(Flags::SYN) && segment.sequence == twin.acknowledged())
}

/// Whether the connection of these two directions is over.
pub fn is_closed(one: Flags, other: Flags) -> bool {
    one.has(Flags::RST) || other.has(Flags::RST) || (one.has(Flags::FIN) && other.has(Flags::FIN))
}
