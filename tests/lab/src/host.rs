//! Hosts of a lab and their processes.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command::{Error, output, run};

/// A network namespace as a host.
#[derive(Clone, Debug)]
pub struct Host {
    name: String,
    netns: String,
}

impl Host {
    pub(crate) fn new(name: &str, netns: String) -> Self {
        Self { name: name.to_owned(), netns }
    }

    /// Name in the lab.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Namespace name for `ip netns exec`.
    pub fn netns(&self) -> &str {
        &self.netns
    }

    /// Runs `ip` in the namespace.
    ///
    /// # Errors
    /// When it fails.
    pub fn ip(&self, arguments: &[&str]) -> Result<(), Error> {
        run(&[&["ip", "-n", &self.netns], arguments].concat())
    }

    /// Adds addresses to an interface, without duplicate address detection.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn addresses(&self, interface: &str, addresses: &[&str]) -> Result<(), Error> {
        for address in addresses {
            let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
            self.ip(&[&["address", "add", address, "dev", interface], nodad].concat())?;
        }
        Ok(())
    }

    /// Adds a route via a router.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn route(&self, prefix: &str, router: &str) -> Result<(), Error> {
        let family = if router.contains(':') { "-6" } else { "-4" };
        run(&["ip", "-n", &self.netns, family, "route", "add", prefix, "via", router])
    }

    /// Sets a kernel parameter.
    ///
    /// # Errors
    /// When there is no such parameter.
    pub fn sysctl(&self, name: &str, value: u8) -> Result<(), Error> {
        self.output(&["sysctl", "-q", "-w", &format!("{name}={value}")]).map(drop)
    }

    /// Runs a command in the namespace; returns its stdout.
    ///
    /// # Errors
    /// When it fails.
    pub fn output(&self, command: &[&str]) -> Result<String, Error> {
        output(&[&["ip", "netns", "exec", &self.netns], command].concat())
    }

    /// Starts a command in the namespace; its output goes to `log`.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn spawn(&self, command: &[&str], log: &Path) -> Result<Process, Error> {
        let text = command.join(" ");
        let failed = |source| Error::Start { command: text.clone(), source };
        let log = File::create(log).map_err(failed)?;
        let errors = log.try_clone().map_err(failed)?;
        let child = Command::new("ip")
            .args(["netns", "exec", &self.netns])
            .args(command)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(failed)?;
        Ok(Process { child })
    }

    /// Runs a function in a new thread in the namespace: sockets it creates belong to the host.
    pub fn run<T: Send + 'static>(
        &self,
        function: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> JoinHandle<io::Result<T>> {
        let path = format!("/run/netns/{}", self.netns);
        thread::spawn(move || {
            let namespace = File::open(path)?;
            // Only this thread changes its namespace; it ends with the function.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            function()
        })
    }
}

/// A process on a host, killed on drop.
#[derive(Debug)]
pub struct Process {
    child: Child,
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

    /// Sends a signal by name.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn signal(&self, signal: &str) -> Result<(), Error> {
        run(&["kill", &format!("-{signal}"), &self.id().to_string()])
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
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
