//! Floods at one tenant's VIP, and what another tenant notices: goodput and delay of connections that stand, and new connections, in
//! rounds of three phases: quiet, control, flood.
//!
//! Source, gateway and both tenants share a small machine, so a flood also takes processor time from who is measured. The control
//! tells that apart: the same packets at the same rate, on the same cable, to an address that the gateway doesn't capture. What a flood
//! does beyond its control is the gateway's. The flood and both sides of tenant A run on one core, the gateway's worker on another.
//!
//! The report compares floods with the best quiet phase of all rounds: connections that an earlier flood cost are missing in later ones, too.

mod ground;
mod report;
mod tenant;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use ground::{Ground, VIP_B};
use report::{Line, Measured, Phase};
use tenant::{REPLY_TIMEOUT, Shared, Side, Stage};
use vipgate_tests::flood::{Kind, Writer, send};

use crate::netns;
use crate::usage;
use crate::wire::Machine;
use crate::wire::subject::{Placement, Setting};

/// How long all connections may take to stand.
const OPENING: Duration = Duration::from_secs(20);
/// What a phase leaves behind comes to rest before the next one.
const REST: Duration = Duration::from_millis(500);
/// So long ports rest by default after their session: what was flushed is gone for good then.
const QUARANTINE: Duration = Duration::from_secs(2);

/// What `vipgate-bench flood` takes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What tenant B gets, one after the other: syn, syn-ack (blind), udp, fragments, icmp-errors, neighbors (ARP or ND), pod (from inside)
    #[arg(long, value_delimiter = ',', default_values_t = Kind::ALL)]
    kinds: Vec<Kind>,
    /// Packets of the flood a second; 0 is as many as the source can send
    #[arg(long, default_value_t = 50_000)]
    flood_pps: u32,
    /// Sessions that the gateway's table has room for; several, separated by commas, are measured one after the other
    #[arg(long, value_delimiter = ',', default_values_t = [16_384, 262_144], value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    capacity: Vec<u32>,
    /// Connections of tenant A that stand
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=20_000))]
    connections: u32,
    /// New connections of tenant A a second
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(2..=5_000))]
    new_per_second: u32,
    /// Everything over IPv6
    #[arg(long)]
    ipv6: bool,
    /// Rounds of each kind; medians are reported, and the worst of goodput
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each phase
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// Fail unless goodput stays at 95 %, no connection is lost, and every new one is served, as promptly as without the flood
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    machine: Machine,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

/// Measures each table with each kind.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let setting = Setting { gateway: options.machine.program()?, core: cores[1], placement: Placement::Source };
    netns::prepare()?;
    let mut missed = Vec::new();
    for &capacity in &options.capacity {
        for &kind in &options.kinds {
            let rounds = measure(options, &setting, cores[0], capacity, kind);
            let rounds = rounds.with_context(|| format!("{kind:?}, a table of {capacity}"))?;
            let line = Line::new(kind, options.ipv6, capacity, options.flood_pps, &rounds);
            ensure!(!kind.needs_backends() || line.is_answered(), "{kind}: tenant B's backends have answered nothing");
            println!("{}", serde_json::to_string(&line)?);
            missed.extend(line.missed());
        }
    }
    for miss in &missed {
        eprintln!("vipgate-bench: {miss}");
    }
    if options.check && !missed.is_empty() {
        bail!("{} of {} aims are missed", missed.len(), options.capacity.len() * options.kinds.len());
    }
    Ok(())
}

fn measure(options: &Options, setting: &Setting, core: usize, capacity: u32, kind: Kind) -> Result<Vec<[Measured; 3]>> {
    let has_backends = kind.needs_backends();
    let ground = Ground::build(setting, capacity, has_backends)?;
    let stage = Arc::new(Stage::new()?);
    thread::scope(|scope| {
        let sides = [(true, &ground.pods), (false, &ground.world)].map(|(is_pods, host)| {
            let side = Side {
                is_pods,
                has_backends: is_pods && has_backends,
                family: usize::from(options.ipv6),
                connections: options.connections / 2,
                new_per_second: options.new_per_second / 2,
            };
            let stage = stage.clone();
            scope.spawn(move || host.run(core, || side.run(&stage)))
        });
        let rounds = play(options, &ground, &stage, core, kind);
        stage.end();
        for side in sides {
            side.join().ok().context("tenant A has panicked")??;
        }
        rounds
    })
}

fn play(options: &Options, ground: &Ground, stage: &Stage, core: usize, kind: Kind) -> Result<Vec<[Measured; 3]>> {
    let (begun, all) = (Instant::now(), options.connections / 2 * 2);
    while stage.standing() < all {
        let standing = stage.standing();
        ensure!(begun.elapsed() < OPENING, "{standing} of {all} connections stand after {OPENING:?}");
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(2 * REST);
    let mut played: Vec<Played> = Vec::new();
    for round in 0..options.rounds {
        for phase in Phase::ALL {
            let before = read(ground)?;
            let around = stage.next()?;
            let begun = Instant::now();
            let sent = flood(options, ground, core, kind, phase, round)?;
            let (tally, length) = (stage.next()?, begun.elapsed());
            let after = read(ground)?;
            let mut current = Played { tally, around: Vec::new(), length, sent, before, after };
            played.last_mut().unwrap_or(&mut current).around.push(around);
            played.push(current);
            if phase == Phase::Flood {
                // The next quiet phase is to be as the first one was.
                ground.vipgate.run(&["sessions", "flush", "--vip", VIP_B[usize::from(options.ipv6)]])?;
                thread::sleep(QUARANTINE);
            }
            thread::sleep(REST);
        }
    }
    let around = stage.next()?;
    played.last_mut().context("no phase was played")?.around.push(around);
    // By then each line has a reply, or its connection is lost.
    thread::sleep(REPLY_TIMEOUT + 2 * REST);
    let measured: Vec<Measured> = played.iter().map(Measured::new).collect();
    let (rounds, _) = measured.as_chunks::<3>();
    Ok(rounds.to_vec())
}

/// Lets a phase pass; how many packets the source has sent in it.
fn flood(options: &Options, ground: &Ground, core: usize, kind: Kind, phase: Phase, round: u32) -> Result<u64> {
    let duration = Duration::from_secs(options.seconds);
    if phase == Phase::Quiet {
        thread::sleep(duration);
        return Ok(0);
    }
    let target = ground::target(kind, usize::from(options.ipv6), phase == Phase::Control);
    let writer = Writer::new(kind, target, u64::from(round));
    ground.attacker(kind).run(core, || send("eth0", writer, options.flood_pps, duration).context("cannot flood"))
}

/// A phase that is over.
#[derive(Debug)]
struct Played {
    tally: Shared,
    /// Of the time until the next phase, and of the opening before the first: losses in it count for this phase.
    around: Vec<Shared>,
    length: Duration,
    /// Packets of the flood.
    sent: u64,
    before: Reading,
    after: Reading,
}

/// What is counted at a moment.
#[derive(Clone, Debug)]
struct Reading {
    at: Instant,
    sessions: u64,
    drops: BTreeMap<String, u64>,
    /// SYNs that tenant B's backends have answered.
    answered: u64,
    /// Of the gateway's process, in hundredths of a second.
    gateway: u64,
    /// Microseconds in which somebody waited for a core.
    pressure: Option<u64>,
}

fn read(ground: &Ground) -> Result<Reading> {
    let gateway = usage::process(ground.process())?;
    let (at, pressure) = (Instant::now(), usage::pressure());
    let drops = ground.vipgate.ask("drops")?;
    let drops = drops.as_object().context("`vipgate drops` prints no object")?;
    Ok(Reading {
        at,
        sessions: ground.vipgate.ask("status")?["sessions"].as_u64().context("the gateway says no sessions")?,
        drops: drops.iter().filter_map(|(reason, count)| Some((reason.clone(), count.as_u64()?))).collect(),
        answered: ground.answered()?,
        gateway,
        pressure,
    })
}
