//! Network namespaces and the processes in them. Names contain this process's ID, so concurrent runs don't collide, and
//! leftovers of dead runs are found and removed.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{self, Child, Command, Stdio};
use std::{env, thread};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::signal::{SigSet, Signal};
use rustix::process::Pid;
use rustix::thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_setaffinity};

/// Prefix of namespace names; the process ID follows.
const PREFIX: &str = "vipgate-bench-";

/// A tmpfs, for directories whose files must be in memory.
pub(crate) const TMPFS_DIR: &str = "/dev/shm";

/// A network namespace. On drop, its processes are killed and it is removed.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    /// Creates a namespace with only a loopback interface.
    pub(crate) fn create(role: &str) -> Result<Self> {
        let name = run_name(role);
        run_command(&["ip", "netns", "add", &name])?;
        let namespace = Self { name };
        namespace.exec(&["ip", "link", "set", "lo", "up"])?;
        // Prevents router solicitations and MLD reports of interfaces that come up.
        namespace.exec(&["sysctl", "-q", "-w", "net.ipv6.conf.default.disable_ipv6=1"])?;
        Ok(namespace)
    }

    /// Name for `ip netns`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs a command in the namespace; returns its stdout.
    pub(crate) fn exec(&self, command: &[&str]) -> Result<String> {
        run_command(&[&["ip", "netns", "exec", &self.name], command].concat())
    }

    /// Starts a command in the namespace with its output in `log`. `ip netns exec` calls execve(2), so the child's
    /// process ID is that of the command.
    pub(crate) fn spawn(&self, command: &[&str], log: &Path) -> Result<Child> {
        let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let stderr = log.try_clone()?;
        let mut program = Command::new("ip");
        program.args(["netns", "exec", &self.name]).args(command).stdin(Stdio::null()).stdout(log).stderr(stderr);
        program.spawn().with_context(|| format!("cannot run `{}`", command.join(" ")))
    }

    /// Runs a function in the namespace, in a thread pinned to this core.
    pub(crate) fn run<T: Send>(&self, core: usize, function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let path = format!("/run/netns/{}", self.name);
        let thread_main = || {
            let namespace = File::open(&path).with_context(|| format!("cannot open {path}"))?;
            // setns(2) applies to this thread only, which ends with the function.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .with_context(|| format!("cannot enter {path}"))?;
            pin_to_core(None, core)?;
            function()
        };
        thread::scope(|scope| scope.spawn(thread_main).join())
            .map_err(|_| anyhow!("a thread in {path} has panicked"))?
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        remove(&self.name);
    }
}

/// Name of a namespace or temporary directory of this run.
pub(crate) fn run_name(role: &str) -> String {
    format!("{PREFIX}{}-{role}", process::id())
}

/// Runs a command; returns its stdout.
pub(crate) fn run_command(command: &[&str]) -> Result<String> {
    let text = command.join(" ");
    let (program, arguments) = command.split_first().context("there is no command to run")?;
    let result = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = result.with_context(|| format!("cannot run `{text}` (`make deps` installs what is missing)"))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let message = if stderr.trim().is_empty() { stdout.trim() } else { stderr.trim() };
        bail!("`{text}` failed ({}): {message}", output.status);
    }
    Ok(stdout.into_owned())
}

/// Pins a thread, by default the calling one, to a core.
pub(crate) fn pin_to_core(thread: Option<Pid>, core: usize) -> Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(thread, &cores).with_context(|| format!("cannot run on core {core}; see --cores"))
}

/// Checks for root, removes namespaces and directories of dead runs, and installs cleanup of this run's on SIGINT,
/// SIGTERM and SIGHUP. Must be called before any other thread is started.
pub(crate) fn prepare() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "network namespaces need root: try again with sudo");
    remove_namespaces(&is_stale)?;
    remove_directories(&is_stale);
    clean_up_on_signals(|| {
        // The next run removes what can't be removed now.
        let _ = remove_namespaces(&is_own);
        remove_directories(&is_own);
    })
}

/// The same for directories only; doesn't need root.
pub(crate) fn prepare_directories() -> Result<()> {
    remove_directories(&is_stale);
    clean_up_on_signals(|| remove_directories(&is_own))
}

fn is_own(owner: u32) -> bool {
    owner == process::id()
}

fn is_stale(owner: u32) -> bool {
    !is_own(owner) && !Path::new(&format!("/proc/{owner}")).exists()
}

fn clean_up_on_signals(clean_up: impl FnOnce() + Send + 'static) -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    thread::spawn(move || {
        if let Ok(signal) = signals.wait() {
            clean_up();
            process::exit(128 + signal as i32);
        }
    });
    Ok(())
}

fn remove_namespaces(is_removable: &impl Fn(u32) -> bool) -> Result<()> {
    for line in run_command(&["ip", "netns", "list"])?.lines() {
        if let Some(name) = line.split_whitespace().next()
            && owner(name).is_some_and(is_removable)
        {
            remove(name);
        }
    }
    Ok(())
}

fn remove_directories(is_removable: &impl Fn(u32) -> bool) {
    let parents = [env::temp_dir(), TMPFS_DIR.into()];
    let entries = parents.iter().filter_map(|parent| fs::read_dir(parent).ok()).flatten();
    for directory in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if directory.file_name().and_then(|name| owner(name.to_str()?)).is_some_and(is_removable) {
            // Another run may have removed it concurrently.
            let _ = fs::remove_dir_all(directory);
        }
    }
}

/// Process ID in the name of a namespace or directory; `None` if the benchmark didn't create it.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

/// Kills all processes in a namespace and removes it. Another run may have removed it concurrently.
fn remove(name: &str) {
    if let Ok(pids) = run_command(&["ip", "netns", "pids", name]) {
        let own = process::id().to_string();
        for pid in pids.split_whitespace().filter(|pid| *pid != own) {
            let _ = run_command(&["kill", "-9", pid]);
        }
    }
    let _ = run_command(&["ip", "netns", "del", name]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_with_the_benchmark_prefix_have_an_owner() {
        assert_eq!(owner("vipgate-bench-77-source"), Some(77));
        for foreign in ["vipgate-77-demo-server", "vipgate-bench-", "vipgate-bench-x-sink", "bench-77", ""] {
            assert_eq!(owner(foreign), None, "{foreign}");
        }
    }
}
