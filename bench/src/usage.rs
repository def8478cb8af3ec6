//! What cores and processes have done, as the kernel counts it, in hundredths of a second.

use std::fs;
use std::ops::Sub;

use anyhow::{Context, Result};

/// What a core has done since the machine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Core {
    /// Everything but idling.
    pub(crate) busy: u64,
    /// Of that, receiving and other work of the kernel that no process asked for.
    pub(crate) softirq: u64,
    /// Time in which the machine below ran something else.
    pub(crate) stolen: u64,
}

impl Sub for Core {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            busy: self.busy - before.busy,
            softirq: self.softirq - before.softirq,
            stolen: self.stolen - before.stolen,
        }
    }
}

/// A core's counts now.
pub(crate) fn core(number: usize) -> Result<Core> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_core(&text, &format!("cpu{number}"))
        .with_context(|| format!("this machine has no core {number}; see --cores"))
}

/// The counts of all cores together.
pub(crate) fn all_cores() -> Result<Core> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_core(&text, "cpu").context("cannot understand /proc/stat")
}

/// Microseconds in which some thread of this machine waited for a core; `None` where the kernel doesn't count them.
pub(crate) fn pressure() -> Option<u64> {
    parse_pressure(&fs::read_to_string("/proc/pressure/cpu").ok()?)
}

/// User and system time of a process.
pub(crate) fn process(number: u32) -> Result<u64> {
    let path = format!("/proc/{number}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}: it has died"))?;
    parse_process(&text).with_context(|| format!("cannot understand {path}"))
}

fn parse_core(text: &str, name: &str) -> Option<Core> {
    let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
    let counts: Vec<u64> = line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    let &[user, nice, system, _idle, _iowait, irq, softirq, stolen, ..] = counts.as_slice() else { return None };
    Some(Core { busy: user + nice + system + irq + softirq, softirq, stolen })
}

fn parse_pressure(text: &str) -> Option<u64> {
    text.lines().find(|line| line.starts_with("some "))?.rsplit_once("total=")?.1.parse().ok()
}

/// Memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// In use now.
    pub(crate) now: u64,
    /// The most that ever was.
    pub(crate) most: u64,
}

/// The memory of a process, as far as it is in RAM.
pub(crate) fn memory(number: u32) -> Result<Memory> {
    let path = format!("/proc/{number}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}: it has died"))?;
    parse_memory(&text).with_context(|| format!("cannot understand {path}"))
}

fn parse_memory(text: &str) -> Option<Memory> {
    let of = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    };
    Some(Memory { now: of("VmRSS")?, most: of("VmHWM")? })
}

fn parse_process(text: &str) -> Option<u64> {
    // The program's name stands in brackets and may have anything in it.
    let mut words = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(words.next()?.parse::<u64>().ok()? + words.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counts_are_understood() {
        let text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 1 2 3 1000 50 4 5 6 0 0\ncpu10 7 7 7 7 7 7 7 7 0 0\nintr 1\n";
        assert_eq!(parse_core(text, "cpu1"), Some(Core { busy: 15, softirq: 5, stolen: 6 }));
        assert_eq!(parse_core(text, "cpu2"), None);
        assert_eq!(parse_core(text, "cpu"), Some(Core { busy: 45, softirq: 9, stolen: 9 }));
        let text =
            "some avg10=0.96 avg60=7.44 avg300=4.60 total=2386\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!((parse_pressure(text), parse_pressure("")), (Some(2386), None));
        let text = "77 (a) b) S 1 77 77 0 -1 4194560 100 0 0 0 123 45 0 0 20 0 3 0";
        assert_eq!(parse_process(text), Some(168));
        assert_eq!(parse_process("77 (a"), None);
        let text = "Name:\tvipgate\nVmHWM:\t   24 kB\nVmRSS:\t   20 kB\n";
        assert_eq!(parse_memory(text), Some(Memory { now: 20 << 10, most: 24 << 10 }));
    }
}
