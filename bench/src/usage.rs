//! CPU time and memory of cores and processes from /proc. CPU time is in ticks of 10 ms.

use std::fs;
use std::ops::Sub;

use anyhow::{Context, Result};

/// CPU time of a core since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CoreTicks {
    /// Not idle.
    pub(crate) busy: u64,
    /// Softirqs, part of `busy`.
    pub(crate) softirq: u64,
    /// Steal time: the hypervisor ran another guest.
    pub(crate) steal: u64,
}

impl Sub for CoreTicks {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self { busy: self.busy - before.busy, softirq: self.softirq - before.softirq, steal: self.steal - before.steal }
    }
}

/// CPU time of a core.
pub(crate) fn core_ticks(number: usize) -> Result<CoreTicks> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_core(&text, &format!("cpu{number}"))
        .with_context(|| format!("this machine has no core {number}; see --cores"))
}

/// CPU time of all cores.
pub(crate) fn all_core_ticks() -> Result<CoreTicks> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_core(&text, "cpu").context("cannot parse /proc/stat")
}

/// CPU pressure (PSI `some`): microseconds in which some thread waited for a core; `None` without PSI in the kernel.
pub(crate) fn cpu_pressure() -> Option<u64> {
    parse_pressure(&fs::read_to_string("/proc/pressure/cpu").ok()?)
}

/// Load average of the last minute; not a number without /proc.
pub(crate) fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(f64::NAN)
}

/// User and system time of a process.
pub(crate) fn process_ticks(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}: the process has exited"))?;
    parse_process(&text).with_context(|| format!("cannot parse {path}"))
}

fn parse_core(text: &str, name: &str) -> Option<CoreTicks> {
    let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
    let counts: Vec<u64> = line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    let &[user, nice, system, _idle, _iowait, irq, softirq, stolen, ..] = counts.as_slice() else { return None };
    Some(CoreTicks { busy: user + nice + system + irq + softirq, softirq, steal: stolen })
}

fn parse_pressure(text: &str) -> Option<u64> {
    text.lines().find(|line| line.starts_with("some "))?.rsplit_once("total=")?.1.parse().ok()
}

/// Resident memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ResidentMemory {
    /// Current (`VmRSS`).
    pub(crate) current: u64,
    /// Peak (`VmHWM`).
    pub(crate) peak: u64,
}

/// Resident memory of a process.
pub(crate) fn resident_memory(pid: u32) -> Result<ResidentMemory> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}: the process has exited"))?;
    parse_memory(&text).with_context(|| format!("cannot parse {path}"))
}

fn parse_memory(text: &str) -> Option<ResidentMemory> {
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    };
    Some(ResidentMemory { current: field("VmRSS")?, peak: field("VmHWM")? })
}

fn parse_process(text: &str) -> Option<u64> {
    // The command name in parentheses may contain any character.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed() {
        let text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 1 2 3 1000 50 4 5 6 0 0\ncpu10 7 7 7 7 7 7 7 7 0 0\nintr 1\n";
        assert_eq!(parse_core(text, "cpu1"), Some(CoreTicks { busy: 15, softirq: 5, steal: 6 }));
        assert_eq!(parse_core(text, "cpu2"), None);
        assert_eq!(parse_core(text, "cpu"), Some(CoreTicks { busy: 45, softirq: 9, steal: 9 }));
        let text =
            "some avg10=0.96 avg60=7.44 avg300=4.60 total=2386\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!((parse_pressure(text), parse_pressure("")), (Some(2386), None));
        let text = "77 (a) b) S 1 77 77 0 -1 4194560 100 0 0 0 123 45 0 0 20 0 3 0";
        assert_eq!(parse_process(text), Some(168));
        assert_eq!(parse_process("77 (a"), None);
        let text = "Name:\tvipgate\nVmHWM:\t   24 kB\nVmRSS:\t   20 kB\n";
        assert_eq!(parse_memory(text), Some(ResidentMemory { current: 20 << 10, peak: 24 << 10 }));
    }
}
