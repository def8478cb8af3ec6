//! What a worker does for control between two batches, one command a turn; and what it says of VIPs on its own.

use std::net::IpAddr;
use std::sync::Arc;

use super::dispatch::send;
use super::{Parts, Worker};
use crate::command::Command;
use crate::copies::{self, Taking};
use crate::counters::{Counters, DropReason};
use crate::explain::{self, Probe};
use crate::inspect;
use crate::io::{PacketIo, Received};
use crate::link::flows::Flows;
use crate::pipeline::{Context, Tables};
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::snapshot::policy::Vip;
use crate::stage::answer;
use crate::time::Tick;
use crate::verdict::Verdict;

impl<Io: PacketIo> Worker<Io> {
    /// Announces VIPs, a few each turn.
    pub(super) fn announce(&mut self, view: &Snapshot, now: Tick) {
        let Parts { io, counters, .. } = &mut self.parts;
        for &vip in self.announcer.turn(now) {
            // Another gateway may have it by now.
            if !view.policy.vip_at(vip).is_some_and(Vip::is_answered) {
                continue;
            }
            announce_once(io, counters, view, vip);
        }
    }

    /// Does what control asks, one command a turn.
    pub(super) fn obey(&mut self, view: &Arc<Snapshot>, is_lapsed: bool, now: Tick) {
        let Ok(command) = self.parts.commands.try_recv() else { return };
        let Parts { tables, counters, directory, id, .. } = &mut self.parts;
        match command {
            Command::Sessions { mut chunk, reply } => {
                inspect::list(&tables.sessions, &mut chunk, now);
                // Whoever asked may have gone away meanwhile.
                let _ = reply.try_send(chunk);
            }
            Command::Flush { mut chunk, reply } => {
                let Tables { ports, outbox, watch, .. } = tables;
                let mut settle = Settle { policy: &view.policy, ports, counters, outbox, log: &watch.log };
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
                counters.copies_refused.add(taking.take(&mut images, round));
                let _ = reply.try_send(images);
            }
            Command::Purge { mut chunk, reply } => {
                copies::purge(&mut tables.sessions, &mut chunk, &view.policy, now);
                let _ = reply.try_send(chunk);
            }
            Command::Explain { mut probe, reply } => {
                self.explain(&mut probe, view, is_lapsed, now);
                let _ = reply.try_send(probe);
            }
            Command::Drops { mut chunk, reply } => {
                chunk.last = *tables.watch.drops.last();
                let room = chunk.records.capacity();
                chunk.records.extend(tables.watch.drops.records().take(room));
                chunk.now = now;
                let _ = reply.try_send(chunk);
            }
            Command::Ports { mut chunk, reply } => {
                inspect::ports(&view.policy, &tables.ports, &tables.sessions, &mut chunk);
                let _ = reply.try_send(chunk);
            }
            Command::Capture(tap) => tables.watch.tap = tap,
            Command::LogSessions(queue) => tables.watch.log.write_to(queue),
            Command::Announce(vips) => self.announcer.begin(vips, now),
            Command::Defend(vip) => {
                if !is_lapsed && view.policy.vip_at(vip).is_some_and(Vip::is_answered) {
                    announce_once(&mut self.parts.io, &self.parts.counters, view, vip);
                }
            }
        }
    }

    /// Looks at a packet as if it had come in just now.
    fn explain(&mut self, probe: &mut Probe, view: &Arc<Snapshot>, is_lapsed: bool, now: Tick) {
        let Parts { io, tables, counters, rules, id, directory, affinity, links, .. } = &mut self.parts;
        let Some(mut frame) = io.take() else { return };
        frame.set_mark(probe.mark);
        let is_known = usize::from(probe.interface.0) < view.network.interfaces().len();
        if !is_known || !frame.replace(&probe.packet) {
            return io.give(frame);
        }
        let flows = Flows { this: *id, workers: links.workers(), directory: directory.as_deref(), claims: false };
        let context = Context { view, rules: *rules, flows, affinity, counters, is_lapsed, now };
        let received = Received { frame, interface: probe.interface };
        let (mut found, received) = explain::explain(&mut probe.batch, received, tables, view, &context, probe.ended);
        if self.is_silent {
            found.verdict = Verdict::Drop(DropReason::NoLease);
        }
        probe.ended = found.ended;
        if let Some(mut received) = received {
            if found.verdict == Verdict::Around {
                // What comes around is asked about as it is by then.
                received.turn_around();
                probe.ended = 0;
                probe.packet.clear();
                probe.packet.extend_from_slice(received.frame.bytes());
            }
            probe.mark = received.frame.mark();
            self.parts.io.give(received.frame);
        }
        probe.found = Some(found);
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
