//! What control may ask of a worker between two batches, and how it answers.
//!
//! A worker's state is its own, so questions come to it as messages and it answers in slices: one message costs it a
//! bounded amount of work. Whoever asks brings the memory for the answer.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crossbeam::channel::Sender;

use crate::counters::{Direction, DropReason};
use crate::explain::Probe;
use crate::session::image::Image;
use crate::snapshot::members::GatewayId;
use crate::snapshot::policy::VipId;
use crate::time::Tick;
use crate::watch::drops::{DropRecord, Example};
use crate::watch::log::SessionQueue;
use crate::watch::tap::Tap;

/// A question or an order for one worker.
#[derive(Debug)]
pub enum Command {
    /// Copy sessions that match into the chunk and send it back.
    Sessions {
        /// What to copy, how far the reader got, and room for the answer.
        chunk: SessionChunk,
        /// Where the chunk goes.
        reply: Sender<SessionChunk>,
    },
    /// End the sessions that match.
    Flush {
        /// Which ones, and how far it got.
        chunk: FlushChunk,
        /// Where the chunk goes.
        reply: Sender<FlushChunk>,
    },
    /// Copy sessions whose copies belong at a gateway into the chunk and send it back.
    Copies {
        /// For whom, how far the reader got, and room for the answer.
        chunk: CopyChunk,
        /// Where the chunk goes.
        reply: Sender<CopyChunk>,
    },
    /// Take copies of other gateways' sessions in: as they are now, or as ended.
    Take {
        /// The copies. At most [`MOST_TAKEN`].
        images: Vec<Image>,
        /// The round of telling all that they are of, modulo 16.
        round: u8,
        /// Who tells of them.
        from: GatewayId,
        /// Where those that should have a place and found none go back to, when it is done.
        reply: Sender<Vec<Image>>,
    },
    /// Forget copies of shares that a gateway owns, and that it hasn't named in its last round.
    Purge {
        /// Whose, and how far it got.
        chunk: PurgeChunk,
        /// Where the chunk goes.
        reply: Sender<PurgeChunk>,
    },
    /// Say what would become of a packet.
    Explain {
        /// The packet, and room for the answer.
        probe: Box<Probe>,
        /// Where it goes.
        reply: Sender<Box<Probe>>,
    },
    /// Copy what is known of drops.
    Drops {
        /// Room for the answer.
        chunk: Box<DropChunk>,
        /// Where it goes.
        reply: Sender<Box<DropChunk>>,
    },
    /// Count the blocks of VIPs' ports that are in use, into the chunk, and send it back.
    Ports {
        /// How far the reader got, and room for the answer.
        chunk: PortChunk,
        /// Where the chunk goes.
        reply: Sender<PortChunk>,
    },
    /// Capture packets, or stop.
    Capture(Option<Box<Tap>>),
    /// Put the beginnings and ends of sessions there, or nowhere.
    LogSessions(Option<Arc<SessionQueue>>),
    /// Announce these VIPs on the outside interfaces: gratuitous ARP, unsolicited neighbour advertisement.
    Announce(Vec<IpAddr>),
    /// Announce this VIP once, because another host claims it.
    Defend(IpAddr),
}

/// Which sessions: every field that is given must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionFilter {
    /// The pod's address.
    pub endpoint: Option<IpAddr>,
    /// The VIP.
    pub vip: Option<IpAddr>,
    /// The far side's address.
    pub remote: Option<IpAddr>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// Connection state.
    pub state: Option<SessionState>,
}

/// One slice of a listing. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct SessionChunk {
    /// Which sessions.
    pub filter: SessionFilter,
    /// Where to go on; starts as `Some(0)`, `None` when the table has been read to its end.
    pub cursor: Option<u64>,
    /// The answer; the worker fills it up to its capacity and never grows it.
    pub records: Vec<SessionRecord>,
}

/// One slice of a flush. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct FlushChunk {
    /// Which sessions.
    pub filter: SessionFilter,
    /// Where to go on; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// How many were ended so far.
    pub ended: u64,
}

/// Copies that are taken at a time.
pub const MOST_TAKEN: usize = 256;

/// One slice of all copies for a gateway. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct CopyChunk {
    /// For whom.
    pub to: GatewayId,
    /// The replication epoch of the last round that this one has all of; 0: there was none, or it lacks something.
    pub told_by: u64,
    /// Where to go on; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// The answer; the worker fills it up to its capacity and never grows it.
    pub images: Vec<Image>,
    /// The view by which the round began, and the replication epoch of the slices before this one: a worker that goes by another epoch, or
    /// already by a later view, lists nothing, and notes of no session that it was told.
    pub begun_by: (u64, Option<u64>),
    /// The answer: the replication epoch that the worker goes by, and the view since which the same gateways serve, as it knows.
    pub listed_by: (u64, u64),
}

/// One slice of forgetting copies. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct PurgeChunk {
    /// Who owns the shares that they are of.
    pub owner: GatewayId,
    /// The round that those which stay were named in, modulo 16.
    pub round: u8,
    /// The view that it went by when it named them.
    pub view: u64,
    /// The replication epoch of our last round that it had all of when it began its own; 0: none.
    pub told_by: u64,
    /// Where to go on; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// How many were forgotten so far.
    pub forgotten: u64,
    /// Others serve by now than when they were named: nothing more is forgotten, and all must be named again.
    pub outdated: bool,
    /// Some that the owner may not have known of were left as they are: it must name all again when it knows them.
    pub spared: bool,
}

/// One slice of a look at VIPs' ports. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct PortChunk {
    /// One VIP only.
    pub only: Option<VipId>,
    /// Where to go on; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// The answer; the worker fills it up to its capacity and never grows it.
    pub records: Vec<PortRecord>,
}

/// What a worker uses of a VIP's ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRecord {
    /// The VIP.
    pub vip: VipId,
    /// Blocks of which at least one port is in use.
    pub used: u32,
    /// Sessions in the table, of pods and clients, standby ones included.
    pub sessions: u32,
}

/// What a worker knows of its drops.
#[derive(Debug)]
pub struct DropChunk {
    /// The moment of the answer.
    pub now: Tick,
    /// The last packet of each reason, by the reasons' numbers.
    pub last: [Option<Example>; DropReason::ALL.len()],
    /// What was dropped of whom; the worker fills it up to its capacity and never grows it.
    pub records: Vec<DropRecord>,
}

/// How far a session's connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SessionState {
    /// The first packets have passed, nothing came back.
    Opening = 1,
    /// Packets have passed both ways.
    Established = 2,
    /// TCP: one side has said FIN.
    HalfClosed = 3,
    /// TCP: both sides have said FIN, or one RST.
    Closing = 4,
    /// Ended; its port is kept until nothing can arrive for it any more.
    Quarantined = 5,
}

impl SessionState {
    /// Every state.
    pub const ALL: [Self; 5] = [Self::Opening, Self::Established, Self::HalfClosed, Self::Closing, Self::Quarantined];

    /// Its word in the CLI.
    pub fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Established => "established",
            Self::HalfClosed => "half_closed",
            Self::Closing => "closing",
            Self::Quarantined => "quarantined",
        }
    }
}

/// One session, as people see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// IP protocol number.
    pub protocol: u8,
    /// Which way its first packet went: a pod's, or a client's to a Service.
    pub direction: Direction,
    /// The pod's address and port (ICMP echo: its identifier).
    pub endpoint: SocketAddr,
    /// The VIP and the port that stands for the pod.
    pub vip: SocketAddr,
    /// The far side.
    pub remote: SocketAddr,
    /// How far the connection is.
    pub state: SessionState,
    /// Milliseconds since the last packet of either direction.
    pub idle_ms: u32,
    /// Milliseconds until it expires if nothing comes.
    pub expires_ms: u32,
    /// Packets and bytes of the pod (whole frames).
    pub packets_out: u64,
    /// Bytes of the pod's packets.
    pub bytes_out: u64,
    /// Packets to the pod.
    pub packets_in: u64,
    /// Bytes to the pod.
    pub bytes_in: u64,
}
