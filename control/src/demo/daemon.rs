//! Processes of this binary on demo hosts: gateways, policy servers and node agents, and queries to them.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::{self as lab, Host, Process, READY};

use crate::command_error::CommandError;

/// Timeouts of the start and of the end.
const READY_TIMEOUT: Duration = Duration::from_secs(20);
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A process of this binary, killed on drop.
#[derive(Debug)]
pub(super) struct Daemon(Process);

impl Daemon {
    /// Starts a process with a configuration. Configuration and log are in `directory`, named after the host.
    pub(super) fn start(host: &Host, role: &str, config: &str, directory: &Path) -> Result<Self, CommandError> {
        let name = host.name();
        let (path, log) = (directory.join(format!("{name}.yaml")), directory.join(format!("{name}.log")));
        fs::write(&path, config).map_err(CommandError::runtime)?;
        let command = [&own_path()?, role, "--config", &path.display().to_string()];
        host.spawn(&command, &log).map(Self).map_err(CommandError::runtime)
    }

    /// Waits for its `ready` event.
    pub(super) fn wait_ready(&mut self) -> Result<(), CommandError> {
        self.0.wait_for_log(READY, READY_TIMEOUT).map_err(CommandError::runtime)
    }

    /// Stops it with SIGTERM; false unless it exits with code 0 in time.
    pub(super) fn stop(mut self) -> Result<bool, CommandError> {
        let status = self.0.stop("TERM", EXIT_TIMEOUT).map_err(CommandError::runtime)?;
        Ok(status.is_some_and(|status| status.success()))
    }

    /// Kills it with SIGKILL.
    pub(super) fn kill(mut self) -> Result<(), CommandError> {
        self.0.stop("KILL", EXIT_TIMEOUT).map(drop).map_err(CommandError::runtime)
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
