//! `vipgate drops`: what was dropped, why, of whom, and the last packet of each.

use std::collections::BTreeMap;

use clap::Args;
use serde::Serialize;

use super::output::{harmless, json, print, span};
use super::show::{block_on, connect, show};
use super::table::{Table, number, word};
use super::{Ask, Format};
use crate::admin::proto::{Drop, DropExample, DropsOf, DropsReply};
use crate::failure::Failure;

/// Rows of those that were dropped most.
const SCREENFUL: usize = 20;

/// What to show.
#[derive(Clone, Debug, Args)]
pub(super) struct Drops {
    #[command(flatten)]
    ask: Ask,
    /// Show reasons without drops, too, and everybody whose packets were dropped
    #[arg(long)]
    all: bool,
    /// Only this reason
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// By policy, instead of by address
    #[arg(long)]
    by_policy: bool,
}

/// Drops for programs: the count of every reason under its name, and beside them what they mean, the last of each, and those of whom most
/// were dropped.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    packets: BTreeMap<&'a str, u64>,
    help: BTreeMap<&'a str, &'a str>,
    last: BTreeMap<&'a str, &'a DropExample>,
    notes: BTreeMap<&'a str, &'a [String]>,
    by_address: Vec<&'a DropsOf>,
    by_policy: BTreeMap<&'a str, BTreeMap<&'a str, u64>>,
}

pub(super) fn run(asked: &Drops) -> Result<(), Failure> {
    let mut reply = block_on(async { Ok(connect(&asked.ask).await?.drops().await?) })?;
    if let Some(wanted) = &asked.reason {
        if !reply.drops.iter().any(|drop| drop.reason == *wanted) {
            let known: Vec<&str> = reply.drops.iter().map(|drop| drop.reason.as_str()).collect();
            return Err(Failure::usage(format_args!("\"{wanted}\" is no drop reason; there are {}", known.join(", "))));
        }
        reply.drops.retain(|drop| drop.reason == *wanted);
        reply.by_address.retain(|of| of.reason == *wanted);
    }
    if asked.ask.output == Format::Json {
        return json(&document(&reply));
    }
    let has_last = reply.drops.iter().any(|drop| drop.last.is_some());
    let mut columns = vec![word("reason"), number("packets"), word("meaning").optional()];
    columns.splice(2..2, has_last.then(|| word("last").optional()));
    let mut table = Table::new(columns);
    for drop in reply.drops.iter().filter(|drop| asked.all || drop.packets > 0) {
        let mut row = vec![drop.reason.clone(), drop.packets.to_string(), drop.help.clone()];
        row.splice(2..2, has_last.then(|| last(drop)));
        table.row(row);
    }
    let any = !table.is_empty();
    show(table, "no drops")?;
    for note in reply.drops.iter().flat_map(|drop| &drop.notes) {
        print(&format!("{}\n", harmless(note)))?;
    }
    if !any || reply.by_address.is_empty() {
        return Ok(());
    }
    print("\n")?;
    if asked.by_policy { policies(&reply) } else { addresses(&reply, asked.all) }
}

fn document(reply: &DropsReply) -> Document<'_> {
    Document {
        packets: reply.drops.iter().map(|drop| (drop.reason.as_str(), drop.packets)).collect(),
        help: reply.drops.iter().map(|drop| (drop.reason.as_str(), drop.help.as_str())).collect(),
        last: reply.drops.iter().filter_map(|drop| Some((drop.reason.as_str(), drop.last.as_ref()?))).collect(),
        notes: reply
            .drops
            .iter()
            .filter(|drop| !drop.notes.is_empty())
            .map(|drop| (drop.reason.as_str(), drop.notes.as_slice()))
            .collect(),
        by_address: reply.by_address.iter().collect(),
        by_policy: by_policy(reply),
    }
}

/// Sums over the endpoints of each policy; without a policy under an empty name.
fn by_policy(reply: &DropsReply) -> BTreeMap<&str, BTreeMap<&str, u64>> {
    let mut sums: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
    for of in &reply.by_address {
        *sums.entry(&of.policy).or_default().entry(&of.reason).or_default() += of.packets;
    }
    sums
}

fn policies(reply: &DropsReply) -> Result<(), Failure> {
    let mut table = Table::new([word("policy"), word("reason"), number("packets")]);
    for (policy, reasons) in by_policy(reply) {
        for (reason, packets) in reasons {
            let policy = if policy.is_empty() { "(none)" } else { policy };
            table.row([policy.to_owned(), reason.to_owned(), packets.to_string()]);
        }
    }
    show(table, "no drops")
}

fn addresses(reply: &DropsReply, all: bool) -> Result<(), Failure> {
    let mut table =
        Table::new([word("address"), word("reason"), number("packets"), word("last"), word("whose").optional()]);
    let shown = if all { usize::MAX } else { SCREENFUL };
    for of in reply.by_address.iter().take(shown) {
        let doubt = if of.doubt == 0 { "" } else { "at most " };
        let last = of.last.as_ref().map(example).unwrap_or_default();
        let whose: Vec<&str> = [of.name.as_str(), of.policy.as_str()].into_iter().filter(|it| !it.is_empty()).collect();
        table.row([of.address.clone(), of.reason.clone(), format!("{doubt}{}", of.packets), last, whose.join(", ")]);
    }
    show(table, "no drops")?;
    match reply.by_address.len().checked_sub(shown) {
        Some(more @ 1..) => print(&format!("and {more} more: --all shows them\n")),
        _ => Ok(()),
    }
}

fn last(drop: &Drop) -> String {
    drop.last.as_ref().map(example).unwrap_or_default()
}

/// `12s ago: tcp 10.1.0.11:4000 -> 198.51.100.10:443 on gw-in`.
fn example(example: &DropExample) -> String {
    let DropExample { age_ms, interface, protocol, source, destination } = example;
    let packet =
        if protocol.is_empty() { "no IP packet".to_owned() } else { format!("{protocol} {source} -> {destination}") };
    format!("{} ago: {packet} on {interface}", span(*age_ms))
}
