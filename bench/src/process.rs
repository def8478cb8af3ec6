//! Child processes that don't outlive this process.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// A child process, killed on drop.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    /// Starts a command with its output in `log`. The kernel kills it when the calling thread ends
    /// (`PR_SET_PDEATHSIG`).
    pub(crate) fn start(command: &[&str], log: &Path) -> Result<Self> {
        let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let stderr = log.try_clone()?;
        let mut program = Command::new("setpriv");
        program.args(["--pdeathsig", "KILL", "--"]).args(command).stdin(Stdio::null()).stdout(log).stderr(stderr);
        let child = program.spawn().with_context(|| format!("cannot run `setpriv {}`", command.join(" ")))?;
        Ok(Self(child))
    }

    /// Process ID.
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Whether it is running.
    pub(crate) fn is_alive(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl From<Child> for Process {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if it has exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
