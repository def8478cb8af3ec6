//! One core: receive, run the pipeline, send, then timers, announcements, commands. The only loop over packets.
//!
//! A turn never waits. Whoever drives it (a thread over AF_XDP, a benchmark, a test) decides when to take the next turn
//! and what time it is.

mod dispatch;
mod obey;

use std::sync::Arc;

use crossbeam::channel::Receiver;

use crate::address::V6;
use crate::announcer::Announcer;
use crate::batch::{self, Batch};
use crate::command::Command;
use crate::counters::{DropReason, WorkerCounters};
use crate::handover::HandoverQueue;
use crate::io::{PacketIo, Received};
use crate::link::affinity::Affinity;
use crate::link::directory::Directory;
use crate::link::flows::Flows;
use crate::link::handoff::Links;
use crate::link::lease::{Hold, Lease};
use crate::pipeline::{self, Context, Tables};
use crate::ports::pool::WorkerId;
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::snapshot::publish::Reader;
use crate::snapshot::shares::Owner;
use crate::stage::{open, takeover};
use crate::sweeper::Sweeper;
use crate::time::Tick;
use crate::waiting::Waiting;
use crate::watch::drops::Whose;

/// Blocks of unused ports are looked for this often.
const HOUSEKEEPING_MS: u32 = 100;

/// Between turns so far apart, more packets may have come than one turn takes.
const STALL_MS: u32 = 100;
/// Between turns so far apart, more than sleep came between: nobody knows what this gateway would have heard.
const STOPPED_MS: u32 = 200;
/// A gateway that has had no lease for so long serves nobody any more: longer, others keep nothing for it.
const LONGEST_LAPSE_MS: u32 = 300_000;
/// Fragmented datagrams that one turn forgets at most.
const FRAGMENTS_SWEPT: usize = 16;

/// Everything that a worker is made of.
#[derive(Debug)]
pub struct Parts<Io> {
    /// Its number.
    pub id: WorkerId,
    /// Its rings to the world.
    pub io: Io,
    /// Its rings to the other workers.
    pub links: Links,
    /// Which backends clients were sent to.
    pub affinity: Arc<Affinity>,
    /// Which worker has which flow; `None` where there is one worker.
    pub directory: Option<Arc<Directory>>,
    /// Its connections and ports.
    pub tables: Tables,
    /// The policy and network in force.
    pub reader: Reader,
    /// Packets that wait for a neighbour.
    pub waiting: Waiting,
    /// Where control asks and orders.
    pub commands: Receiver<Command>,
    /// What it counts.
    pub counters: Arc<WorkerCounters>,
    /// What opens a session.
    pub rules: open::Rules,
    /// Until when its ports are surely its own.
    pub lease: Arc<Lease>,
}

/// One worker.
#[derive(Debug)]
pub struct Worker<Io> {
    parts: Parts<Io>,
    batch: Batch,
    handover: HandoverQueue,
    announcer: Announcer,
    sweeper: Sweeper,
    /// The snapshot that packets last waited under.
    waited_under: usize,
    housekeeping: Tick,
    last_turn: Tick,
    /// When levels were published last: a millisecond is often enough.
    levels_at: Tick,
    /// The worker was stopped for a while, and hasn't seen yet all that came meanwhile.
    behind: bool,
    /// The lease has ended while the worker was stopped, or long ago: it is silent until there is one.
    is_silent: bool,
}

impl<Io: PacketIo> Worker<Io> {
    /// A worker at the moment `now`.
    pub fn new(parts: Parts<Io>, now: Tick) -> Self {
        Self {
            parts,
            batch: Batch::default(),
            handover: HandoverQueue::default(),
            announcer: Announcer::default(),
            sweeper: Sweeper::new(now),
            waited_under: 0,
            housekeeping: now,
            last_turn: now,
            levels_at: now.plus(u32::MAX),
            behind: false,
            is_silent: false,
        }
    }

    /// Takes one turn: at most one batch of packets, then a slice of everything else. Returns how many packets came in.
    pub fn turn(&mut self, now: Tick) -> usize {
        let view = self.parts.reader.read().clone();
        let stalled = now.since(self.last_turn);
        self.behind |= stalled >= STALL_MS;
        self.last_turn = now;
        let is_lapsed = self.look_at_lease(stalled, now);
        self.parts.tables.outbox.follow(&view.policy);
        self.parts.tables.watch.log.turn(now);
        self.retry_deferred(&view, is_lapsed, now);
        let received = self.receive();
        self.parts.tables.sessions.recount_standby();
        self.behind &= received == batch::MOST;
        if received > 0 {
            let Parts { tables, counters, rules, id, directory, affinity, links, .. } = &mut self.parts;
            let flows = Flows { this: *id, workers: links.workers(), directory: directory.as_deref(), claims: true };
            let context = Context { view: &view, rules: *rules, flows, affinity, counters, is_lapsed, now };
            if self.is_silent {
                if let Some(tap) = &mut tables.watch.tap {
                    tap.skip();
                }
                self.batch.drop_all(DropReason::NoLease);
            } else {
                pipeline::run(&mut self.batch, tables, &context);
            }
            if let Some(tap) = &mut tables.watch.tap {
                tap.after(&self.batch, now);
            }
            self.dispatch(&view, is_lapsed, now);
        }
        self.retry_waiting(&view, now);
        self.sweep(&view, now, received > 0);
        let Tables { sessions, outbox, .. } = &mut self.parts.tables;
        outbox.turn(sessions, &view.policy, now);
        if !is_lapsed {
            self.announce(&view, now);
        }
        self.obey(&view, is_lapsed, now);
        // Behind what commands have brought, standby sessions among it: the next batch finds room.
        self.make_room(&view, now);
        self.parts.links.ring();
        self.parts.io.flush();
        if now != self.levels_at {
            self.levels_at = now;
            self.publish_levels();
        }
        received
    }

    /// Whether nothing is left to do until a packet, a command or a deadline comes.
    pub fn is_idle(&self) -> bool {
        self.parts.links.is_empty()
            && self.batch.released.is_empty()
            && self.parts.commands.is_empty()
            && !self.announcer.is_busy()
    }

    /// The device, to sleep on or to look at.
    pub fn io(&mut self) -> &mut Io {
        &mut self.parts.io
    }

    /// Its connections and ports, to look at.
    pub fn tables(&self) -> &Tables {
        &self.parts.tables
    }

    /// What it counts.
    pub fn counters(&self) -> &Arc<WorkerCounters> {
        &self.parts.counters
    }

    /// Frames that the engine holds: those that wait, come around, or are on their way from other workers.
    pub fn frames_held(&self) -> usize {
        let parked = self.parts.tables.fragments.parked() as usize;
        let waiting = self.parts.waiting.len() + self.parts.links.waiting() + self.handover.len();
        waiting + self.batch.released.len() + parked
    }

    /// Whether this gateway can't be sure that its ports are still its own. A worker that was stopped meanwhile, or has gone on for too
    /// long, says nothing more until it can: all that it still had to say may be wrong by now.
    fn look_at_lease(&mut self, stalled: u32, now: Tick) -> bool {
        match self.parts.lease.hold(now) {
            Hold::Held => {
                self.is_silent = false;
                false
            }
            Hold::Lapsed(ms) => {
                self.is_silent |= stalled >= STOPPED_MS || ms >= LONGEST_LAPSE_MS;
                true
            }
        }
    }

    /// Fills the batch: what comes around first, then what other workers handed over, then what came from outside.
    fn receive(&mut self) -> usize {
        let Batch { frames, released, .. } = &mut self.batch;
        debug_assert!(frames.is_empty(), "the last batch still owns frames");
        // Before all others, however many they are: what came behind them must not overtake them.
        let again = released.len().min(batch::MOST);
        frames.extend(released.drain(..again));
        let handed_over = self.parts.links.receive(frames, (batch::MOST - again) / 2);
        let received = self.parts.io.rx(frames, batch::MOST - again - handed_over);
        self.parts.counters.received.add(received as u64);
        self.batch.begin();
        again + handed_over + received
    }

    /// Ends the sessions whose time has come, a slice of the tables each turn. Not while packets wait that came before now:
    /// a worker that was stopped for a while would end sessions that they keep alive.
    fn sweep(&mut self, view: &Snapshot, now: Tick, has_packets: bool) {
        if self.behind {
            return;
        }
        let Parts { tables, counters, .. } = &mut self.parts;
        let policy = &view.policy;
        let Tables { ports, outbox, watch, .. } = tables;
        let mut settle = Settle { policy, ports, counters, outbox, log: &watch.log };
        self.sweeper.turn::<u32>(
            &mut tables.sessions,
            now,
            has_packets,
            |copy| takeover::owner(copy, policy) == Owner::This,
            |expiry| settle.settle(&expiry),
        );
        self.sweeper.turn::<V6>(
            &mut tables.sessions,
            now,
            has_packets,
            |copy| takeover::owner(copy, policy) == Owner::This,
            |expiry| settle.settle(&expiry),
        );
        self.sweeper.end_turn(now);
        let Parts { tables, counters, io, .. } = &mut self.parts;
        let Tables { fragments, watch, .. } = tables;
        fragments.sweep(now, FRAGMENTS_SWEPT, |expired| {
            let Received { frame, interface } = expired;
            let whose = Whose::of(view.network.interface(interface).role);
            dispatch::discard(io, counters, watch, frame, (DropReason::Fragment, interface, whose), now);
        });
        if now.since(self.housekeeping) >= HOUSEKEEPING_MS {
            self.housekeeping = now;
            for vip in view.policy.vips() {
                tables.ports.give_back_unused(vip, now);
            }
        }
    }

    /// Lets go of clients' sessions that were never confirmed, where there are too many, and of those of holders that have more than
    /// their fair share of a full table.
    fn make_room(&mut self, view: &Snapshot, now: Tick) {
        let Parts { tables, counters, .. } = &mut self.parts;
        let Tables { ports, outbox, watch, .. } = tables;
        let mut settle = Settle { policy: &view.policy, ports, counters, outbox, log: &watch.log };
        tables.embryonic.make_room(&mut tables.sessions, &mut settle);
        tables.eviction.make_room(&mut tables.sessions, &mut settle, now);
    }

    fn publish_levels(&self) {
        let Parts { tables, counters, waiting, .. } = &self.parts;
        counters.sessions.set(tables.sessions.open_count().into());
        counters.copies.set(tables.sessions.copies().into());
        counters.session_reserve.set(tables.sessions.reserve().into());
        counters.session_fair_share.set(tables.sessions.fair_share().into());
        counters.waiting.set(waiting.len() as u64);
        counters.frames_held.set(self.frames_held() as u64);
        counters.frames_device.set(self.parts.io.audit().sum());
    }
}
