//! Worker: one core's loop over packets, and the only one: receive, run the pipeline, send, then expiry, announcements,
//! commands.
//!
//! A turn of the loop never blocks. The caller (a thread over AF_XDP, a benchmark, a test) decides when to run the next
//! turn and passes the time.

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
use self::expiry::ExpirySweep;
use self::handover::HandoverQueue;
use self::neighbor_queue::NeighborQueue;
use crate::flow::address::V6;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{Owner, WorkerId};
use crate::flow::time::Tick;
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
use crate::stage::pipeline;

/// Interval at which unused port blocks are returned and the neighbor queue is retried.
const HOUSEKEEPING_MS: u32 = 100;

/// After a gap this long between turns, more packets may be queued than one turn receives.
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
    /// Neighbor queue.
    pub neighbor_queue: NeighborQueue,
    /// Commands from control.
    pub commands: Receiver<Command>,
    /// Its counters.
    pub counters: Arc<WorkerCounters>,
    /// Conditions for opening a session.
    pub rules: SessionRules,
    /// The gateway's lease on its ports.
    pub lease: Arc<Lease>,
}

/// The packet loop of one core.
#[derive(Debug)]
pub struct Worker<Io> {
    parts: WorkerParts<Io>,
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
    /// After a gap between turns, packets received before now may still be queued.
    has_backlog: bool,
    /// The lease expired while the worker was suspended, or long ago: it forwards nothing until the lease is renewed.
    is_suspended: bool,
}

impl<Io: PacketIo> Worker<Io> {
    /// Creates a worker at the time `now`.
    pub fn new(parts: WorkerParts<Io>, now: Tick) -> Self {
        Self {
            parts,
            batch: Batch::default(),
            handover: HandoverQueue::default(),
            announcements: Announcements::default(),
            expiry: ExpirySweep::new(now),
            neighbor_snapshot: 0,
            housekeeping: now,
            last_turn: now,
            gauges_published: now.plus(u32::MAX),
            has_backlog: false,
            is_suspended: false,
        }
    }

    /// Runs one turn: at most one batch of packets, then a slice of all other work. Returns the number of packets
    /// received.
    pub fn turn(&mut self, now: Tick) -> usize {
        let gap = now.since(self.last_turn);
        self.has_backlog |= gap >= STALL_MS;
        self.last_turn = now;
        let lease_expired = self.check_lease(gap, now);
        self.parts.tables.observer.session_log.set_time(now);
        self.retry_deferred(lease_expired, now);
        let (received, from_device) = self.receive();
        // Only now: a packet sent after an update was acknowledged is never processed by an older snapshot.
        let snapshot = self.parts.reader.read().clone();
        self.parts.tables.replication_queue.update_enabled(&snapshot.policy);
        self.parts.tables.sessions.recount_standby_reserve();
        self.has_backlog &= received == batch::BATCH_SIZE;
        // What was reinjected or handed off is translated already.
        static_nat::translate_received(&mut self.batch.frames[from_device..], &snapshot);
        if received > 0 {
            let WorkerParts { tables, counters, rules, id, directory, affinity, links, .. } = &mut self.parts;
            let flows =
                FlowOwners { this: *id, workers: links.workers(), directory: directory.as_deref(), claims: true };
            let context = Context { snapshot: &snapshot, rules: *rules, flows, affinity, counters, lease_expired, now };
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
            self.dispatch(&snapshot, lease_expired, now);
        }
        self.retry_neighbor_queue(&snapshot, now);
        self.sweep(&snapshot, now, received > 0);
        let Tables { sessions, replication_queue, .. } = &mut self.parts.tables;
        replication_queue.flush(sessions, &snapshot.policy, now);
        if !lease_expired {
            self.announce(&snapshot, now);
        }
        self.run_command(&snapshot, lease_expired, now);
        // After the commands, which may add standby sessions, so that the next batch finds space.
        self.make_room(&snapshot, now);
        self.parts.links.wake_receivers();
        self.parts.io.flush();
        self.parts.tables.replication_queue.announce();
        if now != self.gauges_published {
            self.gauges_published = now;
            self.publish_gauges();
        }
        received
    }

    /// Whether there is no work until a packet, a command or a deadline.
    pub fn is_idle(&self) -> bool {
        self.parts.links.is_empty()
            && self.batch.reinjected.is_empty()
            && self.parts.commands.is_empty()
            && !self.announcements.is_busy()
    }

    /// The device.
    pub fn io(&mut self) -> &mut Io {
        &mut self.parts.io
    }

    /// Its tables.
    pub fn tables(&self) -> &Tables {
        &self.parts.tables
    }

    /// Its counters.
    pub fn counters(&self) -> &Arc<WorkerCounters> {
        &self.parts.counters
    }

    /// Frames held by the engine: buffered, queued, reinjected, or in hand-off rings.
    pub fn frames_held(&self) -> usize {
        let parked = self.parts.tables.reassembly.buffered() as usize;
        let waiting = self.parts.neighbor_queue.len() + self.parts.links.pending() + self.handover.len();
        waiting + self.batch.reinjected.len() + parked
    }

    /// Whether the gateway's lease has expired. If the worker was suspended in between, or the lease expired long ago,
    /// it also stops all forwarding until the lease is renewed, since its state may be outdated.
    fn check_lease(&mut self, gap: u32, now: Tick) -> bool {
        match self.parts.lease.state(now) {
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

    /// Fills the batch: reinjected packets first, then handed-off ones, then received ones. Returns their number, and where
    /// received ones begin.
    fn receive(&mut self) -> (usize, usize) {
        let Batch { frames, reinjected: released, .. } = &mut self.batch;
        debug_assert!(frames.is_empty(), "the previous batch still holds frames");
        // All of them come first: packets behind them must not overtake them.
        let reinjected = released.len().min(batch::BATCH_SIZE);
        frames.extend(released.drain(..reinjected));
        let handed_off = self.parts.links.receive(frames, (batch::BATCH_SIZE - reinjected) / 2);
        let received = self.parts.io.rx(frames, batch::BATCH_SIZE - reinjected - handed_off);
        self.parts.counters.received.add(received as u64);
        self.batch.begin();
        (reinjected + handed_off + received, reinjected + handed_off)
    }

    /// Expires sessions, one slice of the tables per turn; not while packets that were received before now are still
    /// queued: after a suspension, sessions that they keep alive would expire.
    fn sweep(&mut self, snapshot: &Snapshot, now: Tick, has_packets: bool) {
        if self.has_backlog {
            return;
        }
        let WorkerParts { tables, counters, .. } = &mut self.parts;
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
        let WorkerParts { tables, counters, io, .. } = &mut self.parts;
        let Tables { reassembly, observer, .. } = tables;
        reassembly.expire(now, MAX_FRAGMENTS_EXPIRED, |expired| {
            let Received { frame, interface } = expired;
            let attribution = Attribution::of(snapshot.network.interface(interface).role);
            dispatch::discard(io, counters, observer, frame, (DropReason::Fragment, interface, attribution), now);
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
        let WorkerParts { tables, counters, .. } = &mut self.parts;
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
        let WorkerParts { tables, counters, neighbor_queue, .. } = &self.parts;
        counters.sessions.set(tables.sessions.open_count().into());
        counters.standby_sessions.set(tables.sessions.standby_count().into());
        counters.session_reserve.set(tables.sessions.reserve().into());
        counters.session_fair_share.set(tables.sessions.fair_share().into());
        counters.neighbor_waiting.set(neighbor_queue.len() as u64);
        counters.frames_held.set(self.frames_held() as u64);
        counters.frames_device.set(self.parts.io.audit().sum());
    }
}
