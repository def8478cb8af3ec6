//! Third scenario, nodes: the agent of a node steers its pods' packets to two gateways, one of which is killed during
//! downloads. No route leads to a gateway, and the node has another way out.

mod network;

use std::thread;
use std::time::Instant;

pub(super) use network::{NodeTopology, VIPS};
use network::{POD_NETWORKS, UPLINK};
use vipgate_lab::download::Download;
use vipgate_lab::networks::SERVER;

use super::checks::probe;
use super::daemon::Daemon;
use super::downloads::{DETECTION_TIME, KILL_AFTER};
use super::group::PUBLIC;
use super::leaks::LeakDetector;
use super::report::{Report, after};
use super::topology::Pod;
use super::{connections, downloads, wait_for};
use crate::command_error::CommandError;

/// Runs the scenario; leaves its processes running.
pub(super) fn run(topology: &mut NodeTopology, report: &mut Report) -> Result<(), CommandError> {
    let [pods4, pods6] = POD_NETWORKS;
    let [server4, server6] = SERVER;
    let of_pods = format!("net {pods4} or net {pods6}");
    // A tunnel's packets have addresses of node and gateway; masqueraded ones would have those of node and server.
    let of_server = format!("host {server4} or host {server6}");
    let group = &topology.group;
    let folder = group.directory.path();
    let uplink = LeakDetector::start(&group.network.inside, UPLINK, &format!("{of_pods} or {of_server}"), folder)?;
    let outside = LeakDetector::start(&group.network.outside, PUBLIC, &of_pods, folder)?;

    Report::section("Two gateways, and the agent of a node");
    let started = Instant::now();
    topology.start_group()?;
    let in_sync = wait_for(|| topology.group.is_in_sync());
    report.check("gw-1 and gw-2 are active and in sync", in_sync, &after(started, "their start"));
    start_agent(topology, report)?;
    for pod in covered(topology) {
        report.check_sources(pod, SERVER, &SERVER.map(|server| probe(pod, server)), &pod.vips);
    }
    check_connections(topology, report, "new connections via both gateways");
    let pod = topology.pods[0].addresses[0];
    for command in [&["endpoints"][..], &["trace", pod, SERVER[0]]] {
        Report::output(&format!("vipgate node {}", command.join(" ")), &topology.text(command)?);
    }

    Report::section("kill -9 of a gateway during downloads of a pod");
    kill_during_downloads(topology, report)?;
    uplink.report("no pod packet left the node outside a tunnel", report)?;
    outside.report("no pod address was seen outside", report)?;

    Report::section("A pod without a policy leaves by the node");
    for pod in topology.pods.iter().filter(|pod| pod.tenant == "E") {
        report.check_sources(pod, SERVER, &SERVER.map(|server| probe(pod, server)), &pod.vips);
    }
    let status = topology.query(&["status"])?;
    let kernel = &status["kernel"];
    let repairs = format!("{} repairs", kernel["repairs"]);
    report.check("the node's kernel is as programmed", kernel["agrees"] == true, &repairs);
    Ok(())
}

/// Stops agent, gateways and policy server.
pub(super) fn stop(topology: &mut NodeTopology, report: &mut Report) -> Result<(), CommandError> {
    report.check("SIGTERM stops agent, gateways and policy server", topology.stop()?, "");
    Ok(())
}

/// The pods that have a VIP.
fn covered(topology: &NodeTopology) -> impl Iterator<Item = &Pod> {
    topology.pods.iter().filter(|pod| pod.vips == VIPS)
}

fn start_agent(topology: &mut NodeTopology, report: &mut Report) -> Result<(), CommandError> {
    let started = Instant::now();
    topology.start_agent()?;
    let is_steered = |pod: &Pod| {
        let target = |address: &&str| topology.target(address).is_ok_and(|target| target.starts_with("gw-"));
        pod.addresses.iter().all(target)
    };
    let steered = wait_for(|| covered(topology).all(is_steered));
    report.check("the agent steers tenant D's pods", steered, &after(started, "its start"));
    Ok(())
}

fn check_connections(topology: &NodeTopology, report: &mut Report, what: &str) {
    let pods: Vec<_> = covered(topology).map(|pod| pod.host.clone()).collect();
    connections::check(&pods, &topology.group.network.server, VIPS, report, what);
}

/// Kills the gateway of a pod's running downloads, one of each family.
fn kill_during_downloads(topology: &mut NodeTopology, report: &mut Report) -> Result<(), CommandError> {
    let Pod { host, addresses, .. } = topology.pods[0].clone();
    let mut downloads = Vec::new();
    for (family, vip) in VIPS.into_iter().enumerate() {
        downloads.push(downloads::start(&topology.group.network.server, SERVER[family], &host, vip, report)?);
    }
    let first = &downloads[0];
    thread::sleep(KILL_AFTER.saturating_sub(first.started().elapsed()));
    let target = topology.target(addresses[0])?;
    let killed = usize::from(target != topology.group.gateways[0].name);
    let [dead, standby] = [killed, 1 - killed].map(|index| topology.group.gateways[index].name);

    let (received, was_running) = (first.received(), downloads.iter().all(Download::is_running));
    let killed_at = Instant::now();
    topology.group.gateways[killed].daemon.take().map_or(Ok(()), Daemon::kill)?;
    report.check(
        &format!("kill -9 {dead}"),
        was_running && target == dead,
        &downloads::progress(received, killed_at - first.started()),
    );
    let is_moved = |address: &&str| topology.target(address).is_ok_and(|target| target == standby);
    let moved = wait_for(|| addresses.iter().all(is_moved));
    report.check(&format!("the agent steers to {standby}"), moved, &after(killed_at, "the kill"));
    thread::sleep(DETECTION_TIME.saturating_sub(killed_at.elapsed()));
    topology.route_replies_via(&[1 - killed])?;

    let survivor = &topology.group.gateways[1 - killed];
    let is_owned = |address: &&str| survivor.owner(address).is_ok_and(|owner| owner == standby);
    let owned = wait_for(|| addresses.iter().all(is_owned));
    report.check(&format!("{standby} owns {dead}'s shards, too"), owned, &after(killed_at, "the kill"));
    check_connections(topology, report, &format!("new connections via {standby} alone"));
    for (download, name) in downloads.into_iter().zip(["IPv4 download", "IPv6 download"]) {
        downloads::report(download, name, report);
    }
    Ok(())
}
