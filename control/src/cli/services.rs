//! `vipgate services`: Services with their VIPs, ports, backends and session counts.

use super::show::ask;
use super::table::{Table, number, word};
use super::{Format, QueryArgs};
use crate::admin::Request;
use crate::admin::services::{Backend, Service, ServicesReply};
use crate::command_error::CommandError;
use crate::output::{json, print, sanitize};

pub(super) fn run(args: &QueryArgs) -> Result<(), CommandError> {
    let reply: ServicesReply = ask(args, &Request::Services)?;
    if args.output == Format::Json {
        return json(&reply);
    }
    if reply.services.is_empty() {
        return print("no Services\n");
    }
    let mut table = Table::new([
        word("service"),
        word("address"),
        word("state"),
        number("sessions"),
        number("new/s"),
        word("notes").optional(),
        number("table bytes").optional(),
    ]);
    for service in &reply.services {
        table.row([
            service.name.trim_start_matches("Service ").to_owned(),
            frontends(service),
            state(service),
            service.sessions.to_string(),
            service.opened_per_second.to_string(),
            remarks(service),
            service.lookup_table_bytes.to_string(),
        ]);
        for backend in &service.backends {
            table.row(row(backend));
        }
    }
    print(&sanitize(&table.take()))
}

/// All VIPs and ports of a Service.
fn frontends(service: &Service) -> String {
    let ports: Vec<String> = service.ports.iter().map(|port| format!("{}/{}", port.port, port.protocol)).collect();
    format!("{} : {}", service.vips.join(" "), ports.join(" "))
}

/// Number of backends that accept new external sessions, and the status of the health check.
fn state(service: &Service) -> String {
    let accepting = service.backends.iter().filter(|backend| backend.external).count();
    let backends = format!("{accepting} of {}", service.backends.len());
    let Some(health) = &service.health else { return backends };
    let status = if health.local_endpoints > 0 { 200 } else { 503 };
    let fault = if health.error.is_empty() { "" } else { ", NOT on the node's addresses: see the log" };
    format!("{backends}, health {status} on port {}{fault}", health.port)
}

fn remarks(service: &Service) -> String {
    let policies = [("external", &service.external_policy), ("internal", &service.internal_policy)];
    let local = policies.iter().filter(|(_, policy)| *policy == "Local").map(|(which, _)| format!("{which}: Local"));
    let affinity = Some(service.affinity_seconds).filter(|seconds| *seconds > 0);
    let ranges = Some(service.source_ranges.join(" ")).filter(|ranges| !ranges.is_empty());
    let all = local
        .chain(affinity.map(|seconds| format!("client affinity {seconds} s")))
        .chain(ranges.map(|ranges| format!("source ranges {ranges}")));
    all.collect::<Vec<_>>().join(", ")
}

fn row(backend: &Backend) -> [String; 7] {
    let name = if backend.name.is_empty() { "-" } else { &backend.name };
    let mut ports: Vec<String> = backend.ports.iter().filter(|port| **port != 0).map(u32::to_string).collect();
    ports.dedup();
    let weight = if backend.weight == 1 { String::new() } else { format!(", weight {}", backend.weight) };
    let accepts = match (backend.external, backend.internal) {
        (true, true) => "",
        (true, false) => "external sessions only",
        (false, true) => "sessions of pods only",
        (false, false) => "no new sessions",
    };
    [
        format!("  {name}"),
        format!("{} : {}", backend.address, ports.join(" ")),
        format!("{}{weight}", backend.state.replace('_', " ")),
        backend.sessions.to_string(),
        backend.opened_per_second.to_string(),
        accepts.to_owned(),
        String::new(),
    ]
}
