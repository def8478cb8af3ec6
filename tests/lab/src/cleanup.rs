//! Temporary directories, and what removes them and namespaces when their process can't.

use std::path::{Path, PathBuf};
use std::{env, fs, io, process, thread};

use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

use crate::command::{Error, output, run};

/// Prefix of the names of namespaces and directories; the process id follows.
const PREFIX: &str = "vipgate-";
/// A tmpfs, for files that must be in memory.
const TMPFS: &str = "/dev/shm";

/// The prefix of this process's namespaces and directories.
pub(crate) fn own_prefix() -> String {
    format!("{PREFIX}{}-", process::id())
}

/// Creates a temporary directory.
///
/// # Errors
/// When it can't be created.
pub fn directory() -> io::Result<TempDir> {
    TempDir::with_prefix(own_prefix())
}

/// Creates a temporary directory in memory.
///
/// # Errors
/// When it can't be created.
pub fn memory_directory() -> io::Result<TempDir> {
    TempDir::with_prefix_in(own_prefix(), TMPFS)
}

/// Calls a function in a thread of its own on SIGINT, SIGTERM and SIGHUP, instead of ending the process.
///
/// # Errors
/// When there can't be a handler.
pub fn on_signals(function: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let signals = {
        let _context = runtime.enter();
        [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal)
    };
    let [interrupt, terminate, hangup] = signals;
    let (mut interrupt, mut terminate, mut hangup) = (interrupt?, terminate?, hangup?);
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
        });
        function();
    });
    Ok(())
}

/// Removes the namespaces of this process, with the processes in them, and its directories.
pub fn remove_own() {
    // What can't be removed now is removed by the next lab.
    let _ = remove_all(|owner| owner == process::id());
}

/// Removes the namespaces and directories of dead processes.
pub(crate) fn remove_leftovers() -> Result<(), Error> {
    remove_all(|owner| !Path::new(&format!("/proc/{owner}")).exists())
}

fn remove_all(is_removable: impl Fn(u32) -> bool) -> Result<(), Error> {
    for line in output(&["ip", "netns", "list"])?.lines() {
        let Some(name) = line.split_whitespace().next() else { continue };
        if owner(name).is_some_and(&is_removable) {
            remove_namespace(name);
        }
    }
    let parents = [env::temp_dir(), PathBuf::from(TMPFS)];
    let entries = parents.iter().filter_map(|parent| fs::read_dir(parent).ok()).flatten();
    for directory in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if directory.file_name().and_then(|name| owner(name.to_str()?)).is_some_and(&is_removable) {
            // Another process may have removed it.
            let _ = fs::remove_dir_all(directory);
        }
    }
    Ok(())
}

/// Kills the processes in a namespace and removes it. It may be removed already.
pub(crate) fn remove_namespace(name: &str) {
    if let Ok(pids) = output(&["ip", "netns", "pids", name]) {
        let own = process::id().to_string();
        for pid in pids.split_whitespace().filter(|pid| *pid != own) {
            let _ = run(&["kill", "-9", pid]);
        }
    }
    let _ = run(&["ip", "netns", "del", name]);
}

/// Process id in the name of a namespace or directory; `None` if no lab created it.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_labs_have_an_owner() {
        assert_eq!(owner("vipgate-77-demo-server"), Some(77));
        for foreign in ["vipgate-demo-server", "vipgate-77", "vipgate-", "vipgate-x-sink", "lab-77-x", ""] {
            assert_eq!(owner(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn a_directory_is_named_after_its_process() {
        let directory = directory().unwrap();
        assert_eq!(owner(directory.path().file_name().unwrap().to_str().unwrap()), Some(process::id()));
    }
}
