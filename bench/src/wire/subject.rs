//! What is measured: a gateway between two cables, started anew for each round.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use rustix::process::Pid;
use serde::Serialize;
use tempfile::TempDir;

use super::ground::Ground;
use super::vipgate::{Policy, Vipgate};
use crate::netns;
use crate::process::Process;

/// Where the kernel says how many connections it follows at most.
const CONNTRACK_MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

/// A gateway that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Subject {
    /// This one.
    #[value(skip)]
    Vipgate,
    /// The kernel's forwarding with source NAT by nftables.
    Nft,
    /// Open vSwitch; not measured yet
    Ovs,
}

/// What subjects are started with.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) gateway: PathBuf,
    /// The gateway's core.
    pub(crate) core: usize,
    pub(crate) placement: Placement,
}

/// Where the kernel forwards, when it is the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Placement {
    /// Where the source runs, as the kernel does it by itself; here it is the fastest
    Source,
    /// In a thread of the kernel on the gateway's core
    Gateway,
}

/// A gateway that forwards; dropping it ends it.
#[derive(Debug)]
pub(super) struct Running {
    process: Option<Process>,
    _folder: TempDir,
}

impl Running {
    /// The gateway's process; the kernel has none.
    pub(super) fn process(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }
}

impl Subject {
    /// Whether it can be measured here, said before anything is.
    pub(super) fn check(self, flows: &[u32]) -> Result<()> {
        match self {
            Self::Vipgate => {}
            Self::Nft => {
                netns::output(&["nft", "--version"]).context("nft is needed: install nftables")?;
                let most = fs::read_to_string(CONNTRACK_MAX).ok().and_then(|text| text.trim().parse::<u32>().ok());
                if let (Some(most), Some(&wanted)) = (most, flows.iter().max()) {
                    ensure!(
                        wanted <= most,
                        "the kernel follows {most} connections, not {wanted}: `sysctl -w net.netfilter.nf_conntrack_max={}`",
                        u64::from(wanted) * 2
                    );
                }
            }
            Self::Ovs if netns::output(&["ovs-vsctl", "--version"]).is_err() => {
                bail!("ovs is not supported here: Open vSwitch isn't installed (and this version can't measure it yet)")
            }
            Self::Ovs => bail!("ovs is not supported here: this version measures against nft only"),
        }
        Ok(())
    }

    /// Starts it and waits until it forwards.
    pub(super) fn start(self, ground: &Ground, setting: &Setting, flows: u32) -> Result<Running> {
        let folder = TempDir::with_prefix(netns::name("")).context("cannot make a folder for configuration")?;
        let process = match self {
            Self::Vipgate => {
                let capacity = (flows * 2).max(65_536);
                let vipgate = Vipgate::configure(setting, capacity, None, &Policy::Pods, folder.path())?;
                Some(Process::from(vipgate.start(&ground.gateway)?))
            }
            Self::Nft | Self::Ovs => {
                start_nft(ground, setting, folder.path())?;
                None
            }
        };
        Ok(Running { process, _folder: folder })
    }
}

fn start_nft(ground: &Ground, setting: &Setting, folder: &Path) -> Result<()> {
    let rules = folder.join("rules.nft");
    fs::write(
        &rules,
        "table ip bench {\n  chain out {\n    type nat hook postrouting priority srcnat;\n    \
         oifname \"gw-out\" ip saddr 10.1.4.0/22 snat to 203.0.113.10\n  }\n}\n",
    )?;
    ground.gateway.exec(&["nft", "-f", &rules.display().to_string()])?;
    // A veth takes frames in batches only from a peer with NAPI, which this switches on; UDP is not put together by it.
    ground.gateway.exec(&["ethtool", "-K", "gw-in", "gro", "on"])?;
    if setting.placement == Placement::Gateway {
        let threaded = "echo 1 > /sys/class/net/gw-in/threaded";
        ground.gateway.exec(&["sh", "-c", threaded]).context("--nft-core gateway needs Linux 5.12")?;
        let thread = find_thread("napi/gw-in-").context("the kernel started no thread for gw-in")?;
        netns::pin(Some(thread), setting.core)?;
    }
    Ok(())
}

/// The kernel's thread whose name begins like this.
fn find_thread(name: &str) -> Option<Pid> {
    let is_it = |folder: &Path| fs::read_to_string(folder.join("comm")).is_ok_and(|comm| comm.starts_with(name));
    let mut folders = fs::read_dir("/proc").ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let folder = folders.find(|folder| is_it(folder))?;
    Pid::from_raw(folder.file_name()?.to_str()?.parse().ok()?)
}
