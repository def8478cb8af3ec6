//! The second act: two gateways serve one VIP, each a share of it. One of them is killed while a pod downloads through it,
//! and comes back.

mod connections;
mod network;

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use super::leaks::Leaks;
use super::program::Program;
use super::report::Report;
use super::topology::SERVER;
use super::wait_for;
use crate::failure::Failure;
use crate::lab::download::{Download, Outcome};
use network::{Gateway, POD_NETWORKS, PODS, PUBLIC};
pub(super) use network::{Group, VIPS};

/// Size of the download in bytes, and bytes in a second: it takes long enough for a gateway to die in the middle.
const BYTES: u64 = 32_000_000;
const RATE: u64 = 6_000_000;
/// Where its server listens.
const PORT: u16 = 7700;
/// When its gateway is killed.
const KILLED_AFTER: Duration = Duration::from_millis(1500);
/// How long routers go on sending to a dead gateway: BFD with three times 100 ms.
const DETECTED: Duration = Duration::from_millis(300);
/// The longest time in which the download may stand still. The lease of a dead gateway ends after 0.6 s, and TCP, which has
/// sent in vain meanwhile, then lets up to as much pass again before it tries once more.
const STANDSTILL: Duration = Duration::from_secs(2);

/// Plays it, and leaves everything running.
pub(super) fn play(group: &mut Group, report: &mut Report) -> Result<(), Failure> {
    let [pods4, pods6] = POD_NETWORKS;
    let filter = format!("net {pods4} or net {pods6}");
    let leaks = Leaks::listen(&group.outside, PUBLIC, &filter, group.folder.path())?;

    Report::section("Both gateways serve one VIP");
    let begun = Instant::now();
    group.start()?;
    let came = wait_for(|| group.gateways.iter().all(Gateway::is_whole), "the group of gateways");
    let [one, two] = group.gateways.each_ref().map(|gateway| gateway.name);
    report.line(&format!("{one} and {two} serve, and are linked"), came.is_ok(), &after(begun, "they were started"));
    connections::check(group, report, "new connections");

    Report::section("A download, and kill -9 of the gateway that has it");
    let killed = kill_during_download(group, report)?;

    Report::section("The killed gateway comes back");
    come_back(group, killed, report)?;
    leaks.report(report)
}

/// Stops gateways and policy server.
pub(super) fn stop(group: &mut Group, report: &mut Report) -> Result<(), Failure> {
    report.line("SIGTERM stops gateways and policy server", group.stop()?, "");
    Ok(())
}

/// Kills the gateway through which a pod downloads; the number of it.
fn kill_during_download(group: &mut Group, report: &mut Report) -> Result<usize, Failure> {
    let (name, [address, _]) = PODS[0];
    let server = SERVER[0].parse::<IpAddr>().map_err(Failure::runtime)?;
    let at = SocketAddr::new(server, PORT);
    let download = Download::begin(&group.server, at, &group.pods[0], BYTES, RATE).map_err(Failure::runtime)?;
    let seen = download.seen();
    let told = format!("the server sees {}, port {}", seen.ip(), seen.port());
    report.line(&format!("{name} downloads from {server}"), seen.ip().to_string() == VIPS[0], &told);

    thread::sleep(KILLED_AFTER.saturating_sub(download.begun().elapsed()));
    let session = seen.to_string();
    let killed = usize::from(group.gateways[0].owner(address)? != group.gateways[0].name);
    let [dead, heir] = [killed, 1 - killed].map(|index| group.gateways[index].name);
    let mut holds =
        group.gateways[killed].has_session(&session)? && !group.gateways[1 - killed].has_session(&session)?;
    let mut told = Vec::new();
    for (pod, addresses) in PODS {
        let [one, two] = group.gateways.each_ref().map(|gateway| gateway.owner(addresses[0]));
        let owner = one?;
        holds &= owner == two?;
        told.push(format!("{pod} is {owner}'s"));
    }
    report.line(&format!("{dead} has the session"), holds, &told.join(", "));

    let (got, was_running) = (download.got(), download.runs());
    let died = Instant::now();
    group.gateways[killed].program.take().map_or(Ok(()), Program::kill)?;
    thread::sleep(DETECTED.saturating_sub(died.elapsed()));
    group.spread(&[1 - killed])?;
    let age = (died - download.begun()).as_secs_f64();
    let told = format!("{age:.1} s after it began, with {} of {} MB", megabytes(got), megabytes(BYTES));
    report.line(&format!("kill -9 {dead}"), was_running, &told);

    let survivor = &group.gateways[1 - killed];
    let came = wait_for(|| survivor.owner(address).is_ok_and(|owner| owner == heir), heir);
    report.line(&format!("{heir} serves {dead}'s share, too"), came.is_ok(), &after(died, "the kill"));
    // A copy is a session again once a packet has come for it.
    let came = wait_for(|| survivor.has_session(&session).is_ok_and(|has| has), heir);
    report.line(&format!("{heir} has the session"), came.is_ok(), &format!("port {} as before", seen.port()));
    connections::check(group, report, &format!("new connections, all by {heir}"));
    end(download.end(), report);
    Ok(killed)
}

fn end(outcome: std::io::Result<Outcome>, report: &mut Report) {
    let (whole, gap) = match outcome {
        Ok(Outcome { bytes, whole, checksum, longest, lasted }) => {
            let same = if whole { "the same" } else { "another" };
            let came = format!("{} MB in {:.1} s", megabytes(bytes), lasted.as_secs_f64());
            let gap = format!("{:.2} s, and may be {} s", longest.as_secs_f64(), STANDSTILL.as_secs());
            ((whole, format!("{came}, {same} SHA-256 on both sides, {checksum:08x}..")), (longest <= STANDSTILL, gap))
        }
        Err(error) => ((false, error.to_string()), (false, "it has no end".to_owned())),
    };
    report.line("the download is whole", whole.0, &whole.1);
    report.line("its longest gap", gap.0, &gap.1);
}

/// Starts the killed gateway again, and lets the routers use it once it serves.
fn come_back(group: &mut Group, killed: usize, report: &mut Report) -> Result<(), Failure> {
    let started = Instant::now();
    group.launch(killed)?;
    if let Some(program) = &mut group.gateways[killed].program {
        program.wait_ready()?;
    }
    let name = group.gateways[killed].name;
    let came = wait_for(|| group.gateways.iter().all(Gateway::is_whole), name);
    report.line(&format!("{name} serves its share again"), came.is_ok(), &after(started, "its start"));
    group.spread(&[0, 1])?;
    connections::check(group, report, "new connections, by both");
    Ok(())
}

fn after(moment: Instant, what: &str) -> String {
    format!("{:.1} s after {what}", moment.elapsed().as_secs_f64())
}

fn megabytes(bytes: u64) -> String {
    format!("{}.{}", bytes / 1_000_000, bytes / 100_000 % 10)
}
