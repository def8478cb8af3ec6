//! Commands: executes commands from control between two batches, one per turn, and sends the announcements of VIPs.

use std::net::IpAddr;
use std::sync::Arc;

use super::dispatch::send;
use super::{Worker, WorkerParts};
use crate::flow::drop_reason::DropReason;
use crate::flow::time::Tick;
use crate::flow::verdict::Verdict;
use crate::io::{PacketIo, Received};
use crate::observe::counters::Counters;
use crate::policy::Snapshot;
use crate::policy::compiled::Vip;
use crate::replication::accounting::SessionAccounting;
use crate::replication::apply;
use crate::replication::apply::RecordApplier;
use crate::stage::context::{Context, Tables};
use crate::stage::flow_owner::FlowOwners;
use crate::stage::trace::Probe;
use crate::stage::{arp_nd, trace};
use crate::worker::command::Command;
use crate::worker::session_query;

impl<Io: PacketIo> Worker<Io> {
    /// Announces VIPs, a bounded number per turn.
    pub(super) fn announce(&mut self, view: &Snapshot, now: Tick) {
        let WorkerParts { io, counters, .. } = &mut self.parts;
        for &vip in self.announcements.due(now) {
            // Another gateway may be active for it by now.
            if !view.policy.vip_at(vip).is_some_and(Vip::answers_arp_nd) {
                continue;
            }
            announce_once(io, counters, view, vip);
        }
    }

    /// Executes one command from control, if one is pending.
    pub(super) fn run_command(&mut self, view: &Arc<Snapshot>, lease_expired: bool, now: Tick) {
        let Ok(command) = self.parts.commands.try_recv() else { return };
        let WorkerParts { tables, counters, directory, id, .. } = &mut self.parts;
        match command {
            Command::Sessions { mut chunk, reply } => {
                session_query::list(&tables.sessions, &mut chunk, now);
                // The sender may have given up meanwhile.
                let _ = reply.try_send(chunk);
            }
            Command::Flush { mut chunk, reply } => {
                let Tables { ports, replication_queue, observer, .. } = tables;
                let mut accounting = SessionAccounting {
                    policy: &view.policy,
                    ports,
                    counters,
                    replication_queue,
                    session_log: &observer.session_log,
                };
                session_query::flush(&mut tables.sessions, &mut chunk, now, &mut accounting);
                let _ = reply.try_send(chunk);
            }
            Command::ListRecords { mut chunk, reply } => {
                apply::list_records(&mut tables.sessions, &mut chunk, &view.policy, now);
                let _ = reply.try_send(chunk);
            }
            Command::ApplyRecords { mut records, round, source: from, reply } => {
                let Tables { sessions, ports, .. } = tables;
                let directory = directory.as_deref();
                let mut applier =
                    RecordApplier { sessions, ports, policy: &view.policy, directory, worker: *id, source: from, now };
                counters.standby_rejected.add(applier.apply(&mut records, round));
                let _ = reply.try_send(records);
            }
            Command::PurgeStandby { mut chunk, reply } => {
                apply::purge(&mut tables.sessions, &mut chunk, &view.policy, now);
                let _ = reply.try_send(chunk);
            }
            Command::Trace { mut probe, reply } => {
                self.trace(&mut probe, view, lease_expired, now);
                let _ = reply.try_send(probe);
            }
            Command::Drops { mut chunk, reply } => {
                chunk.last = *tables.observer.drops.last();
                let capacity = chunk.records.capacity();
                chunk.records.extend(tables.observer.drops.records().take(capacity));
                chunk.now = now;
                let _ = reply.try_send(chunk);
            }
            Command::Ports { mut chunk, reply } => {
                session_query::port_usage(&view.policy, &tables.ports, &tables.sessions, &mut chunk);
                let _ = reply.try_send(chunk);
            }
            Command::Capture(capture) => tables.observer.capture = capture,
            Command::LogSessions(queue) => tables.observer.session_log.set_queue(queue),
            Command::Announce(vips) => self.announcements.start(vips, now),
            Command::Defend(vip) => {
                if !lease_expired && view.policy.vip_at(vip).is_some_and(Vip::answers_arp_nd) {
                    announce_once(&mut self.parts.io, &self.parts.counters, view, vip);
                }
            }
        }
    }

    /// Traces a packet as if it had been received just now.
    fn trace(&mut self, probe: &mut Probe, view: &Arc<Snapshot>, lease_expired: bool, now: Tick) {
        let WorkerParts { io, tables, counters, rules, id, directory, affinity, links, .. } = &mut self.parts;
        let Some(mut frame) = io.allocate() else { return };
        frame.set_mark(probe.mark);
        let is_known = usize::from(probe.interface.0) < view.network.interfaces().len();
        if !is_known || !frame.replace(&probe.packet) {
            return io.release(frame);
        }
        let flows = FlowOwners { this: *id, workers: links.workers(), directory: directory.as_deref(), claims: false };
        let context = Context { snapshot: view, rules: *rules, flows, affinity, counters, lease_expired, now };
        let received = Received { frame, interface: probe.interface };
        let (mut result, received) =
            trace::trace(&mut probe.batch, received, tables, view, &context, probe.ended_sessions);
        if self.is_suspended {
            result.verdict = Verdict::Drop(DropReason::NoLease);
        }
        probe.ended_sessions = result.ended_sessions;
        if let Some(mut received) = received {
            if result.verdict == Verdict::Hairpin {
                // A hairpin packet is traced next as what it has become.
                received.mark_hairpin();
                probe.ended_sessions = 0;
                probe.packet.clear();
                probe.packet.extend_from_slice(received.frame.bytes());
            }
            probe.mark = received.frame.mark();
            self.parts.io.release(received.frame);
        }
        probe.result = Some(result);
    }
}

/// Announces a VIP on all outside interfaces.
fn announce_once(io: &mut impl PacketIo, counters: &Counters, view: &Snapshot, vip: IpAddr) {
    for interface in view.network.interfaces().iter().filter(|interface| interface.role.is_outside()) {
        arp_nd::announcement(vip, interface.mac, |bytes| {
            if send(io, interface.id, &[bytes, &[]]) {
                counters.replies_sent.add(1);
            } else {
                counters.dropped(DropReason::TxFull);
            }
        });
    }
}
