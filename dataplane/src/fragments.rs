//! What one worker remembers of datagrams that come in fragments, so that they are translated without being put
//! together.
//!
//! Only the first fragment has ports. It leaves them here, and the others find them; those that overtake it wait for
//! it, within limits (RFC 6146 section 3.4, RFC 4787 REQ-14). Each datagram's time begins with the fragment of it that
//! came first and is never prolonged. Which bytes were seen is kept in mind, and a datagram whose fragments contradict
//! each other is dropped from there on (RFC 5722, RFC 1858, RFC 3128).
//!
//! A fragment's way: [`Piece::of_v4`] or [`Piece::of_v6`], then [`Fragments::first`] and [`Fragments::release`] until
//! that has no more, or [`Fragments::later`] and, if it is early, [`Fragments::reserve`]. What is reserved waits from then on, for
//! the packets behind it in its batch, too; [`Fragments::fill`] brings the frame when the batch is over. [`Fragments::sweep`] in
//! each turn hands out the frames that waited in vain.

pub mod piece;

#[cfg(test)]
mod model;
mod parking;
mod seen;
mod shares;
mod store;
#[cfg(test)]
mod tests;

use vipgate_mem::MemoryError;

use std::net::IpAddr;

use crate::address::{Address, V6};
use crate::io::Received;
use crate::session::tuple::{HashKey, Tuple};
use crate::time::Tick;
use crate::wire::{ipv4, ipv6};
use parking::Parking;
pub use parking::Waiting;
use piece::{Piece, Refusal};
use seen::Seen;
use shares::{Holder, Shares};
use store::{Datagram, KNOWN, POISONED, Slot, Store, WideKey};

/// Frames of one datagram that wait for its first fragment.
const MOST_PARKED_EACH: u8 = 16;
/// Datagrams whose time is over that make way for each new one, if the sweep hasn't got to them yet.
const MOST_ENDED_EACH: usize = 2;

/// What the fragments of one datagram have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// The identification.
    pub id: u32,
    /// The protocol for IPv4 (RFC 791 section 3.2); 0 for IPv6, where it isn't part of it (RFC 8200 section 4.5).
    pub protocol: u8,
}

impl Key<u32> {
    /// The key of an IPv4 fragment.
    #[inline]
    pub fn of_v4(header: &ipv4::Header) -> Self {
        let ipv4::Header { source, destination, protocol, identification, .. } = *header;
        Self { source, destination, id: identification.into(), protocol }
    }
}

impl Key<V6> {
    /// The key of an IPv6 fragment; `None` if it isn't one.
    #[inline]
    pub fn of_v6(header: &ipv6::Header) -> Option<Self> {
        let id = header.fragment_header?.identification;
        Some(Self { source: header.source, destination: header.destination, id, protocol: 0 })
    }
}

impl<A: Address> Key<A> {
    fn widened(&self) -> WideKey {
        let wide = |address: A| match address.to_ip() {
            IpAddr::V4(v4) => V6 { high: 0, low: v4.to_bits().into() },
            IpAddr::V6(v6) => V6::from_bits(v6.to_bits()),
        };
        let (source, destination) = (wide(self.source), wide(self.destination));
        WideKey { source, destination, id: self.id, protocol: self.protocol, bits: A::BITS, ..WideKey::default() }
    }
}

/// What only the first fragment says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ports {
    /// The transport protocol; later IPv6 fragments can't be trusted to have the right one.
    pub protocol: u8,
    /// Source port, as in a [`Tuple`].
    pub source: u16,
    /// Destination port, as in a [`Tuple`].
    pub destination: u16,
}

/// What all fragments of a datagram need once its first one has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// The ports of its first fragment, as it came.
    pub ports: Ports,
    /// The identification that its fragments leave with.
    pub translated_id: u32,
}

/// What is known about a fragment that isn't the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Later {
    /// It can go on like its first one.
    Known(Known),
    /// Its first one hasn't come yet: it is to be parked.
    Early,
}

/// The place of a fragment that waits for its first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(pub u32);

/// The fragmented datagrams of one worker, of both families.
#[derive(Debug)]
pub struct Fragments {
    store: Store,
    parking: Parking,
    datagram_shares: Shares,
    frame_shares: Shares,
    timeout_ms: u32,
    key: HashKey,
}

impl Fragments {
    /// Room for `datagrams` at a time, and for `parked` frames; a datagram is forgotten after `timeout_ms` (2 seconds
    /// or more: RFC 6146 section 4). Datagrams of which every byte was seen take no room from others.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn new(datagrams: u32, parked: u32, timeout_ms: u32, key: HashKey) -> Result<Self, MemoryError> {
        Ok(Self {
            store: Store::new(datagrams)?,
            parking: Parking::new(parked),
            datagram_shares: Shares::new(datagrams)?,
            frame_shares: Shares::new(parked)?,
            timeout_ms,
            key,
        })
    }

    /// Datagrams in memory.
    pub fn len(&self) -> u32 {
        self.store.len()
    }

    /// Whether no datagram is in memory.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Frames held, for audits: those that wait, and those that the sweep hasn't handed out yet.
    pub fn parked(&self) -> u32 {
        self.parking.held()
    }

    /// Notes a first fragment. What it returns is what the datagram's fragments leave with: for a repetition, what the
    /// first one of them said. The caller goes on with [`Fragments::release`].
    ///
    /// # Errors
    /// Says why the fragment must be dropped; after [`Refusal::Overlap`] and [`Refusal::Scattered`] the whole datagram
    /// is.
    pub fn first<A: Address>(
        &mut self,
        key: &Key<A>,
        piece: Piece,
        ports: Ports,
        translated_id: u32,
        now: Tick,
    ) -> Result<Known, Refusal> {
        if !piece.is_first() {
            return Err(Refusal::Malformed);
        }
        let slot = self.admit(&key.widened(), piece, now)?;
        let datagram = self.store.get_mut(slot);
        if !datagram.is(KNOWN) {
            datagram.set(KNOWN);
            datagram.protocol = ports.protocol;
            (datagram.source_port, datagram.destination_port) = (ports.source, ports.destination);
            datagram.translated_id = translated_id;
        }
        let known = known(datagram);
        if known.ports != ports {
            self.poison(slot);
            return Err(Refusal::Overlap);
        }
        self.finish_if_complete(slot);
        Ok(known)
    }

    /// Notes a fragment that isn't the first, and says what is known of its datagram.
    ///
    /// # Errors
    /// As [`Fragments::first`].
    pub fn later<A: Address>(&mut self, key: &Key<A>, piece: Piece, now: Tick) -> Result<Later, Refusal> {
        if piece.is_first() {
            return Err(Refusal::Malformed);
        }
        let slot = self.admit(&key.widened(), piece, now)?;
        self.finish_if_complete(slot);
        let datagram = self.store.get(slot);
        Ok(if datagram.is(KNOWN) { Later::Known(known(datagram)) } else { Later::Early })
    }

    /// Keeps a place for an early fragment until its first one comes: [`Fragments::later`] has just said that it is early. It is
    /// packet `packet` of the batch in hand. Unless the first one comes in the same batch, the caller fills the place before the
    /// next one. `None` when there is no room for it; its datagram, which can't be completed any more, is then dropped.
    pub fn reserve<A: Address>(&mut self, key: &Key<A>, packet: u8) -> Option<Place> {
        let key = key.widened();
        let slot = self.store.find(self.hash(&key), &key)?;
        let datagram = self.store.get_mut(slot);
        if datagram.is(KNOWN) || datagram.is(POISONED) {
            return None;
        }
        if datagram.parked_count == MOST_PARKED_EACH || !self.frame_shares.take(datagram.holder) {
            self.poison(slot);
            return None;
        }
        datagram.parked_count += 1;
        let place = self.parking.reserve(&mut datagram.parked, packet);
        if place.is_none() {
            datagram.parked_count -= 1;
            self.frame_shares.give(datagram.holder, 1);
            self.poison(slot);
        }
        place.map(Place)
    }

    /// Brings the frame for which a place was kept. Its datagram may have ended meanwhile: then it waits for the sweep.
    pub fn fill(&mut self, Place(number): Place, received: Received) {
        self.parking.fill(number, received);
    }

    /// The next one that has waited for the first fragment of this datagram, in the order of arrival. To be called
    /// after [`Fragments::first`] until there is none.
    pub fn release<A: Address>(&mut self, key: &Key<A>) -> Option<Waiting> {
        let key = key.widened();
        let slot = self.store.find(self.hash(&key), &key)?;
        let datagram = self.store.get_mut(slot);
        if !datagram.is(KNOWN) {
            return None;
        }
        let waiting = self.parking.pop(&mut datagram.parked)?;
        datagram.parked_count -= 1;
        self.frame_shares.give(datagram.holder, 1);
        self.finish_if_complete(slot);
        Some(waiting)
    }

    /// Forgets datagrams whose time is over, and hands out the frames that have waited in vain; of both together at
    /// most `budget`. A datagram of which every byte was seen may stay for up to twice its time.
    pub fn sweep(&mut self, now: Tick, budget: usize, mut expired: impl FnMut(Received)) {
        for _ in 0..budget {
            if let Some(received) = self.parking.pop_lost() {
                expired(received);
            } else if !self.end_one(now) {
                break;
            }
        }
    }

    #[inline]
    fn hash(&self, key: &WideKey) -> u32 {
        let (source_port, destination_port) = ((key.id >> 16) as u16, key.id as u16);
        let WideKey { source, destination, protocol, .. } = *key;
        (self.key.hash(&Tuple { source, destination, source_port, destination_port, protocol }) >> 32) as u32
    }

    fn holder(&self, key: &WideKey) -> Holder {
        let network = if key.bits == u32::BITS as u8 {
            V6 { high: 0, low: key.source.low & !0xff }
        } else {
            V6 { high: key.source.high, low: 0 }
        };
        Holder::new(key.source, network, &self.key)
    }

    /// The datagram of a piece, in which the piece is noted.
    fn admit(&mut self, key: &WideKey, piece: Piece, now: Tick) -> Result<Slot, Refusal> {
        let hash = self.hash(key);
        let Some(slot) = self.store.find(hash, key) else { return self.open(hash, key, piece, now) };
        let datagram = self.store.get_mut(slot);
        if datagram.is_over(now) || begins_anew(datagram, piece) {
            self.forget(slot);
            return self.open(hash, key, piece, now);
        }
        if datagram.is(POISONED) {
            return Err(Refusal::Poisoned);
        }
        match datagram.seen.note(piece) {
            Ok(()) => Ok(slot),
            Err(refusal) => {
                if refusal != Refusal::Repeated {
                    self.poison(slot);
                }
                Err(refusal)
            }
        }
    }

    /// A datagram of which nothing was seen before this piece.
    fn open(&mut self, hash: u32, key: &WideKey, piece: Piece, now: Tick) -> Result<Slot, Refusal> {
        let mut seen = Seen::default();
        seen.note(piece)?;
        for _ in 0..MOST_ENDED_EACH {
            self.end_one(now);
        }
        let holder = self.holder(key);
        if !self.datagram_shares.take(holder) {
            return Err(Refusal::TooMany);
        }
        if self.store.is_full()
            && let Some(finished) = self.store.oldest_finished()
        {
            self.forget(finished);
        }
        let opened = self.store.insert(hash, Datagram::new(*key, holder, seen, now.plus(self.timeout_ms)));
        if opened.is_none() {
            self.datagram_shares.give(holder, 1);
        }
        opened.ok_or(Refusal::TooMany)
    }

    /// Forgets a datagram whose time is over; false if there is none.
    fn end_one(&mut self, now: Tick) -> bool {
        let oldest = [self.store.oldest_unfinished(), self.store.oldest_finished()];
        let over = oldest.into_iter().flatten().find(|&slot| self.store.get(slot).is_over(now));
        if let Some(slot) = over {
            self.forget(slot);
        }
        over.is_some()
    }

    fn forget(&mut self, slot: Slot) {
        self.lose_parked(slot);
        let datagram = self.store.get(slot);
        if !datagram.is_finished() {
            self.datagram_shares.give(datagram.holder, 1);
        }
        self.store.remove(slot);
    }

    /// Ends a datagram but keeps it in mind, so that the rest of it is dropped.
    fn poison(&mut self, slot: Slot) {
        self.store.get_mut(slot).set(POISONED);
        self.lose_parked(slot);
    }

    fn lose_parked(&mut self, slot: Slot) {
        let datagram = self.store.get_mut(slot);
        self.frame_shares.give(datagram.holder, datagram.parked_count.into());
        datagram.parked_count = 0;
        self.parking.lose(std::mem::take(&mut datagram.parked));
    }

    /// A datagram of which all has been seen, and nothing waits, isn't counted against its source any more, and makes
    /// way when there is no room.
    fn finish_if_complete(&mut self, slot: Slot) {
        let datagram = self.store.get(slot);
        let waits = datagram.is_finished() || datagram.parked_count != 0;
        if datagram.is(KNOWN) && datagram.seen.is_complete() && !waits {
            self.datagram_shares.give(datagram.holder, 1);
            self.store.finish(slot);
        }
    }
}

/// Whether a piece must belong to another datagram than the finished one with its key. Fast senders use an
/// identification again within the timeout (RFC 4963), and what is complete is out of reach of any contradiction.
fn begins_anew(datagram: &Datagram, piece: Piece) -> bool {
    let fits = |mut seen: Seen| matches!(seen.note(piece), Ok(()) | Err(Refusal::Repeated));
    datagram.is_finished() && (piece.is_first() || !fits(datagram.seen))
}

fn known(datagram: &Datagram) -> Known {
    let (source, destination) = (datagram.source_port, datagram.destination_port);
    let ports = Ports { protocol: datagram.protocol, source, destination };
    Known { ports, translated_id: datagram.translated_id }
}
