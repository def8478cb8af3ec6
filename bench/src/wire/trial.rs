//! One trial: a sink, a load, and what came of it; and the search for the rate that a gateway can do.

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;

use super::ground::Ground;
use super::sink::Sink;
use super::source::{self, Load};
use crate::path::round2;
use crate::usage;

/// How long the last packets may be on their way.
pub(super) const DRAIN: Duration = Duration::from_millis(30);
/// Steps of the search, enough for a few hundredths of the rate; how often a rate is tried before it counts as too high;
/// and how long each trial is.
const STEPS: u32 = 7;
const TRIES: u32 = 3;
const STEP: Duration = Duration::from_millis(250);
/// The share of a trial in which threads may wait for a core, as few do when nobody computes beside the benchmark; how
/// often a trial is made again if they wait longer, and how long to wait before that.
pub(super) const QUIET: f64 = 0.05;
const AGAIN: u32 = 3;
const PAUSE: Duration = Duration::from_millis(300);
/// How long after the call for it the source is surely sending; it stops before the call returns. Processor time is
/// counted from then on, for this share of a trial.
const LEAD: Duration = Duration::from_millis(40);
const WATCHED: f64 = 0.7;
/// The rate at which flows are opened, in millions a second, and how often that is tried.
const OPENING: f64 = 0.2;
const OPENINGS: u32 = 5;

/// What a trial is made with.
#[derive(Debug)]
pub(super) struct Bench<'a> {
    pub(super) ground: &'a Ground,
    /// Cores of source and gateway.
    pub(super) cores: [usize; 2],
    pub(super) process: Option<u32>,
    pub(super) flows: u32,
    /// Bytes of a frame without its checksum.
    pub(super) bytes: usize,
    /// The share of packets that may be lost for a rate to count as forwarded.
    pub(super) tolerated: f64,
}

/// What came of a trial.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) offered_mpps: f64,
    pub(super) mpps: f64,
    pub(super) loss: f64,
    pub(super) latency: Histogram<u64>,
    pub(super) cpu: Cpu,
    sent: u64,
}

/// Seconds of processor time for each second.
#[derive(Clone, Debug)]
pub(super) struct Cpu {
    /// The source's thread, with what the gateway's interface does in its context.
    pub(super) source: f64,
    /// The gateway's process; the kernel has none.
    pub(super) gateway: Option<f64>,
    /// All that the two cores did, the sink's program among it.
    pub(super) cores: [CoreCpu; 2],
    /// In which any thread of the machine waited for a core: high when others compute beside the benchmark.
    pub(super) pressure: Option<f64>,
}

/// The same for one core.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CoreCpu {
    core: usize,
    busy: f64,
    softirq: f64,
    stolen: f64,
}

impl Cpu {
    /// The share of the time in which somebody waited for a core; nothing where the kernel doesn't say.
    pub(super) fn disturbed(&self) -> f64 {
        self.pressure.unwrap_or(0.0)
    }
}

impl Bench<'_> {
    /// Opens every flow: its first packet, again until none is missing.
    pub(super) fn open_flows(&self) -> Result<()> {
        let mut lost = 0.0;
        for attempt in 0..OPENINGS {
            let mpps = OPENING / f64::from(1 << attempt);
            let duration = Duration::from_secs_f64(f64::from(self.flows) / (mpps * 1e6) * 1.5 + 0.05);
            let outcome =
                self.load(Load { mpps: Some(mpps), duration, flows: self.flows, once: true, bytes: self.bytes })?;
            lost = outcome.loss;
            if outcome.sent == u64::from(self.flows) && lost == 0.0 {
                return Ok(());
            }
        }
        bail!("the gateway does not open {} flows: {:.2} % of their packets are lost", self.flows, lost * 100.0)
    }

    /// The highest rate of which nearly everything comes through, in millions a second; `None` when that is true of all
    /// that the source can send.
    pub(super) fn search(&self) -> Result<Option<f64>> {
        let most = self.run(None, STEP)?;
        if most.loss <= self.tolerated {
            return Ok(None);
        }
        // A loss may be a neighbour's doing, on a machine that isn't ours alone; what is the gateway's comes every time.
        let comes_through = |mpps| {
            for _ in 0..TRIES {
                if self.run(Some(mpps), STEP)?.loss <= self.tolerated {
                    return Ok(true);
                }
            }
            Ok::<_, anyhow::Error>(false)
        };
        // What is forwarded under any load is near the peak, unless the gateway breaks down.
        let guess = most.mpps / 2.0;
        let (mut good, mut bad) =
            if comes_through(guess)? { (guess, most.offered_mpps.min(3.0 * most.mpps)) } else { (0.0, guess) };
        for _ in 0..STEPS {
            let middle = f64::midpoint(good, bad);
            if comes_through(middle)? { good = middle } else { bad = middle }
        }
        ensure!(good > 0.0, "the gateway loses packets at any rate");
        Ok(Some(good))
    }

    /// Packets of open flows in random order: the least disturbed of a few trials, or the first that is quiet.
    pub(super) fn run(&self, mpps: Option<f64>, duration: Duration) -> Result<Outcome> {
        let load = Load { mpps, duration, flows: self.flows, once: false, bytes: self.bytes };
        let mut best = self.load(load)?;
        for _ in 0..AGAIN {
            if best.cpu.disturbed() <= QUIET {
                break;
            }
            thread::sleep(PAUSE);
            let next = self.load(load)?;
            if next.cpu.disturbed() < best.cpu.disturbed() {
                best = next;
            }
        }
        Ok(best)
    }

    fn load(&self, load: Load) -> Result<Outcome> {
        let expected = load.most_packets();
        let [of_source, _] = self.cores;
        let sink = Sink::open(self.ground, of_source, expected)?;
        let (begins, begun) = channel();
        let (sent, watched) = thread::scope(|scope| {
            let watching = scope.spawn(move || self.watch(&begun, load.duration));
            let begin = move || begins.send(()).unwrap_or_else(|_| unreachable!("who watches waits for it first"));
            let sent = source::send(self.ground, of_source, load, begin);
            (sent, watching.join())
        });
        let sent = sent?;
        let [before, after] = watched.ok().context("cannot watch the processors")??;
        thread::sleep(DRAIN);
        let seen = sink.close()?;

        let seconds = (after.at - before.at).as_secs_f64();
        // A tick is a hundredth of a second.
        let share = |ticks: u64| round2(ticks as f64 / 100.0 / seconds);
        let core = |at: usize| {
            let used = after.cores[at] - before.cores[at];
            let [busy, softirq, stolen] = [used.busy, used.softirq, used.stolen].map(share);
            CoreCpu { core: self.cores[at], busy, softirq, stolen }
        };
        Ok(Outcome {
            offered_mpps: sent.packets as f64 / sent.seconds / 1e6,
            mpps: seen.packets as f64 / sent.seconds / 1e6,
            loss: 1.0 - seen.packets as f64 / sent.packets as f64,
            latency: seen.latency,
            cpu: Cpu {
                source: round2(sent.cpu),
                gateway: before.process.zip(after.process).map(|(before, after)| share(after - before)),
                cores: [core(0), core(1)],
                pressure: before.pressure.zip(after.pressure).map(|(a, b)| round2((b - a) as f64 / 1e6 / seconds)),
            },
            sent: sent.packets,
        })
    }

    /// What has been done when the load is on, and shortly before it ends.
    fn watch(&self, begun: &Receiver<()>, duration: Duration) -> Result<[Reading; 2]> {
        // If the source can't begin, it says so itself.
        let _ = begun.recv();
        thread::sleep(LEAD);
        let before = self.read()?;
        thread::sleep(duration.mul_f64(WATCHED));
        Ok([before, self.read()?])
    }

    fn read(&self) -> Result<Reading> {
        let [of_source, of_gateway] = self.cores;
        Ok(Reading {
            at: Instant::now(),
            cores: [usage::core(of_source)?, usage::core(of_gateway)?],
            process: self.process.map(usage::process).transpose()?,
            pressure: usage::pressure(),
        })
    }
}

/// What the kernel has counted until a moment.
#[derive(Debug)]
struct Reading {
    at: Instant,
    cores: [usage::Core; 2],
    process: Option<u64>,
    pressure: Option<u64>,
}
