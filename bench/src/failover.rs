//! A gateway of several is killed (SIGKILL) under connections that stand, and comes back: how many of them live, how long nothing came
//! through, and whether anybody notices the return. The hosts are Linux's own TCP, the routers its ECMP.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use vipgate_tests::cluster::{Clients, Cluster, LineServer, Outcome, SERVER, Traffic, moment, pass, sources_a};

use crate::path::{median, round2};

/// Flows of datagrams, one every 25 ms each, that show how long nothing came through.
const PROBES: u32 = 100;
/// Who speaks more often than this, in seconds, is asked how long it had to wait.
const OFTEN: f64 = 0.2;
/// Connections count when they were older than this when it happened, seconds.
const AGE: f64 = 0.2;
/// How long it is watched after each change: longer than TCP needs to try again.
const WATCHED_MS: u64 = 4_000;

/// What `vipgate-bench failover` takes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Gateways that serve one VIP
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=8))]
    gateways: u32,
    /// Connections that stand when one of them is killed
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(100..=20_000))]
    connections: u32,
    /// Kills, of one gateway after the other
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=80))]
    kills: u32,
    /// Milliseconds until the routers stop sending to a dead gateway: 300 is BFD with three times 100 ms
    #[arg(long, default_value_t = 300)]
    detection: u64,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

/// A line of the report.
#[derive(Debug, Serialize)]
struct Line {
    benchmark: &'static str,
    gateways: u32,
    kills: u32,
    router_detection_ms: u64,
    /// Of all kills together: those that stood, and those of them that ended otherwise than by their own will.
    connections: usize,
    lost: usize,
    survival: f64,
    /// The longest time without an answer, of flows that ask all the time: of each kill, over its flows; medians of the kills.
    outage_p50_ms: f64,
    outage_p99_ms: f64,
    outage_longest_ms: f64,
    /// The worst of the kills.
    outage_worst_ms: f64,
    /// The same when the gateway comes back, and what was lost then.
    return_longest_ms: f64,
    lost_by_return: usize,
}

/// What one kill did.
struct Round {
    stood: usize,
    lost: usize,
    /// Milliseconds.
    outages: Vec<f64>,
    return_longest: f64,
    lost_by_return: usize,
}

/// Kills, watches, reports.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut cluster = Cluster::running("failover", options.gateways as usize);
    let server = LineServer::start(cluster.folder.path(), &cluster.server);
    let rounds: Vec<Round> = (0..options.kills).map(|kill| round(&mut cluster, kill, options)).collect();
    let faults: u64 = server.end().iter().map(|record| record.faults).sum();
    ensure!(faults == 0, "the far side heard {faults} lines that weren't whole or in order");
    let of = |what: fn(&Round) -> usize| rounds.iter().map(what).sum::<usize>();
    let middle = |percent: usize| median(rounds.iter().map(|round| quantile(&round.outages, percent)).collect());
    let worst = |what: fn(&Round) -> f64| rounds.iter().map(what).fold(0.0, f64::max);
    let (connections, lost) = (of(|round| round.stood), of(|round| round.lost));
    let line = Line {
        benchmark: "failover",
        gateways: options.gateways,
        kills: options.kills,
        router_detection_ms: options.detection,
        connections,
        lost,
        survival: (1.0 - lost as f64 / connections as f64) * 100.0,
        outage_p50_ms: round2(middle(50)),
        outage_p99_ms: round2(middle(99)),
        outage_longest_ms: round2(middle(100)),
        outage_worst_ms: round2(worst(|round| quantile(&round.outages, 100))),
        return_longest_ms: round2(worst(|round| round.return_longest)),
        lost_by_return: of(|round| round.lost_by_return),
    };
    println!("{}", serde_json::to_string(&line)?);
    Ok(())
}

fn round(cluster: &mut Cluster, kill: u32, options: &Options) -> Round {
    let names = |what: &str| format!("{what}-{kill}");
    // Lines have room for eight digits.
    let first = 10_000_000 + 1_000_000 * kill;
    let held = Traffic::held(SERVER[0], sources_a(0), options.connections);
    let mut held = cluster.crowd(&names("held"), first, &held);
    held.wait_open(Duration::from_mins(1));
    let mut probes = probes(cluster, &names("probes"), first + 300_000);
    let victim = (kill % options.gateways) as usize;
    let died = moment();
    cluster.gateways[victim].kill();
    pass(options.detection);
    cluster.spread_over(&cluster.but(victim));
    pass(WATCHED_MS);
    let [probed] = Clients::end_all([probes]);

    probes = self::probes(cluster, &names("return"), first + 600_000);
    cluster.gateways[victim].start("");
    cluster.wait_whole();
    let returned = moment();
    cluster.spread_over(&cluster.all());
    pass(WATCHED_MS);
    let [returning, held] = Clients::end_all([probes, held]);
    let stood = held.older(AGE, died);
    let [all, lost] = stood.lost();
    // Whose last answer came after the return was lost by it.
    let by_return = |outcome: &Outcome| outcome.0.iter().filter(|it| !it.is_well() && it.longest[1] > returned).count();
    Round {
        stood: all,
        lost,
        outages: probed.0.iter().map(|client| client.longest[0] * 1e3).collect(),
        return_longest: returning.longest(OFTEN) * 1e3,
        lost_by_return: by_return(&stood) + returning.lost()[1],
    }
}

fn probes(cluster: &Cluster, name: &str, first: u32) -> Clients {
    let mut probes = cluster.crowd(name, first, &Traffic::probes(SERVER[0], sources_a(0), PROBES));
    probes.wait_open(Duration::from_secs(20));
    probes
}

/// The value that so many percent of the values don't exceed.
pub(crate) fn quantile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() * percent).div_ceil(100);
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}
