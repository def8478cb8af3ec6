//! Worker: one core's loop over packets, and the only one: receive, run the pipeline, send, then expiry, announcements,
//! commands.
//!
//! A turn of the loop never blocks. The caller (a thread over AF_XDP, a benchmark, a test) decides when to run the next
//! turn and passes the clock, which a turn reads when it has received its packets.

pub mod announce;
pub mod builder;
pub mod command;
mod commands;
mod dispatch;
pub mod expiry;
pub mod handover;
pub mod neighbor_queue;
pub mod session_query;
mod static_nat;

use std::sync::Arc;

use crossbeam::channel::Receiver;

use self::announce::Announcements;
use self::command::Command;
use self::expiry::{Backlog, ExpirySweep};
use self::handover::HandoverQueue;
use self::neighbor_queue::NeighborQueue;
use crate::flow::address::V6;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{Owner, WorkerId};
use crate::flow::time::{Clock, Tick};
use crate::io::batch::Batch;
use crate::io::handoff::WorkerLinks;
use crate::io::{PacketIo, Received, batch};
use crate::observe::counters::WorkerCounters;
use crate::observe::drops::Attribution;
use crate::policy::Snapshot;
use crate::policy::publish::Reader;
use crate::replication::accounting::SessionAccounting;
use crate::replication::lease::{Lease, LeaseState};
use crate::replication::owner;
use crate::session::Accounting;
use crate::session::affinity::AffinityTable;
use crate::session::flow_directory::FlowDirectory;
use crate::stage::context::{Context, SessionRules, Tables};
use crate::stage::flow_owner::FlowOwners;
use crate::stage::{complete_checksum, pipeline};

/// Interval at which unused port blocks are returned and the neighbor queue is retried.
const HOUSEKEEPING_MS: u32 = 100;

/// After a gap this long between turns, more packets may be queued than one turn receives: expiry waits for them.
const STALL_MS: u32 = 100;
/// After a gap this long between turns, the worker was suspended, not sleeping: it may have missed membership updates.
const SUSPENSION_MS: u32 = 200;
/// Without a lease for this long, the gateway stops forwarding: replica targets keep no sessions for it any longer.
const MAX_EXPIRED_LEASE_MS: u32 = 300_000;
/// Expired fragmented datagrams removed per turn at most.
const MAX_FRAGMENTS_EXPIRED: usize = 16;

/// The components of a worker.
#[derive(Debug)]
pub struct WorkerParts<Io> {
    /// Its number.
    pub id: WorkerId,
    /// Its device.
    pub io: Io,
    /// Its rings to the other workers.
    pub links: WorkerLinks,
    /// Session affinity of clients to backends.
    pub affinity: Arc<AffinityTable>,
    /// Flow directory of all workers; `None` with one worker.
    pub directory: Option<Arc<FlowDirectory>>,
    /// Its session and port tables.
    pub tables: Tables,
    /// The current snapshot.
    pub reader: Reader,
    pub neighbor_queue: NeighborQueue,
    /// Commands from control.
    pub commands: Receiver<Command>,
    pub counters: Arc<WorkerCounters>,
    /// Conditions for opening a session.
    pub rules: SessionRules,
    /// The gateway's lease on its ports.
    pub lease: Arc<Lease>,
}

/// The packet loop of one core.
#[derive(Debug)]
pub struct Worker<Io> {
    /// Beside the state, so that a turn borrows its snapshot: a reference count would be a cache line that all workers
    /// write to.
    reader: Reader,
    state: WorkerState<Io>,
}

/// All that a turn reads and writes, except for the snapshot.
#[derive(Debug)]
struct WorkerState<Io> {
    id: WorkerId,
    io: Io,
    links: WorkerLinks,
    affinity: Arc<AffinityTable>,
    directory: Option<Arc<FlowDirectory>>,
    tables: Tables,
    neighbor_queue: NeighborQueue,
    commands: Receiver<Command>,
    counters: Arc<WorkerCounters>,
    rules: SessionRules,
    lease: Arc<Lease>,
    batch: Batch,
    handover: HandoverQueue,
    announcements: Announcements,
    expiry: ExpirySweep,
    /// Address of the snapshot that the neighbor queue was last retried under.
    neighbor_snapshot: usize,
    housekeeping: Tick,
    last_turn: Tick,
    /// When gauges were last published; at most once per millisecond.
    gauges_published: Tick,
    /// What was queued when the last gap between turns ended, and still may be.
    backlog: Backlog,
    /// The lease expired while the worker was suspended, or long ago: it forwards nothing until the lease is renewed.
    is_suspended: bool,
}

impl<Io: PacketIo> Worker<Io> {
    /// Creates a worker at the time `now`.
    pub fn new(parts: WorkerParts<Io>, now: Tick) -> Self {
        let WorkerParts { id, io, links, affinity, directory, tables, reader, .. } = parts;
        let WorkerParts { neighbor_queue, commands, counters, rules, lease, .. } = parts;
        let state = WorkerState {
            id,
            io,
            links,
            affinity,
            directory,
            tables,
            neighbor_queue,
            commands,
            counters,
            rules,
            lease,
            batch: Batch::default(),
            handover: HandoverQueue::default(),
            announcements: Announcements::default(),
            expiry: ExpirySweep::new(now),
            neighbor_snapshot: 0,
            housekeeping: now,
            last_turn: now,
            gauges_published: now.plus(u32::MAX),
            backlog: Backlog::default(),
            is_suspended: false,
        };
        Self { reader, state }
    }

    /// Runs one turn: at most one batch of packets, then a slice of all other work. Returns the number of packets
    /// received.
    pub fn turn(&mut self, clock: impl Clock) -> usize {
        let Self { reader, state } = self;
        if !state.handover.is_empty() {
            let now = clock.now();
            let lease_expired = state.lease.state(now) != LeaseState::Valid;
            state.retry_deferred(reader.read(), lease_expired, now);
        }
        let received = state.receive();
        // Only now: what has arrived while the thread or the machine was stopped is never processed by a lease that has
        // expired meanwhile.
        let now = clock.now();
        let lease_expired = state.begin_turn(received, now);
        // Only now: a packet sent after an update was acknowledged is never processed by an older snapshot.
        let snapshot = reader.read();
        state.process(received, snapshot, lease_expired, now);
        state.finish_turn(received.count, snapshot, lease_expired, now);
        received.count
    }

    /// Whether there is no work until a packet, a command or a deadline.
    pub fn is_idle(&self) -> bool {
        let WorkerState { links, batch, commands, announcements, .. } = &self.state;
        links.is_empty() && batch.reinjected.is_empty() && commands.is_empty() && !announcements.is_busy()
    }

    /// The device.
    pub fn io(&mut self) -> &mut Io {
        &mut self.state.io
    }

    pub fn tables(&self) -> &Tables {
        &self.state.tables
    }

    pub fn counters(&self) -> &Arc<WorkerCounters> {
        &self.state.counters
    }

    /// Frames held by the engine: buffered, queued, reinjected, or in hand-off rings.
    pub fn frames_held(&self) -> usize {
        self.state.frames_held()
    }
}

/// The packets of a turn.
#[derive(Clone, Copy, Debug)]
struct ReceivedPackets {
    /// Their number.
    count: usize,
    /// Those before this one were reinjected or handed off, so they are translated already.
    first_from_device: usize,
    /// Whether the device had no more of them.
    is_device_empty: bool,
}

impl<Io: PacketIo> WorkerState<Io> {
    /// Starts a turn once its packets are received; returns whether the lease has expired.
    fn begin_turn(&mut self, received: ReceivedPackets, now: Tick) -> bool {
        let gap = now.since(self.last_turn);
        if gap >= STALL_MS {
            let of_device = if received.is_device_empty { 0 } else { self.io.audit().filled };
            self.backlog = Backlog::new(of_device, self.links.pending());
        }
        self.last_turn = now;
        let lease_expired = self.check_lease(gap, now);
        self.tables.observer.session_log.set_time(now);
        lease_expired
    }

    /// Runs the batch through the pipeline and carries out its verdicts.
    fn process(&mut self, received: ReceivedPackets, snapshot: &Arc<Snapshot>, lease_expired: bool, now: Tick) {
        self.tables.replication_queue.update_enabled(&snapshot.policy);
        self.tables.sessions.recount_standby_reserve();
        if received.count == 0 {
            return;
        }
        let from_device = &mut self.batch.frames[received.first_from_device..];
        complete_checksum::received(from_device, &snapshot.network, &self.counters);
        static_nat::translate_received(from_device, snapshot);
        let Self { tables, counters, rules, id, directory, affinity, links, .. } = self;
        let flows = FlowOwners { this: *id, workers: links.workers(), directory: directory.as_deref(), claims: true };
        let context = Context { snapshot, rules: *rules, flows, affinity, counters, lease_expired, now };
        if self.is_suspended {
            if let Some(capture) = &mut tables.observer.capture {
                capture.skip_batch();
            }
            self.batch.drop_all(DropReason::NoLease);
        } else {
            pipeline::run(&mut self.batch, tables, &context);
        }
        if let Some(capture) = &mut tables.observer.capture {
            capture.end_batch(&self.batch, now);
        }
        self.dispatch(snapshot, lease_expired, now);
    }

    /// The rest of a turn: a slice of all other work.
    fn finish_turn(&mut self, received: usize, snapshot: &Arc<Snapshot>, lease_expired: bool, now: Tick) {
        self.retry_neighbor_queue(snapshot, now);
        self.sweep(snapshot, now, received > 0);
        let Tables { sessions, replication_queue, .. } = &mut self.tables;
        replication_queue.flush(sessions, &snapshot.policy, now);
        if !lease_expired {
            self.announce(snapshot, now);
        }
        self.run_command(snapshot, lease_expired, now);
        // After the commands, which may add standby sessions, so that the next batch finds space.
        self.make_room(snapshot, now);
        self.links.wake_receivers();
        self.io.flush();
        self.tables.replication_queue.announce();
        if now != self.gauges_published {
            self.gauges_published = now;
            self.publish_gauges();
        }
    }

    fn frames_held(&self) -> usize {
        let parked = self.tables.reassembly.buffered() as usize;
        let waiting = self.neighbor_queue.len() + self.links.pending() + self.handover.len();
        waiting + self.batch.reinjected.len() + parked
    }

    /// Whether the gateway's lease has expired. If the worker was suspended in between, or the lease expired long ago,
    /// it also stops all forwarding until the lease is renewed, since its state may be outdated.
    fn check_lease(&mut self, gap: u32, now: Tick) -> bool {
        match self.lease.state(now) {
            LeaseState::Valid => {
                self.is_suspended = false;
                false
            }
            LeaseState::Expired(ms) => {
                self.is_suspended |= gap >= SUSPENSION_MS || ms >= MAX_EXPIRED_LEASE_MS;
                true
            }
        }
    }

    /// Fills the batch: reinjected packets first, then handed-off ones, then received ones.
    fn receive(&mut self) -> ReceivedPackets {
        let Batch { frames, reinjected: released, .. } = &mut self.batch;
        debug_assert!(frames.is_empty(), "the previous batch still holds frames");
        // All of them come first: packets behind them must not overtake them.
        let reinjected = released.len().min(batch::BATCH_SIZE);
        frames.extend(released.drain(..reinjected));
        let links_limit = (batch::BATCH_SIZE - reinjected) / 2;
        let handed_off = self.links.receive(frames, links_limit);
        let device_limit = batch::BATCH_SIZE - reinjected - handed_off;
        let received = self.io.rx(frames, device_limit);
        self.backlog.reduce((received, device_limit), (handed_off, links_limit));
        self.counters.received.add(received as u64);
        self.batch.begin();
        let first_from_device = reinjected + handed_off;
        let is_device_empty = received < device_limit;
        ReceivedPackets { count: first_from_device + received, first_from_device, is_device_empty }
    }

    /// Expires sessions, one slice of the tables per turn; not while packets that were queued in a gap between turns
    /// still are: after a suspension, sessions that they keep alive would expire.
    fn sweep(&mut self, snapshot: &Snapshot, now: Tick, has_packets: bool) {
        if !self.backlog.is_empty() {
            return;
        }
        let Self { tables, counters, .. } = self;
        let policy = &snapshot.policy;
        let Tables { ports, replication_queue, observer, .. } = tables;
        let mut accounting =
            SessionAccounting { policy, ports, counters, replication_queue, session_log: &observer.session_log };
        self.expiry.sweep_slice::<u32>(
            &mut tables.sessions,
            now,
            has_packets,
            |standby| owner::owner(standby, policy) == Owner::This,
            |expiry| accounting.release(&expiry),
        );
        self.expiry.sweep_slice::<V6>(
            &mut tables.sessions,
            now,
            has_packets,
            |standby| owner::owner(standby, policy) == Owner::This,
            |expiry| accounting.release(&expiry),
        );
        self.expiry.end_turn(now);
        let Self { tables, counters, io, .. } = self;
        let Tables { reassembly, observer, .. } = tables;
        reassembly.expire(now, MAX_FRAGMENTS_EXPIRED, |expired| {
            let Received { frame, interface } = expired;
            let attribution = Attribution::of(snapshot.network.interface(interface).role);
            dispatch::discard(io, counters, observer, frame, DropReason::Fragment, interface, attribution, now);
        });
        if now.since(self.housekeeping) >= HOUSEKEEPING_MS {
            self.housekeeping = now;
            for vip in snapshot.policy.vips() {
                tables.ports.release_unused_blocks(&vip.ports, now);
            }
        }
    }

    /// Evicts embryonic sessions where there are too many, and sessions of holders above their fair share of a full
    /// table.
    fn make_room(&mut self, snapshot: &Snapshot, now: Tick) {
        let Self { tables, counters, .. } = self;
        let Tables { ports, replication_queue, observer, .. } = tables;
        let mut accounting = SessionAccounting {
            policy: &snapshot.policy,
            ports,
            counters,
            replication_queue,
            session_log: &observer.session_log,
        };
        tables.embryonic.evict(&mut tables.sessions, &mut accounting);
        let refused = counters.drops[DropReason::SessionTableFull as usize].get();
        tables.eviction.restore_reserve(&mut tables.sessions, refused, &mut accounting, now);
    }

    fn publish_gauges(&self) {
        let Self { tables, counters, neighbor_queue, .. } = self;
        counters.sessions.set(tables.sessions.open_count().into());
        counters.standby_sessions.set(tables.sessions.standby_count().into());
        counters.session_reserve.set(tables.sessions.reserve().into());
        counters.session_fair_share.set(tables.sessions.fair_share().into());
        counters.neighbor_waiting.set(neighbor_queue.len() as u64);
        counters.frames_held.set(self.frames_held() as u64);
        counters.frames_device.set(self.io.audit().sum());
    }
}
