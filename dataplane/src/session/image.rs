//! A session as a plain value: what a gateway tells another one of it, so that it can go on there.

use std::net::IpAddr;

use super::tuple::Tuple;
use crate::address::{Address, V6};
use crate::counters::Direction;
use crate::wire::protocol;

/// A session of either family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// IPv4.
    V4(ImageOf<u32>),
    /// IPv6.
    V6(ImageOf<V6>),
}

impl Image {
    /// The VIP that the session is by way of, and its port.
    pub fn by_way_of(&self) -> (IpAddr, u16) {
        match self {
            Self::V4(image) => image.by_way_of(),
            Self::V6(image) => image.by_way_of(),
        }
    }

    /// Which way packets like the first one go.
    pub fn direction(&self) -> Direction {
        match self {
            Self::V4(image) => image.direction,
            Self::V6(image) => image.direction,
        }
    }

    /// The port of whoever began it.
    pub fn origin_port(&self) -> u16 {
        match self {
            Self::V4(image) => image.origin.source_port,
            Self::V6(image) => image.origin.source_port,
        }
    }
}

impl<A: Address> ImageOf<A> {
    fn by_way_of(&self) -> (IpAddr, u16) {
        let (vip, port) = match self.direction {
            Direction::Inbound => (self.origin.destination, self.origin.destination_port),
            _ => (self.translated.source, self.translated.source_port),
        };
        (vip.to_ip(), port)
    }
}

/// What has become of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is open: new, or changed.
    Open,
    /// It has ended; its port rests from now on.
    Ended,
}

/// A session of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageOf<A> {
    /// What has become of it.
    pub fate: Fate,
    /// Which way packets like the first one go: [`Direction::Egress`] or [`Direction::Inbound`].
    pub direction: Direction,
    /// The first packet as it came.
    pub origin: Tuple<A>,
    /// The first packet as it went.
    pub translated: Tuple<A>,
    /// What is known of its two directions, that of the first packet first.
    pub halves: [Half; 2],
}

/// What is known of one direction. Where its packets go next, each gateway knows by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Half {
    /// Side, SYN, FIN, RST and SEEN of [`super::entry::Flags`], and the bits below. Gateways that don't know those leave them out.
    pub flags: u8,
    /// Milliseconds since its last packet.
    pub idle_ms: u32,
    /// See [`super::entry::Entry::sequence`].
    pub sequence: u32,
    /// See [`super::entry::Entry::acknowledged`].
    pub acknowledged: u32,
    /// Packets that have passed, modulo 2^32.
    pub packets: u32,
    /// Bytes that have passed, modulo 2^48.
    pub bytes: u64,
}

impl Half {
    /// Whoever says so knows of confirmation what [`super::entry::Entry::is_confirmed`] says.
    pub const KNOWS_CONFIRMATION: u8 = 0x40;
    /// Of the first direction: its sender is confirmed.
    pub const CONFIRMED: u8 = 0x80;

    /// Whether the sender is confirmed. Gateways of older versions don't say; they took this for it.
    pub(super) fn is_confirmed(&self, protocol: u8) -> bool {
        if self.flags & Self::KNOWS_CONFIRMATION != 0 {
            return self.flags & Self::CONFIRMED != 0;
        }
        match protocol {
            protocol::TCP => self.acknowledged != 0,
            protocol::SCTP => self.sequence != 0,
            _ => self.packets > 1,
        }
    }
}
