//! Clock jumps: libfaketime shifts the wall clock of one process. The machine's own clock is untouched, since other
//! processes depend on it, and there is no namespace for `CLOCK_REALTIME`. Monotonic time is unchanged, as when a
//! clock is set.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vipgate_tests::binary;
use vipgate_tests::cluster::{Cluster, Gateway, POLICYD_ADDRESS, sleep_ms, unix_time};
use vipgate_tests::soak::evidence::clock_error;

/// Delay until a process sees a new time: the library counts whole seconds until it reads its file again. Measured:
/// 0.3 to 2.0 s.
const FAKETIME_LAG_MS: u64 = 2_500;
/// A VIP that no policy has.
const UNUSED_VIP: &str = "192.0.2.250";

const LIBRARY: &str = "faketime/libfaketime.so.1";

/// Path of the library, if it is installed and enabled (`SOAK_CLOCK=0` disables it).
pub(crate) fn library() -> Option<PathBuf> {
    let folder = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let path = Path::new(&folder).join(LIBRARY);
    let is_enabled = std::env::var("SOAK_CLOCK").as_deref() != Ok("0");
    (is_enabled && path.exists()).then_some(path)
}

/// Command prefix of a process whose clock is off by the offset in a file; creates the file with offset 0.
pub(crate) fn wrapper(library: &Path, file: &Path) -> Vec<String> {
    if !file.exists() {
        fs::write(file, "+0").unwrap();
    }
    let variables = [
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME_TIMESTAMP_FILE={}", file.display()),
        // It reads the file again after one second: see `FAKETIME_LAG_MS`.
        "FAKETIME_CACHE_DURATION=1".into(),
        "FAKETIME_DONT_FAKE_MONOTONIC=1".into(),
        "DONT_FAKE_MONOTONIC=1".into(),
        // File times are not shifted.
        "NO_FAKE_STAT=1".into(),
    ];
    [vec!["env".to_owned()], variables.into()].concat()
}

/// Sets the offset of a clock, in seconds.
pub(crate) fn set(file: &Path, seconds: i64) {
    let draft = file.with_extension("draft");
    fs::write(&draft, format!("{seconds:+}")).unwrap();
    fs::rename(draft, file).unwrap();
}

/// Fails unless every process maps the library: `LD_PRELOAD` has no effect on a static program, or on one with more
/// privileges than its parent (ld.so(8)).
pub(crate) fn verify_preload(cluster: &mut Cluster) {
    let server = cluster.policyd.as_mut().map(|server| server.process().id());
    for pid in cluster.gateways.iter().filter_map(Gateway::pid).chain(server) {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(
            maps.contains(LIBRARY),
            "LD_PRELOAD has no effect on process {pid} (SOAK_CLOCK=0 disables clock jumps)"
        );
    }
}

/// Verifies that a process sees its new clock: triggers a harmless log line and checks its timestamp. Returns the
/// error.
pub(crate) fn verify_jump(cluster: &Cluster, process: usize, seconds: i64) -> Option<String> {
    sleep_ms(FAKETIME_LAG_MS);
    let gateway = cluster.gateways.get(process);
    let timestamps = || match gateway {
        Some(gateway) => event_timestamps(&gateway.log(), "flush"),
        None => event_timestamps(&cluster.policyd.as_ref().expect("the policy server runs").log(), "order_refused"),
    };
    let (before, from) = (timestamps().len(), unix_time());
    match gateway {
        Some(gateway) => drop(gateway.command(&["sessions", "flush", "--vip", UNUSED_VIP])),
        None => send_denied_command(cluster, before % cluster.gateways.len()),
    }
    let (after, to) = (timestamps(), unix_time());
    let Some(stamp) = after.get(before) else {
        return Some("the process logged no line that shows its clock".into());
    };
    clock_error(stamp, f64::from(i32::try_from(seconds).unwrap()), (from, to))
}

/// Sends the policy server a command from another host, which it denies and logs, once in 10 s for each host.
fn send_denied_command(cluster: &Cluster, gateway: usize) {
    let (program, server) = (binary().display().to_string(), format!("http://{POLICYD_ADDRESS}"));
    let command = [program.as_str(), "policy", "accept-empty", "--server", &server];
    // Denied, so it fails.
    let _ = cluster.gateways[gateway].host.output(&command);
}

/// Timestamps of the log lines with this event.
fn event_timestamps(log: &str, event: &str) -> Vec<String> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let matching = lines.filter(|line| line["event"] == event);
    matching.filter_map(|line| line["timestamp"].as_str().map(str::to_owned)).collect()
}
