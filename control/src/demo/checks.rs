//! Checks of the first scenario: translation, load balancing, throughput, counters.

use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::networks::{EXCLUDED, SERVER};
use vipgate_lab::reflector::{query_http, query_http_at, query_udp, query_udp_at};

use super::TIMEOUT;
use super::leaks::LeakDetector;
use super::report::{ObservedSources, Report, both};
use super::topology::{DNS, HTTP, POD_NETWORKS, Pod, Topology};
use crate::command_error::CommandError;

/// Duration of a throughput run, seconds.
const THROUGHPUT_SECONDS: &str = "3";

pub(super) fn run(topology: &Topology, report: &mut Report) -> Result<(), CommandError> {
    // Pods' own addresses are allowed only on packets between tenant B and the destinations its policy excludes.
    let [pods4, pods6] = POD_NETWORKS;
    let [excluded4, excluded6] = EXCLUDED;
    let filter = format!("(net {pods4} or net {pods6}) and not host {excluded4} and not host {excluded6}");
    let leaks = LeakDetector::start(&topology.router, "to-gw", &filter, topology.directory.path())?;

    Report::section("Egress: source addresses at the server");
    for pod in &topology.pods {
        report.check_sources(pod, SERVER, &SERVER.map(|server| probe(pod, server)), &pod.vips);
    }
    if let Some(pod) = topology.pods.iter().find(|pod| pod.tenant == "B") {
        report.check_sources(pod, EXCLUDED, &EXCLUDED.map(|server| probe(pod, server)), &pod.addresses);
    }

    Report::section("Inbound: source addresses at the backends");
    load_balance(topology, report);

    Report::section("Throughput");
    throughput(topology, report)?;

    Report::section("Counters of the gateway");
    counters(topology, report)?;

    leaks.report("no pod address was seen outside", report)
}

/// The source addresses of a pod that the server sees with HTTP and UDP, and whether ping works.
pub(super) fn probe(pod: &Pod, server: &str) -> ObservedSources {
    let Ok(address) = server.parse::<IpAddr>() else { return ObservedSources::default() };
    let text = |result: std::io::Result<String>| result.unwrap_or_else(|error| format!("({error})"));
    ObservedSources {
        http: text(query_http(&pod.host, address)),
        udp: text(query_udp(&pod.host, address)),
        ping: pod.host.output(&["ping", "-c", "1", "-W", "2", server]).is_ok(),
    }
}

/// External clients and pods connect to tenant A's Service at its VIPs.
fn load_balance(topology: &Topology, report: &mut Report) {
    let text = |result: std::io::Result<String>| result.unwrap_or_else(|error| format!("({error})"));
    let Some(vips) = topology.pods.first().map(|pod| pod.vips) else { return };
    let clients = [(&topology.server, "server", SERVER)];
    let pods = topology.pods.iter().map(|pod| (&pod.host, pod.host.name(), pod.vips));
    for (host, name, sources) in clients.into_iter().chain(pods) {
        for (vip, source) in vips.iter().zip(sources) {
            let Ok(address) = vip.parse::<IpAddr>() else { continue };
            let http = text(query_http_at(host, (address, HTTP).into()));
            let udp = text(query_udp_at(host, (address, DNS).into()));
            let holds = http == source && udp == source;
            report.check(&format!("{name} -> {vip}"), holds, &both(&http, &udp));
        }
    }
}

fn throughput(topology: &Topology, report: &mut Report) -> Result<(), CommandError> {
    let Some(pod) = topology.pods.first() else { return Ok(()) };
    for (what, reverse) in [("upload", None), ("download", Some("-R"))] {
        // A new server for each run: the previous one may still be busy.
        let log = topology.directory.path().join(format!("iperf3-{what}.log"));
        let mut server =
            topology.server.spawn(&["iperf3", "-s", "--forceflush"], &log).map_err(CommandError::runtime)?;
        server.wait_for_log("listening", TIMEOUT).map_err(CommandError::runtime)?;
        let mut command = vec!["iperf3", "-J", "-c", SERVER[0], "-t", THROUGHPUT_SECONDS];
        command.extend(reverse);
        let measured = pod.host.output(&command).map_err(|error| error.to_string());
        let rate = measured.and_then(|text| {
            let result: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            result["end"]["sum_received"]["bits_per_second"].as_f64().ok_or_else(|| result["error"].to_string())
        });
        match rate {
            Ok(rate) => report.check(&format!("iperf3 {what}"), rate > 0.0, &format!("{:.2} Gbit/s", rate / 1e9)),
            Err(error) => report.check(&format!("iperf3 {what}"), false, &error),
        }
    }
    Ok(())
}

/// The gateway's own counters.
fn counters(topology: &Topology, report: &mut Report) -> Result<(), CommandError> {
    let status = topology.query(&["status"])?;
    check_sessions(&status, &topology.query(&["sessions", "--limit", "0"])?, topology, report);
    check_packets(&status, report);
    check_drops(&topology.query(&["drops"])?, report);
    check_frames(status, topology, report)
}

/// Every session has a VIP as its translated address.
fn check_sessions(status: &Value, sessions: &Value, topology: &Topology, report: &mut Report) {
    let vips: Vec<&str> = topology.pods.iter().flat_map(|pod| pod.vips).collect();
    let has_vip = |session: &Value| {
        let vip = session["vip"].as_str().unwrap_or_default();
        vips.iter().any(|known| vip.trim_start_matches('[').starts_with(known))
    };
    let listed = sessions["sessions"].as_array().map_or(&[][..], Vec::as_slice);
    let holds = !listed.is_empty() && listed.iter().all(has_vip);
    let open = status["sessions"].as_u64().unwrap_or_default();
    report.check("every session is translated to a VIP", holds, &format!("{open} open, {} listed", listed.len()));
}

/// Packets of egress and of inbound sessions, in both directions.
fn check_packets(status: &Value, report: &mut Report) {
    let workers = || status["workers"].as_array().into_iter().flatten();
    let sum = |field: &str| -> u64 { workers().filter_map(|worker| worker["packets"][field].as_u64()).sum() };
    let (egress, reply, unchanged) = (sum("egress"), sum("reply"), sum("unchanged"));
    let (inbound, service_reply) = (sum("inbound"), sum("service_reply"));
    let handoffs: u64 = workers().filter_map(|worker| worker["handoffs"].as_u64()).sum();
    report.check(
        "packets of egress sessions",
        egress > 0 && reply > 0,
        &format!("{egress} egress, {reply} replies, {handoffs} handed off to another worker"),
    );
    report.check(
        "packets of inbound sessions",
        inbound > 0 && service_reply > 0,
        &format!("{inbound} inbound, {service_reply} replies"),
    );
    report.check("untranslated packets", unchanged > 0, &format!("{unchanged}, to and from excluded destinations"));
}

/// No drops but those that a burst explains.
fn check_drops(drops: &Value, report: &mut Report) {
    let counts = drops.as_object().into_iter().flatten();
    let dropped: Vec<(&str, u64)> = counts
        .filter_map(|(reason, count)| Some((reason.as_str(), count.as_u64()?)))
        .filter(|(_, count)| *count > 0)
        .collect();
    // A burst can overrun a ring, and a late segment can find its session closed; other reasons are failures.
    let acceptable = ["tx_full", "link_full", "no_session", "no_service"];
    let text: Vec<String> = dropped.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let text = if text.is_empty() { "no drops".to_owned() } else { text.join(", ") };
    let holds = dropped.iter().all(|(reason, _)| acceptable.contains(reason));
    report.check("no unexpected drops", holds, &text);
}

/// Pool, device and workers together hold all packet buffers.
fn check_frames(mut status: Value, topology: &Topology, report: &mut Report) -> Result<(), CommandError> {
    let frames_in = |status: &Value, place: &str| -> u64 {
        let stats = status["figures"].as_array();
        let mut frames = stats.into_iter().flatten().filter(|stat| stat["name"] == "frames");
        frames.find(|stat| stat["labels"]["place"] == place).and_then(|stat| stat["value"].as_u64()).unwrap_or(0)
    };
    let sum_of_places =
        |status: &Value| ["pool", "device", "held"].iter().map(|place| frames_in(status, place)).sum::<u64>();
    for _ in 0..50 {
        if sum_of_places(&status) == frames_in(&status, "total") {
            break;
        }
        // Frames in a worker's current batch are not counted anywhere.
        thread::sleep(Duration::from_millis(50));
        status = topology.query(&["status"])?;
    }
    let (found, total) = (sum_of_places(&status), frames_in(&status, "total"));
    report.check("no packet buffer is lost", found == total && total > 0, &format!("{found} of {total} found"));
    Ok(())
}
