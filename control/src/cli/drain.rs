//! `vipgate drain` and `undrain`: a gateway hands what it has to others, and takes it again.
//!
//! It stops serving only when those who stand in for it have copies of its sessions; so nothing is lost, and there may be
//! something to wait for.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::output::{self, harmless};
use super::show::{block_on, connect};
use super::table::{Table, number, word};
use super::{Ask, Format};
use crate::admin::proto::{DrainReply, Group, Move, Peer, PeersReply};
use crate::admin::{Client, ClientError};
use crate::failure::Failure;

/// How often it is looked at again while waiting.
const PACE: Duration = Duration::from_millis(100);

/// How to drain.
#[derive(Clone, Debug, Args)]
pub(super) struct Drain {
    #[command(flatten)]
    ask: Ask,
    /// Show which shares of VIPs would move to which gateways, and change nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    /// Wait at most so many seconds until other gateways serve everything; if they don't by then, fail
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
}

/// How to end it.
#[derive(Clone, Debug, Args)]
pub(super) struct Undrain {
    #[command(flatten)]
    ask: Ask,
    /// Wait at most so many seconds until the gateway serves again; if it doesn't by then, fail
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
}

/// How far it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Progress {
    gateway: String,
    done: bool,
    /// Whether the gateway has heard it.
    draining: bool,
    serving: bool,
    view: u64,
    /// Shares of VIPs that are still this gateway's, and sessions that it has live.
    shares: u64,
    sessions: u64,
    /// Who serves beside it.
    others: Vec<Other>,
    /// What it waits for; empty when it is done.
    waits_for: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Other {
    gateway: String,
    linked: bool,
    /// Whether it has copies of all sessions that it needs.
    in_sync: bool,
    /// The view up to which it knows that this gateway has let go, and told what it had.
    released: u64,
}

pub(super) fn drain(asked: &Drain) -> Result<(), Failure> {
    if asked.dry_run {
        let reply = block_on(async { Ok(connect(&asked.ask).await?.drain(true, true).await?) })?;
        return match asked.ask.output {
            Format::Json => output::json(&Plan::of(&reply)),
            Format::Table => output::print(&harmless(&plan(&reply))),
        };
    }
    order(&asked.ask, true, asked.wait)
}

pub(super) fn undrain(asked: &Undrain) -> Result<(), Failure> {
    order(&asked.ask, false, asked.wait)
}

fn order(ask: &Ask, draining: bool, wait: u64) -> Result<(), Failure> {
    let last = block_on(async {
        let mut client = connect(ask).await?;
        let name = client.status().name.clone();
        client.drain(draining, false).await?;
        Ok(follow(&mut client, ask.output, &name, draining, Duration::from_secs(wait)).await?)
    })?;
    if ask.output == Format::Json {
        output::json(&last)?;
    }
    if last.done {
        return Ok(());
    }
    let what = if draining { "has not handed over everything" } else { "does not serve again" };
    Err(Failure::runtime(format_args!("{} {what} within {wait} s: {}", last.gateway, harmless(&last.waits_for))))
}

/// Looks how far it is until it is done or time is over; in a table, says each change.
async fn follow(
    client: &mut Client,
    format: Format,
    name: &str,
    draining: bool,
    wait: Duration,
) -> Result<Progress, ClientError> {
    let until = Instant::now() + wait;
    let is_terminal = std::io::stdout().is_terminal();
    let mut said = String::new();
    loop {
        let progress = Progress::of(name, &client.peers().await?, draining);
        let is_over = progress.done || Instant::now() >= until;
        let left = until.saturating_duration_since(Instant::now()).as_secs();
        let line = match harmless(&progress.line(draining)) {
            // On a terminal one line counts down; elsewhere there is a line for each change.
            line if is_terminal && is_over => format!("\r\x1b[K{line}"),
            line if is_terminal => format!("\r\x1b[K{} ({left} s left)", line.trim_end()),
            line => line,
        };
        if format == Format::Table && line != said {
            // Who stops reading doesn't stop what was begun.
            let _ = output::put(&line);
            said = line;
        }
        if is_over {
            return Ok(progress);
        }
        tokio::time::sleep(PACE).await;
    }
}

impl Progress {
    fn of(name: &str, reply: &PeersReply, draining: bool) -> Self {
        let group = reply.group.clone().unwrap_or_default();
        let other = |peer: &Peer| Other {
            gateway: peer.name.clone(),
            linked: peer.link.as_ref().is_some_and(|link| link.up),
            in_sync: peer.link.as_ref().is_some_and(|link| link.up && link.in_sync_to),
            released: peer.link.as_ref().map_or(0, |link| link.released),
        };
        let others: Vec<Other> = reply.peers.iter().filter(|peer| peer.serving && !peer.own).map(other).collect();
        let waits_for = if draining { keeps(&group, &others) } else { lacks(&group, reply) };
        Self {
            gateway: name.to_owned(),
            done: waits_for.is_empty(),
            draining: group.draining,
            serving: group.serving,
            view: group.view,
            shares: group.shares,
            sessions: group.sessions,
            others,
            waits_for,
        }
    }

    fn line(&self, draining: bool) -> String {
        let Self { gateway, view, shares, sessions, waits_for, .. } = self;
        match (draining, self.done) {
            (true, true) => {
                format!(
                    "{gateway} serves no more (view {view}): no share is left here; {sessions} sessions are still open here\n"
                )
            }
            (true, false) => format!("{gateway} has {shares} shares and {sessions} sessions: {waits_for}\n"),
            (false, true) => format!("{gateway} serves (view {view}), with {shares} shares\n"),
            (false, false) => format!("{gateway} doesn't serve yet: {waits_for}\n"),
        }
    }
}

/// What keeps the gateway from being drained; empty: nothing.
fn keeps(group: &Group, others: &[Other]) -> String {
    let behind: Vec<&str> = others.iter().filter(|it| !it.in_sync).map(|it| &*it.gateway).collect();
    if !group.draining {
        "it has not taken the order yet".to_owned()
    } else if !group.serving && group.shares == 0 {
        // Who isn't linked takes over without having heard anything, when the lease has surely ended.
        let unaware = others.iter().filter(|it| it.linked && it.released < group.view);
        let unaware: Vec<&str> = unaware.map(|it| &*it.gateway).collect();
        if unaware.is_empty() {
            String::new()
        } else {
            format!("{} hasn't all that it has let go of yet", unaware.join(", "))
        }
    } else if others.is_empty() {
        "no other gateway serves, so it goes on".to_owned()
    } else if !group.serving {
        "it serves no more, but its workers still act by the view before".to_owned()
    } else if group.decides != "server" {
        "the policy server can't be heard, and it decides who serves".to_owned()
    } else if !behind.is_empty() {
        format!("{} hasn't copies of all its sessions yet", behind.join(", "))
    } else {
        "the others have everything; the policy server is to say that it serves no more".to_owned()
    }
}

/// What the gateway lacks to serve; empty: nothing.
fn lacks(group: &Group, reply: &PeersReply) -> String {
    let is_behind =
        |peer: &&Peer| !peer.own && peer.serving && !peer.link.as_ref().is_some_and(|it| it.up && it.in_sync_from);
    let behind: Vec<&str> = reply.peers.iter().filter(is_behind).map(|peer| &*peer.name).collect();
    if group.draining {
        "it has not taken the order yet".to_owned()
    } else if group.serving {
        String::new()
    } else if group.decides != "server" {
        "the policy server can't be heard, and it decides who serves".to_owned()
    } else if !behind.is_empty() {
        format!("it hasn't copies of all sessions of {} yet", behind.join(", "))
    } else {
        "it has everything; the policy server is to say that it serves".to_owned()
    }
}

/// What a dry run says.
#[derive(Debug, Serialize)]
struct Plan<'a> {
    moves: &'a [Move],
    /// Moves, and endpoints that go with them, by who would serve them; nobody is empty.
    totals: BTreeMap<&'a str, Total>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Total {
    shares: u64,
    endpoints: u64,
}

impl<'a> Plan<'a> {
    fn of(reply: &'a DrainReply) -> Self {
        let mut totals: BTreeMap<&str, Total> = BTreeMap::new();
        for it in &reply.moves {
            let total = totals.entry(&it.to).or_default();
            total.shares += 1;
            total.endpoints += it.endpoints;
        }
        Self { moves: &reply.moves, totals }
    }
}

fn plan(reply: &DrainReply) -> String {
    if reply.moves.is_empty() {
        return "nothing would move: the gateway has no shares\n".to_owned();
    }
    let name = |name: &str| if name.is_empty() { "NOBODY".to_owned() } else { name.to_owned() };
    let mut table = Table::new([word("vip"), word("home"), word("would move to"), number("endpoints")]);
    for it in &reply.moves {
        table.row([it.vip.clone(), it.home.clone(), name(&it.to), it.endpoints.to_string()]);
    }
    let mut out = table.take();
    out.push('\n');
    for (to, Total { shares, endpoints }) in Plan::of(reply).totals {
        // Writing to a String can't fail.
        let _ = writeln!(out, "{shares} shares with {endpoints} endpoints would move to {}", name(to));
    }
    out += "nothing was changed\n";
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(draining: bool, serving: bool, shares: u64) -> Group {
        Group { draining, serving, shares, decides: "server".to_owned(), ..Group::default() }
    }

    fn other(in_sync: bool) -> Other {
        Other { gateway: "gw-b".to_owned(), linked: true, in_sync, released: 0 }
    }

    #[test]
    fn it_says_what_it_waits_for() {
        let of = |group: Group, others: &[Other]| keeps(&group, others);
        assert_eq!(of(group(false, true, 1), &[other(true)]), "it has not taken the order yet");
        assert_eq!(of(group(true, true, 1), &[]), "no other gateway serves, so it goes on");
        assert_eq!(of(group(true, true, 1), &[other(false)]), "gw-b hasn't copies of all its sessions yet");
        assert!(of(group(true, true, 1), &[other(true)]).starts_with("the others have everything"));
        assert!(
            of(Group { decides: "lost".to_owned(), ..group(true, true, 1) }, &[other(true)]).contains("can't be heard")
        );
        assert!(of(group(true, false, 1), &[other(true)]).contains("workers"));
        assert_eq!(of(group(true, false, 0), &[other(true)]), "", "done");
        let told = Group { view: 3, ..group(true, false, 0) };
        assert_eq!(of(told.clone(), &[other(true)]), "gw-b hasn't all that it has let go of yet");
        assert_eq!(of(told.clone(), &[Other { linked: false, ..other(true) }]), "", "it goes by time");
        assert_eq!(of(told, &[Other { released: 3, ..other(true) }]), "", "done");
    }
}
