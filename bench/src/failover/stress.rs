//! False positives of failure detection: how often live gateways lose their lease, or are failed over, while other
//! processes load all cores.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use vipgate_tests::cluster::Cluster;

use super::Options;

/// Processes that load each core.
const PROCESSES_PER_CORE: usize = 2;

/// The result, printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    gateways: u32,
    lease_ttl_ms: u64,
    minutes: u32,
    load_processes: usize,
    /// How often the policy server has taken a live gateway for dead.
    failovers: i64,
    /// Changes of the membership view: two for each failover.
    view_changes: i64,
}

/// Runs the benchmark on a converged cluster and prints the report.
pub(super) fn run(cluster: &Cluster, options: &Options, minutes: u32) -> Result<()> {
    let counts = || {
        ["vipgate_policyd_expiries_total", "vipgate_policyd_view"]
            .map(|name| cluster.policyd.as_ref().map_or(0, |it| it.metric(name, "") as i64))
    };
    let before = counts();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let spin = |_| vipgate_lab::spawn(&["sh", "-c", "while :; do :; done"], Path::new("/dev/null"));
    let load = (0..cores * PROCESSES_PER_CORE).map(spin).collect::<Result<Vec<_>, _>>()?;
    thread::sleep(Duration::from_secs(60 * u64::from(minutes)));
    let load_processes = load.len();
    drop(load);
    let after = counts();
    let report = Report {
        benchmark: "failover_stress",
        gateways: options.gateways,
        lease_ttl_ms: options.ttl,
        minutes,
        load_processes,
        failovers: after[0] - before[0],
        view_changes: after[1] - before[1],
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
