//! Packet path benchmark: packets of established sessions through the engine, in memory.

use std::sync::Barrier;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use vipgate_dataplane::flow::address::V6;

use crate::load::{LoadGenerator, Protocol};
use crate::packet_order::Order;
use crate::packets::PacketFamily;
use crate::peer_gateway::{ShardOwner, TunnelTags};
use crate::rig::{PolicyControl, Rig};
use crate::{Direction, baseline, peer_gateway};

/// Packets per measured round.
pub(crate) const PACKETS_PER_ROUND: u64 = 1 << 20;

/// Measures packets of established sessions: parse, lookup, rewrite, checksums, timers, statistics
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Established sessions of all workers; a comma-separated list is measured one by one
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 65_536, 1_048_576])]
    sessions: Vec<u32>,
    /// Direction of packets
    #[arg(long, value_enum, default_value_t = Direction::Mix)]
    direction: Direction,
    /// Distribution of packets over sessions
    #[arg(long, value_enum, default_value_t = Order::Uniform)]
    order: Order,
    /// Transport protocol; tcp only with --direction forward, reply and mix
    #[arg(long, value_enum, default_value_t = Protocol::Udp)]
    protocol: Protocol,
    /// IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Frame size in bytes including FCS (RFC 2544); with --ipv6 at least 66
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(64..=1518))]
    size: u16,
    /// Concurrent workers, each on its own core and with an equal part of the sessions
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Measured rounds; the median is reported
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    sessions: u32,
    direction: String,
    order: String,
    protocol: String,
    family: &'static str,
    size: u16,
    workers: u32,
    /// Per worker: the median of all workers.
    ns_per_packet: f64,
    /// Sum of all workers.
    mpps: f64,
    /// Tunnel packets: the same with an authentication tag per packet, in alternating rounds, and the difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    authenticated_ns_per_packet: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    authentication_ns: Option<f64>,
    bytes_per_session: f64,
    /// Page size of the session table.
    pages: &'static str,
    /// Baseline of this machine in this run: forwarding a packet without NAT, and a random read in as much memory as
    /// the table.
    forwarding_ns: f64,
    random_line_ns: f64,
    /// Sum of both baselines divided by `ns_per_packet`.
    share_of_limit: f64,
    batch_p50_ns: u64,
    batch_p999_ns: u64,
    /// The same for the forwarding baseline: jitter of the machine.
    forwarding_p50_ns: u64,
    forwarding_p999_ns: u64,
    rounds_ns: Vec<f64>,
}

/// Measures each number of sessions.
pub(crate) fn run(options: &Options) -> Result<()> {
    let supports_tcp = matches!(options.direction, Direction::Forward | Direction::Reply | Direction::Mix);
    ensure!(
        options.protocol == Protocol::Udp || supports_tcp,
        "--protocol tcp requires --direction forward, reply or mix"
    );
    for &sessions in &options.sessions {
        ensure!(sessions >= options.workers, "--sessions must be at least 1 per worker");
        let report = if options.ipv6 { measure::<V6>(sessions, options) } else { measure::<u32>(sessions, options) }?;
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}

/// Result of one worker.
struct WorkerResult {
    rounds_ns: Vec<f64>,
    /// The same with authentication tags, for tunnel packets.
    authenticated_ns: Vec<f64>,
    batches: Histogram<u64>,
    bytes_per_session: f64,
    table_bytes: usize,
    pages: &'static str,
}

fn measure<A: PacketFamily>(sessions: u32, options: &Options) -> Result<Report> {
    let min_size = if options.protocol == Protocol::Tcp { A::MIN_TCP_FRAME } else { A::MIN_FRAME };
    let size = (options.size - 4).max(min_size);
    let sessions_per_worker = sessions / options.workers;
    let barrier = Barrier::new(options.workers as usize);
    let results = thread::scope(|scope| {
        let workers: Vec<_> = (0..options.workers)
            .map(|worker| {
                let barrier = &barrier;
                scope.spawn(move || {
                    if options.workers > 1 {
                        core_affinity::set_for_current(core_affinity::CoreId { id: worker as usize });
                    }
                    run_worker::<A>(sessions_per_worker, size, options, barrier)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().map_err(|_| anyhow!("a worker panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let medians: Vec<f64> = results.iter().map(|result| median(result.rounds_ns.clone())).collect();
    let authenticated = median_of(results.iter().map(|result| median(result.authenticated_ns.clone())));
    let mpps = medians.iter().map(|ns| 1_000.0 / ns).sum::<f64>();
    let first = results.first().context("no worker")?;
    let ((forwarding_ns, forwarding), random_line_ns) =
        (baseline::measure_forwarding(size)?, baseline::measure_random_reads(first.table_bytes)?);
    let ns = median(medians);
    Ok(Report {
        benchmark: "path",
        sessions,
        direction: format!("{:?}", options.direction).to_lowercase(),
        order: format!("{:?}", options.order).to_lowercase(),
        protocol: format!("{:?}", options.protocol).to_lowercase(),
        family: A::NAME,
        size: size + 4,
        workers: options.workers,
        ns_per_packet: round2(ns),
        mpps: round2(mpps),
        authenticated_ns_per_packet: authenticated.map(round2),
        authentication_ns: authenticated.map(|with| round2(with - ns)),
        bytes_per_session: round2(first.bytes_per_session),
        pages: first.pages,
        forwarding_ns: round2(forwarding_ns),
        random_line_ns: round2(random_line_ns),
        share_of_limit: round2((forwarding_ns + random_line_ns) / ns),
        batch_p50_ns: first.batches.value_at_quantile(0.5),
        batch_p999_ns: first.batches.value_at_quantile(0.999),
        forwarding_p50_ns: forwarding.value_at_quantile(0.5),
        forwarding_p999_ns: forwarding.value_at_quantile(0.999),
        rounds_ns: first.rounds_ns.iter().map(|&ns| round2(ns)).collect(),
    })
}

/// Runs one worker: opens its sessions, then sends packets of them.
fn run_worker<A: PacketFamily>(sessions: u32, size: u16, options: &Options, barrier: &Barrier) -> Result<WorkerResult> {
    let direction = options.direction;
    let (mut rig, mut control) = if direction.involves_peer() {
        let (rig, control) = Rig::with_peer(sessions, Rig::long_timeouts(), false, TunnelTags::Disabled)?;
        (rig, Some(control))
    } else {
        (Rig::new(sessions)?, None)
    };
    let mut load = LoadGenerator::<A>::open(options.protocol, &mut rig, sessions, size, direction, options.order)?;
    // When the peer becomes the owner, the sessions become standby sessions: the table stays full.
    let owner = if direction == Direction::TunnelIn { ShardOwner::Local } else { ShardOwner::Peer };
    if let Some(control) = control.as_mut().filter(|_| owner == ShardOwner::Peer) {
        control.set_members(&peer_gateway::membership(owner, false, TunnelTags::Disabled));
        load.send_all_sessions(&mut rig)?;
    }
    let mut batches = Histogram::<u64>::new(3)?;
    let (mut rounds_ns, mut authenticated_ns) = (Vec::new(), Vec::new());
    barrier.wait();
    // Warm-up round.
    load.run_round(&mut rig, PACKETS_PER_ROUND, |_| Ok(()))?;
    for _ in 0..options.rounds {
        barrier.wait();
        rounds_ns
            .push(load.run_round(&mut rig, PACKETS_PER_ROUND, |batch| Ok(batches.record(batch.as_nanos() as u64)?))?);
        if let Some(control) = &mut control {
            set_tunnel_tags(TunnelTags::Enabled, owner, control, &mut load, &mut rig)?;
            authenticated_ns.push(load.run_round(&mut rig, PACKETS_PER_ROUND, |_| Ok(()))?);
            set_tunnel_tags(TunnelTags::Disabled, owner, control, &mut load, &mut rig)?;
        }
    }
    rounds_ns.sort_by(f64::total_cmp);
    let (table_bytes, pages) = rig.table_memory::<A>();
    let bytes_per_session = table_bytes as f64 / f64::from(sessions);
    Ok(WorkerResult { rounds_ns, authenticated_ns, batches, bytes_per_session, table_bytes, pages })
}

/// Enables or disables tags of tunnel packets, and lets sessions adapt to the new policy before the next measurement.
fn set_tunnel_tags<A: PacketFamily>(
    tags: TunnelTags,
    owner: ShardOwner,
    control: &mut PolicyControl,
    load: &mut LoadGenerator<A>,
    rig: &mut Rig,
) -> Result<()> {
    control.set_members(&peer_gateway::membership(owner, false, tags));
    load.set_tags(tags)?;
    load.send_all_sessions(rig)
}

/// The median of the workers' medians, if there are any.
fn median_of(medians: impl Iterator<Item = f64>) -> Option<f64> {
    Some(median(medians.collect())).filter(|median| !median.is_nan())
}

/// The median; of an even number of values, the upper one.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(crate) fn round2(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
