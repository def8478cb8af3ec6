//! Privileges of a running gateway and policy server, thread by thread as in /proc, and that these suffice.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use vipgate_tests::{SERVER, Testbed, VIP_A, VIP_B};

const NET_ADMIN: u64 = 1 << 12;
const NET_RAW: u64 = 1 << 13;
const IPC_LOCK: u64 = 1 << 14;
const BPF: u64 = 1 << 39;
const CONTROL: u64 = NET_ADMIN | NET_RAW | IPC_LOCK | BPF;

/// A thread: fields of /proc/PID/task/TID/status.
#[derive(Debug)]
struct Thread {
    name: String,
    fields: BTreeMap<String, String>,
}

impl Thread {
    fn capabilities(&self, set: &str) -> u64 {
        u64::from_str_radix(&self.fields[set], 16).unwrap()
    }

    fn number(&self, field: &str) -> u64 {
        self.fields[field].parse().unwrap()
    }

    /// Asserts no_new_privs and a seccomp filter.
    #[track_caller]
    fn check_confined(&self) {
        assert_eq!(self.number("NoNewPrivs"), 1, "{self:?}");
        assert_eq!(self.number("Seccomp"), 2, "no seccomp filter: {self:?}");
    }

    #[track_caller]
    fn check_capabilities(&self, capabilities: u64) {
        for set in ["CapPrm", "CapEff"] {
            assert_eq!(self.capabilities(set), capabilities, "{set} of {self:?}");
        }
    }
}

fn threads(pid: u32) -> Vec<Thread> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let read = |task: &Path| {
        let fields = fs::read_to_string(task.join("status")).ok()?;
        let pairs = fields.lines().filter_map(|line| line.split_once(":\t"));
        let fields = pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
        Some(Thread { name: fs::read_to_string(task.join("comm")).ok()?.trim().to_owned(), fields })
    };
    // Threads of the blocking pool may exit meanwhile.
    tasks.filter_map(|task| read(&task.ok()?.path())).collect()
}

/// Process ID of the gateway, which may run behind a wrapper.
fn gateway(testbed: &Testbed) -> u32 {
    let folder = testbed.folder.path().display().to_string();
    let pids = vipgate_lab::output(&["pgrep", "-f", &format!("gateway --config {folder}")]).unwrap();
    let is_vipgate = |pid: &&str| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "vipgate\n");
    pids.lines().find(is_vipgate).expect("a gateway runs").parse().unwrap()
}

#[track_caller]
fn check_gateway(testbed: &Testbed) {
    let threads = threads(gateway(testbed));
    let (mut control, mut workers) = (0, 0);
    for thread in &threads {
        thread.check_confined();
        // Dropping the bounding set takes CAP_SETPCAP, which only root has; without it nothing can be gained anyway.
        if testbed.wrapper.is_empty() {
            let allowed = if thread.name.starts_with("worker-") { 0 } else { CONTROL };
            assert_eq!(thread.capabilities("CapBnd") & !allowed, 0, "{thread:?}");
        }
        match thread.name.as_str() {
            "vipgate" => {
                // With no more than the needed capabilities there is no CAP_BPF, which only older kernels require.
                thread.check_capabilities(if testbed.wrapper.is_empty() { CONTROL } else { CONTROL & !BPF });
                control += 1;
            }
            name if name.starts_with("worker-") => {
                thread.check_capabilities(0);
                assert!(thread.number("Seccomp_filters") >= 3, "no worker filter: {thread:?}");
                workers += 1;
            }
            _ => thread.check_capabilities(0),
        }
    }
    assert_eq!((control, workers), (1, 2), "{threads:?}");
}

#[track_caller]
fn check_traffic(testbed: &Testbed) {
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.check_source_addresses(&testbed.pods[2], SERVER, VIP_B);
}

#[test]
fn a_gateway_keeps_control_capabilities_and_workers_none() {
    let mut testbed = Testbed::with_gateway("caps");
    check_gateway(&testbed);
    check_traffic(&testbed);
    // Later work needs no more: policy changes, network changes, session queries.
    let policy = testbed.read_policy("tenant-b.yaml");
    testbed.write_policy("tenant-b.yaml", &policy.replace("sessionsPerEndpoint: 20000", "sessionsPerEndpoint: 10000"));
    testbed.gateway.ip(&["address", "add", "10.99.0.1/32", "dev", "gw-in"]).unwrap();
    check_traffic(&testbed);
    assert!(testbed.query(&["sessions"])["sessions"].as_array().is_some_and(|all| !all.is_empty()));
    check_gateway(&testbed);
    let log = testbed.log();
    assert!(!log.contains("privileges_kept"), "{log}");
    assert!(testbed.stop("TERM").success(), "{}", testbed.log());
    // The next process replaces the program that this one left attached, which takes more than it keeps.
    testbed.start("xdp: {on_exit: pass}");
    check_traffic(&testbed);
    check_gateway(&testbed);
}

#[test]
fn seccomp_can_be_disabled() {
    let mut testbed = Testbed::new("nofilter");
    testbed.start("privileges: {seccomp: off}");
    let threads = threads(gateway(&testbed));
    assert!(
        threads.iter().all(|thread| thread.number("Seccomp") == 0 && thread.number("NoNewPrivs") == 1),
        "{threads:?}"
    );
}

/// Capabilities that a gateway needs, as documented in README and units.
const NEEDED: &str = "net_admin,net_raw,ipc_lock,sys_admin";

#[test]
fn a_gateway_runs_with_the_documented_capabilities() {
    let mut testbed = Testbed::new("needed");
    let bounding_set = format!("-all,+{}", NEEDED.replace(',', ",+"));
    testbed.wrapper = ["setpriv", "--inh-caps", "-all", "--bounding-set", &bounding_set].map(str::to_owned).to_vec();
    testbed.start("");
    check_gateway(&testbed);
    check_traffic(&testbed);
}

#[test]
fn a_gateway_runs_as_non_root() {
    let mut testbed = Testbed::new("noroot");
    let folder = testbed.folder.path().display().to_string();
    testbed.write_config("");
    vipgate_lab::run(&["chown", "-R", "65534:65534", &folder]).unwrap();
    let capabilities = format!("+{}", NEEDED.replace(',', ",+"));
    let user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps"];
    testbed.wrapper = [&user[..], &[&capabilities, "--ambient-caps", &capabilities]]
        .concat()
        .into_iter()
        .map(str::to_owned)
        .collect();
    testbed.start("");
    check_gateway(&testbed);
    check_traffic(&testbed);
}

#[test]
fn a_policy_server_drops_all_capabilities() {
    let mut testbed = Testbed::new("server");
    testbed.start_policyd("");
    let pid = testbed.policyd.as_mut().unwrap().process().id();
    let threads = threads(pid);
    assert!(threads.len() > 1, "{threads:?}");
    for thread in &threads {
        thread.check_confined();
        thread.check_capabilities(0);
        assert_eq!(thread.capabilities("CapBnd"), 0, "{thread:?}");
    }
    // It still follows its files.
    let policy = testbed.read_policy("tenant-b.yaml");
    testbed.write_policy("tenant-b.yaml", &policy.replace("sessionsPerEndpoint: 20000", "sessionsPerEndpoint: 10000"));
    let published = || testbed.policyd.as_ref().unwrap().log().matches("policy published").count() >= 2;
    assert!(vipgate_tests::wait_for(std::time::Duration::from_secs(10), published));
}
