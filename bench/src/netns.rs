//! Network namespaces and what runs in them. Names carry the number of this process, so runs side by side don't meet, and
//! what a dead one left behind is found and removed.

use std::env;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{self, Child, Command, Stdio};
use std::thread;

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::signal::{SigSet, Signal};
use rustix::process::Pid;
use rustix::thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_setaffinity};

/// What names of our namespaces begin with; the number of the process follows.
const PREFIX: &str = "vipgate-bench-";

/// Where folders of ours lie whose files should be in memory.
pub(crate) const IN_MEMORY: &str = "/dev/shm";

/// A network namespace; dropping it ends what runs there and removes it.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    /// An empty namespace.
    pub(crate) fn create(role: &str) -> Result<Self> {
        let name = name(role);
        output(&["ip", "netns", "add", &name])?;
        let namespace = Self { name };
        namespace.exec(&["ip", "link", "set", "lo", "up"])?;
        // Without it, every interface that comes up asks for routers and tells of its multicast groups.
        namespace.exec(&["sysctl", "-q", "-w", "net.ipv6.conf.default.disable_ipv6=1"])?;
        Ok(namespace)
    }

    /// Its name for `ip netns`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs a command in it to its end; what that wrote to stdout.
    pub(crate) fn exec(&self, command: &[&str]) -> Result<String> {
        output(&[&["ip", "netns", "exec", &self.name], command].concat())
    }

    /// Starts a command in it; what it writes goes to `log`. The process has the number of the child.
    pub(crate) fn spawn(&self, command: &[&str], log: &Path) -> Result<Child> {
        let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let errors = log.try_clone()?;
        let mut program = Command::new("ip");
        program.args(["netns", "exec", &self.name]).args(command).stdin(Stdio::null()).stdout(log).stderr(errors);
        program.spawn().with_context(|| format!("cannot run `{}`", command.join(" ")))
    }

    /// Runs a function in it, in a thread on this core.
    pub(crate) fn run<T: Send>(&self, core: usize, function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let path = format!("/run/netns/{}", self.name);
        let in_there = || {
            let namespace = File::open(&path).with_context(|| format!("cannot open {path}"))?;
            // Only this thread moves; it ends with the function.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .with_context(|| format!("cannot enter {path}"))?;
            pin(None, core)?;
            function()
        };
        thread::scope(|scope| scope.spawn(in_there).join()).map_err(|_| anyhow!("a thread in {path} has panicked"))?
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        remove(&self.name);
    }
}

/// The name of something of this run: a namespace, or a folder for temporary files.
pub(crate) fn name(role: &str) -> String {
    format!("{PREFIX}{}-{role}", process::id())
}

/// Runs a command to its end; what it wrote to stdout.
pub(crate) fn output(command: &[&str]) -> Result<String> {
    let text = command.join(" ");
    let (program, arguments) = command.split_first().context("there is no command to run")?;
    let result = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = result.with_context(|| format!("cannot run `{text}` (`make deps` installs what is missing)"))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let said = if stderr.trim().is_empty() { stdout.trim() } else { stderr.trim() };
        bail!("`{text}` failed ({}): {said}", output.status);
    }
    Ok(stdout.into_owned())
}

/// Keeps a thread, or this one, on a core.
pub(crate) fn pin(thread: Option<Pid>, core: usize) -> Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(thread, &cores).with_context(|| format!("cannot run on core {core}; see --cores"))
}

/// Makes sure that namespaces can be made, and that none stay: removes what dead runs left, and on SIGINT, SIGTERM or
/// SIGHUP what this one has made. To be called before any other thread is started.
pub(crate) fn prepare() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "network namespaces need root: try again with sudo");
    remove_namespaces(&is_dead)?;
    remove_folders(&is_dead);
    on_signals(|| {
        // What can't be removed now is removed by the next run.
        let _ = remove_namespaces(&is_ours);
        remove_folders(&is_ours);
    })
}

/// The same where no namespaces are made, only folders: anybody may do that.
pub(crate) fn prepare_folders() -> Result<()> {
    remove_folders(&is_dead);
    on_signals(|| remove_folders(&is_ours))
}

fn is_ours(owner: u32) -> bool {
    owner == process::id()
}

fn is_dead(owner: u32) -> bool {
    !is_ours(owner) && !Path::new(&format!("/proc/{owner}")).exists()
}

fn on_signals(clean_up: impl FnOnce() + Send + 'static) -> Result<()> {
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

fn remove_namespaces(goes: &impl Fn(u32) -> bool) -> Result<()> {
    for line in output(&["ip", "netns", "list"])?.lines() {
        if let Some(name) = line.split_whitespace().next()
            && owner(name).is_some_and(goes)
        {
            remove(name);
        }
    }
    Ok(())
}

fn remove_folders(goes: &impl Fn(u32) -> bool) {
    let places = [env::temp_dir(), IN_MEMORY.into()];
    let entries = places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten();
    for folder in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if folder.file_name().and_then(|name| owner(name.to_str()?)).is_some_and(goes) {
            // Somebody else may have done so already.
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// The process that made a namespace or a folder, if it is one of ours.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

/// Ends what runs in a namespace and removes it. Somebody else may have done so already.
fn remove(name: &str) {
    if let Ok(pids) = output(&["ip", "netns", "pids", name]) {
        let own = process::id().to_string();
        for pid in pids.split_whitespace().filter(|pid| *pid != own) {
            let _ = output(&["kill", "-9", pid]);
        }
    }
    let _ = output(&["ip", "netns", "del", name]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_namespaces_of_this_benchmark_are_ever_removed() {
        assert_eq!(owner("vipgate-bench-77-source"), Some(77));
        for foreign in ["vipgate-77-demo-server", "vipgate-bench-", "vipgate-bench-x-sink", "bench-77", ""] {
            assert_eq!(owner(foreign), None, "{foreign}");
        }
    }
}
