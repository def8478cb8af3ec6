//! Virtual reassembly: translates the fragments of a datagram without reassembling it. One worker's state.
//!
//! Only the first fragment has ports. They are recorded here for the later fragments; fragments that arrive before the
//! first one are buffered, within limits (RFC 6146 section 3.4, RFC 4787 REQ-14). A datagram's timeout starts with the
//! fragment that arrives first and is never extended. The received byte ranges are recorded, and after contradicting
//! fragments the rest of the datagram is dropped (RFC 5722, RFC 1858, RFC 3128).
//!
//! Call sequence: [`Fragment::of_v4`] or [`Fragment::of_v6`]; then, for a first fragment,
//! [`VirtualReassembly::add_first`] and [`VirtualReassembly::release`] until it returns `None`; for a later one,
//! [`VirtualReassembly::add_later`] and, if it is out of order, [`VirtualReassembly::reserve`]. A reserved slot counts
//! at once, also for later packets of the same batch; [`VirtualReassembly::fill`] stores the frame at the end of the
//! batch. [`VirtualReassembly::expire`] in each turn returns the frames of expired datagrams.

pub mod fragment;

mod buffer;
mod datagram_table;
#[cfg(test)]
mod model;
mod received;
mod source_limits;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use vipgate_mem::MemoryError;

pub use self::buffer::BufferedFragment;
use self::buffer::FragmentBuffer;
use self::datagram_table::{Datagram, DatagramTable, FIRST_RECEIVED, POISONED, Slot, WideKey};
use self::fragment::{Fragment, FragmentError};
use self::received::ReceivedRanges;
use self::source_limits::{SourceKey, SourceLimits};
use crate::flow::address::{Address, V6};
use crate::flow::datagram::{Known, TransportPorts};
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};
use crate::io::Received;
use crate::wire::{ipv4, ipv6};

/// Frames of one datagram that are buffered until its first fragment arrives.
const MAX_BUFFERED_PER_DATAGRAM: u8 = 16;
/// Expired datagrams removed per new datagram, if the expiry in the loop hasn't removed them yet.
const MAX_EXPIRED_PER_INSERT: usize = 2;

/// What identifies a datagram: equal in all its fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DatagramKey<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// The identification.
    pub id: u32,
    /// The protocol for IPv4 (RFC 791 section 3.2); 0 for IPv6, where it isn't part of it (RFC 8200 section 4.5).
    pub protocol: u8,
}

impl DatagramKey<u32> {
    /// The key of an IPv4 fragment.
    #[inline]
    pub fn of_v4(header: &ipv4::Header) -> Self {
        let ipv4::Header { source, destination, protocol, identification, .. } = *header;
        Self { source, destination, id: identification.into(), protocol }
    }
}

impl DatagramKey<V6> {
    /// The key of an IPv6 fragment; `None` if it isn't one.
    #[inline]
    pub fn of_v6(header: &ipv6::Header) -> Option<Self> {
        let id = header.fragment_header?.identification;
        Some(Self { source: header.source, destination: header.destination, id, protocol: 0 })
    }
}

impl<A: Address> DatagramKey<A> {
    fn wide_key(&self) -> WideKey {
        let wide = |address: A| match address.to_ip() {
            IpAddr::V4(v4) => V6 { high: 0, low: v4.to_bits().into() },
            IpAddr::V6(v6) => V6::from_bits(v6.to_bits()),
        };
        let (source, destination) = (wide(self.source), wide(self.destination));
        WideKey { source, destination, id: self.id, protocol: self.protocol, bits: A::BITS, ..WideKey::default() }
    }
}

/// Result for a fragment that isn't the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaterFragment {
    /// The first fragment has arrived: this one is translated like it.
    Resolved(Known),
    /// The first fragment hasn't arrived yet: this one is to be buffered.
    OutOfOrder,
}

/// A buffer slot: holds a fragment until the first one of its datagram arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSlot(pub u32);

/// Virtual reassembly state of one worker, for both address families.
#[derive(Debug)]
pub struct VirtualReassembly {
    store: DatagramTable,
    buffer: FragmentBuffer,
    datagram_limits: SourceLimits,
    frame_limits: SourceLimits,
    timeout_ms: u32,
    key: HashKey,
}

impl VirtualReassembly {
    /// Capacity for `datagrams` and for `buffered` frames; a datagram expires after `timeout_ms` (at least 2
    /// seconds: RFC 6146 section 4). Complete datagrams are evicted when their capacity is needed.
    ///
    /// # Errors
    /// If the memory can't be allocated.
    pub fn new(datagrams: u32, buffered: u32, timeout_ms: u32, key: HashKey) -> Result<Self, MemoryError> {
        Ok(Self {
            store: DatagramTable::new(datagrams)?,
            buffer: FragmentBuffer::new(buffered),
            datagram_limits: SourceLimits::new(datagrams)?,
            frame_limits: SourceLimits::new(buffered)?,
            timeout_ms,
            key,
        })
    }

    /// Number of datagrams.
    pub fn len(&self) -> u32 {
        self.store.len()
    }

    /// Whether there are no datagrams.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Buffered frames, for audits: those waiting, and those that [`VirtualReassembly::expire`] has yet to return.
    pub fn buffered(&self) -> u32 {
        self.buffer.frames()
    }

    /// Adds a first fragment. Returns what all fragments of the datagram are translated with: for a duplicate, the
    /// values of the original. The caller continues with [`VirtualReassembly::release`].
    ///
    /// # Errors
    /// Why the fragment must be dropped; after [`FragmentError::Overlap`] and [`FragmentError::TooManyRanges`] the
    /// whole datagram is.
    pub fn add_first<A: Address>(
        &mut self,
        key: &DatagramKey<A>,
        fragment: Fragment,
        ports: TransportPorts,
        translated_id: u32,
        now: Tick,
    ) -> Result<Known, FragmentError> {
        if !fragment.is_first() {
            return Err(FragmentError::Malformed);
        }
        let slot = self.admit(&key.wide_key(), fragment, now)?;
        let datagram = self.store.get_mut(slot);
        if !datagram.has(FIRST_RECEIVED) {
            datagram.set(FIRST_RECEIVED);
            datagram.protocol = ports.protocol;
            (datagram.source_port, datagram.destination_port) = (ports.source, ports.destination);
            datagram.translated_id = translated_id;
        }
        let first = first_of(datagram);
        if first.ports != ports {
            self.poison(slot);
            return Err(FragmentError::Overlap);
        }
        self.finish_if_complete(slot);
        Ok(first)
    }

    /// Adds a fragment that isn't the first.
    ///
    /// # Errors
    /// As [`VirtualReassembly::add_first`].
    pub fn add_later<A: Address>(
        &mut self,
        key: &DatagramKey<A>,
        fragment: Fragment,
        now: Tick,
    ) -> Result<LaterFragment, FragmentError> {
        if fragment.is_first() {
            return Err(FragmentError::Malformed);
        }
        let slot = self.admit(&key.wide_key(), fragment, now)?;
        self.finish_if_complete(slot);
        let datagram = self.store.get(slot);
        Ok(if datagram.has(FIRST_RECEIVED) {
            LaterFragment::Resolved(first_of(datagram))
        } else {
            LaterFragment::OutOfOrder
        })
    }

    /// Reserves a buffer slot for a fragment that [`VirtualReassembly::add_later`] has just reported as out of order:
    /// packet `packet` of the current batch. Unless the first fragment arrives in the same batch, the caller fills the
    /// slot before the next batch. `None` if there is no capacity; the datagram can't be completed any more and is
    /// dropped.
    pub fn reserve<A: Address>(&mut self, key: &DatagramKey<A>, packet: u8) -> Option<BufferSlot> {
        let key = key.wide_key();
        let slot = self.store.find(self.hash(&key), &key)?;
        let datagram = self.store.get_mut(slot);
        if datagram.has(FIRST_RECEIVED) || datagram.has(POISONED) {
            return None;
        }
        if datagram.buffered_count == MAX_BUFFERED_PER_DATAGRAM || !self.frame_limits.acquire(datagram.source) {
            self.poison(slot);
            return None;
        }
        datagram.buffered_count += 1;
        let buffer_slot = self.buffer.reserve(&mut datagram.buffered, packet);
        if buffer_slot.is_none() {
            datagram.buffered_count -= 1;
            self.frame_limits.release(datagram.source, 1);
            self.poison(slot);
        }
        buffer_slot.map(BufferSlot)
    }

    /// Stores the frame of a reserved slot. If its datagram was dropped meanwhile, the frame is returned by the next
    /// expiry.
    pub fn fill(&mut self, BufferSlot(number): BufferSlot, received: Received) {
        self.buffer.fill(number, received);
    }

    /// The next buffered fragment of a datagram, in order of arrival. Called after [`VirtualReassembly::add_first`]
    /// until it returns `None`.
    pub fn release<A: Address>(&mut self, key: &DatagramKey<A>) -> Option<BufferedFragment> {
        let key = key.wide_key();
        let slot = self.store.find(self.hash(&key), &key)?;
        let datagram = self.store.get_mut(slot);
        if !datagram.has(FIRST_RECEIVED) {
            return None;
        }
        let waiting = self.buffer.pop(&mut datagram.buffered)?;
        datagram.buffered_count -= 1;
        self.frame_limits.release(datagram.source, 1);
        self.finish_if_complete(slot);
        Some(waiting)
    }

    /// Removes expired datagrams and returns the buffered frames of dropped ones, at most `budget` of both together. A
    /// complete datagram may stay for up to twice its timeout.
    pub fn expire(&mut self, now: Tick, budget: usize, mut expired: impl FnMut(Received)) {
        for _ in 0..budget {
            if let Some(received) = self.buffer.pop_lost() {
                expired(received);
            } else if !self.expire_one(now) {
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

    fn source_key(&self, key: &WideKey) -> SourceKey {
        let network = if key.bits == u32::BITS as u8 {
            V6 { high: 0, low: key.source.low & !0xff }
        } else {
            V6 { high: key.source.high, low: 0 }
        };
        SourceKey::new(key.source, network, &self.key)
    }

    /// The datagram of a fragment, with the fragment recorded.
    fn admit(&mut self, key: &WideKey, fragment: Fragment, now: Tick) -> Result<Slot, FragmentError> {
        let hash = self.hash(key);
        let Some(slot) = self.store.find(hash, key) else { return self.insert(hash, key, fragment, now) };
        let datagram = self.store.get_mut(slot);
        if datagram.is_expired(now) || starts_new_datagram(datagram, fragment) {
            self.remove(slot);
            return self.insert(hash, key, fragment, now);
        }
        if datagram.has(POISONED) {
            return Err(FragmentError::Poisoned);
        }
        match datagram.received.add(fragment) {
            Ok(()) => Ok(slot),
            Err(error) => {
                if error != FragmentError::TooManyDuplicates {
                    self.poison(slot);
                }
                Err(error)
            }
        }
    }

    /// Adds a datagram with its first recorded fragment.
    fn insert(&mut self, hash: u32, key: &WideKey, fragment: Fragment, now: Tick) -> Result<Slot, FragmentError> {
        let mut seen = ReceivedRanges::default();
        seen.add(fragment)?;
        for _ in 0..MAX_EXPIRED_PER_INSERT {
            self.expire_one(now);
        }
        let holder = self.source_key(key);
        if !self.datagram_limits.acquire(holder) {
            return Err(FragmentError::LimitReached);
        }
        if self.store.is_full()
            && let Some(complete) = self.store.oldest_finished()
        {
            self.remove(complete);
        }
        let inserted = self.store.insert(hash, Datagram::new(*key, holder, seen, now.plus(self.timeout_ms)));
        if inserted.is_none() {
            self.datagram_limits.release(holder, 1);
        }
        inserted.ok_or(FragmentError::LimitReached)
    }

    /// Removes an expired datagram; false if there is none.
    fn expire_one(&mut self, now: Tick) -> bool {
        let oldest = [self.store.oldest_unfinished(), self.store.oldest_finished()];
        let expired = oldest.into_iter().flatten().find(|&slot| self.store.get(slot).is_expired(now));
        if let Some(slot) = expired {
            self.remove(slot);
        }
        expired.is_some()
    }

    fn remove(&mut self, slot: Slot) {
        self.discard_buffered(slot);
        let datagram = self.store.get(slot);
        if !datagram.is_finished() {
            self.datagram_limits.release(datagram.source, 1);
        }
        self.store.remove(slot);
    }

    /// Marks a datagram so that the rest of it is dropped.
    fn poison(&mut self, slot: Slot) {
        self.store.get_mut(slot).set(POISONED);
        self.discard_buffered(slot);
    }

    fn discard_buffered(&mut self, slot: Slot) {
        let datagram = self.store.get_mut(slot);
        self.frame_limits.release(datagram.source, datagram.buffered_count.into());
        datagram.buffered_count = 0;
        self.buffer.lose(std::mem::take(&mut datagram.buffered));
    }

    /// A complete datagram with nothing buffered isn't counted against its source any more, and is evicted when the
    /// table is full.
    fn finish_if_complete(&mut self, slot: Slot) {
        let datagram = self.store.get(slot);
        let waits = datagram.is_finished() || datagram.buffered_count != 0;
        if datagram.has(FIRST_RECEIVED) && datagram.received.is_complete() && !waits {
            self.datagram_limits.release(datagram.source, 1);
            self.store.finish(slot);
        }
    }
}

/// Whether a fragment must belong to another datagram than the complete one with its key. Fast senders reuse an
/// identification within the timeout (RFC 4963), and no fragment can contradict a complete datagram.
fn starts_new_datagram(datagram: &Datagram, fragment: Fragment) -> bool {
    let fits = |mut seen: ReceivedRanges| matches!(seen.add(fragment), Ok(()) | Err(FragmentError::TooManyDuplicates));
    datagram.is_finished() && (fragment.is_first() || !fits(datagram.received))
}

fn first_of(datagram: &Datagram) -> Known {
    let (source, destination) = (datagram.source_port, datagram.destination_port);
    let ports = TransportPorts { protocol: datagram.protocol, source, destination };
    Known { ports, translated_id: datagram.translated_id }
}
