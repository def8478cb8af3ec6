//! Packet floods for the soak, sent from a packet socket at a rate.

mod packets;
mod source;

use std::fmt;

pub use packets::{FloodTarget, Ip, PacketWriter, Random};
pub use source::send;
pub(crate) use source::{flush, open};

/// Kind of a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloodKind {
    /// SYNs from random clients to a Service's port.
    Syn,
    /// The same, followed by an ACK with a random acknowledgment number once a backend may have replied: a blind
    /// handshake.
    SynAck,
    /// Datagrams from random clients: two to a Service's port, two to random ports.
    Udp,
    /// First and last fragments of datagrams that are never completed.
    Fragments,
    /// ICMP errors that quote nonexistent packets of the VIP.
    IcmpErrors,
    /// ARP requests or neighbor solicitations for the VIP.
    Neighbors,
    /// From inside: one pod opens UDP flows to random addresses and ports.
    Pod,
}

impl FloodKind {
    /// All kinds.
    pub const ALL: [Self; 7] =
        [Self::Syn, Self::SynAck, Self::Udp, Self::Fragments, Self::IcmpErrors, Self::Neighbors, Self::Pod];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Syn => "syn",
            Self::SynAck => "syn-ack",
            Self::Udp => "udp",
            Self::Fragments => "fragments",
            Self::IcmpErrors => "icmp-errors",
            Self::Neighbors => "neighbors",
            Self::Pod => "pod",
        }
    }

    /// Whether it is sent from the pods' side.
    pub fn is_inside(self) -> bool {
        self == Self::Pod
    }
}

impl fmt::Display for FloodKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
