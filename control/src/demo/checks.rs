//! What the first act does and what must hold.

use std::fs;
use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::leaks::Leaks;
use super::report::{Report, Seen};
use super::topology::{DNS, EXCLUDED, HTTP, POD_NETWORKS, Pod, SERVER, Topology};
use super::wait_for;
use crate::failure::Failure;
use crate::lab::peers::{ask_http, ask_http_at, ask_udp, ask_udp_at};

/// Seconds of the throughput run.
const SECONDS: &str = "3";

pub(super) fn run(topology: &Topology, report: &mut Report) -> Result<(), Failure> {
    // Pods' own addresses may be seen only on packets between tenant B and what its policy excludes.
    let [pods4, pods6] = POD_NETWORKS;
    let [excluded4, excluded6] = EXCLUDED;
    let filter = format!("(net {pods4} or net {pods6}) and not host {excluded4} and not host {excluded6}");
    let leaks = Leaks::listen(&topology.router, "to-gateway", &filter, topology.folder.path())?;

    Report::section("What the server saw");
    for pod in &topology.pods {
        report.seen(pod, SERVER, &SERVER.map(|server| see(pod, server)), &pod.vips);
    }
    if let Some(pod) = topology.pods.iter().find(|pod| pod.tenant == "B") {
        report.seen(pod, EXCLUDED, &EXCLUDED.map(|server| see(pod, server)), &pod.addresses);
    }

    Report::section("What the pods saw, at their Services' addresses");
    serve(topology, report);

    Report::section("A download and an upload");
    throughput(topology, report)?;

    Report::section("The gateway");
    gateway(topology, report)?;

    leaks.report(report)
}

/// What the server sees of a pod: by HTTP, by UDP, and whether it answers a ping.
fn see(pod: &Pod, server: &str) -> Seen {
    let Ok(address) = server.parse::<IpAddr>() else { return Seen::default() };
    let told = |result: std::io::Result<String>| result.unwrap_or_else(|error| format!("({error})"));
    Seen {
        http: told(ask_http(&pod.host, address)),
        udp: told(ask_udp(&pod.host, address)),
        ping: pod.host.output(&["ping", "-c", "1", "-W", "2", server]).is_ok(),
    }
}

/// Clients outside, and pods, reach tenant A's Service at its VIPs.
fn serve(topology: &Topology, report: &mut Report) {
    let told = |result: std::io::Result<String>| result.unwrap_or_else(|error| format!("({error})"));
    let Some(vips) = topology.pods.first().map(|pod| pod.vips) else { return };
    let clients = [(&topology.server, "server", SERVER)];
    let pods = topology.pods.iter().map(|pod| (&pod.host, pod.host.name(), pod.vips));
    for (host, name, identities) in clients.into_iter().chain(pods) {
        for (vip, identity) in vips.iter().zip(identities) {
            let Ok(address) = vip.parse::<IpAddr>() else { continue };
            let http = told(ask_http_at(host, (address, HTTP).into()));
            let udp = told(ask_udp_at(host, (address, DNS).into()));
            let holds = http == identity && udp == identity;
            report.line(&format!("{name} -> {vip}"), holds, &format!("HTTP from {http}, UDP from {udp}"));
        }
    }
}

fn throughput(topology: &Topology, report: &mut Report) -> Result<(), Failure> {
    let Some(pod) = topology.pods.first() else { return Ok(()) };
    for (what, reverse) in [("upload", None), ("download", Some("-R"))] {
        // A server of its own for each: one that has just served may still be busy with it.
        let log = topology.folder.path().join(format!("iperf3-{what}.log"));
        let _server = topology.server.spawn(&["iperf3", "-s", "--forceflush"], &log).map_err(Failure::runtime)?;
        wait_for(|| fs::read_to_string(&log).is_ok_and(|log| log.contains("listening")), "iperf3")?;
        let mut command = vec!["iperf3", "-J", "-c", SERVER[0], "-t", SECONDS];
        command.extend(reverse);
        let measured = pod.host.output(&command).map_err(|error| error.to_string());
        let rate = measured.and_then(|text| {
            let answer: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            answer["end"]["sum_received"]["bits_per_second"].as_f64().ok_or_else(|| answer["error"].to_string())
        });
        match rate {
            Ok(rate) => report.line(&format!("iperf3 {what}"), rate > 0.0, &format!("{:.2} Gbit/s", rate / 1e9)),
            Err(error) => report.line(&format!("iperf3 {what}"), false, &error),
        }
    }
    Ok(())
}

fn gateway(topology: &Topology, report: &mut Report) -> Result<(), Failure> {
    let status = topology.ask(&["status"])?;
    let sessions = topology.ask(&["sessions", "--limit", "0"])?;
    let listed = sessions["sessions"].as_array().map_or(0, Vec::len);
    let open = status["sessions"].as_u64().unwrap_or_default();
    let vips: Vec<&str> = topology.pods.iter().flat_map(|pod| pod.vips).collect();
    let all_vips = sessions["sessions"].as_array().into_iter().flatten().all(|session| {
        let vip = session["vip"].as_str().unwrap_or_default();
        vips.iter().any(|known| vip.trim_start_matches('[').starts_with(known))
    });
    report.line("every session has a VIP", listed > 0 && all_vips, &format!("{open} open, {listed} listed"));
    let sum = |field: &str| -> u64 {
        let workers = status["workers"].as_array();
        workers.into_iter().flatten().filter_map(|worker| worker["packets"][field].as_u64()).sum()
    };
    let (egress, reply, unchanged) = (sum("egress"), sum("reply"), sum("unchanged"));
    let (inbound, service_reply) = (sum("inbound"), sum("service_reply"));
    let handoffs: u64 =
        status["workers"].as_array().into_iter().flatten().filter_map(|worker| worker["handoffs"].as_u64()).sum();
    report.line(
        "packets went both ways",
        egress > 0 && reply > 0 && unchanged > 0,
        &format!("{egress} out, {reply} back, {unchanged} unchanged, {handoffs} between workers"),
    );
    report.line(
        "packets of clients went both ways",
        inbound > 0 && service_reply > 0,
        &format!("{inbound} in, {service_reply} back"),
    );
    let drops = topology.ask(&["drops"])?;
    let dropped: Vec<(String, u64)> = drops
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(reason, count)| Some((reason.clone(), count.as_u64()?)))
        .filter(|(_, count)| *count > 0)
        .collect();
    // A burst may overrun a ring, and a late segment may find its session closed; nothing else is as it should be.
    let harmless = ["tx_full", "link_full", "no_session", "no_service"];
    let text: Vec<String> = dropped.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let text = if text.is_empty() { "none".to_owned() } else { text.join(", ") };
    report.line("drops", dropped.iter().all(|(reason, _)| harmless.contains(&reason.as_str())), &text);

    let place = |status: &Value, name: &str| -> u64 {
        let figures = status["figures"].as_array();
        let mut frames = figures.into_iter().flatten().filter(|figure| figure["name"] == "frames");
        frames.find(|figure| figure["labels"]["place"] == name).and_then(|figure| figure["value"].as_u64()).unwrap_or(0)
    };
    let whole = |status: &Value| ["pool", "device", "held"].iter().map(|name| place(status, name)).sum::<u64>();
    let mut status = status;
    for _ in 0..50 {
        if whole(&status) == place(&status, "total") {
            break;
        }
        // Packets that are in a batch right now are in no place.
        thread::sleep(Duration::from_millis(50));
        status = topology.ask(&["status"])?;
    }
    let total = place(&status, "total");
    report.line("no packet buffer is lost", whole(&status) == total && total > 0, &format!("{total} accounted for"));
    Ok(())
}
