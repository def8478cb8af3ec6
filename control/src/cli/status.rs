//! `vipgate status`: the gateway on one screen; faults in capitals.

use std::fmt::Write;

use super::show::ask;
use super::table::{Table, number, word};
use super::{Format, QueryArgs, peers};
use crate::admin::Request;
use crate::admin::status::{
    ClusterRanges, InterfaceStatus, ManifestSource, PolicyServer, PolicyStatus, StatusReply, WorkerStatus,
};
use crate::command_error::CommandError;
use crate::output::{format_count, format_duration, format_percent, json, permille, print, sanitize};

/// Directions that are always shown.
const FIXED_DIRECTIONS: [&str; 3] = ["egress", "reply", "unchanged"];
/// Directions that are shown only if they have packets.
const OPTIONAL_DIRECTIONS: [&str; 4] = ["inbound", "service_reply", "peer_out", "peer_in"];
/// What is shown of a source with `slices_unverified`.
pub(super) const SLICES_UNVERIFIED: &str = "addresses NOT VERIFIED: tenancy is strict, but the source has no Pod";

pub(super) fn run(args: &QueryArgs) -> Result<(), CommandError> {
    let status: StatusReply = ask(args, &Request::Status)?;
    match args.output {
        Format::Json => json(&status),
        Format::Table => print(&sanitize(&text(&status))),
    }
}

fn text(status: &StatusReply) -> String {
    let parts =
        [head(status), workers(status), interfaces(status), next_hops(status), sockets(status), device_stats(status)];
    parts.iter().filter(|part| !part.is_empty()).map(String::as_str).collect::<Vec<_>>().join("\n")
}

/// Writes one labelled line.
type WriteLine<'a> = dyn FnMut(&str, &str) + 'a;

fn head(status: &StatusReply) -> String {
    let mut out = String::new();
    let mut line = |label: &str, text: &str| {
        // Writing to a String can't fail.
        let _ = writeln!(out, "{label:<9} {text}");
    };
    let ready = if status.ready { "ready" } else { "NOT READY" };
    line("gateway", &format!("{}, {ready}, up {}", status.name, format_duration(status.uptime_seconds * 1000)));
    let zone = if status.zone.is_empty() { String::new() } else { format!(", zone {}", status.zone) };
    line("node", &format!("{}{zone}", status.node));
    line("program", &format!("vipgate {}, pid {}", status.version, status.pid));
    policy_lines(&mut line, &status.policy);
    if let Some(group) = &status.group {
        let draining = if group.draining { ", DRAINING" } else { "" };
        line("members", &format!("{}, lease {}{draining}", peers::active_summary(group), peers::lease_text(group)));
        for (label, text) in peers::drain_lines(group) {
            line(label, text);
        }
        for text in peers::tunnel_faults(group) {
            line("TUNNELS", &text);
        }
    }
    fault_lines(&mut line, status);
    session_lines(&mut line, status);
    out
}

/// The policy in force and its source.
fn policy_lines(line: &mut WriteLine<'_>, policy: &PolicyStatus) {
    let age = format_duration(policy.age_seconds * 1000);
    line("policy", &format!("{}, generation {}, in force for {age}", policy.version, policy.generation));
    let (vips, endpoints) = (format_count(policy.vips, "VIP"), format_count(policy.endpoints, "endpoint"));
    let services = format_count(policy.services, "Service");
    line("", &format!("{vips}, {endpoints}, {services}, from {}", policy.source));
    for (label, text) in cluster_lines(&policy.cluster) {
        line(label, &text);
    }
    line("updates", &format!("{} applied, {} rejected", policy.updates_applied, policy.updates_rejected));
    for (at, reason) in policy.last_error.lines().enumerate() {
        line(if at == 0 { "REJECTED" } else { "" }, reason);
    }
    if let Some(manifests) = &policy.manifests {
        let (label, text) = manifests_line(manifests);
        line(label, &text);
        manifests.reasons.iter().for_each(|reason| line("", reason));
        if manifests.slices_unverified {
            line("slices", SLICES_UNVERIFIED);
        }
        for it in &manifests.faulty {
            let effect = if it.last_good { "its last good version is in force" } else { "not in force" };
            line("MANIFEST", &format!("{}: {effect}", it.name));
            it.reasons.iter().for_each(|reason| line("", reason));
        }
    }
    if let Some(server) = &policy.server {
        line("server", &server_line(server));
        if !server.cache_error.is_empty() {
            line("CACHE", &server.cache_error);
        }
    }
}

/// Faults, the hold-down after them, and the NAT log.
fn fault_lines(line: &mut WriteLine<'_>, status: &StatusReply) {
    if !status.capture_error.is_empty() {
        line("CAPTURE", &format!("incomplete: {}", status.capture_error));
    }
    for fault in &status.faults {
        line("FAULT", fault);
    }
    if status.held_down_ms > 0 {
        line("HELD DOWN", &format!("for {} more after the last fault", format_duration(status.held_down_ms)));
    }
    if let Some(log) = &status.nat_log {
        let what = if log.sessions { "blocks and sessions" } else { "blocks" };
        let lost = if log.lost == 0 { String::new() } else { format!(", {} LOST", log.lost) };
        line("nat log", &format!("{what} to {}, {} records sent{lost}", log.collector, log.sent));
        if !log.error.is_empty() {
            line("COLLECTOR", &log.error);
        }
    }
}

/// The session table.
fn session_lines(line: &mut WriteLine<'_>, status: &StatusReply) {
    let (sessions, standby, capacity) = (status.sessions, status.standby_sessions, status.session_capacity);
    let ratio = |part: u64| format_percent(permille(part, capacity));
    line("sessions", &format!("{sessions} of {capacity} ({})", ratio(sessions)));
    if standby > 0 {
        line("standby", &format!("{standby} sessions of other gateways ({} in total)", ratio(sessions + standby)));
    }
    if status.session_reserve > 0 {
        let (reserve, fair) = (status.session_reserve, status.session_fair_share);
        line("share", &format!("{fair} sessions per VIP; {reserve} are reserved for VIPs below their share"));
    }
}

/// The cluster's own prefixes, and the handling of uncovered packets.
fn cluster_lines(cluster: &ClusterRanges) -> Vec<(&'static str, String)> {
    let ClusterRanges { pods, others, drop_uncovered } = cluster;
    let mut lines = match (pods.is_empty(), *drop_uncovered) {
        (true, _) => vec!["no pod_cidrs: uncovered packets are left to the kernel".to_owned()],
        (false, true) => vec!["uncovered packets are dropped if they are from".to_owned()],
        (false, false) => vec!["uncovered packets are LEFT TO THE KERNEL, also from".to_owned()],
    };
    lines.extend(wrapped(pods, "  "));
    if !others.is_empty() {
        lines.push("and also inside the cluster are".to_owned());
        lines.extend(wrapped(others, "  "));
    }
    lines.into_iter().enumerate().map(|(at, text)| (if at == 0 { "cluster" } else { "" }, text)).collect()
}

/// Joins words into indented lines that fit beside a label.
fn wrapped(words: &[String], indent: &str) -> Vec<String> {
    const MAX_LENGTH: usize = 70;
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= MAX_LENGTH => *line = format!("{line} {word}"),
            _ => lines.push(format!("{indent}{word}")),
        }
    }
    lines
}

/// State of manifests in files.
fn manifests_line(manifests: &ManifestSource) -> (&'static str, String) {
    let ManifestSource { accepted, last_good, rejected, .. } = manifests;
    let since = format_duration(manifests.since_seconds * 1000);
    if manifests.waiting {
        return ("WAITING", format!("for the first manifest for {since}: everything is dropped"));
    }
    let counts = format!("{accepted} objects accepted, {last_good} last good, {rejected} rejected");
    if manifests.healthy {
        return ("manifests", counts);
    }
    ("UNHEALTHY", format!("manifests for {since}, the last good ones stay in force: {counts}"))
}

/// State of the connection to the policy server; the policy's age while it is lost.
fn server_line(server: &PolicyServer) -> String {
    let since = format_duration(server.since_seconds * 1000);
    if server.connected {
        return format!("connected for {since}");
    }
    let policy = if server.has_policy {
        format!("the policy in force was current {} ago", format_duration(server.policy_age_seconds * 1000))
    } else {
        "there is NO POLICY, so everything is dropped".to_owned()
    };
    format!("NOT CONNECTED for {since}: {}; {policy}", server.error)
}

fn workers(status: &StatusReply) -> String {
    let count = |worker: &WorkerStatus, direction: &str| worker.packets.get(direction).copied().unwrap_or(0);
    let optional = OPTIONAL_DIRECTIONS
        .into_iter()
        .filter(|direction| status.workers.iter().any(|worker| count(worker, direction) > 0));
    let directions: Vec<&'static str> = FIXED_DIRECTIONS.into_iter().chain(optional).collect();
    let mut columns = vec![number("worker"), number("core"), number("sessions")];
    columns.extend(directions.iter().map(|direction| number(direction)));
    columns.extend([number("handoffs"), number("waiting"), number("drops")]);
    let mut table = Table::new(columns);
    for worker in &status.workers {
        let mut row = vec![worker.worker.to_string(), worker.core.to_string(), worker.sessions.to_string()];
        row.extend(directions.iter().map(|direction| count(worker, direction).to_string()));
        row.extend([worker.handoffs, worker.waiting, worker.drops].map(|count| count.to_string()));
        table.row(row);
    }
    table.take()
}

fn interfaces(status: &StatusReply) -> String {
    let mut table = Table::new([
        word("interface"),
        word("role"),
        word("link"),
        word("xdp"),
        word("mac"),
        number("mtu"),
        word("addresses"),
    ]);
    for interface in &status.interfaces {
        table.row([
            interface.name.clone(),
            interface.role.clone(),
            link(interface),
            programs(interface),
            interface.mac.clone(),
            mtu(interface),
            interface.addresses.join(" "),
        ]);
    }
    table.take()
}

/// Link state of an interface, with the reason if it is down.
fn link(interface: &InterfaceStatus) -> String {
    match (interface.up, interface.down.as_str()) {
        (true, "") => "up".to_owned(),
        (false, "") => "DOWN".to_owned(),
        (_, reason) => format!("DOWN: {}", reason.trim_start_matches("is ").trim_start_matches("has ")),
    }
}

/// State of the XDP program, and of the tc guard unless it is where it belongs.
fn programs(interface: &InterfaceStatus) -> String {
    let xdp = program(&interface.xdp, interface.xdp_detached);
    match (interface.guard.as_str(), interface.guard_detached) {
        ("" | "attached", 0) => xdp,
        (guard, detached) => format!("{xdp}, guard {}", program(guard, detached)),
    }
}

/// State of the XDP program or of the tc guard, and how often it was found detached.
fn program(state: &str, detached: u64) -> String {
    let times = match detached {
        0 => String::new(),
        1 => ", DETACHED once".to_owned(),
        times => format!(", DETACHED {times} times"),
    };
    let what = match state {
        "" => "-",
        "attached" => "attached",
        "missing" => "MISSING",
        "unknown" => "UNKNOWN",
        other => return format!("REPLACED by {other}{times}"),
    };
    format!("{what}{times}")
}

/// The probed next hops; empty if there are none.
fn next_hops(status: &StatusReply) -> String {
    if status.next_hops.is_empty() {
        return String::new();
    }
    let mut table = Table::new([word("next hop"), word("interface"), word("state"), number("last reply")]);
    for hop in &status.next_hops {
        let state = match hop.state.as_str() {
            "up" => "up",
            "down" => "DOWN",
            _ => "unknown",
        };
        let last = if hop.answered_ms_ago == 0 { "-".to_owned() } else { format!("{} ms ago", hop.answered_ms_ago) };
        table.row([hop.address.clone(), hop.interface.clone(), state.to_owned(), last]);
    }
    table.take()
}

/// The MTU, and its usable part if packet buffers are smaller.
fn mtu(interface: &InterfaceStatus) -> String {
    let InterfaceStatus { mtu, carried, .. } = interface;
    if carried < mtu { format!("{mtu} TOO LARGE, {carried} at most") } else { mtu.to_string() }
}

fn sockets(status: &StatusReply) -> String {
    let mut table = Table::new([word("socket"), number("queue"), number("worker"), word("mode"), word("zero copy")]);
    for socket in &status.sockets {
        table.row([
            socket.interface.clone(),
            socket.queue.to_string(),
            socket.worker.to_string(),
            socket.mode.clone(),
            if socket.zero_copy { "yes" } else { "no" }.to_owned(),
        ]);
    }
    table.take()
}

/// Device statistics, one line per name, summed over workers.
fn device_stats(status: &StatusReply) -> String {
    let mut names: Vec<(&str, Vec<(String, u64)>)> = Vec::new();
    for stat in &status.figures {
        let labels: Vec<&str> =
            stat.labels.iter().filter(|(name, _)| *name != "worker").map(|(_, value)| value.as_str()).collect();
        let labels = labels.join(" ");
        let at = names.iter().position(|(name, _)| *name == stat.name).unwrap_or_else(|| {
            names.push((&stat.name, Vec::new()));
            names.len() - 1
        });
        let values = &mut names[at].1;
        match values.iter_mut().find(|(known, _)| *known == labels) {
            Some((_, sum)) => *sum += stat.value,
            None => values.push((labels, stat.value)),
        }
    }
    let lines = names.into_iter().map(|(name, values)| {
        let values: Vec<String> =
            values.into_iter().map(|(labels, value)| format!("{labels} {value}").trim_start().to_owned()).collect();
        format!("{name:<16} {}\n", values.join(", "))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::Figure;

    fn stat(name: &str, labels: &[(&str, &str)], value: u64) -> Figure {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Figure { name: name.to_owned(), labels, value }
    }

    #[test]
    fn device_stats_are_summed_over_workers_in_their_order() {
        let status = StatusReply {
            figures: vec![
                stat("ring_losses", &[("worker", "0"), ("cause", "late")], 3),
                stat("ring_losses", &[("worker", "0"), ("cause", "early")], 1),
                stat("ring_losses", &[("worker", "1"), ("cause", "late")], 4),
                stat("frames", &[("place", "pool")], 100),
            ],
            ..Default::default()
        };
        assert_eq!(device_stats(&status), "ring_losses      late 7, early 1\nframes           pool 100\n");
    }

    #[test]
    fn cluster_prefixes_fit_eighty_columns() {
        let nets = |count: u8| (0..count).map(|n| format!("10.{n}.0.0/16")).collect();
        let lines = |cluster: &ClusterRanges| {
            let lines = cluster_lines(cluster).into_iter().map(|(label, text)| format!("{label:<9} {text}\n"));
            lines.collect::<String>()
        };
        let mut cluster = ClusterRanges { pods: nets(7), others: nets(1), drop_uncovered: true };
        let shown = lines(&cluster);
        let expected = "\
cluster   uncovered packets are dropped if they are from
            10.0.0.0/16 10.1.0.0/16 10.2.0.0/16 10.3.0.0/16 10.4.0.0/16
            10.5.0.0/16 10.6.0.0/16
          and also inside the cluster are
            10.0.0.0/16
";
        assert_eq!(shown, expected);
        cluster.drop_uncovered = false;
        assert!(lines(&cluster).starts_with("cluster   uncovered packets are LEFT TO THE KERNEL, also from\n"));
        assert!(lines(&ClusterRanges::default()).contains("no pod_cidrs"));
    }

    #[test]
    fn slices_that_are_not_verified_are_one_line_after_the_manifests() {
        let shown = |slices_unverified| {
            let manifests = ManifestSource { healthy: true, slices_unverified, ..Default::default() };
            let policy = PolicyStatus { manifests: Some(manifests), ..Default::default() };
            text(&StatusReply { policy, ..Default::default() })
        };
        let manifests = "manifests 0 objects accepted, 0 last good, 0 rejected\n";
        let line = "slices    addresses NOT VERIFIED: tenancy is strict, but the source has no Pod\n";
        let (verified, unverified) = (shown(false), shown(true));
        assert!(verified.contains(manifests), "{verified}");
        assert_eq!(unverified, verified.replace(manifests, &format!("{manifests}{line}")));
        assert!(line.trim_end().len() <= 80, "it fits a terminal");
    }

    #[test]
    fn a_program_is_shown_with_the_times_that_it_was_detached() {
        assert_eq!(program("", 0), "-");
        assert_eq!(program("attached", 1), "attached, DETACHED once");
        assert_eq!(program("missing", 2), "MISSING, DETACHED 2 times");
        assert_eq!(program("unknown", 0), "UNKNOWN");
        assert_eq!(program("another program, id 7", 0), "REPLACED by another program, id 7");
    }

    #[test]
    fn faults_are_in_capitals() {
        let mut status = StatusReply {
            interfaces: vec![InterfaceStatus { name: "gw-in".to_owned(), ..Default::default() }],
            policy: PolicyStatus {
                last_error: "a.yaml:3: spec: no\nb.yaml:4: spec: no".to_owned(),
                ..Default::default()
            },
            ..Default::default()
        };
        let shown = text(&status);
        assert!(shown.contains("\nREJECTED  a.yaml:3: spec: no\n          b.yaml:4: spec: no\n"), "{shown}");
        assert!(shown.contains("NOT READY") && shown.contains("DOWN"), "{shown}");
        status.ready = true;
        status.interfaces[0].up = true;
        status.policy = PolicyStatus::default();
        let shown = text(&status);
        assert!(!shown.contains("NOT READY") && !shown.contains("DOWN") && !shown.contains("REJECTED"), "{shown}");
    }
}
