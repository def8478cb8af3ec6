//! Second scenario, failover: two gateways share a VIP, each with a shard of it. One is killed during a download, and
//! restarted.

mod connections;
mod network;

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

pub(super) use network::{FailoverTopology, VIPS};
use network::{Gateway, POD_NETWORKS, PODS, PUBLIC};

use super::leaks::LeakDetector;
use super::report::Report;
use super::topology::SERVER;
use super::wait_for;
use crate::command_error::CommandError;
use crate::demo::daemon::Daemon;
use crate::lab::download::{Download, Outcome};

/// Size of the download in bytes, and bytes per second: long enough to kill a gateway during it.
const BYTES: u64 = 32_000_000;
const RATE: u64 = 6_000_000;
/// Port of the download server.
const PORT: u16 = 7700;
/// Time from the start of the download to the kill.
const KILL_AFTER: Duration = Duration::from_millis(1500);
/// How long routers keep sending to a dead gateway: BFD with 3 times 100 ms.
const DETECTION_TIME: Duration = Duration::from_millis(300);
/// Limit of the download's longest gap. The lease of a dead gateway expires after 0.6 s, and TCP's retransmission
/// backoff can add as much again.
const MAX_GAP: Duration = Duration::from_secs(2);

/// Runs the scenario; leaves its processes running.
pub(super) fn run(group: &mut FailoverTopology, report: &mut Report) -> Result<(), CommandError> {
    let [pods4, pods6] = POD_NETWORKS;
    let filter = format!("net {pods4} or net {pods6}");
    let leaks = LeakDetector::start(&group.outside, PUBLIC, &filter, group.directory.path())?;

    Report::section("Two active gateways, one VIP");
    let started = Instant::now();
    group.start()?;
    let in_sync = wait_for(|| group.gateways.iter().all(Gateway::is_in_sync), "the group of gateways");
    let [one, two] = group.gateways.each_ref().map(|gateway| gateway.name);
    report.check(&format!("{one} and {two} are active and in sync"), in_sync.is_ok(), &after(started, "their start"));
    connections::check(group, report, "new connections via both gateways");

    Report::section("kill -9 of a gateway during a download");
    let killed = kill_during_download(group, report)?;

    Report::section("Restart of the killed gateway");
    restart(group, killed, report)?;
    leaks.report(report)
}

/// Stops gateways and policy server.
pub(super) fn stop(group: &mut FailoverTopology, report: &mut Report) -> Result<(), CommandError> {
    report.check("SIGTERM stops gateways and policy server", group.stop()?, "");
    Ok(())
}

/// Kills the gateway of a running download; returns its index.
fn kill_during_download(group: &mut FailoverTopology, report: &mut Report) -> Result<usize, CommandError> {
    let (name, [address, _]) = PODS[0];
    let server = SERVER[0].parse::<IpAddr>().map_err(CommandError::runtime)?;
    let at = SocketAddr::new(server, PORT);
    let download = Download::start(&group.server, at, &group.pods[0], BYTES, RATE).map_err(CommandError::runtime)?;
    let seen = download.client_address();
    let observed = format!("source {}, port {}", seen.ip(), seen.port());
    report.check(&format!("{name} downloads from {server}"), seen.ip().to_string() == VIPS[0], &observed);

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
    group.route_via(&[1 - killed])?;
    let age = (killed_at - download.started()).as_secs_f64();
    let progress = format!("{age:.1} s into the download, at {} of {} MB", megabytes(received), megabytes(BYTES));
    report.check(&format!("kill -9 {dead}"), was_running, &progress);

    let survivor = &group.gateways[1 - killed];
    let failover = wait_for(|| survivor.owner(address).is_ok_and(|owner| owner == standby), standby);
    report.check(&format!("{standby} owns {dead}'s shard, too"), failover.is_ok(), &after(killed_at, "the kill"));
    // A standby session becomes active with its first packet.
    let activated = wait_for(|| survivor.has_session(&session).is_ok_and(|has| has), standby);
    let active = format!("{standby} has activated its standby session");
    report.check(&active, activated.is_ok(), &format!("same VIP port {}", seen.port()));
    connections::check(group, report, &format!("new connections via {standby} alone"));
    report_download(download.finish(), report);
    Ok(killed)
}

fn report_download(outcome: std::io::Result<Outcome>, report: &mut Report) {
    let (is_intact, gap) = match outcome {
        Ok(Outcome { bytes, is_intact, checksum, longest_gap, duration }) => {
            let comparison = if is_intact { "the same" } else { "DIFFERENT" };
            let volume = format!("{} MB in {:.1} s", megabytes(bytes), duration.as_secs_f64());
            let gap = format!("{:.2} s, limit {} s", longest_gap.as_secs_f64(), MAX_GAP.as_secs());
            (
                (is_intact, format!("{volume}, {comparison} SHA-256 on both sides, {checksum:08x}..")),
                (longest_gap <= MAX_GAP, gap),
            )
        }
        Err(error) => ((false, error.to_string()), (false, "the download has failed".to_owned())),
    };
    report.check("the download is complete and intact", is_intact.0, &is_intact.1);
    report.check("longest gap of the download", gap.0, &gap.1);
}

/// Restarts the killed gateway, and adds routes to it once it is active.
fn restart(group: &mut FailoverTopology, killed: usize, report: &mut Report) -> Result<(), CommandError> {
    let started = Instant::now();
    group.start_gateway(killed)?;
    if let Some(program) = &mut group.gateways[killed].daemon {
        program.wait_ready()?;
    }
    let name = group.gateways[killed].name;
    let in_sync = wait_for(|| group.gateways.iter().all(Gateway::is_in_sync), name);
    report.check(&format!("{name} owns its shard again"), in_sync.is_ok(), &after(started, "its start"));
    group.route_via(&[0, 1])?;
    connections::check(group, report, "new connections via both gateways");
    Ok(())
}

fn after(start: Instant, what: &str) -> String {
    format!("{:.1} s after {what}", start.elapsed().as_secs_f64())
}

fn megabytes(bytes: u64) -> String {
    format!("{}.{}", bytes / 1_000_000, bytes / 100_000 % 10)
}
