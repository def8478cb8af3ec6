//! TCP streams by iperf3 from a pod to the server.

use std::path::Path;
use std::time::Duration;

use vipgate_lab::{Host, Process};

use crate::drop_accounting::RING_LOSSES;
use crate::{SERVER, Testbed};

/// Starts a server on a host, with its log in a folder; it listens when this returns.
pub fn start_server(host: &Host, folder: &Path) -> Process {
    let mut server = host.spawn(&["iperf3", "-s", "--forceflush"], &folder.join("iperf3.log")).unwrap();
    server.wait_for_log("listening", Duration::from_secs(5)).unwrap();
    server
}

/// Runs a client, and returns a field of what was received in all, or for UDP sent: `bytes` or `bits_per_second`.
///
/// # Panics
/// With iperf3's report, if it has no such field.
pub fn measure(client: &Host, arguments: &[&str], field: &str) -> f64 {
    let printed = client.output(&[&["iperf3", "-J"], arguments].concat()).unwrap();
    let report: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let sum = if arguments.contains(&"-u") { "sum" } else { "sum_received" };
    report["end"][sum][field].as_f64().unwrap_or_else(|| panic!("{arguments:?}: {report}"))
}

impl Testbed {
    /// Runs iperf3 from a pod, in both directions and over both families.
    pub fn run_iperf3(&self) {
        self.accounting.allow(RING_LOSSES);
        // Two workers and both iperf3 processes share two cores: the ring between workers overflows as those of the
        // device do.
        self.accounting.allow(["link_full"]);
        let _server = start_server(&self.server, self.folder.path());
        for (server, reverse) in [(SERVER[0], false), (SERVER[0], true), (SERVER[1], false), (SERVER[1], true)] {
            let mut arguments = vec!["-t", "2", "-c", server];
            arguments.extend(reverse.then_some("-R"));
            let rate = measure(&self.pods[0], &arguments, "bits_per_second");
            assert!(rate > 50e6, "{server}, reverse {reverse}: {rate} bit/s");
        }
        self.check_frames();
    }
}
