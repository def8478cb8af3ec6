//! Memory and file descriptors of every process: leak detection.

use std::time::{Duration, Instant};
use std::{fmt, fs};

/// Allowed growth of a process: heaps reach their size late, connections to peers vary. A leak per connection, change
/// or peer exceeds it within half an hour.
const MAX_GROWTH_KIB: u64 = 32 * 1024;
const MAX_GROWTH_PERCENT: u64 = 25;
const MAX_GROWTH_DESCRIPTORS: u64 = 32;
/// Processes with a shorter lifetime are not checked.
const MIN_LIFETIME: Duration = Duration::from_mins(1);

/// Resources of a process at a time.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Resident memory in KiB, and its anonymous part, which excludes files, session tables and packet buffers.
    resident: u64,
    anonymous: u64,
    descriptors: u64,
}

/// First and last sample of a process.
#[derive(Debug)]
struct ProcessSamples {
    name: String,
    pid: u32,
    started: Instant,
    last_seen: Instant,
    first: Sample,
    last: Sample,
}

/// Samples of all processes.
#[derive(Debug, Default)]
pub(crate) struct Resources(Vec<ProcessSamples>);

impl Resources {
    /// Samples a process; the first sample is its baseline.
    pub(crate) fn observe(&mut self, name: &str, pid: u32) {
        let Some(sample) = sample(pid) else { return };
        let now = Instant::now();
        match self.0.iter_mut().find(|process| process.pid == pid) {
            Some(process) => (process.last, process.last_seen) = (sample, now),
            None => self.0.push(ProcessSamples {
                name: name.into(),
                pid,
                started: now,
                last_seen: now,
                first: sample,
                last: sample,
            }),
        }
    }

    /// Processes that have grown too much, described.
    pub(crate) fn leaks(&self) -> Vec<String> {
        let grown = self.0.iter().filter(|process| {
            let max = process.first.anonymous + process.first.anonymous * MAX_GROWTH_PERCENT / 100 + MAX_GROWTH_KIB;
            let max_descriptors = process.first.descriptors + MAX_GROWTH_DESCRIPTORS;
            process.last_seen - process.started >= MIN_LIFETIME
                && (process.last.anonymous > max || process.last.descriptors > max_descriptors)
        });
        grown.map(|process| format!("resources have grown: {process}")).collect()
    }
}

impl fmt::Display for ProcessSamples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, pid, started, last_seen, first, last } = self;
        let seconds = (*last_seen - *started).as_secs();
        write!(
            f,
            "{name:<8} pid {pid:<8} {seconds:>5} s  resident {:>7} -> {:>7} KiB  \
             anonymous {:>7} -> {:>7} KiB  descriptors {:>3} -> {:>3}",
            first.resident, last.resident, first.anonymous, last.anonymous, first.descriptors, last.descriptors
        )
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|process| writeln!(f, "  {process}"))
    }
}

fn sample(pid: u32) -> Option<Sample> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let of = |name: &str| -> Option<u64> {
        let line = status.lines().find(|line| line.split(':').next() == Some(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    Some(Sample { resident: of("VmRSS")?, anonymous: of("RssAnon")?, descriptors })
}
