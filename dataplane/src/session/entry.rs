//! Session entry: one direction of a session, with all that its packets need, in one cache line (IPv4) or two (IPv6).
//!
//! ```text
//!  IPv4, one line                          0        8        16
//!   key: source, destination, ports,       |ssssdddd|ppqqPFDM|
//!        Protocol, Flags, Direction with Tracking, Mark
//!   translated address, ports, checksum    |AAAAPPQQ|iill----|     32
//!        deltas of IP and layer 4
//!   next hop, bytes (48 bits)               |hhbbbbbb|             40
//!   generation, last seen                            |ggggtttt|    48
//!   packets, twin, seq, ack                 |nnnn|wwww|eeee|aaaa|
//! ```
//! Translation changes one address: the pod's or the VIP's. The direction says which, and the other one is the key's; so an
//! IPv6 entry has 96 bytes, which are never in more than two lines.
//!
//! A packet writes as few words as possible: with a million sessions, writes are what the processor waits for.
//! Addresses, ports and deltas are in network byte order (see key.rs).
//!
//! The two entries of a session are twins: each stores the other's slot. They are read together only on rare events (a
//! FIN, an expiry), so a packet touches one of them.

use std::hint::select_unpredictable;

use bytemuck::AnyBitPattern;

pub use super::flags::{Flags, Tracking};
use crate::flow::address::{Address, V6};
use crate::flow::direction::Direction;
use crate::flow::ids::Slot;
use crate::flow::key::Key;
use crate::flow::time::{MAX_TIMEOUT_MS, Tick};
use crate::flow::tuple::Tuple;
use crate::policy::network::NextHopId;
use crate::session::record::DirectionRecord;
use crate::wire::checksum::Delta;
use crate::wire::protocol;

const NO_HOP: u16 = u16::MAX;
/// Bits of the next hop in `Entry::traffic`.
const HOP_BITS: u32 = u16::BITS;

/// Packs `Entry::seen`.
#[inline]
fn seen(generation: u32, at: Tick) -> u64 {
    u64::from(generation) | u64::from(at.0) << 32
}

/// Byte offsets in `Entry::tail`, behind the ports.
pub(super) const PROTOCOL: usize = 4;
const FLAGS: usize = 5;
pub(super) const DIRECTION: usize = 6;
/// Bits of that byte that hold the direction's number; the bits above are [`Tracking`].
pub(super) const DIRECTION_BITS: u8 = !Tracking::ALL.0;
const MARK: usize = 7;

/// Replication state of a session, in its mark byte.
mod mark {
    /// Standby: another gateway has the active session.
    pub(super) const STANDBY: u8 = 0x80;
    /// Active: another gateway has acknowledged a standby session of it.
    pub(super) const ACKNOWLEDGED: u8 = 0x40;
    /// Active: its current state has been sent.
    pub(super) const SENT: u8 = 0x20;
    /// Shift of a standby session's ingress side. Its flags have none, so that no packet matches it.
    pub(super) const SIDE_SHIFT: u32 = 4;
    /// Mask of the ingress side.
    pub(super) const SIDE_MASK: u8 = 0x30;
    /// Standby: the full-sync round that last included it.
    pub(super) const SYNC_ROUND: u8 = 0x0f;
}
/// Bits of the tail that belong to the key: the bytes before the flags.
const KEY_BITS: u32 = 8 * FLAGS as u32;

/// One direction of a session; for its layout see the head of this file.
#[derive(Clone, Copy, Debug, Default, AnyBitPattern)]
#[repr(C)]
pub struct Entry<A> {
    source: A,
    destination: A,
    /// Ports, protocol, flags, direction, mark: one word, so that they are compared as one number.
    pub(super) tail: [u8; 8],
    /// The translated destination if its packets go to the pod, otherwise the translated source.
    translated_address: A,
    translated_ports: [u8; 4],
    ip_delta: u16,
    l4_delta: u16,
    /// The next hop in the lowest 16 bits, bytes above.
    traffic: u64,
    /// Policy generation in the lower half, time of the last packet in the upper one.
    seen: u64,
    packets: u32,
    twin: u32,
    pub(super) sequence: u32,
    pub(super) acknowledged: u32,
}

// `goes_to_pod` reads the direction from two bits.
const _: () = assert!(
    Direction::Egress as u8 == 0
        && Direction::Reply as u8 == 1
        && Direction::Inbound as u8 == 2
        && Direction::ServiceReply as u8 == 3
);
const _: () = assert!(size_of::<Entry<u32>>() == 64);
const _: () = assert!(size_of::<Entry<V6>>() == 96);

impl<A: Address> Entry<A> {
    /// The entry that translates packets with tuple `key` to tuple `to`, which [`direction.translates`] it to.
    ///
    /// [`direction.translates`]: Direction::translates
    pub fn new(key: Tuple<A>, to: Tuple<A>, direction: Direction, flags: Flags) -> Self {
        debug_assert!(direction.translates(&key, &to), "{direction:?} of {key:?} to {to:?}");
        let (ip_delta, l4_delta) = deltas(&key, &to);
        let ([source, destination], [p0, p1, p2, p3]) = Key::of(&key).in_packet();
        let ([translated_source, translated_destination], translated_ports) = Key::of(&to).in_packet();
        let translated_address = if direction.goes_to_pod() { translated_destination } else { translated_source };
        Self {
            source,
            destination,
            tail: [p0, p1, p2, p3, key.protocol, flags.0, direction as u8, 0],
            translated_address,
            translated_ports,
            ip_delta: ip_delta.0,
            l4_delta: l4_delta.0,
            traffic: NO_HOP.into(),
            ..Self::default()
        }
    }

    /// Rebuilds an entry of a former process: clears what was valid only in that process and recomputes derived fields.
    pub(super) fn rebuild(&mut self, now: Tick) {
        let (ip_delta, l4_delta) = deltas(&self.key(), &self.translated());
        (self.ip_delta, self.l4_delta) = (ip_delta.0, l4_delta.0);
        self.set_next_hop(None);
        self.mark_stale();
        // No snapshot has this generation: the first packet revalidates the session against the policy in force.
        self.set_generation(0);
        if !now.reached(self.last_seen()) || now.since(self.last_seen()) > MAX_TIMEOUT_MS {
            self.set_last_seen(now);
        }
    }

    /// Tuple of its packets, as received.
    pub fn key(&self) -> Tuple<A> {
        self.table_key().tuple()
    }

    /// Key of its packets.
    #[inline]
    pub fn table_key(&self) -> Key<A> {
        let [p0, p1, p2, p3, protocol, ..] = self.tail;
        Key::from_packet(self.source, self.destination, [p0, p1, p2, p3], protocol)
    }

    /// Whether the entry has this key.
    #[inline]
    pub fn has_key(&self, key: &Key<A>) -> bool {
        let [.., ports_and_protocol] = key.words();
        let tail = (u64::from_le_bytes(self.tail) ^ ports_and_protocol) << (64 - KEY_BITS);
        // No branch for each word: almost always all are equal.
        let own = A::pair_words(self.source, self.destination);
        own.into_iter().zip(key.words()).fold(tail, |any, (own, other)| any | (own ^ other)) == 0
    }

    /// Tuple of its packets, after translation.
    #[inline]
    pub fn translated(&self) -> Tuple<A> {
        let [source, destination] = self.translated_addresses();
        Key::from_packet(source, destination, self.translated_ports, self.tail[PROTOCOL]).tuple()
    }

    /// Translated source and destination address, in network byte order.
    #[inline]
    pub fn translated_addresses(&self) -> [A; 2] {
        // The direction of a packet is unpredictable, so no branch.
        let goes_to_pod = self.goes_to_pod();
        [
            select_unpredictable(goes_to_pod, self.source, self.translated_address),
            select_unpredictable(goes_to_pod, self.translated_address, self.destination),
        ]
    }

    /// Translated ports, in network byte order.
    #[inline]
    pub fn translated_ports(&self) -> [u8; 4] {
        self.translated_ports
    }

    /// Flags of this direction.
    #[inline]
    pub fn flags(&self) -> Flags {
        Flags(self.tail[FLAGS])
    }

    /// Sets the flags of this direction.
    #[inline]
    pub fn set_flags(&mut self, flags: Flags) {
        self.tail[FLAGS] = flags.0;
    }

    /// Whether direction and ingress side have valid values.
    pub(super) fn has_valid_direction(&self) -> bool {
        usize::from(self.tail[DIRECTION] & DIRECTION_BITS) < Direction::ALL.len()
            && self.flags().side() <= Flags::OUTSIDE.0
    }

    /// Traffic direction of its packets.
    #[inline]
    pub fn direction(&self) -> Direction {
        Direction::from_number(self.tail[DIRECTION] & DIRECTION_BITS)
    }

    /// Whether it is a standby session: another gateway has the active one.
    #[inline]
    pub fn is_standby(&self) -> bool {
        self.tail[MARK] & mark::STANDBY != 0
    }

    /// Makes it a standby entry. Without an ingress side, no packet matches it.
    pub(super) fn mark_standby(&mut self) {
        let side = self.flags().side();
        self.tail[MARK] = mark::STANDBY | side << mark::SIDE_SHIFT;
        self.set_flags(self.flags().with_side(0));
    }

    /// Makes a standby entry active.
    pub(crate) fn mark_active(&mut self) {
        self.set_flags(self.flags().with_side(self.ingress_side()));
        self.tail[MARK] = 0;
    }

    /// Whether it is active: owned by this gateway and not quarantined.
    #[inline]
    pub fn is_active(&self) -> bool {
        !self.is_standby() && !self.flags().has(Flags::QUARANTINED)
    }

    /// Ingress side, of a standby entry too: see [`Flags::side`].
    pub(super) fn ingress_side(&self) -> u8 {
        if self.is_standby() { (self.tail[MARK] & mark::SIDE_MASK) >> mark::SIDE_SHIFT } else { self.flags().side() }
    }

    /// Full-sync round that last included a standby session, modulo 16.
    pub fn sync_round(&self) -> u8 {
        self.tail[MARK] & mark::SYNC_ROUND
    }

    /// Sets the full-sync round that last included a standby session, modulo 16.
    pub(super) fn set_sync_round(&mut self, round: u8) {
        self.tail[MARK] = self.tail[MARK] & !mark::SYNC_ROUND | round & mark::SYNC_ROUND;
    }

    /// Whether another gateway has acknowledged a standby session of it.
    #[inline]
    pub fn is_acknowledged(&self) -> bool {
        self.tail[MARK] & mark::ACKNOWLEDGED != 0
    }

    /// Notes that another gateway has a standby session of it.
    pub fn note_acknowledged(&mut self) {
        self.tail[MARK] |= mark::ACKNOWLEDGED;
    }

    /// Whether it has state that no other gateway has: if its shard moves, that state must be sent before the session
    /// is released. A standby session that no full sync has included was an active session of this gateway.
    pub fn has_pending_changes(&self) -> bool {
        let is_replicated = if self.is_standby() {
            self.is_acknowledged() || self.sync_round() != 0
        } else {
            self.is_acknowledged() && self.is_sent()
        };
        !is_replicated
    }

    /// Whether its current state was sent; it may not be acknowledged yet.
    pub fn is_sent(&self) -> bool {
        self.tail[MARK] & mark::SENT != 0
    }

    /// Notes that its current state was sent; it may not be acknowledged yet.
    pub fn note_sent(&mut self) {
        if !self.is_standby() {
            self.tail[MARK] |= mark::SENT;
        }
    }

    /// Notes a state change that has not been sent.
    pub fn note_changed(&mut self) {
        if !self.is_standby() {
            self.tail[MARK] &= !mark::SENT;
        }
    }

    /// Clears the replication state: a reopened session has no standby session.
    pub(super) fn clear_replication(&mut self) {
        self.tail[MARK] = 0;
    }

    /// Applies a replication record: sequence numbers, counters and confirmation of this direction.
    pub(super) fn apply_record(&mut self, half: &DirectionRecord) {
        (self.sequence, self.acknowledged, self.packets) = (half.sequence, half.acknowledged, half.packets);
        let is_origin = self.flags().has(Flags::ORIGIN);
        let confirmed = is_origin && half.flags & DirectionRecord::CONFIRMED != 0;
        let synchronized = self.tail[PROTOCOL] == protocol::TCP && half.sequence != 0;
        let bits = [(confirmed, Tracking::CONFIRMED), (synchronized, Tracking::SYNCHRONIZED)];
        let set = bits.into_iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit);
        self.set_tracking(set.fold(Tracking::default(), Tracking::with));
        self.traffic = u64::from(self.next_hop_number().0) | half.bytes << HOP_BITS;
    }

    /// Pod address of the session: the client of an egress session, the backend of an inbound one.
    #[inline]
    pub fn endpoint(&self) -> A {
        select_unpredictable(self.goes_to_pod(), self.translated_address, self.source).swap_network_order()
    }

    /// Whether its packets go to the pod: directions reply and inbound.
    #[inline]
    fn goes_to_pod(&self) -> bool {
        // Of the number's two lower bits: to convert it to a direction takes a table.
        let number = self.tail[DIRECTION];
        (number ^ number >> 1) & 1 == 1
    }

    /// Addresses of the pod, the remote and the VIP.
    pub fn pod_remote_vip(&self) -> (A, A, A) {
        let (key, to) = (self.key(), self.translated());
        if self.goes_to_pod() {
            (to.destination, key.source, key.destination)
        } else {
            (key.source, key.destination, to.source)
        }
    }

    /// VIP and pod of an egress session; of an inbound one, the VIP twice. Network byte order; valid for the original
    /// direction only.
    #[inline]
    pub(super) fn vip_and_member(&self) -> [A; 2] {
        if self.goes_to_pod() { [self.destination; 2] } else { [self.translated_address, self.source] }
    }

    /// Addresses and ports of the pod, the remote and the VIP.
    pub fn transport_addresses(&self) -> [(A, u16); 3] {
        let (key, to) = (self.key(), self.translated());
        let [source, destination] = [(key.source, key.source_port), (key.destination, key.destination_port)];
        if self.goes_to_pod() {
            [(to.destination, to.destination_port), source, destination]
        } else {
            [source, destination, (to.source, to.source_port)]
        }
    }

    /// Whether it belongs to an inbound (DNAT) session.
    pub fn is_dnat(&self) -> bool {
        matches!(self.direction(), Direction::Inbound | Direction::ServiceReply)
    }

    /// Checksum delta of the IPv4 header, with the TTL decrement.
    #[inline]
    pub fn ip_delta(&self) -> Delta {
        Delta(self.ip_delta)
    }

    /// Checksum delta of TCP, UDP or ICMP.
    #[inline]
    pub fn l4_delta(&self) -> Delta {
        Delta(self.l4_delta)
    }

    /// Cached next hop of its packets.
    #[inline]
    pub fn next_hop(&self) -> Option<NextHopId> {
        let hop = self.next_hop_number();
        (hop.0 != NO_HOP).then_some(hop)
    }

    /// Cached next hop as stored: a number that no network has, if there is none.
    #[inline]
    pub fn next_hop_number(&self) -> NextHopId {
        NextHopId(self.traffic as u16)
    }

    /// Caches the next hop of its packets.
    #[inline]
    pub fn set_next_hop(&mut self, hop: Option<NextHopId>) {
        let hop = hop.map_or(NO_HOP, |hop| hop.0);
        self.traffic = self.traffic >> HOP_BITS << HOP_BITS | u64::from(hop);
    }

    /// Policy generation that it was last validated against.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.seen as u32
    }

    /// Notes that it was validated against a policy generation.
    #[inline]
    pub fn set_generation(&mut self, generation: u32) {
        self.seen = seen(generation, self.last_seen());
    }

    /// Slot of the other direction's entry.
    #[inline]
    pub fn twin(&self) -> Slot {
        Slot(self.twin)
    }

    /// Sets the slot of the other direction's entry.
    #[inline]
    pub fn set_twin(&mut self, twin: Slot) {
        self.twin = twin.0;
    }

    /// Time of the last packet; before the first one, of the opening.
    #[inline]
    pub fn last_seen(&self) -> Tick {
        Tick((self.seen >> 32) as u32)
    }

    /// Sets the time of the last packet.
    #[inline]
    pub fn set_last_seen(&mut self, now: Tick) {
        self.seen = seen(self.generation(), now);
    }

    /// Counts a packet of `bytes`, and notes that the session was validated against `generation`.
    #[inline]
    pub fn count(&mut self, bytes: u16, now: Tick, generation: u32) {
        self.seen = seen(generation, now);
        self.packets = self.packets.wrapping_add(1);
        self.traffic = self.traffic.wrapping_add(u64::from(bytes) << HOP_BITS);
    }

    /// Packets forwarded, modulo 2^32.
    pub fn packets(&self) -> u64 {
        self.packets.into()
    }

    /// Bytes forwarded, modulo 2^48.
    pub fn bytes(&self) -> u64 {
        self.traffic >> HOP_BITS
    }
}

/// Checksum deltas of the translation: of the IPv4 header, and of the layer 4 checksum.
fn deltas<A: Address>(key: &Tuple<A>, to: &Tuple<A>) -> (Delta, Delta) {
    let addresses = |tuple: &Tuple<A>| tuple.source.word_sum() + tuple.destination.word_sum();
    let ports = |tuple: &Tuple<A>| u32::from(tuple.source_port) + u32::from(tuple.destination_port);
    let ip = Delta::of(addresses(key), addresses(to));
    let l4 = Delta::of(ports(key), ports(to));
    // The ICMPv4 checksum has no pseudo-header, so it doesn't cover the addresses.
    let l4 = if key.protocol == protocol::ICMP { l4 } else { ip.and(l4) };
    (ip.and(Delta::TTL_DECREMENT), l4)
}
