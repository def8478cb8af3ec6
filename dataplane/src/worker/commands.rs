//! Commands: executes commands from control between two batches, one per turn, and sends the announcements of VIPs.

use std::net::IpAddr;
use std::sync::Arc;

use super::WorkerState;
use super::dispatch::send;
use crate::flow::drop_reason::DropReason;
use crate::flow::time::Tick;
use crate::flow::verdict::Verdict;
use crate::io::{PacketIo, Received};
use crate::observe::counters::Counters;
use crate::observe::drops::DropStats;
use crate::policy::Snapshot;
use crate::policy::compiled::Vip;
use crate::replication::accounting::SessionAccounting;
use crate::replication::apply;
use crate::replication::apply::RecordApplier;
use crate::stage::context::{Context, Tables};
use crate::stage::flow_owner::FlowOwners;
use crate::stage::trace::Probe;
use crate::stage::{arp_nd, trace};
use crate::worker::command::{Command, DropChunk};
use crate::worker::session_query;
use crate::worker::static_nat::{StaticNatIo, translate_received};

impl<Io: PacketIo> WorkerState<Io> {
    /// Announces VIPs, a bounded number per turn.
    pub(super) fn announce(&mut self, snapshot: &Snapshot, now: Tick) {
        let Self { io, counters, .. } = self;
        for &vip in self.announcements.due(now) {
            // Another gateway may be active for it by now.
            if !snapshot.policy.vip_at(vip).is_some_and(Vip::answers_arp_nd) {
                continue;
            }
            announce_once(io, counters, snapshot, vip);
        }
    }

    /// Executes one command from control, if one is pending.
    pub(super) fn run_command(&mut self, snapshot: &Arc<Snapshot>, lease_expired: bool, now: Tick) {
        let Ok(command) = self.commands.try_recv() else { return };
        let Self { tables, counters, directory, affinity, id, .. } = self;
        match command {
            Command::Sessions { mut chunk, reply } => {
                session_query::list(&tables.sessions, &mut chunk, now);
                // The sender may have given up meanwhile.
                let _ = reply.try_send(chunk);
            }
            Command::Flush { mut chunk, reply } => {
                let Tables { ports, replication_queue, observer, .. } = tables;
                let mut accounting = SessionAccounting {
                    policy: &snapshot.policy,
                    ports,
                    counters,
                    replication_queue,
                    session_log: &observer.session_log,
                };
                session_query::flush(&mut tables.sessions, &mut chunk, now, &mut accounting);
                let _ = reply.try_send(chunk);
            }
            Command::ListRecords { mut chunk, reply } => {
                apply::list_records(&mut tables.sessions, &mut chunk, &snapshot.policy, now);
                let _ = reply.try_send(chunk);
            }
            Command::ApplyRecords { mut records, round, source, reply } => {
                let Tables { sessions, ports, replication_queue: queue, .. } = tables;
                let (policy, directory, worker) = (&snapshot.policy, directory.as_deref(), *id);
                let mut applier =
                    RecordApplier { sessions, ports, policy, directory, affinity, worker, source, queue, now };
                counters.standby_rejected.add(applier.apply(&mut records, round));
                let _ = reply.try_send(records);
            }
            Command::PurgeStandby { mut chunk, reply } => {
                apply::purge(&mut tables.sessions, &mut tables.ports, &mut chunk, &snapshot.policy);
                let _ = reply.try_send(chunk);
            }
            Command::Trace { mut probe, reply } => {
                self.trace(&mut probe, snapshot, lease_expired, now);
                let _ = reply.try_send(probe);
            }
            Command::Drops { mut chunk, reply } => {
                list_drops(&tables.observer.drops, &mut chunk, now);
                let _ = reply.try_send(chunk);
            }
            Command::Ports { mut chunk, reply } => {
                session_query::port_usage(&snapshot.policy, &tables.ports, &tables.sessions, &mut chunk);
                let _ = reply.try_send(chunk);
            }
            Command::Capture(capture) => tables.observer.capture = capture,
            Command::LogSessions(queue) => tables.observer.session_log.set_queue(queue),
            Command::Announce(vips) => self.announcements.start(vips, now),
            Command::Defend(vip) => {
                if !lease_expired && snapshot.policy.vip_at(vip).is_some_and(Vip::answers_arp_nd) {
                    announce_once(&mut self.io, &self.counters, snapshot, vip);
                }
            }
        }
    }

    /// Traces a packet as if it had been received just now.
    fn trace(&mut self, probe: &mut Probe, snapshot: &Arc<Snapshot>, lease_expired: bool, now: Tick) {
        let Self { io, tables, counters, rules, id, directory, affinity, links, .. } = self;
        let Some(mut frame) = io.allocate(probe.packet.len()) else { return };
        frame.set_mark(probe.mark);
        let is_known = usize::from(probe.interface.0) < snapshot.network.interfaces().len();
        if !is_known || !frame.replace(&probe.packet) {
            return io.release(frame);
        }
        let flows = FlowOwners { this: *id, workers: links.workers(), directory: directory.as_deref(), claims: false };
        let context = Context { snapshot, rules: *rules, flows, affinity, counters, lease_expired, now };
        let mut received = Received { frame, interface: probe.interface };
        if !received.is_hairpin() {
            translate_received(std::slice::from_mut(&mut received), snapshot);
        }
        let (mut result, received) =
            trace::trace(&mut probe.batch, received, tables, snapshot, &context, probe.ended_sessions);
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
            self.io.release(received.frame);
        }
        probe.result = Some(result);
    }
}

/// Lists the drop statistics.
fn list_drops(drops: &DropStats, chunk: &mut DropChunk, now: Tick) {
    chunk.last = *drops.last();
    let capacity = chunk.records.capacity();
    chunk.records.extend(drops.records().take(capacity));
    chunk.now = now;
}

/// Announces a VIP on all outside interfaces.
fn announce_once(io: &mut impl PacketIo, counters: &Counters, snapshot: &Snapshot, vip: IpAddr) {
    let io = &mut StaticNatIo::new(io, snapshot);
    for interface in snapshot.network.interfaces().iter().filter(|interface| interface.role.is_outside()) {
        arp_nd::announcement(vip, interface.mac, |bytes| {
            if send(io, interface.id, &[bytes, &[]]) {
                counters.replies_sent.add(1);
            } else {
                counters.dropped(DropReason::TxFull);
            }
        });
    }
}
