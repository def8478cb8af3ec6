//! Processes that this one starts: none outlives it.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// A process of ours; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    /// Starts a command; what it writes goes to `log`. It dies with the thread that calls this, however that ends.
    pub(crate) fn start(command: &[&str], log: &Path) -> Result<Self> {
        let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let errors = log.try_clone()?;
        let mut program = Command::new("setpriv");
        program.args(["--pdeathsig", "KILL", "--"]).args(command).stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = program.spawn().with_context(|| format!("cannot run `setpriv {}`", command.join(" ")))?;
        Ok(Self(child))
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Whether it still runs.
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
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
