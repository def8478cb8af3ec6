//! Systems under test: gateways between the source and the sink, started anew for each round.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use rustix::process::Pid;
use serde::Serialize;
use tempfile::TempDir;

use super::vipgate::{PolicySource, Vipgate};
use crate::netns;
use crate::process::Process;
use crate::wire::testbed::Testbed;

/// Maximum number of connections tracked by the kernel.
const CONNTRACK_MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

/// A system under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SystemUnderTest {
    /// vipgate.
    #[value(skip)]
    Vipgate,
    /// Kernel forwarding with SNAT by nftables.
    Nft,
    /// Open vSwitch; not supported yet
    Ovs,
}

/// Configuration of the systems under test.
#[derive(Clone, Debug)]
pub(crate) struct SutConfig {
    /// Path of the vipgate binary.
    pub(crate) gateway: PathBuf,
    /// The gateway's core.
    pub(crate) core: usize,
    pub(crate) placement: Placement,
}

/// Core on which the kernel forwards, for nft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Placement {
    /// The source's core, in its context, as veth does by default; the fastest here
    Source,
    /// The gateway's core, in a kernel thread (threaded NAPI)
    Gateway,
}

/// A running system under test; stopped on drop.
#[derive(Debug)]
pub(super) struct RunningSut {
    pid: Option<Process>,
    _directory: TempDir,
}

impl RunningSut {
    /// Process ID of the gateway; `None` for the kernel.
    pub(super) fn pid(&self) -> Option<u32> {
        self.pid.as_ref().map(Process::pid)
    }
}

impl SystemUnderTest {
    /// Checks that the system is available on this machine.
    pub(super) fn check(self, flows: &[u32]) -> Result<()> {
        match self {
            Self::Vipgate => {}
            Self::Nft => {
                netns::run_command(&["nft", "--version"]).context("nft is needed: install nftables")?;
                let limit = fs::read_to_string(CONNTRACK_MAX).ok().and_then(|text| text.trim().parse::<u32>().ok());
                if let (Some(limit), Some(&required)) = (limit, flows.iter().max()) {
                    ensure!(
                        required <= limit,
                        "conntrack tracks up to {limit} connections, but {required} are needed: \
                         `sysctl -w net.netfilter.nf_conntrack_max={}`",
                        u64::from(required) * 2
                    );
                }
            }
            Self::Ovs if netns::run_command(&["ovs-vsctl", "--version"]).is_err() => {
                bail!("ovs is not supported: Open vSwitch isn't installed, and this version can't measure it yet")
            }
            Self::Ovs => bail!("ovs is not supported: this version can measure nft only"),
        }
        Ok(())
    }

    /// Starts the system and waits until it forwards.
    pub(super) fn start(self, testbed: &Testbed, config: &SutConfig, flows: u32) -> Result<RunningSut> {
        let directory =
            TempDir::with_prefix(netns::run_name("")).context("cannot create a directory for the configuration")?;
        let process = match self {
            Self::Vipgate => {
                let capacity = (flows * 2).max(65_536);
                let vipgate = Vipgate::configure(config, capacity, None, &PolicySource::File, directory.path())?;
                Some(Process::from(vipgate.start(&testbed.gateway)?))
            }
            Self::Nft | Self::Ovs => {
                start_nft(testbed, config, directory.path())?;
                None
            }
        };
        Ok(RunningSut { pid: process, _directory: directory })
    }
}

fn start_nft(testbed: &Testbed, config: &SutConfig, directory: &Path) -> Result<()> {
    let rules = directory.join("rules.nft");
    fs::write(
        &rules,
        "table ip bench {\n  chain out {\n    type nat hook postrouting priority srcnat;\n    \
         oifname \"gw-out\" ip saddr 10.1.4.0/22 snat to 203.0.113.10\n  }\n}\n",
    )?;
    testbed.gateway.exec(&["nft", "-f", &rules.display().to_string()])?;
    // Enables NAPI, without which a veth doesn't receive frames in batches. UDP datagrams are not merged by it.
    testbed.gateway.exec(&["ethtool", "-K", "gw-in", "gro", "on"])?;
    if config.placement == Placement::Gateway {
        let threaded = "echo 1 > /sys/class/net/gw-in/threaded";
        testbed.gateway.exec(&["sh", "-c", threaded]).context("--nft-core gateway needs Linux 5.12")?;
        let thread = find_thread("napi/gw-in-").context("the kernel started no NAPI thread for gw-in")?;
        netns::pin_to_core(Some(thread), config.core)?;
    }
    Ok(())
}

/// The kernel thread whose name starts with `prefix`.
pub(crate) fn find_thread(prefix: &str) -> Option<Pid> {
    let matches =
        |directory: &Path| fs::read_to_string(directory.join("comm")).is_ok_and(|comm| comm.starts_with(prefix));
    let mut directories = fs::read_dir("/proc").ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let directory = directories.find(|directory| matches(directory))?;
    Pid::from_raw(directory.file_name()?.to_str()?.parse().ok()?)
}
