//! Node benchmark: what steering costs a node beside plain forwarding and masquerading, and how long programming takes.
//!
//! ```text
//!   [source] eth0 ---- gw-in [node] gw-out ---- eth0 [sink]
//!            10.1.4.0/22            203.0.113.1      203.0.113.254: router, gateway's end of the tunnel
//! ```
//! The node is programmed by the agent's own code (`vipgate_node::plan` and `vipgate_node::kernel`), which is called
//! directly: rules, routes and device are those of an agent, and no policy server or gateway shares the cores with the
//! packets. The sink verifies samples of all packets, within the tunnel, too.
//!
//! Each round builds a new testbed for each kind of forwarding; they alternate, so that other load on the machine affects
//! all of them. Throughput and new flows are the CPU time of the thread that forwards on a core of its own (threaded NAPI):
//! other programs on that core lengthen a measurement, but not that. Latency is measured as veth forwards by default, in
//! the source's context. Source and forwarding thread have the highest priority. Ratios are of the same round.

mod forwarding;
mod policy;
mod programming;

use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use forwarding::{Forwarding, HIGHEST_PRIORITY, Load, Round};
use rustix::process::setpriority_process;
use serde::Serialize;

use crate::netns;
use crate::path::{median, round2};

/// Options of `vipgate-bench node`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Kinds of forwarding to measure; ratios are those to the first one
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Forwarding::ALL)]
    forwarding: Vec<Forwarding>,
    /// Rounds; medians are reported
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Open flows of 1024 pods
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=200_000))]
    flows: u32,
    /// New flows of a measurement
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..=200_000))]
    new_flows: u32,
    /// Seconds per measurement
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10))]
    seconds: u64,
    /// Numbers of endpoints to program
    #[arg(long, value_delimiter = ',', default_values_t = [100, 10_000], value_parser = clap::value_parser!(u32).range(1..=60_000))]
    endpoints: Vec<u32>,
    /// Cores of source and node
    #[arg(long, value_delimiter = ',', num_args = 1, default_values_t = [0, 1])]
    cores: Vec<usize>,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// The report of a kind of forwarding, printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    forwarding: Forwarding,
    flows: u32,
    rounds: usize,
    /// Per packet of an open flow, CPU time; and what a core would forward with that.
    packet_ns: Spread,
    mpps_per_core: f64,
    /// Throughput relative to the first kind.
    packet_ratio: Spread,
    /// Forwarded by the clock, with whatever else the machine did.
    wall_mpps: Spread,
    /// Per first packet of a flow, CPU time; and how many flows a core would open with that.
    flow_ns: Spread,
    flows_per_core: f64,
    flow_ratio: Spread,
    p50_us: Spread,
    p99_us: Spread,
    p99_ratio: Spread,
    cpu_pressure: Option<f64>,
}

/// Median, lowest and highest of all rounds.
#[derive(Debug, Serialize)]
struct Spread {
    median: f64,
    lowest: f64,
    highest: f64,
}

impl Spread {
    fn new(values: Vec<f64>) -> Self {
        let [lowest, highest] = [f64::min, f64::max].map(|pick| values.iter().copied().fold(f64::NAN, pick));
        let [median, lowest, highest] = [median(values), lowest, highest].map(|value| (value * 1e3).round() / 1e3);
        Self { median, lowest, highest }
    }
}

impl Report {
    fn new(forwarding: Forwarding, flows: u32, rounds: &[Round], first: &[Round]) -> Self {
        let all = |value: fn(&Round) -> f64| Spread::new(rounds.iter().map(value).collect());
        let ratio = |value: fn(&Round) -> f64| {
            Spread::new(rounds.iter().zip(first).map(|(round, first)| value(round) / value(first)).collect())
        };
        let (packet_ns, flow_ns) = (all(|round| round.packet_ns), all(|round| round.flow_ns));
        let pressures: Vec<f64> = rounds.iter().filter_map(|round| round.pressure).collect();
        Self {
            benchmark: "node",
            forwarding,
            flows,
            rounds: rounds.len(),
            mpps_per_core: round2(1e3 / packet_ns.median),
            packet_ratio: ratio(|round| 1.0 / round.packet_ns),
            wall_mpps: all(|round| round.mpps),
            flows_per_core: (1e9 / flow_ns.median).round(),
            flow_ratio: ratio(|round| 1.0 / round.flow_ns),
            p50_us: all(|round| round.p50_us),
            p99_us: all(|round| round.p99_us),
            p99_ratio: ratio(|round| round.p99_us),
            cpu_pressure: (!pressures.is_empty()).then(|| round2(median(pressures))),
            packet_ns,
            flow_ns,
        }
    }
}

/// Measures all kinds of forwarding in alternating rounds, then the programming of endpoints.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = <[usize; 2]>::try_from(options.cores.as_slice()).ok().context("--cores needs two")?;
    netns::prepare()?;
    // Inherited by the source's threads and by `nft`.
    setpriority_process(None, HIGHEST_PRIORITY).context("cannot set this program's priority")?;
    netns::run_command(&["nft", "--version"]).context("nft is needed: install nftables")?;
    let duration = Duration::from_secs(options.seconds);
    let load = Load { cores, flows: options.flows, new_flows: options.new_flows, duration };
    let mut rounds: Vec<Vec<Round>> = options.forwarding.iter().map(|_| Vec::new()).collect();
    for _ in 0..options.rounds {
        for (&forwarding, rounds) in options.forwarding.iter().zip(&mut rounds) {
            rounds.push(forwarding::measure(forwarding, load).with_context(|| format!("{forwarding:?}"))?);
        }
    }
    for (&forwarding, of_kind) in options.forwarding.iter().zip(&rounds) {
        let report = Report::new(forwarding, options.flows, of_kind, &rounds[0]);
        println!("{}", serde_json::to_string(&report)?);
    }
    for &endpoints in &options.endpoints {
        let report = programming::measure(endpoints, options.rounds, cores[1]);
        let report = report.with_context(|| format!("programming {endpoints} endpoints"))?;
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}
