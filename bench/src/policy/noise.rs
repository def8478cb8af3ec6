//! What else the machine did during a measurement: on one that others compute on, figures are worse than they could be.

use std::fmt;
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::path::round2;
use crate::usage;

/// Cores that other programs may keep busy for a machine to count as quiet.
const QUIET: f64 = 0.1;

/// What else the machine did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Noise {
    /// Cores that other programs kept busy.
    others_cpu: f64,
    /// Cores' time that the machine below gave to others.
    stolen_cpu: f64,
    /// The share of the time in which any thread waited for a core, ours among them.
    cpu_pressure: Option<f64>,
}

/// A measurement that goes on.
#[derive(Debug)]
pub(super) struct Watch {
    processes: Vec<u32>,
    begun: Reading,
}

#[derive(Debug)]
struct Reading {
    at: Instant,
    cores: usage::Core,
    own: u64,
    pressure: Option<u64>,
}

impl Watch {
    /// Begins to watch; this process and those are part of the measurement.
    pub(super) fn begin(processes: &[u32]) -> Result<Self> {
        let mut processes = processes.to_vec();
        processes.push(std::process::id());
        Ok(Self { begun: read(&processes)?, processes })
    }

    /// What else has been done since.
    pub(super) fn end(&self) -> Result<Noise> {
        Ok(between(&self.begun, &read(&self.processes)?))
    }
}

fn between(before: &Reading, after: &Reading) -> Noise {
    let seconds = (after.at - before.at).as_secs_f64();
    // A tick is a hundredth of a second.
    let cores = |ticks: u64| round2(ticks as f64 / 100.0 / seconds);
    let used = after.cores - before.cores;
    let own = after.own - before.own;
    Noise {
        // What the kernel does when frames arrive belongs to whoever sends them.
        others_cpu: cores((used.busy - used.softirq).saturating_sub(own)),
        stolen_cpu: cores(used.stolen),
        cpu_pressure: before.pressure.zip(after.pressure).map(|(a, b)| round2((b - a) as f64 / 1e6 / seconds)),
    }
}

fn read(processes: &[u32]) -> Result<Reading> {
    let own = processes.iter().map(|&process| usage::process(process)).sum::<Result<u64>>()?;
    Ok(Reading { at: Instant::now(), cores: usage::all_cores()?, own, pressure: usage::pressure() })
}

impl Noise {
    /// What to know about the figures beside it, said to whoever runs the benchmark.
    pub(super) fn warn(&self) {
        let taken = self.others_cpu + self.stolen_cpu;
        if taken > QUIET {
            eprintln!(
                "vipgate-bench: others kept {taken:.2} cores busy meanwhile: the figures are worse than they could be"
            );
        }
    }
}

impl fmt::Display for Noise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "beside it    {} cores busy with other programs, {} stolen", self.others_cpu, self.stolen_cpu)?;
        match self.cpu_pressure {
            Some(share) => write!(f, ", threads waited {:.0} % of the time", share * 100.0),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_the_measurement_does_is_no_noise() {
        let core = |busy, softirq, stolen| usage::Core { busy, softirq, stolen };
        let before = Reading { at: Instant::now(), cores: core(1000, 100, 10), own: 500, pressure: Some(1_000_000) };
        let at = before.at + Duration::from_secs(2);
        let after = Reading { at, cores: core(1350, 110, 30), own: 800, pressure: Some(1_500_000) };
        let noise = between(&before, &after);
        assert_eq!(noise, Noise { others_cpu: 0.2, stolen_cpu: 0.1, cpu_pressure: Some(0.25) });
    }
}
