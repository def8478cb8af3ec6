//! Network labs in namespaces: hosts, links and processes on one machine, removed with the [`Lab`].
//!
//! For the demo, benchmarks and tests. Built with iproute2 and ethtool. Namespace names contain the process id: parallel labs
//! don't collide, and leftovers of dead processes are found and removed.
#![forbid(unsafe_code)]

pub mod api_server;
mod command;
pub mod download;
mod host;
pub mod reflector;

use std::path::Path;
use std::process;
use std::sync::Mutex;

pub use command::{Error, output, run};
pub use host::{Host, Process};

/// Prefix of the namespace names; the process id follows.
const PREFIX: &str = "vipgate-";

/// A network of namespaces, removed on drop.
#[derive(Debug)]
pub struct Lab {
    prefix: String,
    /// None once the lab is removed: hosts can't be added any more.
    hosts: Mutex<Option<Vec<String>>>,
}

impl Lab {
    /// An empty lab; `tag` distinguishes labs of one process.
    ///
    /// # Errors
    /// When iproute2 is missing, or the user isn't root.
    pub fn new(tag: &str) -> Result<Self, Error> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::NotRoot);
        }
        remove_leftovers()?;
        Ok(Self { prefix: format!("{PREFIX}{}-{tag}-", process::id()), hosts: Mutex::new(Some(Vec::new())) })
    }

    /// Adds a host with loopback up, and with IP forwarding if `forwards`.
    ///
    /// # Errors
    /// When a command fails, or the lab is removed.
    pub fn host(&self, name: &str, forwards: bool) -> Result<Host, Error> {
        let netns = format!("{}{name}", self.prefix);
        {
            let mut hosts = self.hosts.lock().map_err(|_| Error::Poisoned)?;
            let hosts = hosts.as_mut().ok_or(Error::Removed)?;
            run(&["ip", "netns", "add", &netns])?;
            hosts.push(netns.clone());
        }
        let host = Host::new(name, netns);
        host.ip(&["link", "set", "lo", "up"])?;
        let forwards = u8::from(forwards);
        host.sysctl("net.ipv4.ip_forward", forwards)?;
        host.sysctl("net.ipv6.conf.all.forwarding", forwards)?;
        // Addresses are usable immediately, without duplicate address detection.
        host.sysctl("net.ipv6.conf.default.accept_dad", 0)?;
        host.sysctl("net.ipv6.conf.all.accept_dad", 0)?;
        Ok(host)
    }

    /// Adds a link (veth pair) between two hosts, up, with this many queues at each end. Offloads are off: frames are
    /// as on a physical wire.
    ///
    /// # Errors
    /// When a command fails.
    pub fn link(&self, (one, name): (&Host, &str), (other, peer): (&Host, &str), queues: u32) -> Result<(), Error> {
        let count = queues.to_string();
        let queues = ["numtxqueues", &count, "numrxqueues", &count];
        let mut command = vec!["ip", "link", "add", name, "netns", one.netns()];
        command.extend(queues);
        command.extend(["type", "veth", "peer", "name", peer, "netns", other.netns()]);
        command.extend(queues);
        run(&command)?;
        for (host, interface) in [(one, name), (other, peer)] {
            host.output(&[
                "ethtool", "-K", interface, "tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off",
            ])?;
            host.ip(&["link", "set", interface, "up"])?;
        }
        Ok(())
    }

    /// Kills the processes of a host and removes its namespace, with its links once the kernel gets to it. A host of the
    /// same name can be added afterwards.
    pub fn remove_host(&self, host: &Host) {
        if let Ok(mut hosts) = self.hosts.lock()
            && let Some(hosts) = hosts.as_mut()
        {
            hosts.retain(|netns| netns != host.netns());
        }
        remove(host.netns());
    }

    /// Kills every process in the lab and removes its namespaces; no hosts can be added afterwards. Called on drop.
    pub fn remove(&self) {
        let hosts = self.hosts.lock().ok().and_then(|mut hosts| hosts.take());
        for netns in hosts.into_iter().flatten() {
            remove(&netns);
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Kills the processes in a namespace and removes it. It may be removed already.
fn remove(netns: &str) {
    if let Ok(pids) = output(&["ip", "netns", "pids", netns]) {
        let own = process::id().to_string();
        for pid in pids.split_whitespace().filter(|pid| *pid != own) {
            let _ = run(&["kill", "-9", pid]);
        }
    }
    let _ = run(&["ip", "netns", "del", netns]);
}

/// Removes namespaces of dead processes.
fn remove_leftovers() -> Result<(), Error> {
    for line in output(&["ip", "netns", "list"])?.lines() {
        let Some(name) = line.split_whitespace().next() else { continue };
        let owner =
            name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()).and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            remove(name);
        }
    }
    Ok(())
}
