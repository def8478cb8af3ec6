//! What a gateway and a policy server may still do once they run, thread by thread, as the kernel says; and that they do all that
//! they have to with no more.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use vipgate_tests::{SERVER, VIP_A, VIP_B, World};

const NET_ADMIN: u64 = 1 << 12;
const NET_RAW: u64 = 1 << 13;
const IPC_LOCK: u64 = 1 << 14;
const BPF: u64 = 1 << 39;
const CONTROL: u64 = NET_ADMIN | NET_RAW | IPC_LOCK | BPF;

/// A thread as /proc/PID/task/TID/status has it.
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

    /// Nothing that it executes gains anything, and its system calls are filtered.
    #[track_caller]
    fn is_confined(&self) {
        assert_eq!(self.number("NoNewPrivs"), 1, "{self:?}");
        assert_eq!(self.number("Seccomp"), 2, "filtered: {self:?}");
    }

    #[track_caller]
    fn has(&self, capabilities: u64) {
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
    // Threads of the pool come and go.
    tasks.filter_map(|task| read(&task.ok()?.path())).collect()
}

/// The gateway's process, which may have been started by way of others.
fn gateway(world: &World) -> u32 {
    let folder = world.folder.path().display().to_string();
    let pids = vipgate::lab::output(&["pgrep", "-f", &format!("gateway --config {folder}")]).unwrap();
    let is_vipgate = |pid: &&str| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "vipgate\n");
    pids.lines().find(is_vipgate).expect("a gateway runs").parse().unwrap()
}

#[track_caller]
fn check_gateway(world: &World) {
    let threads = threads(gateway(world));
    let (mut control, mut workers) = (0, 0);
    for thread in &threads {
        thread.is_confined();
        // Giving up what could be gained takes a capability that only root brings; without it, nothing can be gained anyway.
        if world.wrapper.is_empty() {
            let most = if thread.name.starts_with("worker-") { 0 } else { CONTROL };
            assert_eq!(thread.capabilities("CapBnd") & !most, 0, "{thread:?}");
        }
        match thread.name.as_str() {
            "vipgate" => {
                // Those who are given no more than is needed have no BPF, which only older kernels want.
                thread.has(if world.wrapper.is_empty() { CONTROL } else { CONTROL & !BPF });
                control += 1;
            }
            name if name.starts_with("worker-") => {
                thread.has(0);
                assert!(thread.number("Seccomp_filters") >= 3, "a list of its own: {thread:?}");
                workers += 1;
            }
            _ => thread.has(0),
        }
    }
    assert_eq!((control, workers), (1, 2), "{threads:?}");
}

#[track_caller]
fn works(world: &World) {
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.check_identity(&world.pods[2], SERVER, VIP_B);
}

#[test]
fn a_gateway_keeps_what_its_control_thread_needs_and_workers_nothing() {
    let mut world = World::with_gateway("caps");
    check_gateway(&world);
    works(&world);
    // What happens later happens without more: policy that changes, another network, a look at sessions.
    let policy = world.policy("tenant-b.yaml");
    world.write_policy("tenant-b.yaml", &policy.replace("sessionsPerEndpoint: 20000", "sessionsPerEndpoint: 10000"));
    world.gateway.ip(&["address", "add", "10.99.0.1/32", "dev", "gw-in"]).unwrap();
    works(&world);
    assert!(world.ask(&["sessions"])["sessions"].as_array().is_some_and(|all| !all.is_empty()));
    check_gateway(&world);
    let log = world.log();
    assert!(!log.contains("privileges_kept"), "{log}");
    assert!(world.end("TERM").success(), "{}", world.log());
    // The next one replaces the program that this one left, which takes more than it keeps.
    world.start("xdp: {on_exit: pass}");
    works(&world);
    check_gateway(&world);
}

#[test]
fn a_filter_may_be_left_out() {
    let mut world = World::new("nofilter");
    world.start("privileges: {seccomp: off}");
    let threads = threads(gateway(&world));
    assert!(
        threads.iter().all(|thread| thread.number("Seccomp") == 0 && thread.number("NoNewPrivs") == 1),
        "{threads:?}"
    );
}

/// What README and units say that a gateway needs.
const NEEDED: &str = "net_admin,net_raw,ipc_lock,sys_admin";

#[test]
fn a_gateway_is_fine_with_what_the_readme_says() {
    let mut world = World::new("needed");
    let without = format!("-all,+{}", NEEDED.replace(',', ",+"));
    world.wrapper = ["setpriv", "--inh-caps", "-all", "--bounding-set", &without].map(str::to_owned).to_vec();
    world.start("");
    check_gateway(&world);
    works(&world);
}

#[test]
fn a_gateway_needs_no_root() {
    let mut world = World::new("noroot");
    let folder = world.folder.path().display().to_string();
    world.config("");
    vipgate::lab::run(&["chown", "-R", "65534:65534", &folder]).unwrap();
    let given = format!("+{}", NEEDED.replace(',', ",+"));
    let user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps"];
    world.wrapper = [&user[..], &[&given, "--ambient-caps", &given]].concat().into_iter().map(str::to_owned).collect();
    world.start("");
    check_gateway(&world);
    works(&world);
}

#[test]
fn a_policy_server_keeps_nothing() {
    let mut world = World::new("server");
    world.start_policyd("");
    let pid = world.policyd.as_mut().unwrap().process().id();
    let threads = threads(pid);
    assert!(threads.len() > 1, "{threads:?}");
    for thread in &threads {
        thread.is_confined();
        thread.has(0);
        assert_eq!(thread.capabilities("CapBnd"), 0, "{thread:?}");
    }
    // It follows its files all the same.
    let policy = world.policy("tenant-b.yaml");
    world.write_policy("tenant-b.yaml", &policy.replace("sessionsPerEndpoint: 20000", "sessionsPerEndpoint: 10000"));
    let published = || world.policyd.as_ref().unwrap().log().matches("policy published").count() >= 2;
    assert!(vipgate_tests::wait_for(std::time::Duration::from_secs(10), published));
}
