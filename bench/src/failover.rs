//! Failover benchmark: one gateway of a group is killed (SIGKILL) under established connections and restarted later.
//! Measures the share of surviving connections, the outage, and the effect of the restart. Hosts use Linux TCP, routers
//! Linux ECMP. With `--stress` nothing is killed: it counts the failovers of live gateways on an overloaded machine.

mod stress;

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use vipgate_tests::cluster::{
    ClientConfig, ClientResults, Clients, Cluster, LineServer, SERVER, sleep_ms, sources_a, unix_time,
};

use crate::machine::clean_up_on_signals;
use crate::path::{median, round2};

/// UDP probe flows that measure the outage, one datagram every 25 ms each.
const PROBE_FLOWS: u32 = 100;
/// The longest gap is taken over flows with a shorter send interval than this, seconds.
const MAX_SEND_INTERVAL: f64 = 0.2;
/// Connections count if they were older than this at the kill, seconds.
const MIN_AGE: f64 = 0.2;
/// Observation time after each change: longer than TCP's retransmission timeout.
const OBSERVATION_MS: u64 = 4_000;

/// Options of `vipgate-bench failover`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Gateways that share one VIP
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=8))]
    gateways: u32,
    /// Established connections at each kill
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(100..=20_000))]
    connections: u32,
    /// Kills, one gateway after the other
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=80))]
    kills: u32,
    /// Milliseconds until a gateway without heartbeats counts as dead (leases.ttl)
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(100..=60_000))]
    ttl: u64,
    /// Minutes of load on all cores, without a kill
    #[arg(long)]
    stress: Option<u32>,
    /// Milliseconds until the routers remove a dead gateway from ECMP: 300 is BFD with 3 x 100 ms
    #[arg(long, default_value_t = 300)]
    detection: u64,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// The result, printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    gateways: u32,
    kills: u32,
    lease_ttl_ms: u64,
    router_detection_ms: u64,
    /// Sums of all kills: established connections, and those of them that were aborted.
    connections: usize,
    lost: usize,
    survival: f64,
    /// Longest time without a reply per probe flow: percentiles over the flows of a kill, medians over the kills.
    outage_p50_ms: f64,
    outage_p99_ms: f64,
    outage_longest_ms: f64,
    /// Maximum over all kills.
    outage_worst_ms: f64,
    /// After the restart: longest time without a reply, and connections lost.
    #[serde(rename = "return_longest_ms")]
    restart_outage_ms: f64,
    #[serde(rename = "lost_by_return")]
    lost_after_restart: usize,
    /// By kill and probe flow: start and end of its longest time without a reply, in ms after the kill.
    outages_ms: Vec<Vec<[f64; 2]>>,
}

/// Result of one kill and restart.
struct Round {
    established: usize,
    lost: usize,
    /// Milliseconds, one per probe flow.
    outages: Vec<f64>,
    /// The same as start and end, in milliseconds after the kill.
    intervals: Vec<[f64; 2]>,
    restart_outage: f64,
    lost_after_restart: usize,
}

/// Runs the benchmark and prints the report.
pub(crate) fn run(options: &Options) -> Result<()> {
    clean_up_on_signals()?;
    let mut cluster = Cluster::new("failover", options.gateways as usize);
    cluster.start_policyd(&format!("leases: {{ttl: {}ms}}", options.ttl));
    cluster.start_gateways("");
    // What a killed gateway hasn't replicated is lost, and shards move.
    cluster.accounting.allow_all();
    if let Some(minutes) = options.stress {
        return stress::run(&cluster, options, minutes);
    }
    let server = LineServer::start(cluster.folder.path(), &cluster.server);
    let rounds: Vec<Round> = (0..options.kills).map(|kill| round(&mut cluster, kill, options)).collect();
    let faults: u64 = server.end().iter().map(|record| record.errors).sum();
    ensure!(faults == 0, "the server received {faults} truncated or reordered lines");
    let sum = |field: fn(&Round) -> usize| rounds.iter().map(field).sum::<usize>();
    let outage = |percent: usize| median(rounds.iter().map(|round| quantile(&round.outages, percent)).collect());
    let maximum = |field: fn(&Round) -> f64| rounds.iter().map(field).fold(0.0, f64::max);
    let (connections, lost) = (sum(|round| round.established), sum(|round| round.lost));
    let report = Report {
        benchmark: "failover",
        gateways: options.gateways,
        kills: options.kills,
        lease_ttl_ms: options.ttl,
        router_detection_ms: options.detection,
        connections,
        lost,
        survival: (1.0 - lost as f64 / connections as f64) * 100.0,
        outage_p50_ms: round2(outage(50)),
        outage_p99_ms: round2(outage(99)),
        outage_longest_ms: round2(outage(100)),
        outage_worst_ms: round2(maximum(|round| quantile(&round.outages, 100))),
        restart_outage_ms: round2(maximum(|round| round.restart_outage)),
        lost_after_restart: sum(|round| round.lost_after_restart),
        outages_ms: rounds.into_iter().map(|round| round.intervals).collect(),
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

fn round(cluster: &mut Cluster, kill: u32, options: &Options) -> Round {
    let name = |role: &str| format!("{role}-{kill}");
    // Client IDs have eight digits.
    let first_id = 10_000_000 + 1_000_000 * kill;
    let connections = ClientConfig::held_connections(SERVER[0], sources_a(0), options.connections);
    let mut connections = cluster.start_clients(&name("held"), first_id, &connections);
    connections.wait_established(Duration::from_mins(1));
    let probes = start_probes(cluster, &name("probes"), first_id + 300_000);
    let victim = (kill % options.gateways) as usize;
    let killed_at = unix_time();
    cluster.gateways[victim].kill();
    sleep_ms(options.detection);
    cluster.route_via(&cluster.indices_except(victim));
    sleep_ms(OBSERVATION_MS);
    let [kill_probes] = Clients::end_all([probes]);

    let probes = start_probes(cluster, &name("return"), first_id + 600_000);
    cluster.gateways[victim].start("");
    cluster.wait_converged();
    let restarted_at = unix_time();
    cluster.route_via(&cluster.indices());
    sleep_ms(OBSERVATION_MS);
    let [restart_probes, connections] = Clients::end_all([probes, connections]);
    let established = connections.established_before(MIN_AGE, killed_at);
    let [all, lost] = established.total_and_failed();
    // A connection whose last reply came after the restart was lost by the restart.
    let lost_after_restart = |outcome: &ClientResults| {
        outcome.0.iter().filter(|it| !it.succeeded() && it.longest_wait[1] > restarted_at).count()
    };
    Round {
        established: all,
        lost,
        outages: kill_probes.0.iter().map(|client| client.longest_wait[0] * 1e3).collect(),
        intervals: kill_probes.0.iter().map(|client| outage_after(killed_at, client.longest_wait)).collect(),
        restart_outage: restart_probes.longest_wait(MAX_SEND_INTERVAL) * 1e3,
        lost_after_restart: lost_after_restart(&established) + restart_probes.total_and_failed()[1],
    }
}

/// Start and end of a wait of `[seconds, time of its end]`, in milliseconds after an event.
fn outage_after(event: f64, [seconds, end]: [f64; 2]) -> [f64; 2] {
    [end - seconds, end].map(|time| round2((time - event) * 1e3))
}

fn start_probes(cluster: &Cluster, name: &str, first_id: u32) -> Clients {
    let mut probes = cluster.start_clients(name, first_id, &ClientConfig::probes(SERVER[0], sources_a(0), PROBE_FLOWS));
    probes.wait_established(Duration::from_secs(20));
    probes
}

/// The percentile of `values`: nearest rank.
fn quantile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}
