//! A batch of up to 64 packets in the pipeline, as a structure of arrays: what one stage reads is contiguous in memory.
//!
//! ```text
//!   frames     the packets, each with its ingress interface
//!   headers    parsed headers: kind, offsets, lengths
//!   tuples_*   tuples, one array per address family; hashes beside them
//!   slots      session table slots of packets that match a session
//!   verdicts   set once per packet
//! ```
//! The packets of a stage form a bit set. A stage with an empty set costs nothing, and in almost every batch the sets
//! of rare packets are empty.

mod family;
mod packets;
mod requeued;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

pub use self::family::{BatchFamily, FastPathArrays};
pub use self::packets::{PacketIndices, PacketSet};
pub use self::requeued::{QueuePosition, Requeued};
use crate::flow::address::V6;
use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{EndpointId, FrontendId, GatewayId, HomeGroup, InterfaceId, NodeId, Owner, Slot, TunnelRemote};
use crate::flow::key::Key;
use crate::flow::tunnel_metadata::TunnelMetadata;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::Received;
use crate::wire::sctp::CommonHeader;
use crate::wire::tcp::Segment;

/// Packets in a batch.
pub const BATCH_SIZE: usize = 64;

/// Reinjected packets at most: one batch, plus the fragments that a batch of first fragments can release. They precede
/// all others in the next batch, so there are never more.
pub const MAX_REINJECTED: usize = 2048;

/// Kind of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum PacketKind {
    /// A protocol, or an ICMP type, without sessions.
    #[default]
    Other,
    Arp,
    NeighborDiscovery,
    /// TCP; its segment is in `Batch::segments`.
    Tcp,
    Udp,
    /// ICMP echo request.
    EchoRequest,
    /// ICMP echo reply.
    EchoReply,
    /// SCTP; its header is in `Batch::associations`.
    Sctp,
    IcmpError,
    /// A fragment whose ports are not known yet.
    Fragment,
    /// A non-first fragment with the ports of its first fragment.
    ResolvedFragment,
}

impl PacketKind {
    /// Whether it has ports that a Service can be selected by.
    #[inline]
    pub fn has_ports(self) -> bool {
        matches!(self, Self::Tcp | Self::Udp | Self::Sctp | Self::ResolvedFragment)
    }

    /// Whether it can belong to a session.
    #[inline]
    pub fn has_session(self) -> bool {
        matches!(
            self,
            Self::Tcp | Self::Udp | Self::Sctp | Self::EchoRequest | Self::EchoReply | Self::ResolvedFragment
        )
    }
}

/// Parsed headers of a packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct ParsedHeader {
    /// Kind of the packet.
    pub kind: PacketKind,
    /// TTL or hop limit on arrival.
    pub ttl: u8,
    /// The sides of its ingress interface: see [`crate::policy::spec::Role::sides`].
    pub sides: u8,
    /// Offset of the IP payload from the start of the frame, bytes.
    pub l4_offset: u16,
    /// Length of the IP packet, bytes.
    pub ip_length: u16,
}

/// A batch of up to 64 packets.
#[derive(Debug)]
pub struct Batch {
    /// The packets.
    pub frames: Vec<Received>,
    /// Packets that are processed again; they come first in the next batch.
    pub reinjected: VecDeque<Received>,
    /// Packets of this batch, and fragments that waited for one of them, that precede all in `reinjected`.
    pub requeued: Requeued,
    pub headers: [ParsedHeader; BATCH_SIZE],
    /// Tuples of IPv4 packets.
    pub tuples_v4: [Tuple<u32>; BATCH_SIZE],
    /// Tuples of IPv6 packets.
    pub tuples_v6: [Tuple<V6>; BATCH_SIZE],
    /// Keys of the tuples of IPv4 packets. A plain packet has only its key until a stage after the fast path needs its
    /// tuple.
    pub keys_v4: [Key<u32>; BATCH_SIZE],
    /// Keys of the tuples of IPv6 packets.
    pub keys_v6: [Key<V6>; BATCH_SIZE],
    /// Hashes of the keys.
    pub hashes: [u64; BATCH_SIZE],
    /// Home groups of the hashes in the session table.
    pub homes: [HomeGroup; BATCH_SIZE],
    /// TCP segments.
    pub segments: [Segment; BATCH_SIZE],
    pub sctp_headers: [CommonHeader; BATCH_SIZE],
    /// Session table slot, for packets with a session.
    pub slots: [Slot; BATCH_SIZE],
    /// Endpoint, for packets that may open an egress session.
    pub endpoints: [EndpointId; BATCH_SIZE],
    /// Frontend, for packets to or from a Service.
    pub frontends: [FrontendId; BATCH_SIZE],
    /// Tunnel destination, for packets in `tunneled` and `tunnel_echoes`.
    pub tunnel_destinations: [TunnelDestination; BATCH_SIZE],
    /// Current owner of the session, for packets in `standby`.
    pub session_owners: [Owner; BATCH_SIZE],
    /// Direction for the counters.
    pub directions: [Direction; BATCH_SIZE],
    /// Neighbor to resolve, for packets that wait for one.
    pub neighbors: [NeighborKey; BATCH_SIZE],
    /// MTU of the next hop's link, for packets longer than that.
    pub mtus: [u16; BATCH_SIZE],
    /// Position in the queue of a waiting packet: in the reassembly buffer, or in `requeued`.
    pub queue_positions: [u32; BATCH_SIZE],
    /// Verdicts of the packets that are not undecided any more.
    pub verdicts: [Verdict; BATCH_SIZE],
    /// Packets without a verdict.
    pub undecided: PacketSet,
    /// Packets by family: IPv4, IPv6.
    pub families: [PacketSet; 2],
    /// Plain packets, candidates for the fast path: see [`crate::wire::fast_parse`].
    pub plain: PacketSet,
    /// ARP and neighbor discovery packets.
    pub arp_nd: PacketSet,
    /// Packets that have no session of their own.
    pub sessionless: PacketSet,
    pub fragments: PacketSet,
    pub icmp_errors: PacketSet,
    /// Dropped packets whose sender may receive an ICMP error or a TCP reset.
    pub rejected: PacketSet,
    /// Packets longer than the MTU of the next hop's link that may be fragmented.
    pub to_fragment: PacketSet,
    /// Packets that need a new IP identification where pods share an address: fragments, and packets that may be
    /// fragmented later.
    pub new_ip_id: PacketSet,
    /// Packets of sessions validated against the policy in force.
    pub validated: PacketSet,
    /// Packets of sessions validated against an older policy.
    pub stale: PacketSet,
    /// Packets from pods that may open an egress session.
    pub new_egress: PacketSet,
    /// Packets from clients that may open an inbound session.
    pub new_inbound: PacketSet,
    /// Replies of backends without a matching session.
    pub stateless_replies: PacketSet,
    /// Segments of health checks.
    pub health_checks: PacketSet,
    /// Echoes of nodes in their tunnels, which are still encapsulated; their nodes are in `tunnel_destinations`.
    pub tunnel_echoes: PacketSet,
    /// Packets of standby sessions.
    pub standby: PacketSet,
    /// Packets to be encapsulated.
    pub tunneled: PacketSet,
    /// Packets that policy forwards untranslated.
    pub unchanged: PacketSet,
    /// Whether many sessions of the previous batch were stale.
    pub expects_stale: bool,
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            frames: Vec::with_capacity(BATCH_SIZE),
            reinjected: VecDeque::with_capacity(MAX_REINJECTED),
            requeued: Requeued::default(),
            headers: [ParsedHeader::default(); BATCH_SIZE],
            tuples_v4: [Tuple::default(); BATCH_SIZE],
            tuples_v6: [Tuple::default(); BATCH_SIZE],
            keys_v4: [Key::default(); BATCH_SIZE],
            keys_v6: [Key::default(); BATCH_SIZE],
            hashes: [0; BATCH_SIZE],
            homes: [HomeGroup::default(); BATCH_SIZE],
            segments: [Segment::default(); BATCH_SIZE],
            sctp_headers: [CommonHeader::default(); BATCH_SIZE],
            slots: [Slot(0); BATCH_SIZE],
            endpoints: [EndpointId::NONE; BATCH_SIZE],
            frontends: [FrontendId::NONE; BATCH_SIZE],
            tunnel_destinations: [TunnelDestination {
                remote: TunnelRemote::Gateway(GatewayId(0)),
                hop_count: 0,
                requests_port: false,
            }; BATCH_SIZE],
            session_owners: [Owner::This; BATCH_SIZE],
            directions: [Direction::Unchanged; BATCH_SIZE],
            neighbors: [NeighborKey { interface: InterfaceId(0), address: IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
                BATCH_SIZE],
            mtus: [0; BATCH_SIZE],
            queue_positions: [0; BATCH_SIZE],
            verdicts: [Verdict::Undecided; BATCH_SIZE],
            undecided: PacketSet::default(),
            families: [PacketSet::default(); 2],
            plain: PacketSet::default(),
            arp_nd: PacketSet::default(),
            sessionless: PacketSet::default(),
            fragments: PacketSet::default(),
            icmp_errors: PacketSet::default(),
            rejected: PacketSet::default(),
            to_fragment: PacketSet::default(),
            new_ip_id: PacketSet::default(),
            validated: PacketSet::default(),
            stale: PacketSet::default(),
            new_egress: PacketSet::default(),
            new_inbound: PacketSet::default(),
            stateless_replies: PacketSet::default(),
            health_checks: PacketSet::default(),
            tunnel_echoes: PacketSet::default(),
            standby: PacketSet::default(),
            tunneled: PacketSet::default(),
            unchanged: PacketSet::default(),
            expects_stale: false,
        }
    }
}

impl Batch {
    /// Number of packets.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len().min(BATCH_SIZE)
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Clears the results of the previous batch.
    #[inline]
    pub fn begin(&mut self) {
        let empty = PacketSet::default();
        self.undecided = PacketSet::first(self.len());
        self.families = [empty; 2];
        (self.arp_nd, self.fragments, self.icmp_errors, self.rejected) = (empty, empty, empty, empty);
        (self.plain, self.to_fragment, self.new_ip_id, self.sessionless) = (empty, empty, empty, empty);
        (self.validated, self.stale, self.new_egress, self.unchanged) = (empty, empty, empty, empty);
        (self.new_inbound, self.stateless_replies, self.health_checks) = (empty, empty, empty);
        (self.standby, self.tunneled, self.tunnel_echoes) = (empty, empty, empty);
        if cfg!(debug_assertions) {
            self.verdicts = [Verdict::Undecided; BATCH_SIZE];
        }
    }

    /// Sets the verdict of a packet.
    #[inline]
    pub fn decide(&mut self, i: usize, verdict: Verdict) {
        debug_assert!(self.undecided.contains(i), "a packet has one verdict");
        self.undecided.remove(i);
        self.verdicts[i] = verdict;
    }

    /// Marks packets whose verdicts are already written as decided.
    #[inline]
    pub fn mark_decided(&mut self, packets: PacketSet) {
        debug_assert_eq!(packets.without(self.undecided), PacketSet::default(), "a packet has one verdict");
        self.undecided = self.undecided.without(packets);
    }

    /// Requeues a packet for the next batch, in the order of this one.
    #[cold]
    pub fn requeue(&mut self, i: usize) {
        self.requeue_at(i, QueuePosition::of(i));
    }

    /// Requeues a packet right after packet `first`, which it waited for; it may already have the verdict to wait.
    #[cold]
    pub fn requeue_after(&mut self, i: usize, first: usize) {
        self.requeue_at(i, QueuePosition::after(first));
    }

    fn requeue_at(&mut self, i: usize, position: QueuePosition) {
        self.undecided.remove(i);
        self.verdicts[i] = Verdict::Requeue;
        self.queue_positions[i] = self.requeued.push(position, None);
    }

    /// Drops all undecided packets.
    pub fn drop_all(&mut self, reason: DropReason) {
        for i in self.undecided {
            self.decide(i, Verdict::Drop(reason));
        }
    }

    /// Drops a packet whose sender may receive an ICMP error or a TCP reset. The packet must still be unmodified.
    #[cold]
    pub fn reject(&mut self, i: usize, reason: DropReason) {
        self.rejected.insert(i);
        self.decide(i, Verdict::Drop(reason));
    }

    /// Forwards a packet to another gateway. At the hop limit it is deferred instead: this gateway may be the owner
    /// without having the membership view that makes it the owner.
    pub fn forward_to_gateway(&mut self, i: usize, to: GatewayId) {
        let received = &self.frames[i];
        if received.is_at_hop_limit() {
            return self.decide(i, Verdict::Defer(DropReason::NoOwner));
        }
        self.tunnel_destinations[i] = TunnelDestination {
            remote: TunnelRemote::Gateway(to),
            hop_count: received.hop_count() + 1,
            requests_port: received.requests_port(),
        };
        self.tunneled.insert(i);
    }

    /// Encapsulates a packet for a node of the overlay network; done when it leaves.
    pub fn forward_to_node(&mut self, i: usize, node: NodeId) {
        self.tunnel_destinations[i] = TunnelDestination::node(node);
        self.tunneled.insert(i);
    }

    /// Marks a packet as an echo of this node, in its tunnel.
    #[cold]
    pub fn mark_tunnel_echo(&mut self, i: usize, node: NodeId) {
        self.tunnel_destinations[i] = TunnelDestination::node(node);
        self.tunnel_echoes.insert(i);
    }

    /// The undecided packets of a family.
    #[inline]
    pub fn undecided_of<A: BatchFamily>(&self) -> PacketSet {
        self.undecided.and(self.families[A::INDEX])
    }

    /// The undecided packets of a family with a validated session.
    #[inline]
    pub fn validated_of<A: BatchFamily>(&self) -> PacketSet {
        self.undecided_of::<A>().and(self.validated)
    }
}

/// Tunnel destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelDestination {
    /// The other end of the tunnel.
    pub remote: TunnelRemote,
    /// Gateway-to-gateway hops of the packet, this one included.
    pub hop_count: u8,
    /// Whether the gateway of its endpoint has no port for it.
    pub requests_port: bool,
}

impl TunnelDestination {
    fn node(node: NodeId) -> Self {
        Self { remote: TunnelRemote::Node(node), hop_count: 0, requests_port: false }
    }

    /// The metadata of a packet between gateways, which was received on these sides.
    #[inline]
    pub fn metadata(self, sides: u8) -> TunnelMetadata {
        TunnelMetadata { sides, hop_count: self.hop_count, requests_port: self.requests_port }
    }
}

/// A neighbor to resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NeighborKey {
    /// The interface that it is reached by.
    pub interface: InterfaceId,
    pub address: IpAddr,
}
