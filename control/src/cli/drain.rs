//! `vipgate drain` and `vipgate undrain`: hand the gateway's shards to other gateways, and back.
//!
//! A draining gateway stays active until its standby gateways have all its sessions, so none is lost; the command waits
//! for that.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::show::{ask, block_on, connect};
use super::table::{Table, number, word};
use super::{Format, QueryArgs};
use crate::admin::membership::{DrainReply, Group, Move, Peer, PeersReply};
use crate::admin::{Client, ClientError, Request};
use crate::command_error::CommandError;
use crate::output;
use crate::output::{format_count, sanitize};

/// Poll interval while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Arguments of `vipgate drain`.
#[derive(Clone, Debug, Args)]
pub(super) struct Drain {
    #[command(flatten)]
    gateway: QueryArgs,
    /// Show the VIP shards that would move and their new owners; change nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    /// Timeout in seconds: fail unless other gateways own all shards by then
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
}

/// Arguments of `vipgate undrain`.
#[derive(Clone, Debug, Args)]
pub(super) struct Undrain {
    #[command(flatten)]
    gateway: QueryArgs,
    /// Timeout in seconds: fail unless the gateway is active by then
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
}

/// Progress of a drain or undrain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Progress {
    gateway: String,
    done: bool,
    /// Whether the gateway has processed the order.
    draining: bool,
    serving: bool,
    view: u64,
    /// VIP shards that this gateway still owns, and its active sessions.
    shares: u64,
    sessions: u64,
    /// Other active gateways.
    others: Vec<Other>,
    /// Reason for waiting; empty when done, or refused.
    waits_for: String,
    /// Why the policy server has refused the drain; empty: it hasn't.
    refused: String,
}

/// An order to drain or undrain.
struct Order {
    /// Name of the gateway.
    name: String,
    draining: bool,
    /// Drains that were refused before it.
    refused: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Other {
    gateway: String,
    linked: bool,
    /// Whether all sessions are replicated to it.
    in_sync: bool,
    /// The membership view up to which this gateway has released its shards to it.
    released: u64,
}

pub(super) fn drain(args: &Drain) -> Result<(), CommandError> {
    if args.dry_run {
        let reply: DrainReply = ask(&args.gateway, &Request::Drain { draining: true, dry_run: true })?;
        return match args.gateway.output {
            Format::Json => output::json(&DryRun::of(&reply)),
            Format::Table => output::print(&sanitize(&dry_run(&reply))),
        };
    }
    order(&args.gateway, true, args.wait)
}

pub(super) fn undrain(args: &Undrain) -> Result<(), CommandError> {
    order(&args.gateway, false, args.wait)
}

fn order(gateway: &QueryArgs, draining: bool, wait: u64) -> Result<(), CommandError> {
    let last = block_on(async {
        let mut client = connect(gateway).await?;
        let reply: DrainReply = client.ask(&Request::Drain { draining, dry_run: false }).await?;
        let order = Order { name: client.name().to_owned(), draining, refused: reply.drains_refused };
        Ok(follow(&mut client, gateway.output, &order, Duration::from_secs(wait)).await?)
    })?;
    if gateway.output == Format::Json {
        output::json(&last)?;
    }
    if last.done {
        return Ok(());
    }
    if !last.refused.is_empty() {
        let reason = sanitize(&last.refused);
        return Err(CommandError::runtime(format!("{} is not drained and stays active: {reason}", last.gateway)));
    }
    let what = if draining { "is not drained" } else { "is not active" };
    Err(CommandError::runtime(format!("{} {what} after {wait} s: {}", last.gateway, sanitize(&last.waits_for))))
}

/// Polls the progress until it is done or the timeout expires; prints each change in table format.
async fn follow(client: &mut Client, format: Format, order: &Order, wait: Duration) -> Result<Progress, ClientError> {
    let deadline = Instant::now() + wait;
    let is_terminal = std::io::stdout().is_terminal();
    let mut last_line = String::new();
    loop {
        let progress = Progress::of(order, &client.ask(&Request::Peers).await?);
        let is_over = progress.done || !progress.refused.is_empty() || Instant::now() >= deadline;
        let left = deadline.saturating_duration_since(Instant::now()).as_secs();
        let line = match sanitize(&progress.line(order.draining)) {
            // On a terminal, one line counts down; elsewhere, each change is a new line.
            line if is_terminal && is_over => format!("\r\x1b[K{line}"),
            line if is_terminal => format!("\r\x1b[K{} ({left} s left)", line.trim_end()),
            line => line,
        };
        if format == Format::Table && line != last_line {
            // A closed pipe doesn't cancel the order.
            let _ = output::put(&line);
            last_line = line;
        }
        if is_over {
            return Ok(progress);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

impl Progress {
    fn of(order: &Order, reply: &PeersReply) -> Self {
        let group = &reply.group;
        let draining = order.draining;
        let is_refused = draining && group.drains_refused > order.refused;
        let other = |peer: &Peer| Other {
            gateway: peer.name.clone(),
            linked: peer.link.as_ref().is_some_and(|link| link.up),
            in_sync: peer.link.as_ref().is_some_and(|link| link.up && link.in_sync_to),
            released: peer.link.as_ref().map_or(0, |link| link.released),
        };
        let others: Vec<Other> = reply.peers.iter().filter(|peer| peer.serving && !peer.own).map(other).collect();
        let waits_for = if draining { drain_blocker(group, &others) } else { undrain_blocker(group, reply) };
        Self {
            gateway: order.name.clone(),
            done: waits_for.is_empty() && !is_refused,
            draining: group.draining,
            serving: group.serving,
            view: group.view,
            shares: group.shares,
            sessions: group.sessions,
            others,
            waits_for: if is_refused { String::new() } else { waits_for },
            refused: if is_refused { group.drain_refused.clone() } else { String::new() },
        }
    }

    fn line(&self, draining: bool) -> String {
        let Self { gateway, view, shares, sessions, waits_for, .. } = self;
        match (draining, self.done) {
            _ if !self.refused.is_empty() => format!("{gateway} stays active: its drain is REFUSED\n"),
            (true, true) => {
                format!(
                    "{gateway} is drained (view {view}): it owns no shards; {sessions} sessions are still open here\n"
                )
            }
            (true, false) => format!("{gateway} owns {shares} shards and has {sessions} sessions: {waits_for}\n"),
            (false, true) => format!("{gateway} is active (view {view}) and owns {shares} shards\n"),
            (false, false) => format!("{gateway} is not active yet: {waits_for}\n"),
        }
    }
}

/// What a drain still waits for; empty: it is complete.
fn drain_blocker(group: &Group, others: &[Other]) -> String {
    let behind: Vec<&str> = others.iter().filter(|it| !it.in_sync).map(|it| &*it.gateway).collect();
    if !group.draining {
        "the order is not processed yet".to_owned()
    } else if !group.serving && group.shares == 0 {
        // Gateways without a link take over when the lease has certainly expired.
        let behind = others.iter().filter(|it| it.linked && it.released < group.view);
        let behind: Vec<&str> = behind.map(|it| &*it.gateway).collect();
        if behind.is_empty() {
            String::new()
        } else {
            format!("{} has not received all released shards yet", behind.join(", "))
        }
    } else if !group.drain_waits_for.is_empty() {
        group.drain_waits_for.clone()
    } else if others.is_empty() {
        "no other gateway is active, so it stays active".to_owned()
    } else if !group.serving {
        "it is inactive, but its workers still use the previous view".to_owned()
    } else if group.decides != "server" {
        "the policy server, which manages membership, is unreachable".to_owned()
    } else if !behind.is_empty() {
        format!("{} has not received all its sessions yet", behind.join(", "))
    } else {
        "all its sessions are replicated; waiting for the policy server to deactivate it".to_owned()
    }
}

/// What an undrain still waits for; empty: it is complete.
fn undrain_blocker(group: &Group, reply: &PeersReply) -> String {
    let is_behind =
        |peer: &&Peer| !peer.own && peer.serving && !peer.link.as_ref().is_some_and(|it| it.up && it.in_sync_from);
    let behind: Vec<&str> = reply.peers.iter().filter(is_behind).map(|peer| &*peer.name).collect();
    if group.draining {
        "the order is not processed yet".to_owned()
    } else if group.serving {
        String::new()
    } else if group.decides != "server" {
        "the policy server, which manages membership, is unreachable".to_owned()
    } else if !behind.is_empty() {
        format!("it has not received all sessions of {} yet", behind.join(", "))
    } else {
        "it has received all sessions; waiting for the policy server to activate it".to_owned()
    }
}

/// JSON form of a dry run.
#[derive(Debug, Serialize)]
struct DryRun<'a> {
    moves: &'a [Move],
    /// Shards and endpoints that would move, by new owner; empty name: none.
    totals: BTreeMap<&'a str, Total>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Total {
    shares: u64,
    endpoints: u64,
}

impl<'a> DryRun<'a> {
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

fn dry_run(reply: &DrainReply) -> String {
    if reply.moves.is_empty() {
        return "nothing would move: the gateway owns no shards\n".to_owned();
    }
    let name = |name: &str| if name.is_empty() { "NONE".to_owned() } else { name.to_owned() };
    let mut table = Table::new([word("vip"), word("home"), word("would move to"), number("endpoints")]);
    for it in &reply.moves {
        table.row([it.vip.clone(), it.home.clone(), name(&it.to), it.endpoints.to_string()]);
    }
    let mut out = table.take();
    out.push('\n');
    for (to, Total { shares, endpoints }) in DryRun::of(reply).totals {
        // Writing to a String can't fail.
        let (shards, endpoints) = (format_count(shares, "shard"), format_count(endpoints, "endpoint"));
        let _ = writeln!(out, "{shards} with {endpoints} would move to {}", name(to));
    }
    let refused = reply.moves.iter().filter(|it| it.to.is_empty()).count() as u64;
    if refused > 0 {
        let shards = format_count(refused, "shard");
        let _ = writeln!(out, "the policy server would refuse the drain: no gateway could take over {shards}");
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
    fn a_drain_names_what_it_waits_for() {
        let of = |group: Group, others: &[Other]| drain_blocker(&group, others);
        assert_eq!(of(group(false, true, 1), &[other(true)]), "the order is not processed yet");
        assert_eq!(of(group(true, true, 1), &[]), "no other gateway is active, so it stays active");
        assert_eq!(of(group(true, true, 1), &[other(false)]), "gw-b has not received all its sessions yet");
        assert!(of(group(true, true, 1), &[other(true)]).starts_with("all its sessions are replicated"));
        assert!(
            of(Group { decides: "lost".to_owned(), ..group(true, true, 1) }, &[other(true)]).contains("unreachable")
        );
        assert!(of(group(true, false, 1), &[other(true)]).contains("workers"));
        assert_eq!(of(group(true, false, 0), &[other(true)]), "", "done");
        let released = Group { view: 3, ..group(true, false, 0) };
        assert_eq!(of(released.clone(), &[other(true)]), "gw-b has not received all released shards yet");
        assert_eq!(of(released.clone(), &[Other { linked: false, ..other(true) }]), "", "the lease decides");
        assert_eq!(of(released, &[Other { released: 3, ..other(true) }]), "", "done");
    }
}
