//! Processes with their logs, and waiting for what they do.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::command::{Error, run};

/// What vipgate's daemons log when they are ready.
pub const READY: &str = "\"event\":\"ready\"";

/// A process, killed on drop.
#[derive(Debug)]
pub struct Process {
    child: Child,
    command: String,
    log: PathBuf,
}

/// Starts a command on this machine; its output goes to `log`.
///
/// # Errors
/// When it can't be started.
pub fn spawn(command: &[&str], log: &Path) -> Result<Process, Error> {
    let text = command.join(" ");
    let (program, arguments) = command.split_first().unwrap_or((&"", &[]));
    let unwritable = |source| Error::Write { file: log.display().to_string(), source };
    let stdout = File::create(log).map_err(unwritable)?;
    let stderr = stdout.try_clone().map_err(unwritable)?;
    let mut program = Command::new(program);
    program.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    let child = program.spawn().map_err(|source| Error::Start { command: text.clone(), source })?;
    Ok(Process { child, command: text, log: log.to_owned() })
}

impl Process {
    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it is running.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What it has printed so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it has printed a text, such as [`READY`].
    ///
    /// # Errors
    /// When it exits, or doesn't print that in time.
    pub fn wait_for_log(&mut self, text: &str, timeout: Duration) -> Result<(), Error> {
        let log = self.log.clone();
        self.wait_ready(timeout, || fs::read_to_string(&log).is_ok_and(|log| log.contains(text)))
    }

    /// Waits until it is ready, as the condition says.
    ///
    /// # Errors
    /// When it exits, or isn't ready in time.
    pub fn wait_ready(&mut self, timeout: Duration, mut is_ready: impl FnMut() -> bool) -> Result<(), Error> {
        let mut ready = false;
        wait_for(timeout, || {
            ready = is_ready();
            ready || !self.is_alive()
        });
        if ready && self.is_alive() {
            return Ok(());
        }
        Err(Error::NotReady { command: self.command.clone(), log: self.log().trim().to_owned() })
    }

    /// Sends a signal by name.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn signal(&self, signal: &str) -> Result<(), Error> {
        run(&["kill", &format!("-{signal}"), &self.id().to_string()])
    }

    /// Kills it with SIGKILL, by this process itself, and waits for its exit.
    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its exit; `None` on timeout.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
                Ok(None) | Err(_) => return None,
            }
        }
    }

    /// Sends a signal by name and waits for its exit; `None` on timeout.
    ///
    /// # Errors
    /// When the process has ended before.
    pub fn stop(&mut self, signal: &str, timeout: Duration) -> Result<Option<ExitStatus>, Error> {
        self.signal(signal)?;
        Ok(self.wait(timeout))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Polls a condition; false on timeout.
pub fn wait_for(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn shell(name: &str, script: &str) -> Process {
        let log = env::temp_dir().join(format!("vipgate-{}-{name}", std::process::id()));
        spawn(&["sh", "-c", script], &log).unwrap()
    }

    #[test]
    fn a_process_is_ready_once_it_has_said_so_and_lives() {
        let mut process = shell("ready", "echo starting; echo ready; exec sleep 60");
        process.wait_for_log("ready", TIMEOUT).unwrap();
        assert!(process.is_alive() && process.log() == "starting\nready\n");
        let status = process.stop("TERM", TIMEOUT).unwrap().unwrap();
        assert!(!status.success() && process.signal("TERM").is_err());
        fs::remove_file(&process.log).unwrap();
    }

    #[test]
    fn a_process_that_exits_is_not_waited_for() {
        let started = Instant::now();
        let mut process = shell("exits", "echo cannot bind >&2; exit 3");
        let error = process.wait_for_log("ready", 3 * TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("is not ready") && error.ends_with("cannot bind"), "{error}");
        assert!(started.elapsed() < 2 * TIMEOUT);
        fs::remove_file(&process.log).unwrap();
    }
}
