//! `vipgate peers`: membership and every gateway on a line; faults in capitals.

use std::fmt::Write;

use super::show::ask;
use super::table::{Table, number, word};
use super::{Format, QueryArgs};
use crate::admin::Request;
use crate::admin::membership::{Group, Link, Peer, PeersReply};
use crate::command_error::CommandError;
use crate::output::{format_duration, json, print, sanitize};

pub(super) fn run(args: &QueryArgs) -> Result<(), CommandError> {
    let reply: PeersReply = ask(args, &Request::Peers)?;
    match args.output {
        Format::Json => json(&reply),
        Format::Table => print(&sanitize(&text(&reply))),
    }
}

/// Why a drain waits, or was refused: labels and texts.
pub(super) fn drain_lines(group: &Group) -> Vec<(&'static str, &str)> {
    let lines = [("drain", &group.drain_waits_for), ("REFUSED", &group.drain_refused)];
    lines.into_iter().filter(|(_, text)| !text.is_empty()).map(|(label, text)| (label, &**text)).collect()
}

fn text(reply: &PeersReply) -> String {
    if reply.peers.is_empty() {
        return "no VipGateway manifests: this gateway is standalone and owns all VIPs\n".to_owned();
    }
    let group = &reply.group;
    let mut out = String::new();
    // Writing to a String can't fail.
    let _ = writeln!(out, "members   {}", active_summary(group));
    let _ = writeln!(out, "authority {}", authority(group));
    let _ = writeln!(out, "lease     {}", lease_text(group));
    if group.draining {
        let _ = writeln!(out, "DRAINING  this gateway owns {} shards", group.shares);
    }
    for (label, text) in drain_lines(group) {
        let _ = writeln!(out, "{label:<9} {text}");
    }
    if group.unauthenticated_peers > 0 {
        let _ = writeln!(out, "refused   {} connections of unauthenticated peers", group.unauthenticated_peers);
    }
    for text in tunnel_faults(group) {
        let _ = writeln!(out, "TUNNELS   {text}");
    }
    out.push('\n');
    let mut table = Table::new([
        word("gateway"),
        word("active"),
        number("epoch"),
        word("link"),
        number("rtt"),
        word("tunnel"),
        word("replication"),
        number("sent"),
        number("received"),
        number("queued"),
        word("address"),
        word("node").optional(),
        word("zone").optional(),
    ]);
    for peer in &reply.peers {
        table.row(row(peer));
    }
    out += &table.take();
    for peer in reply.peers.iter().filter(|peer| !peer.unable.is_empty()) {
        let _ = writeln!(out, "\nFAULT     {}: {}", peer.name, peer.unable);
    }
    for (peer, link) in reply.peers.iter().filter_map(|peer| Some((peer, peer.link.as_ref()?))) {
        if !link.last_failure.is_empty() {
            let _ =
                writeln!(out, "\n{}: {} link failures, the last one: {}", peer.name, link.failures, link.last_failure);
        }
    }
    out
}

fn row(peer: &Peer) -> [String; 13] {
    let unknown = || "-".to_owned();
    let of_link = |of: fn(&Link) -> String| peer.link.as_ref().map_or_else(unknown, of);
    let count = |of: fn(&Link) -> u64| peer.link.as_ref().map_or_else(unknown, |link| of(link).to_string());
    let address = [&peer.reached_at, &peer.address].into_iter().find(|text| !text.is_empty());
    [
        peer.name.clone(),
        if peer.serving { "yes" } else { "NO" }.to_owned(),
        if peer.epoch == 0 && !peer.heartbeat_received { unknown() } else { peer.epoch.to_string() },
        if peer.own { "self".to_owned() } else { of_link(link) },
        of_link(rtt),
        tunnel(peer).to_owned(),
        of_link(replication),
        count(|link| link.records_sent),
        count(|link| link.records_applied),
        count(|link| link.queued_bytes),
        address.cloned().unwrap_or_else(unknown),
        peer.node.clone(),
        peer.zone.clone(),
    ]
}

/// Authentication of its tunnel packets.
fn tunnel(peer: &Peer) -> &'static str {
    match &*peer.tunnel {
        "authenticated" => "authenticated",
        "address" => "UNAUTHENTICATED",
        "refused" => "REFUSED",
        _ => "-",
    }
}

fn link(link: &Link) -> String {
    match (link.up, link.was_up) {
        (true, _) => format!("up {}", format_duration(link.since_ms)),
        (false, true) => format!("DOWN {}", format_duration(link.since_ms)),
        (false, false) => "NEVER UP".to_owned(),
    }
}

fn rtt(link: &Link) -> String {
    match link.rtt_us {
        0 => "-".to_owned(),
        us @ 1..10_000 => format!("{us}us"),
        us => format!("{}ms", us / 1000),
    }
}

/// Replication state in both directions.
fn replication(link: &Link) -> String {
    match (link.in_sync_to, link.in_sync_from) {
        (true, true) => "in sync",
        (true, false) => "RECEIVED BEHIND",
        (false, true) => "SENT BEHIND",
        (false, false) => "BOTH BEHIND",
    }
    .to_owned()
}

/// Tunnel authentication faults.
pub(super) fn tunnel_faults(group: &Group) -> Vec<String> {
    let Group { tunnels_unauthenticated, tunnels_refused, .. } = group;
    let mut lines = Vec::new();
    if *tunnels_unauthenticated > 0 {
        lines.push(format!(
            "{tunnels_unauthenticated} of {} peers have no key: their packets are not authenticated",
            others(group)
        ));
    }
    if *tunnels_refused > 0 {
        lines.push(format!("{tunnels_refused} of {} peers have no key: their packets are dropped", others(group)));
    }
    lines
}

fn others(group: &Group) -> u64 {
    group.members.saturating_sub(1)
}

/// Number of active members, whether this one is active, and the view.
pub(super) fn active_summary(group: &Group) -> String {
    let own = if group.serving { "this one included" } else { "NOT THIS ONE" };
    let Group { members, members_serving, view, .. } = group;
    let view = if *view == 0 { String::new() } else { format!(", view {view}") };
    format!("{members_serving} of {members} active, {own}{view}")
}

/// State of the lease.
pub(super) fn lease_text(group: &Group) -> String {
    match &*group.lease {
        "renewed" => format!("renewed, {} ms left", group.lease_ms),
        "expired" if group.serving => "EXPIRED: no new sessions until it is renewed".to_owned(),
        "expired" => "none: this gateway is not active".to_owned(),
        _ => "not needed".to_owned(),
    }
}

fn authority(group: &Group) -> &'static str {
    match &*group.decides {
        "server" => "policy server",
        "lost" => "policy server, UNREACHABLE",
        "unknown" => "policy server, NOT REACHED yet",
        _ => "none (view_fixed): every gateway is active, without failover",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group() -> Group {
        Group { decides: "lost".to_owned(), lease: "expired".to_owned(), members: 3, ..Group::default() }
    }

    #[test]
    fn faults_are_in_capitals() {
        let mut group = Group { serving: true, members_serving: 1, view: 9, ..group() };
        assert_eq!(active_summary(&group), "1 of 3 active, this one included, view 9");
        assert!(lease_text(&group).starts_with("EXPIRED") && authority(&group).contains("UNREACHABLE"));
        group.serving = false;
        assert_eq!(active_summary(&group), "1 of 3 active, NOT THIS ONE, view 9");
        assert_eq!(lease_text(&group), "none: this gateway is not active");
    }

    #[test]
    fn unauthenticated_tunnels_are_in_capitals() {
        let mut group = Group { members: 4, tunnels_unauthenticated: 1, ..group() };
        assert_eq!(tunnel_faults(&group), ["1 of 3 peers have no key: their packets are not authenticated"]);
        (group.tunnels_unauthenticated, group.tunnels_refused) = (0, 2);
        assert_eq!(tunnel_faults(&group), ["2 of 3 peers have no key: their packets are dropped"]);
        assert_eq!(tunnel_faults(&Group::default()), [] as [&str; 0]);
        let of = |state: &str| tunnel(&Peer { tunnel: state.to_owned(), ..Peer::default() });
        assert_eq!(
            ["authenticated", "address", "refused", ""].map(of),
            ["authenticated", "UNAUTHENTICATED", "REFUSED", "-"]
        );
    }

    #[test]
    fn round_trip_times_have_units() {
        let of = |rtt_us| rtt(&Link { rtt_us, ..Link::default() });
        assert_eq!([of(0), of(7), of(9_999), of(10_000)], ["-", "7us", "9999us", "10ms"]);
    }
}
