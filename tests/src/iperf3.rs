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

impl Testbed {
    /// Runs iperf3 from a pod, in both directions and over both families.
    pub fn run_iperf3(&self) {
        self.accounting.allow(RING_LOSSES);
        // Two workers and both iperf3 processes share two cores: the ring between workers overflows as those of the
        // device do.
        self.accounting.allow(["link_full"]);
        let _server = start_server(&self.server, self.folder.path());
        for (server, reverse) in [(SERVER[0], false), (SERVER[0], true), (SERVER[1], false), (SERVER[1], true)] {
            let mut command = vec!["iperf3", "-J", "-t", "2", "-c", server];
            if reverse {
                command.push("-R");
            }
            let report: serde_json::Value = serde_json::from_str(&self.pods[0].output(&command).unwrap()).unwrap();
            let rate = report["end"]["sum_received"]["bits_per_second"].as_f64().unwrap();
            assert!(rate > 50e6, "{server}, reverse {reverse}: {rate} bit/s");
        }
        self.check_frames();
    }
}
