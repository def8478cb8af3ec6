//! Measurement noise: CPU use by other programs during a measurement, which makes results worse.

use std::fmt;
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::path::round2;
use crate::usage;

/// CPU use by other programs, in cores, above which a warning is printed.
const MAX_NOISE: f64 = 0.1;

/// Noise during a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Noise {
    /// CPU use by other programs, in cores.
    others_cpu: f64,
    /// Steal time, in cores.
    #[serde(rename = "stolen_cpu")]
    steal_cpu: f64,
    /// Share of time in which some thread waited for a core (PSI).
    cpu_pressure: Option<f64>,
}

/// A running measurement.
#[derive(Debug)]
pub(super) struct NoiseMonitor {
    processes: Vec<u32>,
    first: CpuSample,
}

#[derive(Debug)]
struct CpuSample {
    at: Instant,
    cores: usage::CoreTicks,
    own: u64,
    pressure: Option<u64>,
}

impl NoiseMonitor {
    /// Starts a measurement of noise beside this process and `processes`.
    pub(super) fn start(processes: &[u32]) -> Result<Self> {
        let mut processes = processes.to_vec();
        processes.push(std::process::id());
        Ok(Self { first: sample(&processes)?, processes })
    }

    /// The noise since the start.
    pub(super) fn finish(&self) -> Result<Noise> {
        Ok(between(&self.first, &sample(&self.processes)?))
    }
}

fn between(before: &CpuSample, after: &CpuSample) -> Noise {
    let seconds = (after.at - before.at).as_secs_f64();
    // A tick is 10 ms.
    let cores = |ticks: u64| round2(ticks as f64 / 100.0 / seconds);
    let used = after.cores - before.cores;
    let own = after.own - before.own;
    Noise {
        // Softirq time is mostly that of the benchmark's own packets.
        others_cpu: cores((used.busy - used.softirq).saturating_sub(own)),
        steal_cpu: cores(used.steal),
        cpu_pressure: before.pressure.zip(after.pressure).map(|(a, b)| round2((b - a) as f64 / 1e6 / seconds)),
    }
}

fn sample(processes: &[u32]) -> Result<CpuSample> {
    let own = processes.iter().map(|&process| usage::process_ticks(process)).sum::<Result<u64>>()?;
    Ok(CpuSample { at: Instant::now(), cores: usage::all_core_ticks()?, own, pressure: usage::cpu_pressure() })
}

impl Noise {
    /// Prints a warning to stderr if other programs used too much CPU.
    pub(super) fn warn(&self) {
        let noise = self.others_cpu + self.steal_cpu;
        if noise > MAX_NOISE {
            eprintln!(
                "vipgate-bench: other programs used {noise:.2} cores: the results are worse than on an idle machine"
            );
        }
    }
}

impl fmt::Display for Noise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "noise        {} cores used by other programs, {} cores steal time",
            self.others_cpu, self.steal_cpu
        )?;
        match self.cpu_pressure {
            Some(share) => write!(f, ", CPU pressure {:.0} %", share * 100.0),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_benchmarks_own_cpu_time_is_not_noise() {
        let core = |busy, softirq, stolen| usage::CoreTicks { busy, softirq, steal: stolen };
        let before = CpuSample { at: Instant::now(), cores: core(1000, 100, 10), own: 500, pressure: Some(1_000_000) };
        let at = before.at + Duration::from_secs(2);
        let after = CpuSample { at, cores: core(1350, 110, 30), own: 800, pressure: Some(1_500_000) };
        let noise = between(&before, &after);
        assert_eq!(noise, Noise { others_cpu: 0.2, steal_cpu: 0.1, cpu_pressure: Some(0.25) });
    }
}
