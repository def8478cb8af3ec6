//! Memory and descriptors of every process, when it has begun and when it ends.

use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

/// What a process may have more at its end than at its beginning: heaps settle, links to others come and go. One that leaks for each
/// connection, change or peer has more than that after half an hour.
const MOST_KIB: u64 = 32 * 1024;
const MOST_PERCENT: u64 = 25;
const MOST_DESCRIPTORS: u64 = 32;
/// Who hasn't lived for longer than this is not judged.
const GROWN: Duration = Duration::from_mins(1);

/// A process at a moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Resident memory, KiB; and the part of it that no file, session table or packet buffer is.
    resident: u64,
    anonymous: u64,
    descriptors: u64,
}

/// The life of a process.
#[derive(Debug)]
struct Life {
    name: String,
    pid: u32,
    begun: Instant,
    seen: Instant,
    first: Sample,
    last: Sample,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Resources(Vec<Life>);

impl Resources {
    /// Looks at a process; the first time is its beginning.
    pub(crate) fn observe(&mut self, name: &str, pid: u32) {
        let Some(sample) = sample(pid) else { return };
        let now = Instant::now();
        match self.0.iter_mut().find(|life| life.pid == pid) {
            Some(life) => (life.last, life.seen) = (sample, now),
            None => self.0.push(Life { name: name.into(), pid, begun: now, seen: now, first: sample, last: sample }),
        }
    }

    /// Those that have grown too much, each a sentence.
    pub(crate) fn grown(&self) -> Vec<String> {
        let grown = self.0.iter().filter(|life| {
            let most = life.first.anonymous + life.first.anonymous * MOST_PERCENT / 100 + MOST_KIB;
            let descriptors = life.first.descriptors + MOST_DESCRIPTORS;
            life.seen - life.begun >= GROWN && (life.last.anonymous > most || life.last.descriptors > descriptors)
        });
        grown.map(|life| format!("a process has grown: {life}")).collect()
    }
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, pid, begun, seen, first, last } = self;
        let seconds = (*seen - *begun).as_secs();
        write!(
            f,
            "{name:<8} pid {pid:<8} {seconds:>5} s  resident {:>7} -> {:>7} KiB  of it anonymous {:>7} -> {:>7} KiB  descriptors {:>3} -> {:>3}",
            first.resident, last.resident, first.anonymous, last.anonymous, first.descriptors, last.descriptors
        )
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|life| writeln!(f, "  {life}"))
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
