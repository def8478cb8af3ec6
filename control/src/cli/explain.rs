//! `vipgate explain`: what policy makes of an address, and why.

use std::fmt::Write;
use std::net::IpAddr;

use clap::Args;

use super::output::{harmless, json, print};
use super::show::{block_on, connect, owners};
use super::{Ask, Format};
use crate::admin::ports::shortage;
use crate::admin::proto::{BackendExplained, EndpointExplained, ExplainReply, VipExplained};
use crate::failure::Failure;

/// What is asked about.
#[derive(Clone, Debug, Args)]
pub(super) struct Explain {
    /// Address of a pod or a VIP
    #[arg(value_name = "ADDR")]
    address: IpAddr,
    #[command(flatten)]
    ask: Ask,
}

pub(super) fn run(asked: &Explain) -> Result<(), Failure> {
    let address = asked.address.to_string();
    let reply = block_on(async { Ok(connect(&asked.ask).await?.explain(address).await?) })?;
    let is_known = reply.endpoint.is_some() || reply.vip.is_some() || !reply.backend_of.is_empty();
    match asked.ask.output {
        Format::Json => json(&reply)?,
        Format::Table if is_known => print(&harmless(&text(&reply)))?,
        Format::Table => {}
    }
    if is_known {
        return Ok(());
    }
    let host = if reply.local { " (it is an address of the gateway's own host)" } else { "" };
    Err(Failure::runtime(format_args!(
        "{} is neither an endpoint nor a VIP nor a backend in the policy in force, {}{host}; `vipgate endpoints`, `vips` and \
         `services` list what is",
        reply.address, reply.version
    )))
}

fn text(reply: &ExplainReply) -> String {
    let mut lines = Vec::new();
    if let Some(endpoint) = &reply.endpoint {
        of_endpoint(endpoint, &mut lines);
    }
    if let Some(vip) = &reply.vip {
        of_vip(vip, &mut lines);
    }
    lines.extend(reply.backend_of.iter().map(|backend| ("backend", of_backend(backend))));
    let mut text = String::new();
    for (label, line) in lines {
        // Writing to a String can't fail.
        let _ = writeln!(text, "{label:<13} {line}");
    }
    text
}

fn of_endpoint(explained: &EndpointExplained, lines: &mut Vec<(&'static str, String)>) {
    let Some(endpoint) = &explained.endpoint else { return };
    let name = if endpoint.name.is_empty() { "no manifest names its pod" } else { &endpoint.name };
    lines.push(("endpoint", format!("{}, {name}", endpoint.address)));
    lines.push(("policy", endpoint.policy.clone()));
    lines.extend(explained.remarks.iter().map(|remark| ("because", remark.clone())));
    let vips = match (&endpoint.vips[..], explained.address_selection.as_str()) {
        ([], _) => "NONE: its packets are dropped (no_vip)".to_owned(),
        ([only], _) => only.clone(),
        ([first, others @ ..], "PerEndpoint") => format!("{first}; not used: {}", others.join(" ")),
        (all, _) => format!("{}, another one for each connection", all.join(" ")),
    };
    lines.push(("leaves as", vips));
    if !endpoint.home.is_empty() {
        lines.push(("gateway", super::show::owner(&endpoint.owner, &endpoint.home)));
    }
    lines.push(("translated", explained.destinations.join(" ")));
    if !explained.excluded.is_empty() {
        lines.push(("excluded", explained.excluded.join(" ")));
    }
    let limit = |number: u32, what: &str| (number > 0).then(|| format!("{number} {what}"));
    let limits = [
        limit(explained.sessions_limit, "sessions"),
        limit(explained.new_sessions_per_second, "new ones a second"),
        limit(explained.guaranteed_ports, "ports guaranteed"),
    ];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    if !limits.is_empty() {
        lines.push(("limits", format!("{}; beyond: {}", limits.join(", "), explained.on_exhaustion)));
    }
    lines.push(("sessions", format!("{} open, {} refused", endpoint.sessions, endpoint.refused)));
}

fn of_vip(explained: &VipExplained, lines: &mut Vec<(&'static str, String)>) {
    let Some(vip) = &explained.vip else { return };
    let retired = explained.ports.as_ref().is_some_and(|ports| ports.retired);
    let retired = if retired { ", RETIRED: policy has dropped it, sessions that have begun go on" } else { "" };
    lines.push(("vip", format!("{}, of {}, announced by {}{retired}", vip.address, vip.name, vip.announce)));
    if !vip.shares.is_empty() {
        lines.push(("gateways", owners(&vip.shares)));
    }
    if let Some(conflict) = &vip.conflict {
        lines.push(("CLAIMED", format!("by another host: {}, heard {} s ago", conflict.mac, conflict.age_seconds)));
    }
    if explained.services.is_empty() {
        lines.push(("services", "none is reached at it".to_owned()));
    }
    lines.extend(explained.services.iter().map(|service| ("service", service.clone())));
    if explained.users.is_empty() {
        lines.push(("leaving", "no endpoint leaves with it".to_owned()));
    }
    let user = |(policy, endpoints): (&String, u64)| {
        format!("{endpoints} {} of {policy}", if endpoints == 1 { "endpoint" } else { "endpoints" })
    };
    lines.extend(explained.users.iter().map(|it| ("leaving", user((&it.policy, it.endpoints)))));
    if let Some(ports) = &explained.ports {
        let elsewhere = if ports.blocks_elsewhere == 0 {
            String::new()
        } else {
            format!(", {} at other gateways", ports.blocks_elsewhere)
        };
        let line = format!(
            "{} blocks of 64{elsewhere}, {} with a port in use; {} sessions; {} ports reserved, {} guaranteed",
            ports.blocks, ports.blocks_used, ports.sessions, ports.reserved, ports.guaranteed
        );
        lines.push(("ports", line));
        lines.extend(shortage(ports).into_iter().map(|note| ("OUT OF PORTS", note)));
    }
}

fn of_backend(backend: &BackendExplained) -> String {
    let takes = match (backend.external, backend.internal) {
        (true, true) => "takes new sessions",
        (true, false) => "takes new sessions from outside only",
        (false, true) => "takes new sessions of pods only",
        (false, false) => "takes NO new sessions",
    };
    let ports: Vec<String> = backend.ports.iter().filter(|port| **port > 0).map(u32::to_string).collect();
    format!("of {}, {}, {takes}, on port {}", backend.service, backend.state, ports.join(" "))
}
