//! Replication record of a session: what one gateway sends to another, so that the session can continue there after a
//! failover.

use std::net::IpAddr;

use crate::flow::address::{Address, V6};
use crate::flow::direction::Direction;
use crate::flow::time::Tick;
use crate::flow::tuple::Tuple;
use crate::session::affinity::Choice;

/// Replication record of either address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicationRecord {
    /// IPv4.
    V4(FamilyRecord<u32>),
    /// IPv6.
    V6(FamilyRecord<V6>),
}

impl ReplicationRecord {
    /// VIP and VIP port of the session.
    pub fn vip_and_port(&self) -> (IpAddr, u16) {
        match self {
            Self::V4(record) => record.vip_and_port(),
            Self::V6(record) => record.vip_and_port(),
        }
    }

    /// Traffic direction of the original direction.
    pub fn direction(&self) -> Direction {
        match self {
            Self::V4(record) => record.direction,
            Self::V6(record) => record.direction,
        }
    }

    /// Source port of the initiator.
    pub fn initiator_port(&self) -> u16 {
        match self {
            Self::V4(record) => record.origin.source_port,
            Self::V6(record) => record.origin.source_port,
        }
    }
}

impl<A: Address> FamilyRecord<A> {
    /// The record of a client's backend.
    pub fn of_choice(choice: &Choice<A>, now: Tick) -> Self {
        let (origin, translated) = choice.tuples();
        let original = DirectionRecord { idle_ms: choice.age_ms(now), ..DirectionRecord::default() };
        let directions = [original, DirectionRecord::default()];
        Self { state: RecordState::Affinity, direction: Direction::Inbound, origin, translated, directions }
    }

    /// The client's backend, in a record of [`RecordState::Affinity`].
    pub fn choice(&self, now: Tick) -> Choice<A> {
        let [original, _] = &self.directions;
        Choice::of(&self.origin, &self.translated, Tick(now.0.wrapping_sub(original.idle_ms)))
    }

    fn vip_and_port(&self) -> (IpAddr, u16) {
        let (vip, port) = match self.direction {
            Direction::Inbound => (self.origin.destination, self.origin.destination_port),
            _ => (self.translated.source, self.translated.source_port),
        };
        (vip.to_ip(), port)
    }
}

/// State of the session in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordState {
    /// Open: new or changed.
    Open,
    /// Ended; the quarantine of its port starts now.
    Ended,
    /// Not a session, but the backend of a client of a Service with session affinity. The original direction's idle
    /// time is that since the client opened its last session.
    Affinity,
}

/// Replication record of one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyRecord<A> {
    /// Open or ended.
    pub state: RecordState,
    /// Traffic direction of the original direction: [`Direction::Egress`] or [`Direction::Inbound`].
    pub direction: Direction,
    /// Original-direction tuple, as received.
    pub origin: Tuple<A>,
    /// Original-direction tuple, after translation.
    pub translated: Tuple<A>,
    /// State of both directions, the original one first.
    pub directions: [DirectionRecord; 2],
}

/// State of one direction. It has no next hop: each gateway looks that up itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionRecord {
    /// Side, SYN, FIN, RST and SEEN of [`super::entry::Flags`], and the bit below.
    pub flags: u8,
    /// Milliseconds since its last packet.
    pub idle_ms: u32,
    /// See [`super::entry::Entry::sequence`].
    pub sequence: u32,
    /// See [`super::entry::Entry::acknowledged`].
    pub acknowledged: u32,
    /// Packets forwarded, modulo 2^32.
    pub packets: u32,
    /// Bytes forwarded, modulo 2^48.
    pub bytes: u64,
}

impl DirectionRecord {
    /// Original direction: the initiator is confirmed: see [`super::entry::Entry::is_confirmed`].
    pub const CONFIRMED: u8 = 0x80;
}
