//! Command execution; errors have the command and its output.

use std::io;
use std::process::Command;

use thiserror::Error;

/// Errors of a lab.
#[derive(Debug, Error)]
pub enum Error {
    /// The user isn't root.
    #[error("network namespaces need root: try again with sudo")]
    NotRoot,
    /// A program can't be started.
    #[error("cannot run `{command}`: {source} (`make deps` installs what is missing)")]
    Start {
        command: String,
        /// The cause.
        source: io::Error,
    },
    /// A program failed.
    #[error("`{command}` failed: {output}")]
    Failed { command: String, output: String },
    /// A program exits, or isn't ready in time.
    #[error("`{command}` is not ready; its log:\n{log}")]
    NotReady { command: String, log: String },
    /// There is no Kubernetes API server to start.
    #[error(
        "cannot run `{0}`: put kube-apiserver and kubectl in PATH, name them in VIPGATE_KUBE_APISERVER and \
         VIPGATE_KUBECTL, or run `make demo-kubernetes`, which builds them"
    )]
    NoApiServer(String),
    /// A file can't be written.
    #[error("cannot write {file}: {source}")]
    Write {
        /// Its path.
        file: String,
        /// The cause.
        source: io::Error,
    },
    /// A thread panicked while it had the lab locked.
    #[error("the lab is broken: a thread that used it has panicked")]
    Poisoned,
    /// The lab is removed, by a signal for example.
    #[error("the lab is removed")]
    Removed,
}

/// Runs a command to completion.
///
/// # Errors
/// When it can't be started, or fails.
pub fn run(command: &[&str]) -> Result<(), Error> {
    output(command).map(drop)
}

/// Runs a command to completion; returns its stdout.
///
/// # Errors
/// When it can't be started, or fails.
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
    let printed = if stderr.trim().is_empty() { stdout.trim() } else { stderr.trim() };
    let printed = if printed.is_empty() { output.status.to_string() } else { printed.to_owned() };
    Err(Error::Failed { command: text, output: printed })
}
