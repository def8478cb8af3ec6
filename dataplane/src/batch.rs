//! Up to 64 packets on their way through the stages, as a structure of arrays: what a stage reads lies side by side.
//!
//! ```text
//!   frames    the packets themselves, with the interface that each came in on
//!   heads     what parse found: kind, offsets, lengths
//!   v4, v6    the tuple, in the array of its family; hashes beside it
//!   ways      what lookup, recheck, classify and open make of it: a session, or no translation
//!   hops      where it goes next
//!   verdicts  how it ends: set once
//! ```

use std::net::IpAddr;

use crate::address::V6;
use crate::counters::Direction;
use crate::io::{InterfaceId, Received};
use crate::session::entry::Slot;
use crate::session::tuple::Tuple;
use crate::snapshot::network::NextHop;
use crate::snapshot::policy::EndpointId;
use crate::verdict::Verdict;
use crate::wire::tcp::Segment;

/// Packets in a batch.
pub const MOST: usize = 64;

/// What a packet is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Not read yet.
    #[default]
    Unread,
    /// ARP.
    Arp,
    /// Neighbour discovery.
    Neighbour,
    /// TCP; its segment is in `Batch::segments`.
    Tcp,
    /// UDP.
    Udp,
    /// A question of ICMP echo.
    EchoRequest,
    /// An answer of ICMP echo.
    EchoReply,
    /// A fragment.
    Fragment,
    /// A protocol, or a kind of ICMP, that has no sessions.
    Other,
}

impl Kind {
    /// Whether it can belong to a session.
    pub fn has_session(self) -> bool {
        matches!(self, Self::Tcp | Self::Udp | Self::EchoRequest | Self::EchoReply)
    }
}

/// The family of a packet, which says where its tuple is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IpVersion {
    /// Not IP.
    #[default]
    Neither,
    /// In `Batch::v4`.
    V4,
    /// In `Batch::v6`.
    V6,
}

/// What parse found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// Its family.
    pub version: IpVersion,
    /// TTL or hop limit as it came.
    pub ttl: u8,
    /// Where the payload of IP begins, from the start of the frame.
    pub l4: u16,
    /// Bytes of the IP packet.
    pub length: u16,
    /// Another worker handed it over: it isn't handed on again.
    pub handed_over: bool,
}

/// What the stages make of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// No session knows it.
    #[default]
    Unknown,
    /// A session that was checked against the policy in force.
    Session(Slot),
    /// A session that was checked against an older policy.
    Stale(Slot),
    /// A pod's first packet to the outside.
    Egress(EndpointId),
    /// Policy leaves it as it is.
    Unchanged,
}

/// Up to 64 packets.
#[derive(Debug)]
pub struct Batch {
    /// The packets.
    pub frames: Vec<Received>,
    /// What parse found.
    pub heads: [Head; MOST],
    /// Tuples of IPv4 packets.
    pub v4: [Tuple<u32>; MOST],
    /// Tuples of IPv6 packets.
    pub v6: [Tuple<V6>; MOST],
    /// Hashes of the tuples.
    pub hashes: [u64; MOST],
    /// TCP segments.
    pub segments: [Segment; MOST],
    /// What becomes of them.
    pub ways: [Way; MOST],
    /// For the counters.
    pub directions: [Direction; MOST],
    /// Where they go next.
    pub hops: [Option<NextHop>; MOST],
    /// How they end.
    pub verdicts: [Verdict; MOST],
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            frames: Vec::with_capacity(MOST),
            heads: [Head::default(); MOST],
            v4: [Tuple::default(); MOST],
            v6: [Tuple::default(); MOST],
            hashes: [0; MOST],
            segments: [Segment::default(); MOST],
            ways: [Way::Unknown; MOST],
            directions: [Direction::Unchanged; MOST],
            hops: [None; MOST],
            verdicts: [Verdict::Undecided; MOST],
        }
    }
}

impl Batch {
    /// Packets in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len().min(MOST)
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Forgets what was found about earlier packets; the first `handed_over` ones come from other workers.
    #[inline]
    pub fn begin(&mut self, handed_over: usize) {
        let count = self.len();
        for i in 0..count {
            self.heads[i] = Head { handed_over: i < handed_over, ..Head::default() };
            self.ways[i] = Way::Unknown;
            self.directions[i] = Direction::Unchanged;
            self.hops[i] = None;
            self.verdicts[i] = Verdict::Undecided;
        }
    }

    /// Ends a packet's way.
    #[inline]
    pub fn decide(&mut self, i: usize, verdict: Verdict) {
        debug_assert_eq!(self.verdicts[i], Verdict::Undecided, "a verdict is set once");
        self.verdicts[i] = verdict;
    }

    /// Whether a packet's way hasn't ended yet.
    #[inline]
    pub fn is_open(&self, i: usize) -> bool {
        self.verdicts[i] == Verdict::Undecided
    }

    /// The numbers of the packets whose way hasn't ended yet.
    #[inline]
    pub fn open_packets(&self) -> impl Iterator<Item = usize> + use<> {
        let open = (0..self.len()).fold(0_u64, |bits, i| bits | u64::from(self.is_open(i)) << i);
        Bits(open)
    }
}

/// The numbers of the bits that are set, ascending.
struct Bits(u64);

impl Iterator for Bits {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let first = (self.0 != 0).then(|| self.0.trailing_zeros() as usize)?;
        self.0 &= self.0 - 1;
        Some(first)
    }
}

/// Where a packet that can't be sent yet wants to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The interface.
    pub interface: InterfaceId,
    /// The neighbour whose link address is missing.
    pub address: IpAddr,
}
