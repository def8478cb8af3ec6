//! Session setup benchmark: each packet opens a session. From an empty table; at a steady churn; to one remote address
//! near port exhaustion; and the cost of replicating or logging sessions, unanswered ones and whole TCP handshakes.

mod answered;
mod export;

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;
use vipgate_dataplane::io::batch::BATCH_SIZE;
use vipgate_dataplane::session::end_reason::EndReason;
use vipgate_dataplane::session::timeout::Timeouts;

use crate::packets::{Flow, PacketFamily, write_forward};
use crate::path::round2;
use crate::rig::{INSIDE, OUTSIDE, Rig};

/// SNAT ports of a VIP.
const PORTS: u32 = 64_512;
/// Session lifetime and port quarantine in the churn phase.
const LIFETIME_MS: u32 = 1_000;
const QUARANTINE_MS: u32 = 100;

/// Measures session setup
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Sessions to open; a comma-separated list is measured one by one
    #[arg(long, value_delimiter = ',', default_values_t = [1_048_576])]
    sessions: Vec<u32>,
    /// Direction of the sessions: egress from pods (`forward`) or to a Service (`inbound`)
    #[arg(long, value_enum, default_value_t = SessionDirection::Forward)]
    direction: SessionDirection,
    /// Measure what replicating 100,000 new sessions per second to a peer costs instead, by age and with replies
    #[arg(long)]
    replication: bool,
    /// Measure the cost of logging 100,000 new sessions per second to the NAT log instead
    #[arg(long, conflicts_with = "replication")]
    log: bool,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// Direction of the opened sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SessionDirection {
    /// Egress from pods.
    Forward,
    /// From clients to a Service.
    Inbound,
}

#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    phase: &'static str,
    sessions: u32,
    sessions_per_second: f64,
    ns_per_session: f64,
    bytes_per_session: f64,
}

/// Measures each number of sessions.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.replication {
        export::measure(export::ExportTarget::Replication)?;
        return answered::measure();
    }
    if options.log {
        return export::measure(export::ExportTarget::NatLog);
    }
    for &sessions in &options.sessions {
        ensure!(sessions > 0, "--sessions must be at least 1");
        match options.direction {
            SessionDirection::Forward => {
                from_empty(sessions)?;
                churn(sessions)?;
            }
            SessionDirection::Inbound => inbound(sessions)?,
        }
    }
    if options.direction == SessionDirection::Forward { fill_ports() } else { Ok(()) }
}

fn report(phase: &'static str, sessions: u32, opened: u64, time: Duration, rig: &Rig) -> Result<()> {
    let ns_per_session = time.as_nanos() as f64 / opened as f64;
    let report = Report {
        benchmark: "open",
        phase,
        sessions,
        sessions_per_second: (1e9 / ns_per_session).round(),
        ns_per_session: round2(ns_per_session),
        bytes_per_session: round2(rig.table_memory::<u32>().0 as f64 / f64::from(rig.capacity)),
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Opens flows, a batch per worker iteration; returns the time of the iterations.
fn open_flows(rig: &mut Rig, flows: impl Iterator<Item = Flow>, mut after: impl FnMut(&mut Rig)) -> Duration {
    let mut time = Duration::ZERO;
    let mut flows = flows.peekable();
    while flows.peek().is_some() {
        for flow in flows.by_ref().take(BATCH_SIZE) {
            rig.worker.io().inject(INSIDE, 60, |frame| write_forward(frame, flow));
        }
        let start = Instant::now();
        rig.worker.turn(rig.now);
        time += start.elapsed();
        rig.worker.io().take_sent(|_| ());
        after(rig);
    }
    time
}

/// Inbound sessions: an empty table, with untouched and with touched memory; then a flood of embryonic sessions, in
/// which each new session evicts one.
fn inbound(sessions: u32) -> Result<()> {
    // Eviction keeps capacity for another batch.
    let mut rig = Rig::new(sessions + 2 * BATCH_SIZE as u32)?;
    let clients = |rig: &mut Rig, numbers: Range<u32>| {
        let mut time = Duration::ZERO;
        for first in numbers.clone().step_by(BATCH_SIZE) {
            for number in first..numbers.end.min(first + BATCH_SIZE as u32) {
                rig.worker.io().inject(OUTSIDE, 60, |frame| u32::write_inbound(frame, number));
            }
            let start = Instant::now();
            rig.worker.turn(rig.now);
            time += start.elapsed();
            rig.worker.io().take_sent(|_| ());
        }
        time
    };
    for phase in ["inbound_first", "inbound_empty"] {
        let time = clients(&mut rig, 0..sessions);
        let open = rig.worker.tables().sessions.open_count();
        ensure!(open == sessions, "{open} of {sessions} sessions were opened: {:?}", rig.drops());
        report(phase, sessions, sessions.into(), time, &rig)?;
        rig.expire_all();
    }
    clients(&mut rig, 0..2 * sessions);
    let evicted = |rig: &Rig| rig.worker.counters().sessions_ended[EndReason::Evicted as usize].get();
    let before = (evicted(&rig), rig.worker.tables().sessions.open_count());
    let time = clients(&mut rig, 2 * sessions..3 * sessions);
    let evictions = evicted(&rig) - before.0;
    let open = rig.worker.tables().sessions.open_count();
    ensure!(
        evictions == u64::from(sessions),
        "{evictions} of {sessions} sessions were evicted: {before:?} {open} {:?}",
        rig.drops()
    );
    report("inbound_flood", sessions, sessions.into(), time, &rig)
}

/// An empty table: with untouched memory, as after a start, then with touched memory.
fn from_empty(sessions: u32) -> Result<()> {
    let mut rig = Rig::new(sessions)?;
    for phase in ["first", "empty"] {
        let time = open_flows(&mut rig, (0..sessions).map(Flow::new), |_| ());
        let open = rig.worker.tables().sessions.open_count();
        ensure!(open == sessions, "{open} of {sessions} sessions were opened");
        report(phase, sessions, sessions.into(), time, &rig)?;
        rig.expire_all();
    }
    Ok(())
}

/// Timeouts of sessions with a lifetime of [`LIFETIME_MS`].
fn churn_timeouts() -> Timeouts {
    Timeouts { udp: LIFETIME_MS, quarantine: QUARANTINE_MS, ..Timeouts::default() }
}

/// Steady state: sessions expire as fast as they are opened, with `sessions` open at any time. The time includes
/// expiry.
fn churn(sessions: u32) -> Result<()> {
    let timeouts = churn_timeouts();
    // Sessions are expired up to half a second late, and ports are quarantined.
    let mut rig = Rig::with_timeouts(sessions * 2, timeouts)?;
    // The engine's clock advances with the number of opened sessions, which keeps the number of open ones constant.
    let (mut opened, start) = (0, rig.now);
    let mut advance_clock = |rig: &mut Rig| {
        opened += BATCH_SIZE as u64;
        rig.now = start.plus((opened * u64::from(LIFETIME_MS) / u64::from(sessions)) as u32);
    };
    // Warm-up of two lifetimes, then the measured part.
    let warm_up = sessions.saturating_mul(2);
    open_flows(&mut rig, (0..warm_up).map(Flow::new), &mut advance_clock);
    let (before, count) = (rig.worker.counters().sessions_created.get(), sessions.clamp(1 << 16, 1 << 21));
    let time = open_flows(&mut rig, (warm_up..warm_up + count).map(Flow::new), &mut advance_clock);
    let created = rig.worker.counters().sessions_created.get() - before;
    ensure!(created == u64::from(count), "{created} of {count} sessions were opened: {:?}", rig.drops());
    report("churn", sessions, created, time, &rig)
}

/// New sessions to one remote address, with 10, 90, 99 and 100 % of the ports in use.
fn fill_ports() -> Result<()> {
    let mut rig = Rig::new(PORTS)?;
    let mut number = 0;
    for (phase, until, measured) in [
        ("fill_10", PORTS / 10, PORTS / 50),
        ("fill_90", PORTS / 10 * 9, PORTS / 50),
        ("fill_99", PORTS / 100 * 99, PORTS / 200),
    ] {
        open_flows(&mut rig, (number..until).map(Flow::to_one_remote), |_| ());
        let time = open_flows(&mut rig, (until..until + measured).map(Flow::to_one_remote), |_| ());
        number = until + measured;
        ensure!(
            rig.worker.tables().sessions.open_count() == number,
            "rejected before ports are exhausted: {:?}",
            rig.drops()
        );
        report(phase, number, measured.into(), time, &rig)?;
    }
    open_flows(&mut rig, (number..PORTS).map(Flow::to_one_remote), |_| ());
    let open_now = rig.worker.tables().sessions.open_count();
    ensure!(open_now == PORTS, "{open_now} of {PORTS} ports were allocated: {:?}", rig.drops());
    let rejected = PORTS / 50;
    let time = open_flows(&mut rig, (PORTS..PORTS + rejected).map(Flow::to_one_remote), |_| ());
    ensure!(rig.worker.tables().sessions.open_count() == PORTS, "more sessions than ports");
    report("refused_at_100", PORTS, rejected.into(), time, &rig)
}
