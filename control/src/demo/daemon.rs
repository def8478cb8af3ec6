//! Processes of this binary on demo hosts: gateways, policy servers and node agents, and queries to them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::Value;
use vipgate_lab::{self as lab, Host, Process};

use crate::command_error::CommandError;

/// Startup timeout.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// A process of this binary, killed on drop.
#[derive(Debug)]
pub(super) struct Daemon {
    name: String,
    process: Process,
    log: PathBuf,
}

impl Daemon {
    /// Starts a process with a configuration. Configuration and log are in `directory`, named after the host.
    pub(super) fn start(host: &Host, role: &str, config: &str, directory: &Path) -> Result<Self, CommandError> {
        let name = host.name().to_owned();
        let (path, log) = (directory.join(format!("{name}.yaml")), directory.join(format!("{name}.log")));
        fs::write(&path, config).map_err(CommandError::runtime)?;
        let command = [&own_path()?, role, "--config", &path.display().to_string()];
        let process = host.spawn(&command, &log).map_err(CommandError::runtime)?;
        Ok(Self { name, process, log })
    }

    /// Waits for its `ready` event.
    pub(super) fn wait_ready(&mut self) -> Result<(), CommandError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        while Instant::now() < deadline && self.process.is_alive() {
            if self.log_text().contains("\"event\":\"ready\"") {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        let (name, log) = (&self.name, self.log_text());
        Err(CommandError::runtime(format!("{name} did not become ready; its log:\n{}", log.trim())))
    }

    /// Stops it with SIGTERM; false unless it exits with code 0 in time.
    pub(super) fn stop(mut self) -> Result<bool, CommandError> {
        self.process.signal("TERM").map_err(CommandError::runtime)?;
        Ok(self.process.wait(Duration::from_secs(5)).is_some_and(|status| status.success()))
    }

    /// Kills it with SIGKILL.
    pub(super) fn kill(mut self) -> Result<(), CommandError> {
        self.process.signal("KILL").map_err(CommandError::runtime)?;
        self.process.wait(Duration::from_secs(5));
        Ok(())
    }

    fn log_text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// Runs a query command against an admin socket; returns its JSON.
pub(super) fn query(socket: &Path, command: &[&str]) -> Result<Value, CommandError> {
    let output = query_text(socket, &[command, &["-o", "json"]].concat())?;
    serde_json::from_str(&output).map_err(CommandError::runtime)
}

/// The same; returns the text that a user sees.
pub(super) fn query_text(socket: &Path, command: &[&str]) -> Result<String, CommandError> {
    let (program, socket) = (own_path()?, socket.display().to_string());
    lab::output(&[&[program.as_str()], command, &["--socket", &socket]].concat()).map_err(CommandError::runtime)
}

fn own_path() -> Result<String, CommandError> {
    Ok(std::env::current_exe().map_err(CommandError::runtime)?.display().to_string())
}
