//! Open vSwitch as a system under test: userspace datapath with AF_XDP ports, SNAT by its own connection tracking.
//!
//! Database and switch run in the gateway's namespace, with sockets and files in a directory of their own, so that a
//! switch of the machine isn't touched.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vipgate_lab::{Host, Process, output, run};

use crate::wire::testbed::{INSIDE_MAC, OUTSIDE_MAC, SINK_MAC, SOURCE_MAC, format_mac};

/// What is missing without the packages; libxdp1 has the XDP programs that AF_XDP ports load.
const INSTALL: &str = "install openvswitch-switch (and libxdp1, which has the XDP programs of its AF_XDP ports)";
/// Schema of the database, from the package.
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Startup timeout of the database, and of a command.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Program of libxdp that runs others, in one of the directories that it searches.
const DISPATCHER: &str = "xdp-dispatcher.o";

/// The running daemons, the switch first; killed on drop.
#[derive(Debug)]
pub(super) struct OpenVswitch {
    switch: Process,
    _database: Process,
}

impl OpenVswitch {
    /// Checks that it is installed.
    pub(super) fn check() -> Result<()> {
        for program in ["ovs-vswitchd", "ovsdb-server", "ovs-vsctl", "ovs-ofctl", "ovsdb-tool"] {
            run(&[program, "--version"]).with_context(|| format!("Open vSwitch isn't installed: {INSTALL}"))?;
        }
        let configured = std::env::var_os("LIBXDP_OBJECT_PATH").map(Into::into);
        let installed = format!("/usr/lib/{}-linux-gnu/bpf", std::env::consts::ARCH).into();
        let mut directories = [configured, Some(installed), Some("/usr/lib/bpf".into())].into_iter().flatten();
        ensure!(
            directories.any(|directory: std::path::PathBuf| directory.join(DISPATCHER).exists()),
            "libxdp's program {DISPATCHER} is missing: {INSTALL}, or set LIBXDP_OBJECT_PATH to its directory"
        );
        Ok(())
    }

    /// Starts it with a thread per core that polls, and waits until its ports forward.
    pub(super) fn start(host: &Host, cores: &[usize], directory: &Path) -> Result<Self> {
        let path = |name: &str| directory.join(name).display().to_string();
        let (database, socket, management) = (path("conf.db"), path("db.sock"), path("br0.mgmt"));
        run(&["ovsdb-tool", "create", &database, SCHEMA])?;
        let server = ["ovsdb-server", &database, &format!("--remote=punix:{socket}")];
        let mut server = spawn(host, &server, directory, "database")?;
        server.wait_ready(TIMEOUT, || Path::new(&socket).exists())?;

        let mask = cores.iter().fold(0_u64, |mask, core| mask | 1 << core);
        let control = |arguments: &[&str]| {
            let client = ["ovs-vsctl".to_owned(), format!("--db=unix:{socket}"), timeout_option()];
            output(&client.iter().map(String::as_str).chain(arguments.iter().copied()).collect::<Vec<_>>())
        };
        control(&[
            "--no-wait",
            "init",
            "--",
            "set",
            "Open_vSwitch",
            ".",
            &format!("other_config:pmd-cpu-mask={mask:#x}"),
        ])?;
        let switch = spawn(host, &["ovs-vswitchd", &format!("unix:{socket}")], directory, "switch")?;
        let configure = |arguments: &[&str]| {
            control(arguments).with_context(|| format!("Open vSwitch: {}", log_of(directory, "switch")))
        };
        configure(&["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev", "fail-mode=secure"])?;
        let queues = format!("options:n_rxq={}", cores.len());
        for (port, number) in [("gw-in", "1"), ("gw-out", "2")] {
            let number = format!("ofport_request={number}");
            configure(&["add-port", "br0", port, "--", "set", "Interface", port, "type=afxdp", &number, &queues])?;
            let error = configure(&["get", "Interface", port, "error"])?;
            ensure!(error.trim() == "[]", "Open vSwitch can't use {port}: {}", log_of(directory, "switch"));
        }
        let flows = path("flows");
        fs::write(&flows, snat_flows())?;
        run(&["ovs-ofctl", &timeout_option(), "add-flows", &format!("unix:{management}"), &flows])?;
        Ok(Self { switch, _database: server })
    }

    /// Process ID of the switch.
    pub(super) fn pid(&self) -> u32 {
        self.switch.id()
    }
}

/// Starts a daemon in the gateway's namespace, with its control socket in `directory`.
fn spawn(host: &Host, command: &[&str], directory: &Path, name: &str) -> Result<Process> {
    let file = |extension: &str| directory.join(format!("{name}.{extension}"));
    let variables = ["OVS_RUNDIR", "OVS_DBDIR", "OVS_LOGDIR"].map(|name| format!("{name}={}", directory.display()));
    let variables: Vec<&str> = variables.iter().map(String::as_str).collect();
    let control = format!("--unixctl={}", file("ctl").display());
    Ok(host.spawn(&[&["env"], &variables[..], command, &[&control]].concat(), &file("log"))?)
}

fn timeout_option() -> String {
    format!("--timeout={}", TIMEOUT.as_secs())
}

/// The last lines of a daemon's log.
fn log_of(directory: &Path, name: &str) -> String {
    let log = fs::read_to_string(directory.join(format!("{name}.log"))).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    format!("its log ends with\n{}", lines[lines.len().saturating_sub(10)..].join("\n"))
}

/// The OpenFlow rules: SNAT to the VIP, replies of known connections back. Next hops are fixed, since a bridge resolves no
/// neighbors.
fn snat_flows() -> String {
    let hop = |source, destination| {
        format!("mod_dl_src:{},mod_dl_dst:{},dec_ttl", format_mac(source), format_mac(destination))
    };
    format!(
        "table=0,in_port=1,ip,nw_src=10.1.4.0/22,actions=ct(commit,zone=1,nat(src=203.0.113.10:1024-65535),table=1)\n\
         table=0,in_port=2,ip,nw_dst=203.0.113.10,actions=ct(zone=1,nat,table=2)\n\
         table=1,ip,actions={},output:2\n\
         table=2,ip,ct_state=+trk+est,actions={},output:1\n",
        hop(OUTSIDE_MAC, SINK_MAC),
        hop(INSIDE_MAC, SOURCE_MAC)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_both_directions_are_translated_and_get_the_next_hop() {
        let flows = snat_flows();
        let line = |start: &str| flows.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
        assert_eq!(flows.lines().count(), 4);
        assert!(line("table=0,in_port=1").contains("nat(src=203.0.113.10:1024-65535)"));
        assert!(line("table=1").ends_with("mod_dl_dst:02:00:00:00:02:01,dec_ttl,output:2"));
        assert!(line("table=2").ends_with("mod_dl_dst:02:00:00:00:01:01,dec_ttl,output:1"));
    }
}
