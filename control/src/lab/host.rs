//! One host of a lab.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::command::{Error, output, run};

/// A network namespace that plays a host.
#[derive(Clone, Debug)]
pub struct Host {
    name: String,
    netns: String,
}

impl Host {
    pub(super) fn new(name: &str, netns: String) -> Self {
        Self { name: name.to_owned(), netns }
    }

    /// Its name in the lab.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its name for `ip netns exec`.
    pub fn netns(&self) -> &str {
        &self.netns
    }

    /// Runs `ip` on it.
    ///
    /// # Errors
    /// When it fails.
    pub fn ip(&self, arguments: &[&str]) -> Result<(), Error> {
        run(&[&["ip", "-n", &self.netns], arguments].concat())
    }

    /// Gives an interface addresses, which can be used at once.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn addresses(&self, interface: &str, addresses: &[&str]) -> Result<(), Error> {
        for address in addresses {
            let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
            self.ip(&[&["address", "add", address, "dev", interface], nodad].concat())?;
        }
        Ok(())
    }

    /// Adds a route by way of a router.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn route(&self, prefix: &str, router: &str) -> Result<(), Error> {
        let family = if router.contains(':') { "-6" } else { "-4" };
        run(&["ip", "-n", &self.netns, family, "route", "add", prefix, "via", router])
    }

    /// Sets a kernel parameter.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn sysctl(&self, name: &str, value: u8) -> Result<(), Error> {
        self.output(&["sysctl", "-q", "-w", &format!("{name}={value}")]).map(drop)
    }

    /// Runs a command on it; what that wrote to stdout.
    ///
    /// # Errors
    /// When it fails.
    pub fn output(&self, command: &[&str]) -> Result<String, Error> {
        output(&[&["ip", "netns", "exec", &self.netns], command].concat())
    }

    /// Starts a command on it; what it writes goes to `log`.
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

    /// Runs a function in a thread on it: sockets that it makes are the host's.
    pub fn run<T: Send + 'static>(
        &self,
        function: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> JoinHandle<io::Result<T>> {
        let path = format!("/run/netns/{}", self.netns);
        thread::spawn(move || {
            let namespace = File::open(path)?;
            // Only this thread moves; it ends with the function.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            function()
        })
    }
}

/// A process on a host; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends it a signal by name.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: &str) -> Result<(), Error> {
        run(&["kill", &format!("-{signal}"), &self.id().to_string()])
    }

    /// Waits for its end, at most this long.
    pub fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + patience;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
