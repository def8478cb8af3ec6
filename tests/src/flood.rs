//! Floods, as benchmark and soak send them: packets of invented ends out of a packet socket, at a rate.

mod packets;
mod source;

use std::fmt;
use std::str::FromStr;

pub use packets::{Ip, Random, Target, Writer};
pub use source::send;

/// What somebody is flooded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// SYNs of invented clients to a Service's port.
    Syn,
    /// The same, and an ACK of any number once a backend may have answered: a blind handshake.
    SynAck,
    /// Datagrams of invented clients: two to a Service's port, two to random ports.
    Udp,
    /// First and last fragments of datagrams that never become whole.
    Fragments,
    /// ICMP errors that quote invented packets of the VIP.
    IcmpErrors,
    /// ARP requests, or neighbour solicitations, for the VIP.
    Neighbors,
    /// From inside: one pod opens flows of UDP to random addresses and ports.
    Pod,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Syn, Self::SynAck, Self::Udp, Self::Fragments, Self::IcmpErrors, Self::Neighbors, Self::Pod];

    /// Its word in reports and options.
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

    /// Whether it comes from the pods' side.
    pub fn is_inside(self) -> bool {
        self == Self::Pod
    }

    /// Whether the attack needs backends that answer.
    pub fn needs_backends(self) -> bool {
        self == Self::SynAck
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| format!("none of {}", names()))
    }
}
