//! Network labs in namespaces: hosts, links and processes on one machine, removed with the [`Lab`].
//!
//! For the demo, benchmarks and tests. Built with iproute2 and ethtool. Namespace names contain the process id: parallel
//! labs don't collide, and leftovers of dead processes are found and removed. So are temporary directories.
#![forbid(unsafe_code)]

pub mod api_server;
mod capture;
mod cleanup;
mod command;
pub mod download;
pub mod etcd;
mod host;
pub mod networks;
mod process;
pub mod reflector;

use std::sync::Mutex;

pub use capture::{Capture, IMMEDIATE};
pub use cleanup::{directory, memory_directory, on_signals, remove_own};
pub use command::{Error, output, run};
pub use host::{BRIDGE_MAC, Host};
pub use process::{Process, READY, spawn, wait_for};

use crate::cleanup::{own_prefix, remove_leftovers, remove_namespace};

/// Next hop of routed pods, as with Calico.
const POD_ROUTER: &str = "169.254.1.1";

/// Properties of a link.
#[derive(Clone, Copy, Debug)]
pub struct LinkConfig<'a> {
    /// Receive queues of each end, and as many transmit queues.
    pub queues: u32,
    /// MTU of both ends.
    pub mtu: u16,
    /// MAC addresses of both ends; without one, a random one.
    pub macs: [Option<&'a str>; 2],
    /// Whether offloads keep their defaults: partial checksums, and segments larger than the MTU.
    pub offloads: bool,
}

impl Default for LinkConfig<'_> {
    fn default() -> Self {
        Self { queues: 1, mtu: 1500, macs: [None; 2], offloads: false }
    }
}

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
        Ok(Self { prefix: format!("{}{tag}-", own_prefix()), hosts: Mutex::new(Some(Vec::new())) })
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
    pub fn link(&self, one: (&Host, &str), other: (&Host, &str), queues: u32) -> Result<(), Error> {
        self.link_with(one, other, LinkConfig { queues, ..LinkConfig::default() })
    }

    /// The same with more properties.
    ///
    /// # Errors
    /// When a command fails.
    pub fn link_with(&self, one: (&Host, &str), other: (&Host, &str), config: LinkConfig<'_>) -> Result<(), Error> {
        let (queues, mtu) = (config.queues.to_string(), config.mtu.to_string());
        let device = |(host, interface): (&Host, &str), mac: Option<&str>| {
            let mac = mac.map(|mac| format!("address {mac} ")).unwrap_or_default();
            let netns = host.netns();
            format!("name {interface} netns {netns} {mac}mtu {mtu} numtxqueues {queues} numrxqueues {queues}")
        };
        let [one_mac, other_mac] = config.macs;
        let command = format!("ip link add {} type veth peer {}", device(one, one_mac), device(other, other_mac));
        run(&command.split(' ').collect::<Vec<_>>())?;
        for (host, interface) in [one, other] {
            if !config.offloads {
                let off = ["rx", "off", "tx", "off", "sg", "off", "tso", "off", "gso", "off", "gro", "off"];
                host.output(&[&["ethtool", "-K", interface][..], &off].concat())?;
            }
            host.ip(&["link", "set", interface, "up"])?;
        }
        Ok(())
    }

    /// Connects a host's interface to a bridge of another host, as this port there.
    ///
    /// # Errors
    /// When a command fails.
    pub fn attach(&self, end: (&Host, &str), (switch, port): (&Host, &str), bridge: &str) -> Result<(), Error> {
        self.link((switch, port), end, 1)?;
        switch.ip(&["link", "set", port, "master", bridge])
    }

    /// Adds a pod with these addresses to a node, at this interface of it, as the runtime and a CNI plugin like Calico's
    /// would: routed, without a network of its own.
    ///
    /// # Errors
    /// When a command fails.
    pub fn routed_pod(&self, name: &str, (node, port): (&Host, &str), [v4, v6]: [&str; 2]) -> Result<Host, Error> {
        let pod = self.host(name, false)?;
        self.link((node, port), (&pod, "eth0"), 1)?;
        // The next hop of pods, for which the node answers.
        node.sysctl(&format!("net.ipv4.conf.{port}.proxy_arp"), 1)?;
        node.ip(&["address", "add", "fe80::1", "dev", port, "nodad"])?;
        node.ip(&["route", "add", v4, "dev", port])?;
        node.ip(&["-6", "route", "add", v6, "dev", port])?;
        pod.addresses("eth0", &[&format!("{v4}/32"), &format!("{v6}/128")])?;
        pod.ip(&["route", "add", POD_ROUTER, "dev", "eth0"])?;
        pod.route("default", POD_ROUTER)?;
        pod.ip(&["-6", "route", "add", "default", "via", "fe80::1", "dev", "eth0"])?;
        Ok(pod)
    }

    /// Kills the processes of a host and removes its namespace, with its links once the kernel gets to it. A host of the
    /// same name can be added afterwards.
    pub fn remove_host(&self, host: &Host) {
        if let Ok(mut hosts) = self.hosts.lock()
            && let Some(hosts) = hosts.as_mut()
        {
            hosts.retain(|netns| netns != host.netns());
        }
        remove_namespace(host.netns());
    }

    /// Kills every process in the lab and removes its namespaces; no hosts can be added afterwards. Called on drop.
    pub fn remove(&self) {
        let hosts = self.hosts.lock().ok().and_then(|mut hosts| hosts.take());
        for netns in hosts.into_iter().flatten() {
            remove_namespace(&netns);
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.remove();
    }
}
