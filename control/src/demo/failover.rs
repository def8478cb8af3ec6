//! Second scenario, failover: two gateways share a VIP, each with a shard of it. One is killed during a download, and
//! restarted.

mod network;

use std::thread;
use std::time::Instant;

pub(super) use network::{FailoverTopology, VIPS};
use network::{POD_NETWORKS, PODS};
use vipgate_lab::networks::SERVER;

use super::downloads::{DETECTION_TIME, KILL_AFTER};
use super::group::PUBLIC;
use super::leaks::LeakDetector;
use super::report::{Report, after};
use super::{connections, downloads, wait_for};
use crate::command_error::CommandError;
use crate::demo::daemon::Daemon;

/// Runs the scenario; leaves its processes running.
pub(super) fn run(topology: &mut FailoverTopology, report: &mut Report) -> Result<(), CommandError> {
    let [pods4, pods6] = POD_NETWORKS;
    let filter = format!("net {pods4} or net {pods6}");
    let leaks = LeakDetector::start(&topology.group.network.outside, PUBLIC, &filter, topology.group.directory.path())?;

    Report::section("Two active gateways, one VIP");
    let started = Instant::now();
    topology.start()?;
    let in_sync = wait_for(|| topology.group.is_in_sync());
    let [one, two] = topology.group.gateways.each_ref().map(|gateway| gateway.name);
    report.check(&format!("{one} and {two} are active and in sync"), in_sync, &after(started, "their start"));
    check_connections(topology, report, "new connections via both gateways");

    Report::section("kill -9 of a gateway during a download");
    let killed = kill_during_download(topology, report)?;

    Report::section("Restart of the killed gateway");
    restart(topology, killed, report)?;
    leaks.report("no pod address was seen outside", report)
}

/// Stops gateways and policy server.
pub(super) fn stop(topology: &mut FailoverTopology, report: &mut Report) -> Result<(), CommandError> {
    report.check("SIGTERM stops gateways and policy server", topology.group.stop()?, "");
    Ok(())
}

fn check_connections(topology: &FailoverTopology, report: &mut Report, what: &str) {
    connections::check(&topology.pods, &topology.group.network.server, VIPS, report, what);
}

/// Kills the gateway of a running download; returns its index.
fn kill_during_download(topology: &mut FailoverTopology, report: &mut Report) -> Result<usize, CommandError> {
    let (_, [address, _]) = PODS[0];
    let group = &mut topology.group;
    let download = downloads::start(&group.network.server, SERVER[0], &topology.pods[0], VIPS[0], report)?;
    let seen = download.client_address();

    thread::sleep(KILL_AFTER.saturating_sub(download.started().elapsed()));
    let session = seen.to_string();
    let killed = usize::from(group.gateways[0].owner(address)? != group.gateways[0].name);
    let [dead, standby] = [killed, 1 - killed].map(|index| group.gateways[index].name);
    let mut holds =
        group.gateways[killed].has_session(&session)? && !group.gateways[1 - killed].has_session(&session)?;
    let mut owners = Vec::new();
    for (pod, addresses) in PODS {
        let [one, two] = group.gateways.each_ref().map(|gateway| gateway.owner(addresses[0]));
        let owner = one?;
        holds &= owner == two?;
        owners.push(format!("{pod} {owner}"));
    }
    report.check(&format!("{dead} has its session"), holds, &format!("shard owners: {}", owners.join(", ")));

    let (received, was_running) = (download.received(), download.is_running());
    let killed_at = Instant::now();
    group.gateways[killed].daemon.take().map_or(Ok(()), Daemon::kill)?;
    thread::sleep(DETECTION_TIME.saturating_sub(killed_at.elapsed()));
    topology.route_via(&[1 - killed])?;
    let progress = downloads::progress(received, killed_at - download.started());
    report.check(&format!("kill -9 {dead}"), was_running, &progress);

    let survivor = &topology.group.gateways[1 - killed];
    let failover = wait_for(|| survivor.owner(address).is_ok_and(|owner| owner == standby));
    report.check(&format!("{standby} owns {dead}'s shard, too"), failover, &after(killed_at, "the kill"));
    // A standby session becomes active with its first packet.
    let activated = wait_for(|| survivor.has_session(&session).is_ok_and(|has| has));
    let active = format!("{standby} has activated its standby session");
    report.check(&active, activated, &format!("same VIP port {}", seen.port()));
    check_connections(topology, report, &format!("new connections via {standby} alone"));
    downloads::report(download, "download", report);
    Ok(killed)
}

/// Restarts the killed gateway, and adds routes to it once it is active.
fn restart(topology: &mut FailoverTopology, killed: usize, report: &mut Report) -> Result<(), CommandError> {
    let started = Instant::now();
    topology.group.start_gateway(killed)?;
    let gateway = &mut topology.group.gateways[killed];
    let name = gateway.name;
    if let Some(program) = &mut gateway.daemon {
        program.wait_ready()?;
    }
    let in_sync = wait_for(|| topology.group.is_in_sync());
    report.check(&format!("{name} owns its shard again"), in_sync, &after(started, "its start"));
    topology.route_via(&[0, 1])?;
    check_connections(topology, report, "new connections via both gateways");
    Ok(())
}
