//! One direction of a session: all that a packet of it needs, in one cache line (IPv4) or two (IPv6).
//!
//! ```text
//!  IPv4, one line                          0        8        16
//!   key: source, destination, ports,       |ssssdddd|ppqqPFDM|
//!        Protocol, Flags, Direction with Tracking, Mark
//!   to:  new source, destination, ports    |SSSSDDDD|PPQQ          28
//!   checksum deltas of IP and layer 4                   |iill|     32
//!   next hop, bytes (48 bits)               |hhbbbbbb|             40
//!   generation, last seen                            |ggggtttt|    48
//!   packets, twin, seq, ack                 |nnnn|wwww|eeee|aaaa|
//! ```
//! What every packet writes are as few words as possible: behind a million sessions, writes are what a processor waits for.
//! Addresses, ports and deltas have their bytes in the order in which they stand in packets (see key.rs).
//!
//! The two directions are twins: each names the other's slot. They are read together only on rare events (a FIN, an
//! expiry), so a packet touches one of them.

use std::hint::select_unpredictable;

use bytemuck::AnyBitPattern;

pub use super::flags::{Flags, Tracking};
use super::image::Half;
use super::key::Key;
use super::tuple::Tuple;
use crate::address::{Address, V6};
use crate::counters::Direction;
use crate::snapshot::network::HopId;
use crate::time::{LONGEST_TIMEOUT_MS, Tick};
use crate::wire::checksum::Delta;
use crate::wire::protocol;

/// A slot of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub u32);

const NO_HOP: u16 = u16::MAX;
/// Bits of a next hop in `Entry::traffic`.
const HOP_BITS: u32 = u16::BITS;

/// What `Entry::seen` holds.
#[inline]
fn seen(generation: u32, at: Tick) -> u64 {
    u64::from(generation) | u64::from(at.0) << 32
}

/// What stands where in `Entry::tail`, behind the ports.
pub(super) const PROTOCOL: usize = 4;
const FLAGS: usize = 5;
pub(super) const DIRECTION: usize = 6;
/// The bits of that which are the direction's number; those above are [`Tracking`].
pub(super) const DIRECTION_BITS: u8 = !Tracking::ALL.0;
const MARK: usize = 7;

/// What other gateways have to do with the session, in its mark.
mod mark {
    /// It is a copy; the session is another gateway's.
    pub(super) const COPY: u8 = 0x80;
    /// Another gateway has a copy of it.
    pub(super) const TOLD: u8 = 0x40;
    /// Nothing of it has changed since it was last told; of a live session.
    pub(super) const SAID: u8 = 0x20;
    /// Where the side of a copy is kept, which its flags don't name: so that no packet is taken for one of its.
    pub(super) const SIDE: u32 = 4;
    /// The bits of that.
    pub(super) const SIDES: u8 = 0x30;
    /// The round of telling all in which a copy was last named.
    pub(super) const ROUND: u8 = 0x0f;
}
/// The bytes of it that belong to the key: those before the flags.
const KEY_BITS: u32 = 8 * FLAGS as u32;

/// One direction of a session. The drawing is at the head of this file.
#[derive(Clone, Copy, Debug, Default, AnyBitPattern)]
#[repr(C)]
pub struct Entry<A> {
    source: A,
    destination: A,
    /// Ports, protocol, flags, direction, mark: together, so that they are compared as one number.
    pub(super) tail: [u8; 8],
    to_source: A,
    to_destination: A,
    to_ports: [u8; 4],
    ip_delta: u16,
    l4_delta: u16,
    /// The next hop in the lowest 16 bits, bytes above.
    traffic: u64,
    /// The generation in the lower half, when a packet was last seen in the upper one.
    seen: u64,
    packets: u32,
    twin: u32,
    pub(super) sequence: u32,
    pub(super) acknowledged: u32,
}

// `goes_to_pod` reads the way from two bits.
const _: () = assert!(
    Direction::Egress as u8 == 0
        && Direction::Reply as u8 == 1
        && Direction::Inbound as u8 == 2
        && Direction::ServiceReply as u8 == 3
);
const _: () = assert!(size_of::<Entry<u32>>() == 64);
const _: () = assert!(size_of::<Entry<V6>>() == 112);

impl<A: Address> Entry<A> {
    /// The direction in which packets that look like `key` become packets that look like `to`.
    pub fn new(key: Tuple<A>, to: Tuple<A>, direction: Direction, flags: Flags) -> Self {
        let (ip_delta, l4_delta) = deltas(&key, &to);
        let ([source, destination], [p0, p1, p2, p3]) = Key::of(&key).in_packet();
        let ([to_source, to_destination], to_ports) = Key::of(&to).in_packet();
        Self {
            source,
            destination,
            tail: [p0, p1, p2, p3, key.protocol, flags.0, direction as u8, 0],
            to_source,
            to_destination,
            to_ports,
            ip_delta: ip_delta.0,
            l4_delta: l4_delta.0,
            traffic: NO_HOP.into(),
            ..Self::default()
        }
    }

    /// Forgets what only the process knew that made the entry, and computes again what follows from the rest.
    pub(super) fn renew(&mut self, now: Tick) {
        let (ip_delta, l4_delta) = deltas(&self.key(), &self.to());
        (self.ip_delta, self.l4_delta) = (ip_delta.0, l4_delta.0);
        self.set_next_hop(None);
        self.suspect();
        // No snapshot has this generation: the first packet is checked against the policy in force.
        self.set_generation(0);
        if !now.reached(self.last_seen()) || now.since(self.last_seen()) > LONGEST_TIMEOUT_MS {
            self.set_last_seen(now);
        }
    }

    /// What its packets look like when they come.
    pub fn key(&self) -> Tuple<A> {
        let [p0, p1, p2, p3, protocol, ..] = self.tail;
        Key::from_packet(self.source, self.destination, [p0, p1, p2, p3], protocol).tuple()
    }

    /// Whether packets with this key are its packets.
    #[inline]
    pub fn has_key(&self, key: &Key<A>) -> bool {
        let [.., ports_and_protocol] = key.words();
        let tail = (u64::from_le_bytes(self.tail) ^ ports_and_protocol) << (64 - KEY_BITS);
        // No branch for each part: almost always all are equal.
        let own = A::pair_words(self.source, self.destination);
        own.into_iter().zip(key.words()).fold(tail, |any, (own, other)| any | (own ^ other)) == 0
    }

    /// What its packets look like when they go.
    #[inline]
    pub fn to(&self) -> Tuple<A> {
        Key::from_packet(self.to_source, self.to_destination, self.to_ports, self.tail[PROTOCOL]).tuple()
    }

    /// Source and destination of its packets when they go, as they stand in an IP header.
    #[inline]
    pub fn to_addresses(&self) -> [A; 2] {
        [self.to_source, self.to_destination]
    }

    /// Their ports, as they stand in a header.
    #[inline]
    pub fn to_ports(&self) -> [u8; 4] {
        self.to_ports
    }

    /// Its state.
    #[inline]
    pub fn flags(&self) -> Flags {
        Flags(self.tail[FLAGS])
    }

    /// Sets its state.
    #[inline]
    pub fn set_flags(&mut self, flags: Flags) {
        self.tail[FLAGS] = flags.0;
    }

    /// Whether direction and side mean something.
    pub(super) fn has_way(&self) -> bool {
        usize::from(self.tail[DIRECTION] & DIRECTION_BITS) < Direction::ALL.len()
            && self.flags().side() <= Flags::OUTSIDE.0
    }

    /// Which way its packets go.
    #[inline]
    pub fn direction(&self) -> Direction {
        Direction::from_number(self.tail[DIRECTION] & DIRECTION_BITS)
    }

    /// Whether it is a copy: the session is another gateway's.
    #[inline]
    pub fn is_copy(&self) -> bool {
        self.tail[MARK] & mark::COPY != 0
    }

    /// Makes it a copy, which nobody takes for a live one: it has no side that packets could come from.
    pub(super) fn mark_copy(&mut self) {
        let side = self.flags().side();
        self.tail[MARK] = mark::COPY | side << mark::SIDE;
        self.set_flags(self.flags().with_side(0));
    }

    /// Makes a copy live.
    pub(crate) fn unmark_copy(&mut self) {
        self.set_flags(self.flags().with_side(self.own_side()));
        self.tail[MARK] = 0;
    }

    /// Whether it is this gateway's, and open.
    #[inline]
    pub fn is_live(&self) -> bool {
        !self.is_copy() && !self.flags().has(Flags::QUARANTINED)
    }

    /// The side that its packets come from where it is live: see [`Flags::side`].
    pub(super) fn own_side(&self) -> u8 {
        if self.is_copy() { (self.tail[MARK] & mark::SIDES) >> mark::SIDE } else { self.flags().side() }
    }

    /// The round in which a copy was last named.
    pub fn round(&self) -> u8 {
        self.tail[MARK] & mark::ROUND
    }

    /// Notes the round in which a copy was named, modulo 16.
    pub(super) fn set_round(&mut self, round: u8) {
        self.tail[MARK] = self.tail[MARK] & !mark::ROUND | round & mark::ROUND;
    }

    /// Whether another gateway has a copy of it.
    #[inline]
    pub fn is_told(&self) -> bool {
        self.tail[MARK] & mark::TOLD != 0
    }

    /// Notes that another gateway has a copy of it.
    pub fn note_told(&mut self) {
        self.tail[MARK] |= mark::TOLD;
    }

    /// Whether something of it is known to no other gateway: where its share moves, it must be told before it is let go. A copy that its
    /// gateway has never named was a session of this one.
    pub fn has_news(&self) -> bool {
        let is_known =
            if self.is_copy() { self.is_told() || self.round() != 0 } else { self.is_told() && self.is_said() };
        !is_known
    }

    fn is_said(&self) -> bool {
        self.tail[MARK] & mark::SAID != 0
    }

    /// Notes that it was told as it is now, and may be on its way still.
    pub fn note_said(&mut self) {
        if !self.is_copy() {
            self.tail[MARK] |= mark::SAID;
        }
    }

    /// Notes that it has changed since it was told.
    pub fn note_changed(&mut self) {
        if !self.is_copy() {
            self.tail[MARK] &= !mark::SAID;
        }
    }

    /// A session begins anew: nobody has a copy of it.
    pub(super) fn forget_told(&mut self) {
        self.tail[MARK] = 0;
    }

    /// Takes over what another gateway knows of this direction's numbers.
    pub(super) fn recall(&mut self, half: &Half) {
        (self.sequence, self.acknowledged, self.packets) = (half.sequence, half.acknowledged, half.packets);
        let is_origin = self.flags().has(Flags::ORIGIN);
        let confirmed = is_origin && half.is_confirmed(self.tail[PROTOCOL]);
        let synchronized = self.tail[PROTOCOL] == protocol::TCP && half.sequence != 0;
        let bits = [(confirmed, Tracking::CONFIRMED), (synchronized, Tracking::SYNCHRONIZED)];
        let held = bits.into_iter().filter(|(holds, _)| *holds).map(|(_, bit)| bit);
        self.set_tracking(held.fold(Tracking::default(), Tracking::with));
        self.traffic = u64::from(self.next_hop_number().0) | half.bytes << HOP_BITS;
    }

    /// The pod of the session: whoever asks outside, or serves here.
    #[inline]
    pub fn endpoint(&self) -> A {
        // Which way a packet goes is anybody's guess.
        select_unpredictable(self.goes_to_pod(), self.to_destination, self.source).in_packet_order()
    }

    /// Whether its packets go to the pod: a reply, or a client's.
    #[inline]
    fn goes_to_pod(&self) -> bool {
        let number = self.tail[DIRECTION];
        (number ^ number >> 1) & 1 == 1
    }

    /// The pod, the far side and the VIP that the session is between.
    pub fn parties(&self) -> (A, A, A) {
        let (key, to) = (self.key(), self.to());
        if self.goes_to_pod() {
            (to.destination, key.source, key.destination)
        } else {
            (key.source, key.destination, to.source)
        }
    }

    /// The VIP and the pod of a pod's session, or, of a client's, the VIP twice, as they stand in packets; of a first direction only.
    #[inline]
    pub(super) fn vip_and_member(&self) -> [A; 2] {
        if self.goes_to_pod() { [self.destination; 2] } else { [self.to_source, self.source] }
    }

    /// The same with their ports.
    pub fn ends(&self) -> [(A, u16); 3] {
        let (key, to) = (self.key(), self.to());
        let [source, destination] = [(key.source, key.source_port), (key.destination, key.destination_port)];
        if self.goes_to_pod() {
            [(to.destination, to.destination_port), source, destination]
        } else {
            [source, destination, (to.source, to.source_port)]
        }
    }

    /// Whether it is a client's way to a Service, or the way back.
    pub fn is_of_service(&self) -> bool {
        matches!(self.direction(), Direction::Inbound | Direction::ServiceReply)
    }

    /// What the rewrite does to the IPv4 header's checksum, the time to live included.
    #[inline]
    pub fn ip_delta(&self) -> Delta {
        Delta(self.ip_delta)
    }

    /// What the rewrite does to the checksum of TCP, UDP or ICMP.
    #[inline]
    pub fn l4_delta(&self) -> Delta {
        Delta(self.l4_delta)
    }

    /// Where its packets go next, if that has a number.
    #[inline]
    pub fn next_hop(&self) -> Option<HopId> {
        let hop = self.next_hop_number();
        (hop.0 != NO_HOP).then_some(hop)
    }

    /// The same as it is noted: a number that no network has, if nothing is.
    #[inline]
    pub fn next_hop_number(&self) -> HopId {
        HopId(self.traffic as u16)
    }

    /// Remembers where its packets go next.
    #[inline]
    pub fn set_next_hop(&mut self, hop: Option<HopId>) {
        let hop = hop.map_or(NO_HOP, |hop| hop.0);
        self.traffic = self.traffic >> HOP_BITS << HOP_BITS | u64::from(hop);
    }

    /// The generation that it was checked against.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.seen as u32
    }

    /// Notes that it was checked.
    #[inline]
    pub fn set_generation(&mut self, generation: u32) {
        self.seen = seen(generation, self.last_seen());
    }

    /// The other direction's slot.
    #[inline]
    pub fn twin(&self) -> Slot {
        Slot(self.twin)
    }

    /// Sets the other direction's slot.
    #[inline]
    pub fn set_twin(&mut self, twin: Slot) {
        self.twin = twin.0;
    }

    /// When the last packet passed; the time of opening before that.
    #[inline]
    pub fn last_seen(&self) -> Tick {
        Tick((self.seen >> 32) as u32)
    }

    /// Sets the time of the last packet.
    #[inline]
    pub fn set_last_seen(&mut self, now: Tick) {
        self.seen = seen(self.generation(), now);
    }

    /// Notes a packet of `bytes`, and that the session was checked against `generation`.
    #[inline]
    pub fn count(&mut self, bytes: u16, now: Tick, generation: u32) {
        self.seen = seen(generation, now);
        self.packets = self.packets.wrapping_add(1);
        self.traffic = self.traffic.wrapping_add(u64::from(bytes) << HOP_BITS);
    }

    /// Packets that have passed, modulo 2^32.
    pub fn packets(&self) -> u64 {
        self.packets.into()
    }

    /// Bytes that have passed, modulo 2^48.
    pub fn bytes(&self) -> u64 {
        self.traffic >> HOP_BITS
    }
}

/// The checksum changes of a rewrite: of the IPv4 header, and of the payload's own checksum.
fn deltas<A: Address>(key: &Tuple<A>, to: &Tuple<A>) -> (Delta, Delta) {
    let addresses = |tuple: &Tuple<A>| tuple.source.word_sum() + tuple.destination.word_sum();
    let ports = |tuple: &Tuple<A>| u32::from(tuple.source_port) + u32::from(tuple.destination_port);
    let ip = Delta::of(addresses(key), addresses(to));
    let l4 = Delta::of(ports(key), ports(to));
    // ICMP for IPv4 is alone in leaving the addresses out of its checksum.
    let l4 = if key.protocol == protocol::ICMP { l4 } else { ip.and(l4) };
    (ip.and(Delta::TTL_DECREMENT), l4)
}
