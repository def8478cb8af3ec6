//! One core: receive, run the pipeline, send, then timers, announcements, commands. The only loop over packets.
//!
//! A turn never waits. Whoever drives it (a thread over AF_XDP, a benchmark, a test) decides when to take the next turn
//! and what time it is.

use std::net::IpAddr;
use std::sync::Arc;

use crossbeam::channel::Receiver;
use vipgate_mem::Frame;

use crate::address::V6;
use crate::announcer::Announcer;
use crate::batch::{self, Batch, MOST_RELEASED, Travel};
use crate::command::Command;
use crate::copies::{self, Taking};
use crate::counters::{Counters, Direction, DropReason, WorkerCounters};
use crate::inspect;
use crate::io::{InterfaceId, PacketIo, Received};
use crate::link::affinity::Affinity;
use crate::link::directory::Directory;
use crate::link::flows::Flows;
use crate::link::handoff::Links;
use crate::link::lease::{Hold, Lease};
use crate::pipeline::{self, Context, Tables};
use crate::ports::pool::WorkerId;
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::snapshot::policy::Vip;
use crate::snapshot::publish::Reader;
use crate::snapshot::shares::Owner;
use crate::stage::{answer, gather, open, takeover, wrap};
use crate::sweeper::Sweeper;
use crate::time::Tick;
use crate::verdict::Verdict;
use crate::waiting::{Outcome, Waiting};
use crate::wire::cut;

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
        let received = self.receive();
        self.behind &= received == batch::MOST;
        if received > 0 {
            let Parts { tables, counters, rules, id, directory, affinity, links, .. } = &mut self.parts;
            let flows = Flows { this: *id, workers: links.workers(), directory: directory.as_deref() };
            let context = Context { view: &view, rules: *rules, flows, affinity, counters, is_lapsed, now };
            if self.is_silent {
                self.batch.drop_all(DropReason::NoLease);
            } else {
                pipeline::run(&mut self.batch, tables, &context);
            }
            self.dispatch(&view, now);
            self.make_room(&view);
        }
        self.retry_waiting(&view, now);
        self.sweep(&view, now, received > 0);
        let Tables { sessions, outbox, .. } = &mut self.parts.tables;
        outbox.turn(sessions, &view.policy, now);
        if !is_lapsed {
            self.announce(&view, now);
        }
        self.obey(&view, now);
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
        self.parts.waiting.len() + self.parts.links.waiting() + self.batch.released.len() + parked
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
        let again = released.len().min(batch::MOST / 2);
        frames.extend(released.drain(..again));
        let handed_over = self.parts.links.receive(frames, batch::MOST / 2 - again / 2);
        let received = self.parts.io.rx(frames, batch::MOST - again - handed_over);
        self.parts.counters.received.add(received as u64);
        self.batch.begin();
        again + handed_over + received
    }

    /// Sends every packet of the batch where its verdict says. Afterwards the batch owns no frame.
    fn dispatch(&mut self, view: &Snapshot, now: Tick) {
        let Parts { io, links, waiting, counters, tables, .. } = &mut self.parts;
        let Batch { frames, released, verdicts, directions, wanted, mtus, travels, heads, .. } = &mut self.batch;
        let (mut packets, mut sums) = ([0; Direction::ALL.len()], [0; Direction::ALL.len()]);
        for (i, received) in frames.drain(..).take(batch::MOST).enumerate() {
            let Received { frame, interface } = received;
            let bytes = u64::from(frame.len());
            let direction = directions[i];
            let verdict = verdicts[i];
            // By far the most, and so asked for first.
            if let Verdict::Forward(out) = verdict {
                if let Err(frame) = io.tx(out, frame) {
                    counters.dropped(DropReason::TxFull);
                    io.give(frame);
                } else {
                    packets[direction as usize] += 1;
                    sums[direction as usize] += bytes;
                }
                continue;
            }
            let dropped = match verdict {
                Verdict::Forward(_) | Verdict::Undecided => unreachable!("sent above; the pipeline decides about all"),
                Verdict::Cut(out) => {
                    if send_pieces(io, out, &frame, mtus[i]) {
                        counters.forwarded(direction, 1, bytes);
                        io.give(frame);
                        continue;
                    }
                    (frame, DropReason::TxFull)
                }
                Verdict::CutIntoTunnel => {
                    if send_pieces_to(io, view, travels[i], heads[i].sides, &frame, mtus[i]) {
                        counters.forwarded(direction, 1, bytes);
                        io.give(frame);
                        continue;
                    }
                    (frame, DropReason::NoNeighbor)
                }
                Verdict::Answer(out) => match io.tx(out, frame) {
                    Ok(()) => {
                        counters.answered.add(1);
                        continue;
                    }
                    Err(frame) => (frame, DropReason::TxFull),
                },
                Verdict::Heard => {
                    counters.heard.add(1);
                    io.give(frame);
                    continue;
                }
                Verdict::HandOff(worker) => match links.send(worker, Received { frame, interface }) {
                    Ok(()) => {
                        counters.handoffs.add(1);
                        continue;
                    }
                    Err(Received { frame, .. }) => (frame, DropReason::LinkFull),
                },
                Verdict::Wait => match waiting.park(frame, wanted[i], direction, now) {
                    Ok(()) => continue,
                    Err(frame) => (frame, DropReason::NoNeighbor),
                },
                Verdict::Park => match gather::park(&mut tables.fragments, Received { frame, interface }) {
                    Ok(()) => continue,
                    Err(Received { frame, .. }) => (frame, DropReason::Fragment),
                },
                Verdict::Around if released.len() < MOST_RELEASED => {
                    counters.forwarded(direction, 1, bytes);
                    let mut received = Received { frame, interface };
                    received.turn_around();
                    released.push_back(received);
                    continue;
                }
                Verdict::Around => (frame, DropReason::LinkFull),
                Verdict::Drop(reason) => (frame, reason),
            };
            counters.dropped(dropped.1);
            io.give(dropped.0);
        }
        for (direction, (packets, bytes)) in Direction::ALL.into_iter().zip(packets.into_iter().zip(sums)) {
            counters.forwarded(direction, packets, bytes);
        }
    }

    /// Sends what waited for a neighbour that is known by now.
    fn retry_waiting(&mut self, view: &Arc<Snapshot>, now: Tick) {
        let Parts { io, waiting, counters, .. } = &mut self.parts;
        if waiting.is_empty() {
            return;
        }
        let view_changed = self.waited_under != Arc::as_ptr(view) as usize;
        if !view_changed && now.since(self.housekeeping) < HOUSEKEEPING_MS {
            return;
        }
        self.waited_under = Arc::as_ptr(view) as usize;
        waiting.retry(&view.network, now, |outcome| {
            let (frame, reason) = match outcome {
                Outcome::Ready(parked) => {
                    let bytes = u64::from(parked.frame.len());
                    match io.tx(parked.wanted.interface, parked.frame) {
                        Ok(()) => return counters.forwarded(parked.direction, 1, bytes),
                        Err(frame) => (frame, DropReason::TxFull),
                    }
                }
                Outcome::Expired(parked) => (parked.frame, DropReason::NoNeighbor),
            };
            counters.dropped(reason);
            io.give(frame);
        });
    }

    /// Ends the sessions whose time has come, a slice of the tables each turn. Not while packets wait that came before now:
    /// a worker that was stopped for a while would end sessions that they keep alive.
    fn sweep(&mut self, view: &Snapshot, now: Tick, has_packets: bool) {
        if self.behind {
            return;
        }
        let Parts { tables, counters, .. } = &mut self.parts;
        let policy = &view.policy;
        let mut settle = Settle { policy, ports: &mut tables.ports, counters, outbox: &mut tables.outbox };
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
        tables.fragments.sweep(now, FRAGMENTS_SWEPT, |expired| {
            counters.dropped(DropReason::Fragment);
            io.give(expired.frame);
        });
        if now.since(self.housekeeping) >= HOUSEKEEPING_MS {
            self.housekeeping = now;
            for vip in view.policy.vips() {
                tables.ports.give_back_unused(vip, now);
            }
        }
    }

    /// Lets go of clients' sessions that were never confirmed, where there are too many.
    fn make_room(&mut self, view: &Snapshot) {
        let Parts { tables, counters, .. } = &mut self.parts;
        let Tables { ports, outbox, .. } = tables;
        let mut settle = Settle { policy: &view.policy, ports, counters, outbox };
        tables.embryonic.make_room(&mut tables.sessions, &mut settle);
    }

    /// Announces VIPs, a few each turn.
    fn announce(&mut self, view: &Snapshot, now: Tick) {
        let Parts { io, counters, .. } = &mut self.parts;
        for &vip in self.announcer.turn(now) {
            // Another gateway may have it by now.
            if !view.policy.vip_at(vip).is_some_and(Vip::is_ours) {
                continue;
            }
            announce_once(io, counters, view, vip);
        }
    }

    /// Does what control asks, one command a turn.
    fn obey(&mut self, view: &Snapshot, now: Tick) {
        let Ok(command) = self.parts.commands.try_recv() else { return };
        let Parts { tables, counters, directory, id, .. } = &mut self.parts;
        match command {
            Command::Sessions { mut chunk, reply } => {
                inspect::list(&tables.sessions, &mut chunk, now);
                // Whoever asked may have gone away meanwhile.
                let _ = reply.try_send(chunk);
            }
            Command::Flush { mut chunk, reply } => {
                let Tables { ports, outbox, .. } = tables;
                let mut settle = Settle { policy: &view.policy, ports, counters, outbox };
                inspect::flush(&mut tables.sessions, &mut chunk, now, &mut settle);
                let _ = reply.try_send(chunk);
            }
            Command::Copies { mut chunk, reply } => {
                copies::list(&mut tables.sessions, &mut chunk, &view.policy, now);
                let _ = reply.try_send(chunk);
            }
            Command::Take { mut images, round, from, reply } => {
                let Tables { sessions, ports, .. } = tables;
                let directory = directory.as_deref();
                let mut taking = Taking { sessions, ports, policy: &view.policy, directory, worker: *id, from, now };
                counters.copies_refused.add(taking.take(&images, round));
                images.clear();
                let _ = reply.try_send(images);
            }
            Command::Purge { mut chunk, reply } => {
                copies::purge(&mut tables.sessions, &mut chunk, &view.policy, now);
                let _ = reply.try_send(chunk);
            }
            Command::Announce(vips) => self.announcer.begin(vips, now),
            Command::Defend(vip) => announce_once(&mut self.parts.io, &self.parts.counters, view, vip),
        }
    }

    fn publish_levels(&self) {
        let Parts { tables, counters, waiting, .. } = &self.parts;
        counters.sessions.set(tables.sessions.open_count().into());
        counters.copies.set(tables.sessions.copies().into());
        counters.waiting.set(waiting.len() as u64);
        counters.frames_held.set(self.frames_held() as u64);
        counters.frames_device.set(self.parts.io.audit().sum());
    }
}

/// Announces a VIP on all outside interfaces.
fn announce_once(io: &mut impl PacketIo, counters: &Counters, view: &Snapshot, vip: IpAddr) {
    for interface in view.network.interfaces().iter().filter(|interface| interface.role.is_outside()) {
        answer::announcement(vip, interface.mac, |bytes| {
            if send(io, interface.id, &[bytes, &[]]) {
                counters.answered.add(1);
            } else {
                counters.dropped(DropReason::TxFull);
            }
        });
    }
}

/// Sends a packet in pieces; false if there wasn't room for all of them.
fn send_pieces(io: &mut impl PacketIo, interface: InterfaceId, frame: &Frame, mtu: u16) -> bool {
    let mut all = true;
    cut::cut(frame.bytes(), mtu, |headers, payload| {
        all &= send(io, interface, &[headers, payload]);
        all
    });
    all
}

/// Sends a packet in pieces into a tunnel; false if there wasn't room for all of them, or its way isn't known yet.
fn send_pieces_to(io: &mut impl PacketIo, view: &Snapshot, travel: Travel, sides: u8, frame: &Frame, mtu: u16) -> bool {
    let mut all = true;
    cut::cut(frame.bytes(), mtu, |headers, payload| {
        let before = wrap::before_piece(view, travel, sides, &[headers, payload]);
        all &= before.is_some_and(|(out, outer, length)| send(io, out, &[&outer[..length], headers, payload]));
        all
    });
    all
}

/// Sends a packet of our own that stands in several places; false if there was no room for it.
fn send(io: &mut impl PacketIo, interface: InterfaceId, bytes: &[&[u8]]) -> bool {
    let Some(mut frame) = io.take() else { return false };
    let unsent = if frame.replace_with(bytes) { io.tx(interface, frame).err() } else { Some(frame) };
    match unsent {
        None => true,
        Some(frame) => {
            io.give(frame);
            false
        }
    }
}
