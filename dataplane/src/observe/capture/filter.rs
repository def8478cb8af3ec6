//! Capture filter.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::InterfaceId;
use crate::flow::verdict::Verdict;
use crate::observe::packet_summary::PacketSummary;

/// A capture filter; all fields that are set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureFilter {
    /// Each of these prefixes contains one of the packet's addresses: before or after translation, or of the tunnel's
    /// outer header.
    pub nets: Vec<IpNet>,
    /// One of its ports, before or after translation.
    pub port: Option<u16>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// The ingress interface.
    pub interface: Option<InterfaceId>,
    pub outcome: OutcomeFilter,
}

/// The outcome of a packet in the pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutcomeFilter {
    /// Any outcome.
    #[default]
    Any,
    Dropped,
    /// Dropped for this reason.
    DroppedWith(DropReason),
    /// Not dropped.
    Passed,
    /// Forwarded in this direction.
    Forwarded(Direction),
}

impl OutcomeFilter {
    #[inline]
    pub(super) fn is_drop(self) -> bool {
        matches!(self, Self::Dropped | Self::DroppedWith(_))
    }
}

/// A packet after the pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessedPacket<'a> {
    pub verdict: Verdict,
    /// The direction that it was counted in.
    pub direction: Option<Direction>,
    pub interface: InterfaceId,
    /// The packet, or at least its headers, on arrival.
    pub before: &'a [u8],
    /// The packet as it was sent, if it was.
    pub after: Option<&'a [u8]>,
    /// The inner packet of `after`, if that was encapsulated.
    pub inner: Option<&'a [u8]>,
}

impl CaptureFilter {
    /// Whether a packet has an address in the filter's first prefix, if there is one.
    pub(super) fn may_match(&self, packet: &[u8]) -> bool {
        let has = |net: &IpNet| {
            PacketSummary::of(packet)
                .is_some_and(|packet| net.contains(&packet.source) || net.contains(&packet.destination))
        };
        self.nets.first().is_none_or(has)
    }

    pub(super) fn matches(&self, packet: &ProcessedPacket<'_>) -> bool {
        let outcome_matches = match self.outcome {
            OutcomeFilter::Any => true,
            OutcomeFilter::Dropped => matches!(packet.verdict, Verdict::Drop(_)),
            OutcomeFilter::DroppedWith(reason) => packet.verdict == Verdict::Drop(reason),
            OutcomeFilter::Passed => !matches!(packet.verdict, Verdict::Drop(_)),
            OutcomeFilter::Forwarded(direction) => packet.direction == Some(direction),
        };
        if !outcome_matches || self.interface.is_some_and(|interface| interface != packet.interface) {
            return false;
        }
        if self.nets.is_empty() && self.port.is_none() && self.protocol.is_none() {
            return true;
        }
        let views = [Some(packet.before), packet.after, packet.inner].map(|bytes| bytes.and_then(PacketSummary::of));
        let views = || views.iter().flatten();
        let has_address = |net: &IpNet| {
            let is_in = |address: IpAddr| net.contains(&address);
            views().any(|packet| is_in(packet.source) || is_in(packet.destination))
        };
        let has_port = |port: u16| views().any(|packet| packet.ports.is_some_and(|ports| ports.contains(&port)));
        self.nets.iter().all(has_address)
            && self.port.is_none_or(has_port)
            && self.protocol.is_none_or(|number| views().any(|packet| packet.protocol == number))
    }
}
