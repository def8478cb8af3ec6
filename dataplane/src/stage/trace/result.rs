//! Trace probes and results.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::flow::direction::Direction;
use crate::flow::ids::{InterfaceId, Owner, VipId, WorkerId};
use crate::flow::verdict::Verdict;
use crate::io::batch::Batch;
use crate::policy::Snapshot;
use crate::policy::network::NextHop;
use crate::ports::allocator::Availability;
use crate::session::query::SessionInfo;
use crate::stage::reject::RejectReply;

/// A packet to trace, and the memory for the result, which the sender of the command allocates.
#[derive(Debug)]
pub struct Probe {
    /// The packet, from its Ethernet header on.
    pub packet: Vec<u8>,
    /// Its ingress interface.
    pub interface: InterfaceId,
    /// The frame's mark (see `io/metadata.rs`): 0 on arrival; after a hand-off, as the previous worker has set it.
    pub mark: u16,
    /// Sessions of its endpoint that previous workers would have ended: they no longer count for the quota.
    pub ended_sessions: u32,
    /// A batch for the stages.
    pub batch: Box<Batch>,
    /// The result; `None` if no frame was free for the packet.
    pub result: Option<TraceResult>,
}

impl Probe {
    /// A packet as it arrives.
    pub fn new(packet: Vec<u8>, interface: InterfaceId) -> Self {
        Self { packet, interface, mark: 0, ended_sessions: 0, batch: Box::default(), result: None }
    }
}

/// What the pipeline would do with a packet.
#[derive(Clone, Debug)]
pub struct TraceResult {
    /// The snapshot in force.
    pub snapshot: Arc<Snapshot>,
    /// The worker that traced it.
    pub worker: WorkerId,
    /// The sides of its ingress interface: see [`crate::policy::spec::Role::sides`].
    pub sides: u8,
    /// The matching session and what would happen to it.
    pub session: Option<(SessionInfo, SessionOutcome)>,
    /// Sessions of its endpoint that it would have ended by then, on this worker and previous ones.
    pub ended_sessions: u32,
    /// Its class; `None` if it had a verdict before that.
    pub class: Option<PacketClass>,
    /// The VIP and ports of the egress session that would be opened.
    pub snat: Option<SnatChoice>,
    /// Whether the session that would be opened takes space from the reserve of the table, as its holder is below its
    /// fair share.
    pub uses_reserve: bool,
    /// Source and destination after translation; the port is 0 where one would be allocated.
    pub translated: Option<[SocketAddr; 2]>,
    pub next_hop: Option<NextHop>,
    /// The direction that it is counted in.
    pub direction: Direction,
    pub verdict: Verdict,
    /// The MTU of the next hop's link, where that decides the verdict.
    pub mtu: u16,
    /// The ICMP error or TCP reset that the sender receives, if the packet is dropped.
    pub reply: Option<RejectReply>,
}

/// What happens to the session that matches a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionOutcome {
    /// It is valid.
    Valid,
    /// Policy has changed, and still allows it.
    Revalidated,
    /// Policy no longer allows it: this packet would end it.
    Ended,
    /// A standby session whose shard has become this gateway's: this packet would make it active here.
    FailedOver,
    /// A standby session: another gateway has it, or none.
    Standby(Owner),
    /// Its shard has become another gateway's: this packet would make it a standby session.
    Demoted,
    /// It is closed, and the packet opens a new one.
    Reopened,
}

/// Class of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketClass {
    /// Belongs to a session.
    Session,
    /// From a pod; opens a session or reopens a quarantined one.
    Egress {
        /// Whether it reopens a quarantined session.
        reopens: bool,
    },
    /// From a client; opens a session.
    Inbound,
    /// To or from a Service, without a session: translated by policy only.
    StatelessReply,
    HealthCheck,
    /// Forwarded untranslated.
    Unchanged,
    /// Forwarded to its owner gateway.
    ForwardToOwner,
}

/// The VIP and ports that a new egress session would be allocated from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnatChoice {
    pub vip: VipId,
    /// Blocks of its ports that this gateway may use for the endpoint; `None` for all.
    pub blocks: Option<u32>,
    /// Those of these blocks that the worker has already claimed.
    pub owned: u32,
    /// Whether a port is available.
    pub availability: Availability,
}
