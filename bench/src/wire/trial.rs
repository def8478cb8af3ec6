//! Trials: offered load, sink and results; and the search for the peak rate (RFC 2544 section 26.1).

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;

use super::sink::{Expectation, Sink};
use super::source::{self, OfferedLoad};
use crate::path::round2;
use crate::usage;
use crate::wire::testbed::Testbed;

/// Time for packets in flight to arrive after a trial.
pub(super) const DRAIN_TIME: Duration = Duration::from_millis(30);
/// Steps of the binary search, for a resolution of a few percent; attempts until a rate counts as too high; and
/// duration of each trial.
const SEARCH_STEPS: u32 = 7;
const ATTEMPTS: u32 = 3;
pub(super) const STEP_DURATION: Duration = Duration::from_millis(250);
/// CPU pressure above which a trial counts as disturbed by other programs; number of repetitions of disturbed trials,
/// and the pause before them.
pub(super) const MAX_CPU_PRESSURE: f64 = 0.05;
const MAX_RETRIES: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(300);
/// CPU time is sampled from this time after the start of the source, when it is surely sending, for this share of the
/// trial; the source stops before its call returns.
const SAMPLE_DELAY: Duration = Duration::from_millis(40);
const SAMPLE_SHARE: f64 = 0.7;
/// Rate at which flows are opened, in millions per second, and maximum number of attempts.
const OPEN_MPPS: f64 = 0.2;
const OPEN_ATTEMPTS: u32 = 5;

/// Parameters of trials.
#[derive(Debug)]
pub(crate) struct Trial<'a> {
    pub(crate) testbed: &'a Testbed,
    /// Cores of source and gateway.
    pub(crate) cores: [usize; 2],
    /// Process ID of the gateway.
    pub(crate) pid: Option<u32>,
    pub(crate) flows: u32,
    /// Frame size without FCS.
    pub(crate) bytes: usize,
    /// Loss tolerance, as a share of packets.
    pub(crate) max_loss: f64,
    /// What arrives at the sink.
    pub(crate) expectation: Expectation,
}

/// Result of a trial.
#[derive(Debug)]
pub(crate) struct TrialResult {
    pub(crate) offered_mpps: f64,
    pub(crate) mpps: f64,
    pub(crate) loss: f64,
    pub(crate) latency: Histogram<u64>,
    pub(crate) cpu: CpuUsage,
    pub(crate) sent: u64,
}

/// CPU usage: seconds of CPU time per second.
#[derive(Clone, Debug)]
pub(crate) struct CpuUsage {
    /// The source's thread, including the receive path of the gateway's interface.
    pub(crate) source: f64,
    /// The gateway process; `None` for the kernel.
    pub(crate) gateway: Option<f64>,
    /// Both cores, including the sink's BPF program.
    pub(crate) cores: [CoreUsage; 2],
    /// Share of time in which some thread waited for a core (PSI): high if other programs use the CPUs.
    pub(crate) pressure: Option<f64>,
}

/// CPU usage of one core.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CoreUsage {
    core: usize,
    busy: f64,
    softirq: f64,
    stolen: f64,
}

impl CpuUsage {
    /// CPU pressure; 0 without PSI in the kernel.
    fn pressure_or_zero(&self) -> f64 {
        self.pressure.unwrap_or(0.0)
    }
}

impl Trial<'_> {
    /// Sends the first packet of every flow, at decreasing rates until none is lost.
    pub(crate) fn open_all_flows(&self) -> Result<()> {
        let mut loss = 0.0;
        for attempt in 0..OPEN_ATTEMPTS {
            let mpps = OPEN_MPPS / f64::from(1 << attempt);
            let duration = Duration::from_secs_f64(f64::from(self.flows) / (mpps * 1e6) * 1.5 + 0.05);
            let result = self.run_once(OfferedLoad {
                mpps: Some(mpps),
                duration,
                flows: self.flows,
                once_per_flow: true,
                bytes: self.bytes,
            })?;
            loss = result.loss;
            if result.sent == u64::from(self.flows) && loss == 0.0 {
                return Ok(());
            }
        }
        bail!("cannot open {} flows: {:.2} % of their packets are lost", self.flows, loss * 100.0)
    }

    /// The peak rate within the loss tolerance, in millions per second; `None` if that is the source's maximum.
    pub(super) fn search_peak(&self) -> Result<Option<f64>> {
        let maximum = self.run_undisturbed(None, STEP_DURATION)?;
        if maximum.loss <= self.max_loss {
            return Ok(None);
        }
        // On a shared machine, other programs may cause loss; loss in all attempts is the gateway's.
        let is_sustained = |mpps| {
            for _ in 0..ATTEMPTS {
                if self.run_undisturbed(Some(mpps), STEP_DURATION)?.loss <= self.max_loss {
                    return Ok(true);
                }
            }
            Ok::<_, anyhow::Error>(false)
        };
        // The rate forwarded under overload is near the peak, unless throughput collapses.
        let guess = maximum.mpps / 2.0;
        let (mut good, mut bad) =
            if is_sustained(guess)? { (guess, maximum.offered_mpps.min(3.0 * maximum.mpps)) } else { (0.0, guess) };
        for _ in 0..SEARCH_STEPS {
            let middle = f64::midpoint(good, bad);
            if is_sustained(middle)? { good = middle } else { bad = middle }
        }
        ensure!(good > 0.0, "the gateway exceeds the loss tolerance at any rate");
        Ok(Some(good))
    }

    /// Sends packets of random open flows; repeats disturbed trials and returns the least disturbed one.
    pub(crate) fn run_undisturbed(&self, mpps: Option<f64>, duration: Duration) -> Result<TrialResult> {
        let load = OfferedLoad { mpps, duration, flows: self.flows, once_per_flow: false, bytes: self.bytes };
        let mut best = self.run_once(load)?;
        for _ in 0..MAX_RETRIES {
            if best.cpu.pressure_or_zero() <= MAX_CPU_PRESSURE {
                break;
            }
            thread::sleep(RETRY_PAUSE);
            let next = self.run_once(load)?;
            if next.cpu.pressure_or_zero() < best.cpu.pressure_or_zero() {
                best = next;
            }
        }
        Ok(best)
    }

    /// Sends packets and counts them.
    pub(crate) fn run_once(&self, load: OfferedLoad) -> Result<TrialResult> {
        let expected = load.max_packets();
        let [source_core, _] = self.cores;
        let sink = Sink::open(self.testbed, source_core, self.expectation, expected)?;
        let (start_signal, started) = channel();
        let (sent, samples) = thread::scope(|scope| {
            let sampler = scope.spawn(move || self.sample_twice(&started, load.duration));
            let on_start =
                move || start_signal.send(()).unwrap_or_else(|_| unreachable!("the sampler first waits for it"));
            let sent = source::send(self.testbed, source_core, load, on_start);
            (sent, sampler.join())
        });
        let sent = sent?;
        let [before, after] = samples.ok().context("the CPU sampler has panicked")??;
        thread::sleep(DRAIN_TIME);
        let received = sink.close()?;

        let seconds = (after.at - before.at).as_secs_f64();
        // A tick is 10 ms.
        let share = |ticks: u64| round2(ticks as f64 / 100.0 / seconds);
        let core = |at: usize| {
            let used = after.cores[at] - before.cores[at];
            let [busy, softirq, stolen] = [used.busy, used.softirq, used.steal].map(share);
            CoreUsage { core: self.cores[at], busy, softirq, stolen }
        };
        Ok(TrialResult {
            offered_mpps: sent.packets as f64 / sent.seconds / 1e6,
            mpps: received.packets as f64 / sent.seconds / 1e6,
            loss: 1.0 - received.packets as f64 / sent.packets as f64,
            latency: received.latency,
            cpu: CpuUsage {
                source: round2(sent.cpu),
                gateway: before.process.zip(after.process).map(|(before, after)| share(after - before)),
                cores: [core(0), core(1)],
                pressure: before.pressure.zip(after.pressure).map(|(a, b)| round2((b - a) as f64 / 1e6 / seconds)),
            },
            sent: sent.packets,
        })
    }

    /// Samples CPU time after the start of the load, and shortly before its end.
    fn sample_twice(&self, started: &Receiver<()>, duration: Duration) -> Result<[CpuSample; 2]> {
        // If the source can't start, `send` returns the error.
        let _ = started.recv();
        thread::sleep(SAMPLE_DELAY);
        let before = self.sample()?;
        thread::sleep(duration.mul_f64(SAMPLE_SHARE));
        Ok([before, self.sample()?])
    }

    fn sample(&self) -> Result<CpuSample> {
        let [source_core, gateway_core] = self.cores;
        Ok(CpuSample {
            at: Instant::now(),
            cores: [usage::core_ticks(source_core)?, usage::core_ticks(gateway_core)?],
            process: self.pid.map(usage::process_ticks).transpose()?,
            pressure: usage::cpu_pressure(),
        })
    }
}

/// A sample of the kernel's CPU time counters.
#[derive(Debug)]
struct CpuSample {
    at: Instant,
    cores: [usage::CoreTicks; 2],
    process: Option<u64>,
    pressure: Option<u64>,
}
