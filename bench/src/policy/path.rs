//! How much of its speed the packet path keeps while policy changes: packets of open sessions on one core, changes on another,
//! in alternating rounds with and without them.
//!
//! What counts as time, for changes too, is that in turns of the worker: between them, packets are written and checked. So
//! there are as many changes for each packet as there would be under full load.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use serde::Serialize;
use vipgate::xds::client::PACE;
use vipgate_dataplane::address::Address;
use vipgate_dataplane::counters::{Counter, Direction as Counted};
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::snapshot::change::{Gone, PolicyChange};

use super::churn::{Churn, Random, endpoint_address, vip_address};
use super::noise::{Noise, Watch};
use super::{Size, show};
use crate::Direction;
use crate::load::{Load, OPENING};
use crate::netns::pin;
use crate::order::Order;
use crate::packets::{FIRST_POD, PODS, VIP};
use crate::path::{PACKETS, median, round2};
use crate::rig::{Control, Rig, pod};

/// Bytes of a frame without its checksum.
const SIZE: u16 = 60;
/// Packets of a round: some tenths of a second, so that a round has many batches of changes.
const ROUND: u64 = 4 * PACKETS;
/// How often who makes changes looks whether any are due.
const LOOK: Duration = Duration::from_micros(100);
/// The longest wait for changes that are due.
const PATIENCE: Duration = Duration::from_secs(10);

/// What `vipgate-bench policy path` takes.
#[derive(Clone, Debug, Args)]
pub(super) struct Options {
    /// Sessions that are open; several, separated by commas, are measured one after the other
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 65_536, 1_048_576], value_parser = clap::value_parser!(u32).range(1..))]
    sessions: Vec<u32>,
    #[command(flatten)]
    size: Size,
    /// Changes a second, each of one endpoint
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Changes are gathered for so many milliseconds, and take effect together: as long as a gateway gathers what its server says
    #[arg(long, default_value_t = PACE.as_millis() as u32, value_parser = clap::value_parser!(u32).range(1..=1000))]
    batch: u32,
    /// Measured rounds with changes, and as many without; the median is reported
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Cores of changes and packets
    #[arg(long, value_delimiter = ',', num_args = 1, default_values_t = [0, 1])]
    cores: Vec<usize>,
    /// One JSON object on a line for each number of sessions
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Line {
    benchmark: &'static str,
    sessions: u32,
    vips: u32,
    endpoints: u32,
    rate: u32,
    batch_ms: u32,
    /// Without changes, and with them.
    idle_ns_per_packet: f64,
    changing_ns_per_packet: f64,
    /// The speed with changes divided by that without, of neighbouring rounds; their median.
    ratio: f64,
    changes: u64,
    /// Of these, how many concerned a pod that has sessions.
    changes_with_sessions: u64,
    changes_per_second: f64,
    /// Snapshots of policy that the worker was given, and what it took to build one and put it in force.
    snapshots: u64,
    ms_per_snapshot: f64,
    packets: u64,
    idle_rounds_ns: Vec<f64>,
    changing_rounds_ns: Vec<f64>,
    #[serde(flatten)]
    noise: Noise,
}

/// Measures each number of sessions.
pub(super) fn run(options: &Options) -> Result<()> {
    let cores = <[usize; 2]>::try_from(options.cores.as_slice()).ok();
    let cores = cores.context("--cores takes two: of changes and packets")?;
    ensure!(cores[0] != cores[1], "--cores: on one core, changes and packets would measure the scheduler");
    for &sessions in &options.sessions {
        let line = measure(options, sessions, cores, ROUND)?;
        show(&line, options.json)?;
        line.noise.warn();
    }
    Ok(())
}

/// What was changed.
#[derive(Clone, Copy, Debug, Default)]
struct Changed {
    changes: u64,
    with_sessions: u64,
    snapshots: u64,
    /// Time in which they were made.
    busy: Duration,
    endpoints: usize,
}

fn measure(options: &Options, sessions: u32, [changer, worker]: [usize; 2], packets: u64) -> Result<Line> {
    let churn = Churn::new(options.size);
    let timeouts = Timeouts { udp: 3_600_000, ..Timeouts::default() };
    let clock = Clock::default();
    let work = || {
        pin(None, worker)?;
        let (mut rig, control) = Rig::beside(sessions, timeouts, churn.set())?;
        let mut load = Load::<u32>::open(&mut rig, sessions, SIZE, Direction::Mix, Order::Uniform)?;
        let mut sent = OPENING * u64::from(sessions) + load.settle(&mut rig)?;
        load.round(&mut rig, packets, |_| Ok(()))?;
        let watch = Watch::begin(&[])?;
        let (mut idle, mut changing) = (Vec::new(), Vec::new());
        let changed = thread::scope(|scope| {
            let changer = scope.spawn(|| {
                pin(None, changer)?;
                change(churn, control, options, &clock)
            });
            let rounds = (0..options.rounds).try_for_each(|_| {
                idle.push(load.round(&mut rig, packets, |_| Ok(()))?);
                let round = load.round(&mut rig, packets, |turn| {
                    clock.advance(turn);
                    Ok(())
                });
                changing.push(round?);
                // What the last changes have left to do isn't the next round's.
                clock.rest()?;
                sent += 2 * packets + load.settle(&mut rig)?;
                Ok(())
            });
            clock.end();
            let changed = changer.join().map_err(|_| anyhow!("who changes policy has panicked"))?;
            // Why it has stopped says more than that it has.
            changed.and_then(|changed| rounds.map(|()| changed))
        })?;
        let noise = watch.end()?;
        check(&rig, sessions, sent + packets)?;
        Ok::<_, anyhow::Error>((idle, changing, changed, sent + packets, noise))
    };
    // A thread of its own: this one isn't pinned.
    let done = thread::scope(|scope| scope.spawn(work).join()).map_err(|_| anyhow!("the worker has panicked"))?;
    let (idle, changing, changed, sent, noise) = done?;
    // One more comes than goes, where the last third is cut off.
    let expected = options.size.endpoints as usize + 2 * PODS as usize;
    ensure!(
        changed.endpoints.abs_diff(expected) <= 1,
        "there are {} endpoints in the end, not {expected}",
        changed.endpoints
    );
    let ratios = idle.iter().zip(&changing).map(|(idle, changing)| idle / changing).collect();
    let rounded = |values: &[f64]| values.iter().map(|&value| round2(value)).collect();
    Ok(Line {
        benchmark: "policy_path",
        sessions,
        vips: options.size.vips,
        endpoints: options.size.endpoints,
        rate: options.rate,
        batch_ms: options.batch,
        idle_rounds_ns: rounded(&idle),
        changing_rounds_ns: rounded(&changing),
        idle_ns_per_packet: round2(median(idle)),
        changing_ns_per_packet: round2(median(changing)),
        ratio: (median(ratios) * 1e4).round() / 1e4,
        changes: changed.changes,
        changes_with_sessions: changed.with_sessions,
        changes_per_second: round2(changed.changes as f64 / clock.now().as_secs_f64()),
        snapshots: changed.snapshots,
        ms_per_snapshot: round2(changed.busy.as_secs_f64() * 1e3 / changed.snapshots.max(1) as f64),
        packets: sent,
        noise,
    })
}

/// Time in turns of the worker, while changes are made.
#[derive(Debug, Default)]
struct Clock {
    nanoseconds: AtomicU64,
    /// Up to when changes have been made.
    made: AtomicU64,
    is_over: AtomicBool,
}

impl Clock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Acquire))
    }

    fn advance(&self, turn: Duration) {
        self.nanoseconds.fetch_add(turn.as_nanos() as u64, Ordering::Release);
    }

    /// Waits until all changes are made that are due.
    fn rest(&self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.made.load(Ordering::Acquire) < self.nanoseconds.load(Ordering::Acquire) {
            ensure!(Instant::now() < until, "nobody changes the policy any more");
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }
}

/// Changes policy, in batches, as time goes by.
fn change(mut churn: Churn, mut control: Control, options: &Options, clock: &Clock) -> Result<Changed> {
    let batch = Duration::from_millis(options.batch.into());
    let mut changed = Changed::default();
    let mut random = Random::default();
    let mut last = Duration::ZERO;
    while !clock.is_over.load(Ordering::Acquire) {
        let now = clock.now();
        let due = now.as_micros() as u64 * u64::from(options.rate) / 1_000_000;
        if now >= last + batch && due > changed.changes {
            let start = Instant::now();
            let batch = gather(&mut churn, &mut random, &mut changed, due);
            control.publisher.publish(control.builder.with_change(&batch)?);
            changed.snapshots += 1;
            changed.busy += start.elapsed();
            last = now;
        }
        clock.made.store(now.as_nanos() as u64, Ordering::Release);
        thread::sleep(LOOK);
    }
    changed.endpoints = control.builder.snapshot().policy.endpoint_count();
    Ok(changed)
}

/// The next changes, until there were so many.
fn gather(churn: &mut Churn, random: &mut Random, changed: &mut Changed, due: u64) -> PolicyChange {
    let (mut others, mut pods) = (BTreeSet::new(), BTreeSet::new());
    let all = churn.endpoint_count() + PODS as usize;
    while changed.changes < due {
        changed.changes += 1;
        // Of all endpoints, each is as likely to change; some of them have sessions.
        if random.below(all) < PODS as usize {
            changed.with_sessions += 1;
            pods.insert(random.below(PODS as usize) as u32);
        } else {
            others.insert(churn.change());
        }
    }
    let mut endpoints: Vec<_> = others.iter().filter_map(|&number| churn.endpoint(number)).collect();
    let gone = others.iter().filter(|&&number| churn.endpoint(number).is_none());
    let gone: Vec<IpAddr> = gone.map(|&number| endpoint_address(number)).collect();
    // Its sessions keep their VIP, but have to be looked at.
    endpoints.extend(pods.into_iter().map(|number| {
        let second = vip_address(random.below(churn.vip_count()) as u32);
        pod((FIRST_POD + number).to_ip(), vec![VIP.to_ip(), second])
    }));
    let gone = Gone { endpoints: gone, ..Gone::default() };
    PolicyChange { version: changed.changes.to_string(), endpoints, gone, ..PolicyChange::default() }
}

/// All packets were forwarded, and all sessions are still the same.
fn check(rig: &Rig, sessions: u32, sent: u64) -> Result<()> {
    let counters = rig.worker.counters();
    let forwarded: u64 =
        [Counted::Egress, Counted::Reply].iter().map(|&way| counters.packets[way as usize].get()).sum();
    let ended: u64 = counters.sessions_ended.iter().map(Counter::get).sum();
    ensure!(
        forwarded == sent && rig.drops().is_empty(),
        "{forwarded} of {sent} packets were forwarded: {:?}",
        rig.drops()
    );
    ensure!(
        counters.sessions_created.get() == u64::from(sessions) && ended == 0,
        "{} sessions were opened and {ended} ended, not {sessions} and none",
        counters.sessions_created.get()
    );
    Ok(())
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} sessions, {} VIPs, {} endpoints, {} changes a second",
            self.sessions, self.vips, self.endpoints, self.rate
        )?;
        writeln!(f, "  without      {} ns a packet", self.idle_ns_per_packet)?;
        writeln!(f, "  with         {} ns a packet", self.changing_ns_per_packet)?;
        writeln!(f, "  keeps        {:.2} % of its speed", self.ratio * 100.0)?;
        writeln!(
            f,
            "  changes      {} ({} a second), {} of pods with sessions, in {} snapshots of {} ms",
            self.changes, self.changes_per_second, self.changes_with_sessions, self.snapshots, self.ms_per_snapshot
        )?;
        write!(f, "  {}", self.noise)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_packet_is_lost_while_policy_changes() {
        let options = Options {
            sessions: Vec::new(),
            size: Size { vips: 50, endpoints: 500 },
            rate: 20_000,
            batch: 1,
            rounds: 2,
            cores: Vec::new(),
            json: false,
        };
        let cores = core_affinity::get_core_ids().unwrap();
        let cores = [cores[0].id, cores[cores.len() - 1].id];
        let line = measure(&options, 5000, cores, 1 << 16).unwrap();
        assert_eq!(line.packets, 5 * (1 << 16) + OPENING * 5000 + 3 * 2 * 5000);
        assert!(line.changes > 0 && line.snapshots > 0 && line.changes_with_sessions > 0);
    }
}
