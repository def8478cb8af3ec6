//! Cost of replicating TCP connections from a worker: a steady churn of handshakes (SYN, SYN-ACK, ACK), in turns
//! without replication, with the default delay, and with the record of a session sent with its first reply. The time of
//! the receiver of records isn't included, nor that of waking it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::io::batch::BATCH_SIZE;
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_dataplane::session::timeout::Timeouts;

use super::{LIFETIME_MS, churn_timeouts};
use crate::packets::{self, Flow, PacketFamily, TcpStep};
use crate::path::{median, round2};
use crate::peer_gateway::TunnelTags;
use crate::rig::{DEFAULT_FIRST_RECORD, INSIDE, OUTSIDE, Rig};

/// New connections per second of the engine's clock.
const RATE: u32 = 100_000;
const ROUNDS: usize = 9;
/// Connections of a measured run.
const MEASURED: u32 = 3 * RATE;

#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    phase: &'static str,
    sessions_per_second: u32,
    /// Time of a connection's handshake and expiry in the worker: medians.
    ns_per_session: f64,
    ns_per_session_by_age: f64,
    ns_per_session_with_reply: f64,
    /// Median of what each round's `with_reply` takes longer than its `by_age`, and of their ratios.
    with_reply_added_ns: f64,
    with_reply_ratio: f64,
    records_per_session_by_age: f64,
    records_per_session_with_reply: f64,
}

/// Measures all three in turns.
pub(super) fn measure() -> Result<()> {
    let (mut rounds, mut records) = ([const { Vec::new() }; 3], [0.0; 3]);
    for _ in 0..ROUNDS {
        let modes = [None, Some(DEFAULT_FIRST_RECORD), Some(FirstRecord::WithReply)];
        for ((first_record, times), count) in modes.into_iter().zip(&mut rounds).zip(&mut records) {
            let (ns, records) = churn(first_record)?;
            times.push(ns);
            *count += records / ROUNDS as f64;
        }
    }
    let [none, by_age, with_reply] = rounds;
    let pairs = || by_age.iter().zip(&with_reply);
    let report = Report {
        benchmark: "open",
        phase: "replication_answered",
        sessions_per_second: RATE,
        with_reply_added_ns: round2(median(pairs().map(|(by_age, with_reply)| with_reply - by_age).collect())),
        with_reply_ratio: round2(median(pairs().map(|(by_age, with_reply)| with_reply / by_age).collect())),
        ns_per_session: round2(median(none)),
        ns_per_session_by_age: round2(median(by_age)),
        ns_per_session_with_reply: round2(median(with_reply)),
        records_per_session_by_age: round2(records[1]),
        records_per_session_with_reply: round2(records[2]),
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Runs a steady churn; returns nanoseconds and records per connection.
fn churn(first_record: Option<FirstRecord>) -> Result<(f64, f64)> {
    let timeouts = Timeouts { tcp_established: LIFETIME_MS, tcp_transitory: LIFETIME_MS, ..churn_timeouts() };
    // The replication target is known only as long as `_control` is held.
    let (mut rig, _control) = match first_record {
        Some(first_record) => Rig::with_linked_peer((RATE * 2, timeouts), first_record)?,
        None => Rig::with_peer(RATE * 2, timeouts, false, TunnelTags::Disabled)?,
    };
    let start = rig.now;
    let (mut time, mut records, mut ports) = (Duration::ZERO, 0_u64, Vec::with_capacity(BATCH_SIZE));
    for first in (0..2 * RATE + MEASURED).step_by(BATCH_SIZE) {
        let is_measured = first >= 2 * RATE;
        let elapsed = handshakes(&mut rig, first, &mut ports)?;
        rig.now = start.plus((u64::from(first) * 1_000 / u64::from(RATE)) as u32);
        while let Some(update) = rig.replication.pop() {
            records += u64::from(is_measured);
            rig.replication.acknowledge(update.to, update.number);
        }
        if is_measured {
            time += elapsed;
        }
    }
    let is_lost = (0..=u8::MAX).any(|gateway| rig.replication.take_lost(GatewayId(gateway)));
    ensure!(!is_lost && rig.drops().is_empty(), "records or packets were lost: {:?}", rig.drops());
    ensure!((records > 0) == first_record.is_some(), "{records} records");
    Ok((time.as_nanos() as f64 / f64::from(MEASURED), records as f64 / f64::from(MEASURED)))
}

/// A batch of handshakes: all SYNs, then all SYN-ACKs, then all ACKs. Returns the time that the worker took.
fn handshakes(rig: &mut Rig, first: u32, ports: &mut Vec<u16>) -> Result<Duration> {
    let flows = || (first..first + BATCH_SIZE as u32).map(Flow::new);
    ports.clear();
    for flow in flows() {
        write(rig, flow, None, TcpStep::Handshake);
    }
    let mut time = turn(rig);
    rig.worker.io().take_sent(|frame| ports.push(u32::source_port(frame.bytes())));
    ensure!(ports.len() == BATCH_SIZE, "{} of {BATCH_SIZE} connections: {:?}", ports.len(), rig.drops());
    for (flow, &port) in flows().zip(&*ports) {
        write(rig, flow, Some(port), TcpStep::Handshake);
    }
    time += turn(rig);
    rig.worker.io().take_sent(|_| ());
    for flow in flows() {
        write(rig, flow, None, TcpStep::Established);
    }
    time += turn(rig);
    rig.worker.io().take_sent(|_| ());
    Ok(time)
}

/// Injects a segment from the pod, or with the connection's SNAT port one of its remote.
fn write(rig: &mut Rig, flow: Flow, reply_to: Option<u16>, step: TcpStep) {
    let side = if reply_to.is_some() { OUTSIDE } else { INSIDE };
    rig.worker.io().inject(side, 60, |frame| {
        match reply_to {
            Some(port) => u32::write_reply(frame, flow, port),
            None => u32::write_forward(frame, flow),
        }
        packets::make_tcp(frame, reply_to.is_none(), step);
    });
}

fn turn(rig: &mut Rig) -> Duration {
    let start = Instant::now();
    rig.worker.turn(rig.now);
    start.elapsed()
}
