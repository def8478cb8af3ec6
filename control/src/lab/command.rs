//! Running programs: an error carries the command and what it said.

use std::io;
use std::process::Command;

use thiserror::Error;

/// What goes wrong in a lab.
#[derive(Debug, Error)]
pub enum Error {
    /// Namespaces are root's.
    #[error("network namespaces need root: try again with sudo")]
    NotRoot,
    /// A program is missing.
    #[error("cannot run `{command}`: {source} (`make deps` installs what is missing)")]
    Start {
        /// The command.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// A program failed.
    #[error("`{command}` failed: {said}")]
    Failed {
        /// The command.
        command: String,
        /// Its last words.
        said: String,
    },
    /// A thread of this process died while it held the lab.
    #[error("the lab is broken: a thread that used it has panicked")]
    Poisoned,
    /// The lab is gone; whoever removed it has said so.
    #[error("the lab is removed")]
    Removed,
}

/// Runs a command to its end.
///
/// # Errors
/// When it can't be run, or fails.
pub fn run(command: &[&str]) -> Result<(), Error> {
    output(command).map(drop)
}

/// Runs a command to its end; what it wrote to stdout.
///
/// # Errors
/// When it can't be run, or fails.
pub fn output(command: &[&str]) -> Result<String, Error> {
    let text = command.join(" ");
    let (program, arguments) = command.split_first().unwrap_or((&"", &[]));
    let result = Command::new(program).args(arguments).output();
    let output = result.map_err(|source| Error::Start { command: text.clone(), source })?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        return Ok(stdout.into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said = if stderr.trim().is_empty() { stdout.trim() } else { stderr.trim() };
    let said = if said.is_empty() { output.status.to_string() } else { said.to_owned() };
    Err(Error::Failed { command: text, said })
}
