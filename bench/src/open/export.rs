//! Cost of exporting sessions from a worker, to replication or to the NAT log: steady churn, alternating with and
//! without export. The consumer's time is not included.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde::Serialize;
use vipgate::natlog::SESSION_QUEUE_CAPACITY;
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::io::batch::BATCH_SIZE;
use vipgate_dataplane::observe::session_log::SessionEventQueue;
use vipgate_dataplane::worker::command::Command;

use super::{churn_timeouts, open_flows};
use crate::packets::Flow;
use crate::path::{median, round2};
use crate::peer_gateway::TunnelTags;
use crate::rig::Rig;

/// New sessions per second of the engine's clock.
const RATE: u32 = 100_000;
const ROUNDS: usize = 7;

/// Destination of exported sessions.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExportTarget {
    /// Replication to a peer gateway.
    Replication,
    /// The NAT log: a record when a session opens and when it ends.
    NatLog,
}

#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    phase: &'static str,
    sessions_per_second: u32,
    /// Time of a session's whole lifetime in the worker, without and with export: medians.
    ns_per_session: f64,
    ns_per_session_exported: f64,
    /// Exported records per session.
    records_per_session: f64,
    /// Share of the worker's time that the export takes at this rate.
    share_of_worker: f64,
}

/// Measures the export to one destination.
pub(super) fn measure(consumer: ExportTarget) -> Result<()> {
    let (mut without, mut with, mut records) = (Vec::new(), Vec::new(), 0);
    for _ in 0..ROUNDS {
        without.push(run_churn(consumer, false)?.0);
        let (ns, exported) = run_churn(consumer, true)?;
        with.push(ns);
        records += exported;
    }
    let [without, with] = [without, with].map(median);
    let report = Report {
        benchmark: "open",
        phase: match consumer {
            ExportTarget::Replication => "replication",
            ExportTarget::NatLog => "log",
        },
        sessions_per_second: RATE,
        ns_per_session: round2(without),
        ns_per_session_exported: round2(with),
        records_per_session: round2(records as f64 / ROUNDS as f64 / f64::from(5 * RATE)),
        share_of_worker: ((with - without) * f64::from(RATE) / 1e9 * 1e4).round() / 1e4,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Runs a steady churn; returns nanoseconds per session, and the number of exported records.
fn run_churn(consumer: ExportTarget, export: bool) -> Result<(f64, u64)> {
    // The replication target is known only as long as `_control` is held.
    let (mut rig, _control) = match consumer {
        ExportTarget::Replication => Rig::with_peer(RATE * 2, churn_timeouts(), export, TunnelTags::Disabled)
            .map(|(rig, control)| (rig, Some(control)))?,
        ExportTarget::NatLog => (Rig::with_timeouts(RATE * 2, churn_timeouts())?, None),
    };
    let log = Arc::new(SessionEventQueue::new(SESSION_QUEUE_CAPACITY));
    if export && matches!(consumer, ExportTarget::NatLog) {
        rig.send_command(Command::LogSessions(Some(log.clone())))?;
        rig.worker.turn(rig.now);
    }
    let start = rig.now;
    let (mut opened, mut records) = (0, 0);
    let mut drain = |rig: &mut Rig| {
        opened += BATCH_SIZE as u64;
        rig.now = start.plus((opened * 1_000 / u64::from(RATE)) as u32);
        while let Some(update) = rig.replication.pop() {
            records += 1;
            rig.replication.acknowledge(update.to, update.number);
        }
        while log.pop().is_some() {
            records += 1;
        }
    };
    // Warm-up of two lifetimes, then the measured part.
    open_flows(&mut rig, (0..2 * RATE).map(Flow::new), &mut drain);
    let time = open_flows(&mut rig, (2 * RATE..5 * RATE).map(Flow::new), &mut drain);
    let lost = (0..=u8::MAX).any(|gateway| rig.replication.take_lost(GatewayId(gateway))) || log.lost() > 0;
    ensure!(!lost && rig.drops().is_empty(), "records or packets were lost: {:?}", rig.drops());
    ensure!((records > 0) == export, "{records} records were exported, with export: {export}");
    Ok((time.as_nanos() as f64 / f64::from(3 * RATE), records))
}
