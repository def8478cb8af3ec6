//! Networks of namespaces on one machine: hosts, links and processes that vanish with the [`Lab`].
//!
//! For the demo and for tests. Built with iproute2 and ethtool, as one would by hand. Names carry the process's number,
//! so labs side by side don't meet, and what a dead process left behind is found and removed.

mod command;
pub mod download;
mod host;
pub mod peers;

use std::path::Path;
use std::process;
use std::sync::Mutex;

pub use command::{Error, output, run};
pub use host::{Host, Process};

/// What names of our namespaces begin with; the number of the process follows.
const PREFIX: &str = "vipgate-";

/// A network of namespaces; dropping it removes everything.
#[derive(Debug)]
pub struct Lab {
    prefix: String,
    /// None once the lab is removed: what is still being built then must not outlive it.
    hosts: Mutex<Option<Vec<String>>>,
}

impl Lab {
    /// An empty lab; `tag` tells labs of one process apart.
    ///
    /// # Errors
    /// When iproute2 isn't there, or the user isn't root.
    pub fn new(tag: &str) -> Result<Self, Error> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::NotRoot);
        }
        remove_leftovers()?;
        Ok(Self { prefix: format!("{PREFIX}{}-{tag}-", process::id()), hosts: Mutex::new(Some(Vec::new())) })
    }

    /// A host of its own, with loopback up and forwarding as `forwards` says.
    ///
    /// # Errors
    /// When the kernel refuses, or the lab is removed.
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
        // Addresses can be used at once.
        host.sysctl("net.ipv6.conf.default.accept_dad", 0)?;
        host.sysctl("net.ipv6.conf.all.accept_dad", 0)?;
        Ok(host)
    }

    /// A cable between two hosts, up, with this many queues at each end and without offloads: a frame on it is what a
    /// frame on a wire would be.
    ///
    /// # Errors
    /// When the kernel refuses.
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

    /// Ends every process in the lab and removes its namespaces; it gets no new ones. Done by itself when the lab is
    /// dropped.
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

/// Ends what runs in a namespace and removes it. Somebody else may have done so already.
fn remove(netns: &str) {
    if let Ok(pids) = output(&["ip", "netns", "pids", netns]) {
        let own = process::id().to_string();
        for pid in pids.split_whitespace().filter(|pid| *pid != own) {
            let _ = run(&["kill", "-9", pid]);
        }
    }
    let _ = run(&["ip", "netns", "del", netns]);
}

/// Removes namespaces of processes that don't live any more.
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
