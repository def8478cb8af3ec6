//! The kernel as a system under test: forwarding alone, or with SNAT by nftables.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;

use super::config::{Placement, SutConfig};
use crate::machine::pin_to_core;
use crate::wire::testbed::Testbed;

/// Maximum number of connections tracked by the kernel.
const CONNTRACK_MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
const SNAT_RULES: &str = "table ip bench {\n  chain out {\n    type nat hook postrouting priority srcnat;\n    \
                          oifname \"gw-out\" ip saddr 10.1.4.0/22 snat to 203.0.113.10\n  }\n}\n";

/// Checks that nft is installed and that the kernel tracks as many connections as there are flows.
pub(super) fn check_nft(flows: &[u32]) -> Result<()> {
    vipgate_lab::run(&["nft", "--version"]).context("nft is needed: install nftables")?;
    let limit = fs::read_to_string(CONNTRACK_MAX).ok().and_then(|text| text.trim().parse::<u32>().ok());
    if let (Some(limit), Some(&required)) = (limit, flows.iter().max()) {
        ensure!(
            required <= limit,
            "conntrack tracks up to {limit} connections, but {required} are needed: \
             `sysctl -w net.netfilter.nf_conntrack_max={}`",
            u64::from(required) * 2
        );
    }
    Ok(())
}

/// Adds the rules of SNAT.
pub(super) fn add_snat(testbed: &Testbed, directory: &Path) -> Result<()> {
    let rules = directory.join("rules.nft");
    fs::write(&rules, SNAT_RULES)?;
    testbed.gateway.output(&["nft", "-f", &rules.display().to_string()])?;
    Ok(())
}

/// Enables NAPI, without which a veth doesn't receive frames in batches, on the configured core. With it comes GRO, which
/// merges TCP segments, as on a physical interface, but no UDP datagrams; a veth has neither alone.
pub(super) fn enable_napi(testbed: &Testbed, config: &SutConfig) -> Result<()> {
    if config.gro {
        for interface in ["gw-in", "gw-out"] {
            testbed.gateway.output(&["ethtool", "-K", interface, "gro", "on"])?;
        }
    }
    place(testbed, config)
}

/// Moves the reception of gw-in to the configured core.
pub(super) fn place(testbed: &Testbed, config: &SutConfig) -> Result<()> {
    if config.placement == Placement::Gateway {
        let threaded = "echo 1 > /sys/class/net/gw-in/threaded";
        testbed.gateway.output(&["sh", "-c", threaded]).context("--nft-core gateway needs Linux 5.12")?;
        let thread = find_thread("napi/gw-in-").context("the kernel started no NAPI thread for gw-in")?;
        pin_to_core(Some(thread), config.cores.first().copied().context("the gateway has no core")?)?;
    }
    Ok(())
}

/// The kernel thread whose name starts with `prefix`.
fn find_thread(prefix: &str) -> Option<Pid> {
    let matches =
        |directory: &Path| fs::read_to_string(directory.join("comm")).is_ok_and(|comm| comm.starts_with(prefix));
    let mut directories = fs::read_dir("/proc").ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let directory = directories.find(|directory| matches(directory))?;
    Pid::from_raw(directory.file_name()?.to_str()?.parse().ok()?)
}
