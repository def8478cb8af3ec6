//! `vipgate explain`: how policy handles an address, and why.

use std::fmt::Write;
use std::net::IpAddr;

use clap::Args;

use super::show::{ask, owners};
use super::{Format, QueryArgs};
use crate::admin::Request;
use crate::admin::explain::{BackendExplained, EndpointExplained, ExplainReply, VipExplained};
use crate::admin::ports::exhaustion_notes;
use crate::command_error::CommandError;
use crate::output::{json, print, sanitize};

/// Arguments of `vipgate explain`.
#[derive(Clone, Debug, Args)]
pub(super) struct Explain {
    /// Address of a pod or a VIP, or the private address of a VIP in a cloud
    #[arg(value_name = "ADDR")]
    address: IpAddr,
    #[command(flatten)]
    gateway: QueryArgs,
}

pub(super) fn run(args: &Explain) -> Result<(), CommandError> {
    let reply: ExplainReply = ask(&args.gateway, &Request::Explain(args.address))?;
    let is_known = reply.endpoint.is_some() || reply.vip.is_some() || !reply.backend_of.is_empty();
    match args.gateway.output {
        Format::Json => json(&reply)?,
        Format::Table if is_known => print(&sanitize(&text(&reply)))?,
        Format::Table => {}
    }
    if is_known {
        return Ok(());
    }
    let host = if reply.local { " (it is a local address of the gateway's host)" } else { "" };
    Err(CommandError::runtime(format!(
        "{} is neither an endpoint nor a VIP nor a backend in the policy in force, {}{host}; see `vipgate endpoints`, \
         `vips` and `services`",
        reply.address, reply.version
    )))
}

fn text(reply: &ExplainReply) -> String {
    let mut lines = Vec::new();
    if let Some(endpoint) = &reply.endpoint {
        endpoint_lines(endpoint, &mut lines);
    }
    if let Some(vip) = &reply.vip {
        vip_lines(vip, &mut lines);
    }
    lines.extend(reply.backend_of.iter().map(|backend| ("backend", backend_text(backend))));
    let mut text = String::new();
    for (label, line) in lines {
        // Writing to a String can't fail.
        let _ = writeln!(text, "{label:<13} {line}");
    }
    text
}

fn endpoint_lines(explained: &EndpointExplained, lines: &mut Vec<(&'static str, String)>) {
    let endpoint = &explained.endpoint;
    let name = if endpoint.name.is_empty() { "pod name unknown" } else { &endpoint.name };
    lines.push(("endpoint", format!("{}, {name}", endpoint.address)));
    lines.push(("policy", endpoint.policy.clone()));
    lines.extend(explained.remarks.iter().map(|remark| ("reason", remark.clone())));
    let vips = match (&endpoint.vips[..], explained.address_selection.as_str()) {
        ([], _) => "NONE: packets are dropped (no_vip)".to_owned(),
        ([only], _) => only.clone(),
        ([first, others @ ..], "PerEndpoint") => format!("{first}; unused: {}", others.join(" ")),
        (all, _) => format!("{}, selected per connection", all.join(" ")),
    };
    lines.push(("SNAT to", vips));
    if !endpoint.home.is_empty() {
        lines.push(("owner", super::show::owner_text(&endpoint.owner, &endpoint.home)));
    }
    lines.push(("destinations", explained.destinations.join(" ")));
    if !explained.excluded.is_empty() {
        lines.push(("excluded", explained.excluded.join(" ")));
    }
    let limit = |number: Option<u32>, what: &str| number.map(|number| format!("{number} {what}"));
    let limits = [
        limit(explained.sessions_limit, "sessions"),
        limit(explained.new_sessions_per_second, "new sessions per second"),
        limit(explained.guaranteed_ports, "guaranteed ports"),
    ];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    if !limits.is_empty() {
        lines.push(("limits", format!("{}; on exhaustion: {}", limits.join(", "), explained.on_exhaustion)));
    }
    lines.push(("sessions", format!("{} open, {} refused", endpoint.sessions, endpoint.refused)));
}

fn vip_lines(explained: &VipExplained, lines: &mut Vec<(&'static str, String)>) {
    let VipExplained { vip, ports, .. } = explained;
    let retired = if ports.retired { ", RETIRED: no longer in the policy, existing sessions continue" } else { "" };
    lines.push(("vip", format!("{}, of {}, announced by {}{retired}", vip.address, vip.name, vip.announce)));
    if !vip.private.is_empty() {
        lines.push(("private", format!("{} at this gateway, which packets outside have in place of it", vip.private)));
    }
    if !vip.shares.is_empty() {
        lines.push(("owner", owners(&vip.shares)));
    }
    if let Some(conflict) = &vip.conflict {
        lines.push(("CLAIMED", format!("by another host: {}, last seen {} s ago", conflict.mac, conflict.age_seconds)));
    }
    if explained.services.is_empty() {
        lines.push(("services", "none at this VIP".to_owned()));
    }
    lines.extend(explained.services.iter().map(|service| ("service", service.clone())));
    if explained.users.is_empty() {
        lines.push(("egress", "no endpoint uses this VIP".to_owned()));
    }
    let user = |(policy, endpoints): (&String, u64)| {
        format!("{endpoints} {} of {policy}", if endpoints == 1 { "endpoint" } else { "endpoints" })
    };
    lines.extend(explained.users.iter().map(|it| ("egress", user((&it.policy, it.endpoints)))));
    let elsewhere = if ports.blocks_elsewhere == 0 {
        String::new()
    } else {
        format!(", {} owned by other gateways", ports.blocks_elsewhere)
    };
    let line = format!(
        "{} blocks of 64{elsewhere}, {} with a port in use; {} sessions; {} ports reserved, {} guaranteed",
        ports.blocks, ports.blocks_used, ports.sessions, ports.reserved, ports.guaranteed
    );
    lines.push(("ports", line));
    lines.extend(exhaustion_notes(ports).into_iter().map(|note| ("OUT OF PORTS", note)));
}

fn backend_text(backend: &BackendExplained) -> String {
    let accepts = match (backend.external, backend.internal) {
        (true, true) => "accepts new sessions",
        (true, false) => "accepts new external sessions only",
        (false, true) => "accepts new sessions of pods only",
        (false, false) => "accepts NO new sessions",
    };
    let ports: Vec<String> = backend.ports.iter().filter(|port| **port > 0).map(u32::to_string).collect();
    format!("of {}, {}, {accepts}, on port {}", backend.service, backend.state, ports.join(" "))
}
