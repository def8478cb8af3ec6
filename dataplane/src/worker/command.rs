//! Commands from control to a worker, run between two batches, and the chunks that carry their results.
//!
//! A worker's state is its own, so commands come to it as messages, and one message costs it a bounded amount of work:
//! large results are read in slices. The sender allocates the memory for the result.

use std::net::IpAddr;
use std::sync::Arc;

use crossbeam::channel::Sender;

use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{GatewayId, VipId};
use crate::flow::time::Tick;
use crate::observe::capture::Capture;
use crate::observe::drops::{DropExample, DropRecord};
use crate::observe::session_log::SessionEventQueue;
use crate::replication::round::{PurgeChunk, RecordChunk};
use crate::session::query::{SessionFilter, SessionInfo};
use crate::session::record::ReplicationRecord;
use crate::stage::trace::Probe;

/// A command to one worker.
#[derive(Debug)]
pub enum Command {
    /// Write matching sessions into the chunk and return it.
    Sessions {
        /// The filter, the cursor and the result.
        chunk: SessionChunk,
        /// Where the chunk is returned.
        reply: Sender<SessionChunk>,
    },
    /// End matching sessions.
    Flush {
        /// The filter and the cursor.
        chunk: FlushChunk,
        /// Where the chunk is returned.
        reply: Sender<FlushChunk>,
    },
    /// Write records of the sessions that a gateway is a replica target of into the chunk and return it.
    ListRecords {
        /// The gateway, the cursor and the result.
        chunk: RecordChunk,
        /// Where the chunk is returned.
        reply: Sender<RecordChunk>,
    },
    /// Apply records of another gateway's sessions: open or ended ones.
    ApplyRecords {
        /// The records. At most `MAX_RECORDS_APPLIED`.
        records: Vec<ReplicationRecord>,
        /// The full replication round that they belong to, modulo 16.
        round: u8,
        /// The gateway that sent them.
        source: GatewayId,
        /// Receives the records that found no space, once all are applied.
        reply: Sender<Vec<ReplicationRecord>>,
    },
    /// Remove standby sessions of shards that a gateway owns and that its last full round did not contain.
    PurgeStandby {
        /// The gateway, its round and the cursor.
        chunk: PurgeChunk,
        /// Where the chunk is returned.
        reply: Sender<PurgeChunk>,
    },
    /// Trace a packet: report what the pipeline would do with it.
    Trace {
        /// The packet and the result.
        probe: Box<Probe>,
        /// Where the probe is returned.
        reply: Sender<Box<Probe>>,
    },
    /// Write the drop statistics into the chunk and return it.
    Drops {
        /// The result.
        chunk: Box<DropChunk>,
        /// Where the chunk is returned.
        reply: Sender<Box<DropChunk>>,
    },
    /// Count the port blocks of VIPs in use, write the counts into the chunk and return it.
    Ports {
        /// The cursor and the result.
        chunk: PortChunk,
        /// Where the chunk is returned.
        reply: Sender<PortChunk>,
    },
    /// Start a capture, or stop it.
    Capture(Option<Box<Capture>>),
    /// Log opened and ended sessions to this queue, or stop logging.
    LogSessions(Option<Arc<SessionEventQueue>>),
    /// Announce these VIPs on the outside interfaces: gratuitous ARP, unsolicited neighbor advertisement.
    Announce(Vec<IpAddr>),
    /// Announce this VIP once to defend it against another host that claims it (RFC 5227 section 2.4).
    Defend(IpAddr),
}

/// One slice of a session listing. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct SessionChunk {
    pub filter: SessionFilter,
    /// Where to continue; starts as `Some(0)`, `None` at the end of the table.
    pub cursor: Option<u64>,
    /// The result; the worker fills it up to its capacity and never grows it.
    pub records: Vec<SessionInfo>,
}

/// One slice of a flush. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct FlushChunk {
    pub filter: SessionFilter,
    /// Where to continue; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// Sessions ended so far.
    pub ended: u64,
}

/// One slice of port usage. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct PortChunk {
    pub only: Option<VipId>,
    /// Where to continue; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// The result; the worker fills it up to its capacity and never grows it.
    pub records: Vec<PortUsage>,
}

/// A worker's use of a VIP's ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortUsage {
    pub vip: VipId,
    /// Blocks with at least one port in use.
    pub used: u32,
    /// Egress and inbound sessions in the table, standby sessions included.
    pub sessions: u32,
}

/// Drop statistics of a worker.
#[derive(Debug)]
pub struct DropChunk {
    /// When the chunk was filled.
    pub now: Tick,
    /// The last dropped packet of each reason, indexed by reason.
    pub last: [Option<DropExample>; DropReason::ALL.len()],
    /// Drops by reason and address; the worker fills it up to its capacity and never grows it.
    pub records: Vec<DropRecord>,
}
