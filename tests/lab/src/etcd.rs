//! An etcd member on a host's loopback.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::command::Error;
use crate::host::Host;
use crate::process::Process;

/// How long it may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// An etcd member, running or not.
#[derive(Debug)]
pub struct Etcd {
    host: Host,
    endpoint: String,
    peer: String,
    flags: Vec<String>,
    directory: PathBuf,
    process: Option<Process>,
}

impl Etcd {
    /// Starts a member with this client port, its peer port behind it, and additional flags, and waits until it is
    /// healthy. Its data is in `directory`.
    ///
    /// # Errors
    /// When it doesn't start.
    pub fn start(host: &Host, port: u16, directory: &Path, flags: &[&str]) -> Result<Self, Error> {
        let mut etcd = Self {
            host: host.clone(),
            endpoint: format!("http://127.0.0.1:{port}"),
            peer: format!("http://127.0.0.1:{}", port + 1),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            directory: directory.to_owned(),
            process: None,
        };
        etcd.restart()?;
        Ok(etcd)
    }

    /// Client URL.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Its data directory.
    pub fn data(&self) -> PathBuf {
        self.directory.join("etcd")
    }

    /// Starts it with its existing data.
    ///
    /// # Errors
    /// When it doesn't start.
    pub fn restart(&mut self) -> Result<(), Error> {
        let (data, cluster) = (self.data().display().to_string(), self.cluster());
        let mut command = vec!["etcd", "--name", "lab", "--data-dir", &data, "--initial-cluster", &cluster];
        command.extend(["--listen-client-urls", &self.endpoint, "--advertise-client-urls", &self.endpoint]);
        command.extend(["--listen-peer-urls", &self.peer, "--initial-advertise-peer-urls", &self.peer]);
        command.extend(["--logger", "zap", "--log-level", "warn"]);
        command.extend(self.flags.iter().map(String::as_str));
        let mut process = self.host.spawn(&command, &self.directory.join("etcd.log"))?;
        let url = format!("{}/health", self.endpoint);
        let health = ["curl", "-sf", "--noproxy", "*", "--max-time", "2", &url];
        process.wait_ready(START_TIMEOUT, || self.host.output(&health).is_ok())?;
        self.process = Some(process);
        Ok(())
    }

    /// Sends SIGKILL and waits for its exit.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn kill(&mut self) -> Result<(), Error> {
        let mut process = self.process.take().ok_or(Error::Removed)?;
        process.stop("KILL", EXIT_TIMEOUT).map(drop)
    }

    /// Runs `etcdctl`; its stdout.
    ///
    /// # Errors
    /// When it fails.
    pub fn etcdctl(&self, arguments: &[&str]) -> Result<String, Error> {
        self.host.output(&[&["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", &self.endpoint], arguments].concat())
    }

    /// Replaces all data by a snapshot: keys and the revision go back. The member is killed and started again.
    ///
    /// # Errors
    /// When a step fails.
    pub fn restore_snapshot(&mut self, file: &Path) -> Result<(), Error> {
        self.kill()?;
        let unremovable = |source| Error::Write { file: self.data().display().to_string(), source };
        fs::remove_dir_all(self.data()).map_err(unremovable)?;
        let (file, data, cluster) = (file.display().to_string(), self.data().display().to_string(), self.cluster());
        let command = ["snapshot", "restore", &file, "--name", "lab", "--data-dir", &data, "--initial-cluster"];
        self.etcdctl(&[&command[..], &[&cluster, "--initial-advertise-peer-urls", &self.peer]].concat())?;
        self.restart()
    }

    fn cluster(&self) -> String {
        format!("lab={}", self.peer)
    }
}
