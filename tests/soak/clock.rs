//! The wall clock of one process, which jumps: libfaketime shows it another one. The machine's own clock isn't touched, since others live
//! by it, and a namespace for `CLOCK_REALTIME` doesn't exist. Monotonic time stays as it is, as where a clock is set.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vipgate_tests::binary;
use vipgate_tests::cluster::{Cluster, Gateway, POLICYD, moment, pass};

use crate::evidence::clock_error;

/// How long a process may still have the time before: the library counts whole seconds until it reads its file again. Measured: 0.3 to 2.0 s.
const FAKETIME_LAG_MS: u64 = 2_500;
/// A VIP that nobody has.
const NO_VIP: &str = "192.0.2.250";

const LIBRARY: &str = "faketime/libfaketime.so.1";

/// Where the library is, if it is installed and wanted (`SOAK_CLOCK=0`: not).
pub(crate) fn library() -> Option<PathBuf> {
    let folder = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let path = Path::new(&folder).join(LIBRARY);
    let is_wanted = std::env::var("SOAK_CLOCK").as_deref() != Ok("0");
    (is_wanted && path.exists()).then_some(path)
}

/// The command that a process is started by for its clock to be as far off as a file says; as right as the machine's, where there is none yet.
pub(crate) fn wrapper(library: &Path, file: &Path) -> Vec<String> {
    if !file.exists() {
        fs::write(file, "+0").unwrap();
    }
    let variables = [
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME_TIMESTAMP_FILE={}", file.display()),
        // It reads the file again after a second: see `FAKETIME_LAG_MS`.
        "FAKETIME_CACHE_DURATION=1".into(),
        "FAKETIME_DONT_FAKE_MONOTONIC=1".into(),
        "DONT_FAKE_MONOTONIC=1".into(),
        // Files have the times that they have.
        "NO_FAKE_STAT=1".into(),
    ];
    [vec!["env".to_owned()], variables.into()].concat()
}

/// Sets a clock so many seconds from the right time.
pub(crate) fn set(file: &Path, seconds: i64) {
    let draft = file.with_extension("draft");
    fs::write(&draft, format!("{seconds:+}")).unwrap();
    fs::rename(draft, file).unwrap();
}

/// Fails unless every process maps the library: `LD_PRELOAD` has no effect on a static program, or on one with more privileges than its
/// parent (ld.so(8)).
pub(crate) fn verify_preload(cluster: &mut Cluster) {
    let server = cluster.policyd.as_mut().map(|server| server.process().id());
    for pid in cluster.gateways.iter().filter_map(Gateway::pid).chain(server) {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(maps.contains(LIBRARY), "LD_PRELOAD has no effect on process {pid} (SOAK_CLOCK=0: clocks stay)");
    }
}

/// Why a jump hasn't reached its process, if so: makes the process log something harmless, and compares the time of this line.
pub(crate) fn verify_jump(cluster: &Cluster, process: usize, seconds: i64) -> Option<String> {
    pass(FAKETIME_LAG_MS);
    let gateway = cluster.gateways.get(process);
    let logged = || match gateway {
        Some(gateway) => stamps(&gateway.log(), "flush"),
        None => stamps(&cluster.policyd.as_ref().expect("the policy server runs").log(), "order_refused"),
    };
    let (before, from) = (logged().len(), moment());
    match gateway {
        Some(gateway) => drop(gateway.command(&["sessions", "flush", "--vip", NO_VIP])),
        None => send_refused_order(cluster, before % cluster.gateways.len()),
    }
    let (after, to) = (logged(), moment());
    let Some(stamp) = after.get(before) else {
        return Some("the process logged nothing that would show its clock".into());
    };
    clock_error(stamp, f64::from(i32::try_from(seconds).unwrap()), (from, to))
}

/// Sends the policy server an order from another host than its own: it refuses, and logs that once in 10 s for each host.
fn send_refused_order(cluster: &Cluster, gateway: usize) {
    let (program, server) = (binary().display().to_string(), format!("http://{POLICYD}"));
    let order = [program.as_str(), "policy", "accept-empty", "--server", &server];
    // Refused: that fails.
    let _ = cluster.gateways[gateway].host.output(&order);
}

/// When a process logged events of this name.
fn stamps(log: &str, event: &str) -> Vec<String> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let wanted = lines.filter(|line| line["event"] == event);
    wanted.filter_map(|line| line["timestamp"].as_str().map(str::to_owned)).collect()
}
