//! Restart benchmark: a gateway with many sessions is killed (SIGKILL) and started again while a pod sends. Measures
//! the time until packets are forwarded again, and the number of restored sessions.

use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use rustix::time::ClockId;
use serde::Serialize;

use super::HostOptions;
use super::report::median;
use super::sink::{Expectation, MAX_SAMPLES, Sink};
use super::source::clock_ns;
use super::trial::{DRAIN_TIME, Trial};
use super::vipgate::{PolicySource, Vipgate};
use crate::machine::{clean_up_on_signals, run_on};
use crate::packets::VIP;
use crate::path::round2;
use crate::wire::config::SutConfig;
use crate::wire::testbed::{POD, Testbed};

/// Destination and interval of the pod's packets, all of which the sink samples.
const REMOTE: (Ipv4Addr, u16) = (Ipv4Addr::new(198, 51, 0, 99), 443);
const SEND_INTERVAL: Duration = Duration::from_micros(200);
/// `MAGIC` of wire.h, the last field of the payload.
const MAGIC: u16 = 0x7677;
/// Duration of sending, and its part before the kill.
const SEND_DURATION: Duration = Duration::from_secs(3);
const KILL_DELAY: Duration = Duration::from_millis(300);

/// Options of `vipgate-bench restart`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Established sessions; a comma-separated list is measured one by one
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [100_000, 1_000_000],
        value_parser = clap::value_parser!(u32).range(1..=1_048_576)
    )]
    sessions: Vec<u32>,
    /// Kills; the median is reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    kills: u32,
    #[command(flatten)]
    machine: HostOptions,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// The report, printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    sessions: u32,
    kills: usize,
    /// From the start of the new process to its first forwarded packet.
    forwards_after_ms: f64,
    forwards_after_worst_ms: f64,
    /// From the last packet of the old process to the first one of the new process.
    #[serde(rename = "away_ms")]
    outage_ms: f64,
    /// Share of sessions that were restored, minimum over all kills.
    survived: f64,
    /// Sessions discarded because they were partly written when the process was killed, sum of all kills.
    torn: u64,
}

/// Result of one kill.
#[derive(Clone, Copy, Debug)]
struct Kill {
    forwards_after_ms: f64,
    outage_ms: f64,
    restored: u64,
    torn: u64,
}

/// Measures each number of sessions.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let gateway = options.machine.gateway_binary()?;
    let config = SutConfig::on_core(gateway, cores[1]);
    clean_up_on_signals()?;
    for &sessions in &options.sessions {
        let kills = measure(&config, cores, sessions, options.kills).with_context(|| format!("{sessions} sessions"))?;
        let all = |value: fn(&Kill) -> f64| kills.iter().map(value).collect::<Vec<_>>();
        let forwards_after = all(|kill| kill.forwards_after_ms);
        let min_restored = kills.iter().map(|kill| kill.restored).min().unwrap_or(0);
        let report = Report {
            benchmark: "restart",
            sessions,
            kills: kills.len(),
            forwards_after_worst_ms: round2(forwards_after.iter().copied().fold(0.0, f64::max)),
            forwards_after_ms: round2(median(forwards_after).unwrap_or_default()),
            outage_ms: round2(median(all(|kill| kill.outage_ms)).unwrap_or_default()),
            survived: min_restored as f64 / f64::from(sessions),
            torn: kills.iter().map(|kill| kill.torn).sum(),
        };
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}

fn measure(config: &SutConfig, cores: [usize; 2], sessions: u32, kills: u32) -> Result<Vec<Kill>> {
    let testbed = Testbed::build()?;
    testbed.source.addresses("eth0", &[&format!("{POD}/16")])?;
    testbed.source.route("default", "10.1.0.1")?;
    let directory = vipgate_lab::directory().context("cannot create a directory for the configuration")?;
    let state = vipgate_lab::memory_directory().context("cannot create a directory for session state")?;
    // One more for the sending pod.
    let capacity = sessions + sessions / 5 + 1;
    let vipgate = Vipgate::configure(config, capacity, Some(state.path()), &PolicySource::File, directory.path())?;
    let mut process = vipgate.start(&testbed.gateway)?;
    let expectation = Expectation::translated_to(VIP);
    let pid = Some(process.id());
    let trial = Trial { testbed: &testbed, cores, pid, flows: sessions, bytes: 60, max_loss: 0.0, expectation };
    trial.open_all_flows()?;
    let mut results = Vec::new();
    for _ in 0..kills {
        let sink = Sink::open(&testbed, cores[0], expectation, MAX_SAMPLES)?;
        let (killed_at, started_at) = thread::scope(|scope| {
            let sender = scope.spawn(|| run_on(&testbed.source, cores[0], send));
            thread::sleep(KILL_DELAY);
            let killed_at = clock_ns(ClockId::Monotonic);
            process.kill();
            let started_at = clock_ns(ClockId::Monotonic);
            process = vipgate.start(&testbed.gateway)?;
            sender.join().ok().context("the sender has panicked")??;
            Ok::<_, anyhow::Error>((killed_at, started_at))
        })?;
        thread::sleep(DRAIN_TIME);
        let arrivals = sink.close()?.arrivals;
        let last = arrivals.iter().copied().filter(|&at| at < killed_at).max();
        let first = arrivals.iter().copied().filter(|&at| at > started_at).min();
        let event = vipgate.log_event("state_restored")?.context("the new process did not log `state_restored`")?;
        let field =
            |name: &str| event[name].as_u64().with_context(|| format!("the event `state_restored` has no {name}"));
        let first = first.context("the new process forwards no packets")?;
        let ms_since = |time: u64| (first - time) as f64 / 1e6;
        results.push(Kill {
            forwards_after_ms: ms_since(started_at),
            outage_ms: ms_since(last.context("the old process forwarded no packets")?),
            restored: field("sessions")?.saturating_sub(1),
            torn: field("torn")?,
        });
    }
    process.kill();
    Ok(results)
}

/// Sends the pod's packets from a UDP socket.
fn send() -> Result<()> {
    let socket = UdpSocket::bind((POD, 7000)).context("cannot bind to the pod's address")?;
    let start = Instant::now();
    for sequence in 0_u64.. {
        if start.elapsed() >= SEND_DURATION {
            break;
        }
        ensure!(sequence < MAX_SAMPLES, "more packets than the sink can sample");
        let stamp =
            [&sequence.to_ne_bytes()[..], &clock_ns(ClockId::Monotonic).to_ne_bytes(), &MAGIC.to_ne_bytes()].concat();
        socket.send_to(&stamp, REMOTE).context("the pod cannot send")?;
        thread::sleep(SEND_INTERVAL);
    }
    Ok(())
}
