//! Flood benchmark: isolation of tenant A while tenant B's VIP is flooded. Measures goodput and latency of established
//! connections, and new connections, in rounds of three phases: quiet, control, flood.
//!
//! Source, gateway and both tenants share one machine, so a flood also takes CPU time from the measured hosts. The
//! control phase isolates that effect: the same packets at the same rate on the same link, to an address that the
//! gateway doesn't capture. Any effect of the flood beyond the control phase is caused by the gateway. The flood and
//! both hosts of tenant A run on one core, the gateway's worker on another.
//!
//! The report compares floods with the best quiet phase of all rounds, since connections lost in an earlier flood are
//! missing in later quiet phases, too.

mod report;
mod tenant;
mod testbed;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use report::{Phase, PhaseResult, Report};
use tenant::{REPLY_TIMEOUT, SharedCounters, TrafficHost, TrafficState};
use vipgate_tests::flood::{FloodKind, PacketWriter, send};

use crate::flood::testbed::{Testbed, VIP_B};
use crate::wire::HostOptions;
use crate::wire::system_under_test::SutConfig;
use crate::{netns, usage};

/// Timeout for establishing all connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Pause between phases, for packets and replies in flight.
const PAUSE: Duration = Duration::from_millis(500);
/// The gateway's default port quarantine: after it, nothing remains of flushed sessions.
const QUARANTINE: Duration = Duration::from_secs(2);

/// Options of `vipgate-bench flood`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Floods of tenant B, one after the other: syn, syn-ack (blind), udp, fragments, icmp-errors, neighbors (ARP or
    /// ND), pod (from inside)
    #[arg(long, value_delimiter = ',', default_values_t = FloodKind::ALL)]
    kinds: Vec<FloodKind>,
    /// Flood packets per second; 0 is the maximum of the source
    #[arg(long, default_value_t = 50_000)]
    flood_pps: u32,
    /// Session capacity of the gateway; a comma-separated list is measured one by one
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [16_384, 262_144],
        value_parser = clap::value_parser!(u32).range(1024..=16_777_216)
    )]
    capacity: Vec<u32>,
    /// Established connections of tenant A
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=20_000))]
    connections: u32,
    /// New connections of tenant A per second
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(2..=5_000))]
    new_per_second: u32,
    /// Use IPv6
    #[arg(long)]
    ipv6: bool,
    /// Rounds of each flood; reports medians, and the minimum of goodput
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds per phase
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// Fail unless goodput stays at 95 %, no connection is lost, and every new one completes, with no more late
    /// handshakes than without the flood
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    machine: HostOptions,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// Measures each flood at each capacity.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let config = SutConfig::on_core(options.machine.gateway_binary()?, cores[1]);
    netns::prepare()?;
    let mut missed = Vec::new();
    for &capacity in &options.capacity {
        for &kind in &options.kinds {
            let rounds = measure(options, &config, cores[0], capacity, kind);
            let rounds = rounds.with_context(|| format!("{kind:?}, capacity {capacity}"))?;
            let line = Report::new(kind, options.ipv6, capacity, options.flood_pps, &rounds);
            ensure!(!kind.needs_backends() || line.has_backend_replies(), "{kind}: tenant B's backends sent no reply");
            println!("{}", serde_json::to_string(&line)?);
            missed.extend(line.missed_target());
        }
    }
    for target in &missed {
        eprintln!("vipgate-bench: {target}");
    }
    if options.check && !missed.is_empty() {
        bail!("{} of {} targets are missed", missed.len(), options.capacity.len() * options.kinds.len());
    }
    Ok(())
}

fn measure(
    options: &Options,
    config: &SutConfig,
    core: usize,
    capacity: u32,
    kind: FloodKind,
) -> Result<Vec<[PhaseResult; 3]>> {
    let has_backends = kind.needs_backends();
    let testbed = Testbed::build(config, capacity, has_backends)?;
    let state = Arc::new(TrafficState::new()?);
    thread::scope(|scope| {
        let hosts = [(true, &testbed.pods), (false, &testbed.external)].map(|(is_pods, namespace)| {
            let host = TrafficHost {
                is_pod_host: is_pods,
                has_backends: is_pods && has_backends,
                family: usize::from(options.ipv6),
                connections: options.connections / 2,
                new_per_second: options.new_per_second / 2,
            };
            let state = state.clone();
            scope.spawn(move || namespace.run(core, || host.run(&state)))
        });
        let rounds = run_rounds(options, &testbed, &state, core, kind);
        state.stop();
        for host in hosts {
            host.join().ok().context("a thread of tenant A has panicked")??;
        }
        rounds
    })
}

fn run_rounds(
    options: &Options,
    testbed: &Testbed,
    state: &TrafficState,
    core: usize,
    kind: FloodKind,
) -> Result<Vec<[PhaseResult; 3]>> {
    let (start, all) = (Instant::now(), options.connections / 2 * 2);
    while state.established() < all {
        let established = state.established();
        ensure!(
            start.elapsed() < CONNECT_TIMEOUT,
            "{established} of {all} connections are established after {CONNECT_TIMEOUT:?}"
        );
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(2 * PAUSE);
    let mut completed: Vec<CompletedPhase> = Vec::new();
    for round in 0..options.rounds {
        for phase in Phase::ALL {
            let before = read(testbed)?;
            let around = state.next_phase()?;
            let start = Instant::now();
            let sent = run_phase(options, testbed, core, kind, phase, round)?;
            let (counters, length) = (state.next_phase()?, start.elapsed());
            let after = read(testbed)?;
            let mut current =
                CompletedPhase { counters, surrounding: Vec::new(), duration: length, sent, before, after };
            completed.last_mut().unwrap_or(&mut current).surrounding.push(around);
            completed.push(current);
            if phase == Phase::Flood {
                // The next quiet phase starts in the state of the first one.
                testbed.vipgate.run_command(&["sessions", "flush", "--vip", VIP_B[usize::from(options.ipv6)]])?;
                thread::sleep(QUARANTINE);
            }
            thread::sleep(PAUSE);
        }
    }
    let around = state.next_phase()?;
    completed.last_mut().context("no phase was run")?.surrounding.push(around);
    // After this, each message has a reply or its connection counts as lost.
    thread::sleep(REPLY_TIMEOUT + 2 * PAUSE);
    let results: Vec<PhaseResult> = completed.iter().map(PhaseResult::new).collect();
    let (rounds, _) = results.as_chunks::<3>();
    Ok(rounds.to_vec())
}

/// Runs a phase; returns the number of packets sent by the source.
fn run_phase(
    options: &Options,
    testbed: &Testbed,
    core: usize,
    kind: FloodKind,
    phase: Phase,
    round: u32,
) -> Result<u64> {
    let duration = Duration::from_secs(options.seconds);
    if phase == Phase::Quiet {
        thread::sleep(duration);
        return Ok(0);
    }
    let target = testbed::target(kind, usize::from(options.ipv6), phase == Phase::Control);
    let writer = PacketWriter::new(kind, target, u64::from(round));
    testbed
        .attacker(kind)
        .run(core, || send("eth0", writer, options.flood_pps, duration).context("cannot send the flood"))
}

/// A completed phase.
#[derive(Debug)]
struct CompletedPhase {
    counters: SharedCounters,
    /// Counters of the interval until the next phase, and for the first phase those of the setup before it: losses in
    /// them count for this phase.
    surrounding: Vec<SharedCounters>,
    duration: Duration,
    /// Flood packets.
    sent: u64,
    before: CounterSample,
    after: CounterSample,
}

/// A sample of the gateway's and the machine's counters.
#[derive(Clone, Debug)]
struct CounterSample {
    at: Instant,
    sessions: u64,
    drops: BTreeMap<String, u64>,
    /// SYN-ACKs of tenant B's backends.
    syn_acks: u64,
    /// CPU time of the gateway process, in ticks of 10 ms.
    gateway_ticks: u64,
    /// CPU pressure: microseconds in which some thread waited for a core.
    pressure: Option<u64>,
}

fn read(testbed: &Testbed) -> Result<CounterSample> {
    let gateway = usage::process_ticks(testbed.gateway_pid())?;
    let (at, pressure) = (Instant::now(), usage::cpu_pressure());
    let drops = testbed.vipgate.query("drops")?;
    let drops = drops.as_object().context("`vipgate drops` printed no JSON object")?;
    Ok(CounterSample {
        at,
        sessions: testbed.vipgate.query("status")?["sessions"]
            .as_u64()
            .context("`vipgate status` has no `sessions`")?,
        drops: drops.iter().filter_map(|(reason, count)| Some((reason.clone(), count.as_u64()?))).collect(),
        syn_acks: testbed.backend_syn_acks()?,
        gateway_ticks: gateway,
        pressure,
    })
}
