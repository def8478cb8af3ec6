//! This very program on a host of the demo, as a gateway or as a policy server, and what a gateway answers.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::failure::Failure;
use crate::lab::{self, Host, Process};

/// How long it may take to come up.
const PATIENCE: Duration = Duration::from_secs(20);

/// A process of it; killed when dropped.
#[derive(Debug)]
pub(super) struct Program {
    name: String,
    process: Process,
    log: PathBuf,
}

impl Program {
    /// Starts it with a configuration. Its files are in `folder`, by the name of its host.
    pub(super) fn start(host: &Host, role: &str, config: &str, folder: &Path) -> Result<Self, Failure> {
        let name = host.name().to_owned();
        let (path, log) = (folder.join(format!("{name}.yaml")), folder.join(format!("{name}.log")));
        fs::write(&path, config).map_err(Failure::runtime)?;
        let command = [&own_path()?, role, "--config", &path.display().to_string()];
        let process = host.spawn(&command, &log).map_err(Failure::runtime)?;
        Ok(Self { name, process, log })
    }

    /// Waits until it says that it is ready.
    pub(super) fn wait_ready(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until && self.process.is_alive() {
            if self.said().contains("\"event\":\"ready\"") {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        let (name, said) = (&self.name, self.said());
        Err(Failure::runtime(format_args!("{name} did not become ready; it said:\n{}", said.trim())))
    }

    /// Stops it as an init system would; whether it ended as it should.
    pub(super) fn stop(mut self) -> Result<bool, Failure> {
        self.process.signal("TERM").map_err(Failure::runtime)?;
        Ok(self.process.wait(Duration::from_secs(5)).is_some_and(|status| status.success()))
    }

    /// Ends it at once.
    pub(super) fn kill(mut self) -> Result<(), Failure> {
        self.process.signal("KILL").map_err(Failure::runtime)?;
        self.process.wait(Duration::from_secs(5));
        Ok(())
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// Asks a gateway something by its admin socket; the answer as JSON.
pub(super) fn ask(socket: &Path, command: &[&str]) -> Result<Value, Failure> {
    let (program, socket) = (own_path()?, socket.display().to_string());
    let question = [&[program.as_str()], command, &["--socket", &socket, "-o", "json"]].concat();
    let answer = lab::output(&question).map_err(Failure::runtime)?;
    serde_json::from_str(&answer).map_err(Failure::runtime)
}

fn own_path() -> Result<String, Failure> {
    Ok(std::env::current_exe().map_err(Failure::runtime)?.display().to_string())
}
