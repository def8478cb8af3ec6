//! Directions in which packets are forwarded, and sessions opened.

use crate::flow::address::Address;
use crate::flow::tuple::Tuple;

/// Direction of a forwarded packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Direction {
    /// From a pod, translated to its VIP.
    Egress,
    /// A reply to a pod.
    Reply,
    /// From a client to a Service.
    Inbound,
    /// A backend's reply to a client.
    ServiceReply,
    /// Forwarded untranslated: excluded by policy.
    Unchanged,
    /// Forwarded to the owner gateway.
    PeerOut,
    /// Received from another gateway.
    PeerIn,
}

impl Direction {
    /// Every direction, by number.
    pub const ALL: [Self; 7] =
        [Self::Egress, Self::Reply, Self::Inbound, Self::ServiceReply, Self::Unchanged, Self::PeerOut, Self::PeerIn];

    /// The direction with this number modulo 8; [`Self::Unchanged`] where there is none.
    #[inline]
    pub fn from_number(number: u8) -> Self {
        const TABLE: [Direction; 8] = {
            let mut table = [Direction::Unchanged; 8];
            let mut at = 0;
            while at < Direction::ALL.len() {
                table[at] = Direction::ALL[at];
                at += 1;
            }
            table
        };
        TABLE[usize::from(number % 8)]
    }

    /// Whether packets of a session in this direction go to the pod.
    pub fn goes_to_pod(self) -> bool {
        matches!(self, Self::Reply | Self::Inbound)
    }

    /// Whether packets with tuple `key` may be translated to `to` in this direction: only the address and the port of
    /// one end differ, the destination's toward the pod, the source's from it.
    pub fn translates<A: Address>(self, key: &Tuple<A>, to: &Tuple<A>) -> bool {
        key.protocol == to.protocol
            && if self.goes_to_pod() { key.source == to.source } else { key.destination == to.destination }
    }

    /// Its label in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Reply => "reply",
            Self::Inbound => "inbound",
            Self::ServiceReply => "service_reply",
            Self::Unchanged => "unchanged",
            Self::PeerOut => "peer_out",
            Self::PeerIn => "peer_in",
        }
    }
}
