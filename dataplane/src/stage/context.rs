//! What the stages of one worker share: the tables that they modify, and what they read during one batch.

use crate::flow::time::Tick;
use crate::flow::tuple::HashKey;
use crate::io::batch::BatchFamily;
use crate::observe::Observer;
use crate::observe::counters::Counters;
use crate::policy::Snapshot;
use crate::ports::allocator::Allocator;
use crate::reassembly::VirtualReassembly;
use crate::replication::queue::ReplicationQueue;
use crate::session::affinity::AffinityTable;
use crate::session::embryonic::Embryonic;
use crate::session::eviction::Eviction;
use crate::session::{SessionFamily, Sessions};
use crate::stage::flow_owner::FlowOwners;
use crate::stage::reply_limiter::ReplyLimiter;
use crate::wire::ip_id::IpIdAllocator;

/// An address family of packets that have sessions.
pub trait PacketFamily: BatchFamily + SessionFamily {}

impl<A: BatchFamily + SessionFamily> PacketFamily for A {}

/// The tables of one worker that the stages modify.
#[derive(Debug)]
pub struct Tables {
    pub sessions: Sessions,
    /// Embryonic inbound sessions.
    pub embryonic: Embryonic,
    /// Evicts sessions from a full table.
    pub eviction: Eviction,
    /// SNAT ports.
    pub ports: Allocator,
    /// Virtual reassembly of fragmented datagrams.
    pub reassembly: VirtualReassembly,
    /// IP identifications.
    pub ip_ids: IpIdAllocator,
    /// Rate limit of ICMP errors, resets and replies to health checks.
    pub reply_limiter: ReplyLimiter,
    /// Records of its sessions for other gateways.
    pub replication_queue: ReplicationQueue,
    /// Drop statistics, session log and capture.
    pub observer: Observer,
}

/// What the stages read during one batch.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The policy and network in force.
    pub snapshot: &'a Snapshot,
    /// Conditions for opening a session.
    pub rules: SessionRules,
    /// The owner worker of each flow.
    pub flows: FlowOwners<'a>,
    /// Session affinity of clients to backends.
    pub affinity: &'a AffinityTable,
    /// The worker's counters.
    pub counters: &'a Counters,
    /// Whether this gateway's lease has expired.
    pub lease_expired: bool,
    /// The current time.
    pub now: Tick,
}

/// Configuration of session setup and of rejects.
#[derive(Clone, Copy, Debug)]
pub struct SessionRules {
    /// Only a SYN opens a TCP session.
    pub require_syn: bool,
    /// Key of the initial sequence numbers in health check replies; the same for all workers.
    pub cookie_key: HashKey,
    /// Reject packets to a VIP without a Service there: TCP reset or ICMP port unreachable.
    pub reject_no_service: bool,
    /// Reject packets to a Service without a backend.
    pub reject_no_backend: bool,
    /// MSS clamp for IPv4 SYNs; for IPv6 it is 20 bytes smaller. `None`: no clamping.
    pub mss_clamp: Option<u16>,
}
