//! `vipgate services`: what is reached at which VIP, who serves it, and how much.

use super::output::{harmless, json, print};
use super::show::{block_on, connect};
use super::table::{Table, number, word};
use super::{Ask, Format};
use crate::admin::proto::{Backend, Service};
use crate::failure::Failure;

pub(super) fn run(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.services().await?) })?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    if reply.services.is_empty() {
        return print("no Services\n");
    }
    let mut table = Table::new([
        word("service"),
        word("at"),
        word("state"),
        number("sessions"),
        number("new/s"),
        word("serves").optional(),
    ]);
    for service in &reply.services {
        table.row([
            service.name.trim_start_matches("Service ").to_owned(),
            frontends(service),
            state(service),
            service.sessions.to_string(),
            service.opened_per_second.to_string(),
            remarks(service),
        ]);
        for backend in &service.backends {
            table.row(row(backend));
        }
    }
    print(&harmless(&table.take()))
}

/// Where it is reached: all VIPs, and each port once.
fn frontends(service: &Service) -> String {
    let ports: Vec<String> = service.ports.iter().map(|port| format!("{}/{}", port.port, port.protocol)).collect();
    format!("{} : {}", service.vips.join(" "), ports.join(" "))
}

/// How many of its backends take new sessions from outside, and what health checks are told.
fn state(service: &Service) -> String {
    let taking = service.backends.iter().filter(|backend| backend.external).count();
    let backends = format!("{taking} of {}", service.backends.len());
    let Some(health) = &service.health else { return backends };
    let answer = if health.local_endpoints > 0 { 200 } else { 503 };
    let fault = if health.error.is_empty() { "" } else { ", not on the node: see the log" };
    format!("{backends}, health {answer} on port {}{fault}", health.port)
}

fn remarks(service: &Service) -> String {
    let policies = [("external", &service.external_policy), ("internal", &service.internal_policy)];
    let local = policies.iter().filter(|(_, policy)| *policy == "Local").map(|(which, _)| format!("{which}: Local"));
    let affinity = Some(service.affinity_seconds).filter(|seconds| *seconds > 0);
    let ranges = Some(service.source_ranges.join(" ")).filter(|ranges| !ranges.is_empty());
    let all = local
        .chain(affinity.map(|seconds| format!("a client stays for {seconds} s")))
        .chain(ranges.map(|ranges| format!("only {ranges}")));
    all.collect::<Vec<_>>().join(", ")
}

fn row(backend: &Backend) -> [String; 6] {
    let name = if backend.name.is_empty() { "-" } else { &backend.name };
    let mut ports: Vec<String> = backend.ports.iter().filter(|port| **port != 0).map(u32::to_string).collect();
    ports.dedup();
    let weight = if backend.weight == 1 { String::new() } else { format!(", weight {}", backend.weight) };
    let serves = match (backend.external, backend.internal) {
        (true, true) => "",
        (true, false) => "clients outside only",
        (false, true) => "pods only",
        (false, false) => "no new sessions here",
    };
    [
        format!("  {name}"),
        format!("{} : {}", backend.address, ports.join(" ")),
        format!("{}{weight}", backend.state.replace('_', " ")),
        backend.sessions.to_string(),
        backend.opened_per_second.to_string(),
        serves.to_owned(),
    ]
}
