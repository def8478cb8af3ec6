//! `vipgate status`: the gateway on one screen, what is wrong in capitals.

use std::fmt::Write;

use super::output::{harmless, json, percent, permille, print, span};
use super::show::{block_on, connect};
use super::table::{Table, number, word};
use super::{Ask, Format, peers};
use crate::admin::proto;
use crate::failure::Failure;

/// Directions that are always shown; others only once there is something to show.
const USUAL: [&str; 3] = ["egress", "reply", "unchanged"];
const RARE: [&str; 4] = ["inbound", "service_reply", "peer_out", "peer_in"];

pub(super) fn run(asked: &Ask) -> Result<(), Failure> {
    let client = block_on(connect(asked))?;
    match asked.output {
        Format::Json => json(client.status()),
        Format::Table => print(&harmless(&text(client.status()))),
    }
}

fn text(status: &proto::StatusReply) -> String {
    let parts =
        [head(status), workers(status), interfaces(status), next_hops(status), sockets(status), figures(status)];
    parts.iter().filter(|part| !part.is_empty()).map(String::as_str).collect::<Vec<_>>().join("\n")
}

fn head(status: &proto::StatusReply) -> String {
    let mut policy = status.policy.clone().unwrap_or_default();
    let mut out = String::new();
    let mut line = |label: &str, text: &str| {
        // Writing to a String can't fail.
        let _ = writeln!(out, "{label:<9} {text}");
    };
    let ready = if status.ready { "ready" } else { "NOT READY" };
    line("gateway", &format!("{}, {ready}, up {}", status.name, span(status.uptime_seconds * 1000)));
    let zone = if status.zone.is_empty() { String::new() } else { format!(", zone {}", status.zone) };
    line("node", &format!("{}{zone}", status.node));
    line("program", &format!("vipgate {}, pid {}", status.version, status.pid));
    let age = span(policy.age_seconds * 1000);
    line("policy", &format!("{}, generation {}, in force for {age}", policy.version, policy.generation));
    line(
        "",
        &format!(
            "{} VIPs, {} endpoints, {} Services, from {}",
            policy.vips, policy.endpoints, policy.services, policy.source
        ),
    );
    for (label, text) in cluster_lines(policy.cluster.take().unwrap_or_default()) {
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
        for it in &manifests.faulty {
            let instead = if it.last_good { "its last good version is in force" } else { "it is left out" };
            line("MANIFEST", &format!("{}: {instead}", it.name));
            it.reasons.iter().for_each(|reason| line("", reason));
        }
    }
    if let Some(server) = &policy.server {
        line("server", &server_line(server));
        if !server.cache_error.is_empty() {
            line("CACHE", &server.cache_error);
        }
    }
    if let Some(group) = &status.group {
        let draining = if group.draining { ", DRAINING" } else { "" };
        line("serving", &format!("{}, lease {}{draining}", peers::serving(group), peers::lease(group)));
        for text in peers::tunnels(group) {
            line("TUNNELS", &text);
        }
    }
    for fault in &status.faults {
        line("UNABLE", fault);
    }
    if status.held_down_ms > 0 {
        line("HELD DOWN", &format!("for {} more, since faults have gone only just now", span(status.held_down_ms)));
    }
    if let Some(log) = &status.nat_log {
        let what = if log.sessions { "blocks and sessions" } else { "blocks" };
        let lost = if log.lost == 0 { String::new() } else { format!(", {} LOST", log.lost) };
        line("nat log", &format!("{what} to {}, {} records sent{lost}", log.collector, log.sent));
        if !log.error.is_empty() {
            line("COLLECTOR", &log.error);
        }
    }
    let (sessions, standby, capacity) = (status.sessions, status.standby_sessions, status.session_capacity);
    let share = |part: u64| percent(permille(part, capacity));
    line("sessions", &format!("{sessions} of {capacity} ({})", share(sessions)));
    if standby > 0 {
        line("standby", &format!("{standby} sessions of other gateways beside ({} in all)", share(sessions + standby)));
    }
    if status.session_reserve > 0 {
        let (reserve, fair) = (status.session_reserve, status.session_fair_share);
        line("shares", &format!("{fair} sessions a VIP; {reserve} are kept for those that have less"));
    }
    out
}

/// What is known to be inside the cluster, and what becomes of pods' packets that no policy covers.
fn cluster_lines(cluster: proto::ClusterRanges) -> Vec<(&'static str, String)> {
    let proto::ClusterRanges { pods, others, drop_uncovered } = cluster;
    let mut lines = match (pods.is_empty(), drop_uncovered) {
        (true, _) => vec!["no pod_cidrs: what no policy covers is left to the kernel".to_owned()],
        (false, true) => vec!["what no policy covers is dropped if it is from".to_owned()],
        (false, false) => vec!["what no policy covers is LEFT TO THE KERNEL, also from".to_owned()],
    };
    lines.extend(wrapped(&pods, "  "));
    if !others.is_empty() {
        lines.push("and inside are".to_owned());
        lines.extend(wrapped(&others, "  "));
    }
    lines.into_iter().enumerate().map(|(at, text)| (if at == 0 { "cluster" } else { "" }, text)).collect()
}

/// Words in lines that leave room for a label.
fn wrapped(words: &[String], indent: &str) -> Vec<String> {
    const MOST: usize = 70;
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= MOST => *line = format!("{line} {word}"),
            _ => lines.push(format!("{indent}{word}")),
        }
    }
    lines
}

/// How things stand with manifests in files.
fn manifests_line(manifests: &proto::ManifestSource) -> (&'static str, String) {
    let proto::ManifestSource { accepted, last_good, rejected, .. } = manifests;
    let since = span(manifests.since_seconds * 1000);
    if manifests.waiting {
        return ("WAITING", format!("for a first manifest since {since}: everything is dropped"));
    }
    let counts = format!("{accepted} objects accepted, {last_good} last good, {rejected} rejected");
    if manifests.healthy {
        return ("manifests", counts);
    }
    ("UNHEALTHY", format!("manifests for {since}, what was in force of them stays: {counts}"))
}

/// How things stand with the policy server, and how old the policy is while it can't be heard.
fn server_line(server: &proto::ServerStatus) -> String {
    let since = span(server.since_seconds * 1000);
    if server.connected {
        return format!("connected for {since}");
    }
    let policy = if server.has_policy {
        format!("the policy in force was the server's {} ago", span(server.policy_age_seconds * 1000))
    } else {
        "there is NO POLICY, so everything is dropped".to_owned()
    };
    format!("NOT CONNECTED for {since}: {}; {policy}", server.error)
}

fn workers(status: &proto::StatusReply) -> String {
    let count = |worker: &proto::WorkerStatus, direction: &str| worker.packets.get(direction).copied().unwrap_or(0);
    let rare = RARE.into_iter().filter(|rare| status.workers.iter().any(|worker| count(worker, rare) > 0));
    let directions: Vec<&'static str> = USUAL.into_iter().chain(rare).collect();
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

fn interfaces(status: &proto::StatusReply) -> String {
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
            xdp(interface),
            interface.mac.clone(),
            mtu(interface),
            interface.addresses.join(" "),
        ]);
    }
    table.take()
}

/// Whether an interface can be used, or why not.
fn link(interface: &proto::InterfaceStatus) -> String {
    match (interface.up, interface.down.as_str()) {
        (true, "") => "up".to_owned(),
        (false, "") => "DOWN".to_owned(),
        (_, why) => format!("DOWN: {}", why.trim_start_matches("is ").trim_start_matches("has ")),
    }
}

/// What is captured there, and how often it wasn't.
fn xdp(interface: &proto::InterfaceStatus) -> String {
    let times = match interface.xdp_detached {
        0 => String::new(),
        1 => ", WAS OFF once".to_owned(),
        times => format!(", WAS OFF {times} times"),
    };
    let what = match interface.xdp.as_str() {
        "" => "-",
        "attached" => "attached",
        "missing" => "MISSING",
        other => return format!("REPLACED by {other}{times}"),
    };
    format!("{what}{times}")
}

/// The next hops that are probed; nothing where there are none.
fn next_hops(status: &proto::StatusReply) -> String {
    if status.next_hops.is_empty() {
        return String::new();
    }
    let mut table = Table::new([word("next hop"), word("interface"), word("answers"), number("last answer")]);
    for hop in &status.next_hops {
        let answers = match hop.state.as_str() {
            "up" => "yes",
            "down" => "NO",
            _ => "never yet",
        };
        let last = if hop.answered_ms_ago == 0 { "-".to_owned() } else { format!("{} ms ago", hop.answered_ms_ago) };
        table.row([hop.address.clone(), hop.interface.clone(), answers.to_owned(), last]);
    }
    table.take()
}

/// An MTU beyond what is received is named with what is.
fn mtu(interface: &proto::InterfaceStatus) -> String {
    let proto::InterfaceStatus { mtu, carried, .. } = interface;
    if carried < mtu { format!("{mtu} TOO LONG, {carried} at most") } else { mtu.to_string() }
}

fn sockets(status: &proto::StatusReply) -> String {
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

/// The device's figures, a line for each name, summed over workers.
fn figures(status: &proto::StatusReply) -> String {
    let mut names: Vec<(&str, Vec<(String, u64)>)> = Vec::new();
    for figure in &status.figures {
        let labels: Vec<&str> =
            figure.labels.iter().filter(|(name, _)| *name != "worker").map(|(_, value)| value.as_str()).collect();
        let labels = labels.join(" ");
        let at = names.iter().position(|(name, _)| *name == figure.name).unwrap_or_else(|| {
            names.push((&figure.name, Vec::new()));
            names.len() - 1
        });
        let values = &mut names[at].1;
        match values.iter_mut().find(|(known, _)| *known == labels) {
            Some((_, sum)) => *sum += figure.value,
            None => values.push((labels, figure.value)),
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

    fn figure(name: &str, labels: &[(&str, &str)], value: u64) -> proto::Figure {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        proto::Figure { name: name.to_owned(), labels, value }
    }

    #[test]
    fn figures_are_summed_over_workers_in_the_order_they_came() {
        let status = proto::StatusReply {
            figures: vec![
                figure("ring_losses", &[("worker", "0"), ("cause", "late")], 3),
                figure("ring_losses", &[("worker", "0"), ("cause", "early")], 1),
                figure("ring_losses", &[("worker", "1"), ("cause", "late")], 4),
                figure("frames", &[("place", "pool")], 100),
            ],
            ..Default::default()
        };
        assert_eq!(figures(&status), "ring_losses      late 7, early 1\nframes           pool 100\n");
    }

    #[test]
    fn what_is_known_to_be_inside_is_shown_in_eighty_columns() {
        let nets = |count: u8| (0..count).map(|n| format!("10.{n}.0.0/16")).collect();
        let lines = |cluster| {
            let lines = cluster_lines(cluster).into_iter().map(|(label, text)| format!("{label:<9} {text}\n"));
            lines.collect::<String>()
        };
        let mut known = proto::ClusterRanges { pods: nets(7), others: nets(1), drop_uncovered: true };
        let shown = lines(known.clone());
        let expected = "\
cluster   what no policy covers is dropped if it is from
            10.0.0.0/16 10.1.0.0/16 10.2.0.0/16 10.3.0.0/16 10.4.0.0/16
            10.5.0.0/16 10.6.0.0/16
          and inside are
            10.0.0.0/16
";
        assert_eq!(shown, expected);
        known.drop_uncovered = false;
        assert!(lines(known).starts_with("cluster   what no policy covers is LEFT TO THE KERNEL, also from\n"));
        assert!(lines(proto::ClusterRanges::default()).contains("no pod_cidrs"));
    }

    #[test]
    fn what_is_wrong_stands_out() {
        let mut status = proto::StatusReply {
            interfaces: vec![proto::InterfaceStatus { name: "gw-in".to_owned(), ..Default::default() }],
            policy: Some(proto::PolicyStatus {
                last_error: "a.yaml:3: spec: no\nb.yaml:4: spec: no".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let shown = text(&status);
        assert!(shown.contains("\nREJECTED  a.yaml:3: spec: no\n          b.yaml:4: spec: no\n"), "{shown}");
        assert!(shown.contains("NOT READY") && shown.contains("DOWN"), "{shown}");
        status.ready = true;
        status.interfaces[0].up = true;
        status.policy = None;
        let shown = text(&status);
        assert!(!shown.contains("NOT READY") && !shown.contains("DOWN") && !shown.contains("REJECTED"), "{shown}");
    }
}
