//! Up to 64 packets on their way through the stages, as a structure of arrays: what a stage reads lies side by side.
//!
//! ```text
//!   frames     the packets themselves, with the interface that each came in on
//!   heads      what parse found: kind, offsets, lengths
//!   v4, v6     the tuple, in the array of its family; hashes beside it
//!   slots      the session of those that have one
//!   verdicts   how it ends: set once
//! ```
//! Which packets a stage is for is a set, one bit a packet: a stage costs nothing where its set is empty, which is so for
//! all rare ones in almost every batch.

mod lane;
mod packets;
mod requeued;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

pub use self::lane::{Lane, PlainParts};
pub use self::packets::{PacketNumbers, Packets};
pub use self::requeued::{Requeued, Turn};
use crate::address::V6;
use crate::counters::{Direction, DropReason};
use crate::io::{InterfaceId, Received};
use crate::session::entry::Slot;
use crate::session::key::Key;
use crate::session::tuple::Tuple;
use crate::snapshot::endpoints::EndpointId;
use crate::snapshot::members::GatewayId;
use crate::snapshot::overlay::NodeId;
use crate::snapshot::service::FrontendId;
use crate::snapshot::shares::Owner;
use crate::snapshot::tunnels::End;
use crate::verdict::Verdict;
use crate::wire::sctp::Common;
use crate::wire::tcp::Segment;

/// Packets in a batch.
pub const MOST: usize = 64;

/// Packets that wait for the next batch at most: a batch of them, and what a batch of first fragments can set free. They go before all
/// others, so there are never more.
pub const MOST_RELEASED: usize = 2048;

/// What a packet is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A protocol, or a kind of ICMP, that has no sessions.
    #[default]
    Other,
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
    /// SCTP; its header is in `Batch::associations`.
    Sctp,
    /// An ICMP error.
    Error,
    /// A fragment whose datagram's ports aren't known.
    Fragment,
    /// A fragment that isn't the first, with the ports of its datagram.
    Piece,
}

impl Kind {
    /// Whether it has ports, of which a Service can be known.
    #[inline]
    pub fn has_ports(self) -> bool {
        matches!(self, Self::Tcp | Self::Udp | Self::Sctp | Self::Piece)
    }

    /// Whether it can belong to a session.
    #[inline]
    pub fn has_session(self) -> bool {
        matches!(self, Self::Tcp | Self::Udp | Self::Sctp | Self::EchoRequest | Self::EchoReply | Self::Piece)
    }
}

/// What parse found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// TTL or hop limit as it came.
    pub ttl: u8,
    /// The sides of the interface that it came in on: see [`crate::snapshot::spec::Role::sides`].
    pub sides: u8,
    /// Where the payload of IP begins, from the start of the frame.
    pub l4: u16,
    /// Bytes of the IP packet.
    pub length: u16,
}

/// Up to 64 packets.
#[derive(Debug)]
pub struct Batch {
    /// The packets.
    pub frames: Vec<Received>,
    /// Packets that come around again: they are the first of the next batch.
    pub released: VecDeque<Received>,
    /// Packets of this batch, and those that waited for one of them, that go before all of these.
    pub requeued: Requeued,
    /// What parse found.
    pub heads: [Head; MOST],
    /// Tuples of IPv4 packets.
    pub v4: [Tuple<u32>; MOST],
    /// Tuples of IPv6 packets.
    pub v6: [Tuple<V6>; MOST],
    /// Keys of the tuples of IPv4 packets. A plain packet has only its key until the stages behind express want its tuple.
    pub keys_v4: [Key<u32>; MOST],
    /// The same of IPv6 packets.
    pub keys_v6: [Key<V6>; MOST],
    /// Hashes of the tuples.
    pub hashes: [u64; MOST],
    /// TCP segments.
    pub segments: [Segment; MOST],
    /// SCTP headers.
    pub associations: [Common; MOST],
    /// The session's slot of those that have one.
    pub slots: [Slot; MOST],
    /// The endpoint of those that may open a session.
    pub endpoints: [EndpointId; MOST],
    /// The frontend of those that are for a Service, or from one.
    pub frontends: [FrontendId; MOST],
    /// Where those go that go into a tunnel.
    pub travels: [Travel; MOST],
    /// Of those in `copies`: which gateway has the session by now.
    pub elsewhere: [Owner; MOST],
    /// For the counters.
    pub directions: [Direction; MOST],
    /// What those want that wait.
    pub wanted: [Wanted; MOST],
    /// What the next link carries, of those that are too big for it.
    pub mtus: [u16; MOST],
    /// Where those are kept that wait: parked, a place among fragments; requeued, one in `requeued`.
    pub places: [u32; MOST],
    /// How those that aren't open any more end.
    pub verdicts: [Verdict; MOST],
    /// Those whose way hasn't ended yet.
    pub open: Packets,
    /// IPv4 and IPv6 packets.
    pub families: [Packets; 2],
    /// Those that are as almost all are: see [`crate::wire::plain`].
    pub plain: Packets,
    /// Questions for link addresses.
    pub questions: Packets,
    /// Those that have no session of their own.
    pub sessionless: Packets,
    /// Fragments.
    pub fragments: Packets,
    /// ICMP errors.
    pub errors: Packets,
    /// Those that were dropped, and whose sender may hear of it.
    pub refused: Packets,
    /// Those that the next link doesn't carry whole, and that may be cut.
    pub cut: Packets,
    /// Those whose identification must be a new one where pods share an address: fragments, and whole ones that may become
    /// fragments.
    pub renumber: Packets,
    /// Those with a session that was checked against the policy in force.
    pub known: Packets,
    /// Those with a session that was checked against an older policy.
    pub stale: Packets,
    /// A pod's first packets to the outside.
    pub opening: Packets,
    /// A client's first packets to a Service.
    pub inbound: Packets,
    /// Backends' answers that no session knows.
    pub stateless: Packets,
    /// Segments of health checks.
    pub health: Packets,
    /// Those of a session that this gateway has a copy of.
    pub copies: Packets,
    /// Those that go into a tunnel.
    pub travelling: Packets,
    /// Those that policy leaves as they are.
    pub unchanged: Packets,
    /// Those whose session counts as ended already: only of a packet that is looked at, see [`crate::explain`].
    pub ended: Packets,
    /// Whether many sessions of the batch before were checked against an older policy.
    pub restless: bool,
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            frames: Vec::with_capacity(MOST),
            released: VecDeque::with_capacity(MOST_RELEASED),
            requeued: Requeued::default(),
            heads: [Head::default(); MOST],
            v4: [Tuple::default(); MOST],
            v6: [Tuple::default(); MOST],
            keys_v4: [Key::default(); MOST],
            keys_v6: [Key::default(); MOST],
            hashes: [0; MOST],
            segments: [Segment::default(); MOST],
            associations: [Common::default(); MOST],
            slots: [Slot(0); MOST],
            endpoints: [EndpointId::NONE; MOST],
            frontends: [FrontendId::NONE; MOST],
            travels: [Travel { to: End::Gateway(GatewayId(0)), leg: 0 }; MOST],
            elsewhere: [Owner::This; MOST],
            directions: [Direction::Unchanged; MOST],
            wanted: [Wanted { interface: InterfaceId(0), address: IpAddr::V4(Ipv4Addr::UNSPECIFIED) }; MOST],
            mtus: [0; MOST],
            places: [0; MOST],
            verdicts: [Verdict::Undecided; MOST],
            open: Packets::default(),
            families: [Packets::default(); 2],
            plain: Packets::default(),
            questions: Packets::default(),
            sessionless: Packets::default(),
            fragments: Packets::default(),
            errors: Packets::default(),
            refused: Packets::default(),
            cut: Packets::default(),
            renumber: Packets::default(),
            known: Packets::default(),
            stale: Packets::default(),
            opening: Packets::default(),
            inbound: Packets::default(),
            stateless: Packets::default(),
            health: Packets::default(),
            copies: Packets::default(),
            travelling: Packets::default(),
            unchanged: Packets::default(),
            ended: Packets::default(),
            restless: false,
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

    /// Forgets what was found about earlier packets.
    #[inline]
    pub fn begin(&mut self) {
        let none = Packets::default();
        self.open = Packets::first(self.len());
        self.families = [none; 2];
        (self.questions, self.fragments, self.errors, self.refused) = (none, none, none, none);
        (self.plain, self.cut, self.renumber, self.sessionless) = (none, none, none, none);
        (self.known, self.stale, self.opening, self.unchanged) = (none, none, none, none);
        (self.inbound, self.stateless, self.health) = (none, none, none);
        (self.copies, self.travelling) = (none, none);
        if cfg!(debug_assertions) {
            self.verdicts = [Verdict::Undecided; MOST];
        }
    }

    /// Ends a packet's way.
    #[inline]
    pub fn decide(&mut self, i: usize, verdict: Verdict) {
        debug_assert!(self.open.contains(i), "a verdict is set once");
        self.open.remove(i);
        self.verdicts[i] = verdict;
    }

    /// Ends the ways of packets whose verdicts are written already.
    #[inline]
    pub fn close(&mut self, packets: Packets) {
        debug_assert_eq!(packets.without(self.open), Packets::default(), "a verdict is set once");
        self.open = self.open.without(packets);
    }

    /// Has a packet taken in again by the next batch, in the order of this one.
    #[cold]
    pub fn requeue(&mut self, i: usize) {
        self.requeue_at(i, Turn::of(i));
    }

    /// The same for one that has waited for packet `first`, and comes right behind it. Its verdict may have been to be parked.
    #[cold]
    pub fn requeue_behind(&mut self, i: usize, first: usize) {
        self.requeue_at(i, Turn::behind(first));
    }

    fn requeue_at(&mut self, i: usize, turn: Turn) {
        self.open.remove(i);
        self.verdicts[i] = Verdict::Requeue;
        self.places[i] = self.requeued.push(turn, None);
    }

    /// Drops all of them.
    pub fn drop_all(&mut self, reason: DropReason) {
        for i in self.open {
            self.decide(i, Verdict::Drop(reason));
        }
    }

    /// Drops a packet whose sender may hear of it. Nothing has been written to it yet.
    #[cold]
    pub fn refuse(&mut self, i: usize, reason: DropReason) {
        self.refused.insert(i);
        self.decide(i, Verdict::Drop(reason));
    }

    /// Sends a packet to another gateway. On its last leg it is deferred instead: this gateway may be the owner, and not have the view yet
    /// by which it is.
    pub fn send_to(&mut self, i: usize, to: GatewayId) {
        let received = &self.frames[i];
        if received.is_at_last() {
            return self.decide(i, Verdict::Defer(DropReason::NoOwner));
        }
        self.travels[i] = Travel { to: End::Gateway(to), leg: received.leg() + 1 };
        self.travelling.insert(i);
    }

    /// Sends a packet into the tunnel to a node of the overlay network. It is written as it leaves.
    pub fn send_to_node(&mut self, i: usize, node: NodeId) {
        self.travels[i] = Travel { to: End::Node(node), leg: 0 };
        self.travelling.insert(i);
    }

    /// The open packets of a family.
    #[inline]
    pub fn open_of<A: Lane>(&self) -> Packets {
        self.open.and(self.families[A::FAMILY])
    }

    /// The open packets of a family with a session.
    #[inline]
    pub fn known_of<A: Lane>(&self) -> Packets {
        self.open_of::<A>().and(self.known)
    }
}

/// A packet's way through a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Travel {
    /// Where that leads.
    pub to: End,
    /// How often it has gone from gateway to gateway then: see [`LAST_LEG`](crate::snapshot::tunnels::LAST_LEG).
    pub leg: u8,
}

/// Where a packet that can't be sent yet wants to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The interface.
    pub interface: InterfaceId,
    /// The neighbour whose link address is missing.
    pub address: IpAddr,
}
