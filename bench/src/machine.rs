//! This machine: threads on cores, and what a benchmark leaves when it is interrupted.

use std::process::exit;
use std::thread;

use anyhow::{Context, Result, anyhow};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use vipgate_lab::Host;

/// Removes namespaces and temporary directories of this run on a signal. What a run has left that could not is removed by
/// the next one.
pub(crate) fn clean_up_on_signals() -> Result<()> {
    let clean_up = || {
        vipgate_lab::remove_own();
        exit(1);
    };
    vipgate_lab::on_signals(clean_up).context("cannot handle signals")
}

/// Pins a thread, by default the calling one, to a core.
pub(crate) fn pin_to_core(thread: Option<Pid>, core: usize) -> Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(thread, &cores).with_context(|| format!("cannot run on core {core}; see --cores"))
}

/// Runs a function on a host, in a thread pinned to this core.
pub(crate) fn run_on<T: Send>(host: &Host, core: usize, function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let thread_main = || {
        host.enter().with_context(|| format!("cannot enter {}", host.netns()))?;
        pin_to_core(None, core)?;
        function()
    };
    thread::scope(|scope| scope.spawn(thread_main).join())
        .map_err(|_| anyhow!("a thread on {} has panicked", host.name()))?
}
