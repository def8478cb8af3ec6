//! Packets of open sessions.

use std::sync::Barrier;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use vipgate_dataplane::address::V6;

use crate::Direction;
use crate::group::{self, Holder, Tags};
use crate::load::{Load, Protocol};
use crate::order::Order;
use crate::packets::PacketFamily;
use crate::rig::{Control, Rig};
use crate::yardstick;

/// Packets of one measured round.
pub(crate) const PACKETS: u64 = 1 << 20;

/// Measures packets of open sessions: parse, look up, rewrite, checksums, timers, statistics
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Sessions that are open, of all workers together; several, separated by commas, are measured one after the other
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 65_536, 1_048_576])]
    sessions: Vec<u32>,
    /// Which way packets go
    #[arg(long, value_enum, default_value_t = Direction::Mix)]
    direction: Direction,
    /// In which order they come
    #[arg(long, value_enum, default_value_t = Order::Uniform)]
    order: Order,
    /// What the sessions carry; tcp with --direction forward, reply and mix
    #[arg(long, value_enum, default_value_t = Protocol::Udp)]
    protocol: Protocol,
    /// IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Bytes of a frame with its checksum, as the industry counts them: on veth it is 4 bytes shorter; with --ipv6 at least 66
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(64..=1518))]
    size: u16,
    /// Workers at once, each on its own core and with its share of the sessions
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Measured rounds; the median is reported
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Measured {
    benchmark: &'static str,
    sessions: u32,
    direction: String,
    order: String,
    protocol: String,
    family: &'static str,
    size: u16,
    workers: u32,
    /// Of one worker; with several, the median of theirs.
    ns_per_packet: f64,
    /// Of all workers together.
    mpps: f64,
    /// Between gateways: the same with a tag in each packet, measured in turn with those without, and what that adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    authenticated_ns_per_packet: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    authentication_ns: Option<f64>,
    bytes_per_session: f64,
    /// Pages that the table lies on.
    pages: &'static str,
    /// A packet that is only forwarded, and a random line of as much memory as the table has, here and now.
    forwarding_ns: f64,
    random_line_ns: f64,
    /// What those two take together, as a share of what a packet takes.
    share_of_limit: f64,
    batch_p50_ns: u64,
    batch_p999_ns: u64,
    /// The same of as much time of only forwarding: what the machine takes from anyone.
    forwarding_p50_ns: u64,
    forwarding_p999_ns: u64,
    rounds_ns: Vec<f64>,
}

/// Measures each number of sessions.
pub(crate) fn run(options: &Options) -> Result<()> {
    let has_connections = matches!(options.direction, Direction::Forward | Direction::Reply | Direction::Mix);
    ensure!(options.protocol == Protocol::Udp || has_connections, "--protocol tcp goes with forward, reply and mix");
    for &sessions in &options.sessions {
        ensure!(sessions >= options.workers, "--sessions must be at least 1 for each worker");
        let result = if options.ipv6 { measure::<V6>(sessions, options) } else { measure::<u32>(sessions, options) }?;
        println!("{}", serde_json::to_string(&result)?);
    }
    Ok(())
}

/// What one worker did.
struct Share {
    rounds_ns: Vec<f64>,
    /// The same with tags, where packets go between gateways.
    authenticated_ns: Vec<f64>,
    batches: Histogram<u64>,
    bytes_per_session: f64,
    table_bytes: usize,
    pages: &'static str,
}

fn measure<A: PacketFamily>(sessions: u32, options: &Options) -> Result<Measured> {
    let shortest = if options.protocol == Protocol::Tcp { A::SHORTEST_TCP } else { A::SHORTEST };
    let size = (options.size - 4).max(shortest);
    let each = sessions / options.workers;
    let barrier = Barrier::new(options.workers as usize);
    let shares = thread::scope(|scope| {
        let workers: Vec<_> = (0..options.workers)
            .map(|worker| {
                let barrier = &barrier;
                scope.spawn(move || {
                    if options.workers > 1 {
                        core_affinity::set_for_current(core_affinity::CoreId { id: worker as usize });
                    }
                    work::<A>(each, size, options, barrier)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().map_err(|_| anyhow!("a worker panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let medians: Vec<f64> = shares.iter().map(|share| median(share.rounds_ns.clone())).collect();
    let authenticated = median_of(shares.iter().map(|share| median(share.authenticated_ns.clone())));
    let mpps = medians.iter().map(|ns| 1_000.0 / ns).sum::<f64>();
    let first = shares.first().context("at least one worker")?;
    let ((forwarding_ns, forwarding), random_line_ns) =
        (yardstick::forwarding(size)?, yardstick::random_line(first.table_bytes)?);
    let ns = median(medians);
    Ok(Measured {
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

/// One worker's part: opens its sessions, then sends packets of them.
fn work<A: PacketFamily>(sessions: u32, size: u16, options: &Options, barrier: &Barrier) -> Result<Share> {
    let direction = options.direction;
    let (mut rig, mut control) = if direction.is_between_gateways() {
        let (rig, control) = Rig::in_group(sessions, Rig::lasting(), false, Tags::Without)?;
        (rig, Some(control))
    } else {
        (Rig::new(sessions)?, None)
    };
    let mut load = Load::<A>::open_with(options.protocol, &mut rig, sessions, size, direction, options.order)?;
    // What this gateway has it keeps as copies: its table is full, whatever it looks for in it.
    let holder = if direction == Direction::TunnelIn { Holder::This } else { Holder::Other };
    if let Some(control) = control.as_mut().filter(|_| holder == Holder::Other) {
        group::agree(control, holder, false, Tags::Without);
        load.settle(&mut rig)?;
    }
    let mut batches = Histogram::<u64>::new(3)?;
    let (mut rounds_ns, mut authenticated_ns) = (Vec::new(), Vec::new());
    barrier.wait();
    // The first round warms up.
    load.round(&mut rig, PACKETS, |_| Ok(()))?;
    for _ in 0..options.rounds {
        barrier.wait();
        rounds_ns.push(load.round(&mut rig, PACKETS, |turn| Ok(batches.record(turn.as_nanos() as u64)?))?);
        if let Some(control) = &mut control {
            tag(Tags::With, holder, control, &mut load, &mut rig)?;
            authenticated_ns.push(load.round(&mut rig, PACKETS, |_| Ok(()))?);
            tag(Tags::Without, holder, control, &mut load, &mut rig)?;
        }
    }
    rounds_ns.sort_by(f64::total_cmp);
    let (table_bytes, pages) = rig.table::<A>();
    let bytes_per_session = table_bytes as f64 / f64::from(sessions);
    Ok(Share { rounds_ns, authenticated_ns, batches, bytes_per_session, table_bytes, pages })
}

/// Packets between gateways have tags from now on, or none. What that changes beside is done before anything is measured.
fn tag<A: PacketFamily>(
    tags: Tags,
    holder: Holder,
    control: &mut Control,
    load: &mut Load<A>,
    rig: &mut Rig,
) -> Result<()> {
    group::agree(control, holder, false, tags);
    load.set_tags(tags)?;
    load.settle(rig)?;
    Ok(())
}

/// The median of several workers' medians, if they have any.
fn median_of(medians: impl Iterator<Item = f64>) -> Option<f64> {
    Some(median(medians.collect())).filter(|median| !median.is_nan())
}

/// The middle one; of two, the higher.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(crate) fn round2(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
