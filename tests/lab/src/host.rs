//! Hosts of a lab.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command::{Error, output, run};
use crate::process::{Process, spawn, wait_for};

/// MAC address of every bridge: they are on separate networks.
pub const BRIDGE_MAC: &str = "02:00:00:00:00:fe";
/// Timeout of [`Host::execute`], in seconds.
const TIMEOUT: &str = "20";
/// Maximum time that `ip netns exec` takes to enter a namespace, with a margin for slow machines.
const ENTER_TIMEOUT: Duration = Duration::from_secs(10);

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

    /// Sets a route via several routers in place of the one that there is. Connections are spread over them by a hash of
    /// addresses and ports (ECMP); the order of the routers changes it.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn replace_route(&self, prefix: &str, routers: &[String]) -> Result<(), Error> {
        let (family, version) = if prefix.contains(':') { ("-6", "ipv6") } else { ("-4", "ipv4") };
        self.sysctl(&format!("net.{version}.fib_multipath_hash_policy"), 1)?;
        let next_hops = routers.iter().flat_map(|router| ["nexthop", "via", router]);
        self.ip(&[family, "route", "replace", prefix].into_iter().chain(next_hops).collect::<Vec<_>>())
    }

    /// Adds a bridge, up. By default a bridge takes the lowest MAC address of its ports, and another one when that port is
    /// removed: hosts couldn't reach it until their neighbor entries are refreshed.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn add_bridge(&self, name: &str) -> Result<(), Error> {
        self.ip(&["link", "add", name, "address", BRIDGE_MAC, "type", "bridge"])?;
        self.ip(&["link", "set", name, "up"])?;
        // With br_netfilter loaded, bridges would inspect packets and drop malformed ones. Without it, there is no such
        // parameter.
        for family in ["iptables", "ip6tables", "arptables"] {
            let _ = self.sysctl(&format!("net.bridge.bridge-nf-call-{family}"), 0);
        }
        Ok(())
    }

    /// Lets packets arrive on any interface, also on those that are added later: no reverse path filter.
    ///
    /// # Errors
    /// When there is no such parameter.
    pub fn disable_rp_filter(&self) -> Result<(), Error> {
        ["all", "default"].into_iter().try_for_each(|scope| self.sysctl(&format!("net.ipv4.conf.{scope}.rp_filter"), 0))
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

    /// Runs a command in the namespace, which may fail, for 20 s at most: its exit code (124 after a timeout, -1 after a
    /// signal), stdout and stderr.
    ///
    /// # Errors
    /// When it can't be started, or prints no UTF-8.
    pub fn execute(&self, command: &[&str]) -> Result<(i32, String, String), Error> {
        let text = command.join(" ");
        let mut program = Command::new("ip");
        program.args(["netns", "exec", &self.netns, "timeout", TIMEOUT]).args(command);
        let output = program.output().map_err(|source| Error::Start { command: text.clone(), source })?;
        let utf8 = |bytes| {
            String::from_utf8(bytes).map_err(|error| Error::Failed { command: text.clone(), output: error.to_string() })
        };
        Ok((output.status.code().unwrap_or(-1), utf8(output.stdout)?, utf8(output.stderr)?))
    }

    /// Starts a command in the namespace; its output goes to `log`. It is in the namespace, or has ended, when this
    /// returns, so it ends with the host.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn spawn(&self, command: &[&str], log: &Path) -> Result<Process, Error> {
        // `ip netns exec` becomes the command by execve(2), so the process ID is the command's.
        let mut process = spawn(&[&["ip", "netns", "exec", &self.netns], command].concat(), log)?;
        let namespace = |path: &str| fs::metadata(path).ok().map(|it| it.ino());
        let (own, of_process) = (format!("/run/netns/{}", self.netns), format!("/proc/{}/ns/net", process.id()));
        wait_for(ENTER_TIMEOUT, || namespace(&of_process) == namespace(&own) || !process.is_alive());
        Ok(process)
    }

    /// Moves this thread into the namespace: sockets it creates belong to the host.
    ///
    /// # Errors
    /// When the host is removed.
    pub fn enter(&self) -> io::Result<()> {
        let namespace = File::open(format!("/run/netns/{}", self.netns))?;
        Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs a function in a new thread in the namespace.
    pub fn run<T: Send + 'static>(
        &self,
        function: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> JoinHandle<io::Result<T>> {
        let host = self.clone();
        thread::spawn(move || {
            // Only this thread changes its namespace; it ends with the function.
            host.enter()?;
            function()
        })
    }
}
