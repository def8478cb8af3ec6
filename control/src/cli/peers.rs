//! `vipgate peers`: every gateway on a line, what is wrong in capitals, and who decides who serves.

use std::fmt::Write;

use super::output::{harmless, json, print, span};
use super::show::{block_on, connect};
use super::table::{Table, number, word};
use super::{Ask, Format};
use crate::admin::proto::{Group, Link, Peer, PeersReply};
use crate::failure::Failure;

pub(super) fn run(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.peers().await?) })?;
    match asked.output {
        Format::Json => json(&reply),
        Format::Table => print(&harmless(&text(&reply))),
    }
}

fn text(reply: &PeersReply) -> String {
    if reply.peers.is_empty() {
        return "no Gateway has a manifest: this one is alone and owns everything\n".to_owned();
    }
    let group = reply.group.clone().unwrap_or_default();
    let mut out = String::new();
    // Writing to a String can't fail.
    let _ = writeln!(out, "serving   {}", serving(&group));
    let _ = writeln!(out, "decides   {}", decides(&group));
    let _ = writeln!(out, "lease     {}", lease(&group));
    if group.draining {
        let _ = writeln!(out, "DRAINING  this gateway is to stop serving; it has {} shares", group.shares);
    }
    if group.strangers > 0 {
        let _ = writeln!(out, "refused   {} connections of nobody known", group.strangers);
    }
    for text in tunnels(&group) {
        let _ = writeln!(out, "TUNNELS   {text}");
    }
    out.push('\n');
    let mut table = Table::new([
        word("gateway"),
        word("serving"),
        number("epoch"),
        word("link"),
        number("rtt"),
        word("tunnel"),
        word("copies"),
        number("sent"),
        number("taken"),
        number("queued"),
        word("reached at"),
        word("node").optional(),
        word("zone").optional(),
    ]);
    for peer in &reply.peers {
        table.row(row(peer));
    }
    out += &table.take();
    for peer in reply.peers.iter().filter(|peer| !peer.unable.is_empty()) {
        let _ = writeln!(out, "\nUNABLE    {}: {}", peer.name, peer.unable);
    }
    for (peer, link) in reply.peers.iter().filter_map(|peer| Some((peer, peer.link.as_ref()?))) {
        if !link.last_failure.is_empty() {
            let _ = writeln!(out, "\n{}: last failure of {}: {}", peer.name, link.failures, link.last_failure);
        }
    }
    out
}

fn row(peer: &Peer) -> [String; 13] {
    let unknown = || "-".to_owned();
    let of_link = |of: fn(&Link) -> String| peer.link.as_ref().map_or_else(unknown, of);
    let count = |of: fn(&Link) -> u64| peer.link.as_ref().map_or_else(unknown, |link| of(link).to_string());
    let reached = [&peer.reached_at, &peer.address].into_iter().find(|text| !text.is_empty());
    [
        peer.name.clone(),
        if peer.serving { "yes" } else { "NO" }.to_owned(),
        if peer.epoch == 0 && !peer.heard { unknown() } else { peer.epoch.to_string() },
        if peer.own { "this one".to_owned() } else { of_link(link) },
        of_link(rtt),
        tunnel(peer).to_owned(),
        of_link(copies),
        count(|link| link.copies_sent),
        count(|link| link.copies_taken),
        count(|link| link.copies_queued_bytes),
        reached.cloned().unwrap_or_else(unknown),
        peer.node.clone(),
        peer.zone.clone(),
    ]
}

/// How packets out of its tunnel are known.
fn tunnel(peer: &Peer) -> &'static str {
    match &*peer.tunnel {
        "authenticated" => "tags",
        "address" => "NO TAGS",
        "refused" => "REFUSED",
        _ => "-",
    }
}

fn link(link: &Link) -> String {
    match (link.up, link.was_up) {
        (true, _) => format!("up {}", span(link.since_ms)),
        (false, true) => format!("DOWN {}", span(link.since_ms)),
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

/// Which way copies are complete.
fn copies(link: &Link) -> String {
    match (link.in_sync_to, link.in_sync_from) {
        (true, true) => "both in sync",
        (true, false) => "to in sync, FROM BEHIND",
        (false, true) => "TO BEHIND, from in sync",
        (false, false) => "BOTH BEHIND",
    }
    .to_owned()
}

/// What is wrong with tunnels.
pub(super) fn tunnels(group: &Group) -> Vec<String> {
    let Group { tunnels_unauthenticated: without, tunnels_refused: refused, .. } = group;
    let mut lines = Vec::new();
    if *without > 0 {
        lines.push(format!("{without} of {} others show no key: their packets have no tags", others(group)));
    }
    if *refused > 0 {
        lines.push(format!("{refused} of {} others show no key: their packets are dropped", others(group)));
    }
    lines
}

fn others(group: &Group) -> u64 {
    group.members.saturating_sub(1)
}

/// How many serve, and whether this one does.
pub(super) fn serving(group: &Group) -> String {
    let own = if group.serving { "this one too" } else { "NOT THIS ONE" };
    let Group { members, members_serving, view, .. } = group;
    let view = if *view == 0 { String::new() } else { format!(", view {view}") };
    format!("{members_serving} of {members}, {own}{view}")
}

/// How the lease stands.
pub(super) fn lease(group: &Group) -> String {
    match &*group.lease {
        "held" => format!("held, {} ms left", group.lease_ms),
        "lapsed" if group.serving => "LAPSED: no new sessions until it is held again".to_owned(),
        "lapsed" => "none: this gateway doesn't serve".to_owned(),
        _ => "not needed".to_owned(),
    }
}

fn decides(group: &Group) -> &'static str {
    match &*group.decides {
        "server" => "the policy server",
        "lost" => "the policy server, which CAN'T BE HEARD now",
        "unknown" => "the policy server, perhaps: it was NOT HEARD yet",
        _ => "nobody: every gateway serves, and none stands in for another",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group() -> Group {
        Group { decides: "lost".to_owned(), lease: "lapsed".to_owned(), members: 3, ..Group::default() }
    }

    #[test]
    fn what_is_wrong_stands_out() {
        let mut group = Group { serving: true, members_serving: 1, view: 9, ..group() };
        assert_eq!(serving(&group), "1 of 3, this one too, view 9");
        assert!(lease(&group).starts_with("LAPSED") && decides(&group).contains("CAN'T BE HEARD"));
        group.serving = false;
        assert_eq!(serving(&group), "1 of 3, NOT THIS ONE, view 9");
        assert_eq!(lease(&group), "none: this gateway doesn't serve");
    }

    #[test]
    fn who_shows_no_key_stands_out() {
        let mut group = Group { members: 4, tunnels_unauthenticated: 1, ..group() };
        assert_eq!(tunnels(&group), ["1 of 3 others show no key: their packets have no tags"]);
        (group.tunnels_unauthenticated, group.tunnels_refused) = (0, 2);
        assert_eq!(tunnels(&group), ["2 of 3 others show no key: their packets are dropped"]);
        assert_eq!(tunnels(&Group::default()), [] as [&str; 0]);
        let of = |how: &str| tunnel(&Peer { tunnel: how.to_owned(), ..Peer::default() });
        assert_eq!(["authenticated", "address", "refused", ""].map(of), ["tags", "NO TAGS", "REFUSED", "-"]);
    }

    #[test]
    fn round_trips_read_well() {
        let of = |rtt_us| rtt(&Link { rtt_us, ..Link::default() });
        assert_eq!([of(0), of(7), of(9_999), of(10_000)], ["-", "7us", "9999us", "10ms"]);
    }
}
