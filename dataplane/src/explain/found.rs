//! The question and the answer.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::batch::Batch;
use crate::command::SessionRecord;
use crate::counters::Direction;
use crate::io::InterfaceId;
use crate::ports::allocator::Outlook;
use crate::ports::pool::WorkerId;
use crate::snapshot::Snapshot;
use crate::snapshot::network::NextHop;
use crate::snapshot::policy::VipId;
use crate::snapshot::shares::Owner;
use crate::stage::refuse::Word;
use crate::verdict::Verdict;

/// A packet to be looked at, and room for what is found. Whoever asks brings the memory.
#[derive(Debug)]
pub struct Probe {
    /// The packet, from its Ethernet header on.
    pub packet: Vec<u8>,
    /// Where it comes in.
    pub interface: InterfaceId,
    /// What its frame is marked with: 0 from outside; of one that was handed over, what the worker before has noted.
    pub mark: u16,
    /// Sessions of its pod that workers which handed it over would have ended: they count against no limit any more.
    pub ended: u32,
    /// Room for the stages.
    pub batch: Box<Batch>,
    /// The answer; `None`: no frame was free for the packet.
    pub found: Option<Found>,
}

impl Probe {
    /// A packet as it comes in.
    pub fn new(packet: Vec<u8>, interface: InterfaceId) -> Self {
        Self { packet, interface, mark: 0, ended: 0, batch: Box::default(), found: None }
    }
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The policy and network that it was looked at by.
    pub view: Arc<Snapshot>,
    /// The worker that looked.
    pub worker: WorkerId,
    /// The sides that it comes from: see [`crate::snapshot::spec::Role::sides`].
    pub sides: u8,
    /// The session that knows it, and what becomes of that.
    pub session: Option<(SessionRecord, Fate)>,
    /// Sessions of its pod that it would have ended by then, at this worker and at those that handed it over.
    pub ended: u32,
    /// What it is taken for; `None`: its way had ended before.
    pub class: Option<Class>,
    /// What a session that would be opened leaves with.
    pub leaves_with: Option<LeavesWith>,
    /// Whether a session that would be opened has its place in the reserve of the table, being one of a holder below its fair share.
    pub is_reserved: bool,
    /// Its ends as it goes on: source and destination; port 0 where one would be drawn.
    pub translated: Option<[SocketAddr; 2]>,
    /// Where it goes next.
    pub next_hop: Option<NextHop>,
    /// Which way it counts.
    pub direction: Direction,
    /// How its way ends.
    pub verdict: Verdict,
    /// The longest packet that the next link carries, where that is why.
    pub mtu: u16,
    /// What its sender hears, where it is dropped.
    pub hears: Option<Word>,
}

/// What becomes of the session that knows a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It goes on.
    Known,
    /// Policy has changed since it was last asked, and still wants it.
    Rechecked,
    /// Policy doesn't want it any more: this packet would end it.
    Ended,
    /// Its share has become this gateway's: this packet would make it live here.
    TakenOver,
    /// It is a copy: another gateway has it, or nobody.
    CopyOf(Owner),
    /// Its share is another gateway's by now: this packet would make it a copy.
    LetGo,
    /// It is closed, and the packet begins it anew.
    BegunAnew,
}

/// What a packet is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// One of its session.
    Known,
    /// A pod's, which opens a session, or takes one up again that rests.
    Egress {
        /// Whether one rests.
        revives: bool,
    },
    /// A client's, which opens a session.
    Inbound,
    /// One of a Service that no session knows, translated by policy alone.
    Stateless,
    /// A health check.
    Health,
    /// One that policy leaves as it is.
    Unchanged,
    /// Another gateway's.
    Peer,
}

/// What a session that would be opened leaves with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeavesWith {
    /// The VIP.
    pub vip: VipId,
    /// Blocks of its ports that this gateway may use for the endpoint; `None`: all.
    pub blocks: Option<u32>,
    /// Those of these blocks that the worker has already.
    pub owned: u32,
    /// Whether there is a port left.
    pub outlook: Outlook,
}
