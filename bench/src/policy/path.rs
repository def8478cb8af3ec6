//! Impact of policy changes on the packet path: packets of established sessions on one core, changes on another, in
//! alternating rounds with and without changes.
//!
//! Time, for the rate of changes too, is the time in the worker's iterations; generating and verifying packets between
//! them doesn't count. So the ratio of changes to packets is that of a fully loaded worker.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use serde::Serialize;
use vipgate::xds::client::COALESCE_INTERVAL;
use vipgate_dataplane::flow::address::Address;
use vipgate_dataplane::flow::direction::Direction as Counted;
use vipgate_dataplane::observe::counters::Counter;
use vipgate_dataplane::policy::change::{PolicyChange, Removed};
use vipgate_dataplane::session::timeout::Timeouts;

use super::churn::{Churn, Random, endpoint_address, vip_address};
use super::noise::{Noise, NoiseMonitor};
use super::{PolicySize, print_result};
use crate::Direction;
use crate::load::{LoadGenerator, SETUP_PACKETS};
use crate::netns::pin_to_core;
use crate::packet_order::Order;
use crate::packets::{FIRST_POD, PODS, VIP};
use crate::path::{PACKETS_PER_ROUND, median, round2};
use crate::rig::{PolicyControl, Rig, pod_spec};

/// Frame size without FCS.
const SIZE: u16 = 60;
/// Packets per round: some tenths of a second, so that a round has many batches of changes.
const ROUND: u64 = 4 * PACKETS_PER_ROUND;
/// Poll interval of the thread that makes changes.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Timeout for outstanding changes at the end of a round.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Options of `vipgate-bench policy path`.
#[derive(Clone, Debug, Args)]
pub(super) struct Options {
    /// Established sessions; a comma-separated list is measured one by one
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1000, 65_536, 1_048_576],
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    sessions: Vec<u32>,
    #[command(flatten)]
    size: PolicySize,
    /// Changes per second, each of one endpoint
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Batching interval of changes in milliseconds; default: that of a gateway with a policy server
    #[arg(
        long,
        default_value_t = COALESCE_INTERVAL.as_millis() as u32,
        value_parser = clap::value_parser!(u32).range(1..=1000)
    )]
    batch: u32,
    /// Measured rounds with changes, and as many without; the median is reported
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Cores of changes and packets
    #[arg(long, value_delimiter = ',', num_args = 1, default_values_t = [0, 1])]
    cores: Vec<usize>,
    /// Print one JSON object on one line for each number of sessions
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    sessions: u32,
    vips: u32,
    endpoints: u32,
    rate: u32,
    batch_ms: u32,
    /// Without changes, and with them.
    idle_ns_per_packet: f64,
    changing_ns_per_packet: f64,
    /// Packet rate with changes divided by that of the adjacent round without: the median.
    ratio: f64,
    changes: u64,
    /// Changes of pods with sessions.
    changes_with_sessions: u64,
    changes_per_second: f64,
    /// Published snapshots, and the time to build and publish one.
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
    let cores = cores.context("--cores needs two: for changes and packets")?;
    ensure!(cores[0] != cores[1], "--cores must differ: changes and packets would compete for one core");
    for &sessions in &options.sessions {
        let report = measure(options, sessions, cores, ROUND)?;
        print_result(&report, options.json)?;
        report.noise.warn();
    }
    Ok(())
}

/// Counters of the thread that makes changes.
#[derive(Clone, Copy, Debug, Default)]
struct ChangeCounters {
    changes: u64,
    with_sessions: u64,
    snapshots: u64,
    /// Time to build and publish the snapshots.
    busy: Duration,
    endpoints: usize,
}

fn measure(options: &Options, sessions: u32, [change_core, worker_core]: [usize; 2], packets: u64) -> Result<Report> {
    let churn = Churn::new(options.size);
    let timeouts = Timeouts { udp: 3_600_000, ..Timeouts::default() };
    let clock = WorkerClock::default();
    let run_worker = || {
        pin_to_core(None, worker_core)?;
        let (mut rig, control) = Rig::with_policy(sessions, timeouts, churn.whole_policy())?;
        let mut load = LoadGenerator::<u32>::open(&mut rig, sessions, SIZE, Direction::Mix, Order::Uniform)?;
        let mut sent = SETUP_PACKETS * u64::from(sessions) + load.send_all_sessions(&mut rig)?;
        load.run_round(&mut rig, packets, |_| Ok(()))?;
        let noise = NoiseMonitor::start(&[])?;
        let (mut idle, mut changing) = (Vec::new(), Vec::new());
        let counters = thread::scope(|scope| {
            let changer = scope.spawn(|| {
                pin_to_core(None, change_core)?;
                make_changes(churn, control, options, &clock)
            });
            let rounds = (0..options.rounds).try_for_each(|_| {
                idle.push(load.run_round(&mut rig, packets, |_| Ok(()))?);
                let round = load.run_round(&mut rig, packets, |batch| {
                    clock.advance(batch);
                    Ok(())
                });
                changing.push(round?);
                // Deferred work of the last changes must not count for the next round.
                clock.wait_for_changes()?;
                sent += 2 * packets + load.send_all_sessions(&mut rig)?;
                Ok(())
            });
            clock.stop();
            let counters = changer.join().map_err(|_| anyhow!("the thread that changes policy has panicked"))?;
            // An error of that thread is the cause of a timeout in `rounds`, so it comes first.
            counters.and_then(|counters| rounds.map(|()| counters))
        })?;
        let noise = noise.finish()?;
        verify(&rig, sessions, sent + packets)?;
        Ok::<_, anyhow::Error>((idle, changing, counters, sent + packets, noise))
    };
    // In a separate thread, so that this one isn't pinned.
    let result =
        thread::scope(|scope| scope.spawn(run_worker).join()).map_err(|_| anyhow!("the worker has panicked"))?;
    let (idle, changing, counters, sent, noise) = result?;
    // One endpoint more is present if the last removal is missing.
    let expected = options.size.endpoints as usize + 2 * PODS as usize;
    ensure!(
        counters.endpoints.abs_diff(expected) <= 1,
        "the final policy has {} endpoints, expected {expected}",
        counters.endpoints
    );
    let measured = Measurement { idle, changing, counters, packets: sent, seconds: clock.now().as_secs_f64(), noise };
    Ok(Report::new(options, sessions, measured))
}

/// What the rounds of one number of sessions gave.
struct Measurement {
    /// Nanoseconds per packet of each round without changes, and with them.
    idle: Vec<f64>,
    changing: Vec<f64>,
    counters: ChangeCounters,
    packets: u64,
    /// Time of the rounds with changes.
    seconds: f64,
    noise: Noise,
}

impl Report {
    fn new(options: &Options, sessions: u32, measured: Measurement) -> Self {
        let Measurement { idle, changing, counters, packets, seconds, noise } = measured;
        let ratios = idle.iter().zip(&changing).map(|(idle, changing)| idle / changing).collect();
        let rounded = |values: &[f64]| values.iter().map(|&value| round2(value)).collect();
        Self {
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
            changes: counters.changes,
            changes_with_sessions: counters.with_sessions,
            changes_per_second: round2(counters.changes as f64 / seconds),
            snapshots: counters.snapshots,
            ms_per_snapshot: round2(counters.busy.as_secs_f64() * 1e3 / counters.snapshots.max(1) as f64),
            packets,
            noise,
        }
    }
}

/// Time in iterations of the worker, in rounds with changes.
#[derive(Debug, Default)]
struct WorkerClock {
    nanoseconds: AtomicU64,
    /// Time up to which all due changes are published.
    published: AtomicU64,
    is_stopped: AtomicBool,
}

impl WorkerClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Acquire))
    }

    fn advance(&self, duration: Duration) {
        self.nanoseconds.fetch_add(duration.as_nanos() as u64, Ordering::Release);
    }

    /// Waits until all due changes are published.
    fn wait_for_changes(&self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while self.published.load(Ordering::Acquire) < self.nanoseconds.load(Ordering::Acquire) {
            ensure!(Instant::now() < deadline, "timeout: the policy is not updated any more");
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }
}

/// Publishes batches of changes, at the rate of the worker's clock.
fn make_changes(
    mut churn: Churn,
    mut control: PolicyControl,
    options: &Options,
    clock: &WorkerClock,
) -> Result<ChangeCounters> {
    let batch_interval = Duration::from_millis(options.batch.into());
    let mut counters = ChangeCounters::default();
    let mut random = Random::default();
    let mut last = Duration::ZERO;
    while !clock.is_stopped.load(Ordering::Acquire) {
        let now = clock.now();
        let due = now.as_micros() as u64 * u64::from(options.rate) / 1_000_000;
        if now >= last + batch_interval && due > counters.changes {
            let start = Instant::now();
            let batch = next_batch(&mut churn, &mut random, &mut counters, due);
            control.publisher.publish(control.builder.with_change(&batch)?);
            counters.snapshots += 1;
            counters.busy += start.elapsed();
            last = now;
        }
        clock.published.store(now.as_nanos() as u64, Ordering::Release);
        thread::sleep(POLL_INTERVAL);
    }
    counters.endpoints = control.builder.snapshot().policy.endpoint_count();
    Ok(counters)
}

/// The next batch: changes up to number `due`.
fn next_batch(churn: &mut Churn, random: &mut Random, counters: &mut ChangeCounters, due: u64) -> PolicyChange {
    let (mut others, mut pods) = (BTreeSet::new(), BTreeSet::new());
    let all = churn.endpoint_count() + PODS as usize;
    while counters.changes < due {
        counters.changes += 1;
        // All endpoints are equally likely to change, with sessions or without.
        if random.below(all) < PODS as usize {
            counters.with_sessions += 1;
            pods.insert(random.below(PODS as usize) as u32);
        } else {
            others.insert(churn.change_next());
        }
    }
    let mut endpoints: Vec<_> = others.iter().filter_map(|&number| churn.endpoint(number)).collect();
    let removed = others.iter().filter(|&&number| churn.endpoint(number).is_none());
    let removed: Vec<IpAddr> = removed.map(|&number| endpoint_address(number)).collect();
    // A second VIP: the pod's sessions keep theirs, but must be revalidated.
    endpoints.extend(pods.into_iter().map(|number| {
        let second = vip_address(random.below(churn.vip_count()) as u32);
        pod_spec((FIRST_POD + number).to_ip(), vec![VIP.to_ip(), second])
    }));
    let gone = Removed { endpoints: removed, ..Removed::default() };
    PolicyChange { version: counters.changes.to_string(), endpoints, removed: gone, ..PolicyChange::default() }
}

/// Verifies that all packets were forwarded, and that no session was reopened.
fn verify(rig: &Rig, sessions: u32, sent: u64) -> Result<()> {
    let counters = rig.worker.counters();
    let forwarded: u64 =
        [Counted::Egress, Counted::Reply].iter().map(|&direction| counters.packets[direction as usize].get()).sum();
    let ended: u64 = counters.sessions_ended.iter().map(Counter::get).sum();
    ensure!(
        forwarded == sent && rig.drops().is_empty(),
        "{forwarded} of {sent} packets were forwarded: {:?}",
        rig.drops()
    );
    ensure!(
        counters.sessions_created.get() == u64::from(sessions) && ended == 0,
        "{} sessions were opened and {ended} ended, expected {sessions} and none",
        counters.sessions_created.get()
    );
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} sessions, {} VIPs, {} endpoints, {} changes per second",
            self.sessions, self.vips, self.endpoints, self.rate
        )?;
        writeln!(f, "  without      {} ns per packet", self.idle_ns_per_packet)?;
        writeln!(f, "  with         {} ns per packet", self.changing_ns_per_packet)?;
        writeln!(f, "  ratio        {:.2} % of the packet rate without changes", self.ratio * 100.0)?;
        writeln!(
            f,
            "  changes      {} ({} per second), {} of pods with sessions, in {} snapshots of {} ms",
            self.changes, self.changes_per_second, self.changes_with_sessions, self.snapshots, self.ms_per_snapshot
        )?;
        write!(f, "  {}", self.noise)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_packet_is_lost_during_policy_changes() {
        let options = Options {
            sessions: Vec::new(),
            size: PolicySize { vips: 50, endpoints: 500 },
            rate: 20_000,
            batch: 1,
            rounds: 2,
            cores: Vec::new(),
            json: false,
        };
        let cores = core_affinity::get_core_ids().unwrap();
        let cores = [cores[0].id, cores[cores.len() - 1].id];
        let report = measure(&options, 5000, cores, 1 << 16).unwrap();
        assert_eq!(report.packets, 5 * (1 << 16) + SETUP_PACKETS * 5000 + 3 * 2 * 5000);
        assert!(report.changes > 0 && report.snapshots > 0 && report.changes_with_sessions > 0);
    }
}
