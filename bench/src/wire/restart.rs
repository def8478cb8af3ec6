//! A gateway with many open sessions is killed (SIGKILL) and started again, while a pod goes on sending: how soon its packets
//! come through, and how many sessions the next process takes up.

use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use rustix::time::ClockId;
use serde::Serialize;
use tempfile::TempDir;

use super::Machine;
use super::ground::Ground;
use super::report::median;
use super::sink::{SAMPLES, Sink};
use super::source::now;
use super::subject::{Placement, Setting};
use super::trial::{Bench, DRAIN};
use super::vipgate::{Policy, Vipgate};
use crate::netns;
use crate::path::round2;

/// The pod that sends, where it sends to, and what is between its packets. All of them are samples.
const POD: Ipv4Addr = Ipv4Addr::new(10, 1, 4, 1);
const FAR: (Ipv4Addr, u16) = (Ipv4Addr::new(198, 51, 0, 99), 443);
const GAP: Duration = Duration::from_micros(200);
/// What a packet of it carries behind number and time: see wire.h.
const MAGIC: u16 = 0x7677;
/// How long it sends, and how long before the kill.
const SENDING: Duration = Duration::from_secs(3);
const BEFORE: Duration = Duration::from_millis(300);

/// What `vipgate-bench restart` takes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Sessions that are open; several, separated by commas, are measured one after the other
    #[arg(long, value_delimiter = ',', default_values_t = [100_000, 1_000_000], value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    sessions: Vec<u32>,
    /// Kills; the median is reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    kills: u32,
    #[command(flatten)]
    machine: Machine,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

/// A line of the report.
#[derive(Debug, Serialize)]
struct Line {
    benchmark: &'static str,
    sessions: u32,
    kills: usize,
    /// From the start of the next process to the first packet that it forwards.
    forwards_after_ms: f64,
    forwards_after_worst_ms: f64,
    /// From the last packet of the old process to the first one of the next.
    away_ms: f64,
    /// Of the sessions that were open, the share that was taken up, at worst.
    survived: f64,
    /// Sessions that the kill had caught half-written, of all kills together.
    torn: u64,
}

/// What came of one kill.
#[derive(Clone, Copy, Debug)]
struct Kill {
    forwards_after_ms: f64,
    away_ms: f64,
    taken_up: u64,
    torn: u64,
}

/// Measures each number of sessions.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let gateway = options.machine.program()?;
    let setting = Setting { gateway, core: cores[1], placement: Placement::Source };
    netns::prepare()?;
    for &sessions in &options.sessions {
        let kills =
            measure(&setting, cores, sessions, options.kills).with_context(|| format!("{sessions} sessions"))?;
        let of = |value: fn(&Kill) -> f64| kills.iter().map(value).collect::<Vec<_>>();
        let resumed = of(|kill| kill.forwards_after_ms);
        let least = kills.iter().map(|kill| kill.taken_up).min().unwrap_or(0);
        let line = Line {
            benchmark: "restart",
            sessions,
            kills: kills.len(),
            forwards_after_worst_ms: round2(resumed.iter().copied().fold(0.0, f64::max)),
            forwards_after_ms: round2(median(resumed).unwrap_or_default()),
            away_ms: round2(median(of(|kill| kill.away_ms)).unwrap_or_default()),
            survived: least as f64 / f64::from(sessions),
            torn: kills.iter().map(|kill| kill.torn).sum(),
        };
        println!("{}", serde_json::to_string(&line)?);
    }
    Ok(())
}

fn measure(setting: &Setting, cores: [usize; 2], sessions: u32, kills: u32) -> Result<Vec<Kill>> {
    let ground = Ground::build()?;
    ground.source.exec(&["ip", "address", "add", &format!("{POD}/16"), "dev", "eth0"])?;
    ground.source.exec(&["ip", "route", "add", "default", "via", "10.1.0.1"])?;
    let folder = TempDir::with_prefix(netns::name("")).context("cannot make a folder for configuration")?;
    // What outlives the process lies in memory.
    let state =
        TempDir::with_prefix_in(netns::name(""), netns::IN_MEMORY).context("cannot make a folder for sessions")?;
    // One more: the pod's that sends while the others rest.
    let capacity = sessions + sessions / 5 + 1;
    let vipgate = Vipgate::configure(setting, capacity, Some(state.path()), &Policy::Pods, folder.path())?;
    let mut process = vipgate.start(&ground.gateway)?;
    let bench =
        Bench { ground: &ground, cores, process: Some(process.id()), flows: sessions, bytes: 60, tolerated: 0.0 };
    bench.open_flows()?;
    let mut results = Vec::new();
    for _ in 0..kills {
        let sink = Sink::open(&ground, cores[0], SAMPLES)?;
        let (killed, started) = thread::scope(|scope| {
            let sending = scope.spawn(|| ground.source.run(cores[0], send));
            thread::sleep(BEFORE);
            let killed = now(ClockId::Monotonic);
            process.kill()?;
            process.wait()?;
            let started = now(ClockId::Monotonic);
            process = vipgate.start(&ground.gateway)?;
            sending.join().ok().context("the sender has panicked")??;
            Ok::<_, anyhow::Error>((killed, started))
        })?;
        thread::sleep(DRAIN);
        let arrivals = sink.close()?.arrivals;
        let last = arrivals.iter().copied().filter(|&at| at < killed).max();
        let first = arrivals.iter().copied().filter(|&at| at > started).min();
        let said = vipgate.said("state_taken_up")?.context("the next process took nothing up")?;
        let number = |name: &str| said[name].as_u64().with_context(|| format!("the gateway says no {name}"));
        let first = first.context("the next process forwards nothing")?;
        let ms = |from: u64| (first - from) as f64 / 1e6;
        results.push(Kill {
            forwards_after_ms: ms(started),
            away_ms: ms(last.context("the old process forwarded nothing")?),
            taken_up: number("sessions")?.saturating_sub(1),
            torn: number("torn")?,
        });
    }
    process.kill()?;
    process.wait()?;
    Ok(results)
}

/// A pod's flow, as a real host sends it.
fn send() -> Result<()> {
    let socket = UdpSocket::bind((POD, 7000)).context("cannot bind the pod's address")?;
    let begun = Instant::now();
    for sequence in 0_u64.. {
        if begun.elapsed() >= SENDING {
            break;
        }
        ensure!(sequence < SAMPLES, "more packets than the sink has room for");
        let stamp =
            [&sequence.to_ne_bytes()[..], &now(ClockId::Monotonic).to_ne_bytes(), &MAGIC.to_ne_bytes()].concat();
        socket.send_to(&stamp, FAR).context("the pod cannot send")?;
        thread::sleep(GAP);
    }
    Ok(())
}
