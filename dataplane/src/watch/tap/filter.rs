//! Which packets a capture wants.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::counters::{Direction, DropReason};
use crate::io::InterfaceId;
use crate::verdict::Verdict;
use crate::watch::glimpse::Glimpse;

/// Which packets; everything that is given must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapFilter {
    /// One of its addresses, before or after translation, or of the tunnel that it goes into, is in each of these.
    pub nets: Vec<IpNet>,
    /// One of its ports, before or after translation, is this.
    pub port: Option<u16>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// Where it came in.
    pub interface: Option<InterfaceId>,
    /// How its way ended.
    pub outcome: Outcome,
}

/// How the way of a wanted packet ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Anyhow.
    #[default]
    Any,
    /// It was dropped.
    Dropped,
    /// It was dropped for this reason.
    DroppedFor(DropReason),
    /// It wasn't dropped.
    Passed,
    /// It was sent on, in this direction.
    Sent(Direction),
}

impl Outcome {
    #[inline]
    pub(super) fn is_drop(self) -> bool {
        matches!(self, Self::Dropped | Self::DroppedFor(_))
    }
}

/// What has become of a packet, and where it came in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed<'a> {
    pub verdict: Verdict,
    /// Which way it counts.
    pub direction: Option<Direction>,
    pub interface: InterfaceId,
    /// The packet, or at least its headers, as it came.
    pub before: &'a [u8],
    /// As it went on, if it did.
    pub after: Option<&'a [u8]>,
    /// What is inside of that, if that is a tunnel's.
    pub inside: Option<&'a [u8]>,
}

impl TapFilter {
    /// Whether a packet has an address that is asked for first, if any is.
    pub(super) fn may_want(&self, packet: &[u8]) -> bool {
        let has = |net: &IpNet| {
            Glimpse::of(packet).is_some_and(|it| net.contains(&it.source) || net.contains(&it.destination))
        };
        self.nets.first().is_none_or(has)
    }

    pub(super) fn wants(&self, it: &Passed<'_>) -> bool {
        let by_outcome = match self.outcome {
            Outcome::Any => true,
            Outcome::Dropped => matches!(it.verdict, Verdict::Drop(_)),
            Outcome::DroppedFor(reason) => it.verdict == Verdict::Drop(reason),
            Outcome::Passed => !matches!(it.verdict, Verdict::Drop(_)),
            Outcome::Sent(direction) => it.direction == Some(direction),
        };
        if !by_outcome || self.interface.is_some_and(|wanted| wanted != it.interface) {
            return false;
        }
        if self.nets.is_empty() && self.port.is_none() && self.protocol.is_none() {
            return true;
        }
        let seen = [Some(it.before), it.after, it.inside].map(|packet| packet.and_then(Glimpse::of));
        let seen = || seen.iter().flatten();
        let has_address = |net: &IpNet| {
            let is_in = |address: IpAddr| net.contains(&address);
            seen().any(|it| is_in(it.source) || is_in(it.destination))
        };
        let has_port = |port: u16| seen().any(|it| it.ports.is_some_and(|ports| ports.contains(&port)));
        self.nets.iter().all(has_address)
            && self.port.is_none_or(has_port)
            && self.protocol.is_none_or(|number| seen().any(|it| it.protocol == number))
    }
}
