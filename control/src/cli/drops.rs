//! `vipgate drops`: dropped packets by reason and by address or policy, with the last packet of each.

use std::collections::BTreeMap;

use clap::Args;
use serde::Serialize;

use super::show::{ask, print_table};
use super::table::{Table, number, word};
use super::{Format, QueryArgs};
use crate::admin::Request;
use crate::admin::drops::{Drop, DropExample, DropsOf, DropsReply};
use crate::command_error::CommandError;
use crate::output::{format_duration, json, print, sanitize};

/// Default limit of rows by address, those with most packets first.
const DEFAULT_ROWS: usize = 20;

/// Arguments of `vipgate drops`.
#[derive(Clone, Debug, Args)]
pub(super) struct Drops {
    #[command(flatten)]
    gateway: QueryArgs,
    /// Show reasons without drops, too, and all addresses
    #[arg(long)]
    all: bool,
    /// Show this reason only
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// Group by policy instead of by address
    #[arg(long)]
    by_policy: bool,
}

/// JSON form: the count of every reason under its name, then last packets, notes, and counts by address and by policy.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    packets: BTreeMap<&'a str, u64>,
    last: BTreeMap<&'a str, &'a DropExample>,
    notes: BTreeMap<&'a str, &'a [String]>,
    by_address: Vec<&'a DropsOf>,
    by_policy: BTreeMap<&'a str, BTreeMap<&'a str, u64>>,
}

pub(super) fn run(args: &Drops) -> Result<(), CommandError> {
    let mut reply: DropsReply = ask(&args.gateway, &Request::Drops)?;
    if let Some(requested) = &args.reason {
        if !reply.drops.iter().any(|drop| drop.reason == *requested) {
            let known: Vec<&str> = reply.drops.iter().map(|drop| drop.reason.as_str()).collect();
            return Err(CommandError::usage(format!(
                "\"{requested}\" is not a drop reason; known reasons: {}",
                known.join(", ")
            )));
        }
        reply.drops.retain(|drop| drop.reason == *requested);
        reply.by_address.retain(|of| of.reason == *requested);
    }
    if args.gateway.output == Format::Json {
        return json(&document(&reply));
    }
    let has_last = reply.drops.iter().any(|drop| drop.last.is_some());
    let mut columns = vec![word("reason"), number("packets"), word("description").optional()];
    columns.splice(2..2, has_last.then(|| word("last").optional()));
    let mut table = Table::new(columns);
    for drop in reply.drops.iter().filter(|drop| args.all || drop.packets > 0) {
        let mut row = vec![drop.reason.clone(), drop.packets.to_string(), drop.help.clone()];
        row.splice(2..2, has_last.then(|| last(drop)));
        table.row(row);
    }
    let has_drops = !table.is_empty();
    print_table(table, "no drops")?;
    for note in reply.drops.iter().flat_map(|drop| &drop.notes) {
        print(&format!("{}\n", sanitize(note)))?;
    }
    if !has_drops || reply.by_address.is_empty() {
        return Ok(());
    }
    print("\n")?;
    if args.by_policy { policies(&reply) } else { addresses(&reply, args.all) }
}

fn document(reply: &DropsReply) -> Document<'_> {
    Document {
        packets: reply.drops.iter().map(|drop| (drop.reason.as_str(), drop.packets)).collect(),
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

/// Packets by policy and reason; the name is empty for addresses without a policy.
fn by_policy(reply: &DropsReply) -> BTreeMap<&str, BTreeMap<&str, u64>> {
    let mut sums: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
    for of in &reply.by_address {
        *sums.entry(&of.policy).or_default().entry(&of.reason).or_default() += of.packets;
    }
    sums
}

fn policies(reply: &DropsReply) -> Result<(), CommandError> {
    let mut table = Table::new([word("policy"), word("reason"), number("packets")]);
    for (policy, reasons) in by_policy(reply) {
        for (reason, packets) in reasons {
            let policy = if policy.is_empty() { "(none)" } else { policy };
            table.row([policy.to_owned(), reason.to_owned(), packets.to_string()]);
        }
    }
    print_table(table, "no drops")
}

fn addresses(reply: &DropsReply, all: bool) -> Result<(), CommandError> {
    let mut table =
        Table::new([word("address"), word("reason"), number("packets"), word("last"), word("owner").optional()]);
    let shown = if all { usize::MAX } else { DEFAULT_ROWS };
    for of in reply.by_address.iter().take(shown) {
        let bound = if of.doubt == 0 { "" } else { "at most " };
        let owner: Vec<&str> = [of.name.as_str(), of.policy.as_str()].into_iter().filter(|it| !it.is_empty()).collect();
        table.row([
            of.address.clone(),
            of.reason.clone(),
            format!("{bound}{}", of.packets),
            example(&of.last),
            owner.join(", "),
        ]);
    }
    print_table(table, "no drops")?;
    match reply.by_address.len().checked_sub(shown) {
        Some(more @ 1..) => print(&format!("and {more} more; --all shows all\n")),
        _ => Ok(()),
    }
}

fn last(drop: &Drop) -> String {
    drop.last.as_ref().map(example).unwrap_or_default()
}

/// `12s ago: tcp 10.1.0.11:4000 -> 198.51.100.10:443 on gw-in`.
fn example(example: &DropExample) -> String {
    let DropExample { age_ms, interface, protocol, source, destination } = example;
    let packet = if protocol.is_empty() {
        "not an IP packet".to_owned()
    } else {
        format!("{protocol} {source} -> {destination}")
    };
    format!("{} ago: {packet} on {interface}", format_duration(*age_ms))
}
