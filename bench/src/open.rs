//! New sessions: each packet is the first one of its flow. From an empty table; with as many ending at once; toward one
//! far side whose ports are nearly all in use; and what it costs to tell another gateway, or a log, of them.

mod told;

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;
use vipgate_dataplane::batch::MOST;
use vipgate_dataplane::counters::EndReason;
use vipgate_dataplane::session::timeout::Timeouts;

use crate::packets::{Flow, PacketFamily, write_forward};
use crate::path::round2;
use crate::rig::{INSIDE, OUTSIDE, Rig};

/// Ports of a VIP that may be given out.
const PORTS: u32 = 64_512;
/// A session's life where as many end as begin, and the rest of its port.
const LIFE_MS: u32 = 1_000;
const REST_MS: u32 = 100;

/// Measures new sessions
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Sessions to open; several, separated by commas, are measured one after the other
    #[arg(long, value_delimiter = ',', default_values_t = [1_048_576])]
    sessions: Vec<u32>,
    /// Whose sessions: pods' (`forward`) or clients' of a Service (`inbound`)
    #[arg(long, value_enum, default_value_t = Whose::Forward)]
    direction: Whose,
    /// What it costs to tell another gateway of 100,000 new sessions a second, instead
    #[arg(long)]
    copies: bool,
    /// What it costs to tell a log of 100,000 new sessions a second, instead
    #[arg(long, conflicts_with = "copies")]
    log: bool,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

/// Who opens sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Whose {
    /// Pods.
    Forward,
    /// Clients of a Service.
    Inbound,
}

#[derive(Serialize)]
struct Opened {
    benchmark: &'static str,
    phase: &'static str,
    sessions: u32,
    sessions_per_second: f64,
    ns_per_session: f64,
    bytes_per_session: f64,
}

/// Measures each number of sessions.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.copies {
        return told::measure(told::Listener::Gateway);
    }
    if options.log {
        return told::measure(told::Listener::Log);
    }
    for &sessions in &options.sessions {
        ensure!(sessions > 0, "--sessions must be at least 1");
        match options.direction {
            Whose::Forward => {
                from_empty(sessions)?;
                churn(sessions)?;
            }
            Whose::Inbound => inbound(sessions)?,
        }
    }
    if options.direction == Whose::Forward { fill() } else { Ok(()) }
}

fn report(phase: &'static str, sessions: u32, opened: u64, time: Duration, rig: &Rig) -> Result<()> {
    let each = time.as_nanos() as f64 / opened as f64;
    let result = Opened {
        benchmark: "open",
        phase,
        sessions,
        sessions_per_second: (1e9 / each).round(),
        ns_per_session: round2(each),
        bytes_per_session: round2(rig.table::<u32>().0 as f64 / f64::from(rig.capacity)),
    };
    println!("{}", serde_json::to_string(&result)?);
    Ok(())
}

/// Opens flows, a batch a turn; the time in turns.
fn open(rig: &mut Rig, flows: impl Iterator<Item = Flow>, mut after: impl FnMut(&mut Rig)) -> Duration {
    let mut time = Duration::ZERO;
    let mut flows = flows.peekable();
    while flows.peek().is_some() {
        for flow in flows.by_ref().take(MOST) {
            rig.worker.io().offer(INSIDE, 60, |frame| write_forward(frame, flow));
        }
        let start = Instant::now();
        rig.worker.turn(rig.now);
        time += start.elapsed();
        rig.worker.io().collect(|_| ());
        after(rig);
    }
    time
}

/// Clients of a Service: an empty table, untouched and touched; then a flood, in which as many sessions are evicted as are opened,
/// because nobody confirms one.
fn inbound(sessions: u32) -> Result<()> {
    // Whoever would leave no room for another batch is evicted.
    let mut rig = Rig::new(sessions + 2 * MOST as u32)?;
    let clients = |rig: &mut Rig, numbers: Range<u32>| {
        let mut time = Duration::ZERO;
        for first in numbers.clone().step_by(MOST) {
            for number in first..numbers.end.min(first + MOST as u32) {
                rig.worker.io().offer(OUTSIDE, 60, |frame| u32::write_inbound(frame, number));
            }
            let start = Instant::now();
            rig.worker.turn(rig.now);
            time += start.elapsed();
            rig.worker.io().collect(|_| ());
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
    let more = evicted(&rig) - before.0;
    let open = rig.worker.tables().sessions.open_count();
    ensure!(more == u64::from(sessions), "{more} of {sessions} were evicted: {before:?} {open} {:?}", rig.drops());
    report("inbound_flood", sessions, sessions.into(), time, &rig)
}

/// An empty table: its memory untouched, as after the start, then touched.
fn from_empty(sessions: u32) -> Result<()> {
    let mut rig = Rig::new(sessions)?;
    for phase in ["first", "empty"] {
        let time = open(&mut rig, (0..sessions).map(Flow::new), |_| ());
        let open = rig.worker.tables().sessions.open_count();
        ensure!(open == sessions, "{open} of {sessions} sessions were opened");
        report(phase, sessions, sessions.into(), time, &rig)?;
        rig.expire_all();
    }
    Ok(())
}

/// Timeouts of sessions that live for [`LIFE_MS`].
fn brief() -> Timeouts {
    Timeouts { udp: LIFE_MS, quarantine: REST_MS, ..Timeouts::default() }
}

/// As many sessions end as begin, `sessions` are there all the time. Expiry and its sweep are in the time.
fn churn(sessions: u32) -> Result<()> {
    let timeouts = brief();
    // A session is swept up to half a second after its time, and its port rests.
    let mut rig = Rig::with(sessions * 2, timeouts)?;
    // The table's time passes with what is opened, so that so many are alive.
    let (mut opened, begin) = (0, rig.now);
    let mut step = |rig: &mut Rig| {
        opened += MOST as u64;
        rig.now = begin.plus((opened * u64::from(LIFE_MS) / u64::from(sessions)) as u32);
    };
    // Twice its life to come to rest, then the measured part.
    let warm = sessions.saturating_mul(2);
    open(&mut rig, (0..warm).map(Flow::new), &mut step);
    let (before, count) = (rig.worker.counters().sessions_created.get(), sessions.clamp(1 << 16, 1 << 21));
    let time = open(&mut rig, (warm..warm + count).map(Flow::new), &mut step);
    let created = rig.worker.counters().sessions_created.get() - before;
    ensure!(created == u64::from(count), "{created} of {count} sessions were opened: {:?}", rig.drops());
    report("churn", sessions, created, time, &rig)
}

/// Toward one far side, at a share of its ports.
fn fill() -> Result<()> {
    let mut rig = Rig::new(PORTS)?;
    let mut number = 0;
    for (phase, until, measured) in [
        ("fill_10", PORTS / 10, PORTS / 50),
        ("fill_90", PORTS / 10 * 9, PORTS / 50),
        ("fill_99", PORTS / 100 * 99, PORTS / 200),
    ] {
        open(&mut rig, (number..until).map(Flow::to_one), |_| ());
        let time = open(&mut rig, (until..until + measured).map(Flow::to_one), |_| ());
        number = until + measured;
        ensure!(rig.worker.tables().sessions.open_count() == number, "refused before the last port: {:?}", rig.drops());
        report(phase, number, measured.into(), time, &rig)?;
    }
    open(&mut rig, (number..PORTS).map(Flow::to_one), |_| ());
    let open_now = rig.worker.tables().sessions.open_count();
    ensure!(open_now == PORTS, "{open_now} of {PORTS} ports were given out: {:?}", rig.drops());
    let refused = PORTS / 50;
    let time = open(&mut rig, (PORTS..PORTS + refused).map(Flow::to_one), |_| ());
    ensure!(rig.worker.tables().sessions.open_count() == PORTS, "more sessions than ports");
    report("refused_at_100", PORTS, refused.into(), time, &rig)
}
