//! The commands that ask a running gateway.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::future::Future;
use std::time::Duration;

use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

use super::output::{json, print, table, text};
use super::{Ask, Filter, Format};
use crate::admin::proto::admin_client::AdminClient;
use crate::admin::{self, PROTOCOL, proto};
use crate::failure::Failure;

/// Asks the gateway on this socket.
fn ask<T>(ask: &Ask, question: impl AsyncFnOnce(AdminClient<Channel>) -> Result<T, Status>) -> Result<T, Failure> {
    block_on(async {
        let client = admin::connect(&ask.socket).await?;
        question(client).await.map_err(|status| match status.code() {
            tonic::Code::InvalidArgument => Failure::usage(status.message()),
            tonic::Code::Unimplemented => Failure::runtime(format_args!(
                "{}: the gateway there is of another version than this command",
                ask.socket.display()
            )),
            _ => Failure::runtime(format_args!("{}: {}", ask.socket.display(), status.message())),
        })
    })
}

fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::runtime)?;
    runtime.block_on(future)
}

pub(super) fn status(asked: &Ask) -> Result<(), Failure> {
    let status = ask(asked, async |mut client| Ok(client.status(proto::StatusRequest {}).await?.into_inner()))?;
    if status.protocol != PROTOCOL {
        return Err(Failure::runtime(format_args!(
            "{}: the gateway speaks version {} of the admin interface, this command {PROTOCOL}",
            asked.socket.display(),
            status.protocol
        )));
    }
    match asked.output {
        Format::Json => json(&status),
        Format::Table => print(&status_text(&status)),
    }
}

fn status_text(status: &proto::StatusReply) -> String {
    let policy = status.policy.clone().unwrap_or_default();
    let mut out = String::new();
    let ready = if status.ready { "ready" } else { "not ready" };
    let up = humantime::format_duration(Duration::from_secs(status.uptime_seconds));
    let zone = if status.zone.is_empty() { String::new() } else { format!(", zone {}", status.zone) };
    // Writing to a String can't fail.
    let _ = writeln!(
        out,
        "{}  {ready}, node {}{zone}, vipgate {}, pid {}, up {up}",
        status.name, status.node, status.version, status.pid
    );
    let _ = writeln!(out, "sessions  {} of {}", status.sessions, status.session_capacity);
    let age = humantime::format_duration(Duration::from_secs(policy.age_seconds));
    let _ = writeln!(
        out,
        "policy    {} from {}: {} VIPs, {} endpoints, in force for {age}",
        policy.version, policy.source, policy.vips, policy.endpoints
    );
    let _ = writeln!(out, "updates   {} applied, {} rejected", policy.updates_applied, policy.updates_rejected);
    if !policy.last_error.is_empty() {
        let _ = writeln!(out, "REJECTED  {}", policy.last_error.replace('\n', "\n          "));
    }
    let mut workers = table(
        &["worker", "core", "sessions", "egress", "reply", "unchanged", "handoffs", "drops"],
        &[0, 1, 2, 3, 4, 5, 6, 7],
    );
    for worker in &status.workers {
        let packets = |direction: &str| worker.packets.get(direction).copied().unwrap_or_default().to_string();
        workers.add_row([
            worker.worker.to_string(),
            worker.core.to_string(),
            worker.sessions.to_string(),
            packets("egress"),
            packets("reply"),
            packets("unchanged"),
            worker.handoffs.to_string(),
            worker.drops.to_string(),
        ]);
    }
    let _ = write!(out, "\n{}", text(&workers));
    let mut interfaces = table(&["interface", "role", "link", "mac", "mtu", "addresses"], &[4]);
    for interface in &status.interfaces {
        interfaces.add_row([
            interface.name.clone(),
            interface.role.clone(),
            if interface.up { "up" } else { "DOWN" }.to_owned(),
            interface.mac.clone(),
            interface.mtu.to_string(),
            interface.addresses.join(" "),
        ]);
    }
    let _ = write!(out, "\n{}", text(&interfaces));
    let mut sockets = table(&["socket", "queue", "worker", "xdp", "zero copy"], &[1, 2]);
    for socket in &status.sockets {
        sockets.add_row([
            socket.interface.clone(),
            socket.queue.to_string(),
            socket.worker.to_string(),
            socket.mode.clone(),
            if socket.zero_copy { "yes" } else { "no" }.to_owned(),
        ]);
    }
    let _ = write!(out, "\n{}", text(&sockets));
    let frames = status.figures.iter().filter(|figure| figure.name == "frames");
    let frames: Vec<String> = frames
        .map(|figure| format!("{} {}", figure.labels.get("place").map_or("", String::as_str), figure.value))
        .collect();
    let _ = writeln!(out, "\nframes    {}", frames.join(", "));
    out
}

#[derive(Serialize)]
struct Sessions {
    sessions: Vec<proto::Session>,
    /// Whether the limit cut the list.
    truncated: bool,
}

pub(super) fn sessions(asked: &Ask, filter: &Filter, limit: u64) -> Result<(), Failure> {
    // One more than is shown, to know whether there is more.
    let request = proto::SessionsRequest { filter: Some(filter.into()), limit: if limit == 0 { 0 } else { limit + 1 } };
    let mut sessions = ask(asked, async |mut client| {
        let mut stream = client.sessions(request).await?.into_inner();
        let mut sessions = Vec::new();
        while let Some(slice) = stream.message().await? {
            sessions.extend(slice.sessions);
        }
        Ok(sessions)
    })?;
    let truncated = limit > 0 && sessions.len() as u64 > limit;
    if truncated {
        sessions.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    if asked.output == Format::Json {
        return json(&Sessions { sessions, truncated });
    }
    let mut rows =
        table(&["proto", "endpoint", "vip", "remote", "state", "idle", "out", "in", "worker"], &[5, 6, 7, 8]);
    for session in &sessions {
        rows.add_row([
            session.protocol.clone(),
            session.endpoint.clone(),
            session.vip.clone(),
            session.remote.clone(),
            session.state.clone(),
            format!("{}s", session.idle_ms / 1000),
            session.packets_out.to_string(),
            session.packets_in.to_string(),
            session.worker.to_string(),
        ]);
    }
    let mut out = if sessions.is_empty() { "no sessions match\n".to_owned() } else { text(&rows) };
    if truncated {
        let _ = writeln!(out, "... and more; --limit 0 shows all");
    }
    print(&out)
}

pub(super) fn flush(asked: &Ask, filter: &Filter) -> Result<(), Failure> {
    let request = proto::FlushSessionsRequest { filter: Some(filter.into()) };
    let reply = ask(asked, async |mut client| Ok(client.flush_sessions(request).await?.into_inner()))?;
    match asked.output {
        Format::Json => json(&reply),
        Format::Table => print(&format!("{} sessions ended\n", reply.ended)),
    }
}

pub(super) fn vips(asked: &Ask) -> Result<(), Failure> {
    let reply = ask(asked, async |mut client| Ok(client.vips(proto::VipsRequest {}).await?.into_inner()))?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    let mut rows = table(&["vip", "announce", "endpoints", "name", "reserved ports"], &[2]);
    for vip in &reply.vips {
        let ports: Vec<String> = vip.reserved_ports.iter().map(u32::to_string).collect();
        let (address, announce) = (vip.address.clone(), vip.announce.clone());
        rows.add_row([address, announce, vip.endpoints.to_string(), vip.name.clone(), ports.join(" ")]);
    }
    print(&if reply.vips.is_empty() { "no VIPs\n".to_owned() } else { text(&rows) })
}

pub(super) fn endpoints(asked: &Ask) -> Result<(), Failure> {
    let reply = ask(asked, async |mut client| Ok(client.endpoints(proto::EndpointsRequest {}).await?.into_inner()))?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    let mut rows = table(&["endpoint", "pod", "vips", "policy"], &[]);
    for endpoint in &reply.endpoints {
        let vips = if endpoint.vips.is_empty() { "none (dropped)".to_owned() } else { endpoint.vips.join(" ") };
        rows.add_row([endpoint.address.clone(), endpoint.name.clone(), vips, endpoint.policy.clone()]);
    }
    print(&if reply.endpoints.is_empty() { "no endpoints\n".to_owned() } else { text(&rows) })
}

pub(super) fn drops(asked: &Ask, all: bool) -> Result<(), Failure> {
    let reply = ask(asked, async |mut client| Ok(client.drops(proto::DropsRequest {}).await?.into_inner()))?;
    if asked.output == Format::Json {
        let by_reason: BTreeMap<&str, u64> =
            reply.drops.iter().map(|drop| (drop.reason.as_str(), drop.packets)).collect();
        return json(&by_reason);
    }
    let mut rows = table(&["reason", "packets", "meaning"], &[1]);
    for drop in reply.drops.iter().filter(|drop| all || drop.packets > 0) {
        rows.add_row([drop.reason.clone(), drop.packets.to_string(), drop.help.clone()]);
    }
    print(&if rows.row_count() == 0 { "no drops\n".to_owned() } else { text(&rows) })
}
